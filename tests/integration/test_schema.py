"""What the tables are made of, and what they refuse."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, connections, models, transaction
from django.db.models import F
from django.utils import translation
from django.utils.functional import Promise

from django_distlock import LockUsageError, distlock
from django_distlock.core.keys import new_token
from django_distlock.core.records import FENCE_MAX, Attempt, KeysAsked
from django_distlock.database.server_functions import ServerFunctions
from django_distlock.fencing import Fence
from django_distlock.fencing.seen import see
from django_distlock.inspection import prune_events, show
from django_distlock.inspection.history import history
from django_distlock.models import (
    FailedTask,
    FenceCounter,
    HeldLock,
    LockEvent,
    RunNote,
    SeenFence,
    StoredResponse,
    Waiter,
)
from django_distlock.process.host import current_holder
from tests.contract.aliases import locks_on

from .databases import APP, ask, lock_and_release, migrate
from .projects import Project

MODELS: tuple[type[models.Model], ...] = (
    HeldLock, FenceCounter, Waiter, LockEvent, SeenFence, RunNote, FailedTask, StoredResponse,
)  # fmt: skip
TABLE = "django_distlock_heldlock"
FENCES = "django_distlock_fencecounter"
WAITERS = "django_distlock_waiter"
SEEN = "django_distlock_seenfence"
NOTES = "django_distlock_runnote"


@pytest.fixture
def migrated(empty: str) -> str:
    """Give the alias of a database of one's own with the tables, of each kind in turn."""
    migrate(empty)
    return empty


@pytest.fixture
def server(postgresql: str) -> str:
    """Give the alias of a PostgreSQL database of one's own with the tables."""
    migrate(postgresql)
    return postgresql


# Columns


def test_key_columns_compare_bytes() -> None:
    """On PostgreSQL keys and tokens have the collation "C"."""
    columns = {TABLE: ("storage_key", "token", "task_id"), SEEN: ("key",)}
    columns |= dict.fromkeys((FENCES, WAITERS, NOTES), ("storage_key",))
    query = (
        "SELECT collation_name FROM information_schema.columns"
        " WHERE table_name = %s AND column_name = %s"
    )
    for table, names in columns.items():
        for name in names:
            assert ask("default", query, table, name) == [("C",)], (table, name)


def test_each_key_column_has_one_index(server: str) -> None:
    """No second index for LIKE, and none on a column that every extend writes."""
    query = (
        "SELECT a.attname FROM pg_index i JOIN pg_attribute a"
        " ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)"
        " WHERE i.indrelid = to_regclass(%s) ORDER BY 1"
    )
    tables = {
        TABLE: ["storage_key", "task_id", "token"],
        FENCES: ["storage_key"],
        WAITERS: ["id", "storage_key"],
        SEEN: ["key"],
        NOTES: ["storage_key", "until"],
    }
    for table, indexed in tables.items():
        assert [name for (name,) in ask(server, query, table)] == indexed, table


def test_projects_default_keys_change_nothing(sqlite: str) -> None:
    """With another `DEFAULT_AUTO_FIELD` models and migrations agree all the same."""
    project = Project(sqlite, DEFAULT_AUTO_FIELD="django.db.models.AutoField")
    assert "No changes" in project.manage("makemigrations", APP, "--check", "--dry-run")


def test_permissions_are_to_view_and_to_operate(migrated: str) -> None:
    """Nobody can be given the right to add, change or delete by hand; each operation has one."""
    call_command("migrate", database=migrated, verbosity=0)
    found = ask(
        migrated,
        "SELECT codename FROM auth_permission p JOIN django_content_type t"
        " ON p.content_type_id = t.id WHERE t.app_label = %s ORDER BY 1",
        APP,
    )
    assert [name for (name,) in found] == [
        "cleanup_heldlock",
        "expire_soon_heldlock",
        "force_release_heldlock",
        "pause_fencecounter",
        "request_stop_heldlock",
        "resume_fencecounter",
        "view_fencecounter",
        "view_heldlock",
        "view_lockevent",
        "view_seenfence",
        "view_waiter",
    ]


def test_names_are_translated_when_shown() -> None:
    """Names of models and fields follow the language of whoever looks."""
    for model in MODELS:
        names = [model._meta.verbose_name, model._meta.verbose_name_plural]
        names += [
            field.verbose_name
            for field in model._meta.get_fields()
            if isinstance(field, models.Field) and not field.auto_created
        ]
        assert all(isinstance(name, Promise) for name in names), model
        labels = [label for _value, label in LockEvent.Kind.choices]
        assert all(isinstance(label, Promise) for label in labels)
    assert isinstance(apps.get_app_config(APP).verbose_name, Promise)
    with translation.override(None):
        assert str(HeldLock._meta.verbose_name) == "held lock"


