"""Triggers on fences, and what migrations do to their tables behind them."""

from __future__ import annotations

from functools import partial

import pytest
from django.core.exceptions import FieldDoesNotExist, FieldError
from django.db import models
from django.db.migrations import operations
from django.db.migrations.operations.base import Operation

from django_distlock.fencing.operations import EnforceFence, RelaxFence

from .databases import ask
from .enforcing import TABLE, Bank, assert_enforced, payment, set_fence, text, triggers

#: Changes of the note, of which SQLite makes the table anew.
NOTE = operations.AlterField("payment", "note", text(default="?"))
MORE = operations.AddField("payment", "more", text(default=""))
#: What may come behind, and where the fence is then, if not in the table of before.
CHANGES: dict[str, tuple[Operation | str, ...]] = {
    "RunSQL": (operations.RunSQL(f"UPDATE {TABLE} SET mark = 1", ""),),
    "AlterField": (NOTE,),
    "AlterField, the fence": (
        operations.AlterField("payment", "fence", models.BigIntegerField(default=1)),
    ),
    "AlterField, the primary key": (
        operations.AlterField("payment", "id", models.AutoField(primary_key=True)),
    ),
    "AddField": (MORE,),
    "AddField, null": (operations.AddField("payment", "more", text(null=True)),),
    "RemoveField": (operations.RemoveField("payment", "note"),),
    "RemoveField, unique": (operations.RemoveField("payment", "amount"),),
    "RenameField": (operations.RenameField("payment", "note", "words"),),
    "AlterModelTable": (operations.AlterModelTable("payment", "paid"), "paid"),
    "RenameModel": (operations.RenameModel("Payment", "Refund"), "bank_refund"),
    "RenameModel, AlterField": (
        operations.RenameModel("Payment", "Refund"),
        operations.AlterField("refund", "note", text(default="?")),
        "bank_refund",
    ),
    "AlterModelTable, AddField, AlterModelTable": (
        operations.AlterModelTable("payment", "paid"),
        MORE,
        operations.AlterModelTable("payment", "payments"),
        "payments",
    ),
    "AddIndex": (operations.AddIndex("payment", models.Index(fields=["mark"], name="by_mark")),),
    "AddConstraint": (
        operations.AddConstraint(
            "payment", models.CheckConstraint(condition=models.Q(mark__gte=0), name="no_debt")
        ),
    ),
    "AlterUniqueTogether": (operations.AlterUniqueTogether("payment", {("note", "mark")}),),
    "AlterModelOptions": (operations.AlterModelOptions("payment", {"ordering": ["note"]}),),
    "SeparateDatabaseAndState": (
        operations.SeparateDatabaseAndState(database_operations=[NOTE], state_operations=[NOTE]),
    ),
}


def test_trigger_outlives_what_comes_behind(empty: str, subtests: pytest.Subtests) -> None:
    """A changed table refuses lower fences as before, there and back, and leaves nothing.

    All in one migration ends the same, and so does its way back.
    """
    for change, behind in CHANGES.items():
        with subtests.test(change):
            outlives(
                Bank(empty).migrate(payment()),
                *(each for each in behind if isinstance(each, Operation)),
                table=next((each for each in behind if isinstance(each, str)), TABLE),
                model="Refund" if "RenameModel" in change else "Payment",
            )


def outlives(bank: Bank, *behind: Operation, table: str, model: str) -> None:
    """See a trigger through changes of its table, and back; leave nothing."""
    using = bank.using
    bank.migrate(EnforceFence("payment")).add(7)
    was = triggers(using)
    bank.migrate(*behind)
    assert_enforced(using, table)
    assert list(triggers(using)) == list(was)
    bank.undo()
    assert_enforced(using)
    assert triggers(using) == was
    bank.undo()
    assert triggers(using) == {}
    set_fence(using, "0")
    ask(using, f"DELETE FROM {TABLE}")
    bank.migrate(EnforceFence("payment"), *behind)
    bank.add(7, model)
    assert_enforced(using, table)
    bank.undo()
    assert triggers(using) == {}
    set_fence(using, "0")
    bank.undo()


