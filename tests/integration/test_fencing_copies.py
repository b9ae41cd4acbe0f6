"""What a row was read under goes along with it: into copies, and into every way of writing it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db.models import F
from django.test import override_settings

from django_distlock import FenceRejected, LockUsageError, distlock
from django_distlock.fencing import Fence
from tests.contract.helpers import Later
from tests.shop.models import Account, Entry, Ledger, Savings, Shelf, Vault

from .fenced_rows import (
    EVERYWHERE,
    NEW,
    OLD,
    account,
    accounts,
    raised_elsewhere,
    stored,
    without_rows,
)


@pytest.fixture(params=["sqlite"])
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give one database, without the rows of others: the code is the same above each of them."""
    yield from without_rows(request.param)


def overtaken(using: str, key: str, model: Any = Account) -> Any:
    """Return a row that was read under a lease, and then written by the next holder."""
    made = model(name=key, value=1)
    made.save(using=using)
    row = model.objects.using(using).fenced(OLD).get(pk=made.pk)
    raised_elsewhere(made, 6, 2)
    row.value = 99
    return row


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda row: pickle.loads(pickle.dumps(row)),
    "within": lambda row: copy.deepcopy({"rows": [row]})["rows"][0],
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copy_of_a_stale_row_is_refused(using: str, key: str, copied: Callable[[Any], Any]) -> None:
    """A copy is as old as the row that it was made of."""
    row = copied(overtaken(using, key))
    assert row.value == 99
    for write in (row.save, row.delete):
        with pytest.raises(FenceRejected):
            write()
    assert stored(row) == (2, 6)


def test_copy_has_the_lease_and_a_sent_one_its_fence(key: str) -> None:
    """A lease is one, and belongs to its process; its key and fence can be sent."""
    made = account("default", key)
    with distlock(key, backend="memory") as lease:
        row = accounts("default").fenced(lease).get(pk=made.pk)
        assert copy.copy(row)._fenced_by is copy.deepcopy(row)._fenced_by is lease
        rows = accounts("default", key).fenced(lease)
        assert copy.deepcopy(rows)._by is lease
        sent = pickle.dumps([row, rows])
    assert lease.token.encode() not in sent
    row, rows = pickle.loads(sent)
    assert row._fenced_by == rows._by == Fence(key, lease.fence)
    assert (rows.update(value=5), stored(row)) == (1, (5, lease.fence))
    Account.objects.filter(pk=made.pk).delete()


def test_deep_copy_of_rows_that_know_each_other() -> None:
    """Each is copied once, and both go on under the lease."""
    shelf: Any = Shelf(pk=1)
    entry: Any = Entry(shelf=shelf)
    shelf.first = entry
    entry._fenced_by = OLD
    made = copy.deepcopy(entry)
    assert made is not entry
    assert made.shelf is not shelf
    assert made.shelf.first is made
    assert made._fenced_by is OLD


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, COPIES["pickle"]])
def test_copy_of_a_queryset_writes_under_its_lease(
    using: str, key: str, copied: Callable[[Any], Any]
) -> None:
    """Also behind a copy, `update` and `delete` are those of the lease."""
    row = account(using, key)
    rows = copied(accounts(using, key).fenced(OLD))
    raised_elsewhere(row, 6, 2)
    with pytest.raises(FenceRejected):
        rows.update(value=99)
    with pytest.raises(FenceRejected):
        rows.all().delete()
    assert stored(row) == (2, 6)


@EVERYWHERE
def test_bulk_update_of_a_stale_row_is_refused(using: str, key: str) -> None:
    """Each of the rows is written under what it was read under, and all of them or none."""
    plain, fresh = account(using, f"{key}-1"), account(using, f"{key}-2")
    stale, fresh = overtaken(using, key), accounts(using).fenced(Fence("a", 7)).get(pk=fresh.pk)
    # It is a row of the same table.
    proxy = overtaken(using, f"{key}-3", Ledger)
    plain.value = fresh.value = 7
    rows = accounts(using)
    with pytest.raises(FenceRejected):
        rows.bulk_update([plain, fresh, stale], ["value"], batch_size=1)
    for each in (stale, proxy):
        with pytest.raises(FenceRejected):
            async_to_sync(rows.abulk_update)([each], ["value"])
    found = [stored(each) for each in (plain, fresh, stale, proxy)]
    assert found == [(1, 0), (1, 7), (2, 6), (2, 6)]
    assert rows.bulk_update([plain, fresh], ["value"]) == 2
    assert [stored(each) for each in (plain, fresh)] == [(7, 0), (7, 7)]


