"""What a fenced write comes with, and how it is refused."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from django.db import connections, models, transaction

from ..core.errors import FenceRejected, LockUsageError
from ..core.fences import validate_fence
from ..core.keys import stored_key
from ..handler import lock_backends
from ..locks.lease import Lease
from ..signals import fence_rejected, tell


class Fenced(Protocol):
    """What a write is done under: a `Lease`, or the `Fence` of somebody else's."""

    @property
    def key(self) -> str:
        """What is locked."""

    @property
    def fence(self) -> int:
        """Grows with every grant of the key."""


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
    """Return what goes along with a row to other processes: the key and the fence."""
    return None if by is None else Fence(by.key, by.fence)


def require_fence(by: Fenced) -> int:
    """Return the fence to write with.

    Raises:
        LockUsageError: There is none: the lock was not granted, its backend has no fences, or the
            lease is that of the process that forked this one; or others hold the key as well.
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
    """Refuse a write: tell it by the signal, and raise.

    Args:
        row: What refuses, such as `"shop.Payment 12"`.
        model: The model's label, where it is a row.
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


# Rows that are made under a lease: none has a fence yet that could refuse it, but its key has


class _Making(transaction.Atomic):
    """A transaction of our own, which ends when its rows are made."""


def making(by: Fenced | None, using: str) -> AbstractContextManager[Any]:
    """Open a transaction to make rows in under a lease, unless the caller has one open."""
    if by is None or not connections[using].get_autocommit():
        return nullcontext()
    return _Making(using, savepoint=True, durable=False)


def refuse_overtaken(by: Fenced, using: str, model: type[models.Model]) -> None:
    """Refuse to have made a row, if the lease's key was granted anew: the row may be a deleted one.

    After the insert, so that where the database has one writer nobody else is granted the key
    from here to the commit. Other databases can be told to wait with that, if they have the locks
    as well. A transaction of the caller's is not made to hold the key: it may be a long one.
    A `Fence` alone says nothing of where it could be compared, but that of a request does.
    """
    overtaken = getattr(getattr(by, "_holding", by), "overtaken", None)
    if overtaken is None:
        return
    ours = any(isinstance(each, _Making) for each in connections[using].atomic_blocks)
    current: int | None = overtaken(using, hold=ours)
    if current is not None:
        label = model._meta.label
        reject(by, f"The key of a new {label}", current, model=label)
