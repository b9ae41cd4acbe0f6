"""Checks of whether a lease may write a row. Most of them raise a `LockUsageError` if not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections, models
from django.db.utils import DatabaseError

from ..core.errors import FenceRejected, LockUsageError
from ..core.keys import IllegalKey
from .fields import FENCE, is_refusal, refused
from .keys import template_of
from .rejecting import Fenced, reject, require_fence


def key_fields(model: type[models.Model], by: Fenced) -> dict[str, Any]:
    """Return the column values that rows of a lease's key have, by the model's `fence_key`."""
    require_fence(by)
    template = template_of(model)
    if template is None:
        return {}
    found = template.columns(by.key)
    if found is None:
        raise LockUsageError(
            f"A row of {model.__name__} belongs to a key like {template.text!r}, and the lease is"
            f" on {by.key!r}.",
            key=by.key,
        )
    return found


def has_key(instance: models.Model, by: Fenced) -> bool:
    """Whether a row may belong to the key of a lease."""
    template = template_of(type(instance))
    if template is None:
        return True
    try:
        return template.of(instance) == by.key
    except IllegalKey:
        return False  # Such as a text that is too long for a key.


def require_key(instance: models.Model, by: Fenced) -> None:
    """Refuse to write a row under the lease of another key."""
    fields, template = key_fields(type(instance), by), template_of(type(instance))
    if template is None:
        return
    key = template.of(instance)
    if key == by.key:
        if (values := template.values(instance)) != fields:
            raise LockUsageError(
                f"{label(instance)} has {values}, and the rows of {key!r} have {fields}: texts in"
                " a key are in NFC.",
                key=by.key,
            )
        return
    why = (
        f"belongs to {key!r}, and the lease is on {by.key!r}"
        if key is not None
        else f"has no key like {template.text!r} before it is saved: save it without a lease first"
    )
    raise LockUsageError(f"{label(instance)} {why}.", key=by.key)


def refuse_without_lease(model: type[models.Model], what: str) -> None:
    """Refuse a write without a lease where the model requires one."""
    if getattr(model, "fence_required", False):
        raise LockUsageError(
            f"{model.__name__} can only be written under a lease (fence_required), and {what} has"
            " none. Use objects.fenced(lease) or save(lease=lease)."
        )


@contextmanager
def refusals(by: Fenced | None, written: Callable[[], models.QuerySet[Any]]) -> Iterator[None]:
    """Replace a database's error by one that names the row that refused the lease, and why."""
    try:
        yield
    except DatabaseError as error:
        rows = written()
        model = rows.model
        if not is_refusal(error, model):
            raise
        if by is None:
            refuse_without_lease(model, "this write")
            raise
        pk, current, is_other = refused(error, model) or _looked_for(rows, by)
        row = model._meta.label if pk is None else f"{model._meta.label} {pk}"
        # A collation may treat texts as equal whose bytes, and so their keys, differ.
        has_none_higher = current is not None and current <= by.fence
        if is_other or (has_none_higher and getattr(model, "fence_key", None)):
            text = f"{row} belongs to another key than {by.key!r}."
            raise LockUsageError(text, key=by.key) from error
        if has_none_higher:
            current = None  # It was lowered since, by a write without the ORM.
        try:
            reject(by, row, current, model=model._meta.label, pk=pk)
        except FenceRejected as rejected:
            raise rejected from error


def label(instance: models.Model) -> str:
    """Return the name of a row in messages."""
    return f"{instance._meta.label} {instance.pk}"


def _looked_for(rows: models.QuerySet[Any], by: Fenced) -> tuple[Any, int | None, bool]:
    """Find the row that refused, on a database whose transactions can go on after an error.

    Returns:
        Its primary key, its fence, and whether it belongs to another key than that of the lease.
    """
    model: Any = rows.model
    connection, template = connections[rows.db], template_of(model)
    broken, connection.needs_rollback = connection.needs_rollback, False
    try:
        if connection.in_atomic_block and connection.features.has_select_for_update:
            # To read what is committed now, and not a snapshot.
            rows = rows.select_for_update()
        others = rows.exclude(**template.columns(by.key) or {}) if template else rows.none()
        for some in (others, rows):
            found = some.order_by(f"-{FENCE}").values_list("pk", FENCE).first()
            if found:
                return *found, some is others
        return None, None, False
    except DatabaseError:
        return None, None, False
    finally:
        connection.needs_rollback = broken