def test_bulk_update_of_what_requires_a_lease(using: str) -> None:
    """Rows that were read under leases have one, each its own."""
    made = [Vault(value=1), Vault(value=1)]
    for each in made:
        each.save(using=using)
    rows = Vault.objects.using(using)
    read = [rows.fenced(Fence(f"vault:{each.pk}", 5)).get(pk=each.pk) for each in made]
    for each in read:
        each.value = 3
    assert rows.bulk_update(read, ["value"]) == 2
    assert [stored(each) for each in made] == [(3, 5), (3, 5)]
    with pytest.raises(LockUsageError, match="only be written under a lease"):
        rows.bulk_update([read[0], made[1]], ["value"])


def test_upsert_of_a_stale_row_is_refused(using: str, key: str) -> None:
    """No database compares a fence in it: whatever the queryset, it is no way to write the row."""
    row = overtaken(using, key)
    how: Any = {"update_conflicts": True, "update_fields": ["value"], "unique_fields": ["id"]}
    with pytest.raises(LockUsageError, match="bulk_update"):
        accounts(using).bulk_create([row], **how)
    assert stored(row) == (2, 6)


@EVERYWHERE
def test_expression_of_a_stale_row_is_refused(using: str, key: str) -> None:
    """The database calculates nothing for who comes too late, whichever way it is asked."""
    row = overtaken(using, key)
    row.value = F("value") + 1
    with pytest.raises(FenceRejected):
        row.save(update_fields=["value"])
    with pytest.raises(FenceRejected):
        async_to_sync(row.asave)()
    with pytest.raises(FenceRejected):
        accounts(using).bulk_update([row], ["value"])
    with pytest.raises(FenceRejected):
        accounts(using).fenced(OLD).filter(pk=row.pk).update(value=F("value") + 1)
    assert stored(row) == (2, 6)


def test_part_that_is_read_anew_makes_no_stale_row_new(using: str, key: str) -> None:
    """Loaded later, or under a newer lease: the other columns are as old as before."""
    made = account(using, f"{key}-part")
    part = accounts(using).fenced(OLD).only("name").get(pk=made.pk)
    raised_elsewhere(made, 6, 2)
    assert part.value == 2
    part.refresh_from_db(fields=["name"])
    with pytest.raises(FenceRejected):
        part.save()
    row = overtaken(using, key)
    newer = accounts(using).fenced(Fence("a", 7))
    row.refresh_from_db(fields=["name"], from_queryset=newer)
    with pytest.raises(FenceRejected):
        row.save()
    row.refresh_from_db(from_queryset=newer)
    row.save()
    assert stored(row) == (2, 7)


@EVERYWHERE
def test_stale_row_in_two_tables_is_refused(using: str, key: str) -> None:
    """Also by way of its parent, which is made of what the child has in memory."""
    row = overtaken(using, key, Savings)
    row.interest = 7
    parent = row.account_ptr
    assert parent.value == 99
    for write in (
        parent.save,
        copy.copy(row).save,
        lambda: accounts(using).bulk_update([parent], ["value"]),
        lambda: Savings.objects.using(using).bulk_update([row], ["value", "interest"]),
        lambda: Savings.objects.using(using).bulk_update([row], ["interest"]),
    ):
        with pytest.raises(FenceRejected):
            write()
    assert stored(parent) == (2, 6)
    assert Savings.objects.using(using).get(pk=row.pk).interest == 0


def test_parent_and_child_are_one_row(using: str, key: str) -> None:
    """Whichever is read under a lease, the other one goes on under it, however it is come by."""
    made = Savings(name=key, value=1)
    made.save(using=using)
    rows, children = accounts(using).fenced(OLD), Savings.objects.using(using).fenced(OLD)
    read = [
        rows.get(pk=made.pk).savings,
        rows.select_related("savings").get(pk=made.pk).savings,
        children.select_related("account_ptr").get(pk=made.pk).account_ptr,
        children.defer("value").get(pk=made.pk).account_ptr,
    ]
    raised_elsewhere(made, 6, 2)
    for row in read:
        row.value = 99
        with pytest.raises(FenceRejected):
            row.save()
    assert stored(read[2]) == (2, 6)


