"""Copies of rows are new rows: each begins with a fence of its own, and belongs to its own key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import IntegrityError
from django.forms.models import model_to_dict

from django_distlock import FenceRejected, LockUsageError
from django_distlock.fencing import Fence
from tests.shop.models import Folder, Named, Savings, SubVault, Vault

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

HIGH = 900


@pytest.fixture(params=["sqlite"])
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give one database, without the rows of others: the code is the same above each of them."""
    yield from without_rows(request.param)


def vault(using: str) -> Vault:
    """Make a row whose key was granted many times."""
    made = Vault(value=1)
    made.save(using=using)
    made.save(lease=Fence(f"vault:{made.pk}", HIGH))
    found: Vault = Vault.objects.using(using).get(pk=made.pk)
    return found


def saved(row: Any, using: str, *, adding: bool = True, **changes: Any) -> Any:
    """Save a row as Django's documentation copies one."""
    row._state.adding = adding
    for name, value in changes.items():
        setattr(row, name, value)
    row.save(using=using)
    return row


def inserted(row: Any, using: str) -> Any:
    """Insert a row with others."""
    rows = type(row).objects.using(using)
    rows.bulk_create([row])
    return rows.order_by("pk").last()


def unsaved(row: Any) -> Any:
    """Take the primary key from a row, and nothing else."""
    row.pk = None
    return row


def made_again(row: Any) -> Any:
    """Make another instance of all the values that a row has."""
    return type(row)(
        **{
            each.attname: getattr(row, each.attname)
            for each in row._meta.fields
            if each.name != "id"
        }
    )


