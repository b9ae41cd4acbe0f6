"""Models and queries of unusual shapes, fenced as others are."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, transaction
from django.db.models import Exists, F, OuterRef, Window
from django.db.models.functions import RowNumber

from django_distlock import FenceRejected, LockUsageError, distlock
from django_distlock.fencing import Fence
from django_distlock.fencing import FencedQuerySet as Rows
from tests.contract.aliases import locks_on
from tests.contract.helpers import Later, there
from tests.shop.models import Account, Deep, Named, Savings, SubVault

from .databases import ask
from .fenced_rows import NEW, OLD, account, accounts, raised_elsewhere, stored

#: For what is decided before any database is asked.
ON_SQLITE = pytest.mark.parametrize("using", ["sqlite"], indirect=True)


def test_value_in_the_table_of_a_parent(using: str) -> None:
    """Fence and value are written together, or not at all."""
    row = Deep(value=1)
    row.save(using=using, lease=NEW)
    rows = Deep.objects.using(using)
    with pytest.raises(FenceRejected):
        rows.fenced(OLD).update(value=9)
    assert stored(row) == (1, 6)
    with pytest.raises(DatabaseError):
        rows.fenced(Fence("a", 8)).update(value=None)
    assert stored(row) == (1, 6)
    assert rows.fenced(NEW).update(value=2) == 1
    assert stored(row) == (2, 6)


def test_key_of_a_parents_primary_key(using: str) -> None:
    """A child of a model with `fence_key` is read and written under the same key."""
    row = SubVault(value=1)
    row.save(using=using)
    right, wrong = Fence(f"vault:{row.pk}", 5), Fence(f"vault:{row.pk + 1}", 5)
    rows = SubVault.objects.using(using)
    found = rows.fenced(right).get()
    found.value, found.more = 2, 3
    found.save()
    assert rows.fenced(right).update(more=4) == 1
    with pytest.raises(LockUsageError, match="belongs to"):
        rows.fenced(wrong).update(more=5)
    found = rows.get()
    assert (found.value, found.more, found.fence) == (2, 4, 5)


def test_texts_are_one_key_where_their_bytes_are(using: str) -> None:
    """Whatever the collation of the column says is equal."""
    row = Named.objects.using(using).create(name="bob", value=1)
    for key in ("n:BOB", "n:bob ", "n:b\u00f6b"):
        with pytest.raises((LockUsageError, Named.DoesNotExist)):
            Named.objects.using(using).fenced(Fence(key, 5)).filter(pk=row.pk).update(value=9)
    assert Named.objects.using(using).fenced(Fence("n:bob", 5)).update(value=2) == 1
    assert stored(row) == (2, 5)


def test_column_of_the_fence_has_another_name(using: str) -> None:
    """A refusal is known by it, and other errors are not taken for one."""
    bob = Fence("n:bob", 5)
    row: Any = Named.objects.using(using).fenced(Fence(bob.key, 6)).create(name="bob")
    with pytest.raises(FenceRejected) as caught:
        Named.objects.using(using).fenced(bob).update(value=9)
    assert caught.value.current == 6
    row.fence_note = None
    with pytest.raises(IntegrityError, match="fence_note"):
        row.save(lease=Fence("n:bob", 7))


def test_save_of_a_row_that_was_deleted(using: str, key: str) -> None:
    """However it is asked for, it does not come back; a copy of it is a new row."""
    made = account(using, key)
    row = accounts(using).fenced(OLD).get(pk=made.pk)
    accounts(using).fenced(NEW).filter(pk=made.pk).delete()
    for options in ({}, {"update_fields": None}, {"force_update": True}):
        with pytest.raises(DatabaseError):
            row.save(**options)
    assert not accounts(using, key).exists()
    row.pk = None
    row.save()
    assert accounts(using, key).count() == 1
    row.delete(lease=OLD)
    # As in Django, where nobody is told either.
    made.delete(lease=OLD)


@pytest.mark.parametrize("model", [Savings, Deep])
def test_row_in_two_tables_that_was_deleted(using: str, key: str, model: Any) -> None:
    """It does not come back either, nor does its parent."""
    rows = model.objects.using(using)
    made = model(value=1)
    made.save(using=using)
    row = rows.fenced(OLD).get(pk=made.pk)
    rows.fenced(NEW).filter(pk=made.pk).delete()
    with pytest.raises(DatabaseError):
        row.save()
    assert not rows.exists()
    assert not Account.objects.using(using).exists()


@ON_SQLITE
def test_delete_of_what_was_never_saved(using: str) -> None:
    """It is refused as in Django."""
    with pytest.raises(ValueError, match="can't be deleted"):
        Account().delete(using=using, lease=OLD)


@ON_SQLITE
def test_row_that_others_have_locked_is_waited_for(using: str, key: str) -> None:
    """Django's ways not to wait are refused, as is a union() with a fenced queryset."""
    made = account(using, key)
    rows = accounts(using, key)
    ways: list[dict[str, Any]] = [{"nowait": True}, {"skip_locked": True}]
    for how in ways:
        with pytest.raises(LockUsageError, match="neither nowait nor skip_locked"):
            list(rows.fenced(NEW).select_for_update(**how))
    with pytest.raises(LockUsageError, match="different leases"):
        rows.union(rows.fenced(NEW))
    assert stored(made) == (1, 0)


