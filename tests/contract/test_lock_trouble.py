"""A store that is away is trouble, and neither contention nor a grant."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
    Retry,
    attempts,
    distlock,
    signals,
)
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.records import UNKNOWN, Grant, Unknown
from django_distlock.handler import lock_backends
from tests.backends import Registered

from .aliases import alias_like
from .helpers import Later, prompt
from .locking import PAST, SHORT, Heard, eventually, grantable, shuts_out
from .redis_clients import cluster_url, single_url

AWAY = pytest.mark.stores(
    "sqlite", "postgresql", "mysql", "redis", "redis_cluster", why="what it holds is in its memory"
)
QUICK = Retry(delay=0.02, factor=1, cap=0.02)

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
            proxy = stack.enter_context(Proxy(address(registered)))
            come_back = proxy.start
            if registered.store == "redis":
                options["url"] = proxy.url
            elif registered.store == "redis_cluster":
                # Its other nodes are known once this one has answered.
                options["client_factory"] = lambda: RedisCluster.from_url(proxy.url)
            else:
                away = {"HOST": "127.0.0.1", "PORT": str(proxy.port)}
                options["using"] = stack.enter_context(alias_like(registered.using, **away))
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


class Proxy:
    """A port that refuses connections until it forwards them to a server."""

    def __init__(self, target: tuple[str, int]):
        self._target = target
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def start(self) -> None:
        """Forward what connects from now on."""
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def with_acquire(lock: Lock) -> Lease:
    """Acquire on this thread."""
    return lock.acquire()


def with_aacquire(lock: Lock) -> Lease:
    """Acquire with an await."""
    return asyncio.run(lock.aacquire())


@pytest.fixture(params=[with_acquire, with_aacquire], ids=["acquire", "aacquire"])
def acquire(request: pytest.FixtureRequest) -> Acquire:
    """Give both ways to acquire."""
    made: Acquire = request.param
    return made


@AWAY
def test_store_that_is_away_is_unavailable_at_once(
    registered: Registered, key: str, tmp_path: Path, acquire: Acquire
) -> None:
    """With no time to wait, trouble is told at once, with its code and cause."""
    with store_away(registered, tmp_path) as (alias, _):
        lock = distlock(key, backend=alias, wait=0)
        with prompt(), pytest.raises(BackendUnavailable) as caught:
            acquire(lock)
        assert caught.value.code == "service_unavailable"
        assert caught.value.key == key
        assert not isinstance(caught.value, LockNotAcquired)
        for call in (lock.try_acquire, lock.locked, lock.__enter__):
            with pytest.raises(BackendUnavailable):
                call()


@AWAY
def test_store_that_stays_away_is_unavailable_at_the_deadline(
    registered: Registered, key: str, tmp_path: Path, acquire: Acquire
) -> None:
    """A waiter goes on trying until its deadline, and never calls trouble contention."""
    with store_away(registered, tmp_path) as (alias, _):
        started = time.monotonic()
        with prompt(0.4), pytest.raises(BackendUnavailable):
            acquire(distlock(key, backend=alias, wait=0.4, retry=QUICK))
        assert time.monotonic() - started >= 0.39


@AWAY
def test_store_that_comes_back_grants(
    registered: Registered, key: str, tmp_path: Path, acquire: Acquire
) -> None:
    """A waiter gets the key once the store answers again."""
    with store_away(registered, tmp_path) as (alias, come_back):
        timer = threading.Timer(0.3, come_back)
        timer.start()
        started = time.monotonic()
        lease = acquire(distlock(key, backend=alias, wait=10, retry=QUICK))
        assert time.monotonic() - started >= 0.29
        assert lease.held
        assert lease.release() is True
        timer.join()
        Later(connections.close_all).result()


@AWAY
def test_trouble_is_told_by_signals(registered: Registered, key: str, tmp_path: Path) -> None:
    """`lock_not_acquired` is sent for trouble too, and names no holder."""
    with (
        store_away(registered, tmp_path) as (alias, _),
        Heard(signals.lock_not_acquired, key) as heard,
        pytest.raises(BackendUnavailable) as caught,
    ):
        distlock(key, backend=alias, wait=0).acquire()
    assert heard.once["cause"] is caught.value
    assert (heard.once["holder"], heard.once["fence"], heard.once["alias"]) == (None, None, alias)


class ScriptedMemory(MemoryBackend):
    """A store in memory that fails, hangs, or is slow where a test says so."""

    #: By operation: what its next calls do first. An error is raised, a number slept, UNKNOWN said.
    script: dict[str, list[Any]] = {}
    #: What was asked.
    asked: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # What the test before left to a thread of ours is told to that test alone.
        self._told = self.asked

    def _step(self, operation: str) -> Unknown | None:
        self._told.append(operation)
        steps = self.script.get(operation, [])
        step = steps.pop(0) if steps else None
        if isinstance(step, Exception):
            raise step
        if isinstance(step, float):
            time.sleep(step)
        return UNKNOWN if step is UNKNOWN else None

    def _acquire(self, *args: Any, **kwargs: Any) -> Any:
        answer = super()._acquire(*args, **kwargs)
        self._step("acquire")
        return answer

    def _extend(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step("extend")
        return step if step is not None else super()._extend(*args, **kwargs)

    def _release(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step("release")
        return step if step is not None else super()._release(*args, **kwargs)


DOWN = "The store is away."


@pytest.fixture
def scripted() -> Iterator[dict[str, list[Any]]]:
    """Configure the alias `scripted`; give the script to fill in."""
    ScriptedMemory.script, ScriptedMemory.asked = {}, []
    with override_settings(DISTLOCK={"scripted": {"BACKEND": f"{__name__}.ScriptedMemory"}}):
        yield ScriptedMemory.script


def scripted_lock(key: str, **more: Any) -> Lock:
    """Describe a lock on the scripted store."""
    return distlock(key, backend="scripted", **{"retry": QUICK, **more})


def test_grant_whose_reply_came_too_late_is_given_back(
    scripted: dict[str, list[Any]], key: str, acquire: Acquire
) -> None:
    """A reply behind the end of its own lease counts as not acquired, and is released."""
    scripted["acquire"] = [PAST]
    lock = scripted_lock(key, ttl=SHORT, wait=0)
    with pytest.raises(BackendUnavailable, match="took"):
        acquire(lock)
    assert ScriptedMemory.asked == ["acquire", "release"]
    assert not lock.locked()


def test_grant_whose_reply_came_too_late_is_tried_again(
    scripted: dict[str, list[Any]], key: str, acquire: Acquire
) -> None:
    """With time left, the next attempt gets the key."""
    scripted["acquire"] = [PAST]
    lease = acquire(scripted_lock(key, ttl=SHORT, wait=5))
    assert lease.fence == 2
    assert 0 < lease.remaining() <= SHORT
    lease.release()


def test_unused_grant_that_is_released_late_costs_no_other_one(
    scripted: dict[str, list[Any]],
    key: str,
    acquire: Acquire,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a waiter asks again of a grant that came too late does not end its next grant."""
    monkeypatch.setattr(attempts, "MAX_BOUND", 0.04)
    scripted["acquire"] = [PAST]
    scripted["release"] = [BackendUnavailable(DOWN)]
    lease = acquire(scripted_lock(key, ttl=SHORT, wait=5))
    lease.extend(60)
    # At once, and once more.
    assert eventually(lambda: ScriptedMemory.asked.count("release") == 3)
    assert shuts_out(lease)
    assert lease.release() is True


