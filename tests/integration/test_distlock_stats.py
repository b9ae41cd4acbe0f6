"""`manage.py distlock_stats`: how much there is of everything, on each store."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.test import override_settings

from django_distlock import lock_backends
from django_distlock.backends import counting
from django_distlock.core.records import Holder
from django_distlock.models import FenceCounter, HeldLock
from tests.contract.aliases import DATABASE
from tests.contract.helpers import take
from tests.settings import REDIS_BACKEND, REDIS_URL

from .databases import ask, every_statement
from .operating import DEAD, run
from .projects import Project

#: The module; its function hides it.
of_inspection = sys.modules["django_distlock.inspection.summary"]


def stats(alias: str) -> Any:
    """Return what the command says about a backend."""
    ran = run("distlock_stats", f"--backend={alias}", "--json")
    assert (ran.status, ran.err) == (0, "")
    document = ran.json
    assert document["failures"] == []
    (backend,) = document["backends"]
    return backend


def fill(alias: str, key: str) -> int:
    """Hold two keys, leave a third one to its end, wait for one; return the highest fence."""
    store = lock_backends[alias]
    grants = [take(store, f"{key}:{name}", 60) for name in "abc"]
    store.release(grants[2])
    store.waiters.note(f"{key}:a", Holder(host="web-7"), 60)
    return max(each.fence for each in grants)


def test_each_database_counts_what_is_its_own(empty: str, key: str) -> None:
    """Held, over, waiting, counters, and the highest fence: of a backend's own prefix alone."""
    Project(empty).manage("migrate", "--verbosity=0")
    others = {
        name: {"BACKEND": DATABASE, "KEY_PREFIX": name, "OPTIONS": {"using": empty}}
        for name in ("mine", "their", "fresh")
    }
    with override_settings(DISTLOCK=others):
        fill("mine", key)
        fill("their", key)
        mine = lock_backends["mine"]
        highest = take(mine, f"{key}:c", 60)
        ended = mine.clock() - timedelta(seconds=5)
        rows = HeldLock.objects.using(empty).filter(storage_key=f"mine:{key}:c")
        assert rows.update(expires_at=ended, free_at=ended) == 1
        told = stats("mine")
        assert (told["held"], told["expired"], told["waiters"], told["counters"]) == (2, 1, 1, 3)
        assert told["highest"] == highest.fence
        assert (told["estimated"], told["warnings"]) == ([], [])
        assert stats("their")["expired"] == 0
        assert told["sizes"]["database"] == empty
        tables = {each["name"]: each for each in told["sizes"]["tables"]}
        if connections[empty].vendor == "sqlite":
            assert told["sizes"]["bytes"] > 0
        else:
            assert len(tables) == 8
            assert tables["django_distlock_fencecounter"]["bytes"] > 0
        # Zeros, and no fence, are no error. What is noted beside the locks is none.
        lock_backends["fresh"].notes.put("done", 7, 60)
        told = stats("fresh")
    assert (told["held"], told["expired"], told["waiters"], told["counters"]) == (0, 0, 0, 0)
    assert told["highest"] is None


@pytest.mark.parametrize("alias", ["redis", "redis_cluster"])
def test_redis_counts_in_a_walk(alias: str, key: str) -> None:
    """Of its own prefix alone, and always about: others come and go meanwhile."""
    configured = {
        "mine": {**settings.DISTLOCK[alias], "KEY_PREFIX": key},
        "theirs": {**settings.DISTLOCK[alias], "KEY_PREFIX": f"{key}other"},
    }
    with override_settings(DISTLOCK=configured):
        highest = fill("mine", "k")
        fill("theirs", "k")
        told = stats("mine")
    assert (told["held"], told["expired"], told["waiters"], told["counters"]) == (2, 0, 1, 3)
    assert told["highest"] == highest
    assert told["estimated"] == ["held", "waiters", "counters", "highest"]
    assert told["memory"] > 100_000
    assert told["sizes"] is None


def test_session_locks_are_counted(key: str) -> None:
    """What a session holds is no row, and is counted by listing it."""
    before = stats("advisory")["held"]
    store = lock_backends["advisory"]
    grant = take(store, key, 60)
    told = stats("advisory")
    store.release(grant)
    assert before < told["held"]
    assert (told["expired"], told["waiters"]) == (None, None)
    assert told["highest"] >= grant.fence


