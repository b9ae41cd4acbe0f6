"""Ways past the fence of a row that are easily left open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import DatabaseError, transaction

from django_distlock import FenceRejected, LockLost, LockUsageError, distlock
from django_distlock.fencing import Fence
from django_distlock.fencing.fields import is_refusal, refused
from django_distlock.handler import lock_backends
from tests.contract.aliases import alias_like
from tests.contract.helpers import Later
from tests.shop.models import Account, Folder, Row, Vault

from .databases import ask
from .fenced_rows import NEW, OLD, account, accounts, raised_elsewhere, stored, without_rows

ONE = Fence("tenant:1", 5)


@pytest.fixture
def mariadb() -> Iterator[str]:
    """Give the one that reads from snapshots in the midst of locking reads."""
    yield from without_rows("mariadb")


def test_row_that_comes_in_place_of_a_deleted_one_stays(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not there to be compared is not deleted, whatever is there a moment later."""
    made = account("default", key)
    row = accounts("default").fenced(OLD).get(pk=made.pk)
    accounts("default").filter(pk=made.pk).delete()
    compare = Account._write_fence

    def slowly(self: Account, by: Fence, using: str) -> None:
        try:
            compare(self, by, using)
        finally:
            Later(Account(pk=made.pk, name=key).save, lease=NEW).result()

    monkeypatch.setattr(Account, "_write_fence", slowly)
    assert row.delete() == (0, {})
    assert stored(made) == (0, 6)
    accounts("default").filter(pk=made.pk).delete()


def test_row_of_another_key_is_not_made_ones_own(using: str) -> None:
    """A write that changes the column of the key is judged by what was there before."""
    rows = Folder.objects.using(using)
    theirs = rows.create(tenant=2)
    with pytest.raises(LockUsageError, match="another key"):
        rows.fenced(ONE).filter(pk=theirs.pk).update(tenant=1)
    theirs.tenant = 1
    with pytest.raises(LockUsageError, match="another key"):
        theirs.save(lease=ONE)
    theirs.refresh_from_db()
    assert (theirs.tenant, theirs.fence) == (2, 0)
    # The holder of its key may give it away, for until then it is its own.
    mine = rows.create(tenant=1)
    assert rows.fenced(ONE).filter(pk=mine.pk).update(tenant=3) == 1


def test_required_lease_is_not_passed_by(using: str) -> None:
    """Nor by an instance that pretends to be new, nor by an upsert."""
    made = Vault(value=1)
    made.save(using=using)
    unique: dict[str, Any] = {} if using == "mariadb" else {"unique_fields": ["id"]}
    again: Any = {"update_conflicts": True, "update_fields": ["value"], **unique}
    for use in (
        Vault(pk=made.pk, value=99).save,
        lambda: Vault.objects.using(using).bulk_create([Vault(pk=made.pk, value=99)], **again),
    ):
        with pytest.raises(LockUsageError, match="only be written under a lease"):
            use(using=using) if use.__name__ == "save" else use()  # type: ignore[call-arg]
    assert stored(made) == (1, 0)
    Vault(pk=made.pk + 1, value=2).save(using=using)
    assert Vault.objects.using(using).get(pk=made.pk + 1).value == 2


def test_upsert_does_not_lower_a_fence(using: str, key: str) -> None:
    """Without a lease it may change other columns; the fence is refused, however it is said."""
    row = account(using, key, fence=6)
    unique: list[Any] = [] if using == "mariadb" else [["id"]]
    rows = accounts(using)
    with pytest.raises(LockUsageError, match="cannot be set"):
        rows.bulk_create([Account(pk=row.pk, fence=0)], None, False, True, ["fence"], *unique)
    rows.bulk_create([Account(pk=row.pk, name=key, value=3)], None, False, True, ["value"], *unique)
    assert stored(row) == (3, 6)


UNMARKED: dict[str, Callable[[Any], Any]] = {
    "values": lambda rows: rows.values("value").fenced(NEW),
    "values_list": lambda rows: rows.values_list("value", flat=True).fenced(NEW),
    "or": lambda rows: rows | rows.fenced(NEW),
    "and": lambda rows: rows.fenced(NEW) & rows,
    "xor": lambda rows: rows ^ rows.fenced(NEW),
    "raw": lambda rows: rows.fenced(NEW).raw("SELECT * FROM shop_account"),
}


def test_reads_that_would_go_unmarked(key: str) -> None:
    """What cannot be fenced is refused, and not read plainly."""
    row = account("default", key)
    for way, read in UNMARKED.items():
        with pytest.raises(LockUsageError):
            list(read(accounts("default", key)))
        assert stored(row) == (1, 0), way
    Account.objects.filter(pk=row.pk).delete()


