"""A row belongs to one key: `fence_key`, `fence_required`, and the checks of both."""

from __future__ import annotations

import datetime
import uuid
from typing import Any

import pytest
from django.apps import apps
from django.core import checks
from django.db import connections, models
from django.db.models import F
from django.test import override_settings
from django.test.utils import isolate_apps

from django_distlock import FenceRejected, LockUsageError
from django_distlock.checks.fencing import check_base_managers, check_fence_floor, check_fence_keys
from django_distlock.fencing import Fence, FencedModel
from django_distlock.fencing.keys import KeyTemplate
from tests.backends import MEMORY
from tests.contract.aliases import locks_on
from tests.shop.models import Account, Folder, Named, Row, SubVault, Vault

from .fenced_rows import stored


def vault(using: str) -> tuple[Vault, Fence, Fence]:
    """Make a row, with a lease of its key and one of another's."""
    row = Vault(value=1)
    row.save(using=using)
    return row, Fence(f"vault:{row.pk}", 5), Fence(f"vault:{row.pk + 1}", 9)


def test_lease_of_the_rows_key_writes(using: str) -> None:
    """What belongs to the key is read, written and deleted; an old fence is refused as ever."""
    row, right, _ = vault(using)
    rows = Vault.objects.using(using)
    row.value = 2
    row.save(lease=right)
    found = rows.fenced(right).get()
    found.value = 3
    found.save()
    assert rows.fenced(right).update(value=4) == 1
    assert stored(row) == (4, 5)
    with pytest.raises(FenceRejected):
        rows.fenced(Fence(right.key, 4)).update(value=2)
    assert found.delete()[0] == 1
    # A primary key that the database will choose cannot have been locked.
    with pytest.raises(LockUsageError, match="before it is saved"):
        Vault().save(using=using, lease=Fence("vault:1", 5))


def test_lease_of_another_key_is_refused(using: str) -> None:
    """Whatever its fence, it is not about this row; nothing is changed."""
    row, _, wrong = vault(using)
    rows = Vault.objects.using(using)
    row.value = 2
    for use in (
        lambda: row.save(lease=wrong),
        lambda: row.delete(lease=wrong),
        lambda: row.raise_fence(wrong),
        lambda: rows.fenced(wrong).update(value=2),
        lambda: rows.fenced(wrong).get(pk=row.pk),
        lambda: rows.fenced(wrong).delete(),
        lambda: rows.fenced(wrong).bulk_update([row], ["value"]),
        lambda: rows.fenced(wrong).bulk_create([Vault(pk=row.pk + 7)]),
        lambda: rows.fenced(Fence("invoice:1", 9)),
        lambda: row.save(lease=Fence("vault:x", 9)),
    ):
        with pytest.raises(LockUsageError, match="belongs to"):
            use()
    assert stored(row) == (1, 0)
    # Also where its fence is below that of the row.
    rows.fenced(Fence(f"vault:{row.pk}", 10)).update(value=3)
    for use in (lambda: row.save(lease=wrong), lambda: rows.fenced(wrong).update(value=2)):
        with pytest.raises(LockUsageError, match="belongs to"):
            use()
    # Also where both keys have granted the same fence.
    same = rows.fenced(Fence(wrong.key, 10)).filter(pk=row.pk)
    for read in (same.get, same.count, same.exists, same.delete, lambda: [*same]):
        with pytest.raises(LockUsageError, match="belongs to"):
            read()
    assert stored(row) == (3, 10)


def test_row_that_another_key_adds_amid_a_delete_stays(using: str) -> None:
    """Though both keys have granted the same fence."""
    Folder(tenant=1, value=1).save(using=using, lease=Fence("tenant:1", 5))
    theirs = Folder(tenant=2, value=1)

    def between(execute: Any, sql: str, *more: Any) -> Any:
        answer = execute(sql, *more)
        if sql.startswith("UPDATE") and theirs.pk is None:
            theirs.save(using=using, lease=Fence("tenant:2", 5))
        return answer

    with connections[using].execute_wrapper(between):
        Folder.objects.using(using).fenced(Fence("tenant:1", 5)).filter(value=1).delete()
    assert [*Folder.objects.using(using).values_list("tenant", "fence")] == [(2, 5)]