# Counters only ever count up


def refused(counter: FenceCounter, using: str) -> dict[str, Callable[[], object]]:
    """Give every way to change or delete a counter that a model offers."""
    counters = FenceCounter.objects.using(using)
    manager = FenceCounter.objects.db_manager(using)
    key = {"storage_key": counter.storage_key}
    return {
        "delete": counter.delete,
        "delete using": lambda: counter.delete(using=using),
        "save": counter.save,
        "save some": lambda: counter.save(update_fields=["fence"]),
        "save by force": lambda: counter.save(force_update=True),
        "delete some": counters.filter(**key).delete,
        "delete all": counters.all().delete,
        "delete by manager": lambda: manager.filter(**key).delete(),
        "update": lambda: counters.filter(**key).update(fence=0),
        "update by expression": lambda: counters.update(fence=F("fence") - 1),
        "update key": lambda: counters.filter(**key).update(storage_key="elsewhere"),
        "update pk": lambda: counters.filter(**key).update(pk="elsewhere"),
        "bulk_update": lambda: counters.bulk_update([counter], ["fence"]),
        "bulk_create": lambda: counters.bulk_create(
            [counter], update_conflicts=True, update_fields=["fence"], unique_fields=["storage_key"]
        ),
        "bulk_create by manager": lambda: manager.bulk_create(
            [counter], update_conflicts=True, update_fields=["fence"], unique_fields=["storage_key"]
        ),
        "bulk_create by position": lambda: counters.bulk_create(
            [counter], None, False, True, ["fence"], ["storage_key"]
        ),
        "update_or_create": lambda: counters.update_or_create(defaults={"fence": 0}, **key),
        "update_or_create by manager": lambda: manager.update_or_create(
            defaults={"fence": 0}, **key
        ),
    }


def test_model_refuses_to_take_a_fence_back(sqlite: str) -> None:
    """Where no trigger helps, model, manager and queryset refuse every change of a counter."""
    migrate(sqlite)
    lock_and_release(sqlite)
    counter = FenceCounter.objects.using(sqlite).get()
    counter.fence = 0
    for way, change in refused(counter, sqlite).items():
        with pytest.raises(LockUsageError, match="never"):
            change()
        assert FenceCounter.objects.using(sqlite).get().fence == 1, way
    anew = FenceCounter(storage_key=counter.storage_key, key=counter.key, fence=0)
    with pytest.raises((LockUsageError, DatabaseError)), transaction.atomic(using=sqlite):
        anew.save(using=sqlite)
    # What is no fence may be changed through the queryset.
    assert FenceCounter.objects.using(sqlite).update(paused_by="somebody") == 1
    assert lock_and_release(sqlite) == 2


def test_counters_go_neither_back_nor_too_far(migrated: str) -> None:
    """What Django itself uses for relations and saving takes no fence back either.

    No statement writes a fence that does not fit into 15 digits behind the last.
    """
    lock_and_release(migrated)
    every: list[Any] = [FenceCounter._base_manager, FenceCounter._default_manager]
    rows = [each.using(migrated) for each in every]
    if connections[migrated].vendor == "postgresql":
        # A way around the model, which ends at the server's trigger.
        rows.append(models.QuerySet(FenceCounter, using=migrated))
    for each in rows:
        with pytest.raises((LockUsageError, DatabaseError)), transaction.atomic(using=migrated):
            each.delete()
    assert lock_and_release(migrated) == 2
    ask(migrated, f"UPDATE {FENCES} SET fence = %s", FENCE_MAX)
    with pytest.raises(IntegrityError, match=f"{FENCES}_max"):
        ask(migrated, f"UPDATE {FENCES} SET fence = %s", FENCE_MAX + 1)
    with pytest.raises(IntegrityError, match=f"{FENCES}_max"):
        FenceCounter.objects.using(migrated).create(
            storage_key="other", key="other", fence=FENCE_MAX + 1
        )


def test_trigger_works_under_any_search_path(server: str) -> None:
    """Who comes with another search path is refused as well, and may count up."""
    lock_and_release(server)
    ask(server, "SET search_path = pg_catalog")
    with pytest.raises(DatabaseError, match="never deleted"):
        ask(server, f"DELETE FROM public.{FENCES}")
    ask(server, f"UPDATE public.{FENCES} SET fence = 10")
    ask(server, "RESET search_path")
    assert lock_and_release(server) == 11


