"""The backends under test, and what surrounds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from django.db import connections
from django.test import override_settings
from pytest_django import DjangoDbBlocker

from django_distlock import Lease, Lock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.handler import lock_backends
from django_distlock.testing.contract import NEEDS
from tests.backends import BACKENDS, Registered
from tests.conftest import DECLARED
from tests.services import NO_MARIADB
from tests.tiers import may_take

from .locking import HOLDING, lock_of
from .scripted import CONFIGURED, Script, ScriptedMemory
from .stores import DatabaseStore, Elapse, MemoryStore, Store, Stranger
from .stores_redis import RedisStore
from .stores_session import SessionStore, end_sessions
from .unreachable import forget

#: Who knows a store that is no database.
KINDS: Mapping[str, Callable[[Registered, str], Store]] = {
    "memory": MemoryStore,
    "redis": RedisStore,
    "redis_cluster": RedisStore,
    "session": SessionStore,
}

Hold = Callable[[Lock, Callable[[Lease], Any]], Any]
TWINS = ["called", "awaited"]


# A lock must be committed to be seen, and a fence counter must outlive every test: so these tests
# run outside of transactions, share the tables, and keep apart by keys of their own. Emptying the
# tables between tests would be slow, and would take the counters back.
@pytest.fixture(autouse=True)
def _databases(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    with django_db_blocker.unblock():
        yield
        for connection in connections.all(initialized_only=True):
            assert not connection.in_atomic_block
            connection.close()
        forget()
        end_sessions()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for a backend on each that has what the test is about."""
    test = metafunc.definition
    named = (mark.args[0] for mark in test.iter_markers("parametrize"))
    if "registered" not in metafunc.fixturenames or any("registered" in each for each in named):
        return
    lines = [each for each in BACKENDS.values() if _has_what_is_tested(each, test)]
    # Of a test that this run takes nowhere, all cases are there to be left out.
    lines = [each for each in lines if may_take(test, each.alias)] or lines
    metafunc.parametrize("registered", [*map(_possible, lines)], indirect=True)


def _has_what_is_tested(registered: Registered, test: pytest.Item) -> bool:
    stores, aliases = test.get_closest_marker("stores"), test.get_closest_marker("aliases")
    if stores and registered.store not in stores.args:
        return False
    if aliases and registered.alias not in aliases.args:
        return False
    if not _is_here(registered):
        return True  # To be skipped, and counted.
    # A cluster knows once it answers. Servers start when one worker has collected its tests, and
    # all of them have to collect the same.
    return registered.store == "redis_cluster" or not _lacks(registered, test)


def _is_here(registered: Registered) -> bool:
    return not registered.using or registered.using in connections.settings


def _lacks(registered: Registered, test: pytest.Item) -> str:
    """Say what a backend has not or is not, of what a test requires; "": nothing."""
    wanted: dict[str, Any] = {}
    for mark in (test.get_closest_marker("requires"), test.get_closest_marker(NEEDS)):
        wanted |= {**dict.fromkeys(mark.args, True), **mark.kwargs} if mark else {}
    backend = lock_backends[registered.alias]
    told = ((name, getattr(backend, name), value) for name, value in wanted.items())
    return next((f"{name} is {is_so!r}" for name, is_so, value in told if is_so != value), "")


def _possible(registered: Registered) -> Any:
    """Give a line of the registry, to be skipped where its store cannot be started."""
    marks = () if _is_here(registered) else [pytest.mark.skip(reason=f"{DECLARED}{NO_MARIADB}")]
    return pytest.param(registered, id=registered.alias, marks=marks)


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Registered:
    """Give the line of the registry that the test runs on."""
    registered: Registered = request.param
    if lack := _lacks(registered, request.node):
        pytest.skip(f"{DECLARED}{registered.alias}: {lack}")
    return registered


@pytest.fixture
def lock(registered: Registered, key: str) -> Lock:
    """Describe a lock on the backend under test, as `lock_of` does for those with arguments."""
    return lock_of(registered, key)


@pytest.fixture(params=HOLDING, ids=lambda way: way.__name__)
def hold(request: pytest.FixtureRequest) -> Hold:
    """Give every way to hold a lock while a function runs, which is given the lease."""
    way: Hold = request.param
    return way


@pytest.fixture(params=[Lock.acquire, lambda lock: asyncio.run(lock.aacquire())], ids=TWINS)
def acquire(request: pytest.FixtureRequest) -> Callable[[Lock], Lease]:
    """Give both ways to acquire."""
    way: Callable[[Lock], Lease] = request.param
    return way


@pytest.fixture
def scripted() -> Iterator[Script]:
    """Configure a store in memory under several aliases; give the script to fill in."""
    ScriptedMemory.script, ScriptedMemory.asked = {}, []
    with override_settings(DISTLOCK=CONFIGURED):
        yield ScriptedMemory.script


@pytest.fixture
def store(registered: Registered, key: str) -> Iterator[Store]:
    """Give what keeps the records of the backend under test."""
    store = KINDS.get(registered.store, DatabaseStore)(registered, key)
    yield store
    store.close()


@pytest.fixture
def backend(store: Store) -> BaseLockBackend:
    """Give the backend under test."""
    return store.backend


@pytest.fixture
def elapse(store: Store) -> Elapse:
    """Give a function that lets seconds pass for the keys of this test, without waiting."""
    return store.elapse


@pytest.fixture
def stranger(store: Store) -> Stranger:
    """Give another client of the store, with a transaction of its own."""
    return store.stranger()