def test_slow_reply_shortens_the_lease(
    scripted: dict[str, list[Any]], key: str, acquire: Acquire
) -> None:
    """The deadline counts from before the request: what the reply took is gone."""
    scripted["acquire"] = [0.3]
    lease = acquire(scripted_lock(key, ttl=2))
    assert 1.3 < lease.remaining() <= 1.7
    scripted["extend"] = [0.3]
    lease.extend()
    assert 1.3 < lease.remaining() <= 1.7
    lease.release()


def test_grant_whose_reply_was_lost_is_taken_over(
    scripted: dict[str, list[Any]], key: str, acquire: Acquire
) -> None:
    """A waiter does not wait for a grant of its own that it never heard of."""
    scripted["acquire"] = [BackendUnavailable(DOWN)]
    lock = scripted_lock(key, wait=5, ttl=60)
    with prompt(0.1):
        lease = acquire(lock)
    assert lease.held
    assert grantable(lock) is False
    assert lease.release() is True
    assert grantable(lock)


def test_grant_whose_reply_was_lost_at_the_deadline_is_released(
    scripted: dict[str, list[Any]], key: str, acquire: Acquire
) -> None:
    """Trouble at the last attempt leaves nothing held."""
    scripted["acquire"] = [BackendUnavailable(DOWN)]
    lock = scripted_lock(key, wait=0, ttl=60)
    with pytest.raises(BackendUnavailable, match=DOWN):
        acquire(lock)
    assert eventually(lambda: not lock.locked())


