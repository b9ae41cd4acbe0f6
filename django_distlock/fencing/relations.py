"""Relations between rows: their managers and links would ignore the lease of a row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db import models, router, transaction
from django.db.models.fields.related_descriptors import (
    ForwardOneToOneDescriptor,
    ReverseOneToOneDescriptor,
)

from .refusing import refuse_without_lease
from .rejecting import Fenced


class FencedManager(models.Manager[Any]):
    """The manager that `FencedQuerySet.as_manager()` returns.

    Django derives the managers of relations from it. Their `add()` and `remove()`, and so their
    `set()`, write the given rows: here, each under the lease under which it was read.
    """

    _by: Fenced | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, wrapped in (("add", _adding), ("remove", _removing)):
            if name in vars(cls):
                setattr(cls, name, wrapped(vars(cls)[name]))

    def get_queryset(self) -> Any:
        """See Django's."""
        rows: Any = super().get_queryset()
        return rows if self._by is None else rows.fenced(self._by)


def _adding(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def add(self: Any, *rows: Any, **kwargs: Any) -> None:
        # A many-to-many relation writes none of these rows; without `bulk`, each row is saved.
        if hasattr(self, "through") or not kwargs.get("bulk", True):
            method(self, *rows, **kwargs)
            return
        using = router.db_for_write(self.model, instance=self.instance)
        with transaction.atomic(using=using):
            for row in rows:
                # Django's write ignores managers, and Django itself refuses other objects.
                if not isinstance(row, self.model) or row._state.adding:
                    continue
                if row._fenced_by is None:
                    refuse_without_lease(self.model, "add()")
                else:
                    row._write_fence(row._fenced_by, using)
            method(self, *rows, **kwargs)

    return add


def _removing(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def remove(self: Any, *rows: Any, **kwargs: Any) -> None:
        groups: dict[Fenced | None, list[Any]] = {}
        for row in rows:
            groups.setdefault(getattr(row, "_fenced_by", None), []).append(row)
        if hasattr(self, "through") or not groups.keys() - {None}:
            method(self, *rows, **kwargs)
            return
        # Prefetched rows would be written without a lease.
        self._remove_prefetched_objects()
        using = router.db_for_write(self.model, instance=self.instance)
        with transaction.atomic(using=using):
            for by, some in groups.items():
                under = copy.copy(self)
                under._by = by
                for row in some if by is not None else ():
                    row._write_fence(by, using)
                method(under, *some, **kwargs)

    return remove


class _Link:
    """A base that stands before one of Django's descriptors."""

    def __get__(self, instance: Any, cls: Any = None) -> Any:
        other: Any = super().__get__(instance, cls)  # type: ignore[misc]
        if instance is not None and getattr(other, "_fenced_by", None) is None:
            other._fenced_by = instance._fenced_by
        return other

    def get_queryset(self, **hints: Any) -> Any:
        """Return the rows; if the instance has a lease, from the database for writing."""
        rows: Any = super().get_queryset(**hints)  # type: ignore[misc]
        instance = hints.get("instance")
        if getattr(instance, "_fenced_by", None) is None:
            return rows
        return rows.using(router.db_for_write(rows.model, instance=instance))


class ParentLink(_Link, ForwardOneToOneDescriptor):  # type: ignore[type-arg]
    """The link to a row's parent, which Django makes from the row in memory."""


class ChildLink(_Link, ReverseOneToOneDescriptor):  # type: ignore[type-arg]
    """The link to a row's child, whose `save()` also writes the columns of the parent."""


def link(model: type[models.Model], field: Any) -> None:
    """Let parent and child, one row in two tables linked by a field, have the same lease."""
    setattr(model, field.name, ParentLink(field))
    # Django adds the parent's descriptor later, when the model is known.
    field.related_accessor_class = ChildLink
