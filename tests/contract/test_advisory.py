"""Locks that last for a session: what is theirs alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from django_distlock.backends.advisory import AdvisoryBackend
from django_distlock.conf import BackendConfig
from django_distlock.core.errors import LockUsageError
from django_distlock.core.keys import key_hash, new_token
from django_distlock.core.records import Contended, Grant, Holder, Raised, Record, clock_fence
from django_distlock.exceptions import InvalidLockBackend

from .helpers import Later, contend, extend, held, listed, prompt, take
from .stores import Postgres
from .stores_session import SessionStore, another

pytestmark = pytest.mark.aliases("advisory")


@pytest.fixture
def backend(store: SessionStore) -> AdvisoryBackend:
    """Give the backend under test."""
    return store.advisory


@pytest.fixture
def other(backend: AdvisoryBackend) -> AdvisoryBackend:
    """Give a backend that knows of the first one's leases what other processes know."""
    return another(backend)


@pytest.fixture
def stranger(store: SessionStore) -> Postgres:
    """Give another client of the database."""
    made = store.stranger()
    assert isinstance(made, Postgres)
    return made


# What it can do


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda backend, grant: backend.release(grant, 5), "keep a key held until a time"),
        (lambda backend, grant: backend.request_stop(grant.key, 5), "shorten a lease"),
        (lambda backend, grant: backend.read_token(grant.token), "find a lock by its token"),
    ],
    ids=["settle", "shorten", "read_token"],
)
def test_what_needs_a_ttl_or_a_record_is_refused(
    backend: AdvisoryBackend, key: str, call: Callable[[AdvisoryBackend, Grant], object], what: str
) -> None:
    """What no session can do is refused with a word on why, and changes nothing."""
    grant = take(backend, key)
    with pytest.raises(LockUsageError, match=what) as caught:
        call(backend, grant)
    assert caught.value.code == "unsupported"
    assert backend.release(grant) is True


def test_lease_has_no_end_in_the_store(backend: AdvisoryBackend, key: str) -> None:
    """The ttl is the holder's own: grants, extends, records and refusals know no end."""
    grant = take(backend, key, 5)
    assert (grant.ttl, grant.expires_at) == (5, None)
    extended = extend(backend, grant, 7)
    assert (extended.ttl, extended.expires_at) == (7, None)
    assert (extended.fence, extended.acquired_at) == (grant.fence, grant.acquired_at)
    record = held(backend, key)
    assert (record.ttl, record.expires_at, record.free_at) == (7, None, None)
    assert record.renewed_at > record.acquired_at == grant.acquired_at
    contended = contend(backend, key)
    assert (contended.expires_at, contended.free_in) == (None, None)
    assert contended.held_for is not None
    assert 0 <= contended.held_for < 60


def test_cleanup_has_nothing_to_do(backend: AdvisoryBackend, store: SessionStore, key: str) -> None:
    """No record outlives its lock, and cleanup leaves held keys and counters alone."""
    backend.cleanup(store.now() + timedelta(days=1))  # The notes that other tests have left.
    grant = take(backend, key)
    assert backend.cleanup(store.now() + timedelta(days=1)) == 0
    assert store.fence(key) == grant.fence
    assert backend.release(grant) is True


def test_wrong_options_are_refused() -> None:
    """The bound is an int of at least 1, and the alias a PostgreSQL: an error names the option."""
    number: Any
    for number in (0, -1, True, 1.5, "20", None):
        with pytest.raises(InvalidLockBackend, match=r"DISTLOCK\['default'\]: max_connections"):
            AdvisoryBackend(BackendConfig(), using="default", max_connections=number)
    with pytest.raises(InvalidLockBackend, match="sqlite database. Only PostgreSQL"):
        AdvisoryBackend(BackendConfig(), using="sqlite")


# Fences


def test_fence_tells_when_the_key_was_granted(
    backend: AdvisoryBackend, other: AdvisoryBackend, store: SessionStore, key: str
) -> None:
    """It is the server's clock in units of 10 µs; ahead of it, others know the session's time."""
    first = take(backend, key)
    assert first.fence == clock_fence(first.acquired_at) == store.fence(key)
    backend.release(first)
    ahead = clock_fence(store.now()) + 10**9
    backend.raise_fences(ahead, key=key)
    grant = take(backend, key)
    assert grant.fence == ahead + 1
    assert grant.acquired_at <= store.now()
    # Others can only tell that the session began before.
    assert held(other, key).acquired_at <= grant.acquired_at


