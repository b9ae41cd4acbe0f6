"""What the package's root promises: its names, and that importing it does nothing."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import django_distlock
from django_distlock import distlock
from django_distlock.conf import BackendConfig
from django_distlock.views import locked_view

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs/reference/api.md").read_text()

PUBLIC = [
    "BackendUnavailable",
    "FenceRejected",
    "Holder",
    "InvalidArgument",
    "InvalidLockBackend",
    "Lease",
    "Lock",
    "LockError",
    "LockInfo",
    "LockLost",
    "LockNotAcquired",
    "LockUsageError",
    "Retry",
    "RunScope",
    "asingle_flight",
    "atransaction_lock",
    "current_lease",
    "default_lock_backend",
    "distlock",
    "distlock_all",
    "hashed_key",
    "held_keys",
    "leader",
    "leader_of",
    "lock_backends",
    "single_flight",
    "transaction_lock",
    "transaction_locked",
]

#: What a user sees of a lock, and of a lease. Whatever else they have begins with an underscore.
LOCK = """
    aacquire acquire alocked atry_acquire backend basic heartbeat hold key locked max_lifetime
    metadata min_hold on_conflict on_lost permits reentrant retry shared steal_if_dead try_acquire
    ttl wait
"""
LEASE = """
    acquired_at adowngrade aextend afenced arelease atomic backend check deadline downgrade dump
    expires_at extend fence fence_token fenced guard held holder is_lost is_released key load
    on_danger on_lost release remaining shared stop_requested token ttl
"""
#: What the documentation imports, and settings name, beside the root.
PATHS = {
    "backends.advisory": "AdvisoryBackend",
    "backends.base": "BaseLockBackend",
    "backends.database": "DatabaseBackend",
    "backends.memory": "MemoryBackend",
    "backends.redis": "RedisBackend",
    "compat.bridge": "DatabaseBackend RedisBackend",
    "compat.old": "OldAdvisoryLock OldCacheAdd OldLock OldRedisLock",
    "compat.pglock": "Raise Return Skip advisory advisory_lock async_advisory_lock",
    "compat.redis": "Lock LockMixin",
    "contrib.celery": "LockedTask locked_task",
    "contrib.celery.scheduler": "DistlockScheduler",
    "contrib.monitoring.urls": "urlpatterns",
    "contrib.opentelemetry": "install uninstall",
    "contrib.prometheus": "install scrape_registry uninstall",
    "contrib.tasks": "locked_task",
    "core.errors": "BackendUnavailable LockLost LockNotAcquired",
    "core.records": "UNKNOWN Contended Counter Holder Page Record lease_ends next_fence",
    "exceptions": """
        BackendUnavailable FenceRejected InvalidArgument InvalidLockBackend LockError LockLost
        LockNotAcquired LockUsageError
    """,
    "fencing": """
        EnforceFence Fence FenceField Fenced FencedManager FencedModel FencedQuerySet RelaxFence
    """,
    "fencing.http": """
        BadFence FenceJump FenceMiddleware fence_header fence_required read_fence_header
    """,
    "fencing.redis": "FencedValue",
    "idempotency": "idempotent",
    "inspection": """
        Failure HeldKey KeyView LockInfo LockPage Operation Outcome Pruned Result State
        Statistics Summary aowns cleanup expire_soon force_release get_by_key get_by_token
        list_locks may own_key owns pause prune_events prune_responses request_stop resume show
        statistics summary
    """,
    "management.locked": "LockedCommand",
    "models": "FailedTask FenceCounter HeldLock LockEvent RunNote SeenFence StoredResponse Waiter",
    "process.heartbeat": "heartbeat_of",
    "scheduling": "RunScope Skipped scheduled",
    "signals": """
        fence_rejected lock_acquired lock_bypassed lock_extended lock_forced lock_lost
        lock_not_acquired lock_operated lock_released lock_taken_over work_requeued work_skipped
    """,
    "testing": """
        Locks MemoryLocks advance assert_locked assert_not_locked expire hold lose_connection
        memory_locks simulate_pause steal
    """,
    "testing.contract": "BackendContract",
    "views": "LockedViewMixin locked_view",
}
#: The same of modules that need an app which these tests have not.
WITH_APPS = {
    "admin": "FenceCounterAdmin LockDashboard LockEventAdmin",
    "contrib.celery.scheduler": "DistlockDatabaseScheduler",
}

#: Refuses what nobody promised to have, and every way to another machine or file of a database.
WITHOUT_EXTRAS = """
import socket, sqlite3, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"psycopg", "psycopg2", "redis", "celery", "MySQLdb",
            "prometheus_client", "opentelemetry"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def refuse(*args, **kwargs):
    raise AssertionError("connected at import")

sys.meta_path.insert(0, Refuse())
socket.socket.connect = socket.create_connection = refuse
sqlite3.connect = sqlite3.dbapi2.connect = refuse
"""


def run(program: str) -> str:
    """Run a program in a fresh interpreter, in which Django knows no settings."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "", "PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_are_complete_and_sorted() -> None:
    """`__all__` has exactly the names whose behaviour is built, in order."""
    assert django_distlock.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


def names_of(shown: object) -> list[str]:
    """Return what somebody finds who looks at an object."""
    return [name for name in dir(shown) if not name.startswith("_")]


def test_lock_and_lease_show_what_is_for_their_users() -> None:
    """And no plumbing."""
    lock = distlock("package:names", backend="memory")
    with lock as lease:
        assert names_of(lock) == LOCK.split()
        assert names_of(lease) == LEASE.split()


