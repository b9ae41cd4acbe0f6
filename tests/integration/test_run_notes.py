"""Notes about finished runs stand in a table of their own, and are moved there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from django_distlock import vendors
from django_distlock.backends import notes
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.handler import lock_backends
from django_distlock.models import HeldLock, RunNote
from tests.contract.aliases import DATABASE, locks_on
from tests.contract.helpers import listed, take

from .databases import ask, every_statement, migrate

NAME = "celery:5f6d:0"
#: What the release before wrote into the host's column of the table of locks.
OLD_HOST = "\u2126note"


@pytest.fixture
def before(empty: str) -> str:
    """Give the alias of a database of one's own as the release before made it, of each kind."""
    migrate(empty, "0006")
    return empty


@contextmanager
def opened(using: str, **settings: Any) -> Iterator[BaseLockBackend]:
    """Open a backend on a database."""
    with locks_on(using, KEY_PREFIX="distlock", OPTIONS={"using": using}, **settings) as alias:
        yield lock_backends[alias]


@pytest.fixture
def store(before: str) -> Iterator[BaseLockBackend]:
    """Give a backend there."""
    with opened(before) as store:
        yield store


def write_as_before(using: str, name: str, fence: int, seconds: float) -> None:
    """Write a note as a worker of the release before does."""
    now = vendors.of(using).now()
    ends = now + timedelta(seconds=seconds)
    HeldLock.objects.using(using).create(
        storage_key=f"distlock\u2126note:{name}",
        key=name,
        token=new_token(),
        fence=fence,
        ttl=seconds,
        acquired_at=now,
        renewed_at=now,
        expires_at=ends,
        free_at=ends,
        holder_host=OLD_HOST,
    )


def read_as_before(using: str, name: str) -> int | None:
    """Look for a note as a worker of the release before does."""
    record = HeldLock.objects.db_manager(using).read(pk=f"distlock\u2126note:{name}")
    return None if record is None else record.fence


def locked(using: str) -> list[str]:
    """Return the keys of all rows of the table of locks."""
    return list(HeldLock.objects.using(using).order_by("pk").values_list("pk", flat=True))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("postgresql", DATABASE),
        ("sqlite", DATABASE),
        ("mysql", DATABASE),
        ("postgresql", "django_distlock.backends.advisory.AdvisoryBackend"),
    ],
    ids=["postgresql", "sqlite", "mysql", "sessions"],
)
def test_note_is_no_row_of_the_locks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, backend: str
) -> None:
    """Whatever is noted, the table of locks stays as small as the locks are."""
    using = request.getfixturevalue(kind)
    migrate(using)
    with opened(using, BACKEND=backend) as store:
        store.note(NAME, 7, 60)
        store.note("over", 7, 0.0)
        assert store.noted(NAME) == 7
        assert locked(using) == []
        # Also where no record of a lease is ever left.
        assert store.cleanup(store.clock(), 10) == 1
        assert store.noted(NAME) == 7
        # One in many notes removes what is over, without any command.
        store.note("over", 9, 0.0)
        monkeypatch.setattr("random.randrange", lambda _: 0)
        store.note("another", 8, 60)
    rows = RunNote.objects.using(using).order_by("fence")
    assert [row.fence for row in rows] == [7, 8]


def test_cleaning_reads_no_more_than_it_removes(postgresql: str) -> None:
    """What is over is found by an index, and not by a look at each note that is kept."""
    migrate(postgresql)
    ask(
        postgresql,
        "INSERT INTO django_distlock_runnote SELECT 'note:' || n, 1,"
        " (extract(epoch FROM now()) * 1000000)::bigint + (n - 100) * 1000000::bigint"
        " FROM generate_series(1, 20000) n",
    )
    ask(postgresql, "ANALYZE django_distlock_runnote")
    plans: list[str] = []

    def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "runnote" in sql:
            execute(f"EXPLAIN {sql}", params, many, context)
            plans.extend(line for (line,) in context["cursor"].fetchall())
        return execute(sql, params, many, context)

    with opened(postgresql) as store, every_statement(postgresql, explain):
        assert store.cleanup(store.clock(), 50) == 50
        assert store.cleanup(store.clock(), 100) < 60
    assert any("Index" in each and "until" in each for each in plans)
    assert not [each for each in plans if "Seq Scan" in each]
    (left,) = ask(postgresql, "SELECT count(*) FROM django_distlock_runnote")[0]
    assert 19_880 < left < 19_910


def test_migration_moves_notes_there_and_back(before: str, store: BaseLockBackend) -> None:
    """What was noted is found, locks stay where they are, and what is over goes."""
    held = take(store, "invoice:42", 60)
    write_as_before(before, NAME, 7, 600)
    write_as_before(before, "over", 6, -1)
    migrate(before, "0008")
    assert locked(before) == [store.storage_name("invoice:42")]
    assert (store.noted(NAME), store.noted("over")) == (7, None)
    assert listed(store) == ["invoice:42"]
    later = "celery:é:1"
    store.note(later, 8, 600)
    migrate(before, "0006")
    assert [read_as_before(before, each) for each in (NAME, later)] == [7, 8]
    assert len(locked(before)) == 3
    migrate(before, "0008")
    assert (store.noted(NAME), store.noted(later)) == (7, 8)
    assert store.release(held) is True


def test_workers_of_both_releases_see_each_others_notes(
    before: str, store: BaseLockBackend
) -> None:
    """For a day behind the migration, nobody runs what the others have finished."""
    take(store, "invoice:42", 60)
    migrate(before, "0008")
    write_as_before(before, "theirs", 7, 600)
    assert store.noted("theirs") == 7
    store.note("ours", 8, 600)
    store.note("ours", 9, 600)
    assert (store.noted("ours"), read_as_before(before, "ours")) == (9, 9)
    # When the day is over, the table of locks gets nothing any more, and what is there goes.
    RunNote.objects.using(before).filter(pk=notes.MOVING).update(until=store.clock())
    store.note("ours now", 10, 600)
    assert (store.noted("ours now"), read_as_before(before, "ours now")) == (10, None)
    HeldLock.objects.using(before).filter(holder_host=OLD_HOST).update(
        free_at=store.clock(), expires_at=store.clock()
    )
    store.cleanup(store.clock(), 100)
    assert locked(before) == [store.storage_name("invoice:42")]
