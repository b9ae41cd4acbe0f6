"""Operations on triggers of fences, as `makemigrations` and `squashmigrations` see them."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import models
from django.db.migrations import operations
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.graph import MigrationGraph
from django.db.migrations.operations.base import Operation
from django.db.migrations.optimizer import MigrationOptimizer
from django.db.migrations.questioner import MigrationQuestioner
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter

from django_distlock.fencing.operations import EnforceFence, RelaxFence

from .enforcing import BANK, Bank, assert_enforced, migration_of, payment, text, triggers

ANY_APP = MigrationQuestioner({"ask_initial": True})


def changes(old: ProjectState, new: ProjectState) -> list[Operation]:
    """Return what `makemigrations` would write."""
    found = MigrationAutodetector(old, new, ANY_APP).changes(MigrationGraph())
    return [operation for each in found.values() for one in each for operation in one.operations]


def test_makemigrations_sees_no_difference(sqlite: str) -> None:
    """Models that say nothing of triggers agree with migrations that make them."""
    plain = Bank(sqlite).migrate(payment())
    bank = Bank(sqlite)
    bank.state = plain.state.clone()
    EnforceFence("payment").state_forwards(BANK, bank.state)
    assert changes(bank.state, plain.state) == []
    operations.AddField("payment", "more", text(default="")).state_forwards(BANK, plain.state)
    assert [type(one).__name__ for one in changes(bank.state, plain.state)] == ["AddField"]


def test_data_migrations_validate_their_rows(sqlite: str) -> None:
    """The trigger among the constraints of their models does not disturb the others."""
    bank = Bank(sqlite).migrate(payment(), EnforceFence("payment"))
    row = bank.model().objects.using(sqlite).get(pk=bank.add(7))
    row.fence = 5
    row.validate_constraints()


def optimized(*given: Operation) -> list[str]:
    """Return what `squashmigrations` leaves."""
    return [type(one).__name__ for one in MigrationOptimizer().optimize(list(given), BANK)]


def test_squashing_goes_through_it() -> None:
    """What is about other fields moves past it, what is about its own does not."""
    made, enforced = payment(), EnforceFence("Payment")
    add = operations.AddField("payment", "more", text(default=""))
    alter = operations.AlterField("payment", "fence", models.BigIntegerField())
    assert optimized(made, enforced, add) == ["CreateModel", "EnforceFence"]
    assert optimized(made, enforced, alter) == ["CreateModel", "EnforceFence", "AlterField"]
    assert optimized(made, enforced, operations.RenameModel("Payment", "Refund")) == [
        "CreateModel", "EnforceFence", "RenameModel",
    ]  # fmt: skip
    assert optimized(made, enforced, operations.RunSQL("SELECT 1")) == [
        "CreateModel", "EnforceFence", "RunSQL",
    ]  # fmt: skip


def test_squashing_drops_what_is_undone() -> None:
    """A trigger goes with its model or with the operation that takes it away."""
    gone = operations.DeleteModel("Payment")
    assert optimized(EnforceFence("Payment"), gone) == ["DeleteModel"]
    assert optimized(payment(), EnforceFence("Payment"), gone) == []
    assert optimized(EnforceFence("payment"), RelaxFence("Payment")) == []
    assert optimized(EnforceFence("payment"), EnforceFence("payment")) == ["EnforceFence"]
    assert optimized(EnforceFence("payment"), RelaxFence("payment", field="mark")) == [
        "EnforceFence", "RelaxFence",
    ]  # fmt: skip


def test_squashed_trigger_is_the_same(empty: str) -> None:
    """What the optimizer leaves makes the same trigger as the long way did."""
    long: list[Operation] = [
        payment(),
        EnforceFence("payment"),
        operations.AddField("payment", "more", text(default="")),
        operations.RemoveField("payment", "note"),
    ]
    bank = Bank(empty).migrate(*long)
    was = triggers(empty)
    bank.undo()
    bank.migrate(*MigrationOptimizer().optimize(long, BANK))
    assert triggers(empty) == was
    bank.add(7)
    assert_enforced(empty)


@pytest.mark.parametrize("kind", [EnforceFence, RelaxFence])
def test_operation_is_written_as_it_was_given(kind: Any) -> None:
    """`squashmigrations` writes it with its arguments, and what it writes can be read."""
    migration = migration_of(kind("Payment"), kind(model_name="Payment", field="mark"))
    written: dict[str, Any] = {}
    exec(MigrationWriter(migration, include_header=False).as_string(), written)
    first, second = written["Migration"].operations
    assert (type(first), first.model_name, first.name) == (kind, "Payment", "fence")
    assert (type(second), second.model_name, second.name) == (kind, "Payment", "mark")


class PartitionedState(ModelState):
    """A state of the kind that other packages of operations have."""


def test_states_of_other_packages_stay_theirs(sqlite: str) -> None:
    """A model's own class of state is kept below the triggers, and through clones."""
    bank = Bank(sqlite).migrate(payment())
    key = BANK, "payment"
    bank.state.models[key].__class__ = PartitionedState
    bank.migrate(EnforceFence("payment"), operations.RenameModel("Payment", "Refund"))
    assert isinstance(bank.state.models[BANK, "refund"], PartitionedState)
    bank.add(7, "Refund")
    assert_enforced(sqlite, "bank_refund")
