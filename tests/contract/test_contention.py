"""Whoever loses takes no lock, writes nothing and waits for nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from django.db import DatabaseError

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.records import Contended, Grant

from .helpers import SHORT, contend, held, prompt, take
from .stores import DatabaseStore, Elapse, Postgres, Stranger

HAS_TRANSACTIONS = pytest.mark.stores(
    "sqlite", "postgresql", "mysql", why="each operation is atomic by itself"
)
HAS_MARKS = pytest.mark.stores(
    "memory", "sqlite", "postgresql", "mysql", "redis", "redis_cluster",
    why="a session wakes nobody yet, and has no mark for it",
)  # fmt: skip


@contextmanager
def read_only(store: DatabaseStore) -> Iterator[None]:
    """Let the server refuse whatever this session writes, row locks included."""
    on_mysql = store.registered.store == "mysql"
    setting = "SESSION TRANSACTION READ" if on_mysql else "default_transaction_read_only ="
    store.ask_everywhere(f"SET {setting} {'ONLY' if on_mysql else 'on'}")
    try:
        yield
    finally:
        store.ask_everywhere(f"SET {setting} {'WRITE' if on_mysql else 'off'}")


def versions(store: DatabaseStore, key: str) -> list[object]:
    """Return what changes when rows are written: in PostgreSQL the rows, in MariaDB a count.

    PostgreSQL's rows are also marked by who locks them.
    """
    if store.registered.store == "mysql":
        kinds = "'Handler_delete', 'Handler_update', 'Handler_write'"
        return [*store.ask_everywhere(f"SHOW SESSION STATUS WHERE variable_name IN ({kinds})")]
    return [
        store.ask(
            f"SELECT xmin::text, xmax::text, ctid::text FROM {table} WHERE storage_key = %s",
            [store.name(key)],
        )
        for table in (store.locks, store.fences)
    ]


@pytest.mark.stores("postgresql", "mysql", why="no session can be forbidden to write")
def test_session_that_may_not_write_can_lose(
    backend: BaseLockBackend, store: DatabaseStore, key: str
) -> None:
    """Contended is an answer also where the server refuses each write and each row lock."""
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    with read_only(store):
        assert contend(backend, key).fence == grant.fence
        # The flag stands already.
        assert contend(backend, key, wanted=True).fence == grant.fence
        with pytest.raises(DatabaseError, match="(?i)read.only"):
            store.ask(f"SELECT 1 FROM {store.locks} FOR UPDATE")


@pytest.mark.stores("postgresql", "mysql", "session", why="nothing counts what is written")
def test_losing_leaves_the_rows_alone(
    backend: BaseLockBackend, store: DatabaseStore, key: str
) -> None:
    """Neither the record nor the fence is written by those who lose, nor the mark twice."""
    take(backend, key)
    for wanted in (False, True):
        contend(backend, key, wanted=wanted)
        before = versions(store, key)
        for _ in range(3):
            contend(backend, key, wanted=wanted)
        # A connection of ours that idled for long may have been closed meanwhile.
        assert all(each in before for each in versions(store, key)), wanted


@HAS_TRANSACTIONS
def test_losing_waits_for_nobody(backend: BaseLockBackend, stranger: Stranger, key: str) -> None:
    """Contended comes at once and is not busy, whatever another transaction holds."""
    grant = take(backend, key)
    contend(backend, key, wanted=True)

    def hold_rows() -> None:
        stranger.queue(key)
        stranger.hold(key)
        stranger.guard(key)

    def hold_tables() -> None:
        stranger.hold_table()
        if isinstance(stranger, Postgres):
            stranger.execute(f"LOCK TABLE {stranger.store.fences} IN EXCLUSIVE MODE")

    for stand_in_the_way in (hold_rows, hold_tables):
        stand_in_the_way()
        for wanted in (False, True):
            with prompt():
                contended = contend(backend, key, wanted=wanted)
            assert (contended.fence, contended.busy) == (grant.fence, False)
        stranger.rollback()


@HAS_MARKS
def test_wanted_marks_the_grant(backend: BaseLockBackend, key: str) -> None:
    """A loser that wants to be woken marks the record, and changes nothing else of it."""
    take(backend, key, wanted=True)
    before = held(backend, key)
    assert before.wanted is False
    contend(backend, key)
    assert held(backend, key) == before
    for wanted in (True, False, True):
        contend(backend, key, wanted=wanted)
        assert held(backend, key) == replace(before, wanted=True)


@pytest.mark.requires("supports_ttl")
def test_wanted_survives_extends(backend: BaseLockBackend, key: str) -> None:
    """The mark stands until the grant ends."""
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    backend.extend(grant)
    backend.extend_many([grant])
    backend.request_stop(key, 20)
    backend.release(grant, 20)
    assert held(backend, key).wanted is True


def test_new_grant_has_no_mark(backend: BaseLockBackend, elapse: Elapse, key: str) -> None:
    """The mark belongs to a grant and not to its key, however that grant has ended."""
    ends: dict[str, Callable[[Grant], object]] = {
        "release": backend.release,
        "takeover": lambda _grant: None,
        "force-release": lambda grant: backend.force_release(grant.key),
        "expiry": lambda _grant: elapse(6.1),
    }
    for how, end in ends.items():
        grant = take(backend, f"{key}-{how}", 5)
        contend(backend, grant.key, wanted=True)
        end(grant)
        take(backend, grant.key, replace=grant.token, wanted=True)
        assert held(backend, grant.key).wanted is False, how


@HAS_TRANSACTIONS
def test_mark_that_cannot_be_set_is_busy(
    backend: BaseLockBackend, stranger: Stranger, key: str
) -> None:
    """Where a transaction holds the record, the flag is not set: busy, with the holder."""
    grant = take(backend, key)
    stranger.hold(key)
    with prompt(SHORT):
        contended = backend.acquire(key, "x" * 22, 30, wanted=True, bound=SHORT)
    assert isinstance(contended, Contended)
    assert (contended.busy, contended.fence) == (True, grant.fence)
    stranger.rollback()
    assert held(backend, key).wanted is False
