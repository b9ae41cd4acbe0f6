"""Rows that are made under a lease: none has a fence yet that could refuse it, but its key has."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from django.db import connections, models, transaction

from .rejecting import Fenced, reject


class _Making(transaction.Atomic):
    """A transaction of our own, which ends when its rows are made."""


def making(by: Fenced | None, using: str) -> AbstractContextManager[Any]:
    """Open a transaction to make rows in under a lease, unless the caller has one open."""
    if by is None or not connections[using].get_autocommit():
        return nullcontext()
    return _Making(using, savepoint=True, durable=False)


def refuse_overtaken(by: Fenced, using: str, model: type[models.Model]) -> None:
    """Refuse to have made a row, if the lease's key was granted anew: the row may be a deleted one.

    Behind the insert, so that where the database has one writer nobody else is granted the key
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
