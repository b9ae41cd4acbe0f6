"""Bridged backends: a lease holds what old code locks as well."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections
from redis import Redis

from django_distlock import (
    BackendUnavailable,
    Lease,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    distlock,
    distlock_all,
    lock_backends,
)
from django_distlock.backends.database import DatabaseBackend
from django_distlock.compat.old import OldAdvisoryLock, OldCacheAdd, OldLock, OldRedisLock
from django_distlock.core.errors import InvalidArgument
from django_distlock.core.keys import new_token, own_key
from django_distlock.core.records import Attempt, Grant, InTheWay
from django_distlock.process.host import current_holder
from tests.contract.aliases import alias_like
from tests.contract.helpers import Later, crew, race
from tests.contract.locking import eventually
from tests.contract.redis_clients import single_url

from .bridges import STORES, as_before, bridged, numbered, old
from .databases import ask
from .wires import wire

TURNS = 15
#: For what the bridge decides, before it asks an old lock of whichever kind.
ANY_KIND = pytest.mark.parametrize("kind", ["cache"])


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    """Name each kind of old lock."""
    name: str = request.param
    return name


@pytest.fixture
def backend(kind: str) -> Iterator[str]:
    """Give a backend with a bridge to an old lock of that kind."""
    with bridged(STORES[kind], old(kind)) as alias:
        yield alias


def is_free(kind: str, key: str) -> bool:
    """Say whether old code would get its lock, from another thread."""

    def look() -> bool:
        if kind == "redis":
            with Redis.from_url(single_url()) as client:
                return not client.lock(f"old:{key}").locked()
        if kind == "cache":
            return caches["redis"].get(f"old-{key}") is None
        ((free,),) = ask("default", "SELECT pg_try_advisory_lock(%s)", numbered(key))
        if free:
            ask("default", "SELECT pg_advisory_unlock(%s)", numbered(key))
        return bool(free)

    return Later(look).result()


def was_freed(kind: str, key: str) -> bool:
    """Say whether old code gets its lock; the end of a session takes its server a moment."""
    return eventually(lambda: is_free(kind, key), 10) if kind == "advisory" else is_free(kind, key)


def lose(kind: str, key: str) -> None:
    """End the old lock of a key under its holder."""
    if kind == "redis":
        with Redis.from_url(single_url()) as client:
            client.delete(f"old:{key}")
    elif kind == "cache":
        caches["redis"].delete(f"old-{key}")
    else:
        ended = ask(
            "default",
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_locks"
            " WHERE locktype = 'advisory' AND objid = %s AND classid = 0 AND granted",
            numbered(key),
        )
        assert ended == [(True,)]


def test_old_and_new_code_exclude_each_other(kind: str, key: str, tmp_path: Path) -> None:
    """Two processes with each add to a counter in a file, and no addition is lost."""
    path = tmp_path / "counter"
    path.touch()
    with ExitStack() as stack:
        workers = [
            worker
            for form in ("old", "new")
            for worker in stack.enter_context(
                crew(2, "tests.integration.bridges:count", kind, form, key, str(path), TURNS)
            )
        ]
        race(workers, 300)
    assert int(path.read_text()) == 4 * TURNS, "two held a key at once"


def test_lease_waits_for_old_code(backend: str, kind: str, key: str) -> None:
    """Refused at once without a wait, and granted when the old lock is free."""
    with as_before(kind, key):
        with pytest.raises(LockNotAcquired, match="it is held"):
            distlock(key, backend=backend, wait=0).acquire()
        assert lock_backends[backend].read(key) is None
        later = Later(distlock(key, backend=backend, wait=20).acquire)
    assert later.result(30).release()
    assert was_freed(kind, key)


def test_old_code_waits_for_the_lease(backend: str, kind: str, key: str) -> None:
    """Until its release, and no shorter than its renewals make it; so does other new code."""
    with distlock(key, backend=backend, ttl=1.5, wait=5) as lease:
        before = lease.deadline
        assert eventually(lambda: lease.deadline > before + 1.5, 20)
        assert not is_free(kind, key)
        # The lease has the old lock as well, which is asked first.
        with pytest.raises(LockNotAcquired, match="has held it for") as refused:
            distlock(key, backend=backend, wait=0).acquire()
        assert refused.value.holder == lease.holder
    assert was_freed(kind, key)

    async def held() -> None:
        async with distlock(key, backend=backend, wait=5):
            assert not await asyncio.to_thread(is_free, kind, key)

    asyncio.run(held())
    assert was_freed(kind, key)


def test_lease_of_a_dead_process_is_taken_over_with_its_old_lock(
    backend: str, kind: str, key: str
) -> None:
    """The refusal names its holder, of whom `steal_if_dead` sees that it is gone."""
    dead = replace(current_holder(), started_at=1.0)
    assert isinstance(lock_backends[backend].acquire(key, new_token(), 60, dead), Grant)
    with distlock(key, backend=backend, wait=0, steal_if_dead=True):
        assert not is_free(kind, key)
    assert was_freed(kind, key)


@ANY_KIND
def test_refused_key_leaves_the_old_lock_free(backend: str, kind: str, key: str) -> None:
    """A key that an operator has paused: nobody holds it, in either form."""
    store = lock_backends[backend]
    assert store.pause(key, store.clock().replace(year=2999))
    with pytest.raises(LockNotAcquired, match="paused"):
        distlock(key, backend=backend, wait=0).acquire()
    assert was_freed(kind, key)
    assert store.pause(key, None)


def test_loss_of_the_old_lock_is_that_of_the_lease(backend: str, kind: str, key: str) -> None:
    """At the next renewal, whoever ended it."""
    lease = distlock(key, backend=backend, ttl=30, wait=5).acquire()
    lose(kind, key)
    with pytest.raises(LockLost):
        lease.extend()
    assert lease.is_lost
    # Nobody renews it, and it ends with its ttl: an operator need not wait for that.
    assert lock_backends[backend].force_release(key) is not None


def test_key_that_is_kept_is_kept_from_old_code(backend: str, kind: str, key: str) -> None:
    """`min_hold` keeps both for its time, or until a force-release gives both back."""
    with distlock(key, backend=backend, wait=5, min_hold=60):
        pass
    assert not is_free(kind, key)
    assert lock_backends[backend].force_release(key) is not None
    assert was_freed(kind, key)
    with distlock(key, backend=backend, wait=5, min_hold=0.6):
        pass
    assert not is_free(kind, key)
    assert eventually(lambda: is_free(kind, key), 10)


class _Flaky(OldCacheAdd):
    """Cannot be asked for a moment: one operation fails once."""

    fails = ""

    def acquire(
        self, key: str, owner: str, seconds: float | None, instead_of: str | None = None
    ) -> bool:
        """Acquire, or take over."""
        self._fail("take over" if instead_of else "acquire")
        return super().acquire(key, owner, seconds, instead_of)

    def extend(self, key: str, owner: str, seconds: float | None) -> bool:
        """Renew."""
        self._fail("extend")
        return super().extend(key, owner, seconds)

    def _fail(self, operation: str) -> None:
        if self.fails == operation:
            self.fails = ""
            raise BackendUnavailable("The old lock cannot be asked.", code="network_timeout")


@pytest.mark.parametrize("lost", ["answer", "old lock"])
def test_window_outlasts_a_release_that_is_asked_for_again(
    key: str, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The first request has settled the lease, and the second one hears that it is gone."""
    bridge = _Flaky("old-{key}", "redis")
    with bridged("database", bridge) as alias:
        plain, release = DatabaseBackend, DatabaseBackend._release
        asked: list[object] = []

        def unheard(self: Any, *args: Any, **how: Any) -> Any:
            asked.append(release(self, *args, **how))
            if len(asked) == 1:
                raise BackendUnavailable("The answer is lost.", code="network_timeout")
            return asked[-1]

        with distlock(key, backend=alias, ttl=30, hold=True):
            if lost == "answer":
                monkeypatch.setattr(plain, "_release", unheard)
            else:
                bridge.fails = "extend"
        assert lock_backends[alias].read(key) is not None
        assert not is_free("cache", key)
        assert lock_backends[alias].force_release(key) is not None


