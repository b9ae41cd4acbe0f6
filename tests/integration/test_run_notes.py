"""Notes about finished runs stand in a table of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.handler import lock_backends
from django_distlock.models import HeldLock, RunNote
from tests.contract.aliases import DATABASE, locks_on

from .databases import ask, every_statement, migrate

NAME = "celery:5f6d:0"


@contextmanager
def opened(using: str, **settings: Any) -> Iterator[BaseLockBackend]:
    """Open a backend on a database."""
    with locks_on(using, KEY_PREFIX="distlock", OPTIONS={"using": using}, **settings) as alias:
        yield lock_backends[alias]


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
    monkeypatch.setattr("random.randrange", lambda _: 1)
    with opened(using, BACKEND=backend) as store:
        store.notes.put(NAME, 7, 60)
        store.notes.put("over", 7, 0.0)
        assert store.notes.get(NAME) == 7
        assert locked(using) == []
        # Also where no record of a lease is ever left.
        assert store.cleanup(store.clock(), 10) == 1
        assert store.notes.get(NAME) == 7
        # One in many notes removes what is over, without any command.
        store.notes.put("over", 9, 0.0)
        monkeypatch.setattr("random.randrange", lambda _: 0)
        store.notes.put("another", 8, 60)
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
