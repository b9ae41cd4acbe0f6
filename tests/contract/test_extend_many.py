"""Many leases extended at once."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import UNKNOWN, Grant

from .helpers import Later, held, prompt, take
from .stores import Elapse, Store, Stranger


@pytest.mark.requires("supports_ttl")
def test_answers_are_in_the_order_of_the_grants(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """Each lease gets its own ttl, and each answer stands where its grant stood."""
    ttls = [20, 5.5, 300, 0.5, 60]
    names = ["c", "a", "e", "b", "d"]
    grants = [take(backend, f"{key}-{name}", ttl) for name, ttl in zip(names, ttls, strict=True)]
    before = store.now()
    answers = backend.extend_many(grants)
    after = store.now()
    for answer, grant in zip(answers, grants, strict=True):
        assert isinstance(answer, Grant)
        assert (answer.key, answer.token, answer.fence) == (grant.key, grant.token, grant.fence)
        assert answer.acquired_at == grant.acquired_at
        assert answer.ttl == grant.ttl
        assert answer.expires_at is not None
        assert before <= answer.expires_at - timedelta(seconds=grant.ttl or 0) <= after
        assert held(backend, grant.key).expires_at == answer.expires_at


@pytest.mark.requires("supports_ttl")
def test_some_are_gone(backend: BaseLockBackend, elapse: Elapse, key: str) -> None:
    """Expired, released, foreign and unknown leases answer None beside the live ones."""
    expired = take(backend, f"{key}-expired", 5)
    elapse(6.1)
    live = [take(backend, f"{key}-live-{number}") for number in range(2)]
    released = take(backend, f"{key}-released")
    backend.release(released)
    foreign = replace(live[0], token=new_token())
    unknown = replace(live[0], key=f"{key}-never", token=new_token())
    answers = backend.extend_many([expired, live[1], released, foreign, live[0], unknown])
    assert [type(answer) for answer in answers] == [
        type(None), Grant, type(None), type(None), Grant, type(None),
    ]  # fmt: skip
    assert [answer.key for answer in answers if isinstance(answer, Grant)] == [
        live[1].key, live[0].key,
    ]  # fmt: skip


def test_many_are_legal(backend: BaseLockBackend, key: str) -> None:
    """Thirty leases are extended as one is, and none as well."""
    assert backend.extend_many([]) == []
    grants = [take(backend, f"{key}-{number}") for number in range(30)]
    answers = backend.extend_many(grants[::-1])
    assert [answer.key for answer in answers if isinstance(answer, Grant)] == [
        grant.key for grant in grants[::-1]
    ]


@pytest.mark.requires("supports_ttl")
def test_replaces_also_when_that_is_sooner(
    backend: BaseLockBackend, elapse: Elapse, key: str
) -> None:
    """As with extend, the ttl of the grant counts from now and replaces what was left."""
    grant = take(backend, key, 500)
    assert isinstance(backend.extend_many([replace(grant, ttl=5)])[0], Grant)
    elapse(6.1)
    assert backend.read(key) is None


def test_request_to_stop_is_seen(backend: BaseLockBackend, key: str) -> None:
    """Each answer carries the request to stop of its own key."""
    grants = [take(backend, f"{key}-{number}") for number in range(2)]
    backend.request_stop(f"{key}-1")
    answers = backend.extend_many(grants)
    assert [answer.stop_requested for answer in answers if isinstance(answer, Grant)] == [
        False, True,
    ]  # fmt: skip


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
