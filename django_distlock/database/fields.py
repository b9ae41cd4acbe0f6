"""Columns that behave the same on every database."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import DataError, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from ..core.records import from_microseconds, to_microseconds

if TYPE_CHECKING:
    _CharField = models.CharField[Any, Any]
    _TextField = models.TextField[Any, Any]
    _BigIntegerField = models.BigIntegerField[Any, Any]
    _DateTimeField = models.DateTimeField[Any, Any]
else:  # Only type checkers may give a field type arguments.
    _CharField, _TextField = models.CharField, models.TextField
    _BigIntegerField, _DateTimeField = models.BigIntegerField, models.DateTimeField

# Without these, some databases treat "A" as "a", "é" as "e", or "a " as "a".
_BYTE_COLLATIONS = {"postgresql": "C", "sqlite": "BINARY"}


class KeyField(_CharField):
    """Text that is compared and sorted by its bytes."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        if connection.vendor == "postgresql":
            # Not "varchar", because Django creates a second index for LIKE on a unique "varchar".
            # With the C collation, the first index can do both, which saves a write per lock.
            return f"character varying({self.max_length})"
        if connection.vendor == "mysql":
            # Independent of the database's character set. Not "varchar", because Django warns about
            # a unique "varchar" above 255, which old formats of InnoDB could not index.
            return f"character varying({self.max_length}) CHARACTER SET utf8mb4"
        return super().db_type(connection)

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        parameters = super().db_parameters(connection)
        parameters["collation"] = _BYTE_COLLATIONS.get(connection.vendor)
        if connection.vendor == "mysql":
            # Not "utf8mb4_bin", which ignores trailing spaces.
            mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
            parameters["collation"] = "utf8mb4_nopad_bin" if mariadb else "utf8mb4_0900_bin"
        return parameters


class NoteField(_TextField):
    """Text in any script, independent of the database's character set."""

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        wide = " CHARACTER SET utf8mb4" if connection.vendor == "mysql" else ""
        return f"{super().db_type(connection)}{wide}"


class InstantField(_BigIntegerField):
    """An aware datetime, stored as microseconds since 1970.

    Integers compare and add up the same way on every database and with every `USE_TZ` and
    `TIME_ZONE`. See docs/decisions/instants-are-integers.md.
    """

    if TYPE_CHECKING:  # What models with this field take and give.
        _pyi_private_set_type: Any
        _pyi_private_get_type: Any

    def from_db_value(
        self, value: int | None, expression: Any, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        try:
            return None if value is None else from_microseconds(value)
        except (OverflowError, TypeError) as error:
            raise DataError(f"{value!r} is not a time. Another program has changed it.") from error

    def to_python(self, value: Any) -> datetime | None:
        if isinstance(value, str):
            value = parse_datetime(value) or value
        if value is None or isinstance(value, datetime):
            return value
        return from_microseconds(int(value))

    def get_prep_value(self, value: Any) -> Any:
        return super().get_prep_value(
            to_microseconds(value) if isinstance(value, datetime) else value
        )

    def value_to_string(self, obj: models.Model) -> str:
        value = self.value_from_object(obj)
        return "" if value is None else value.isoformat()


def number_in(name: str) -> models.ExpressionWrapper[models.F]:
    """Read a column of instants as numbers: the field's error about one would hide all rows."""
    return models.ExpressionWrapper(models.F(name), models.BigIntegerField())


class EventTimeField(_DateTimeField):
    """An aware datetime under any `USE_TZ`, in a regular datetime column.

    This is for columns that people read and filter. Leases are decided by an `InstantField`.
    """

    def deconstruct(self) -> Any:
        # In migrations, it is Django's own field.
        name, _path, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs

    def from_db_value(
        self, value: datetime | None, expression: Any, connection: BaseDatabaseWrapper
    ) -> datetime | None:
        if value is None or timezone.is_aware(value):
            return value
        return timezone.make_aware(value, timezone.get_default_timezone())

    def get_prep_value(self, value: Any) -> Any:
        if isinstance(value, datetime) and timezone.is_aware(value) and not settings.USE_TZ:
            value = timezone.make_naive(value, timezone.get_default_timezone())
        return super().get_prep_value(value)
