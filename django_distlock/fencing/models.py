"""The model whose rows refuse stale writes."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self, cast

from asgiref.sync import sync_to_async
from django.db import DatabaseError, models, router, transaction
from django.db.models.functions import Greatest

from ..core.errors import LockUsageError
from ..locks.taking import UNSET
from . import relations
from .fields import FENCE, FenceField, Mark
from .keys import template_of
from .querysets import FencedQuerySet
from .refusing import has_key, key_fields, label, refusals, refuse_without_lease, require_key
from .rejecting import Fenced, making, refuse_overtaken, reject, without_lease

_SAVE = ("force_insert", "force_update", "using", "update_fields")


class FencedModel(models.Model):
    """A model whose rows remember the highest fence that touched them, and refuse lower ones.

    A row that was read or saved under a lease keeps it: its next `save()` is fenced, too, and so
    are those of its copies. A save without a lease leaves the fence in the database as it is.

    Attributes:
        fence: The highest fence that touched the row; 0: none.
        fence_key: The key that a row belongs to, with the names of columns in braces, such as
            `"payment:{pk}"`: leases on other keys are refused. None: any key.
        fence_required: Refuse updates and deletions without a lease. Inserts and fixtures pass.
    """

    fence_key: ClassVar[str | None] = None
    fence_required: ClassVar[bool] = False

    fence = FenceField()

    objects: ClassVar[Any] = FencedQuerySet.as_manager()

    #: The lease or fence under which the row was read or saved.
    _fenced_by: Fenced | None = None

    class Meta:
        abstract = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        models.signals.pre_save.connect(_keep_fence, sender=cls)
        models.signals.post_save.connect(_know_fence, sender=cls)
        models.signals.class_prepared.connect(_link_parents, sender=cls)

    def __getstate__(self) -> dict[str, Any]:
        # A lease belongs to its process: a row that is cached or sent keeps its key and fence.
        return {**super().__getstate__(), "_fenced_by": without_lease(self._fenced_by)}

    def __copy__(self) -> Self:
        # A copy in the same process keeps the lease itself.
        make, arguments, state, *_ = cast("tuple[Any, ...]", self.__reduce__())
        made: Any = make(*arguments)
        made.__setstate__(state)
        made._fenced_by = self._fenced_by
        return cast("Self", made)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made: Any = copy.copy(self)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__reduce__()[2], memo))
        made._fenced_by = self._fenced_by
        return cast("Self", made)

    def save(self, *args: Any, lease: Any = UNSET, **kwargs: Any) -> None:
        """See Django's.

        Args:
            lease: The lease to save under; None: none; left out: that of the last read or save.

        Raises:
            FenceRejected: The row has a higher fence. Nothing was written.
            LockUsageError: The lease has no fence, or is on another key; or the model requires a
                lease, and there is none.
        """
        kwargs.update(zip(_SAVE, args, strict=False))
        fields = kwargs.get("update_fields")
        if fields is not None and not fields:
            super().save(**kwargs)  # Django writes nothing, and so no fence.
            return
        using = kwargs.get("using") or router.db_for_write(type(self), instance=self)
        if lease is UNSET and self._is_copy() and not kwargs.get("update_fields"):
            self._fenced_by = None
            # A copy must not overwrite an existing row, either.
            kwargs["force_insert"] = kwargs.get("force_insert") or (models.Model,)
        by: Fenced | None = self._fenced_by if lease is UNSET else lease
        if by is not None:
            require_key(self, by)
            if kwargs.get("update_fields"):
                kwargs["update_fields"] = {*kwargs["update_fields"], FENCE}
            elif self._is_from(using) and not kwargs.get("force_insert"):
                # Else a row that the next holder has deleted would be inserted again.
                kwargs["force_update"] = kwargs.get("update_fields") is None
            # Django does not save a field that was not loaded.
            self.__dict__.setdefault(FENCE, 0)
        elif kwargs.get("update_fields") or (FENCE not in self.__dict__ and self._is_from(using)):
            # The fence is not among the written columns, so it cannot refuse the write.
            refuse_without_lease(type(self), "save()")
        before = self.__dict__.get(FENCE)
        self._fenced_by = by
        # For a row in two tables, Django opens its own transaction, in which ours cannot begin.
        whole = making(by if self._meta.parents else None, using)
        with refusals(by, lambda: self._row(using)), whole:
            super().save(**kwargs)
        if by is not None:
            self.fence = by.fence
        elif before is not None:
            self.__dict__.setdefault(FENCE, before)

    def _save_table(self, raw: Any = False, cls: Any = None, *args: Any, **kwargs: Any) -> bool:
        forced = dict(zip(("force_insert", "force_update"), args, strict=False), **kwargs)
        if forced.get("force_insert") and forced.get("force_update"):
            # Django had to insert the parent of an existing row: somebody has deleted the row.
            error: type[Exception] = getattr(type(self), "NotUpdated", DatabaseError)
            raise error(f"{label(self)} no longer exists.")
        saved: bool = super()._save_table(raw, cls, *args, **kwargs)  # type: ignore[misc]
        return saved

    def _do_insert(self, manager: Any, using: Any, fields: Any, returning: Any, raw: Any) -> Any:
        insert = super()._do_insert  # type: ignore[misc]
        if raw or all(field.name != FENCE for field in fields):
            return insert(manager, using, fields, returning, raw)
        self.begin(using)
        with making(self._fenced_by, using):
            made = insert(manager, using, fields, returning, raw)
            if self._fenced_by is not None:
                refuse_overtaken(self._fenced_by, using, type(self))
        return made

    def begin(self, using: str) -> None:
        """Let an inserted row begin with a lease on its own key, or without a fence.

        An instance may be a copy, with the lease and the fence of the original. Only a row that
        moves to another database keeps its fence.
        """
        if self._is_copy():
            self._fenced_by = None
        moves = not self._is_new() and self._state.db not in (None, using)
        if self._fenced_by is None and not moves:
            self.fence = 0

    def _is_copy(self) -> bool:
        """Whether the instance is a new row, with a lease on another key than its own."""
        return self._fenced_by is not None and self._is_new() and not has_key(self, self._fenced_by)

    def _is_new(self) -> bool:
        # A row in two tables can be found by one of its primary keys.
        is_set = cast("Any", self)._is_pk_set
        tables = (self, *self._meta.all_parents)
        return self._state.adding or not any(is_set(each._meta) for each in tables)

    def _do_update(self, base_qs: Any, using: Any, pk_val: Any, values: Any, *args: Any) -> Any:
        # The fence first: MySQL assigns from left to right, and it looks at what was there before.
        values = sorted(values, key=lambda value: value[0].name != FENCE)
        return super()._do_update(base_qs, using, pk_val, values, *args)

    async def asave(self, *args: Any, lease: Any = UNSET, **kwargs: Any) -> None:
        """See `save`."""
        await sync_to_async(self.save)(*args, lease=lease, **kwargs)

    def delete(self, *args: Any, lease: Any = UNSET, **kwargs: Any) -> tuple[int, dict[str, int]]:
        """See Django's, and `save`."""
        by: Fenced | None = self._fenced_by if lease is UNSET else lease
        if by is None:
            refuse_without_lease(type(self), "delete()")
        if by is None or self.pk is None:
            return super().delete(*args, **kwargs)
        using = (args[0] if args else kwargs.get("using")) or router.db_for_write(
            type(self), instance=self
        )
        with transaction.atomic(using=using):
            try:
                self._write_fence(by, using)
            except type(self).DoesNotExist:
                # No error, as in Django. A row that has replaced it since must not be deleted.
                return 0, {}
            return super().delete(*args, **kwargs)

    async def adelete(
        self, *args: Any, lease: Any = UNSET, **kwargs: Any
    ) -> tuple[int, dict[str, int]]:
        """See `delete`."""
        return await sync_to_async(self.delete)(*args, lease=lease, **kwargs)

    save.alters_data = delete.alters_data = True  # type: ignore[attr-defined]
    asave.alters_data = adelete.alters_data = True  # type: ignore[attr-defined]

    def raise_fence(self, lease: Fenced) -> None:
        """Raise the row's fence to that of a lease, then load the row again.

        The values that were read before may be outdated: see `Lease.fenced`.

        Raises:
            FenceRejected: The row has a higher fence.
            DoesNotExist: The row is gone.
            LockUsageError: The transaction reads from a snapshot that is older than the row.
        """
        using = router.db_for_write(type(self), instance=self)
        self._write_fence(lease, using)
        # Related objects may be outdated, too. Django drops them if it loads all fields.
        self.refresh_from_db(using=using)
        if self.fence > lease.fence:
            # Overtaken between the write and the read.
            reject(lease, label(self), self.fence, model=self._meta.label, pk=self.pk)
        if self.fence < lease.fence:
            raise LockUsageError(
                f"The transaction on {using!r} reads {label(self)} as it was before its last"
                " write. Begin it after the lock was acquired, or use READ COMMITTED.",
                key=lease.key,
            )
        self._fenced_by = lease

    def refresh_from_db(
        self, using: str | None = None, fields: Any = None, from_queryset: Any = None
    ) -> None:
        """See Django's. Read from a fenced queryset, the row gets its lease.

        If only some fields are read, the row keeps the lease under which the others were read. A
        row that has a lease is read from the database for writing.
        """
        if using is None and from_queryset is None and self._fenced_by is not None:
            using = router.db_for_write(type(self), instance=self)
        super().refresh_from_db(using, fields, from_queryset)
        by: Fenced | None = getattr(from_queryset, "_by", None)
        if by is not None and (fields is None or self._fenced_by is None):
            self._fenced_by = by

    def key_fields(self, lease: Fenced) -> dict[str, Any]:
        """Return the values that the row must have in the columns of its key."""
        return key_fields(type(self), lease)

    def _write_fence(self, by: Fenced, using: str) -> None:
        require_key(self, by)
        rows = self._row(using)
        with refusals(by, lambda: rows):
            if not rows.update(**{FENCE: Mark(by, type(self), self.key_fields(by))}):
                raise type(self).DoesNotExist(f"{self._meta.label} {self.pk} no longer exists.")

    def _is_from(self, using: str) -> bool:
        return not self._state.adding and self._state.db == using and self.pk is not None

    def _row(self, using: str) -> models.QuerySet[Self]:
        # Not by a manager of the model, which may leave rows out.
        return models.QuerySet(type(self), using=using).filter(pk=self.pk)