COPIES: dict[str, Callable[[Any, str], Any]] = {
    "pk and adding": lambda row, using: saved(row, using, pk=None),
    "pk alone": lambda row, using: saved(row, using, pk=None, adding=False),
    "another pk": lambda row, using: saved(row, using, pk=row.pk + 1),
    "another pk, found missing": lambda row, using: saved(row, using, pk=row.pk + 1, adding=False),
    "in bulk": lambda row, using: inserted(unsaved(row), using),
    "its values": lambda row, using: saved(made_again(row), using),
    "its values in bulk": lambda row, using: inserted(made_again(row), using),
    "as a form does": lambda row, using: saved(
        type(row)(**model_to_dict(row, exclude=["id"])), using
    ),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copy_begins_without_a_fence(using: str, copied: Callable[[Any, str], Any]) -> None:
    """The first lease of its own key writes it, however often the other key was granted."""
    row = vault(using)
    pk = row.pk
    made = copied(row, using)
    assert made.pk != pk
    assert (made.fence, stored(made)) == (0, (1, 0))
    made.save(lease=Fence(f"vault:{made.pk}", 1))
    assert stored(made) == (1, 1)
    assert Vault.objects.using(using).get(pk=pk).fence == HIGH


@pytest.mark.parametrize("copied", ["pk and adding", "pk alone", "another pk", "in bulk"])
def test_copy_of_a_leases_row_has_its_own_key(using: str, copied: str) -> None:
    """A copy of what was read under a lease is not written under it, whose key is another."""
    row = vault(using)
    lease = Fence(f"vault:{row.pk}", HIGH)
    made = COPIES[copied](Vault.objects.using(using).fenced(lease).get(pk=row.pk), using)
    assert made._fenced_by is None
    assert stored(made) == (1, 0)
    made.save(lease=Fence(f"vault:{made.pk}", 1))


def test_copy_within_a_key_begins_with_the_lease(using: str, key: str) -> None:
    """Where the lease is of its key as well, it is a row that the lease has made."""
    lease, rows = Fence("tenant:1", 5), Folder.objects.using(using)
    rows.fenced(lease).create(tenant=1)
    here = saved(rows.fenced(lease).get(), using, pk=None)
    assert (here._fenced_by, stored(here)) == (lease, (0, 5))
    elsewhere = saved(here, using, pk=None, tenant=2)
    assert (elsewhere._fenced_by, stored(elsewhere)) == (None, (0, 0))
    account(using, key)
    free = saved(accounts(using, key).fenced(NEW).get(), using, pk=None)
    assert (free._fenced_by, stored(free)) == (NEW, (1, 6))


@EVERYWHERE
def test_copy_writes_over_no_row(using: str) -> None:
    """A primary key that another row has is none for a copy of a lease's row."""
    row, other = vault(using), vault(using)
    read = Vault.objects.using(using).fenced(Fence(f"vault:{row.pk}", HIGH)).get(pk=row.pk)
    read.value = 99
    with pytest.raises(IntegrityError):
        saved(read, using, pk=other.pk)
    assert stored(other) == (1, HIGH)


@EVERYWHERE
def test_copy_in_two_tables(using: str, key: str) -> None:
    """It takes both primary keys to make one; with one left it is the row, and as old as that."""
    made = Savings(name=key, value=1)
    made.save(using=using)
    rows = Savings.objects.using(using)
    row = rows.fenced(OLD).get(pk=made.pk)
    raised_elsewhere(made, 6, 2)
    row.value = 99
    row.pk = None
    with pytest.raises(FenceRejected):
        row.save()
    assert stored(made) == (2, 6)
    plain = rows.get(pk=made.pk)
    made = saved(plain, using, pk=None, id=None)
    assert stored(made) == (2, 0)


def test_copy_in_two_tables_of_a_key(using: str) -> None:
    """The same where the primary key makes the key."""
    made = SubVault(value=1)
    made.save(using=using)
    lease = Fence(f"vault:{made.pk}", HIGH)
    rows = SubVault.objects.using(using)
    for adding in (False, True):
        row = rows.fenced(lease).get(pk=made.pk)
        Vault.objects.using(using).fenced(Fence(lease.key, HIGH + 1)).filter(pk=made.pk).update(
            value=2
        )
        row.pk, row.value, row._state.adding = None, 99, adding
        with pytest.raises((FenceRejected, IntegrityError, LockUsageError)):
            row.save()
        assert stored(made) == (2, HIGH + 1)
        lease = Fence(lease.key, HIGH + 1)
    copied = saved(rows.fenced(lease).get(pk=made.pk), using, pk=None, id=None)
    assert stored(copied) == (2, 0)


@EVERYWHERE
def test_row_that_moves_keeps_its_fence(using: str) -> None:
    """In another database it belongs to the same key; so it does when a fixture brings it back."""
    row = vault(using)
    other = "sqlite" if using == "default" else "default"
    row.save(using=other)
    assert stored(row) == (1, HIGH)
    row.pk = None
    row.save(using=using)
    assert stored(row) == (1, 0)
    Vault.objects.using(other).all()._raw_delete(other)


@pytest.mark.parametrize("write", [saved, inserted])
def test_copy_whose_text_is_too_long_for_a_key(using: str, write: Callable[..., Any]) -> None:
    """It belongs to no key, and so not to that of the original."""
    Named(name="x", value=1).save(using=using)
    row = Named.objects.using(using).fenced(Fence("n:x", 5)).get()
    row.pk, row.name, row._state.adding = None, "\U0001d160" * 99, True
    write(row, using)
    assert [*Named.objects.using(using).order_by("pk").values_list("fence", flat=True)] == [5, 0]


def test_fixture_without_primary_keys_brings_no_fences(using: str, tmp_path: Path) -> None:
    """Its rows get keys of their own; those whose key it says keep what they bring."""
    fixture = tmp_path / "rows.json"
    rows = [
        {"model": "shop.vault", "pk": pk, "fields": {"fence": HIGH, "value": 1}}
        for pk in (None, 7000)
    ]
    fixture.write_text(json.dumps(rows))
    call_command("loaddata", str(fixture), database=using, verbosity=0)
    found = Vault.objects.using(using).order_by("fence")
    assert [(row.fence, row.pk == 7000) for row in found] == [(0, False), (HIGH, True)]