def test_large_tables_are_estimated(
    postgresql: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL does not scan them: the numbers are about so, and marked."""
    Project(postgresql).manage("migrate", "--verbosity=0")
    fences = FenceCounter.objects.using(postgresql)
    fences.bulk_create(
        FenceCounter(storage_key=f"distlock:{key}:{number}", key=f"{key}:{number}", fence=number)
        for number in range(1, 2001)
    )
    ask(postgresql, "ANALYZE django_distlock_fencecounter")
    monkeypatch.setattr(counting, "COUNTED", 1000)
    monkeypatch.setattr(of_inspection, "MANY_COUNTERS", 1500)
    configured = {"default": {"BACKEND": DATABASE, "OPTIONS": {"using": postgresql}}}
    with override_settings(DISTLOCK=configured):
        with every_statement(postgresql, _no_scan):
            ran = run("distlock_stats", "--json")
        (told,) = ran.json["backends"]
        assert told["estimated"] == ["counters", "highest"]
        assert 1800 <= told["counters"] <= 2200
        assert 1800 <= told["highest"] <= 2000
        (warning,) = told["warnings"]
        assert "more than 1500" in warning
        assert warning in ran.err
        text = run("distlock_stats")
        assert f"about {told['counters']}" in text.out
        assert warning in text.err
        # That many, and none too many.
        monkeypatch.setattr(of_inspection, "MANY_COUNTERS", told["counters"])
        assert run("distlock_stats").err == ""


def _no_scan(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
    counts = "COUNT(" in sql or "MAX(" in sql
    assert not (counts and '."django_distlock_fencecounter"' in sql), sql
    return execute(sql, params, many, context)


def test_dead_tuples_and_growth_are_told(postgresql: str, key: str) -> None:
    """What a vacuum has to do, and how many counters were made."""
    Project(postgresql).manage("migrate", "--verbosity=0")
    configured = {"default": {"BACKEND": DATABASE, "OPTIONS": {"using": postgresql}}}
    with override_settings(DISTLOCK=configured):
        fill("default", key)
        ask(postgresql, "SELECT pg_stat_force_next_flush()")
        connections[postgresql].close()
        tables = {each["name"]: each for each in stats("default")["sizes"]["tables"]}
        text = run("distlock_stats").out
    assert tables["django_distlock_fencecounter"]["made"] == 3
    assert tables["django_distlock_heldlock"]["dead"] >= 1
    assert "DEAD" in text
    assert "Made: since" in text


def test_spoiled_counter_of_redis_hides_nothing(key: str) -> None:
    """A key of another type, where a fence was to be, is counted; the others are read."""
    store: Any = lock_backends["redis"]
    name = f"{store.key_prefix}:fence:{{{'x' * 22}}}:{key}"
    store.store.command("LPUSH", name, "spoiled")
    try:
        highest = fill("redis", key)
        assert stats("redis")["highest"] >= highest
    finally:
        store.store.command("DEL", name)


def test_table_is_for_people(key: str) -> None:
    """A line for each backend, and the tables of a database once."""
    ran = run("distlock_stats", "--backend=postgres", "--backend=postgres_orm", "--backend=redis")
    head, *lines = ran.out.split("\n\n")[0].splitlines()
    assert head.split()[:5] == ["BACKEND", "HELD", "EXPIRED", "WAITING", "COUNTERS"]
    assert [line.split()[0] for line in lines] == ["postgres", "postgres_orm", "redis"]
    assert ran.out.count("django_distlock_seenfence") == 1


def test_backend_that_cannot_be_counted_is_said() -> None:
    """Status 69 behind the others where it is silent; alone, in memory or unknown, an error."""
    both = {"dead": DEAD, "redis": {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": REDIS_URL}}}
    with override_settings(DISTLOCK=both):
        ran = run("distlock_stats", "--json")
    assert ran.status == 69
    assert [each["backend"] for each in ran.json["backends"]] == ["redis"]
    assert [each["backend"] for each in ran.json["failures"]] == ["dead"]
    ran = run("distlock_stats", "--backend=memory")
    assert ran.status == 1
    assert "in process memory" in ran.err
    assert run("distlock_stats", "--backend=nowhere").status == 1