def test_text_that_no_key_has(using: str, key: str) -> None:
    """Keys are in NFC: no lease could be on one with another spelling, and the error says so."""
    row = Named(name="o\u0308b")
    with pytest.raises(LockUsageError, match="in NFC"):
        row.save(using=using, lease=Fence("n:\u00f6b", 2))
    row = Named(name=F("value"))
    with pytest.raises(LockUsageError, match="before it is saved"):
        row.save(using=using, lease=Fence("n:x", 2))


def test_model_that_requires_a_lease(using: str) -> None:
    """Updates and deletions without one are refused; inserts pass."""
    row, right, _ = vault(using)
    rows = Vault.objects.using(using)
    part = Vault._base_manager.using(using).only("value").get(pk=row.pk)
    row.value = part.value = 2
    for use in (
        row.save,
        row.delete,
        part.save,
        lambda: row.save(lease=None),
        lambda: row.save(update_fields=["value"]),
        lambda: rows.update(value=2),
        lambda: rows.all().delete(),
        lambda: rows.bulk_update([row], ["value"]),
    ):
        with pytest.raises(LockUsageError, match="only be written under a lease"):
            use()
    assert stored(row) == (1, 0)
    rows.bulk_create([Vault(value=9)])
    row.save(lease=right)
    assert stored(row) == (2, 5)


# What a template makes of keys


@isolate_apps("tests.shop")
def _model(**fields: Any) -> type[models.Model]:
    body = {**fields, "__module__": __name__, "Meta": type("Meta", (), {"app_label": "shop"})}
    made: type[models.Model] = type("Thing", (models.Model,), body)
    return made


DAY = datetime.date(2026, 11, 21)
NUMBER = uuid.UUID("12345678-1234-5678-1234-567812345678")


@pytest.mark.parametrize(
    ("fields", "template", "values", "key"),
    [
        ({}, "payment:{pk}", {"id": 12}, "payment:12"),
        ({}, "payment:{id}", {"id": -3}, "payment:-3"),
        ({"day": models.DateField()}, "{day}:x", {"day": DAY}, "2026-11-21:x"),
        ({"uid": models.UUIDField()}, "u:{uid}", {"uid": NUMBER}, f"u:{NUMBER}"),
        (
            {"name": models.TextField(), "n": models.IntegerField()},
            "{n}:{name}",
            {"name": "a:b", "n": 7},
            "7:a:b",
        ),
        ({"name": models.TextField()}, "n:{name}", {"name": ""}, "n:"),
        (
            {"account": models.ForeignKey(Account, models.CASCADE)},
            "account:{account}",
            {"account_id": 4},
            "account:4",
        ),
        (
            {"account": models.ForeignKey(Account, models.CASCADE)},
            "account:{account_id}:{{x}}",
            {"account_id": 4},
            "account:4:{x}",
        ),
    ],
)
def test_key_and_columns(
    fields: dict[str, Any], template: str, values: dict[str, Any], key: str
) -> None:
    """A row's key is made of its columns, and a key says what is in them."""
    model = _model(**fields)
    made = KeyTemplate(model, template)
    assert made.of(model(**values)) == key
    assert made.columns(key) == values


def test_key_of_no_row() -> None:
    """A key that no row's columns make is that of no row, and an unsaved row may have none."""
    template = KeyTemplate(_model(), "payment:{pk}")
    for end in ("", "x", "012", "1 ", "1\n", str(2**63)):
        assert template.columns(f"payment:{end}") is None
    assert template.columns("xpayment:1") is None
    assert template.of(_model()()) is None


