"""The configured backends, by alias."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.test import override_settings

from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.records import Grant
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.handler import LockBackendHandler, default_lock_backend, lock_backends
from tests.contract.helpers import Later

MEMORY = "django_distlock.backends.memory.MemoryBackend"
DATABASE = "django_distlock.backends.database.DatabaseBackend"
TOKEN = "A" * 22


def refusal(alias: str = "x", **configured: Any) -> str:
    """Give the message that an alias is refused with."""
    with (
        override_settings(DISTLOCK={alias: configured}),
        pytest.raises(ImproperlyConfigured) as caught,
    ):
        lock_backends[alias]
    assert type(caught.value) is InvalidLockBackend
    return str(caught.value)


class SlowBackend(MemoryBackend):
    """Takes its time to be made, and counts how often it is."""

    made = 0
    barrier = threading.Barrier(8)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        threading.Event().wait(0.02)
        type(self).made += 1


def test_one_object_per_alias() -> None:
    """Of its class, with its alias and configuration; two aliases of one class are two objects."""
    configured = {"a": {"BACKEND": MEMORY, "TTL": 7}, "b": {"BACKEND": MEMORY}}
    with override_settings(DISTLOCK=configured):
        backend = lock_backends["a"]
        assert type(backend) is MemoryBackend
        assert (backend.alias, backend.config.ttl) == ("a", 7)
        assert lock_backends["a"] is backend
        assert list(lock_backends) == ["a", "b"]
        assert lock_backends.all() == [backend, lock_backends["b"]]
        assert lock_backends["b"] is not backend


class MadeOfAnother(MemoryBackend):
    """Has a backend inside; and a signal interrupts its making, whose handler asks for it."""

    handler = LockBackendHandler()
    found: list[BaseLockBackend] = []

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if not self.found:
            self.found.append(self.handler["inner"])
            self.found.append(self.handler["outer"])


def test_backend_is_asked_for_while_one_is_made() -> None:
    """Nothing hangs, and whoever asks gets one object."""
    handler, path = MadeOfAnother.handler, f"{__name__}.MadeOfAnother"
    configured = {"outer": {"BACKEND": path}, "inner": {"BACKEND": MEMORY}}
    with override_settings(DISTLOCK=configured):
        outer = Later(handler.__getitem__, "outer").result()
        assert MadeOfAnother.found == [handler["inner"], outer]
        assert handler["outer"] is outer


def test_one_object_for_all_threads() -> None:
    """Threads that ask at the same time get one object, made once."""
    SlowBackend.made = 0

    def ask(_: int) -> BaseLockBackend:
        SlowBackend.barrier.wait(timeout=10)
        return lock_backends["x"]

    path = f"{__name__}.SlowBackend"
    with (
        override_settings(DISTLOCK={"x": {"BACKEND": path}}),
        ThreadPoolExecutor(8) as threads,
    ):
        backends = list(threads.map(ask, range(8)))
    assert len({id(backend) for backend in backends}) == 1
    assert SlowBackend.made == 1


class StandingBackend(MemoryBackend):
    """Is made for as long as a test says, in the process of that test."""

    begun, goes_on = threading.Event(), threading.Event()
    process = os.getpid()

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if os.getpid() == self.process:
            self.begun.set()
            assert self.goes_on.wait(20)


def test_fork_while_a_backend_is_made() -> None:
    """The child waits for no thread of its parent: it makes its own."""
    StandingBackend.process = os.getpid()
    with override_settings(DISTLOCK={"x": {"BACKEND": f"{__name__}.StandingBackend"}}):
        making = Later(lock_backends.__getitem__, "x")
        assert StandingBackend.begun.wait(20)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            os._exit(7 if lock_backends["x"].alias == "x" else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        StandingBackend.goes_on.set()
        making.result()
    assert status == 7


def test_no_setting_gives_the_database_backend(settings: Any) -> None:
    """Without `DISTLOCK` the locks are in the default database."""
    del settings.DISTLOCK
    assert list(lock_backends) == ["default"]
    backend = lock_backends["default"]
    assert type(backend) is DatabaseBackend
    assert backend.using == "default"


def test_empty_setting_gives_none() -> None:
    """`DISTLOCK = {}` configures no backend; asking for one says so."""
    with override_settings(DISTLOCK={}):
        assert list(lock_backends) == []
        assert lock_backends.all() == []
        with pytest.raises(InvalidLockBackend, match="'default' is not configured.*aliases: none"):
            lock_backends["default"]
        with pytest.raises(InvalidLockBackend, match="'default' is not configured"):
            _ = default_lock_backend.alias


def test_unknown_alias_is_refused_with_the_known_ones() -> None:
    """A slip in an alias is answered with the aliases."""
    configured = {"a": {"BACKEND": MEMORY}, "b": {"BACKEND": MEMORY}}
    told = r"backend 'c' is not configured. Configured aliases: 'a', 'b'\."
    with override_settings(DISTLOCK=configured), pytest.raises(InvalidLockBackend, match=told):
        lock_backends["c"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere.Backend", "cannot be imported: "),
        (f"{MEMORY}s", "cannot be imported: "),
        ("NoDots", "cannot be imported: "),
        ("", "cannot be imported: "),
        # Before it is called.
        ("django.core.cache.cache", "is not a subclass of BaseLockBackend."),
        ("datetime.date", "is not a subclass of BaseLockBackend."),
        ("django_distlock.core.keys.new_token", "is not a subclass of BaseLockBackend."),
    ],
)
def test_backend_that_cannot_be_imported_is_refused(path: str, why: str) -> None:
    """The message names alias and path, and keeps the reason."""
    assert refusal(BACKEND=path).startswith(f"DISTLOCK['x']: BACKEND {path!r} {why}")


@pytest.mark.parametrize(
    ("backend", "module", "extra"),
    [
        ("redis.RedisBackend", "redis", "redis"),
        ("advisory.AdvisoryBackend", "psycopg", "postgres"),
    ],
)
def test_missing_extra_is_named(
    backend: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to install is said, and not only what was not found."""
    path = f"django_distlock.backends.{backend}"
    for name in [each for each in sys.modules if each.startswith(path.rpartition(".")[0])]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert f'pip install "django-distlock[{extra}]"' in refusal(BACKEND=path)


