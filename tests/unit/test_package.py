"""What the package's root promises: its names, and that importing it does nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import django_distlock

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
    "current_lease",
    "default_lock_backend",
    "distlock",
    "lock_backends",
]

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


def test_unknown_name_is_an_attribute_error() -> None:
    """The root has no other names to offer, and says so as Python does."""
    with pytest.raises(AttributeError, match="FencedModel"):
        _ = django_distlock.FencedModel  # type: ignore[attr-defined]


def test_root_imports_before_settings_and_without_extras() -> None:
    """Importing every public name needs no settings, no app registry and no driver."""
    names = ", ".join(PUBLIC)
    program = f"{WITHOUT_EXTRAS}\nfrom django_distlock import {names}\nprint('fine')"
    assert run(program) == "fine\n"


def test_lock_may_be_described_before_settings() -> None:
    """A module may describe and decorate at import, before Django is set up."""
    program = f"""{WITHOUT_EXTRAS}
from django_distlock import distlock
lock = distlock("nightly", ttl=60, wait=0)

@distlock("invoice:{{invoice_id}}")
def pay(invoice_id): pass

print(lock.key)
"""
    assert run(program) == "nightly\n"


def test_setting_up_an_app_connects_nowhere() -> None:
    """`INSTALLED_APPS`, the models and the backends are made without asking a store."""
    program = f"""{WITHOUT_EXTRAS}
import django
from django.conf import settings
settings.configure(
    DATABASES={{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "nowhere.sqlite3"}}}},
    INSTALLED_APPS=["django_distlock"],
    SECRET_KEY="x",
)
django.setup()
from django_distlock import lock_backends
print([type(backend).__name__ for backend in lock_backends.all()])
"""
    assert run(program) == "['DatabaseBackend']\n"


def test_import_starts_no_thread_and_touches_no_signal() -> None:
    """A library that was only imported leaves threads and signal handlers as they were."""
    program = """
import signal, threading
before = {each: signal.getsignal(each) for each in signal.valid_signals()}
import django_distlock
from django_distlock import distlock
assert threading.active_count() == 1, threading.enumerate()
assert before == {each: signal.getsignal(each) for each in signal.valid_signals()}
print('fine')
"""
    assert run(program) == "fine\n"