def test_force_release_changes_nothing_where_the_old_lock_cannot_be_asked(key: str) -> None:
    """Without the record nobody would know its owner, and old code would wait for ever."""
    bridge = _Flaky("old-{key}", "redis")
    with bridged("database", bridge) as alias:
        store = lock_backends[alias]
        distlock(key, backend=alias, ttl=None, basic=True, wait=5).acquire()
        bridge.fails = "extend"
        with pytest.raises(BackendUnavailable):
            store.force_release(key)
        assert store.read(key) is not None
        assert store.force_release(key) is not None
        assert is_free("cache", key)


@pytest.mark.parametrize("way", ["hand-over", "death"])
def test_take_over_outlasts_an_outage_of_the_old_lock(key: str, way: str) -> None:
    """It is tried again, and old code never gets the key meanwhile."""
    bridge = _Flaky("old-{key}", "redis")
    with bridged("database", bridge) as alias:
        if way == "hand-over":
            text = distlock(key, backend=alias, ttl=30, wait=5).acquire().dump()
            bridge.fails = "take over"
            lease = Lease.load(text)
        else:
            dead = replace(current_holder(), started_at=1.0)
            assert isinstance(lock_backends[alias].acquire(key, new_token(), 60, dead), Grant)
            bridge.fails = "take over"
            lease = distlock(key, backend=alias, wait=5, steal_if_dead=True).acquire()
        assert bridge.fails == ""
        assert not is_free("cache", key)
        lease.extend()
        assert lease.release()
        assert is_free("cache", key)


