"""A store that is away is trouble, and neither contention nor a grant."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connections, transaction
from django.test import override_settings
from redis import RedisCluster

from django_distlock import (
    BackendUnavailable,
    Lease,
    Lock,
    LockError,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    distlock,
    signals,
)
from django_distlock.core.records import UNKNOWN
from django_distlock.handler import lock_backends
from django_distlock.locks import attempts
from tests.backends import Registered
from tests.integration.wires import Wire

from .aliases import alias_like
from .conftest import Hold
from .helpers import Later, prompt
from .locking import PAST, SHORT, Heard, eventually, grantable, shuts_out
from .redis_clients import cluster_url, single_url
from .scripted import QUICK, Script, ScriptedMemory, scripted_lock

AWAY = pytest.mark.stores(
    "sqlite", "postgresql", "mysql", "redis", "redis_cluster", why="what it holds is in its memory"
)

Acquire = Callable[[Lock], Lease]


@contextmanager
def store_away(registered: Registered, tmp_path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Give a lock alias whose store does not answer, and a function that brings the store back."""
    options = registered_options(registered)
    with ExitStack() as stack:
        if registered.store == "sqlite":
            # A folder that is missing; its place is taken by a link to the real one.
            real = Path(connections["sqlite"].settings_dict["NAME"])
            folder = tmp_path / "mounted"
            using = stack.enter_context(alias_like("sqlite", NAME=str(folder / real.name)))

            def come_back() -> None:
                folder.symlink_to(real.parent)

            options["using"] = using
        else:
            proxy = stack.enter_context(closing(Proxy(server=address(registered))))
            come_back = proxy.start
            url = f"redis://127.0.0.1:{proxy.address['PORT']}/0"
            if registered.store == "redis":
                options["url"] = url
            elif registered.store == "redis_cluster":
                # Its other nodes are known once this one has answered.
                options["client_factory"] = lambda: RedisCluster.from_url(url)
            else:
                away = alias_like(registered.using, **proxy.address)
                options["using"] = stack.enter_context(away)
        configured = {"away": {"BACKEND": registered.path, "OPTIONS": options}}
        stack.enter_context(override_settings(DISTLOCK=configured))
        yield "away", come_back


def registered_options(registered: Registered) -> dict[str, Any]:
    """Give the options of the backend under test."""
    return dict(lock_backends[registered.alias].config.options)


def address(registered: Registered) -> tuple[str, int]:
    """Say where the store of the backend under test listens."""
    if registered.store in ("redis", "redis_cluster"):
        parts = urlsplit(single_url() if registered.store == "redis" else cluster_url())
        return parts.hostname or "127.0.0.1", parts.port or 6379
    given = connections[registered.using].settings_dict
    usual = {"postgresql": 5432, "mysql": 3306}[connections[registered.using].vendor]
    return given["HOST"], int(given["PORT"] or usual)