def test_unknown_option_is_answered_with_the_known_ones() -> None:
    """And with the nearest one."""
    said = refusal(BACKEND=DATABASE, OPTIONS={"usin": "default"})
    assert "Known options: cleanup_on_read, listen_using, server_functions, using." in said
    assert said.endswith("Did you mean 'using'?")


@pytest.mark.parametrize("backend", [MEMORY, DATABASE])
def test_unknown_options_are_refused(backend: str) -> None:
    """`OPTIONS` are a closed vocabulary of each backend."""
    said = refusal(BACKEND=backend, OPTIONS={"ulr": 1})
    assert said.startswith("DISTLOCK['x']: Unknown options: 'ulr'. Known options: ")
    said = refusal(BACKEND=backend, OPTIONS={"b": 1, "a": 2})
    assert said.startswith("DISTLOCK['x']: Unknown options: 'a', 'b'. ")


@pytest.mark.parametrize(
    ("configured", "rule"),
    [
        ({"OPTIONS": {"using": "nowhere"}}, "using: "),
        ({"OPTIONS": {"using": 5}}, "using"),
        ({"OPTIONS": {"using": ""}}, "using"),
        ({"OPTIONS": {"server_functions": "yes"}}, "functions must be True or False, not 'yes'"),
        ({"OPTIONS": {"cleanup_on_read": 1}}, "cleanup_on_read must be True or False, not 1"),
        ({"KEY_PREFIX": "a{b}"}, "braces"),
        ({"KEY_PREFIX": "p" * 9990}, "too long"),
        ({"KEY_PREFIX": "\ud800"}, "surrogate"),
    ],
)
def test_bad_option_is_refused_with_its_name(configured: dict[str, Any], rule: str) -> None:
    """What a backend or its store cannot take is refused when the backend is made."""
    for backend in (DATABASE, MEMORY) if "KEY_PREFIX" in configured else (DATABASE,):
        message = refusal(BACKEND=backend, **configured)
        assert message.startswith("DISTLOCK['x']: ")
        assert ("KEY_PREFIX: " in message) is ("KEY_PREFIX" in configured)
        assert rule in message


@pytest.mark.parametrize(
    ("configured", "rule"),
    [
        ({"BACKEND": "django_distlock.compat.bridge.DatabaseBackend"}, "'bridge'"),
        ({"BACKEND": MEMORY, "OPTIONS": {"clock": 5}}, "'int' object"),
    ],
)
def test_options_that_a_backend_cannot_be_made_with_are_refused(
    configured: dict[str, Any], rule: str
) -> None:
    """A required one that is missing, say: the check of the settings goes on to the next alias."""
    said = refusal(**configured)
    assert said.startswith("DISTLOCK['x']: ")
    assert "cannot be made with these OPTIONS: " in said
    assert rule in said


def test_backend_that_was_refused_can_be_corrected() -> None:
    """A mistake leaves nothing behind."""
    assert "BACKEND is missing" in refusal(TTL=5)
    with override_settings(DISTLOCK={"x": {"BACKEND": MEMORY}}):
        assert lock_backends["x"].alias == "x"


def test_changed_settings_make_new_backends() -> None:
    """`override_settings` takes effect at once, and ends with its block; others change nothing."""
    with override_settings(DISTLOCK={"x": {"BACKEND": MEMORY, "TTL": 7}}):
        outer = lock_backends["x"]
        with override_settings(USE_TZ=True, LANGUAGE_CODE="de"):
            assert lock_backends["x"] is outer
        with override_settings(DISTLOCK={"x": {"BACKEND": MEMORY, "TTL": 8}}):
            assert lock_backends["x"] is not outer
            assert lock_backends["x"].config.ttl == 8
        inner = lock_backends["x"]
        assert inner.config.ttl == 7
        # One in Redis may use the connections of a cache.
        with override_settings(CACHES=settings.CACHES):
            assert lock_backends["x"] is not inner


def test_default_stands_for_the_alias_of_that_name() -> None:
    """`default_lock_backend` follows the settings, though it was imported before."""
    with override_settings(DISTLOCK={"default": {"BACKEND": MEMORY, "TTL": 7}}):
        assert default_lock_backend.config.ttl == 7
        assert isinstance(default_lock_backend.acquire("key", TOKEN, 1), Grant)
        assert lock_backends["default"].read("key") is not None
    with override_settings(DISTLOCK={"default": {"BACKEND": MEMORY, "TTL": 8}}):
        assert default_lock_backend.config.ttl == 8


def test_making_a_backend_connects_nowhere() -> None:
    """A backend connects when it is asked something, not when it is made."""
    handler = LockBackendHandler()
    before = {alias: connections[alias].connection for alias in connections}
    with override_settings(DISTLOCK={"x": {"BACKEND": DATABASE, "OPTIONS": {"using": "default"}}}):
        assert handler["x"].alias == "x"
    assert {alias: connections[alias].connection for alias in connections} == before