def _keep_fence(instance: FencedModel, using: str, raw: bool, **_: Any) -> None:
    """Keep a fixture, which is written as it is, from lowering the fence of an existing row."""
    concrete: Any = instance._meta.concrete_model
    if not raw or concrete._meta.get_field(FENCE) not in concrete._meta.local_fields:
        return
    template = template_of(type(instance))
    # Its values are looked at, and not its key: a text may be too long for one.
    is_new = template is not None and None in template.values(instance).values()
    # If the key will be new, nobody can have locked it before.
    given = 0 if is_new else instance.fence or 0
    there = instance._row(using).values_list(FENCE, flat=True).first()
    instance.fence = max(given, there or 0)
    if there is not None:
        # Until the row is written, another session may raise its fence.
        fence: Any = Greatest(models.F(FENCE), models.Value(instance.fence))
        instance.fence = fence


def _know_fence(instance: FencedModel, raw: bool, **_: Any) -> None:
    """Replace the expression of `_keep_fence` by its number."""
    fence: Any = instance.__dict__.get(FENCE)
    if raw and isinstance(fence, Greatest):
        instance.fence = fence.get_source_expressions()[1].value


def _link_parents(sender: type[FencedModel], **_: Any) -> None:
    for parent, link in sender._meta.parents.items():
        if link is not None and link.model is sender and issubclass(parent, FencedModel):
            relations.link(sender, link)
