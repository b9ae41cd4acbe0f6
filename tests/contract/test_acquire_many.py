"""Several keys granted at once, or none of them: `records.acquire()`, and what it is for."""

from __future__ import annotations

import asyncio
import json
import threading
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_distlock import BackendUnavailable, LockNotAcquired, distlock_all
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import InvalidArgument
from django_distlock.core.keys import new_token
from django_distlock.core.records import InTheWay
from django_distlock.handler import lock_backends
from tests.backends import Registered

from .helpers import HAS_TTL, SHORT, Later, at_once, crew, held, prompt, race, take
from .locking import eventually, grantable, held_elsewhere, lock_of, using_of
from .scripted import Script
from .stores import Elapse, Stranger
from .test_sharing_races import most_at_once

TOGETHER = pytest.mark.requires("acquires_together")
SHARES = pytest.mark.requires("supports_sharing")
SEVERAL = 5


def keys_of(key: str) -> list[str]:
    """Return some keys, not in the order of their names."""
    return [f"{key}-{number}" for number in (3, 1, 4, 0, 2)]


def ask(backend: BaseLockBackend, keys: list[str], ttl: float | None = 30, **how: Any) -> Any:
    """Ask for keys together, each with a token of its own."""
    return backend.records.acquire({each: new_token() for each in keys}, ttl, **how)


def refused(backend: BaseLockBackend, keys: list[str], **how: Any) -> InTheWay:
    """Ask for keys together, and see that none is granted."""
    before = {each: backend.read(each) for each in keys}
    found = ask(backend, keys, **how)
    assert isinstance(found, InTheWay)
    assert {each: backend.read(each) for each in keys} == before
    return found


def test_each_key_has_its_grant(backend: BaseLockBackend, key: str) -> None:
    """In the order of the question, as by itself: token, fence, record, end."""
    keys = keys_of(key)
    tokens = {each: new_token() for each in keys}
    grants = backend.records.acquire(tokens, 30)
    assert not isinstance(grants, InTheWay)
    assert [each.key for each in grants] == keys
    for grant in grants:
        assert grant.token == tokens[grant.key]
        record = held(backend, grant.key)
        assert (record.token, record.fence) == (grant.token, grant.fence)
        assert (record.acquired_at, record.expires_at) == (grant.acquired_at, grant.expires_at)
    assert refused(backend, keys).key in keys
    assert all(backend.release(each) is True for each in grants)
    again = ask(backend, keys)
    assert all(now.fence > before.fence for now, before in zip(again, grants, strict=True))
    assert backend.records.acquire({}, 30) == []


def test_one_key_in_the_way_is_enough(backend: BaseLockBackend, key: str) -> None:
    """Nothing is granted then, and the answer is about that key."""
    keys = keys_of(key)
    grant = take(backend, f"{key}-2")
    found = refused(backend, keys)
    assert found.key == grant.key
    assert found.answer.fence == grant.fence
    assert backend.release(grant) is True
    assert len(ask(backend, keys)) == SEVERAL


@TOGETHER
def test_refused_question_uses_no_fence_up(backend: BaseLockBackend, key: str) -> None:
    """Nor does it write: a key that was never granted has no counter behind it."""
    keys = keys_of(key)
    before = take(backend, f"{key}-1")
    assert backend.release(before) is True
    grant = take(backend, f"{key}-4")
    for _ in range(3):
        refused(backend, keys)
    counters = {each: backend.counter(each) for each in keys}
    assert counters[f"{key}-0"] is None
    assert counters[f"{key}-1"].fence == before.fence  # type: ignore[union-attr]
    assert counters[f"{key}-4"].fence == grant.fence  # type: ignore[union-attr]


@pytest.mark.requires("acquires_together", "supports_sharing")
def test_refusal_that_is_seen_late_undoes_what_came_before(
    backend: BaseLockBackend, key: str
) -> None:
    """Those who share a key are found behind the grants of the keys in front of it."""
    keys = keys_of(key)
    reader = take(backend, f"{key}-4", permits=None)
    found = refused(backend, keys)
    assert (found.key, found.answer.fence) == (reader.key, reader.fence)
    assert all(backend.counter(each) is None for each in keys if each != reader.key)


