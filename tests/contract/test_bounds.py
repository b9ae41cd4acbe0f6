"""Waits inside the store are bounded: busy and unknown are answers too."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from django_distlock import BackendUnavailable
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import UNKNOWN, Contended, Grant, Record

from .helpers import HAS_TTL, SHORT, held, prompt, take
from .stores import DatabaseStore, Stranger

HAS_TRANSACTIONS = pytest.mark.stores(
    "sqlite", "postgresql", "mysql", why="each operation is atomic by itself: nothing waits inside"
)
HAS_ROW_LOCKS = pytest.mark.stores("postgresql", "mysql", why="there are no row locks")
GUARDED = pytest.mark.stores("postgresql", "mysql", "session", why="there are no guards")


def operations(backend: BaseLockBackend, grant: Grant) -> dict[str, Callable[[float], object]]:
    """Name every operation that changes the record of a held key, each with its bound."""
    return {
        "extend": lambda bound: backend.extend(grant, bound=bound),
        "release": lambda bound: backend.release(grant, bound=bound),
        "settle": lambda bound: backend.release(grant, 0, bound=bound),
        "shorten": lambda bound: backend.request_stop(grant.key, 0, bound=bound),
        "force_release": lambda bound: backend.force_release(grant.key, bound=bound),
        "request_stop": lambda bound: backend.request_stop(grant.key, bound=bound),
        "takeover": lambda bound: backend.acquire(
            grant.key, new_token(), 30, replace=grant.token, bound=bound
        ),
    }


@HAS_TRANSACTIONS
def test_held_record_bounds_every_operation(
    backend: BaseLockBackend, stranger: Stranger, key: str
) -> None:
    """Where a transaction holds the record, the answer comes in time, and the record stands.

    A bound of 0 is not for ever, and nobody waits longer than a second, whatever was asked for.
    """
    grant = take(backend, key)
    before = held(backend, key)
    stranger.hold(key)
    for operation, call in operations(backend, grant).items():
        bounds = [(SHORT, SHORT), (0, 0), *([(60, 1)] if operation == "release" else [])]
        for bound, longest in bounds:
            with prompt(longest):
                answer = call(bound)
            if operation in ("extend", "release", "settle"):
                assert answer is UNKNOWN, operation
                assert not answer
            else:
                assert isinstance(answer, Contended), operation
                assert (answer.busy, answer.fence) == (True, grant.fence)
            assert held(backend, key) == before, operation
    stranger.rollback()
    assert held(backend, key) == before
    for number, operation in enumerate(operations(backend, grant)):
        free = take(backend, f"{key}-{number}")
        again = operations(backend, free)[operation](1)
        assert again is True or isinstance(again, (Grant, Record)), operation


@HAS_ROW_LOCKS
def test_table_held_from_readers_is_trouble_in_time(
    backend: BaseLockBackend, stranger: Stranger, key: str
) -> None:
    """Whoever reads waits a second for a table that somebody has locked, for many keys too."""
    take(backend, key)
    read: dict[str, Callable[[], object]] = {
        "record": lambda: backend.read(key),
        "records": lambda: backend.records.of([key]),
        "fences": lambda: backend._fences_of([backend.queues.name_of(key)]),
    }
    before = {what: ask() for what, ask in read.items()}
    stranger.hold_table(from_readers=True)
    for what, ask in read.items():
        with prompt(1), pytest.raises(BackendUnavailable):
            pytest.fail(f"{what} is {ask()}")
    stranger.rollback()
    assert {what: ask() for what, ask in read.items()} == before


@HAS_TRANSACTIONS
@pytest.mark.parametrize("is_new", [False, True], ids=["expired", "new"])
def test_free_key_in_a_held_table_is_busy(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str, is_new: bool
) -> None:
    """An acquire behind a transaction in its way is busy: no holder, no fence, nothing left."""
    if is_new:
        stranger.hold_table()
    else:
        take(backend, key, 5)
        store.elapse(6.1)
        stranger.hold(key)
    before = store.fence(key)
    with prompt(SHORT):
        answer = backend.acquire(key, new_token(), 30, bound=SHORT)
    assert isinstance(answer, Contended)
    assert (answer.busy, is_new and answer.holder) == (True, None if is_new else False)
    stranger.rollback()
    assert backend.read(key) is None
    assert store.fence(key) == before
    assert take(backend, key).fence == before + 1


@HAS_TRANSACTIONS
def test_pause_and_resume_are_bounded(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """Where a transaction holds the fence, pause and resume are busy and change nothing."""
    take(backend, key)
    until = store.now() + timedelta(minutes=1)
    for resumes in (False, True):
        if resumes:
            assert backend.pause(key, until) is True
        stranger.guard(key)
        with prompt(SHORT):
            answer = backend.pause(key, None if resumes else until, bound=SHORT)
        assert isinstance(answer, Contended)
        assert answer.busy
        stranger.rollback()
        assert backend.pause(key, None) is resumes


@HAS_ROW_LOCKS
def test_stalled_rival_in_the_queue_is_busy(
    backend: BaseLockBackend, stranger: Stranger, key: str
) -> None:
    """An acquirer that stalls in the queue for a key delays the next one by the bound at most."""
    stranger.queue(key)
    with prompt(SHORT):
        answer = backend.acquire(key, new_token(), 30, bound=SHORT)
    assert isinstance(answer, Contended)
    assert answer.busy
    with prompt(1):
        assert isinstance(backend.acquire(key, new_token(), 30), Contended)
    stranger.rollback()
    assert take(backend, key).fence == 1


@GUARDED
@pytest.mark.parametrize("how", ["free", pytest.param("expired", marks=HAS_TTL), "takeover"])
def test_open_guard_is_busy_at_once(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str, how: str
) -> None:
    """While a guard stands on the fence, nobody is granted the key, waits, or keeps anything."""
    grant = take(backend, key, 5)
    if how == "free":
        backend.release(grant)
    elif how == "expired":
        store.elapse(6.1)
    stranger.guard(key)
    with prompt():
        answer = backend.acquire(key, new_token(), 30, replace=grant.token)
    assert isinstance(answer, Contended)
    assert answer.busy
    assert store.has_record(key) is (how != "free")
    assert store.fence(key) == grant.fence
    if how == "takeover":
        assert answer.fence == grant.fence
        assert isinstance(backend.extend(grant), Grant)
    stranger.commit()
    following = take(backend, key, replace=grant.token)
    assert store.registered.is_next(following.fence, grant.fence)


@GUARDED
def test_open_guard_stops_operators_and_not_the_holder(
    backend: BaseLockBackend, stranger: Stranger, key: str
) -> None:
    """A force-release is busy at once, and the lease stands: it is extended, settled and released.

    Also where a takeover has found the guard.
    """
    grant = take(backend, key)
    stranger.guard(key)
    for find in (
        lambda: backend.force_release(key),
        lambda: backend.acquire(key, new_token(), 30, replace=grant.token),
    ):
        with prompt():
            answer = find()
            assert isinstance(answer, Contended)
            assert (answer.busy, answer.fence) == (True, grant.fence)
            assert held(backend, key).token == grant.token
            assert isinstance(backend.extend(grant), Grant)
            assert all(isinstance(each, Grant) for each in backend.extend_many([grant]))
            assert not backend.supports_ttl or isinstance(backend.request_stop(key, 20), Record)
            assert isinstance(backend.request_stop(key), Record)
    with prompt():
        assert backend.release(grant) is True
    stranger.commit()
    assert take(backend, key).fence > grant.fence
    assert isinstance(backend.force_release(key), Record)


@HAS_ROW_LOCKS
def test_locks_of_other_keys_are_nobodys_business(
    backend: BaseLockBackend, stranger: Stranger, key: str
) -> None:
    """A transaction that holds everything of one key delays nothing of another."""
    take(backend, f"{key}-a")
    stranger.hold(f"{key}-a")
    stranger.guard(f"{key}-a")
    stranger.queue(f"{key}-a")
    with prompt():
        grant = take(backend, f"{key}-b")
        assert isinstance(backend.extend(grant), Grant)
        assert backend.release(grant) is True


#: What sets a variable of the session that bounds waits, and what shows it.
SESSION = {
    "postgresql": ("SET lock_timeout = '1234ms'", "SHOW lock_timeout", "1234ms"),
    "mysql": ("SET innodb_lock_wait_timeout = 37", "SELECT @@innodb_lock_wait_timeout", 37),
}


@pytest.mark.stores("postgresql", "mysql", why="no variable of the session bounds waits")
def test_session_keeps_its_settings(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """No operation changes or drops what the caller's session had set, whatever its answer."""
    change, show, value = SESSION[store.registered.store]
    store.ask(change)
    grant = take(backend, key)
    stranger.hold(key)
    for call in operations(backend, grant).values():
        call(0.02)
    stranger.rollback()
    backend.extend(grant)
    backend.extend_many([grant])
    backend.release(grant)
    assert store.ask(show)[0][0] == value