def test_owner_that_acquires_again_renews(kind: str, key: str) -> None:
    """Its first request was carried out, and the answer was lost for longer than it asked for."""
    lock = old(kind)
    assert lock.acquire(key, "owner", 1)
    assert lock.acquire(key, "owner", 60)
    assert not eventually(lambda: is_free(kind, key), 2.5)
    lock.release(key, "owner")
    assert was_freed(kind, key)


@ANY_KIND
def test_many_keys_at_once_ask_for_their_old_locks(backend: str, kind: str, key: str) -> None:
    """Whatever the backend asks its store in one request."""
    store = lock_backends[backend]
    with as_before(kind, key):
        answer = Later(store.records.acquire, {key: new_token()}, 30).result()
        assert isinstance(answer, InTheWay)


def test_lease_of_a_paused_key_stays_to_be_loaded(key: str) -> None:
    """It is refused because of the pause, and its text may be used behind that."""
    with bridged("database", old("cache")) as alias:
        store = lock_backends[alias]
        text = distlock(key, backend=alias, ttl=60, wait=5).acquire().dump()
        store.pause(key, store.clock() + timedelta(hours=1))
        with pytest.raises(LockNotAcquired, match="paused"):
            Lease.load(text)
        store.pause(key, None)
        assert Lease.load(text).release() is True