# What other processes see


def test_others_see_fence_time_and_session(
    backend: AdvisoryBackend, other: AdvisoryBackend, key: str
) -> None:
    """By server, fence and clock alike; the holder is known by host and session, not by token."""
    grant = take(backend, key, 30, holder=Holder(host="secret", metadata={"user": "Ada"}))
    session = backend._holdings.of_token(grant.token)
    assert session is not None
    record = held(other, key)
    assert (record.key, record.fence) == (key, grant.fence)
    assert record.acquired_at == grant.acquired_at
    assert record.renewed_at >= record.acquired_at
    assert (record.token, record.ttl, record.expires_at, record.free_at) == ("", None, None, None)
    assert record.holder == Holder(host="127.0.0.1", metadata={"session": session.session.pid})
    contended = contend(other, key)
    assert (contended.holder, contended.fence) == (record.holder, grant.fence)
    assert contended.acquired_at == grant.acquired_at
    assert listed(other, key, host="127.0.0.1") == [key]
    assert listed(other, key, task_id="any") == []


def test_every_key_is_listed(backend: AdvisoryBackend, other: AdvisoryBackend, key: str) -> None:
    """Whatever it is made of, and however long; one may look like a hash."""
    ends = ("-invoice 42 %~", "-café 🔒", "-a\tb", "x" * 200)
    for whole in (key_hash(key), *(key + end for end in ends)):
        grant = take(backend, whole)
        (record,) = other.list(whole).records
        assert (record.key, record.fence) == (whole, grant.fence)


def test_locks_of_others_with_the_same_number_space_are_not_ours(
    backend: AdvisoryBackend, stranger: Postgres, key: str
) -> None:
    """Who takes advisory locks under a name like ours is not listed."""
    stranger.execute(f"SET application_name = 'distlock:{key}'")
    stranger.execute("SELECT pg_advisory_lock(4711)")
    assert listed(backend, key) == []


def test_request_to_stop_reaches_another_process(
    backend: AdvisoryBackend, other: AdvisoryBackend, key: str
) -> None:
    """The holder is told when it extends; the next grant of its session was not asked."""
    grant = take(backend, key)
    record = other.request_stop(key)
    assert isinstance(record, Record)
    assert record.stop_requested_at is not None
    assert held(other, key).stop_requested_at == record.stop_requested_at
    assert other.request_stop(key) == held(other, key)
    extended = extend(backend, grant)
    assert extended.stop_requested
    assert held(backend, key).stop_requested_at is not None
    backend.release(grant)
    again = backend.extend(take(backend, key))
    assert isinstance(again, Grant)
    assert not again.stop_requested


