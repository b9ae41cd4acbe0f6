"""Trouble is an exception: a store that cannot be reached never looks like contention."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from redis import RedisCluster

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import BackendUnavailable, LockError
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from tests.backends import Registered

from .helpers import SHARED, Later, contend, take
from .redis_clients import cluster_url, logged_in, single_url
from .stores import DatabaseStore, Session
from .test_arguments import NOW, TOKEN, grant
from .test_contention import read_only
from .unreachable import unreachable

CAN_FAIL = pytest.mark.stores(*SHARED.args, why="what it holds is in its memory")

OPERATIONS: dict[str, Callable[[BaseLockBackend], object]] = {
    "acquire": lambda backend: backend.acquire("key", TOKEN, 30),
    "acquire wanted": lambda backend: backend.acquire("key", TOKEN, 30, wanted=True),
    "acquire in no time": lambda backend: backend.acquire("key", TOKEN, 30, bound=0),
    "takeover": lambda backend: backend.acquire("key", TOKEN, 30, replace=new_token()),
    "extend": lambda backend: backend.extend(grant()),
    "extend_many": lambda backend: backend.extend_many([grant()]),
    "release": lambda backend: backend.release(grant()),
    "settle": lambda backend: backend.release(grant(), 5),
    "read": lambda backend: backend.read("key"),
    "clock": lambda backend: backend.clock(),
    "counter": lambda backend: backend.counter("key"),
    "read_token": lambda backend: backend.read_token(TOKEN),
    "list": lambda backend: backend.list(),
    "shorten": lambda backend: backend.request_stop("key", 5),
    "force_release": lambda backend: backend.force_release("key"),
    "request_stop": lambda backend: backend.request_stop("key"),
    "pause": lambda backend: backend.pause("key", NOW),
    "resume": lambda backend: backend.pause("key", None),
    "cleanup": lambda backend: backend.cleanup(NOW),
    "raise_fences": lambda backend: backend.raise_fences(5, key="key"),
}


def broken(registered: Registered, **settings: object) -> BaseLockBackend:
    """Make the backend on a store that is not there."""
    made = unreachable(registered, **settings)
    assert made is not None
    return made


#: What asks no server, in stores that have no such question.
ASKS_NOBODY = {
    "redis": {"cleanup"},
    "redis_cluster": {"cleanup"},
    # Of a lease that it does not have, a process knows that its session has none.
    "session": {"extend", "extend_many", "release", "settle", "read_token", "shorten"},
}


@CAN_FAIL
def test_store_that_is_not_there_raises(registered: Registered) -> None:
    """Every operation raises `BackendUnavailable` with a code and the cause, time and again."""
    backend = broken(registered)
    for operation in [*OPERATIONS, *OPERATIONS]:
        if operation in ASKS_NOBODY.get(registered.store, ()):
            continue
        with pytest.raises(BackendUnavailable) as caught:
            pytest.fail(f"{operation} was answered by {OPERATIONS[operation](backend)!r}")
        assert caught.value.code == "service_unavailable"
        assert caught.value.__cause__ is not None
        assert TOKEN not in str(caught.value)
        # Where an operation is about one key, the error carries it.
        assert caught.value.key == "key" or operation not in ("acquire", "extend", "release")


@pytest.mark.stores("postgresql", why="it shows nobody's transactions")
@pytest.mark.parametrize(
    "look",
    [lambda backend: backend.guards.sessions("key"), lambda backend: backend.transactions.kept()],
    ids=["guards", "transactions"],
)
def test_transactions_of_a_store_that_is_not_there_raise(
    registered: Registered, look: Callable[[BaseLockBackend], object]
) -> None:
    """Also where the first question is that for the schema of the tables."""
    with pytest.raises(BackendUnavailable):
        look(broken(registered))


NOBODY = "nobody_at_all"
LOGINS: dict[str, dict[str, object]] = {
    "postgresql": {"USER": NOBODY},
    "mysql": {"USER": NOBODY},
    "session": {"USER": NOBODY},
    "redis": {"url": logged_in(single_url(), NOBODY)},
    "redis_cluster": {
        "client_factory": lambda: RedisCluster.from_url(logged_in(cluster_url(), NOBODY))
    },
}


@pytest.mark.stores(*LOGINS, why="there is nobody to log in to")
def test_role_that_does_not_exist_raises(registered: Registered) -> None:
    """A refused login is unavailable too, and not contended; nor is a server without database."""
    with pytest.raises(BackendUnavailable) as caught:
        broken(registered, **LOGINS[registered.store]).acquire("key", TOKEN, 30)
    # PostgreSQL's driver gives no SQLSTATE for a connection that never was.
    if registered.using != "default":
        assert caught.value.code == "auth_failed"
    if registered.using:
        with pytest.raises(BackendUnavailable):
            broken(registered, NAME="no_such_database").acquire("key", TOKEN, 30)


@pytest.mark.stores("sqlite", "postgresql", "mysql", why="not all of its answers are in tables")
def test_missing_tables_are_told_apart(registered: Registered, tmp_path: object) -> None:
    """Without the tables every operation raises an error that says what to run."""
    elsewhere: dict[str, object] = (
        {"OPTIONS": {"options": "-c search_path=pg_catalog"}}
        if registered.store == "postgresql"
        # A database that each server has.
        else {"NAME": "mysql"}
        if registered.store == "mysql"
        else {"NAME": f"{tmp_path}/empty.sqlite3"}
    )
    backend = broken(registered, **elsewhere)
    for name, operation in OPERATIONS.items():
        if name == "clock":
            continue
        with pytest.raises(LockError, match="migrate") as caught:
            pytest.fail(f"{name} was answered by {operation(backend)!r}")
        assert not isinstance(caught.value, BackendUnavailable)


@pytest.mark.stores("postgresql", "mysql", why="locks run on no session of the thread")
@pytest.mark.parametrize("operation", ["acquire", "extend", "release", "read"])
def test_cut_session_raises_and_recovers(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Session, key: str, operation: str
) -> None:
    """After the server cut the session, one error at most, and then it works again."""
    mine = take(backend, key)
    calls: dict[str, Callable[[], object]] = {
        "acquire": lambda: backend.acquire(f"{key}-b", new_token(), 30),
        "extend": lambda: backend.extend(mine),
        "release": lambda: backend.release(mine),
        "read": lambda: backend.read(key),
    }
    for session in store.sessions():
        stranger.cut(session)
    try:
        answer = calls[operation]()
    except BackendUnavailable:
        answer = calls[operation]()
    assert answer is not None
    assert answer is not False
    assert not isinstance(answer, Contended)


@pytest.mark.stores("postgresql", "mysql", why="locks run on no session of the thread")
def test_cut_while_waiting_raises(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Session, key: str
) -> None:
    """An acquire whose session is cut in the middle of a wait is neither granted nor contended."""
    take(backend, key, 5)
    store.elapse(6.1)
    stranger.hold(key)
    waiter = Later(backend.acquire, key, new_token(), 30)
    stranger.wait_until_blocked()
    for session in stranger.blocked():
        stranger.cut(session)
    with pytest.raises(BackendUnavailable):
        waiter.result()
    stranger.rollback()
    assert backend.read(key) is None
    take(backend, key)


@pytest.mark.stores("postgresql", "mysql", why="nobody could cancel a statement")
def test_statement_that_somebody_cancels_raises(
    backend: BaseLockBackend, stranger: Session, key: str
) -> None:
    """What an administrator cancels in the middle of a wait is trouble, and changes nothing."""
    mine = take(backend, key)
    calls: dict[str, Callable[[], object]] = {
        "extend": lambda: backend.extend(mine, 500),
        "release": lambda: backend.release(mine),
        "acquire": lambda: backend.acquire(key, new_token(), 30, replace=mine.token),
    }
    before = backend.read(key)
    stranger.hold(key)
    for operation, call in calls.items():
        waiter = Later(call)
        stranger.wait_until_blocked()
        for session in stranger.blocked():
            stranger.cancel(session)
        with pytest.raises(BackendUnavailable) as caught:
            waiter.result()
        assert caught.value.code == "network_timeout", operation
    stranger.rollback()
    assert backend.read(key) == before
    assert all(isinstance(call(), Grant | bool) for call in calls.values())


@pytest.mark.stores("postgresql", "mysql", why="no session is read-only")
def test_read_only_server_raises(backend: BaseLockBackend, store: DatabaseStore, key: str) -> None:
    """On a server that takes no writes a free key is neither granted nor contended."""
    with read_only(store), pytest.raises(BackendUnavailable, match="is unavailable: "):
        backend.acquire(key, new_token(), 30)
    assert isinstance(backend.acquire(key, new_token(), 30), Grant)
    contend(backend, key)