def test_lease_is_handed_over_with_its_old_lock(
    backend: str, kind: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a lost answer in the way: old code never gets the key meanwhile."""
    plain = type(lock_backends[backend]).__mro__[2]
    acquire = plain._acquire  # type: ignore[attr-defined]
    given: list[Grant] = []

    def answer_is_lost_once(store: Any, attempt: Attempt) -> Any:
        answer = acquire(store, attempt)
        assert not is_free(kind, key)
        if attempt.replace and isinstance(answer, Grant) and not given:
            given.append(answer)
            raise BackendUnavailable("the answer is lost", code="network_timeout")
        return answer

    text = distlock(key, backend=backend, ttl=30, wait=5).acquire().dump()
    monkeypatch.setattr(plain, "_acquire", answer_is_lost_once)
    lease = Lease.load(text)
    assert given
    assert not is_free(kind, key)
    lease.extend()
    assert lease.release()
    assert was_freed(kind, key)


@ANY_KIND
def test_own_keys_are_not_bridged(backend: str, kind: str, key: str) -> None:
    """Those of schedules, leaders and queued tasks, which old code does not know."""
    own = own_key(key)
    with distlock(own, backend=backend, wait=5) as lease:
        lease.extend()
        assert was_freed(kind, own)
        with pytest.raises(LockNotAcquired):
            distlock(own, backend=backend, wait=0, basic=True).acquire()


@ANY_KIND
def test_shared_and_several_keys(backend: str, kind: str, key: str) -> None:
    """Old locks are not shared; several keys are held as one is."""
    with pytest.raises(LockUsageError, match="share a key"):
        distlock(key, backend=backend, permits=2).acquire()
    assert was_freed(kind, key)
    with distlock_all(f"{key}-a", f"{key}-b", backend=backend, wait=5):
        assert not is_free(kind, f"{key}-a")
        assert not is_free(kind, f"{key}-b")
    assert was_freed(kind, f"{key}-a")


def test_outage_of_the_old_locks_is_no_contention(kind: str, key: str) -> None:
    """Nothing is granted, and the error says what could not be asked."""
    with alias_like("default", HOST="127.0.0.1", PORT=1) as away:
        bridge: OldLock[Any] = {
            "redis": OldRedisLock("redis://127.0.0.1:1/0", "old:{key}"),
            "cache": OldCacheAdd("old-{key}", cache="nowhere"),
            "advisory": OldAdvisoryLock(numbered, using=away),
        }[kind]
        with bridged(STORES[kind], bridge) as backend:
            with pytest.raises(BackendUnavailable, match="The old lock of"):
                distlock(key, backend=backend, wait=0).acquire()
            assert lock_backends[backend].read(key) is None


def test_advisory_lock_needs_no_connection_of_a_pool(key: str) -> None:
    """A pool would keep the session, and with it the lock, and have too few for all leases."""
    small = {"min_size": 1, "max_size": 1, "timeout": 1}
    with alias_like("default", OPTIONS={"pool": small}) as using:
        try:
            with bridged("database", OldAdvisoryLock(numbered, using=using)) as backend:
                with distlock_all(f"{key}-a", f"{key}-b", backend=backend, wait=5):
                    assert not is_free("advisory", f"{key}-a")
                assert was_freed("advisory", f"{key}-a")
                assert was_freed("advisory", f"{key}-b")
        finally:
            pooled: Any = connections[using]
            pooled.close_pool()


def test_advisory_lock_whose_session_falls_silent_is_lost(key: str) -> None:
    """No error of the network tells: it is cut, so that calls for other keys need not wait."""
    with wire("default") as through, alias_like("default", **through.address) as using:
        kept = OldAdvisoryLock(numbered, using=using)
        assert kept.acquire(key, "owner", 600)
        through.hang()
        try:
            assert Later(kept.extend, key, "owner", 600).result() is False
        finally:
            through.flow()


def test_advisory_lock_stays_where_the_server_ends_idle_sessions(key: str) -> None:
    """It is renewed less often."""
    with alias_like("default", OPTIONS={"options": "-c idle_session_timeout=200"}) as using:
        kept = OldAdvisoryLock(numbered, using=using)
        assert kept.acquire(key, "owner", 600)
        assert not eventually(lambda: is_free("advisory", key), 1)
        assert kept.extend(key, "owner", 600)
        kept.release(key, "owner")


def test_advisory_lock_is_not_in_the_way_of_dropping_its_database(key: str) -> None:
    """A lease that a test leaves behind, or keeps its key, ends with the test run."""
    kept = OldAdvisoryLock(numbered)
    assert kept.acquire(key, "owner", 600)
    assert not is_free("advisory", key)
    with connection._nodb_cursor():
        assert was_freed("advisory", key)
    assert not kept.extend(key, "owner", 600)


def test_bridges_that_cannot_be() -> None:
    """A name that is the same for all keys would let one of them exclude the others."""
    for make, rule in (
        (lambda: OldRedisLock("redis://127.0.0.1", "old"), "a text with {key}"),
        (lambda: OldCacheAdd(7), "a text with {key}"),  # type: ignore[arg-type]
        (lambda: OldAdvisoryLock(7), "a function of the key"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match=rule):
            make()
    with (
        bridged("database", "old:{key}") as backend,
        pytest.raises(ImproperlyConfigured, match="bridge must be an old lock"),
    ):
        lock_backends[backend]