def test_request_to_stop_that_comes_late_is_for_nobody(
    backend: AdvisoryBackend, other: AdvisoryBackend, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that got another lock meanwhile is not stopped by what was meant for the last."""
    late = take(backend, key)
    find, granted = AdvisoryBackend._find, []

    def found_late(self: AdvisoryBackend, name: str, bound: float, on: str) -> object:
        found = find(self, name, bound, on)
        backend.release(late)
        granted.append(take(backend, key))
        return found

    monkeypatch.setattr(AdvisoryBackend, "_find", found_late)
    assert other.request_stop(key) is None
    monkeypatch.undo()
    (grant,) = granted
    extended = extend(backend, grant)
    assert not extended.stop_requested


def test_force_release_ends_the_session_of_another_process(
    backend: AdvisoryBackend, other: AdvisoryBackend, store: SessionStore, key: str
) -> None:
    """The fence moves on, the session ends, and its holder sees it without a query."""
    grant = take(backend, key)
    assert backend.is_cut_off(grant) is False
    record = other.force_release(key)
    assert isinstance(record, Record)
    assert record.fence == grant.fence < store.fence(key)
    assert backend.is_cut_off(grant) is True
    assert take(other, key).fence > store.fence(key) - 1 > grant.fence
    assert backend.extend(grant) is None
    assert backend.extend_many([grant]) == [None]
    assert backend.release(grant) is False
    # One that was released, and one that this process never had, were not cut off.
    given_back = take(backend, f"{key}-2")
    assert backend.release(given_back) is True
    assert backend.is_cut_off(given_back) is False
    assert other.is_cut_off(take(backend, f"{key}-2")) is False


def test_token_of_another_process_is_no_use(
    backend: AdvisoryBackend, other: AdvisoryBackend, key: str
) -> None:
    """A lease belongs to the process that took it: elsewhere its token holds nothing."""
    grant = take(backend, key)
    assert other.release(grant) is False
    assert other.extend(grant) is None
    assert contend(other, key, replace=grant.token).fence == grant.fence
    assert isinstance(backend.extend(grant), Grant)


def test_request_to_stop_stays_where_the_holder_does(
    backend: AdvisoryBackend, other: AdvisoryBackend, key: str
) -> None:
    """Its next lease is asked to stop as well, also where it has not seen the request yet."""
    holder = Holder(host="web-1")
    grant = take(backend, key, holder=holder)
    assert isinstance(other.request_stop(key), Record)
    grant = take(backend, key, holder=holder, replace=grant.token)
    assert held(other, key).stop_requested_at is not None
    assert extend(backend, grant).stop_requested
    grant = take(backend, key, holder=Holder(host="web-2"), replace=grant.token)
    assert held(other, key).stop_requested_at is None
    assert not extend(backend, grant).stop_requested


# Others in the way


def test_held_key_is_contended_whatever_is_locked(
    backend: AdvisoryBackend, stranger: Postgres, key: str
) -> None:
    """Who loses waits for nobody and is not busy, also where the table of fences is locked."""
    grant = take(backend, key)
    stranger.guard(key)
    stranger.execute(f"LOCK TABLE {stranger.store.fences} IN EXCLUSIVE MODE")
    with prompt():
        contended = contend(backend, key)
        missing = backend.acquire(f"{key}-free", new_token(), 30)
    assert (contended.busy, contended.fence) == (False, grant.fence)
    assert isinstance(missing, Contended)
    assert missing.busy
    stranger.rollback()
    take(backend, f"{key}-free")


def test_pause_that_comes_amid_an_attempt_wins(
    backend: AdvisoryBackend, store: SessionStore, stranger: Postgres, key: str
) -> None:
    """A pause that is committed while an attempt waits for the fence is seen, and nothing held."""
    grant = take(backend, key)
    backend.release(grant)
    until = int((store.now() + timedelta(minutes=1)).timestamp() * 1_000_000)
    # The session that attempts waits a little longer than usual for the transaction of the pause.
    session = backend._sessions.take()
    session._raw.execute("SET lock_timeout = '10s'")
    backend._sessions.put_back(session)
    stranger.execute(
        f"UPDATE {store.fences} SET paused_until = %s WHERE storage_key = %s",
        until,
        store.name(key),
    )
    attempt = Later(backend.acquire, key, new_token(), 30)
    stranger.wait_until_blocked()
    stranger.commit()
    answer = attempt.result()
    assert isinstance(answer, Contended)
    assert (answer.paused, answer.busy) == (True, False)
    assert not store.has_record(key)
    assert store.fence(key) == grant.fence


@pytest.mark.parametrize("operation", ["pause", "raise_fences"])
def test_counter_is_made_once(
    backend: AdvisoryBackend, store: SessionStore, stranger: Postgres, key: str, operation: str
) -> None:
    """An operator meets the counter that a first grant makes at the same moment, and uses it."""
    calls: dict[str, Callable[[], object]] = {
        "pause": partial(backend.pause, key, store.now() + timedelta(minutes=1)),
        "raise_fences": partial(backend.raise_fences, 5, key=key),
    }
    insert = f"INSERT INTO {store.fences} (storage_key, key, fence) VALUES (%s, %s, 1)"
    stranger.execute(insert, store.name(key), key)
    made = Later(calls[operation])
    stranger.wait_until_blocked()
    stranger.commit()
    assert made.result() == (Raised(1) if operation == "raise_fences" else True)
    assert store.fence(key) == (5 if operation == "raise_fences" else 1)


def test_answer_that_was_taken_is_not_missed(backend: AdvisoryBackend, key: str) -> None:
    """Interrupted just behind it, whoever asked could not say that none is to come."""
    grant = take(backend, key)
    holding = backend._holdings.of_token(grant.token)
    assert holding is not None
    holding.session.awaits = True
    assert backend.release(grant) is True
    assert backend.read(key) is None