def test_failing_release_does_not_replace_the_result(
    scripted: dict[str, list[Any]], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A block whose release fails has its result; the failure is logged and told."""
    scripted["release"] = [BackendUnavailable(DOWN) for _ in range(10)]
    with (
        caplog.at_level(logging.WARNING, "django_distlock"),
        Heard(signals.lock_released, key) as heard,
    ):
        assert scripted_lock(key)(lambda: "result")() == "result"
    assert DOWN in caplog.text
    assert key in caplog.text
    assert heard.once["released"] is False
    assert isinstance(heard.once["cause"], BackendUnavailable)


def test_failing_release_does_not_replace_the_error(
    scripted: dict[str, list[Any]], key: str
) -> None:
    """Nor does it hide what the body raised."""
    scripted["release"] = [BackendUnavailable(DOWN) for _ in range(10)]
    with pytest.raises(ZeroDivisionError), scripted_lock(key):
        raise ZeroDivisionError


#: What a release may fail with: trouble that passes, and trouble that does not.
FAILURES = [BackendUnavailable(DOWN), LockError(DOWN), LockUsageError(DOWN)]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
def test_release_that_fails_in_any_way_replaces_nothing(
    scripted: dict[str, list[Any]], key: str, failure: LockError, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the store says about the release, the body's result and error stand."""
    lock = scripted_lock(key, wait=0, ttl=20)
    with Heard(signals.lock_released, key) as heard:
        scripted["release"] = [failure] * 10
        assert lock(lambda: "result")() == "result"
        assert heard.once["cause"] is failure
        assert heard.once["released"] is False
    assert DOWN in caplog.text
    scripted["release"] = []
    assert lock_backends["scripted"].force_release(key) is not None

    def work() -> None:
        with lock:
            raise ZeroDivisionError

    scripted["release"] = [failure] * 10
    with pytest.raises(ZeroDivisionError):
        work()


@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
def test_release_that_fails_behind_a_commit_changes_nothing(
    scripted: dict[str, list[Any]], key: str, failure: LockError
) -> None:
    """The data is committed: a release that fails then is no error of the transaction's."""
    ran = []
    scripted["release"] = [failure] * 10
    with transaction.atomic():
        with scripted_lock(key, ttl=20):
            pass
        transaction.on_commit(lambda: ran.append("the project's hook"))
    assert ran == ["the project's hook"]


def test_failing_asynchronous_release_does_not_replace_the_result(
    scripted: dict[str, list[Any]], key: str
) -> None:
    """The same for `async with`."""
    scripted["release"] = [BackendUnavailable(DOWN) for _ in range(10)]

    async def work() -> str:
        async with scripted_lock(key):
            return "result"

    assert asyncio.run(work()) == "result"


def test_release_that_failed_may_be_tried_again(scripted: dict[str, list[Any]], key: str) -> None:
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


def test_release_that_is_unknown_is_asked_again(scripted: dict[str, list[Any]], key: str) -> None:
    """A record that somebody's transaction holds is asked for until it is let go."""
    scripted["release"] = [UNKNOWN, UNKNOWN]
    lock = scripted_lock(key)
    with lock as lease:
        pass
    assert ScriptedMemory.asked.count("release") == 3
    assert lease.is_released
    assert not lock.locked()


def test_release_that_stays_unknown_ends_at_the_deadline(
    scripted: dict[str, list[Any]], key: str, caplog: pytest.LogCaptureFixture
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


def test_failing_extend_leaves_the_lease(scripted: dict[str, list[Any]], key: str) -> None:
    """Not knowing is not losing: the lease stands until its deadline, and may be extended."""
    lease = scripted_lock(key, ttl=20).acquire()
    scripted["extend"] = [BackendUnavailable(DOWN), BackendUnavailable(DOWN)]
    with (
        Heard(signals.lock_extended, key) as heard,
        pytest.raises(BackendUnavailable, match=DOWN),
    ):
        lease.extend(60)
    assert isinstance(heard.once["cause"], BackendUnavailable)
    assert lease.held
    assert lease.remaining() <= 20
    lease.extend(60)
    assert lease.remaining() > 50
    assert lease.release()


def test_extend_survives_one_failure(scripted: dict[str, list[Any]], key: str) -> None:
    """A broken connection or a busy record costs a repetition and no lease."""
    lease = scripted_lock(key, ttl=20).acquire()
    scripted["extend"] = [BackendUnavailable(DOWN), UNKNOWN]
    lease.extend(60)
    assert lease.remaining() > 50
    assert lease.release()


def test_lease_that_was_seen_as_lost_is_not_extended(
    scripted: dict[str, list[Any]], key: str
) -> None:
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


def test_error_of_a_kind_nobody_expects_passes(scripted: dict[str, list[Any]], key: str) -> None:
    """A defect in a backend is not dressed up as anything else, and holds nothing."""
    scripted["acquire"] = [ZeroDivisionError()]
    lock = scripted_lock(key, wait=5)
    with Heard(signals.lock_not_acquired, key) as heard, pytest.raises(ZeroDivisionError):
        lock.acquire()
    assert isinstance(heard.once["cause"], ZeroDivisionError)


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise: a run in the background of a shell begins with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_interrupted_wait_holds_nothing(key: str) -> None:
    """Ctrl-C while waiting ends the wait, and the key is free for others afterwards."""
    lock = distlock(key, backend="memory", wait=10, retry=QUICK)
    holder = Later(lock.acquire).result()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, lambda: signal_main(main))
    timer.start()
    with prompt(0.3), pytest.raises(KeyboardInterrupt):
        lock.acquire()
    timer.join()
    assert holder.release()
    assert grantable(lock)


def signal_main(thread: int) -> None:
    """Interrupt the main thread as Ctrl-C does."""
    signal.pthread_kill(thread, signal.SIGINT)


def test_grant_type_is_what_backends_answer(key: str) -> None:
    """The scripted store answers as memory does, or these tests would prove nothing."""
    with override_settings(DISTLOCK={"scripted": {"BACKEND": f"{__name__}.ScriptedMemory"}}):
        answer = lock_backends["scripted"].acquire(key, "A" * 22, 5)
    assert isinstance(answer, Grant)


async def test_release_that_waits_for_a_thread_survives_cancelling(
    scripted: dict[str, list[Any]], key: str
) -> None:
    """Cancelled before its turn has come, a release is carried out all the same."""
    entered, leave = asyncio.Event(), asyncio.Event()
    lock = scripted_lock(key)

    async def work() -> None:
        async with lock:
            entered.set()
            await leave.wait()

    with override_settings(
        DISTLOCK={"scripted": {"BACKEND": f"{__name__}.ScriptedMemory", "LOCK_CONNECTIONS": 1}}
    ):
        task = asyncio.create_task(work())
        await entered.wait()
        scripted["acquire"] = [0.3]
        # The only thread is busy with another key.
        other = asyncio.create_task(scripted_lock(f"{key}:other").aacquire())
        await asyncio.sleep(0.05)
        leave.set()
        for _ in range(3):
            await asyncio.sleep(0.01)
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert await (await other).arelease()
        assert await asyncio.to_thread(eventually, lambda: not lock.locked())


async def test_grant_that_waits_for_a_thread_to_be_undone_survives_cancelling(
    scripted: dict[str, list[Any]], key: str
) -> None:
    """Cancelled again while its grant is being undone, an acquire leaves nothing held."""
    lock = scripted_lock(key, ttl=60)
    with override_settings(
        DISTLOCK={"scripted": {"BACKEND": f"{__name__}.ScriptedMemory", "LOCK_CONNECTIONS": 1}}
    ):
        scripted["acquire"] = [0.3, 0.2]
        task = asyncio.create_task(lock.aacquire())
        other = asyncio.create_task(scripted_lock(f"{key}:other").aacquire())
        for _ in range(6):
            await asyncio.sleep(0.02)
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert await (await other).arelease()
        assert await asyncio.to_thread(eventually, lambda: not lock.locked())