def test_reference_has_each_name_of_a_lease() -> None:
    """A name that is not documented is none that users can rely on."""
    page = API.partition("## `Lease`")[2].partition("\n## ")[0]
    assert set(LEASE.split()) - set(re.findall(r"\b\w+\b", page)) == set()


def test_import_paths_stay() -> None:
    """What the documentation and settings of projects name can be imported from there."""
    for module, names in PATHS.items():
        found = importlib.import_module(f"django_distlock.{module}")
        assert [name for name in names.split() if not hasattr(found, name)] == [], module
    for module, names in WITH_APPS.items():
        code = (ROOT / f"django_distlock/{module.replace('.', '/')}").with_suffix(".py")
        code = code if code.exists() else code.with_suffix("") / "__init__.py"
        text = code.read_text()
        assert [name for name in names.split() if f'"{name}"' not in text] == [], module


def test_import_paths_of_the_documentation_are_known() -> None:
    """What a page imports is promised above."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    named = re.findall(
        r"^ *from django_distlock(?:\.([\w.]+))? import ([\w, ]+)$",
        "\n".join(page.read_text() for page in pages),
        re.MULTILINE,
    )
    missing = set()
    for module, names in named:
        known = [*PATHS.get(module, "").split(), *WITH_APPS.get(module, "").split()]
        known += [] if module else PUBLIC
        missing |= {f"{module}.{name}" for name in names.split(", ") if name not in known}
    # Modules, which are imported as such.
    assert missing <= {".inspection", "contrib.opentelemetry", "contrib.prometheus"}


def test_unknown_name_is_an_attribute_error() -> None:
    """The root has no other names to offer, and says so as Python does."""
    with pytest.raises(AttributeError, match="FencedModel"):
        _ = django_distlock.FencedModel  # type: ignore[attr-defined]


def test_root_works_before_settings_and_without_extras() -> None:
    """Its names need no settings, app registry or driver; a module may decorate at import.

    `INSTALLED_APPS`, the models and the backends are made without asking a store.
    """
    program = f"""{WITHOUT_EXTRAS}
from django_distlock import {", ".join(PUBLIC)}
from django_distlock.views import locked_view
lock = distlock("nightly", ttl=60, wait=0)

@distlock("invoice:{{invoice_id}}")
def pay(invoice_id): pass

print(lock.key)
import django
from django.conf import settings
settings.configure(
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "nowhere.sqlite3"}}}},
    INSTALLED_APPS=["django_distlock"],
    SECRET_KEY="x",
)
django.setup()
print([type(backend).__name__ for backend in lock_backends.all()])
"""
    assert run(program) == "nightly\n['DatabaseBackend']\n"


def test_import_needs_no_django_starts_no_thread_and_touches_no_signal() -> None:
    """Its names are there, and what each of them needs is imported when it is asked for."""
    program = """
import signal, sys, threading
before = {each: signal.getsignal(each) for each in signal.valid_signals()}
import django_distlock
assert set(django_distlock.__all__) <= set(dir(django_distlock))
print("django" in sys.modules)
from django_distlock import *
from django_distlock.views import locked_view
print(distlock.__module__, "django" in sys.modules)
assert threading.active_count() == 1, threading.enumerate()
assert before == {each: signal.getsignal(each) for each in signal.valid_signals()}
"""
    assert run(program) == "False\ndjango_distlock.locks.lock True\n"


def test_missing_extra_is_named() -> None:
    """By what installs it."""
    extras = ["celery", "opentelemetry", "prometheus"]
    program = f"""{WITHOUT_EXTRAS}
import importlib
for extra in {extras}:
    try:
        importlib.import_module(f"django_distlock.contrib.{{extra}}")
    except ModuleNotFoundError as error:
        print(error)
"""
    told = [line.rpartition(". Run ")[2] for line in run(program).splitlines()]
    assert told == [f'pip install "django-distlock[{extra}]"' for extra in extras]


@pytest.mark.parametrize(
    ("name", "here"), [("timeout", "ttl"), ("blocking_timeout", "wait"), ("using", "backend")]
)
def test_argument_of_another_package_is_answered_with_ours(name: str, here: str) -> None:
    """By any function that hands its options on to `distlock()`."""
    wrong: dict[str, Any] = {name: 5}
    for call in (distlock, locked_view):
        with pytest.raises(TypeError, match=rf"no argument '{name}'. Use {here}"):
            call("key", **wrong)


def test_help_has_an_example_and_the_defaults() -> None:
    """Also those that are settings of the backend."""
    shown = " ".join((inspect.getdoc(distlock) or "").split())
    assert 'with distlock("invoice:42", ttl=60, wait=5) as lease: ...' in shown
    assert '@distlock("invoice:{invoice_id}") def send(invoice_id): ...' in shown
    config = BackendConfig()
    assert f"its `TTL` ({config.ttl:g} s)" in shown
    assert f"the `WAIT` of the backend ({config.wait or 0:g} s)" in shown
    assert f"the `MAX_TTL` of the backend ({config.max_ttl / 86400:g} days)" in shown


def test_help_of_the_package_needs_no_settings() -> None:
    """It looks at every attribute of every class, and leaves no traceback behind."""
    program = """
import pydoc, threading, django_distlock
from django_distlock.database.connections import releases
failed = []
threading.excepthook = failed.append
pydoc.render_doc(django_distlock)
releases.finish()
assert not failed, failed
"""
    run(program)
