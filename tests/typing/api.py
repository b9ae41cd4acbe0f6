"""The types of the public API, frozen: `mypy --strict` reads this file, and nobody runs it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeAlias, assert_type

from django.dispatch import Signal
from django.http import HttpRequest, HttpResponse

from django_distlock import (
    BackendUnavailable,
    FenceRejected,
    Holder,
    InvalidArgument,
    InvalidLockBackend,
    Lease,
    Lock,
    LockError,
    LockInfo,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    Retry,
    RunScope,
    asingle_flight,
    current_lease,
    default_lock_backend,
    distlock,
    distlock_all,
    hashed_key,
    held_keys,
    leader,
    leader_of,
    lock_backends,
    single_flight,
    transaction_lock,
    transaction_locked,
)
from django_distlock.backends.base import BaseLockBackend
from django_distlock.contrib.celery import locked_task as celery_task
from django_distlock.contrib.tasks import locked_task
from django_distlock.fencing.http import fence_required
from django_distlock.idempotency import idempotent
from django_distlock.inspection import (
    LockPage,
    Outcome,
    aowns,
    force_release,
    get_by_key,
    get_by_token,
    list_locks,
    owns,
)
from django_distlock.scheduling import Skipped, scheduled
from django_distlock.signals import (
    lock_acquired,
    lock_extended,
    lock_lost,
    lock_not_acquired,
    lock_released,
)
from django_distlock.views import locked_view

AView: TypeAlias = Callable[[HttpRequest, int], Coroutine[Any, Any, HttpResponse]]


def describe() -> None:
    """All arguments behind the key are optional and named."""
    assert_type(distlock("key"), Lock)
    assert_type(
        distlock(
            "key",
            ttl=5,
            wait=None,
            backend="default",
            heartbeat=False,
            hold=True,
            min_hold=timedelta(0),
            reentrant=True,
            steal_if_dead=True,
            basic=False,
            on_conflict="run",
            on_lost="ignore",
            retry=Retry(delay=0.1, factor=2, cap=1, max_retries=None),
            max_lifetime=timedelta(hours=1),
            metadata={"user": "Ada"},
        ),
        Lock,
    )
    distlock("key", ttl=timedelta(seconds=5), wait=timedelta(0))
    distlock("key", ttl=5.5, wait=0)
    distlock("key", ttl=None, wait=0.5)
    distlock("key", 5)  # type: ignore[call-arg]
    assert_type(distlock(5), Lock)
    distlock(5.5)  # type: ignore[arg-type]
    assert_type(hashed_key("page", "https://example.org"), str)
    distlock("key", backend=None)  # type: ignore[arg-type]
    distlock("key", retry={"delay": 1})  # type: ignore[arg-type]
    distlock("key", timeout=5)  # type: ignore[call-arg]
    assert_type(distlock("key", on_conflict="yield"), Lock)
    distlock("key", on_conflict="skip")  # type: ignore[arg-type]
    distlock("key", on_lost="skip")  # type: ignore[arg-type]
    # What becomes a duration is typed, so that a slip is found before it runs.
    distlock("key", ttl="5")  # type: ignore[arg-type]
    distlock("key", wait="5")  # type: ignore[arg-type]


def use(lock: Lock) -> None:
    """Blocks and handles give leases."""
    with lock as lease:
        assert_type(lease, Lease)
    assert_type(lock.acquire(), Lease)
    assert_type(lock.try_acquire(), Lease | None)
    assert_type(lock.acquire(heartbeat=True), Lease)
    assert_type(lock.try_acquire(heartbeat=True), Lease | None)
    lock.acquire(True)  # type: ignore[call-arg]
    assert_type(lock.locked(), bool)
    assert_type(lock.key, str)
    assert_type(lock.backend, str)
    lock.key = "other"  # type: ignore[misc]


async def ause(lock: Lock) -> None:
    """The same with awaits."""
    assert_type(await aowns("token", backend="default"), bool)
    async with lock as lease:
        assert_type(lease, Lease)
    assert_type(await lock.aacquire(), Lease)
    assert_type(await lock.atry_acquire(), Lease | None)
    assert_type(await lock.alocked(), bool)


@distlock("invoice:{invoice_id}")
def decorated(invoice_id: int, *, currency: str = "EUR") -> str:
    """Keep its parameters and its result."""
    return f"{invoice_id} {currency}"


@distlock("invoice:{invoice_id}")
async def adecorated(invoice_id: int) -> str:
    """Stay a coroutine function."""
    return f"{invoice_id}"


def call() -> None:
    """A decorated function has the type of the function."""
    assert_type(decorated(1, currency="USD"), str)
    decorated("1")  # type: ignore[arg-type]
    decorated()  # type: ignore[call-arg]
    takes(adecorated)
    takes(decorated)  # type: ignore[arg-type]


def takes(function: Callable[[int], Coroutine[Any, Any, str]]) -> None:
    """Take a coroutine function."""


async def acall() -> None:
    """The same with awaits."""
    assert_type(await adecorated(1), str)


def hold(lease: Lease) -> None:
    """What a lease tells and does."""
    assert_type(lease.key, str)
    assert_type(lease.backend, str)
    assert_type(lease.token, str)
    assert_type(lease.fence, int)
    assert_type(lease.fence_token, str)
    assert_type(lease.acquired_at, datetime)
    assert_type(lease.expires_at, datetime | None)
    assert_type(lease.deadline, float)
    assert_type(lease.held, bool)
    assert_type(lease.is_lost, bool)
    assert_type(lease.is_released, bool)
    assert_type(lease.stop_requested, bool)
    assert_type(lease.remaining(), float)
    assert_type(lease.release(), bool)
    assert_type(lease.release(strict=True), bool)
    lease.check()
    lease.on_lost(lambda lost: lost.fence)
    lease.on_danger(print, before=timedelta(seconds=5))
    lease.on_danger(print, 5)
    assert_type(lease.dump(), str)
    assert_type(Lease.load("text"), Lease)
    lease.guard()
    lease.guard("default")
    with lease.atomic() as nothing:
        assert_type(nothing, None)
    lease.extend()
    lease.extend(5)
    lease.extend(timedelta(seconds=5))
    assert_type(current_lease(), Lease | None)
    assert_type(current_lease("key"), Lease | None)


async def ahold(lease: Lease) -> None:
    """The same with awaits."""
    await lease.aextend()
    await lease.aextend(5)
    await lease.aextend(timedelta(seconds=5))
    assert_type(await lease.arelease(), bool)


def several() -> None:
    """Several keys at once, as leases and by a transaction."""
    with distlock_all("a", "b", wait=5, ttl=3) as leases:
        assert_type(leases["a"], Lease)
        assert_type(leases.held, bool)
    assert_type(distlock_all("a").acquire().release(), bool)
    assert_type(held_keys(["a", "b"]), dict[str, Holder])
    transaction_lock("a", "b", shared=True, wait=timedelta(seconds=3))

    @transaction_locked("stock:{pk}", wait=0)
    def sell(pk: int) -> str:
        return str(pk)

    assert_type(sell(7), str)


def look() -> None:
    """What lookups answer."""
    info = get_by_key("key", backend="default", raw=True)
    assert_type(info, LockInfo | None)
    assert_type(get_by_token("token", backend="default", raw=False), LockInfo | None)
    assert_type(owns("token", backend="default"), bool)
    assert info
    assert_type(info.key_hash, str)
    assert_type(info.token_hash, str)
    assert_type(info.fence, int)
    assert_type(info.acquired_at, datetime)
    assert_type(info.expires_at, datetime | None)
    assert_type(info.renewed_at, datetime)
    assert_type(info.holder, Holder)
    assert_type(info.key, str | None)
    assert_type(info.token, str | None)


def holders(holder: Holder) -> None:
    """What is known about a holder."""
    assert_type(holder.host, str)
    assert_type(holder.boot_id, str)
    assert_type(holder.process, str)
    assert_type(holder.pid, int)
    assert_type(holder.started_at, float | None)
    assert_type(holder.thread, str)
    assert_type(holder.task_id, str | None)
    assert_type(holder.metadata, Mapping[str, Any])


def schedules() -> None:
    """Who is not the one that runs gets something else."""

    @scheduled("report", expected=5, scope=RunScope.PREFER_GLOBAL)
    def work(day: int) -> str:
        return f"{day}"

    @scheduled("report", expected=timedelta(minutes=5), margin=1, hold=False, jitter=2)
    async def awork(day: int) -> str:
        return f"{day}"

    assert_type(work(5), str | Skipped)
    made: Callable[[int], Coroutine[Any, Any, str | Skipped]] = awork
    assert_type(made, Callable[[int], Coroutine[Any, Any, str | Skipped]])


def leaders() -> None:
    """A candidate gives terms."""
    candidate = leader("name", ttl=timedelta(seconds=5), steal_if_dead=True, metadata={"a": 1})
    with candidate as term:
        assert_type(term.fence, int)
        assert_type(term.lease, Lease)
        assert_type(term.wait(timedelta(seconds=5)), bool)
        term.check()
    candidate.run(lambda term: term.wait(5))
    candidate.stop()
    assert_type(leader_of("name", backend="default"), Holder | None)


def requests() -> None:
    """A view stays the one that it was."""

    @locked_view("invoice:{pk}", ttl=60)
    def view(request: HttpRequest, pk: int) -> HttpResponse:
        return HttpResponse(str(pk))

    @locked_view("invoice:{pk}")
    async def aview(request: HttpRequest, pk: int) -> HttpResponse:
        return HttpResponse(str(pk))

    assert_type(view(HttpRequest(), 5), HttpResponse)
    view(HttpRequest(), "5")  # type: ignore[arg-type]
    made: AView = aview
    assert_type(idempotent()(view)(HttpRequest(), 5), HttpResponse)
    assert_type(fence_required(key="invoice:{pk}")(view)(HttpRequest(), 5), HttpResponse)
    assert_type(fence_required(view)(HttpRequest(), 5), HttpResponse)
    assert_type(fence_required(made), AView)
    idempotent()(lambda request: request)
    idempotent("shop:{shop}", keep=timedelta(days=2), max_body=5)(lambda request, shop: request)
    idempotent(key=lambda request: None, keep=5, required=True)(lambda request: request)


async def values() -> None:
    """What is computed once has the type of what computes it."""

    async def wait() -> bytes:
        return b""

    assert_type(single_flight("key", lambda: 5, timeout=5), int)
    assert_type(single_flight("key", str, timeout=None, wait=timedelta(seconds=3), ttl=3), str)
    assert_type(await asingle_flight("key", wait, timeout=5, stale=5, on_error="stale"), bytes)

    @single_flight("key:{pk}", timeout=5, cache="c", on_conflict="run", backend="b")
    def value(pk: int) -> str:
        return str(pk)

    @single_flight("key:{pk}", timeout=5)
    async def awaited(pk: int) -> str:
        return str(pk)

    assert_type(value(5), str)
    assert_type(await awaited(5), str)


def errors() -> None:
    """What errors know."""
    try:
        distlock("key").acquire()
    except LockNotAcquired as error:
        assert_type(error.holder, Holder | None)
        assert_type(error.held_for, float | None)
        assert_type(error.expires_in, float | None)
    except FenceRejected as error:
        assert_type(error.row, str)
        assert_type(error.current, int | None)
        assert_type(error.fence, int | None)
    except (LockLost, BackendUnavailable, LockUsageError) as error:
        assert_type(error.code, str)
    except InvalidArgument as error:
        errors_of_python(error)
    except LockError as error:
        assert_type(error.key, str | None)
        assert_type(error.code, str)
    except InvalidLockBackend as mistake:
        assert_type(mistake.args, tuple[Any, ...])


def errors_of_python(error: ValueError) -> None:
    """Take what Python's own functions raise."""


