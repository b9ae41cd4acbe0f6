"""Triggers that refuse to lower a fence: what is installed where, and goes again."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, NotSupportedError, OperationalError, connections
from django.test import override_settings

from django_distlock.fencing.operations import EnforceFence

from .databases import Routed, ask, ask_mysql, is_mariadb, role
from .enforcing import FUNCTION, TABLE, Bank, payment, set_fence, triggers, vendor


def quoted(bank: Bank, name: str) -> str:
    """Quote a name for the database."""
    text: str = connections[bank.using].ops.quote_name(name)
    return text


def test_way_back_leaves_nothing(bank: Bank) -> None:
    """Behind it a fence can be lowered, and there is neither trigger nor function."""
    bank.add(7)
    assert list(triggers(bank.using).values()) == [TABLE]
    bank.undo()
    assert triggers(bank.using) == {}
    if vendor(bank) == "postgresql":
        assert _functions(bank.using) == []
    set_fence(bank.using, "5")
    bank.migrate(EnforceFence("payment"))
    with pytest.raises(IntegrityError):
        set_fence(bank.using, "4")


def test_installing_twice_changes_nothing(bank: Bank) -> None:
    """A migration that failed behind it, on MySQL, can be repeated; so can one by hand."""
    before = triggers(bank.using)
    bank.migrate(EnforceFence("payment"))
    assert triggers(bank.using) == before
    # The second one leaves it on its way back.
    bank.undo()
    assert triggers(bank.using) == before
    del bank.state.models["bank", "payment"]
    payment().state_forwards("bank", bank.state)
    bank.migrate(EnforceFence("payment"))
    assert triggers(bank.using) == before


def _functions(using: str) -> list[Any]:
    return ask(using, "SELECT proname FROM pg_proc WHERE proname = %s", FUNCTION)


def test_tables_share_the_function(postgresql: str) -> None:
    """It goes with the last trigger that calls it."""
    bank = Bank(postgresql).migrate(payment(), payment("Refund"))
    bank.migrate(EnforceFence("payment")).migrate(EnforceFence("refund"))
    bank.undo()
    assert len(_functions(postgresql)) == 1
    bank.add(7)
    with pytest.raises(IntegrityError):
        set_fence(postgresql, "5")
    bank.undo()
    assert _functions(postgresql) == []


def test_model_has_two_fences(bank: Bank) -> None:
    """Each has a trigger of its own, which goes alone."""
    bank.migrate(EnforceFence(model_name="Payment", field="mark"))
    bank.add(7, mark=7)
    for column in ("fence", "mark"):
        with pytest.raises(IntegrityError):
            set_fence(bank.using, "6", column=column)
    bank.undo()
    set_fence(bank.using, "6", column="mark")
    with pytest.raises(IntegrityError):
        set_fence(bank.using, "6")


#: Names of tables.
ODD = [
    "Order",
    "it's 100 lines",
    'payment\'s "fences"',
    "größe",
    "платёж",
    "t" * 63,
    "t" * 60 + "X",
]


def test_odd_names_of_tables(empty: str) -> None:
    """Reserved, quoted, long and foreign names of tables do, beside one that differs at its end."""
    for table in ODD:
        if '"' in table and connections[empty].vendor != "mysql":
            continue  # Django does not quote this name.
        if len(table) > 58 and connections[empty].vendor == "mysql" and not is_mariadb(empty):
            continue  # MySQL finds no name for the column's own check.
        other = f"{table[:59]}y"
        bank = Bank(empty).migrate(payment(db_table=table), payment("Other", db_table=other))
        bank.migrate(EnforceFence("payment"), EnforceFence("other"))
        assert len(triggers(empty)) == 2
        for name, where in (("Payment", table), ("Other", other)):
            bank.add(7, name)
            with pytest.raises(IntegrityError, match="never goes back"):
                set_fence(empty, "6", table=quoted(bank, where))
        bank.undo()
        assert triggers(empty) == {}
        bank.undo()


def test_odd_names_of_columns(empty: str) -> None:
    """Columns may be called anything that Django makes."""
    for column in ("Fence", "order", "a fence's"):
        operation = payment()
        operation.fields[3][1].db_column = column
        bank = Bank(empty).migrate(operation, EnforceFence("payment"))
        bank.add(7)
        with pytest.raises(IntegrityError, match="never goes back"):
            set_fence(empty, "6", column=quoted(bank, column))
        set_fence(empty, "8", column=quoted(bank, column))
        bank.undo()


def test_table_in_another_schema(postgresql: str) -> None:
    """A table that is named with its schema has its trigger there."""
    ask(postgresql, 'CREATE SCHEMA "Vault"')
    bank = Bank(postgresql).migrate(payment(db_table='Vault"."Payment'), EnforceFence("payment"))
    bank.add(7)
    with pytest.raises(IntegrityError, match="Payment.fence, from 7 to 6"):
        set_fence(postgresql, "6", table='"Vault"."Payment"')
    bank.undo()
    assert _functions(postgresql) == []


def test_table_in_another_mysql_database(mysql: str) -> None:
    """A table that is named with its database has its trigger there."""
    other = f"{connections[mysql].settings_dict['NAME']}_vault"
    ask_mysql(f"CREATE DATABASE {other}")
    try:
        bank = Bank(mysql).migrate(payment(db_table=f"{other}`.`payment"))
        bank.migrate(EnforceFence("payment"))
        bank.add(7)
        with pytest.raises(IntegrityError):
            set_fence(mysql, "6", table=f"{other}.payment")
        bank.undo()
        set_fence(mysql, "6", table=f"{other}.payment")
    finally:
        connections[mysql].close()
        ask_mysql(f"DROP DATABASE {other}")


def test_router_keeps_the_trigger_away(sqlite: str) -> None:
    """Where a model may not be migrated, or is not managed, no trigger is made, nor dropped."""
    with override_settings(DATABASE_ROUTERS=[Routed(None, "bank", made=())]):
        bank = Bank(sqlite).migrate(payment()).migrate(EnforceFence("payment"))
        assert triggers(sqlite) == {}
        bank.undo(2)
    Bank(sqlite).migrate(payment(managed=False)).migrate(EnforceFence("payment"))
    assert triggers(sqlite) == {}


def test_database_without_a_trigger_is_refused(
    sqlite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No migration pretends to protect what it does not."""
    bank = Bank(sqlite).migrate(payment())
    monkeypatch.setattr(connections[sqlite], "vendor", "oracle")
    with pytest.raises(NotSupportedError, match="EnforceFence does not support"):
        bank.sql(EnforceFence("payment"))


def test_account_that_may_make_no_trigger_is_told(mysql: str) -> None:
    """MySQL's refusal comes with what is missing."""
    bank = Bank(mysql).migrate(payment())
    with role(mysql, "GRANT SELECT, UPDATE, ALTER, CREATE ON shop.* TO shop_app") as limited:
        bank.using = limited
        with pytest.raises(OperationalError, match="TRIGGER command denied") as caught:
            bank.migrate(EnforceFence("payment"))
        assert "log_bin_trust_function_creators" in "".join(caught.value.__notes__)