def test_condition_over_a_window(using: str, key: str) -> None:
    """What no UPDATE takes is read first, and then marked."""
    for number in range(3):
        account(using, f"{key}-{number}")
    rows = accounts(using, key).annotate(n=Window(RowNumber(), order_by="name"))
    assert [row.name for row in rows.filter(n=2).fenced(NEW)] == [f"{key}-1"]


@ON_SQLITE
@pytest.mark.parametrize("model", [Account, Savings])
def test_condition_on_the_fence(using: str, key: str, model: Any) -> None:
    """Behind the mark no row would meet it: no read gives nothing, nor a deletion."""
    made = model(name=key, value=1)
    made.save(using=using)
    rows = model.objects.using(using).filter(name=key)
    for some in (rows.filter(fence=0), rows.exclude(fence__gt=5), rows.filter(pk=F("fence"))):
        for use in (list, Rows.count, Rows.delete):
            with pytest.raises(LockUsageError, match="cannot filter by the fence"):
                use(some.fenced(NEW))
    assert stored(made) == (1, 0)
    # One statement compares before it writes.
    assert rows.filter(fence=0).fenced(NEW).update(value=2) == 1


@ON_SQLITE
@pytest.mark.parametrize("model", [Account, Savings])
def test_subquery_or_slice_by_the_fence(using: str, key: str, model: Any) -> None:
    """Behind the mark other rows would be given, or none. Without a choice any order is good."""
    for _ in range(2):
        model(name=key, value=1).save(using=using)
    rows = model.objects.using(using).filter(name=key)
    ordered = rows.order_by("fence", "pk")
    fenced, low = ordered.fenced(NEW), model.objects.using(using).filter(fence=0)
    for some in (
        fenced[:1],
        fenced.filter(pk__in=low),
        fenced.filter(pk__in=ordered.values("pk")[:1]),
        fenced.filter(Exists(low.filter(pk=OuterRef("pk")))),
    ):
        for use in (list, Rows.count, Rows.first):
            with pytest.raises(LockUsageError, match="nor slice by it"):
                use(some)
    assert {stored(row) for row in rows} == {(1, 0)}
    assert len(ordered.fenced(NEW)) == 2
    assert ordered.fenced(NEW).filter(pk=rows[0].pk).first() == rows[0]


@ON_SQLITE
def test_unique_column_beside_another(using: str, key: str) -> None:
    """An expression is no value that one row alone can have."""
    first, second = account(using, f"{key}-1"), account(using, f"{key}-2")
    row = there(accounts(using, key).filter(pk=F("pk")).fenced(NEW).order_by("name").first())
    assert row.pk == first.pk
    assert stored(second) == (1, 0)


def test_row_that_is_overtaken_while_it_is_read(
    using: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer fence between the mark and the read is a refusal."""
    row, read = account(using, key), Account.refresh_from_db

    def slowly(self: Account, *args: Any, **kwargs: Any) -> None:
        Later(raised_elsewhere, row, 9, 2).result()
        read(self, *args, **kwargs)

    monkeypatch.setattr(Account, "refresh_from_db", slowly)
    with pytest.raises(FenceRejected) as caught:
        row.raise_fence(NEW)
    assert caught.value.current == 9


@ON_SQLITE
def test_unfenced_save_of_a_row_without_its_fence(using: str, key: str) -> None:
    """What was not loaded is not made up."""
    made = account(using, key, fence=6)
    row = Account._base_manager.using(using).defer("fence").get(pk=made.pk)
    row.value = 2
    row.save()
    assert row.fence == 6
    assert stored(made) == (2, 6)


def test_decorated_function_is_guarded_by_each_call(key: str) -> None:
    """`@transaction.atomic` enters the same block each time; the guard ends with the call."""

    @transaction.atomic
    def work() -> None:
        with distlock(key, backend="memory", wait=0) as lease:
            lease.guard()

    work()
    work()
    assert not Later(distlock(key, backend="memory").locked).result()


def test_guard_of_a_long_lease(key: str) -> None:
    """A ttl beyond PostgreSQL's longest timeout is no error."""
    ttl = 30 * 24 * 3600
    with (
        locks_on("default", MAX_TTL=ttl) as alias,
        distlock(key, backend=alias, ttl=ttl) as lease,
        lease.atomic(),
    ):
        assert ask("default", "SHOW idle_in_transaction_session_timeout") != [("0",)]
