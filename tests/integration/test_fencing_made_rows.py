"""A row that is made under a lease has no fence yet that could refuse it: the key's own does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from django_distlock import FenceRejected, Lease, LockNotAcquired, distlock
from django_distlock.fencing.rejecting import refuse_overtaken
from django_distlock.models import FenceCounter, HeldLock
from django_distlock.signals import fence_rejected
from tests.backends import BACKENDS
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import Later
from tests.contract.locking import Heard
from tests.shop.models import Account, Savings

from .databases import ask, here
from .fenced_rows import accounts, in_transaction, without_rows

#: Where the locks are, and where the rows.
PAIRS = {name: (name, each.using or "default") for name, each in BACKENDS.items()}
PAIRS["memory beside mariadb"] = ("memory", "mariadb")
PAIRS["redis beside sqlite"] = ("redis", "sqlite")
PAIRS["postgres beside sqlite"] = ("postgres", "sqlite")


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Give each backend with a database, without the rows of others."""
    backend, using = PAIRS[request.param]
    yield from ((backend, each) for each in without_rows(using))


@pytest.fixture(params=["postgres", "sqlite", "redis"])
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Give one pair of each kind."""
    backend, using = PAIRS[request.param]
    yield from ((backend, each) for each in without_rows(using))


def granted(backend: str, key: str) -> Lease:
    """Return a lease that was given up, and that nobody has followed yet."""
    lease = distlock(key, backend=backend).acquire()
    lease.release()
    return lease


def test_deleted_row_is_not_made_again(pair: tuple[str, str], key: str) -> None:
    """What the next holder deleted stays so; that one makes it again as it likes."""
    backend, using = pair
    for atomic in (False, True):
        name = f"{key}:{atomic}"
        rows, old = accounts(using), granted(backend, name)
        rows.fenced(old).get_or_create(name=name)
        new = granted(backend, name)
        assert rows.fenced(new).filter(name=name).delete()[0] == 1
        with (
            Heard(fence_rejected, name) as heard,
            pytest.raises(FenceRejected) as caught,
            in_transaction(using, wanted=atomic),
        ):
            rows.fenced(old).get_or_create(name=name)
        assert (caught.value.current, caught.value.fence) == (new.fence, old.fence)
        assert "new shop.Account" in str(caught.value)
        assert (heard.once["model"], heard.once["pk"]) == ("shop.Account", None)
        assert not rows.filter(name=name).exists()
        assert rows.fenced(new).get_or_create(name=name)[1]


def moved_away(rows: Any, lease: Lease, key: str) -> None:
    """Save a row that is not in this database, whose primary key it brings."""
    row = Account(pk=123_456, name=key)
    row.save(using=rows.db, lease=lease)


WAYS: dict[str, Callable[[Any, Lease, str], Any]] = {
    "create": lambda rows, lease, key: rows.fenced(lease).create(name=key),
    "acreate": lambda rows, lease, key: async_to_sync(rows.fenced(lease).acreate)(name=key),
    "bulk_create": lambda rows, lease, key: rows.fenced(lease).bulk_create([Account(name=key)]),
    "bulk_create beside": lambda rows, lease, key: rows.fenced(lease).bulk_create(
        [Account(name=key)], ignore_conflicts=True
    ),
    "update_or_create": lambda rows, lease, key: rows.fenced(lease).update_or_create(
        name=key, defaults={"value": 3}
    ),
    "save": lambda rows, lease, key: Account(name=key).save(using=rows.db, lease=lease),
    "save with its key": moved_away,
    "in two tables": lambda rows, lease, key: (
        Savings.objects.using(rows.db).fenced(lease).create(name=key)
    ),
}


def test_stale_lease_makes_no_row(
    shared: tuple[str, str], key: str, subtests: pytest.Subtests
) -> None:
    """Whichever way it is made; nobody is told of a row that is not there."""
    backend, using = shared
    old, new = granted(backend, key), granted(backend, key)
    for way, make in WAYS.items():
        with subtests.test(way):
            rows, name = accounts(using), f"{key}:{way}"
            with pytest.raises(FenceRejected):
                make(rows, old, name)
            with pytest.raises(FenceRejected), transaction.atomic(using=using):
                make(rows, old, name)
            assert not rows.filter(name=name).exists()
            make(rows, new, name)
            assert rows.get(name=name).fence == new.fence


def test_row_that_was_read_and_deleted_is_not_inserted(shared: tuple[str, str], key: str) -> None:
    """Nor does `bulk_create` bring it back, whose rows have what they were read under."""
    backend, using = shared
    rows, old = accounts(using), granted(backend, key)
    row = rows.fenced(old).create(name=key)
    new = granted(backend, key)
    rows.fenced(new).filter(pk=row.pk).delete()
    with pytest.raises(FenceRejected):
        rows.bulk_create([row])
    assert not rows.filter(name=key).exists()


@pytest.mark.parametrize("backend", ["postgres", "mariadb", "advisory"])
def test_nobody_is_granted_the_key_before_the_row_is_there(
    backend: str, key: str, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """In the database of the locks there is no gap between the comparison and the commit."""
    using = here(BACKENDS[backend].using)
    taken: list[Lease | None] = []

    def slowly(by: Lease, *more: Any) -> None:
        refuse_overtaken(by, *more)
        try:
            taken.append(Later(distlock(by.key, backend=backend, wait=0).acquire).result())
        except LockNotAcquired:
            taken.append(None)

    for module in ("models", "querysets"):
        monkeypatch.setattr(f"django_distlock.fencing.{module}.refuse_overtaken", slowly)
    ways = {each: WAYS[each] for each in ("create", "bulk_create", "in two tables")}
    ways["get_or_create"] = lambda rows, lease, name: rows.fenced(lease).get_or_create(name=name)
    for way, make in ways.items():
        with subtests.test(way):
            name = f"{key}:{way}"
            lease = granted(backend, name)
            taken.clear()
            make(accounts(using), lease, name)
            assert taken == [None]
            granted(backend, name)
    accounts(using, key).delete()


def test_many_rows_in_a_file_without_wal(key: str, tmp_path: Path) -> None:
    """Whoever keeps all others out of the file of the locks is not in its own way."""
    options = {"init_command": "PRAGMA journal_mode=DELETE; PRAGMA cache_size=5"}
    with alias_like("sqlite", NAME=str(tmp_path / "rows.sqlite3"), OPTIONS=options) as using:
        with connections[using].schema_editor() as editor:
            for model in (HeldLock, FenceCounter, Account):
                editor.create_model(model)
        with locks_on(using) as backend:
            rows = [Account(name=f"{key} {number}") for number in range(500)]
            accounts(using).fenced(granted(backend, key)).bulk_create(rows)
        assert accounts(using, key).count() == 500


def test_key_is_compared_for_new_rows_alone(shared: tuple[str, str], key: str) -> None:
    """A row that is there has a fence of its own: its save is one statement, as before."""
    backend, using = shared
    with distlock(key, backend=backend) as lease:
        row = accounts(using).fenced(lease).create(name=key)
        with CaptureQueriesContext(connections[using]) as queries:
            row.save()
    assert len(queries) == 1


def test_transaction_that_is_managed_by_hand_does_not_hold_the_key(key: str) -> None:
    """It is the caller's, as a block of `atomic()` is: the server is not told to cut it off."""
    lease, rows = granted("postgres", key), accounts("default")
    transaction.set_autocommit(False)
    try:
        rows.fenced(lease).create(name=key)
        assert ask("default", "SHOW idle_in_transaction_session_timeout") == [("0",)]
        Later(granted, "postgres", key).result()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
