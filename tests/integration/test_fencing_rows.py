"""One row that refuses who comes too late: `save`, `delete`, `fenced`, and what has no lease."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core import serializers
from django.core.management import call_command
from django.db import connections, transaction
from django.db.transaction import TransactionManagementError

from django_distlock import FenceRejected, LockUsageError, distlock
from django_distlock.fencing import Fence
from tests.contract.locking import held_elsewhere, rolled_back
from tests.shop.models import Account, Folder, Named, Row, Savings

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


def test_equal_and_higher_fences_write(using: str, key: str) -> None:
    """The holder writes as often as it likes, and so does who comes after it."""
    for atomic in (False, True):
        row = account(using, key)
        with in_transaction(using, wanted=atomic):
            for fence, value in ((5, 2), (5, 3), (9, 4)):
                row.value = value
                row.save(lease=Fence("a", fence))
                assert row.fence == fence
        assert stored(row) == (4, 9)


def test_lower_fence_is_refused_and_changes_nothing(using: str, key: str) -> None:
    """A stale save raises, says who refused it, and leaves the row as it is."""
    for atomic in (False, True):
        row = account(using, key, fence=6)
        row.value = 99
        with pytest.raises(FenceRejected) as caught, in_transaction(using, wanted=atomic):
            row.save(lease=OLD)
        assert refused(caught.value, row)
        assert stored(row) == (1, 6)


def test_part_of_a_row_is_fenced_as_well(using: str, key: str) -> None:
    """`update_fields` and deferred fields do not leave the fence out."""
    row = account(using, key, fence=6)
    row.value = 2
    # Nothing is saved, as everywhere in Django.
    row.save(lease=OLD, update_fields=[])
    assert row.fence == 6
    with pytest.raises(FenceRejected):
        row.save(lease=OLD, update_fields=["value"])
    part = accounts(using).defer("fence", "name").get(pk=row.pk)
    part.value = 3
    with pytest.raises(FenceRejected):
        part.save(lease=OLD)
    part.save(lease=NEW)
    assert stored(row) == (3, 6)
    row.save(lease=Fence("a", 7), update_fields=["value"])
    assert stored(row) == (2, 7)


def test_row_goes_on_with_what_it_was_read_under(using: str, key: str) -> None:
    """Read, or saved, under a lease, then changed: the save is fenced without another word."""
    made = account(using, key)
    row = accounts(using).fenced(OLD).get(pk=made.pk)
    made.save(lease=OLD)
    raised_elsewhere(made, 6, 2)
    row.value = 99
    for write in (row.save, row.delete, made.save):
        with pytest.raises(FenceRejected):
            write()
    assert stored(made) == (2, 6)


def test_save_without_a_lease_keeps_the_fence(using: str, key: str) -> None:
    """Admin and old code write, and whatever fence they hold in memory is not written."""
    row = account(using, key)
    raised_elsewhere(row, 6, 2)
    row.value, row.fence = 3, 1
    row.save()
    assert stored(row) == (3, 6)
    later = accounts(using).fenced(NEW).get(pk=row.pk)
    later.value = 4
    later.save(lease=None)
    assert stored(row) == (4, 6)


def test_new_row_begins_with_the_fence_of_its_lease(using: str, key: str) -> None:
    """An insert under a lease carries its fence; without one it has none."""
    row = Account(name=key)
    row.save(using=using, lease=NEW)
    assert (row.fence, stored(row)) == (6, (0, 6))
    assert stored(account(using, key)) == (1, 0)


def test_fenced_row_is_raised_and_read_anew(using: str, key: str) -> None:
    """`fenced` shows what was written since the row was loaded, and nobody older writes it."""
    for atomic in (False, True):
        row = account(using, key)
        raised_elsewhere(row, 5, 7)
        with in_transaction(using, wanted=atomic):
            row.raise_fence(NEW)
        assert (row.value, row.fence) == (7, 6)
        assert stored(row) == (7, 6)
        with pytest.raises(FenceRejected) as caught:
            accounts(using).get(pk=row.pk).raise_fence(OLD)
        assert refused(caught.value, row)
        accounts(using).filter(pk=row.pk).delete()
        with pytest.raises(Account.DoesNotExist):
            row.raise_fence(NEW)


def test_delete_is_fenced(using: str, key: str) -> None:
    """Who comes too late deletes nothing; the holder does."""
    for atomic in (False, True):
        row = account(using, key, fence=6)
        pk = row.pk
        with pytest.raises(FenceRejected) as caught, in_transaction(using, wanted=atomic):
            row.delete(lease=OLD)
        assert refused(caught.value, row)
        assert row.delete(lease=NEW) == (1, {"shop.Account": 1})
        assert not accounts(using).filter(pk=pk).exists()


def test_refusal_ends_the_transaction(using: str, key: str) -> None:
    """What was written before it is not committed either; a savepoint saves the rest."""
    row, other = account(using, key, fence=6), account(using, f"{key}-other")
    with transaction.atomic(using=using):
        other.value = 2
        other.save()
        with pytest.raises(FenceRejected), transaction.atomic(using=using):
            row.save(lease=OLD)
        assert accounts(using).get(pk=other.pk).value == 2
    assert stored(other) == (2, 0)
    with rolled_back(using):
        with pytest.raises(FenceRejected):
            row.save(lease=OLD)
        with pytest.raises(TransactionManagementError):
            other.save()


def test_fixture_does_not_lower_a_fence(using: str, key: str, tmp_path: Path) -> None:
    """`loaddata` brings old values back, of a proxy as well, and the row goes on refusing."""
    row = account(using, key)
    dumped = StringIO()
    call_command("dumpdata", "shop.Account", database=using, stdout=dumped)
    fixture = tmp_path / "rows.json"
    for model in ("shop.account", "shop.ledger"):
        raised_elsewhere(row, 6, 9)
        fixture.write_text(dumped.getvalue().replace("shop.account", model))
        call_command("loaddata", str(fixture), database=using, verbosity=0)
        assert stored(row) == (1, 6)


def test_fixture_that_leaves_the_key_to_the_database(using: str, tmp_path: Path) -> None:
    """It does not say what key its row has, and the fence stays."""
    row = Folder(tenant=1, value=1)
    row.save(using=using)
    row.save(lease=Fence("tenant:1", 6))
    fixture = tmp_path / "rows.json"
    fields = {"fence": 5, "value": 2}
    fixture.write_text(json.dumps([{"model": "shop.folder", "pk": row.pk, "fields": fields}]))
    call_command("loaddata", str(fixture), database=using, verbosity=0)
    row.refresh_from_db()
    assert (row.tenant, row.value, row.fence) == (1, 2, 6)


def test_fixture_beside_a_holder(using: str, key: str) -> None:
    """Who raises the fence while the row is restored, outside of any transaction, is not undone."""
    row = account(using, key)
    raised: list[int] = []

    def raising(execute: Any, statement: str, *rest: Any) -> Any:
        if statement.startswith("UPDATE") and not raised:
            raised.append(6)
            raised_elsewhere(row, 6, 9)
        return execute(statement, *rest)

    restored: Any
    (restored,) = serializers.deserialize("json", serializers.serialize("json", [row]), using=using)
    with connections[using].execute_wrapper(raising):
        restored.save(using=using)
    assert raised
    assert stored(row) == (1, 6)
    assert isinstance(restored.object.fence, int)


@pytest.mark.parametrize("using", ["default", "sqlite"], indirect=True)
def test_fixture_may_have_texts_that_no_key_has(using: str, tmp_path: Path) -> None:
    """Nobody has locked such a row, and what was saved can be restored."""
    # In NFC, which keys are in, each of them takes twelve bytes.
    Named(name="\U0001d160" * 99, value=3).save(using=using)
    fixture = tmp_path / "rows.json"
    with fixture.open("w") as file:
        call_command("dumpdata", "shop.Named", database=using, stdout=file)
    call_command("loaddata", str(fixture), database=using, verbosity=0)
    assert Named.objects.using(using).get().value == 3


def test_fence_in_the_table_of_a_parent(using: str, key: str) -> None:
    """A model that inherits a fenced one is fenced: its own columns, too."""
    for atomic in (False, True):
        name = f"{key}:{atomic}"
        row = Savings(name=name, value=1, interest=1)
        row.save(using=using, lease=NEW)
        row.interest = row.value = 2
        with pytest.raises(FenceRejected), in_transaction(using, wanted=atomic):
            row.save(lease=OLD)
        with pytest.raises(FenceRejected), in_transaction(using, wanted=atomic):
            Savings.objects.using(using).fenced(OLD).filter(name=name).update(interest=3, value=3)
        found = Savings.objects.using(using).get(pk=row.pk)
        assert (found.value, found.interest, found.fence) == (1, 1, 6)
        assert Savings.objects.using(using).fenced(NEW).filter(name=name).update(interest=4) == 1
        found.refresh_from_db()
        assert (found.interest, found.fence) == (4, 6)


def test_asynchronous_twins(using: str, key: str) -> None:
    """`asave`, `adelete`, `afenced` and asynchronous reads do the same."""
    row = account(using, key, fence=6)

    async def use() -> None:
        with pytest.raises(FenceRejected):
            await row.asave(lease=OLD)
        row.value = 3
        await row.asave(lease=NEW)
        with pytest.raises(FenceRejected):
            await accounts(using, key).fenced(OLD).aget(pk=row.pk)
        found = [each async for each in accounts(using, key).fenced(Fence("a", 8))]
        assert [each.fence for each in found] == [8]
        found = [each async for each in accounts(using, key).fenced(Fence("a", 9)).aiterator()]
        assert [each.fence for each in found] == [9]
        async with distlock(key, backend="redis") as lease:
            assert await lease.afenced(row) is row
            assert row.fence == lease.fence > 6
        with pytest.raises(FenceRejected):
            await row.adelete(lease=OLD)
        await row.adelete(lease=lease)

    # `sync_to_async` runs in the thread that waits, where the test's own connections are.
    async_to_sync(use)()
    assert not accounts(using).filter(name=key).exists()


def test_lease_writes(using: str, key: str) -> None:
    """A lease is what people write under; the one before it is refused."""
    row = account(using, key)
    with distlock(key, backend="redis") as first:
        assert first.fenced(row) is row
    with distlock(key, backend="redis") as second:
        other = accounts(using).fenced(second).get(pk=row.pk)
        other.value = 2
        other.save()
    with pytest.raises(FenceRejected) as caught:
        row.save()
    assert caught.value.key == key
    assert (caught.value.fence, caught.value.current) == (first.fence, second.fence)
    assert stored(row) == (2, second.fence)


def test_only_a_lease_fences() -> None:
    """What has no fence is refused before the database is asked."""
    nothing: Any
    for nothing in ("a lease", None, Row(), 7):
        with pytest.raises(LockUsageError, match="has no fence"):
            accounts("default").fenced(nothing)


def test_block_without_its_lock_fences_nothing(key: str) -> None:
    """`on_conflict="run"` gives a lease that is none; other models are refused by name."""
    row = account("default", key)
    lock = distlock(key, backend="memory", wait=0, on_conflict="run")
    with held_elsewhere(lock), lock as lease:
        assert not lease.held
        for write in (lambda: row.save(lease=lease), lambda: lease.fenced(row)):
            with pytest.raises(LockUsageError, match="has no fence"):
                write()
    with distlock(key, backend="memory") as lease, pytest.raises(LockUsageError, match="Row"):
        lease.fenced(Row())  # type: ignore[type-var]
