"""Reads and writes of many rows under a lease."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from django.db import models, transaction
from django.db.models.lookups import Exact
from django.db.models.query import ModelIterable
from django.db.models.sql import AND, Query

from ..core.errors import LockError, LockUsageError
from .fields import FENCE, Mark
from .refusing import key_fields, refusals, refuse_without_lease, require_key
from .rejecting import Fenced, making, refuse_overtaken, require_fence, without_lease
from .relations import FencedManager

if TYPE_CHECKING:
    _Iterable = ModelIterable[Any]
else:
    _Iterable = ModelIterable

M = TypeVar("M", bound=models.Model)
T = TypeVar("T")

_BULK_CREATE = (
    "batch_size",
    "ignore_conflicts",
    "update_conflicts",
    "update_fields",
    "unique_fields",
)

#: How often a read is repeated while others add rows, before it fails.
MOST_LOOKS = 100


class _FencedIterable(_Iterable):
    """Marks the rows before it reads them."""

    def __iter__(self) -> Iterator[Any]:
        queryset: Any = self.queryset
        if queryset._by is None:
            yield from super().__iter__()
            return
        queryset._mark()
        for row in super().__iter__():
            yield queryset._checked(row)


class FencedQuerySet(models.QuerySet[M], Generic[M]):
    """A queryset of a `FencedModel`.

    After `fenced(lease)`, a read marks its rows first, which raises their fences to the lease's.
    Rows with a higher fence refuse: see `FenceRejected`. Reads use the database for writing.
    """

    _by: Fenced | None = None
    _key_fields: Mapping[str, Any] = {}

    def __repr__(self) -> str:
        if self._by is None or self._result_cache is not None:
            return super().__repr__()
        # A debugger that shows the queryset must not raise the fences of rows.
        return f"<{type(self).__name__} of {self.model._meta.label} under {self._by!r}>"

    @classmethod
    def as_manager(cls) -> Any:
        """See Django's."""
        manager: Any = FencedManager.from_queryset(cls)()
        manager._built_with_as_manager = True
        return manager

    as_manager.queryset_only = True  # type: ignore[attr-defined]

    def _clone(self) -> Any:
        clone = super()._clone()  # type: ignore[misc]
        if self._by is not None:
            clone._by, clone._key_fields = self._by, self._key_fields
        return clone

    def fenced(self, lease: Fenced) -> FencedQuerySet[M]:
        """Return a queryset that reads and writes under a lease.

        Raises:
            LockUsageError: The lease has no fence, belongs to another process, or is on a key that
                no row of this model belongs to.
        """
        if self._fields is not None:  # type: ignore[attr-defined]
            raise _no_values(lease)
        clone = cast("FencedQuerySet[M]", self._chain())  # type: ignore[attr-defined]
        clone._key_fields = key_fields(self.model, lease)
        clone._by = lease
        clone._iterable_class = _FencedIterable
        clone._for_write = True
        return clone

    # Reading

    def only(self, *fields: str) -> Any:
        """See Django's. The fence is always loaded."""
        return super().only(*fields, FENCE)

    def defer(self, *fields: str | None) -> Any:
        """See Django's. The fence is always loaded."""
        wanted: Any = (field for field in fields if field != FENCE)
        return super().defer(*wanted)

    def count(self) -> int:
        """See Django's. The rows are marked first."""
        return self._steady(super().count)

    def exists(self) -> bool:
        """See Django's. The rows are marked first."""
        return self._steady(super().exists)

    def aggregate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See Django's. The rows are marked first."""
        return self._steady(lambda: super(FencedQuerySet, self).aggregate(*args, **kwargs))

    def _values(self, *fields: Any, **expressions: Any) -> Any:
        if self._by is not None:
            raise _no_values(self._by)
        return super()._values(*fields, **expressions)  # type: ignore[misc]

    def raw(self, *args: Any, **kwargs: Any) -> Any:
        """See Django's. Refused after `fenced()`: which rows it returns is not known before."""
        if self._by is not None:
            raise LockUsageError("A raw() query cannot be fenced.", key=self._by.key)
        return super().raw(*args, **kwargs)

    def __or__(self, other: Any) -> Any:
        return super().__or__(self._alike(other))

    def __and__(self, other: Any) -> Any:
        return super().__and__(self._alike(other))

    def __xor__(self, other: Any) -> Any:
        return super().__xor__(self._alike(other))

    def _combinator_query(self, combinator: str, *others: Any, **how: Any) -> Any:
        for each in others:
            self._alike(each)
        return super()._combinator_query(combinator, *others, **how)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The lease itself: a copy would be another lease.
        memo[id(self._by)] = self._by
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        # A lease belongs to its process.
        return {**super().__getstate__(), "_by": without_lease(self._by)}

    def _alike(self, other: Any) -> Any:
        theirs: Fenced | None = getattr(other, "_by", None)
        if theirs != self._by:
            by = cast("Fenced", theirs if self._by is None else self._by)
            raise LockUsageError(
                "Querysets under different leases cannot be combined. Call fenced() last.",
                key=by.key,
            )
        return other

    # Writing

    def update(self, **kwargs: Any) -> int:
        """See Django's. After `fenced()`, all of the rows are written, or none.

        Raises:
            FenceRejected: One of the rows has a higher fence.
            LockUsageError: One of the rows belongs to another key; or the model requires a lease,
                and there is none.
        """
        if FENCE in kwargs:
            raise self._not_set()
        if self._by is None:
            refuse_without_lease(self.model, "update()")
            return super().update(**kwargs)
        return self._write(**kwargs)

    def bulk_update(
        self, objs: Iterable[M], fields: Iterable[str], batch_size: int | None = None
    ) -> int:
        """See Django's, and `update`. Without `fenced()`, each row is written under its lease."""
        objs, fields = tuple(objs), tuple(fields)
        if self._by is None and any(_read_under(each) is not None for each in objs):
            return self._update_apart(objs, fields, batch_size)
        if self._by is None:
            return super().bulk_update(objs, fields, batch_size)
        # In a transaction, because a later batch may be refused.
        with transaction.atomic(using=self._write_alias()):
            count = super().bulk_update(objs, fields, batch_size)
        for each in objs:
            each._fenced_by = self._by  # type: ignore[attr-defined]
            each.fence = self._by.fence  # type: ignore[attr-defined]
        return count

    def _update_apart(
        self, objs: tuple[M, ...], fields: tuple[str, ...], batch_size: int | None
    ) -> int:
        """Update the rows of each lease, and those without one, in separate statements."""
        groups: dict[Fenced | None, list[M]] = {}
        for each in objs:
            groups.setdefault(_read_under(each), []).append(each)
        with transaction.atomic(using=self._write_alias()):
            return sum(
                (self if by is None else self.fenced(by)).bulk_update(rows, fields, batch_size)
                for by, rows in groups.items()
            )

    def create(self, **kwargs: Any) -> M:
        """See Django's. After `fenced()` the row begins with the lease's fence."""
        if self._by is None:
            return super().create(**kwargs)
        made = self.model(**kwargs)
        self._for_write = True
        made.save(force_insert=True, using=self.db, lease=self._by)  # type: ignore[call-arg]
        return made

    def bulk_create(self, objs: Iterable[M], *args: Any, **kwargs: Any) -> list[M]:
        """See Django's, and `create`. Under a lease, existing rows cannot be updated."""
        objs = list(objs)
        kwargs.update(zip(_BULK_CREATE, args, strict=False))
        updates = bool(kwargs.get("update_conflicts"))
        used = [by for by in (self._by, *map(_read_under, objs)) if by is not None]
        if updates and used:
            raise LockUsageError(
                "bulk_create(update_conflicts=True) cannot be fenced: use bulk_update() for the"
                " rows that are there.",
                key=used[0].key,
            )
        if self._by is not None:
            for each in objs:
                require_key(each, self._by)
                each._fenced_by = self._by  # type: ignore[attr-defined]
        elif updates:
            refuse_without_lease(self.model, "bulk_create(update_conflicts=True)")
            if FENCE in (kwargs.get("update_fields") or ()):
                raise self._not_set()
        using = self._write_alias()
        for each in objs:
            each.begin(using)  # type: ignore[attr-defined]
        leases = {by for by in map(_read_under, objs) if by is not None}
        # One lease is enough to open the transaction, which undoes the rows of all leases.
        with making(next(iter(leases), None), using), transaction.mark_for_rollback_on_error(using):
            made = super().bulk_create(objs, **kwargs)
            for by in leases:
                refuse_overtaken(by, using, self.model)
        return made

    def get_or_create(
        self, defaults: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> tuple[M, bool]:
        """See Django's, and `create`."""
        with making(self._by, self._write_alias()):
            return super().get_or_create(defaults, **kwargs)

    def update_or_create(
        self,
        defaults: Mapping[str, Any] | None = None,
        create_defaults: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[M, bool]:
        """See Django's, and `create`."""
        with making(self._by, self._write_alias()):
            return super().update_or_create(defaults, create_defaults, **kwargs)

    def delete(self) -> tuple[int, dict[str, int]]:
        """See Django's, and `update`."""
        if self._by is None:
            refuse_without_lease(self.model, "delete()")
            return super().delete()
        with transaction.atomic(using=self._write_alias()):
            # Rows that have our fence are written, too: that locks them until the commit.
            self._mark(again=True)
            # Others may add rows before the second statement. They have another fence, or belong to
            # another key, which may have granted the same fence.
            rows = self._plain().filter(**{FENCE: self._by.fence}, **self._key_fields)
            return super(FencedQuerySet, rows).delete()

    update.alters_data = bulk_update.alters_data = True  # type: ignore[attr-defined]
    create.alters_data = bulk_create.alters_data = True  # type: ignore[attr-defined]
    get_or_create.alters_data = update_or_create.alters_data = True  # type: ignore[attr-defined]
    delete.alters_data = delete.queryset_only = True  # type: ignore[attr-defined]

    # How it is done

    def _not_set(self) -> LockUsageError:
        return LockUsageError(
            f"The fence of {self.model.__name__} is raised by fenced(lease) and cannot be set."
        )

    def _plain(self) -> FencedQuerySet[M]:
        """Return the same rows without marks, row locks and related objects."""
        plain = cast("FencedQuerySet[M]", self._chain())  # type: ignore[attr-defined]
        plain._by = None
        plain._iterable_class = ModelIterable
        plain.query.select_for_update = False
        plain.query.select_related = False
        plain._prefetch_related_lookups = ()  # type: ignore[attr-defined]
        return plain

    def _write(self, **values: Any) -> int:
        by = cast("Fenced", self._by)
        require_fence(by)
        self._for_write = True
        # First: MySQL assigns from left to right, and the mark needs the old values.
        values = {FENCE: Mark(by, self.model, self._key_fields), **values}
        with refusals(by, self._plain):
            if not cast("Any", self.model._meta.concrete_model)._meta.parents:
                return super().update(**values)
            # Django writes the tables of parents in separate statements.
            with transaction.atomic(using=self.db):
                return super().update(**values)

    def _mark(self, *, again: bool = False) -> int:
        """Raise the rows' fences to ours; with `again`, also write equal ones; return the count."""
        by = cast("Fenced", self._by)
        if self.query.combinator:
            raise LockUsageError(
                f"A {self.query.combinator}() cannot be read under a lease. Call fenced() first,"
                " then filter with one condition.",
                key=by.key,
            )
        if self.query.select_for_update_nowait or self.query.select_for_update_skip_locked:
            raise LockUsageError(
                "A fenced read waits for rows that others have locked: select_for_update() takes"
                " neither nowait nor skip_locked behind fenced().",
                key=by.key,
            )
        rows = self._plain()
        if is_one(rows.query):
            rows.query.clear_limits()
        query = rows.query
        if _chooses_by(self.model._meta.get_field(FENCE), query, self._write_alias()):
            raise LockUsageError(
                "A fenced read raises the fence of rows before it reads them, so it cannot filter"
                " by the fence, nor slice by it. Read the primary keys into a list, without a"
                " lease, and filter by those.",
                key=by.key,
            )
        if (
            query.is_sliced
            or query.distinct_fields
            or query.group_by is not None
            or query.where.contains_over_clause
        ):
            # An UPDATE cannot contain these.
            found = list(rows.values_list("pk", flat=True))
            rows = FencedQuerySet(self.model, using=self._write_alias()).filter(pk__in=found)
        rows = rows.order_by()
        if not again:
            rows = rows.exclude(**{FENCE: by.fence}, **self._key_fields)
        rows._by, rows._key_fields = by, self._key_fields
        return rows._write()

    def _checked(self, row: Any) -> Any:
        """Return a row that has our fence; one that others have just added is marked first."""
        by = cast("Fenced", self._by)
        if row.fence != by.fence:
            row.raise_fence(by)
        row._fenced_by = by
        return row

    def _steady(self, read: Callable[[], T]) -> T:
        """Repeat a read until there are no new rows to mark after it."""
        if self._by is None:
            return read()
        self._mark()
        for _ in range(MOST_LOOKS):
            value = read()
            if not self._mark():
                return value
        raise LockError("Rows are added faster than they can be fenced.", key=self._by.key)

    def _write_alias(self) -> str:
        self._for_write = True
        return self.db


def _read_under(row: models.Model) -> Fenced | None:
    return getattr(row, "_fenced_by", None)


def _no_values(by: Fenced) -> LockUsageError:
    return LockUsageError(
        "A fenced read returns instances and does not support values().", key=by.key
    )


def _chooses_by(fence: Any, query: Query, using: str, *, is_sub: bool = False) -> bool:
    """Whether the rows' own fences, and not those of related rows, decide which are returned.

    Args:
        is_sub: Whether the query is a subquery, which may be about the same rows.
    """
    parts: list[Any] = [query.where, *query.combined_queries]
    if is_sub:
        parts += [*query.select, *query.annotations.values()]
    if (query.is_sliced or query.distinct_fields) and not query.combinator:
        parts += [order for order, _sql in query.clone().get_compiler(using).pre_sql_setup()[1]]
    is_distinct = FENCE in query.distinct_fields and not is_sub
    return is_distinct or any(_is_about(each, fence, using, is_sub=is_sub) for each in parts)


def _is_about(part: Any, fence: Any, using: str, *, is_sub: bool) -> bool:
    if isinstance(part, Query):
        return _chooses_by(fence, part, using, is_sub=True)
    if hasattr(part, "target") and part.target is fence:
        return is_sub or bool(part.alias == fence.model._meta.db_table)
    # Raw SQL does not say what it reads.
    parts: Any = getattr(part, "get_source_expressions", list)()
    return any(_is_about(each, fence, using, is_sub=is_sub) for each in parts)


def is_one(query: Query) -> bool:
    """Whether the filter matches at most one row, whatever the limits are."""
    where = query.where
    return (
        where.connector == AND
        and not where.negated
        and any(
            isinstance(each, Exact)
            and not hasattr(each.rhs, "resolve_expression")
            and getattr(getattr(each.lhs, "target", None), "unique", False)
            and each.lhs.alias == query.base_table
            for each in where.children
        )
    )