def test_trigger_outlives_a_change_of_what_the_row_points_to(empty: str) -> None:
    """SQLite makes tables anew that refer to the one that changes."""
    bank = Bank(empty).migrate(
        operations.CreateModel("Account", [("code", text(primary_key=True))]),
        payment(),
        operations.AddField(
            "payment", "account", models.ForeignKey("bank.Account", models.CASCADE, null=True)
        ),
        EnforceFence("payment"),
    )
    bank.add(7)
    bank.migrate(
        operations.AlterField("account", "code", models.CharField(primary_key=True, max_length=9))
    )
    assert_enforced(empty)


def test_name_of_a_table_is_used_again(empty: str) -> None:
    """Triggers keep their names, and a new table with the old name gets another one."""
    bank = Bank(empty).migrate(payment(), EnforceFence("payment"))
    bank.migrate(operations.RenameModel("Payment", "Refund"))
    bank.migrate(payment(), EnforceFence("payment"))
    bank.add(7, "Payment")
    bank.add(7, "Refund")
    assert_enforced(empty)
    assert_enforced(empty, "bank_refund")
    assert len(triggers(empty)) == 2
    bank.undo()
    assert_enforced(empty, "bank_refund")


def test_deleted_model_comes_back_with_its_trigger(empty: str) -> None:
    """The way back from DeleteModel makes the table as it was."""
    bank = Bank(empty).migrate(payment(), EnforceFence("payment"))
    was = triggers(empty)
    bank.migrate(operations.DeleteModel("payment"))
    assert triggers(empty) == {}
    bank.undo()
    assert triggers(empty) == was
    bank.add(7)
    assert_enforced(empty)
    # Where the trigger and the deletion are of one migration, it had none.
    bank.undo()
    bank.migrate(payment())
    bank.migrate(EnforceFence("payment"), operations.DeleteModel("payment")).undo()
    assert triggers(empty) == {}


# The fence itself


def test_fence_does_not_change_under_its_trigger(empty: str, subtests: pytest.Subtests) -> None:
    """What some databases refuse and others notice too late is refused before anything is done."""
    altered = partial(operations.AlterField, "payment", "fence")
    changes: dict[str, Operation] = {
        "RenameField": operations.RenameField("payment", "fence", "seal"),
        "RemoveField": operations.RemoveField("payment", "fence"),
        "AlterField": altered(models.BigIntegerField(db_column="seal")),
        "AlterField, null": altered(models.BigIntegerField(null=True)),
        "AlterField, text": altered(models.CharField(max_length=20)),
    }
    for name, change in changes.items():
        with subtests.test(name):
            bank = Bank(empty).migrate(payment()).migrate(EnforceFence("payment"))
            bank.add(7)
            with pytest.raises(FieldError, match=r"RelaxFence\('Payment', field='fence'\)"):
                bank.migrate(change)
            assert_enforced(empty)
            bank.migrate(RelaxFence("payment"), change)
            assert triggers(empty) == {}
            bank.undo()
            if name != "RemoveField":
                assert_enforced(empty)
            bank.undo(2)


def test_renamed_fence_is_enforced_again(empty: str) -> None:
    """Between RelaxFence and EnforceFence a fence is renamed, there and back."""
    bank = Bank(empty).migrate(payment(), EnforceFence("payment"))
    bank.add(7)
    bank.migrate(
        RelaxFence("payment"),
        operations.RenameField("payment", "fence", "seal"),
        EnforceFence("payment", field="seal"),
    )
    assert_enforced(empty, column="seal")
    bank.undo()
    assert_enforced(empty)


def test_what_is_no_fence_is_refused(sqlite: str) -> None:
    """Text, what may be null, what is not there, a parent's: refused before anything is done."""
    bank = Bank(sqlite).migrate(
        payment(), operations.CreateModel("Refund", [], bases=("bank.payment",))
    )
    for field, error in (
        ("note", FieldError),
        ("amount", FieldError),
        ("id_of_nothing", FieldDoesNotExist),
    ):
        with pytest.raises(error, match=f"Payment.*{field}"):
            bank.migrate(EnforceFence("payment", field=field))
    # The column is in the parent's table, and so its trigger has to be.
    with pytest.raises(FieldDoesNotExist, match="belongs to that model"):
        bank.migrate(EnforceFence("refund"))
    bank.migrate(EnforceFence("payment"))
    bank.add(7, "Refund")
    assert_enforced(sqlite)