def test_templates_that_cannot_be() -> None:
    """A template that keys cannot be taken apart by is refused, also by the checks."""
    made = _model(
        name=models.TextField(),
        other=models.TextField(),
        price=models.DecimalField(max_digits=5, decimal_places=2),
        at=models.DateTimeField(),
    )
    for template, says in (
        ("payment", "names no field"),
        ("payment:{nothing}", "no column {nothing}"),
        ("{id}:{id}", "once"),
        ("{id:03}", "occur once"),
        ("{id!r}", "occur once"),
        ("{name}:{other}", "several ways"),
        ("{id}{name}", "nothing separates"),
        ("{name}-{id}", "part of the number"),
        ("{name}0{id}", "part of the number"),
        ("{id}0{name}", "part of the number"),
        ("{price}", "no single text"),
        ("{at}", "no single text"),
        ("payment:{", "'{'"),
    ):
        with pytest.raises(ValueError, match=says.replace("{", r"\{")):
            KeyTemplate(made, template)


@isolate_apps("tests.shop")
def test_primary_key_of_another_table() -> None:
    """A row may have two: that of the fence's table, and one that says nothing about it."""

    def made(name: str, *bases: Any, **fields: Any) -> Any:
        body = {"__module__": __name__, "Meta": type("Meta", (), {"app_label": "shop"}), **fields}
        return type(name, bases, body)

    part = made("Part", models.Model, number=models.AutoField(primary_key=True))
    base = made("Base", FencedModel)
    both = made("Both", part, base)
    coded = made("Coded", base, code=models.CharField(primary_key=True, max_length=9))
    for model, template in ((both, "x:{pk}"), (both, "x:{number}"), (coded, "x:{code}")):
        with pytest.raises(ValueError, match="in another table than the fence"):
            KeyTemplate(model, template)
    assert KeyTemplate(both, "x:{id}").of(both(id=4)) == "x:4"
    child = made("Child", base)
    assert KeyTemplate(child, "x:{pk}").of(child(pk=4)) == "x:4"


# Checks


def test_check_of_fence_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """E002 names the model."""
    assert check_fence_keys(None) == []
    monkeypatch.setattr(Vault, "fence_key", "vault:{nothing}")
    found, child = check_fence_keys([apps.get_app_config("shop")])
    assert (found.id, found.level, found.obj) == ("distlock.E002", checks.ERROR, Vault)
    assert child.obj is SubVault
    assert check_fence_keys([apps.get_app_config("auth")]) == []


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("base", ["objects", None])
@pytest.mark.parametrize("on_delete", [models.SET_NULL, models.SET(None), models.SET_DEFAULT])
def test_check_of_base_managers(base: str | None, on_delete: Any, *, required: bool) -> None:
    """W009 names a model whose rows Django cannot cut off from a row that it deletes."""
    fields = {
        "fence_required": required,
        "other": models.ForeignKey(Row, on_delete, null=True, default=None, related_name="+"),
        "part_of": models.ForeignKey(Row, models.CASCADE, related_name="+"),
        "__module__": __name__,
        "Meta": type("Meta", (), {"app_label": "shop", "base_manager_name": base}),
    }
    isolated: Any
    with isolate_apps("tests.shop") as isolated:
        made = type("Thing", (FencedModel,), fields)
    found = check_base_managers([isolated.get_app_config("shop")])
    # Rows with a default are collected, and updated one by one.
    wrong = required and base is not None and on_delete is not models.SET_DEFAULT
    assert [(each.id, each.obj) for each in found] == [("distlock.W009", made)] * wrong
    assert all("'other'" in each.msg for each in found)
    assert check_base_managers(None) == []


def test_check_of_fence_floors(monkeypatch: pytest.MonkeyPatch) -> None:
    """W002 names each database backend without a floor, where rows refuse stale fences."""
    with locks_on("default"):
        (found,) = check_fence_floor(None)
    assert (found.id, found.level) == ("distlock.W002", checks.WARNING)
    assert "DISTLOCK['locks_default']" in found.msg
    with locks_on("default", FENCE_FLOOR="clock"):
        assert check_fence_floor(None) == []
    # What is developed has no failover.
    with locks_on("default"), override_settings(DEBUG=True):
        assert check_fence_floor(None) == []
    with override_settings(DISTLOCK={"m": {"BACKEND": MEMORY}}):
        assert check_fence_floor(None) == []
    monkeypatch.setattr(apps.get_app_config("shop"), "get_models", list)
    with locks_on("default"):
        assert check_fence_floor(None) == []
