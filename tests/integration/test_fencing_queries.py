"""Many rows under a lease: reads that raise the fence, writes of all rows or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models import Count, F, Sum
from django.test.utils import CaptureQueriesContext

from django_distlock import FenceRejected, LockUsageError
from django_distlock.fencing import Fence, FencedQuerySet
from tests.conftest import DECLARED
from tests.contract.helpers import Later
from tests.contract.locking import eventually
from tests.shop.models import Account

from .fenced_rows import (
    NEW,
    OLD,
    account,
    accounts,
    in_transaction,
    raised_elsewhere,
    refused,
    stored,
)

Rows = FencedQuerySet[Account]

READS: dict[str, Callable[[Rows], Any]] = {
    "list": list,
    "get": lambda rows: rows.get(value=1),
    "get by key": lambda rows: rows.get(pk=rows.model.objects.using(rows.db).latest("pk").pk),
    "first": lambda rows: rows.order_by("-value").last(),
    "latest": lambda rows: rows.earliest("value"),
    "slice": lambda rows: list(rows.order_by("value")[:1]),
    "in_bulk": lambda rows: rows.in_bulk(),
    "iterator": lambda rows: list(rows.iterator()),
    "only": lambda rows: list(rows.only("name")),
    "defer": lambda rows: list(rows.defer("fence", "value")),
    "select_for_update": lambda rows: list(rows.select_for_update()),
    "annotated": lambda rows: list(rows.annotate(n=Count("name"))),
    "distinct": lambda rows: list(rows.distinct()),
    "bool": bool,
    "count": lambda rows: rows.count(),
    "exists": lambda rows: rows.exists(),
    "aggregate": lambda rows: rows.aggregate(Sum("value")),
}


def test_read_raises_the_fence(using: str, key: str, subtests: pytest.Subtests) -> None:
    """Whatever way a row is read in, older leases are refused from then on, to read as well."""
    for way, read in READS.items():
        with subtests.test(way):
            row = account(using, f"{key}-{way}:")
            rows = accounts(using, row.name)
            with transaction.atomic(using=using):
                assert read(rows.fenced(NEW))
            assert stored(row) == (1, 6)
            with pytest.raises(FenceRejected):
                row.save(lease=OLD)
            with pytest.raises(FenceRejected) as caught, transaction.atomic(using=using):
                read(rows.fenced(OLD))
            assert refused(caught.value, row)


def test_read_rows_have_the_fence_and_the_lease(using: str, key: str) -> None:
    """What a fenced read gives is written fenced; the next read writes nothing, nor plain ones."""
    made = account(using, key)
    assert [each._fenced_by for each in accounts(using, key)] == [None]
    assert list(accounts(using, key).values_list("fence", flat=True)) == [0]
    assert stored(made) == (1, 0)
    (row,) = accounts(using, key).fenced(NEW)
    assert (row.fence, row._fenced_by) == (6, NEW)
    with CaptureQueriesContext(connections[using]) as queries:
        assert accounts(using, key).fenced(NEW)._mark() == 0
    assert len(queries) == 1


@pytest.mark.parametrize(
    ("fence", "read", "answer"),
    [
        (0, lambda rows: {row.fence for row in rows}, {6}),
        # A value over rows is read again until no row came in between.
        (0, lambda rows: rows.aggregate(Sum("value")), {"value__sum": 6}),
        (9, list, None),
    ],
    ids=["rows", "sum", "higher fence"],
)
def test_row_that_comes_in_between_is_marked_too(
    using: str, key: str, fence: int, read: Callable[[Rows], Any], answer: Any
) -> None:
    """What others add behind the marks and before the read is marked, or is a refusal."""
    account(using, key)

    class Late(FencedQuerySet[Account]):
        def _mark(self, *, again: bool = False) -> int:
            marked = super()._mark(again=again)
            if not late:
                made = Later(account, using, f"{key}-late", fence=fence, value=5)
                late.append(made.result())
            return marked

    late: list[Account] = []
    rows = Late(Account, using=using).filter(name__startswith=key).fenced(NEW)
    if fence:
        with pytest.raises(FenceRejected):
            read(rows)
    else:
        assert read(rows) == answer
        assert stored(late[0]) == (5, 6)


def test_update_is_all_or_nothing(using: str, key: str) -> None:
    """One row that is too new keeps all of them from being written, in one statement."""
    for atomic in (False, True):
        name = f"{key}:{atomic}"
        rows = [account(using, f"{name}-{n}", fence=6 if n == 1 else 0) for n in range(3)]
        with pytest.raises(FenceRejected) as caught, in_transaction(using, wanted=atomic):
            accounts(using, name).fenced(OLD).update(value=F("value") + 1)
        assert refused(caught.value, rows[1])
        assert [stored(each)[0] for each in rows] == [1, 1, 1]
        with (
            in_transaction(using, wanted=atomic),
            CaptureQueriesContext(connections[using]) as queries,
        ):
            assert accounts(using, name).fenced(NEW).update(value=F("value") + 1) == 3
        assert len([each for each in queries if "UPDATE" in each["sql"]]) == 1
        assert [stored(each) for each in rows] == [(2, 6)] * 3
        # A stale lease is told from a filter that matches no row.
        assert accounts(using, name).fenced(OLD).filter(value=99).update(value=2) == 0


def test_bulk_update_is_all_or_nothing(using: str, key: str) -> None:
    """Also over several batches, and in a transaction that goes on."""
    for atomic in (False, True):
        name = f"{key}:{atomic}"
        rows = [account(using, f"{name}-{n}", fence=6 if n == 2 else 0) for n in range(3)]
        for row in rows:
            row.value = 9
        with in_transaction(using, wanted=atomic):
            with pytest.raises(FenceRejected):
                accounts(using).fenced(OLD).bulk_update(rows, ["value"], batch_size=1)
            assert accounts(using, name).count() == 3
        assert [stored(each)[0] for each in rows] == [1, 1, 1]
        assert accounts(using).fenced(NEW).bulk_update(rows, ["value"], batch_size=2) == 3
        assert [stored(each) for each in rows] == [(9, 6)] * 3
        assert {row.fence for row in rows} == {6}


def test_created_rows_begin_with_the_fence(using: str, key: str) -> None:
    """`create`, `bulk_create`, `get_or_create` and `update_or_create` insert fenced rows."""
    rows = accounts(using).fenced(NEW)
    made = rows.create(name=f"{key}-0")
    rows.bulk_create([Account(name=f"{key}-1")])
    rows.get_or_create(name=f"{key}-2")
    rows.update_or_create(name=f"{key}-3", defaults={"value": 3})
    assert [each.fence for each in accounts(using, key).order_by("name")] == [6] * 4
    made.value = 4
    raised_elsewhere(made, 7, 5)
    with pytest.raises(FenceRejected):
        made.save()


def test_update_or_create_is_refused(using: str, key: str) -> None:
    """What it finds is read and written under the lease."""
    row = account(using, key, fence=6)
    rows = accounts(using)
    with pytest.raises(FenceRejected):
        rows.fenced(OLD).update_or_create(name=key, defaults={"value": 3})
    with pytest.raises(FenceRejected):
        rows.fenced(OLD).get_or_create(name=key)
    assert rows.fenced(NEW).update_or_create(name=key, defaults={"value": 3})[1] is False
    assert stored(row) == (3, 6)


def test_delete_is_all_or_nothing(using: str, key: str) -> None:
    """One row that is too new keeps all of them."""
    for atomic in (False, True):
        name = f"{key}:{atomic}"
        rows = [account(using, f"{name}-{n}", fence=6 if n == 1 else 0) for n in range(3)]
        with pytest.raises(FenceRejected) as caught, in_transaction(using, wanted=atomic):
            accounts(using, name).fenced(OLD).delete()
        assert refused(caught.value, rows[1])
        assert accounts(using, name).count() == 3
        assert accounts(using, name).fenced(NEW).delete() == (3, {"shop.Account": 3})


def test_delete_takes_no_row_that_was_taken_over(using: str, key: str) -> None:
    """Marked rows stay as they are until they are gone."""
    if using == "sqlite":
        pytest.skip(f"{DECLARED}sqlite: one writer per file")
    row = account(using, key, fence=5)
    other: list[Later[None]] = []

    class Slow(FencedQuerySet[Account]):
        def _mark(self, *, again: bool = False) -> int:
            marked = super()._mark(again=again)
            other.append(Later(raised_elsewhere, row, 6, 2))
            assert not eventually(other[0]._future.done, 0.7)
            return marked

    assert Slow(Account, using=using).filter(pk=row.pk).fenced(OLD).delete()[0] == 1
    with pytest.raises(Account.DoesNotExist):
        other[0].result()


def test_what_cannot_be_fenced_is_refused(using: str, key: str) -> None:
    """Names the way that works, and writes nothing."""
    row = account(using, key)
    rows = accounts(using, key)
    with pytest.raises(LockUsageError, match="raised by fenced"):
        rows.update(fence=3)
    with pytest.raises(LockUsageError, match="raised by fenced"):
        rows.fenced(NEW).update(fence=3)
    with pytest.raises(LockUsageError, match="raised by fenced"):
        rows.bulk_update([row], ["fence"])
    with pytest.raises(LockUsageError, match="values"):
        rows.fenced(NEW).values("value")
    with pytest.raises(LockUsageError, match="values"):
        rows.fenced(NEW).values_list("value")
    with pytest.raises(LockUsageError, match="union"):
        list(rows.fenced(NEW).union(rows.fenced(NEW)))
    conflicts: Any = {"update_conflicts": True, "unique_fields": ["id"], "update_fields": ["value"]}
    with pytest.raises(LockUsageError, match="bulk_update"):
        rows.fenced(NEW).bulk_create([Account(pk=row.pk)], **conflicts)
    assert stored(row) == (1, 0)


def test_other_errors_stay_what_they_are(using: str, key: str) -> None:
    """An error that has nothing to do with fences is not taken for a refusal."""
    row = account(using, key)
    row.name = None  # type: ignore[assignment]
    with pytest.raises(Exception, match="name") as caught:
        row.save(lease=NEW)
    assert not isinstance(caught.value, FenceRejected)
    with pytest.raises(Exception, match="name") as caught:
        accounts(using, key).fenced(NEW).update(name=None)
    assert not isinstance(caught.value, FenceRejected)


def test_fenced_reads_go_to_where_is_written(using: str, key: str) -> None:
    """A replica may not have the newest fence yet."""
    assert Account.objects.fenced(Fence("a", 1))._for_write