def test_querysets_under_one_lease_combine(using: str, key: str) -> None:
    """They go on under it."""
    first, second = account(using, f"{key}-1"), account(using, f"{key}-2")
    either = accounts(using, f"{key}-1").fenced(NEW) | accounts(using, f"{key}-2").fenced(NEW)
    assert {row.pk for row in either} == {first.pk, second.pk}
    assert stored(first) == stored(second) == (1, 6)


def test_servers_of_other_languages() -> None:
    """PostgreSQL says what was wrong in its own language, and with its own quotes."""
    for text in (
        'invalid input syntax for type bigint: "distlock:6:12:fence"',
        "ungültige Eingabesyntax für Typ bigint: »distlock:6:12:fence«",
        "syntaxe en entrée invalide pour le type bigint : « distlock:6:12:fence »",
    ):
        error = DatabaseError(text)
        assert is_refusal(error, Account)
        assert refused(error, Account) == (12, 6, False)


def _snapshots(checked: str) -> dict[str, str]:
    """Return options by which a transaction reads from when it began, and may be ended for that.

    MariaDB has it so from 11.6 on.
    """
    setting = f"SET SESSION innodb_snapshot_isolation={checked}"
    return {"isolation_level": "repeatable read", "init_command": setting}


def test_refusal_behind_an_older_snapshot(mariadb: str, key: str) -> None:
    """A transaction that reads from before the other's mark still learns which fence it met."""
    with alias_like(mariadb, OPTIONS=_snapshots("OFF")) as snapshot:
        row = account(mariadb, key)
        with pytest.raises(FenceRejected) as caught, transaction.atomic(using=snapshot):  # noqa: PT012
            assert accounts(snapshot, key).count() == 1
            raised_elsewhere(row, 6, 2)
            accounts(snapshot, key).fenced(OLD).update(value=3)
        assert caught.value.current == 6
    assert stored(row) == (2, 6)


def test_read_behind_an_older_snapshot(mariadb: str, key: str) -> None:
    """What a row was before the lease had it is not read under the lease."""
    with alias_like(mariadb, OPTIONS=_snapshots("OFF")) as snapshot:
        row = account(mariadb, key)
        with transaction.atomic(using=snapshot):
            assert accounts(snapshot, key).count() == 1
            raised_elsewhere(row, 4, 2)
            # The same holder, by another connection.
            raised_elsewhere(row, 5, 2)
            with pytest.raises(LockUsageError, match="before its last write"):
                accounts(snapshot).fenced(OLD).get(pk=row.pk)
    assert stored(row) == (2, 5)


@pytest.mark.parametrize("checked", ["OFF", "ON"])
def test_guard_behind_an_older_snapshot(mariadb: str, key: str, checked: str) -> None:
    """What a transaction has seen before the grant is not protected by it."""
    with alias_like(mariadb, OPTIONS=_snapshots(checked)) as snapshot:
        with transaction.atomic(using=snapshot):
            assert Row.objects.using(snapshot).filter(name=key).count() == 0
            lease = Later(distlock(key, backend="mariadb").acquire).result()
            with pytest.raises(LockLost):
                lease.guard(snapshot)
            # The server has rolled back all of it, and what follows would be committed alone.
            assert transaction.get_rollback(snapshot) == (checked == "ON")
        Later(lease.release).result()


def test_refused_guard_leaves_the_callers_bound(key: str) -> None:
    """The caller's `lock_timeout` is its own again, whatever the guard has found."""
    lease = distlock(key, backend="postgres").acquire()
    Later(lock_backends["postgres"].force_release, key).result()
    with transaction.atomic():
        with pytest.raises(LockLost):
            lease.guard()
        assert ask("default", "SHOW lock_timeout") == [("0",)]


@pytest.mark.parametrize("mode", ["", "ANSI_QUOTES,STRICT_TRANS_TABLES"])
def test_mode_of_another_project(mariadb: str, key: str, mode: str) -> None:
    """MySQL refuses also where it would cut numbers to what fits, or quotes names otherwise."""
    with alias_like(mariadb, OPTIONS={"sql_mode": mode}) as lax:
        row = account(lax, key, fence=6)
        with pytest.raises(FenceRejected):
            accounts(lax, key).fenced(OLD).update(value=9)
        assert stored(account_of(mariadb, row)) == (1, 6)


def account_of(using: str, row: Account) -> Account:
    """Return the same row by another alias."""
    return accounts(using).get(pk=row.pk)
