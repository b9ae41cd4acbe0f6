"""Many leases extended at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import UNKNOWN, Grant

from .helpers import Later, extend, held, prompt, take
from .stores import Elapse, Stranger


@pytest.mark.requires("supports_ttl")
def test_each_ttl_replaces_what_was_left(
    backend: BaseLockBackend, elapse: Elapse, key: str
) -> None:
    """No expiry stays none, until an extend by a ttl; and an end may come sooner than it was."""
    grants = [take(backend, f"{key}-{name}", ttl) for name, ttl in (("a", None), ("b", 5))]
    grants.append(replace(take(backend, f"{key}-c", 500), ttl=5.0))
    for answer, grant in zip(backend.extend_many(grants), grants, strict=True):
        assert isinstance(answer, Grant)
        assert answer.ttl == grant.ttl
    elapse(6.1)
    assert [backend.read(f"{key}-{name}") is None for name in "abc"] == [False, True, True]
    elapse(100)
    assert extend(backend, grants[0], 5).expires_at is not None
    elapse(6.1)
    assert backend.read(f"{key}-a") is None


@pytest.mark.stores("postgresql", "mysql", why="no transaction can hold a single record")
def test_locked_rows_are_skipped(
    backend: BaseLockBackend, elapse: Elapse, stranger: Stranger, key: str
) -> None:
    """A record that a transaction holds is unknown, at once; the others are extended."""
    expired = take(backend, f"{key}-expired", 5)
    elapse(6.1)
    live = [take(backend, f"{key}-live-{number}") for number in range(2)]
    locked = take(backend, f"{key}-locked")
    foreign = replace(locked, token=new_token())
    record = held(backend, locked.key)
    stranger.hold(locked.key)
    with prompt():
        # In a thread, because who waits for the stranger here waits for ever.
        waiter = Later(backend.extend_many, [live[1], locked, expired, foreign, live[0]])
        answers = waiter.result(10)
    assert isinstance(answers[0], Grant)
    assert answers[1] is UNKNOWN
    assert answers[2] is None
    assert answers[3] is None
    assert isinstance(answers[4], Grant)
    assert held(backend, locked.key) == record
    stranger.rollback()
    assert isinstance(backend.extend_many([locked])[0], Grant)


@pytest.mark.stores("sqlite", "postgresql", "mysql", why="each operation is atomic by itself")
def test_busy_store_knows_nothing(backend: BaseLockBackend, stranger: Stranger, key: str) -> None:
    """Where another transaction holds the whole table, each answer is unknown, within a second."""
    grants = [take(backend, f"{key}-{number}") for number in range(2)]
    stranger.hold_table()
    with prompt(1):
        assert Later(backend.extend_many, grants).result(10) == [UNKNOWN, UNKNOWN]
    stranger.rollback()
    assert all(isinstance(answer, Grant) for answer in backend.extend_many(grants))
