"""The lease or fence of a fenced write, and the refusal of a stale one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from django.db import connections, models, transaction

from ..core.errors import FenceRejected, LockUsageError
from ..core.keys import stored_key
from ..core.records import validate_fence
from ..handler import lock_backends
from ..locks.lease import Lease
from ..signals import fence_rejected, tell


class Fenced(Protocol):
    """The authority for a write: a `Lease`, or the `Fence` of another holder's lease."""

    @property
    def key(self) -> str:
        """The key that is locked."""

    @property
    def fence(self) -> int:
        """A number that grows with every grant of the key."""


@dataclass(frozen=True, slots=True)
class Fence:
    """A fence that came without its lease, such as in the header of a request.

    Raises:
        InvalidArgument: The key or the fence breaks a rule.
    """

    key: str
    fence: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", stored_key(self.key))
        validate_fence(self.fence)


def without_lease(by: Fenced | None) -> Fence | None:
    """Return what a row takes to other processes: the key and the fence."""
    return None if by is None else Fence(by.key, by.fence)


def require_fence(by: Fenced) -> int:
    """Return the fence to write with.

    Raises:
        LockUsageError: There is none, because the lock was not granted or its backend has no
            fences; or the lease belongs to the process that forked this one, or shares its key.
    """
    fence = getattr(by, "fence", None)
    if not isinstance(fence, int) or fence < 1:
        raise LockUsageError(
            f"Nothing can be fenced by {by!r}: it has no fence. Only a granted lease has one."
            " Check lease.held first if a block may run without the lock.",
            key=getattr(by, "key", None),
        )
    if isinstance(by, Lease):
        by._holding.require_process()
        if by.shared:
            raise LockUsageError(
                f"Nothing can be fenced by {by!r}: it shares the key, and its fence would refuse"
                " earlier holders that still share it. Acquire the key exclusively to write.",
                key=by.key,
                code="unsupported",
            )
    return fence


def reject(
    by: Fenced, row: str, current: int | None, *, model: Any = None, pk: Any = None
) -> NoReturn:
    """Refuse a write: send the signal if `by` is a lease, and raise.

    Args:
        row: What refuses, such as `"shop.Payment 12"`.
        model: The model's label, if a row refuses.
    """
    theirs = "a higher fence" if current is None else f"fence {current}"
    error = FenceRejected(
        f"{row} has {theirs}, and refuses fence {by.fence} of {by.key!r}: the key was granted to"
        " another holder since.",
        key=by.key,
        row=row,
        current=current,
        fence=by.fence,
    )
    if isinstance(by, Lease):
        tell(
            fence_rejected,
            type(lock_backends[by.backend]),
            alias=by.backend,
            key=by.key,
            fence=by.fence,
            holder=by.holder,
            current=current,
            model=model,
            pk=pk,
            cause=error,
        )
    raise error


# Inserts under a lease: a new row has no fence yet that could refuse the lease, but its key has one


class _Making(transaction.Atomic):
    """A transaction of ours, which ends when its rows are inserted."""


def making(by: Fenced | None, using: str) -> AbstractContextManager[Any]:
    """Open a transaction for inserts under a lease, unless the caller has one open."""
    if by is None or not connections[using].get_autocommit():
        return nullcontext()
    return _Making(using, savepoint=True, durable=False)


def refuse_overtaken(by: Fenced, using: str, model: type[models.Model]) -> None:
    """Refuse an insert if the key was granted again: the next holder may have deleted the row.

    Called after the insert, because a database with one writer then grants the key to nobody
    until the commit. Other databases can also hold the key until then, if they have the locks.
    A transaction of the caller does not hold the key, because it may be long. A plain `Fence` is
    not compared, because it names no store; the fence of a request is.
    """
    overtaken = getattr(getattr(by, "_holding", by), "overtaken", None)
    if overtaken is None:
        return
    ours = any(isinstance(each, _Making) for each in connections[using].atomic_blocks)
    current: int | None = overtaken(using, hold=ours)
    if current is not None:
        label = model._meta.label
        reject(by, f"The key of a new {label}", current, model=label)
