"""Triggers that refuse to lower a fence: what they refuse, and what they do not see."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management.color import no_style
from django.db import IntegrityError, connections, transaction
from django.db.models import F, Value

from django_distlock.fencing.operations import EnforceFence

from .databases import ask
from .enforcing import TABLE, Bank, payment, set_fence, vendor

#: Past what a signed 32-bit number and a double hold, as fences that follow the clock are.
HIGH = 9 * 10**14 + 1


def fence(bank: Bank, pk: Any) -> int:
    """Return the fence of a row."""
    value: int = bank.model().objects.using(bank.using).get(pk=pk).fence
    return value


# What is refused


def test_raw_sql_cannot_lower_a_fence(bank: Bank) -> None:
    """A lower fence is an IntegrityError, and the row stays; an equal or a higher one passes."""
    for high in (7, HIGH, 2**63 - 1):
        ask(bank.using, f"DELETE FROM {TABLE}")
        pk = bank.add(high - 1)
        set_fence(bank.using, "fence")
        set_fence(bank.using, "fence + 1")
        for lower in ("fence - 1", "1", "0"):
            with pytest.raises(IntegrityError, match="a fence never goes back"):
                set_fence(bank.using, lower)
        assert fence(bank, pk) == high
    # The error of a NULL is that of its column, which fenced writes tell from others.
    with pytest.raises(IntegrityError, match="fence") as caught:
        set_fence(bank.using, "NULL")
    if vendor(bank) == "sqlite":
        assert str(caught.value) == f"NOT NULL constraint failed: {TABLE}.fence"


def test_one_row_refuses_the_whole_statement(bank: Bank) -> None:
    """Of many rows none is written; table, column and, but on SQLite, both fences are named."""
    low, high = bank.add(3, amount=1), bank.add(9, amount=2)
    with pytest.raises(IntegrityError) as caught, transaction.atomic(using=bank.using):
        set_fence(bank.using, "5")
    assert [fence(bank, low), fence(bank, high)] == [3, 9]
    said = str(caught.value)
    assert f"{TABLE}.fence" in said
    if vendor(bank) != "sqlite":
        assert "from 9 to 5" in said
    if vendor(bank) == "postgresql":
        diag = caught.value.__cause__.diag  # type: ignore[union-attr]
        assert (diag.sqlstate, diag.table_name, diag.column_name) == ("23514", TABLE, "fence")


def test_other_columns_are_free(bank: Bank) -> None:
    """Whoever leaves the fence alone writes as before, and may add and delete rows."""
    bank.add(7)
    set_fence(bank.using, "4", column="mark")
    set_fence(bank.using, "3", column="mark")
    bank.add(1, amount=5)
    ask(bank.using, f"DELETE FROM {TABLE}")
    assert ask(bank.using, f"SELECT * FROM {TABLE}") == []


def test_queries_of_the_orm_cannot_lower_a_fence(bank: Bank) -> None:
    """Neither update() nor save() nor bulk_update() does."""
    row = bank.model().objects.using(bank.using).get(pk=bank.add(7))
    rows = bank.model().objects.using(bank.using)
    rows.update(fence=F("fence") + 1)
    assert row.fence == 7
    with pytest.raises(IntegrityError):
        rows.update(fence=Value(7))
    with pytest.raises(IntegrityError):
        row.save()
    with pytest.raises(IntegrityError):
        rows.bulk_update([row], ["fence"])
    row.fence = 9
    rows.bulk_update([row], ["fence"])
    assert fence(bank, row.pk) == 9


def test_upserts_and_updates_that_ignore_errors_cannot_lower_a_fence(bank: Bank) -> None:
    """Also ON CONFLICT DO UPDATE, ON DUPLICATE KEY UPDATE, and what skips or replaces rows."""
    pk = bank.add(7, amount=1)

    def upsert(value: int) -> None:
        more: dict[str, Any] = {} if vendor(bank) == "mysql" else {"unique_fields": ["amount"]}
        bank.model().objects.using(bank.using).bulk_create(
            [bank.model()(amount=1, fence=value)],
            update_conflicts=True,
            update_fields=["fence"],
            **more,
        )

    with pytest.raises(IntegrityError, match="never goes back"):
        upsert(6)
    assert fence(bank, pk) == 7
    upsert(8)
    assert fence(bank, pk) == 8
    ignoring = {"sqlite": ["UPDATE OR IGNORE", "UPDATE OR REPLACE"], "mysql": ["UPDATE IGNORE"]}
    for statement in ignoring.get(vendor(bank), []):
        with pytest.raises(IntegrityError):
            ask(bank.using, f"{statement} {TABLE} SET fence = 5")
        assert fence(bank, pk) == 8


def test_row_that_moves_between_partitions_keeps_its_fence(postgresql: str) -> None:
    """On a partitioned table every partition refuses, also where the update moves the row."""
    ask(
        postgresql,
        f"CREATE TABLE {TABLE} (id bigint, note text, amount integer, fence bigint, mark integer)"
        " PARTITION BY LIST (mark)",
    )
    for mark in (1, 2):
        ask(postgresql, f"CREATE TABLE part{mark} PARTITION OF {TABLE} FOR VALUES IN ({mark})")
    bank = Bank(postgresql)
    payment().state_forwards("bank", bank.state)
    bank.migrate(EnforceFence("payment")).undo().migrate(EnforceFence("payment"))
    ask(postgresql, f"INSERT INTO {TABLE} VALUES (1, '', 1, 7, 1)")
    for table, change in (
        (TABLE, "fence = 6"),
        (TABLE, "fence = 6, mark = 2"),
        ("part1", "fence = 6"),
    ):
        with pytest.raises(IntegrityError):
            ask(postgresql, f"UPDATE {table} SET {change}")
    ask(postgresql, f"UPDATE {TABLE} SET fence = 8, mark = 2")
    with pytest.raises(IntegrityError):
        set_fence(postgresql, "7", table="part2")


# What is not seen


def test_deleting_or_replacing_a_row_is_not_seen(bank: Bank) -> None:
    """What was deleted, as `flush` and REPLACE do, comes again with any fence."""
    pk = bank.add(7)
    if vendor(bank) != "postgresql":
        columns = "(id, note, amount, fence, mark)"
        ask(bank.using, f"REPLACE INTO {TABLE} {columns} VALUES ({pk}, '', 1, 2, 0)")
        assert fence(bank, pk) == 2
    for statement in connections[bank.using].ops.sql_flush(no_style(), [TABLE]):
        ask(bank.using, statement)
    assert ask(bank.using, f"SELECT * FROM {TABLE}") == []
    bank.add(1, id=pk)
    assert fence(bank, pk) == 1