@SHARES
def test_shared_keys(backend: BaseLockBackend, key: str) -> None:
    """Several share all of them, up to the permits; nobody is alone beside them."""
    keys = keys_of(key)
    for permits in (None, 2):
        grants = [*ask(backend, keys, permits=permits), *ask(backend, keys, permits=permits)]
        assert all(each.shared for each in grants)
        assert len({(each.key, each.fence) for each in grants}) == 2 * SEVERAL
        refused(backend, keys)
        if permits:
            refused(backend, keys, permits=permits)
        assert all(backend.release(each) is True for each in grants)
    alone = ask(backend, keys)
    assert not any(each.shared for each in alone)
    refused(backend, keys, permits=None)


@HAS_TTL
def test_expired_leases_are_replaced(backend: BaseLockBackend, elapse: Elapse, key: str) -> None:
    """By grants with their own full time."""
    keys = keys_of(key)
    first = ask(backend, keys[:3], 5)
    elapse(6.1)
    second = ask(backend, keys, 20)
    assert len(second) == SEVERAL
    assert all(now.fence > old.fence for now, old in zip(second, first, strict=False))
    assert not any(backend.release(each) for each in first)
    for each in second:
        assert (each.expires_at - each.acquired_at).total_seconds() == pytest.approx(20)


@pytest.mark.requires("supports_operators")
@pytest.mark.stores("memory", "sqlite", "postgresql", "mysql", "redis", why="it has no pause")
def test_paused_key_is_in_the_way(backend: BaseLockBackend, key: str) -> None:
    """As by itself, also where somebody holds it."""
    holder = take(backend, f"{key}-2")
    backend.pause(f"{key}-2", datetime.now(UTC) + timedelta(seconds=60))
    for fence in (holder.fence, None):
        found = refused(backend, keys_of(key))
        assert found.key == f"{key}-2"
        assert (found.answer.paused, found.answer.fence) == (True, fence)
        backend.release(holder)
    backend.pause(f"{key}-2", None)
    assert len(ask(backend, keys_of(key))) == SEVERAL


@pytest.mark.stores("postgresql", why="its transactions lock a single record")
def test_transaction_in_the_way_is_waited_for_within_the_bound(
    backend: BaseLockBackend, stranger: Stranger, key: str
) -> None:
    """For all keys together; a guard is not waited for."""
    for stand in (stranger.queue, stranger.guard):
        for each in ("1", "3"):
            stand(f"{key}-{each}")
        with prompt(SHORT):
            found = ask(backend, keys_of(key), bound=SHORT)
        assert found.answer.busy
        assert found.key == f"{key}-1"
        assert not any(map(backend.read, keys_of(key)))
        stranger.rollback()
        assert all(backend.release(each) for each in ask(backend, keys_of(key)))


@pytest.mark.aliases("memory", "postgres")
def test_wrong_arguments_touch_nothing(backend: BaseLockBackend, key: str) -> None:
    """The error names the value, or what is there twice."""
    token = new_token()
    for tokens, ttl, what in (
        ({"\u00e9" + key: new_token(), "e\u0301" + key: new_token()}, 30, "same name"),
        ({key: token, f"{key}-2": token}, 30, "same token"),
        ({key: token, "": new_token()}, 30, "key"),
        ({key: token, f"{key}-2": "short"}, 30, "token"),
        ({key: token}, -1, "ttl"),
    ):
        with pytest.raises(InvalidArgument, match=what):
            backend.records.acquire(tokens, ttl)
    assert backend.read(key) is None


# What several locks make of it


@pytest.mark.aliases("postgres")
def test_all_keys_take_one_statement(registered: Registered, key: str) -> None:
    """As a single one does; so does a refusal."""
    keys = [f"{key}-{number}" for number in range(20)]
    locks = distlock_all(*keys, wait=0, heartbeat=False, backend=registered.alias)
    locks.acquire().release()
    using = using_of(registered)
    with CaptureQueriesContext(connections[using]) as queries:
        leases = locks.acquire()
    assert len(queries) == 1
    with CaptureQueriesContext(connections[using]) as queries, pytest.raises(LockNotAcquired):
        distlock_all(*keys, wait=0, backend=registered.alias).acquire()
    assert len(queries) == 1
    assert leases.release()


