"""`inspection.summary`: how many keys are in which state, on each store."""

from __future__ import annotations

import json
from time import sleep as pause
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from django_distlock import BackendUnavailable, InvalidArgument, lock_backends
from django_distlock.backends import counting
from django_distlock.backends.redis import sampling
from django_distlock.core.records import Grant, Holder
from django_distlock.inspection import Summary, summary
from tests.contract.aliases import DATABASE
from tests.contract.helpers import take, there
from tests.contract.locking import eventually

from .databases import ask, migrate, statements_on
from .operating import DEAD

#: Of how many keys are held in `fill`.
HELD = 7
STATES = ("ending_soon", "past_expiry", "settled", "no_expiry", "stop_requested")


def fill(alias: str, key: str) -> None:
    """Hold a key in each state, and two in none; wait for one, and leave one."""
    store = lock_backends[alias]
    take(store, f"{key}:held:1", 600)
    take(store, f"{key}:held:2", 600)
    take(store, f"{key}:soon", 30)
    take(store, f"{key}:endless", None)
    take(store, f"{key}:stop", 600)
    store.request_stop(f"{key}:stop")
    store.release(take(store, f"{key}:settled", 600), 500)
    take(store, f"{key}:over", 600)
    store.request_stop(f"{key}:over", 0.0)
    store.release(take(store, f"{key}:left", 600))
    store.waiters.note(f"{key}:held:1", Holder(host="web-7"), 60)


def numbers(found: Summary) -> dict[str, int]:
    """Return what is counted by state."""
    return {name: getattr(found, name).number for name in STATES}


def assert_told(found: Summary) -> None:
    """Check the numbers of `fill`."""
    # The one that is past its expiry has a second; behind it, it is still one that nobody gave
    # back, unless the store removes it.
    assert found.held.number in (HELD, HELD - 1)
    assert found.held.number - HELD <= found.past_expiry.number - 1 <= 0
    assert {**numbers(found), "past_expiry": 1} == dict.fromkeys(STATES, 1)


def assert_strain_told(alias: str, key: str) -> None:
    """Check which keys most wait for, and the lease whose renewal is the longest ago."""
    store = lock_backends[alias]
    assert summary(alias).overdue is None
    for _ in range(3):
        store.waiters.note(f"{key}:held:2", Holder(host="web-7"), 60)
    grant = store.extend(take(store, f"{key}:beating", 600), 4)
    assert isinstance(grant, Grant)
    pause(1)
    found = summary(alias)
    assert found.most_waited == ((f"{key}:held:2", 3), (f"{key}:held:1", 1))
    assert found.as_json()["most_waited"][0] == {"key": f"{key}:held:2", "waiting": 3}
    assert 0.25 <= there(found.overdue) <= 1.25
    assert store.release(grant)


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def database(request: pytest.FixtureRequest) -> str:
    """Give the alias of an empty, migrated database."""
    using: str = request.getfixturevalue(request.param)
    migrate(using)
    return using


def test_each_database_counts_states_in_one_statement(database: str, key: str) -> None:
    """Of a backend's own prefix alone, exactly; notes beside the locks are none."""
    options = {"using": database}
    configured = {
        name: {"BACKEND": DATABASE, "KEY_PREFIX": name, "OPTIONS": options, "MAX_TTL": 6000}
        for name in ("mine", "theirs")
    }
    with override_settings(DISTLOCK=configured):
        fill("theirs", key)
        lock_backends["mine"].notes.put("done", 7, 60)
        fill("mine", key)
        with statements_on(database) as queries:
            found = summary("mine", soon=60)
        assert_strain_told("mine", key)
    assert_told(found)
    assert there(found.waiting).number == 1
    counts = [each for each in queries if "COUNT(" in each]
    assert len(counts) == 3  # The waiters are a table of their own, asked for all and for most.
    told = found.as_json()
    assert json.loads(json.dumps(told)) == told
    assert (told["estimated"], told["soon"], told["backend"]) == ([], 60.0, "mine")
    assert told["held"] == found.held.number


@pytest.mark.parametrize("alias", ["redis", "redis_cluster"])
def test_redis_looks_at_a_sample(alias: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys where there are few; a part of them otherwise, which stands for the whole."""
    monkeypatch.setattr(sampling, "LOOKED_AT", 100_000_000)
    configured = {
        "mine": {**settings.DISTLOCK[alias], "KEY_PREFIX": key},
        "theirs": {**settings.DISTLOCK[alias], "KEY_PREFIX": f"{key}other"},
    }
    with override_settings(DISTLOCK=configured):
        fill("theirs", "k")
        fill("mine", "k")
        found = summary("mine", soon=60)
        assert_told(found)
        assert there(found.waiting).number == 1
        assert found.as_json()["estimated"] == []
        assert_strain_told("mine", "k")


def test_sample_stands_for_the_whole(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three thousand locks, about that many are told, by looking at some of their keys."""
    monkeypatch.setattr(sampling, "LOOKED_AT", 1000)
    configured = {"mine": {**settings.DISTLOCK["redis"], "KEY_PREFIX": key}}
    with override_settings(DISTLOCK=configured):
        store: Any = lock_backends["mine"]
        for number in range(3000):
            take(store, f"{number}", 60)
        asked: list[int] = []
        before = store.records_on

        def records(line: Any, names: Any) -> Any:
            asked.append(len(names))
            return before(line, names)

        monkeypatch.setattr(store, "records_on", records)
        found = summary("mine")
        for number in range(3000):
            store.force_release(f"{number}")
    assert 0 < sum(asked) < 1500
    assert 2000 < found.held.number < 4500
    assert not found.held.is_exact


def test_large_tables_are_estimated(
    postgresql: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL says what it expects, and that is marked; nothing is counted."""
    migrate(postgresql)
    configured = {"default": {"BACKEND": DATABASE, "OPTIONS": {"using": postgresql}}}
    with override_settings(DISTLOCK=configured):
        for number in range(200):
            take(lock_backends["default"], f"{key}:{number}", 600)
        ask(postgresql, "ANALYZE django_distlock_heldlock")
        monkeypatch.setattr(counting, "COUNTED", 100)
        with statements_on(postgresql) as queries:
            found = summary()
    assert 150 <= found.held.number <= 250
    assert not found.held.is_exact
    assert "held" in found.as_json()["estimated"]
    counted = [each for each in queries if each.startswith("SELECT COUNT(")]
    assert all("django_distlock_heldlock" not in each for each in counted)


@pytest.mark.parametrize("alias", ["memory", "advisory"])
def test_locks_elsewhere_are_counted_page_by_page(alias: str, key: str) -> None:
    """Where the store is a process, or sessions; who waits is not known there."""
    store = lock_backends[alias]
    before = summary(alias)
    grant = take(store, key, 600)
    assert eventually(lambda: summary(alias).held.number == before.held.number + 1, 20)
    found = summary(alias)
    assert (found.waiting, found.held.is_exact) == (None, True)
    if alias == "advisory":
        assert found.no_expiry.number == 0
    store.release(grant)


def test_slips_are_refused() -> None:
    """Before the store is asked; and a store that does not answer is no empty one."""
    with pytest.raises(InvalidArgument, match="soon"):
        summary("memory", soon=-1)
    with override_settings(DISTLOCK={"default": DEAD}), pytest.raises(BackendUnavailable):
        summary()