# Instants

#: In the hour that the clocks in Berlin show twice, with the smallest digit that counts.
TWICE = [
    datetime(2026, 10, 25, 0, 30, 0, 123456, tzinfo=UTC),
    datetime(2026, 10, 25, 1, 30, 0, 123456, tzinfo=UTC),
    datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC),
    datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(2199, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
]


@pytest.mark.parametrize("use_tz", [True, False], ids=["aware", "naive"])
def test_instants_come_back_to_the_microsecond(empty: str, tmp_path: Path, use_tz: bool) -> None:
    """Any `USE_TZ` and `TIME_ZONE` keep an instant, in the table and in a dump."""
    project = Project(empty, USE_TZ=use_tz, TIME_ZONE="Europe/Berlin")
    said = project.run("tests.integration.test_schema:keep_instants", str(tmp_path))
    written = [instant.isoformat() for instant in TWICE]
    assert said["read"] == written
    assert said["in order"] == sorted(written)
    assert said["xml"] == written
    # Django's JSON has no more than milliseconds of any time.
    assert said["json"] == [instant.isoformat(timespec="milliseconds") for instant in TWICE]
    assert said["ttl"] == 30.0


@pytest.mark.parametrize("use_tz", [True, False], ids=["aware", "naive"])
def test_events_are_told_under_any_zone(empty: str, use_tz: bool) -> None:
    """With or without time zones: counted by the minute, shown with their key, and removed."""
    project = Project(empty, USE_TZ=use_tz, TIME_ZONE="Asia/Kolkata")
    said = project.run("tests.integration.test_schema:tell_events")
    assert said == {"minutes apart": 1, "day": 2, "aware": True, "pruned": 1}


def tell_events() -> dict[str, Any]:
    """Write two events, a minute apart, and ask for them."""
    migrate("default")
    now = datetime.now(UTC)
    for key, ago in (("new", 0), ("old", 60)):
        LockEvent.objects.create(
            backend="default", key=key, kind="lost", at=now - timedelta(seconds=ago)
        )
    told = history()
    assert told is not None
    (event,) = show("old").events or ()
    pruned = prune_events(older_than=30, actor="nobody")
    first, second = (each for each, minute in enumerate(told.minutes) if minute.number)
    return {
        "minutes apart": second - first,
        "day": told.kinds["lost"],
        "aware": event.at == now - timedelta(seconds=60),
        "pruned": pruned.removed,
    }


def keep_instants(folder: str) -> dict[str, Any]:
    """Write instants, read them, dump them, load them, and read them again."""
    said: dict[str, Any] = {}
    migrate("default")
    for number, instant in enumerate(TWICE):
        _held(number, instant).save(force_insert=True)
    said["read"] = _ends("pk")
    said["in order"] = _ends("expires_at")
    dumps = {form: f"{folder}/dump.{form}" for form in ("xml", "json")}
    for form, path in dumps.items():
        call_command("dumpdata", APP, format=form, output=path, verbosity=0)
    for form, path in dumps.items():
        HeldLock.objects.all().delete()
        call_command("loaddata", path, verbosity=0)
        timespec = "milliseconds" if form == "json" else "auto"
        said[form] = _ends("pk", timespec)
    HeldLock.objects.all().delete()
    with distlock("invoice:42") as lease:
        assert lease.expires_at is not None
        stored = HeldLock.objects.get(key="invoice:42")
        assert (stored.acquired_at, stored.expires_at) == (lease.acquired_at, lease.expires_at)
        assert abs(lease.acquired_at - datetime.now(UTC)) < timedelta(seconds=30)
        said["ttl"] = (lease.expires_at - lease.acquired_at).total_seconds()
    return said


def _ends(order: str, timespec: str = "auto") -> list[str]:
    ends = [row.expires_at for row in HeldLock.objects.order_by(order)]
    assert all(end is not None and end.tzinfo is not None for end in ends)
    return [end.isoformat(timespec=timespec) for end in ends if end is not None]


def _held(number: int, instant: datetime) -> HeldLock:
    return HeldLock(
        storage_key=f"k{number}", key=f"k{number}", token=str(number) * 22, fence=1, ttl=30,
        acquired_at=instant, renewed_at=instant, expires_at=instant, free_at=None,
        holder_host="host",
    )  # fmt: skip


