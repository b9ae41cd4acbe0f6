"""The backends under test, and what surrounds them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping

import pytest
from django.db import connections
from pytest_django import DjangoDbBlocker

from django_distlock.backends.base import BaseLockBackend
from django_distlock.handler import lock_backends
from tests.backends import BACKENDS, Registered
from tests.conftest import DECLARED
from tests.services import NO_MARIADB

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


@pytest.fixture
def key() -> str:
    """Give a text that only this test uses: a key, or the start of several."""
    return f"t{secrets.token_hex(6)}"


@pytest.fixture(params=BACKENDS.values(), ids=lambda each: each.alias)
def registered(request: pytest.FixtureRequest) -> Registered:
    """Give each line of the registry."""
    registered: Registered = request.param
    if registered.using and registered.using not in connections.settings:
        pytest.skip(f"{DECLARED}{NO_MARIADB}")
    marker = request.node.get_closest_marker("stores")
    if marker and registered.store not in marker.args:
        pytest.skip(f"{DECLARED}{registered.alias}: {marker.kwargs['why']}")
    if marker := request.node.get_closest_marker("requires"):
        _skip_without(lock_backends[registered.alias], registered.alias, marker)
    return registered


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


def _skip_without(backend: BaseLockBackend, alias: str, marker: pytest.Mark) -> None:
    for capability in marker.args:
        if not getattr(backend, capability):
            pytest.skip(f"{DECLARED}{alias}: {capability} is False")
    for name, value in marker.kwargs.items():
        if getattr(backend, name) != value:
            pytest.skip(f"{DECLARED}{alias}: {name} is {getattr(backend, name)!r}")
