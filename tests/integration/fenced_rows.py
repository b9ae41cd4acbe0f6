"""Rows that refuse who comes too late, and fences to come with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import transaction

from django_distlock import FenceRejected
from django_distlock.fencing import Fence, FencedQuerySet
from tests.contract.helpers import Later
from tests.shop.models import (
    Account,
    Deep,
    Entry,
    Folder,
    Named,
    Plain,
    Savings,
    Shelf,
    SubVault,
    Vault,
)

from .databases import here

#: Children come before their parents.
MODELS = (Deep, SubVault, Savings, Plain, Vault, Named, Folder, Entry, Shelf, Account)
OLD, NEW = Fence("a", 5), Fence("a", 6)
#: For what is asked of each kind of database, in a file about what is the same above them.
EVERYWHERE = pytest.mark.parametrize("using", ["default", "sqlite", "mariadb"], indirect=True)


def without_rows(using: str) -> Iterator[str]:
    """Give a database, without the rows of others."""
    here(using)
    _empty(using)
    yield using
    _empty(using)


def _empty(using: str) -> None:
    for model in MODELS:
        model._base_manager.using(using)._raw_delete(using)


def accounts(using: str, name: str = "") -> FencedQuerySet[Account]:
    """Return the accounts of a test."""
    rows: FencedQuerySet[Account] = Account.objects.using(using)
    return rows.filter(name__startswith=name)


def account(using: str, name: str, *, fence: int = 0, value: int = 1) -> Account:
    """Make a row that a fence has touched."""
    made = Account(name=name, value=value)
    made.save(using=using, lease=Fence("a", fence) if fence else None)
    made._fenced_by = None
    return made


def stored(row: Any) -> tuple[int, int]:
    """Read value and fence as another connection sees them."""

    def read() -> tuple[int, int]:
        found = type(row)._base_manager.using(row._state.db).get(pk=row.pk)
        return found.value, found.fence

    return Later(read).result()


def raised_elsewhere(row: Account, fence: int, value: int) -> None:
    """Let somebody else, with that fence, read and write the row."""

    def write() -> None:
        found = accounts(str(row._state.db)).fenced(Fence("a", fence)).get(pk=row.pk)
        found.value = value
        found.save()

    Later(write).result()


def refused(error: FenceRejected, row: Any, fence: int = 6) -> bool:
    """Say whether the error tells of this row, its fence and the one that came."""
    told = (error.code, error.row, error.current, error.fence, error.key)
    return told == ("fence_rejected", f"{row._meta.label} {row.pk}", fence, 5, "a")


def in_transaction(using: str, *, wanted: bool) -> Any:
    """Return a transaction, or the way without."""
    return transaction.atomic(using=using) if wanted else _Nothing()


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass
