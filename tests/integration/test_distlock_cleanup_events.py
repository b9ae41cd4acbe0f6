"""`distlock_cleanup` and `inspection.prune_events`: what happened long ago is forgotten."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from django.contrib.auth.models import AnonymousUser
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_distlock import InvalidArgument
from django_distlock.inspection import prune_events, pruning
from django_distlock.models import LockEvent
from django_distlock.process import event_log
from tests.contract.aliases import DATABASE

from .databases import Routed, migrate
from .operating import raising, run
from .projects import Project

Kind = LockEvent.Kind


@pytest.fixture(autouse=True)
def _nothing_else() -> Iterator[None]:
    """Let no event of another test be counted, and leave none."""
    event_log.finish()
    LockEvent.objects.all().delete()
    yield
    LockEvent.objects.all().delete()


def happened(days: float, kind: str = Kind.LOST, key: str = "key", number: int = 1) -> None:
    """Keep events that are so old."""
    at = timezone.now() - timedelta(days=days)
    LockEvent.objects.bulk_create(
        LockEvent(at=at, backend="postgres", key=key, kind=kind) for _ in range(number)
    )


def kept() -> list[tuple[str, int]]:
    """Say which events are left, but for those about cleaning up, and how old they are."""
    now = timezone.now()
    rows = LockEvent.objects.exclude(kind=Kind.CLEANED).order_by("at")
    return [(row.kind, (now - row.at).days) for row in rows]


def test_old_events_go_and_young_ones_stay() -> None:
    """After 90 days, where nothing else is said; text and JSON say how many went."""
    happened(91, number=3)
    happened(89)
    ran = run("distlock_cleanup", "--older-than=3600")
    assert ran.out.endswith("events: 3 events removed.\n")
    assert kept() == [(Kind.LOST, 89)]
    happened(31)
    told = run("distlock_cleanup", "--older-than=3600", "--events-older-than=30", "--json").json
    assert (told["events"]["events"], told["events"]["audit"]) == (2, 0)
    assert kept() == []


def test_what_operators_did_is_kept_longer() -> None:
    """For 400 days, which is said; cleaning up is no such thing."""
    operators = [Kind.FORCED, Kind.SHORTENED, Kind.STOP_REQUESTED, Kind.PAUSED, Kind.RESUMED]
    for kind in (*operators, Kind.CLEANED, Kind.LOST, Kind.TAKEN_OVER, Kind.REJECTED):
        happened(399, kind)
    happened(401, Kind.FORCED)
    told = run("distlock_cleanup", "--older-than=3600", "--events-older-than=1", "--json").json
    assert (told["events"]["events"], told["events"]["audit"]) == (4, 1)
    assert sorted(kept()) == sorted((kind, 399) for kind in operators)
    happened(1000, Kind.FORCED)
    happened(1000)
    ran = run("distlock_cleanup", "--older-than=3600", "--events-older-than=500")
    assert ran.out.endswith("events: 2 events removed, 1 of them operators' events.\n")
    assert len(kept()) == len(operators)


def test_events_go_in_batches_past_what_is_kept() -> None:
    """Each in a transaction of its own; what lies in between is looked at once, not each time."""
    for days in range(110, 100, -1):
        happened(days)
        happened(days, Kind.FORCED)
    steps: list[int] = []
    with CaptureQueriesContext(connections["default"]) as queries:
        pruned = prune_events(batch=3, actor="Ada", progress=steps.append)
    assert (pruned.events, pruned.audit, pruned.removed) == (10, 0, 10)
    assert steps == [3, 6, 9, 10]
    deletes = [each["sql"] for each in queries if each["sql"].startswith("DELETE")]
    assert len(deletes) == 4
    assert kept() == [(Kind.FORCED, days) for days in range(110, 100, -1)]


def test_who_pruned_is_kept() -> None:
    """One event for all of it, and none where nothing went."""
    happened(100, number=2)
    prune_events(older_than=timedelta(days=50), actor="Ada", reason="we are full")
    prune_events(actor="Ada", reason="nothing left")
    (row,) = LockEvent.objects.all()
    assert (row.kind, row.actor, row.reason) == (Kind.CLEANED, "Ada", "we are full")
    assert (row.details["removed"], row.details["events"]) == (2, 2)


@pytest.mark.parametrize("at", [1, 3], ids=["events", "operators' events"])
def test_who_pruned_is_kept_though_not_all_went(at: int) -> None:
    """With the number of those that had gone by then."""
    happened(500, number=4)
    happened(500, Kind.FORCED, number=4)
    steps: list[int] = []

    def progress(removed: int) -> None:
        steps.append(removed)
        if len(steps) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_events(batch=2, actor="Ada", progress=progress)
    row = LockEvent.objects.get(kind=Kind.CLEANED)
    assert row.details["removed"] == 2 * at == 8 - len(kept())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_waits_for_the_end_of_a_batch(signum: int) -> None:
    """Then nothing more is removed; what has gone is told."""
    happened(100, number=4)
    remove = pruning._remove

    def interrupted(*asked: Any, **more: Any) -> Iterator[int]:
        for gone in remove(*asked, **more):
            signal.raise_signal(signum)
            yield gone

    with raising(signum), patch.object(pruning, "_remove", interrupted):
        ran = run("distlock_cleanup", "--older-than=3600", "--batch=2", "--json")
    assert (ran.status, ran.err) == (128 + signum, "Interrupted.\n")
    assert ran.json["events"] is None
    assert LockEvent.objects.get(kind=Kind.CLEANED).details["removed"] == 2 == len(kept())


def test_events_are_kept_where_that_is_said() -> None:
    """By `never`, and where one backend alone is cleaned: events are those of all."""
    happened(1000)
    for argument in ("--events-older-than=never", "--backend=postgres"):
        ran = run("distlock_cleanup", "--older-than=3600", argument, "--json")
        assert (ran.status, ran.json["events"]) == (0, None)
        assert kept() == [(Kind.LOST, 1000)]
        assert "event" not in run("distlock_cleanup", "--older-than=3600", argument).out
    # They go where they are asked for.
    asked = ("--older-than=3600", "--backend=postgres", "--events-older-than=90", "--json")
    assert run("distlock_cleanup", *asked).json["events"]["events"] == 1


def test_code_may_say_what_a_command_line_does() -> None:
    """Django hands keyword arguments to a command past the parser; a `timedelta` is one of days."""
    happened(4)
    for kept_for in ("never", "30", 30, timedelta(days=30)):
        call_command("distlock_cleanup", events_older_than=kept_for, older_than="3600", batch="5")
        assert kept() == [(Kind.LOST, 4)]
    call_command("distlock_cleanup", events_older_than=timedelta(days=3), older_than=3600)
    assert kept() == []
    for wrong in (-1, "many", timedelta(days=-1), True):
        with pytest.raises(CommandError, match="is not a number of days from 0 to 3660"):
            call_command("distlock_cleanup", events_older_than=wrong)


def test_slips_remove_nothing() -> None:
    """Before anything is looked at; the message says what may be given."""
    happened(1000)
    for days in ("-1", "many", "nan", "1000000", ""):
        with pytest.raises(CommandError, match="is not a number of days from 0 to 3660, or .never"):
            call_command("distlock_cleanup", f"--events-older-than={days}")
    wrongs: list[dict[str, Any]] = [
        {"batch": 0}, {"batch": True}, {"batch": 10_001}, {"older_than": -1}, {"actor": ""},
        {"actor": AnonymousUser()},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(InvalidArgument):
            prune_events(**{"actor": "Ada", **wrong})
    assert len(kept()) == 1


def test_missing_table_is_no_error(postgresql: str) -> None:
    """Locks that are elsewhere need none; nothing is said about events."""
    project = Project(postgresql, DISTLOCK={})
    assert project.manage("distlock_cleanup") == ""
    project.manage("migrate", "--verbosity=0")
    assert "events: 0 events removed." in project.manage("distlock_cleanup")


def test_every_database_forgets(empty: str) -> None:
    """Batch by batch, in a database of its own."""
    migrate(empty)
    rows = LockEvent.objects.using(empty)
    at = timezone.now() - timedelta(days=100)
    rows.bulk_create(LockEvent(at=at, backend="x", key="k", kind=Kind.LOST) for _ in range(5))
    rows.create(backend="x", key="k", kind=Kind.LOST)
    configured = {"x": {"BACKEND": DATABASE, "OPTIONS": {"using": empty}}}
    with override_settings(DATABASE_ROUTERS=[Routed(empty)], DISTLOCK=configured):
        assert prune_events(batch=2, actor="Ada").events == 5
    assert rows.exclude(kind=Kind.CLEANED).count() == 1
