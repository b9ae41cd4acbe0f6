"""Relations between rows, whose managers and links go past what a row was read under."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db import models, router, transaction
from django.db.models.fields.related_descriptors import (
    ForwardOneToOneDescriptor,
    ReverseOneToOneDescriptor,
)


class FencedManager(models.Manager[Any]):
    """What `FencedQuerySet.as_manager()` gives.

    Django derives the managers of relations from it. Their `add()` and `remove()`, and with them
    `set()`, write the rows that they are given in one statement: here each of those that was read
    under a lease has to let that lease write first.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("add", "remove"):
            if name in vars(cls):
                setattr(cls, name, _fenced(vars(cls)[name]))


def _fenced(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def write(self: Any, *rows: Any, **kwargs: Any) -> None:
        read = [
            row
            for row in rows
            if getattr(row, "_fenced_by", None) is not None and not row._state.adding
        ]
        # A relation of many to many writes no row of these; and one by one they are saved.
        if not read or hasattr(self, "through") or not kwargs.get("bulk", True):
            method(self, *rows, **kwargs)
            return
        using = router.db_for_write(self.model, instance=self.instance)
        with transaction.atomic(using=using):
            for row in read:
                row._write_fence(row._fenced_by, using)
            method(self, *rows, **kwargs)

    return write


class ParentLink(ForwardOneToOneDescriptor):  # type: ignore[type-arg]
    """Gives a row's parent, which Django makes of what the row has in memory."""

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        return _same_row(instance, super().__get__(instance, cls))


class ChildLink(ReverseOneToOneDescriptor):  # type: ignore[type-arg]
    """Gives a row's child, whose `save()` writes the columns of the parent as well."""

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        return _same_row(instance, super().__get__(instance, cls))


def link(model: type[models.Model], field: Any) -> None:
    """Let parent and child, which are one row in two tables, go on under one lease.

    Args:
        field: Links the model to its parent.
    """
    setattr(model, field.name, ParentLink(field))
    # Django adds the parent's descriptor later, when the model is known.
    field.related_accessor_class = ChildLink


def _same_row(instance: Any, other: Any) -> Any:
    if instance is not None and getattr(other, "_fenced_by", None) is None:
        other._fenced_by = instance._fenced_by
    return other