def test_dumps_take_no_fence_back(migrated: str, tmp_path: Path) -> None:
    """An old dump is refused over living counters and seen fences; an empty database takes it."""
    counters, seen = str(tmp_path / "counters.json"), str(tmp_path / "seen.json")
    lock_and_release(migrated)
    lock_and_release(migrated)
    see(Fence("invoice:42", 6), migrated)
    for path, model in ((counters, "FenceCounter"), (seen, "SeenFence")):
        call_command("dumpdata", f"{APP}.{model}", database=migrated, output=path, verbosity=0)
    assert [each["fields"]["fence"] for each in json.loads(Path(counters).read_text())] == [2]
    lock_and_release(migrated)
    see(Fence("invoice:42", 7), migrated)
    with pytest.raises((LockUsageError, DatabaseError)):
        call_command("loaddata", counters, database=migrated, verbosity=0)
    # A stale request would pass.
    with pytest.raises(LockUsageError, match="lowered"):
        call_command("loaddata", seen, database=migrated, verbosity=0)
    assert see(Fence("invoice:42", 6), migrated) == 7
    assert lock_and_release(migrated) == 4
    migrate(migrated, "zero")
    migrate(migrated)
    call_command("loaddata", counters, database=migrated, verbosity=0)
    assert lock_and_release(migrated) == 3


# Trap D22: a hot table must not grow


def test_storage_parameters_are_set(server: str) -> None:
    """Pages have room for updates in place, and dead rows are counted and not estimated."""
    ((options,),) = ask(server, "SELECT reloptions FROM pg_class WHERE relname = %s", TABLE)
    assert set(options) == {
        "fillfactor=50",
        "autovacuum_vacuum_scale_factor=0.0",
        "autovacuum_vacuum_threshold=1000",
    }


def test_d22_extends_are_updates_in_place(server: str, server_functions: bool) -> None:
    """Extends write no index and no fence: their updates are HOT."""
    options = {"using": server, "server_functions": server_functions}
    with locks_on(server, OPTIONS=options) as backend:
        lease = distlock("invoice:42", backend=backend).acquire()
        fences = ask(server, f"SELECT ctid, xmin, xmax, fence FROM {FENCES}")
        before = _statistics(server, lambda found: found["n_tup_ins"] >= 1)
        for _ in range(50):
            lease.extend()
        after = _statistics(server, lambda found: found["n_tup_upd"] >= 50)
        assert after["n_tup_upd"] - before["n_tup_upd"] == 50
        # Not each of them: a snapshot elsewhere may keep a dead row on a full page for a moment.
        assert after["n_tup_hot_upd"] - before["n_tup_hot_upd"] >= 40
        assert ask(server, f"SELECT ctid, xmin, xmax, fence FROM {FENCES}") == fences
        lease.release()


def test_functions_read_no_whole_table(server: str) -> None:
    """However small it was when the session asked first: the server keeps its plan."""
    functions = ServerFunctions(server, lambda name: f'"{name}"')
    keys, holder = [f"invoice:{number}" for number in range(20)], current_holder()
    asked = KeysAsked(
        keys=dict.fromkeys(keys, False), tokens=[], using=server, stays=set(), bound=1.0
    )
    with transaction.atomic(using=server):
        before = ask(server, _SCANS, [TABLE, FENCES])
        for _ in range(8):
            attempts = [
                Attempt(each, each, new_token(), 30, holder, wanted=False, replace=None, bound=1.0)
                for each in keys
            ]
            grants = functions.acquire_many(attempts)
            assert isinstance(grants, list)
            functions.extend_many([(each.key, each) for each in grants])
            for each in grants:
                functions.release(each.key, each, bound=1.0)
            assert functions.transaction_lock(keys, asked)[0] == "locked"
        assert ask(server, _SCANS, [TABLE, FENCES]) == before


_SCANS = """
SELECT relname, seq_scan FROM pg_stat_xact_user_tables WHERE relname = ANY(%s) ORDER BY relname
"""


def _statistics(using: str, enough: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """Read the counters of the table once the session has reported them."""
    give_up = time.monotonic() + 20
    while True:
        if connections[using].connection.info.server_version >= 150000:
            ask(using, "SELECT pg_stat_force_next_flush()")
        ask(using, "SELECT pg_stat_clear_snapshot()")
        names = ("n_tup_ins", "n_tup_upd", "n_tup_hot_upd")
        found = ask(
            using, f"SELECT {', '.join(names)} FROM pg_stat_user_tables WHERE relname = %s", TABLE
        )
        counted = cast("dict[str, int]", dict(zip(names, found[0], strict=True)))
        if enough(counted):
            return counted
        assert time.monotonic() < give_up, counted
        time.sleep(0.05)