class Proxy(Wire):
    """A wire that refuses connections until it is told to forward them."""

    def _begin(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.address = {"HOST": "127.0.0.1", "PORT": str(self._listener.getsockname()[1])}
        self._flows = threading.Event()
        self._flows.set()
        self._sockets, self._threads = [], []

    def start(self) -> None:
        """Forward what connects from now on."""
        self._listener.listen()
        self._threads.append(threading.Thread(target=self._accept, daemon=True))
        self._threads[0].start()


@AWAY
def test_store_that_is_away_is_unavailable(
    registered: Registered, key: str, tmp_path: Path, acquire: Acquire
) -> None:
    """Trouble is told at once, or at the deadline, with its code and cause, and no holder.

    A waiter never calls it contention, and gets the key once the store answers again.
    """
    with store_away(registered, tmp_path) as (alias, come_back):
        lock = distlock(key, backend=alias, wait=0)
        with (
            Heard(signals.lock_not_acquired, key) as heard,
            prompt(),
            pytest.raises(BackendUnavailable) as caught,
        ):
            acquire(lock)
        assert (caught.value.code, caught.value.key) == ("service_unavailable", key)
        assert not isinstance(caught.value, LockNotAcquired)
        told = heard.once
        assert told["cause"] is caught.value
        assert (told["holder"], told["fence"], told["alias"]) == (None, None, alias)
        for call in (lock.try_acquire, lock.locked, lock.__enter__):
            with pytest.raises(BackendUnavailable):
                call()
        with prompt(0.4, least=0.39), pytest.raises(BackendUnavailable):
            acquire(distlock(key, backend=alias, wait=0.4, retry=QUICK))
        timer = threading.Timer(0.3, come_back)
        started = time.monotonic()
        timer.start()
        lease = acquire(distlock(key, backend=alias, wait=10, retry=QUICK))
        assert time.monotonic() - started >= 0.29
        assert lease.held
        assert lease.release() is True
        timer.join()
        Later(connections.close_all).result()


DOWN = "The store is away."


@pytest.mark.parametrize("wait", [0, 5])
def test_grant_whose_reply_came_too_late_is_given_back(
    scripted: Script, key: str, acquire: Acquire, wait: float
) -> None:
    """A reply behind the end of its own lease is not acquired; with time left, the next one is."""
    scripted["acquire"] = [PAST]
    lock = scripted_lock(key, ttl=SHORT, wait=wait)
    if wait:
        lease = acquire(lock)
        assert lease.fence == 2
        assert 0 < lease.remaining() <= SHORT
        lease.release()
    else:
        with pytest.raises(BackendUnavailable, match="took"):
            acquire(lock)
        assert ScriptedMemory.asked == ["acquire", "release"]
    assert not lock.locked()


def test_unused_grant_that_is_released_late_costs_no_other_one(
    scripted: Script, key: str, acquire: Acquire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a waiter asks again of a grant that came too late does not end its next grant."""
    monkeypatch.setattr(attempts, "MAX_BOUND", 0.04)
    scripted["acquire"] = [PAST]
    scripted["release"] = [BackendUnavailable(DOWN)]
    lease = acquire(scripted_lock(key, ttl=SHORT, wait=5))
    lease.extend(60)
    # At once, and once more; and more often where this thread stood still behind the next answer.
    assert eventually(lambda: ScriptedMemory.asked.count("release") >= 3)
    assert shuts_out(lease)
    assert lease.release() is True


def test_slow_reply_shortens_the_lease(scripted: Script, key: str, acquire: Acquire) -> None:
    """The deadline counts from before the request: what the reply took is gone."""
    scripted["acquire"] = [0.3]
    lease = acquire(scripted_lock(key, ttl=20))
    assert 10 < lease.remaining() <= 19.7
    scripted["extend"] = [0.3]
    lease.extend()
    assert 10 < lease.remaining() <= 19.7
    lease.release()


@pytest.mark.parametrize("wait", [0, 5])
def test_grant_whose_reply_was_lost_is_taken_over(
    scripted: Script, key: str, acquire: Acquire, wait: float
) -> None:
    """A waiter does not wait for a grant of its own; trouble at the last attempt holds nothing."""
    scripted["acquire"] = [BackendUnavailable(DOWN)]
    lock = scripted_lock(key, wait=wait, ttl=60)
    if wait:
        with prompt(0.1):
            lease = acquire(lock)
        assert lease.held
        assert grantable(lock) is False
        assert lease.release() is True
    else:
        with pytest.raises(BackendUnavailable, match=DOWN):
            acquire(lock)
    assert eventually(lambda: not lock.locked())


#: What a release may fail with: trouble that passes, and trouble that does not.
FAILURES = [BackendUnavailable(DOWN), LockError(DOWN), LockUsageError(DOWN)]


def test_release_that_fails_in_any_way_replaces_nothing(
    scripted: Script, key: str, hold: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the store says about the release, the body's result and error stand; it is told."""
    for failure in FAILURES:
        caplog.clear()
        lock = scripted_lock(f"{key}:{type(failure).__name__}", wait=0, ttl=20)
        with Heard(signals.lock_released, lock.key) as heard:
            scripted["release"] = [failure] * 10
            assert hold(lock, lambda _: "result") == "result"
            assert heard.once["cause"] is failure
            assert heard.once["released"] is False
        assert DOWN in caplog.text
        assert lock.key in caplog.text
        scripted["release"] = []
        assert lock_backends["scripted"].force_release(lock.key) is not None
        scripted["release"] = [failure] * 10
        with pytest.raises(ZeroDivisionError):
            hold(lock, lambda _: 1 / 0)


def test_release_that_fails_behind_a_commit_changes_nothing(scripted: Script, key: str) -> None:
    """The data is committed: a release that fails then is no error of the transaction's."""
    ran: list[LockError] = []
    for failure in FAILURES:
        scripted["release"] = [failure] * 10
        with transaction.atomic():
            with scripted_lock(f"{key}:{type(failure).__name__}", ttl=20):
                pass
            # The project's hook.
            transaction.on_commit(partial(ran.append, failure))
    assert ran == FAILURES


def test_release_that_failed_may_be_tried_again(scripted: Script, key: str) -> None:
    """An explicit release raises, and succeeds once the store is back."""
    lock = scripted_lock(key)
    lease = lock.acquire()
    scripted["release"] = [BackendUnavailable(DOWN), BackendUnavailable(DOWN)]
    with pytest.raises(BackendUnavailable, match=DOWN):
        lease.release()
    assert lock.locked()
    assert lease.release() is True
    assert not lock.locked()
    assert lease.release() is False


def test_release_that_is_unknown_is_asked_again(scripted: Script, key: str) -> None:
    """A record that somebody's transaction holds is asked for until it is let go."""
    scripted["release"] = [UNKNOWN, UNKNOWN]
    lock = scripted_lock(key)
    with lock as lease:
        pass
    assert ScriptedMemory.asked.count("release") == 3
    assert lease.is_released
    assert not lock.locked()


def test_release_that_stays_unknown_ends_at_the_deadline(
    scripted: Script, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for a release longer than the lease would have lived."""
    scripted["release"] = [UNKNOWN] * 1000
    with (
        prompt(0.5),
        caplog.at_level(logging.WARNING, "django_distlock"),
        Heard(signals.lock_released, key) as heard,
        suppress(LockLost),
        scripted_lock(key, ttl=0.5),
    ):
        pass
    assert heard.once["released"] is False
    assert key in caplog.text


def test_failing_extend_leaves_the_lease(scripted: Script, key: str) -> None:
    """Not knowing is not losing: one failure costs a repetition, and two in a row no lease."""
    lease = scripted_lock(key, ttl=20).acquire()
    scripted["extend"] = [BackendUnavailable(DOWN), BackendUnavailable(DOWN)]
    with Heard(signals.lock_extended, key) as heard, pytest.raises(BackendUnavailable, match=DOWN):
        lease.extend(60)
    assert isinstance(heard.once["cause"], BackendUnavailable)
    assert lease.held
    assert lease.remaining() <= 20
    # A broken connection, and a busy record.
    scripted["extend"] = [BackendUnavailable(DOWN), UNKNOWN]
    lease.extend(60)
    assert lease.remaining() > 50
    assert lease.release()


def test_lease_that_was_seen_as_lost_is_not_extended(scripted: Script, key: str) -> None:
    """Seen as lost by anybody, a lease stays lost, though the store extends it in the meantime."""
    lock = scripted_lock(key, ttl=0.4)
    lease = lock.acquire()
    scripted["extend"] = [0.6]
    extending = Later(lease.extend, 60)
    assert eventually(lambda: lease.is_lost)
    with pytest.raises(LockLost):
        extending.result()
    assert not lease.held
    # It was extended in the store, and is given back from there.
    assert lease.release() is False
    assert not lock.locked()


def test_error_of_a_kind_nobody_expects_passes(scripted: Script, key: str) -> None:
    """A defect in a backend is not dressed up as anything else, and holds nothing."""
    scripted["acquire"] = [ZeroDivisionError()]
    lock = scripted_lock(key, wait=5)
    with Heard(signals.lock_not_acquired, key) as heard, pytest.raises(ZeroDivisionError):
        lock.acquire()
    assert isinstance(heard.once["cause"], ZeroDivisionError)


async def test_release_that_waits_for_a_thread_survives_cancelling(
    scripted: Script, key: str
) -> None:
    """Cancelled before its turn has come, a release is carried out all the same."""
    entered, leave = asyncio.Event(), asyncio.Event()
    lock, other = (scripted_lock(each, backend="alone") for each in (key, f"{key}:other"))

    async def work() -> None:
        async with lock:
            entered.set()
            await leave.wait()

    task = asyncio.create_task(work())
    await entered.wait()
    scripted["acquire"] = [0.3]
    # The only thread is busy with another key.
    acquiring = asyncio.create_task(other.aacquire())
    await asyncio.sleep(0.05)
    leave.set()
    await cancel_again_and_again(task, 3, 0.01)
    assert await (await acquiring).arelease()
    assert await asyncio.to_thread(eventually, lambda: not lock.locked())


async def test_grant_that_waits_for_a_thread_to_be_undone_survives_cancelling(
    scripted: Script, key: str
) -> None:
    """Cancelled again while its grant is being undone, an acquire leaves nothing held."""
    lock, other = (scripted_lock(each, backend="alone", ttl=60) for each in (key, f"{key}:other"))
    scripted["acquire"] = [0.3, 0.2]
    task = asyncio.create_task(lock.aacquire())
    acquiring = asyncio.create_task(other.aacquire())
    await cancel_again_and_again(task, 6, 0.02)
    assert await (await acquiring).arelease()
    assert await asyncio.to_thread(eventually, lambda: not lock.locked())


async def cancel_again_and_again(task: asyncio.Task[Any], times: int, pause: float) -> None:
    """Cancel a task until it has ended, and be content with any end."""
    for _ in range(times):
        await asyncio.sleep(pause)
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task