def backends() -> None:
    """The configured backends, by alias."""
    assert_type(lock_backends["default"], BaseLockBackend)
    assert_type(lock_backends.all(), list[BaseLockBackend])
    assert_type(list(lock_backends), list[str])
    assert_type(default_lock_backend, BaseLockBackend)


def listen() -> None:
    """Signals are Django's."""
    for signal in (lock_acquired, lock_not_acquired, lock_extended, lock_released, lock_lost):
        assert_type(signal, Signal)


async def jobs() -> None:
    """A decorated task takes what its function took."""

    def body(number: int) -> str:
        return str(number)

    async def awaited(number: int) -> str:
        return str(number)

    assert_type(locked_task("key:{number}")(body)(1), str | dict[str, Any])
    later = locked_task("key:{number}", on_conflict="skip", max_wait=60)(awaited)
    assert_type(await later(1), str | dict[str, Any])
    assert_type(celery_task("key:{number}", on_unavailable="run", ttl=60)(body)(1), str)
    assert_type(celery_task(unique="key:{number}", unique_until="start")(body)(1), str)
    assert_type(celery_task(unique=True, debounce=timedelta(seconds=30))(body)(1), str)
    limits = celery_task(locks=[("key:{number}", 3), "all"], max_queued=100, on_full="drop")
    assert_type(limits(body)(1), str)
    several = locked_task(locks=[("key:{number}", lambda number: number), ("all", 10)])
    assert_type(several(body)(1), str | dict[str, Any])
    assert_type(distlock("key:{number}", permits=lambda number: 2)(body)(1), str)


def operate() -> None:
    """What operators do needs to be told who, and why."""
    assert_type(list_locks(prefix="a", held_longer_than=60, limit=10), LockPage)
    assert_type(force_release("key", actor="me", reason="stuck"), Outcome)