def test_relation_of_what_requires_a_lease(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read under one is written, and nothing else."""
    shelf, other = (Shelf.objects.using(using).create() for _ in range(2))
    made = Entry.objects.using(using).create(shelf=shelf)
    monkeypatch.setattr(Entry, "fence_required", True)
    for bulk in (True, False):
        for write in (other.entries.add, shelf.entries.remove):
            with pytest.raises(LockUsageError, match="only be written under a lease"):
                write(Entry.objects.using(using).get(pk=made.pk), bulk=bulk)
        row = Entry.objects.using(using).fenced(NEW).get(pk=made.pk)
        Shelf.objects.using(using).prefetch_related("entries").get(pk=shelf.pk).entries.remove(
            row, bulk=bulk
        )
        assert not shelf.entries.exists()
        shelf.entries.add(row, bulk=bulk)
        assert shelf.entries.get().fence == NEW.fence


def test_rest_of_a_row_is_read_from_where_it_is_written(key: str) -> None:
    """A replica may be behind the lease."""
    # One number in both, which no sequence gives to a row of another test.
    rows = {using: Savings(pk=10**9, name=key, value=1) for using in ("default", "sqlite")}
    for using, row in rows.items():
        row.save(using=using)
    Savings.objects.using("default").fenced(OLD).filter(pk=10**9).update(value=2, interest=2)
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.ReadsFromSQLite"]):
        row = Account.objects.fenced(NEW).only("name").get(pk=10**9)
        assert (row.value, row.savings.interest) == (2, 2)
        child = Savings.objects.fenced(NEW).defer("value").get(pk=10**9)
        child.refresh_from_db()
        assert (child.value, child.account_ptr.value) == (2, 2)
        row.save()
    assert stored(rows["default"]) == (2, NEW.fence)
    for row in rows.values():
        row.delete()


class ReadsFromSQLite:
    """Reads from another database than it writes to."""

    def db_for_read(self, model: type, **hints: Any) -> str:
        """Choose."""
        return "sqlite"

    def db_for_write(self, model: type, **hints: Any) -> str:
        """Choose."""
        return "default"


def test_what_belongs_to_a_row_is_read_anew_with_it(using: str, key: str) -> None:
    """Its child was read before the lease, too, and goes on under it."""
    Savings(name=key, value=1, interest=1).save(using=using)
    row = accounts(using).select_related("savings").get(name=key)

    def overtake() -> None:
        Savings.objects.using(using).fenced(OLD).filter(name=key).update(value=2, interest=2)

    Later(overtake).result()
    row.raise_fence(NEW)
    row.savings.save()
    child = Savings.objects.using(using).get(name=key)
    assert (child.value, child.interest, child.fence) == (2, 2, NEW.fence)


RELATIONS: dict[str, Callable[[Shelf, Entry], Any]] = {
    "add": lambda shelf, row: Shelf.objects.using(shelf._state.db).create().entries.add(row),
    "add one by one": lambda shelf, row: shelf.entries.add(row, bulk=False),
    "remove": lambda shelf, row: shelf.entries.remove(row),
    "remove one by one": lambda shelf, row: shelf.entries.remove(row, bulk=False),
    "set": lambda shelf, row: (
        Shelf.objects.using(shelf._state.db).create().entries.set([row], clear=True)
    ),
    "awaited": lambda shelf, row: async_to_sync(shelf.entries.aremove)(row),
    "generic add": lambda shelf, row: shelf.notes.add(row),
    "generic remove": lambda shelf, row: shelf.notes.remove(row),
    "generic set": lambda shelf, row: shelf.notes.set([row]),
}


@pytest.mark.parametrize("write", RELATIONS.values(), ids=RELATIONS)
def test_relation_of_a_stale_row_is_refused(
    using: str, write: Callable[[Shelf, Entry], Any]
) -> None:
    """A manager of a relation writes the rows that it is given, and each may be too old."""
    shelf = Shelf.objects.using(using).create()
    made = Entry.objects.using(using).create(shelf=shelf, value=1)
    row = Entry.objects.using(using).fenced(OLD).get(pk=made.pk)
    newer = Entry.objects.using(using).fenced(NEW)
    newer.filter(pk=made.pk).update(value=2)
    with pytest.raises(FenceRejected):
        write(shelf, row)
    found = Entry.objects.using(using).get(pk=made.pk)
    assert (found.shelf_id, found.number, found.value, found.fence) == (shelf.pk, None, 2, 6)
    write(shelf, newer.get(pk=made.pk))