@pytest.mark.aliases("redis")
def test_all_keys_take_one_script(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a single one does; so does a refusal."""
    from django_distlock.backends.redis.lines import ThreadLines

    keys = [f"{key}-{number}" for number in range(20)]
    locks = distlock_all(*keys, wait=0, heartbeat=False, backend=registered.alias)
    locks.acquire().release()
    exchanges: list[Any] = []
    exchange = ThreadLines._exchange

    def counted(self: ThreadLines, commands: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            exchanges.append(commands)
        return exchange(self, commands)

    monkeypatch.setattr(ThreadLines, "_exchange", counted)
    leases = locks.acquire()
    assert len(exchanges) == 1
    with pytest.raises(LockNotAcquired):
        distlock_all(*keys, wait=0, backend=registered.alias).acquire()
    assert len(exchanges) == 2
    assert leases.release()


def test_lost_answer(scripted: Script, key: str) -> None:
    """What may have been granted is gone on with, or given back: of all keys."""
    keys = [f"{key}-1", f"{key}-2", f"{key}-3"]
    lost = BackendUnavailable("lost", code="network_timeout")
    scripted["acquire"] = [None, lost]
    with distlock_all(*keys, wait=5, backend="scripted") as leases:
        assert leases.held
    scripted["acquire"] = [None, lost]
    with pytest.raises(BackendUnavailable):
        distlock_all(*keys, wait=0, backend="scripted").acquire()
    store = lock_backends["scripted"]
    assert eventually(lambda: not any(map(store.read, keys)))


def test_answer_behind_the_end_of_the_leases(scripted: Script, key: str) -> None:
    """It counts as none, and its grants are given back."""
    keys = [f"{key}-1", f"{key}-2"]
    scripted["acquire"] = [0.3]
    locks = distlock_all(*keys, ttl=0.2, wait=5, heartbeat=False, backend="scripted")
    leases = locks.acquire()
    assert leases.held
    assert leases.release()


def test_cancelled_question_leaves_nothing_held(scripted: Script, key: str) -> None:
    """Also one that is answered behind that."""
    keys = [f"{key}-1", f"{key}-2"]
    scripted["acquire"] = [0.5]

    async def enter() -> None:
        async with distlock_all(*keys, backend="scripted"):
            pytest.fail("it was cancelled")

    async def cancel() -> None:
        entering = asyncio.create_task(enter())
        await asyncio.sleep(0.05)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering

    asyncio.run(cancel())
    assert not any(map(lock_backends["scripted"].read, keys))


@pytest.mark.aliases("postgres", "redis")
def test_processes_with_keys_in_common(registered: Registered, key: str, tmp_path: Path) -> None:
    """In any order, with and without a wait: nobody ever has a key with another, and all go on."""
    path, times = tmp_path / "held", 15
    target = "tests.contract.sharing_workers:hold_several"
    with crew(4, target, registered.alias, key, str(path), times) as workers:
        granted = race(workers, 600)
    assert all(each >= times for each in granted)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number in range(4):
        of_key = [each for each in lines if each[0] == number]
        alone = [each for each in of_key if not each[1]]
        assert len({each[2] for each in of_key}) == len(of_key), "a fence was given twice"
        assert most_at_once([(0, True, *each[3:]) for each in alone]) == 1
        for _number, _shared, fence, began, ended in alone:
            others = [each for each in of_key if each[2] != fence]
            assert not [each for each in others if each[3] < ended and began < each[4]]
    store = lock_backends[registered.alias]
    assert not any(store.read(f"{key}-{number}") for number in range(4))


def test_waiters_are_woken_in_turn(registered: Registered, key: str) -> None:
    """Who waits for one of the keys has all of them soon behind its end."""
    keys = sorted(keys_of(key))
    with held_elsewhere(lock_of(registered, keys[3])) as lease:
        waiter = Later(distlock_all(*keys, wait=30, backend=registered.alias).acquire)
        assert eventually(lambda: not grantable(lock_of(registered, keys[0], wait=0)))
        with prompt(1):
            Later(lease.release).result()
            leases = waiter.result()
    assert at_once([partial(leases[each].release) for each in keys]) == [True] * SEVERAL
