"""The column for the highest fence that has touched a row, and the expression that raises it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.expressions import Expression
from django.db.models.sql.compiler import SQLCompiler
from django.db.utils import DatabaseError
from django.utils.translation import gettext_lazy as _

from .rejecting import Fenced

#: The name of the field in every model.
FENCE = "fence"

#: The highest integer of MySQL: one more is an error.
_MOST = 2**64 - 1
# Without the quotes around it, which depend on the server's language.
_REFUSED = re.compile(r"distlock:(\d+):(.*):(fence|key)", re.DOTALL)

#: Texts are the same key only if their bytes are equal, whatever a column's collation says.
_SAME_TEXT = {
    "mysql": "CAST(CONVERT({} USING utf8mb4) AS BINARY) = CAST(%s AS BINARY)",
    "postgresql": '{} COLLATE "C" = %s',
    "sqlite": "{} COLLATE BINARY = %s",
}


#: Replaces the lease in a write without one: every row has a higher fence.
NOBODY: Final[Any] = SimpleNamespace(key="", fence=-1)


class FenceField(models.PositiveBigIntegerField):  # type: ignore[type-arg]
    """The highest fence that touched the row. Only fenced writes change it, and none lowers it.

    An update without a lease leaves the column as it is, because the instance may hold an older
    value than the database.
    """

    description = _("Fence")

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("default", 0)
        kwargs.setdefault("editable", False)
        super().__init__(*args, **kwargs)
        if self.null:
            raise ValueError(
                "A fence cannot be null: SQLite needs the constraint to refuse stale writes."
            )

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        """Return the lease's fence; without a lease, the instance's for inserts, else the row's."""
        by: Fenced | None = getattr(model_instance, "_fenced_by", None)
        if add:
            value: int = super().pre_save(model_instance, add) if by is None else by.fence
            setattr(model_instance, self.attname, value)
            return value
        if by is None:
            model = type(model_instance)
            required = getattr(model, "fence_required", False)
            return Mark(NOBODY, model, {}) if required else models.F(self.attname)
        return Mark(by, type(model_instance), model_instance.key_fields(by))  # type: ignore[attr-defined]


class Mark(Expression):
    """The new value of a row's fence: that of a lease, or an error if the row's is higher.

    The value itself refuses, so one statement writes many rows or none, and a row that refused
    differs from one that the filter did not match.

    Args:
        by: The lease or fence under which the row is written.
        fields: The values that the row must have in these columns.
    """

    # A class attribute, because a new field for each write would cost as much as the rest.
    output_field = models.PositiveBigIntegerField()

    def __init__(self, by: Fenced, model: type[models.Model], fields: Mapping[str, Any]):
        self.by = by
        self.model = model
        self.fields = fields

    def resolve_expression(self, *args: Any, **kwargs: Any) -> Mark:
        """Return itself: an UPDATE writes one table, so the names of columns are enough."""
        return self

    def as_sql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, refusal: str = "NULL"
    ) -> tuple[str, tuple[Any, ...]]:
        """Refuse with a null, which the column does not accept."""
        quote = connection.ops.quote_name
        fence, pk = map(quote, _columns(self.model))
        values, matches = [], ""
        for name, value in self.fields.items():
            field: Any = self.model._meta.get_field(name)
            # A child's primary key is that of the parent, which may have the fence.
            column = pk if field.primary_key else quote(field.column)
            same = _SAME_TEXT.get(connection.vendor) if isinstance(value, str) else None
            matches += f" AND {(same or '{} = %s').format(column)}"
            values.append(field.get_db_prep_value(value, connection))
        told = values * refusal.count("{matches}")
        refusal = refusal.format(fence=fence, pk=pk, matches=matches)
        sql = f"CASE WHEN {fence} <= %s{matches} THEN %s ELSE {refusal} END"
        return sql, (self.by.fence, *values, self.by.fence, *told)

    def as_postgresql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, tuple[Any, ...]]:
        """Refuse with an invalid number that names the row: no query can find it afterwards."""
        why = "CASE WHEN true{matches} THEN ':fence' ELSE ':key' END"
        refusal = f"concat('distlock:', {{fence}}, ':', {{pk}}, {why})::bigint"
        return self.as_sql(compiler, connection, refusal)

    def as_mysql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> tuple[str, tuple[Any, ...]]:
        """Refuse with a number that is too large: without strict mode, a null would become 0."""
        return self.as_sql(compiler, connection, f"{_MOST} + ({{fence}} + 1)")


@cache
def _columns(model: type[models.Model]) -> tuple[str, str]:
    """Return the columns of the fence and of the primary key of the table that has it."""
    fence: Any = model._meta.get_field(FENCE)
    return fence.column, fence.model._meta.pk_fields[0].column


def is_refusal(error: DatabaseError, model: type[models.Model]) -> bool:
    """Whether the error is that of a `Mark` which refused a row of this model."""
    text = str(error)
    field: Any = model._meta.get_field(FENCE)
    # MySQL's quotes depend on the mode of the session.
    quoted = f"`{field.column}`", f'"{field.column}"'
    return (
        _REFUSED.search(text) is not None
        or text == f"NOT NULL constraint failed: {field.model._meta.db_table}.{field.column}"
        or (str(_MOST) in text and any(each in text for each in quoted))
    )


def refused(error: DatabaseError, model: type[models.Model]) -> tuple[Any, int, bool] | None:
    """Return what the error says about the row that refused; None: nothing.

    Returns:
        Its primary key (None: it has several columns), its fence, and whether it belongs to another
        key than that of the lease.
    """
    found = _REFUSED.search(str(error))
    if found is None:
        return None
    pk, *more = model._meta.pk_fields
    return None if more else pk.to_python(found[2]), int(found[1]), found[3] == "key"
