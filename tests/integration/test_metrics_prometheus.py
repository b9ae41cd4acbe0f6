"""What Prometheus gets to know of locks: real ones, scraped from a registry."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.conf import settings
from django.test import override_settings
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from django_distlock import (
    BackendUnavailable,
    FenceRejected,
    InvalidArgument,
    LockLost,
    LockNotAcquired,
    distlock,
    lock_backends,
)
from django_distlock.contrib import prometheus
from django_distlock.contrib.metrics.instruments import INSTRUMENTS
from django_distlock.contrib.metrics.recording import CAUSES, OUTCOMES, REASONS
from django_distlock.core.keys import new_token, own_key
from django_distlock.core.records import LEADER, Holder
from django_distlock.inspection import force_release
from django_distlock.locks.no_lease import tell_requeued
from django_distlock.process import event_log
from django_distlock.scheduling import scheduled
from django_distlock.testing import lose_connection
from tests.contract.helpers import Later, there
from tests.contract.locking import eventually, held_elsewhere, take_away
from tests.shop.models import Account

from .operating import ALIASES, DEAD

#: Those that are shared.
STORES = ALIASES[1:]


class Scraped:
    """A registry of this test, and what a scrape of it says."""

    def __init__(self, **options: Any):
        self.registry = CollectorRegistry()
        prometheus.install(self.registry, **options)

    def value(self, name: str, **labels: str) -> float | None:
        """Return a value; None: there is none."""
        return self.registry.get_sample_value(f"distlock_{name}", labels)

    def text(self) -> str:
        """Return all of it, as Prometheus reads it."""
        return generate_latest(self.registry).decode()


@pytest.fixture
def scraped(key: str) -> Iterator[Scraped]:
    """Give a registry that hears of locks, and tells those of the test apart."""
    made = Scraped(named=[key])
    yield made
    prometheus.uninstall(made.registry)


def of(key: str, alias: str = "memory") -> dict[str, str]:
    """Return the labels of a key."""
    return {"backend": alias, "prefix": key}


def alone(key: str, aliases: list[str]) -> override_settings:
    """Configure these backends, each without the keys of other tests."""
    return override_settings(
        DISTLOCK={each: {**settings.DISTLOCK[each], "KEY_PREFIX": key} for each in aliases}
    )


# What signals tell


def test_acquire_and_release_are_counted_and_timed(key: str, scraped: Scraped) -> None:
    """One outcome, one wait, one hold, whatever the backend."""
    for alias in ALIASES:
        with distlock(f"{key}:1", backend=alias):
            time.sleep(0.05)
        labels = of(key, alias)
        assert scraped.value("acquire_total", outcome="acquired", **labels) == 1, alias
        assert scraped.value("wait_seconds_count", **labels) == 1, alias
        assert scraped.value("hold_seconds_count", **labels) == 1, alias
        assert there(scraped.value("hold_seconds_sum", **labels)) >= 0.05, alias


def test_refusal_says_why(key: str, scraped: Scraped) -> None:
    """A conflict, a wait in vain, a store that is away, and a block that ran all the same."""
    lock = distlock(f"{key}:1", backend="memory", wait=0)
    with held_elsewhere(lock):
        for each in (lock, replace(lock, wait=0.1)):
            with pytest.raises(LockNotAcquired):
                each.acquire()
        with replace(lock, on_conflict="run") as lease:
            assert not lease.held
    with lose_connection("memory"), pytest.raises(BackendUnavailable):
        lock.acquire()
    outcomes = {
        each: scraped.value("acquire_total", outcome=each, **of(key))
        for each in ("conflict", "timeout", "unavailable")
    }
    assert outcomes == {"conflict": 2, "timeout": 1, "unavailable": 1}
    assert scraped.value("bypassed_total", reason="conflict", **of(key)) == 1
    assert scraped.value("bypassed_total", reason="unavailable", **of(key)) == 0


def test_cancelled_acquire_is_an_outcome(key: str, scraped: Scraped) -> None:
    """A task that is cancelled while it waits has neither a grant nor a refusal."""
    lock = distlock(f"{key}:1", backend="memory", wait=None)

    async def cancel() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.2), lock:
                pytest.fail("It was not free.")

    with held_elsewhere(lock):
        asyncio.run(cancel())
    assert scraped.value("acquire_total", outcome="cancelled", **of(key)) == 1


def test_lease_that_was_taken_away_is_lost_and_forced(key: str, scraped: Scraped) -> None:
    """An operator takes a key: that is counted, and so is the loss, with its cause."""
    by: dict[str, Any] = {"actor": "Ada", "reason": "it hangs"}
    for alias in ALIASES:
        lock = distlock(f"{key}:1", backend=alias)
        with pytest.raises(LockLost), lock:
            assert Later(force_release, lock.key, backend=alias, **by).result().is_done
        labels = of(key, alias)
        assert scraped.value("forced_total", **labels) == 1, alias
        assert scraped.value("lost_total", cause="gone", **labels) == 1, alias
    event_log.finish()


def test_session_that_is_gone_is_no_deadline(key: str, scraped: Scraped) -> None:
    """Also where the holder has seen that before it gives the key back."""
    lease = distlock(f"{key}:1", backend="advisory", ttl=60).acquire()
    take_away(lease)
    assert eventually(lambda: lease.is_lost, 10)
    assert lease.release() is False
    assert scraped.value("lost_total", cause="gone", **of(key, "advisory")) == 1


def test_deadline_is_a_cause(key: str, scraped: Scraped) -> None:
    """A lease that nobody renews ends at its deadline."""
    with pytest.raises(LockLost), distlock(f"{key}:1", backend="memory", ttl=0.2, heartbeat=False):
        time.sleep(0.3)
    lost = {cause: scraped.value("lost_total", cause=cause, **of(key)) for cause in CAUSES}
    assert lost == {"deadline": 1, "max_lifetime": 0, "gone": 0, "no_answer": 0}


def test_renewal_says_how_much_was_left(key: str, scraped: Scraped) -> None:
    """By the heartbeat and by hand: two thirds of the ttl, or all of it."""
    with distlock(f"{key}:1", backend="memory", ttl=3):
        assert eventually(
            lambda: (scraped.value("renewal_slack_seconds_count", **of(key)) or 0) >= 1, 10
        )
    by_heartbeat = scraped.value("renewal_slack_seconds_sum", **of(key)) or 0
    # A machine that is busy has had more than one.
    renewals = scraped.value("renewal_slack_seconds_count", **of(key)) or 0
    assert 0 < by_heartbeat < 2.5 * renewals
    with distlock(f"{key}:1", backend="memory", ttl=300, heartbeat=False) as lease:
        lease.extend()
    assert (scraped.value("renewal_slack_seconds_sum", **of(key)) or 0) > by_heartbeat + 200


def test_rejected_write_is_counted(key: str, scraped: Scraped) -> None:
    """A row that has a higher fence refuses, and that is seen."""
    lock = distlock(f"{key}:1", backend="postgres")
    old = lock.acquire()
    take_away(old)
    with lock as new:
        row = Account.objects.create(name=key)
        new.fenced(row)
        with pytest.raises(FenceRejected):
            old.fenced(row)
    assert scraped.value("fence_rejected_total", **of(key, "postgres")) == 1
    assert old.release() is False
    event_log.finish()


def test_rare_counters_are_there_before_they_count(key: str, scraped: Scraped) -> None:
    """From the first acquire on they are 0: a counter that begins with 1 has no increase."""
    with distlock(f"{key}:1", backend="memory"):
        pass
    labels = of(key)
    assert {scraped.value("lost_total", cause=each, **labels) for each in CAUSES} == {0}
    assert {scraped.value("bypassed_total", reason=each, **labels) for each in REASONS} == {0}
    assert {scraped.value("acquire_total", outcome=each, **labels) for each in OUTCOMES} == {0, 1}
    for name in ("fence_rejected_total", "taken_over_total", "forced_total"):
        assert scraped.value(name, **labels) == 0


def test_rare_counters_are_there_where_a_lease_is_only_renewed(key: str) -> None:
    """A process that loads leases of others acquires none, and may lose them."""
    lease = distlock(f"{key}:1", backend="memory", ttl=60).acquire()
    made = Scraped(named=[key])
    lease.extend()
    assert {made.value("lost_total", cause=each, **of(key)) for each in CAUSES} == {0}
    lease.release()
    prometheus.uninstall(made.registry)


# What stands for keys


def acquired(scraped: Scraped, prefix: str) -> float | None:
    """Return how many acquires stand under a prefix."""
    return scraped.value("acquire_total", outcome="acquired", **of(prefix))


def test_what_clients_choose_is_in_no_label(key: str) -> None:
    """Names of persons, of which there is no end, and what is too long or cannot be read."""
    hostile = ["x" * 65, "new\nline", "\u202eright to left"]
    scraped = Scraped(named=hostile)
    for each in ("ada@example.org", "bob@example.org", f"{key}-1", *hostile):
        with distlock(f"{each}:{key}", backend="memory"):
            pass
    with distlock("ada@example.org", backend="memory"):
        pass
    assert acquired(scraped, "other") == 6
    assert acquired(scraped, "none") == 1
    assert not any(each in scraped.text() for each in ("ada", "bob", key, "xxx", "right to"))
    prometheus.uninstall(scraped.registry)


def test_declared_templates_are_told_apart(key: str) -> None:
    """By what they begin with, up to the first colon; neither by fields nor by a part of it."""
    scraped = Scraped()

    @distlock(f"{key}:x:{{number}}", backend="memory")
    def declared(number: int) -> None:
        """Be counted under the text of the template."""

    @distlock(f"{key}-{{number}}:x", backend="memory")
    def field(number: int) -> None:
        """Be counted under no name: a field comes before the colon."""

    for call in (declared, field):
        call(7)
    with distlock(f"{key[:-1]}:x", backend="memory"):
        pass
    assert acquired(scraped, key) == 1
    assert acquired(scraped, "other") == 2
    # Declared when others were known already.
    late = distlock(f"{key}late:{{number}}", backend="memory")(lambda number: None)
    late(7)
    assert acquired(scraped, f"{key}late") == 1
    prometheus.uninstall(scraped.registry)


def test_own_function_names_nothing_of_clients(key: str) -> None:
    """What it makes of a key is shown where a template has it, or a name in the code."""
    scraped = Scraped(prefix_of=lambda each: each.split("/")[0], named=["bulk"])
    distlock(f"{key}/{{number}}", backend="memory")(lambda number: None)(1)
    for each in (f"{key}x/1", "ada@example.org/1", "bulk/1"):
        with distlock(each, backend="memory"):
            pass
    assert [acquired(scraped, each) for each in (key, "bulk", "other")] == [1, 1, 2]
    prometheus.uninstall(scraped.registry)


def test_own_keys_are_told_apart(key: str) -> None:
    """A schedule is told by its name, and by its kind alone where that comes from a caller."""
    scraped = Scraped()

    @scheduled(key, expected=20, hold=False, backend="memory")
    def tick() -> None:
        """Run."""

    @scheduled(key + "-{of}", expected=20, hold=False, backend="memory")
    def tick_of(of: str) -> None:
        """Run for somebody."""

    tick()
    tick_of("jane@example.org")
    assert acquired(scraped, f"\u2329schedule:{key}") == 1
    assert acquired(scraped, "\u2329schedule") == 1
    prometheus.uninstall(scraped.registry)


def test_prefixes_are_bounded(key: str) -> None:
    """Those that come first are told apart, and further ones are one."""
    scraped = Scraped(prefixes=2, named=[f"{key}-{each}" for each in range(5)])
    for each in range(5):
        with distlock(f"{key}-{each}:x", backend="memory"):
            pass
    counts = [
        scraped.value("acquire_total", outcome="acquired", **of(each))
        for each in (f"{key}-0", f"{key}-1", f"{key}-2", "other")
    ]
    assert counts == [1, 1, None, 3]
    prometheus.uninstall(scraped.registry)


def test_bad_options_are_refused() -> None:
    """A mistake is told at once, and nothing is connected."""
    bad: list[dict[str, Any]] = [
        {"named": "invoice"}, {"named": [1]}, {"named": 5}, {"prefixes": -1}, {"prefixes": True},
    ]  # fmt: skip
    for options in bad:
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            prometheus.install(CollectorRegistry(), **options)


def test_second_install_changes_nothing(key: str, scraped: Scraped) -> None:
    """An app that is set up twice counts once."""
    prometheus.install(scraped.registry)
    with distlock(f"{key}:1", backend="memory"):
        pass
    assert scraped.value("acquire_total", outcome="acquired", **of(key)) == 1


def test_refusal_says_for_how_long_the_key_was_held(key: str, scraped: Scraped) -> None:
    """Of one key among many; not what is kept on purpose, and whoever stands by is no timeout."""
    stuck = distlock(f"{key}:1", backend="memory", wait=0)
    with held_elsewhere(stuck), suppress(LockNotAcquired):
        stuck.acquire()
    assert scraped.value("blocked_by_seconds_count", **of(key)) == 1
    with distlock(f"{key}:2", backend="memory", min_hold=60):
        pass
    with suppress(LockNotAcquired):
        distlock(f"{key}:2", backend="memory", wait=0).acquire()
    leads = distlock(f"{key}:3", backend="memory", metadata={"role": "leader"})
    with leads, suppress(LockNotAcquired):
        Later(replace(leads, wait=0.1).acquire).result()
    assert scraped.value("blocked_by_seconds_count", **of(key)) == 1
    assert scraped.value("acquire_total", outcome="standby", **of(key)) == 1
    assert scraped.value("acquire_total", outcome="timeout", **of(key)) == 0


def test_work_that_goes_back_to_its_queue_is_counted(key: str, scraped: Scraped) -> None:
    """By the template of its key, from before the first time, and by why."""
    with distlock(f"{key}:1", backend="memory"):
        pass
    assert scraped.value("requeued_total", reason="conflict", **of(key)) == 0
    tell_requeued("memory", f"{key}:1", LockNotAcquired("taken", key=f"{key}:1"))
    tell_requeued("memory", f"{key}:1", BackendUnavailable("away"))
    tell_requeued("memory", f"{key}:1", BackendUnavailable("away"))
    assert scraped.value("requeued_total", reason="conflict", **of(key)) == 1
    assert scraped.value("requeued_total", reason="unavailable", **of(key)) == 2


def test_work_that_does_not_run_is_counted(key: str, scraped: Scraped) -> None:
    """By its schedule, and by why: others have the tick, or nobody knows."""

    @scheduled(key, expected=30, backend="memory")
    def tick() -> None:
        pass

    @scheduled(key, expected=30, backend="memory")
    async def later() -> None:
        pass

    with lose_connection("memory"):
        tick()
        asyncio.run(later())
    tick()
    tick()
    asyncio.run(later())
    labels = of(own_key(f"schedule:{key}"))
    assert scraped.value("skipped_total", reason="unavailable", **labels) == 2
    assert scraped.value("skipped_total", reason="conflict", **labels) == 2
    assert scraped.value("acquire_total", outcome="acquired", **labels) == 1


def test_gauges_of_a_killed_process_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells the library of a Celery child that is killed; what it counted stays."""
    code = (
        "from prometheus_client import Counter, Gauge\n"
        "gauge = Gauge('held', '', ['backend'], multiprocess_mode='livesum')\n"
        "gauge.labels('default').set(2)\n"
        "Counter('done', '').inc()\n"
        "print(flush=True)\n"
        "input()\n"
    )
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        prometheus._bury_the_dead(tmp_path)
        assert in_files(tmp_path, "held", backend="default") == 2
        child.kill()
    prometheus._bury_the_dead(tmp_path)
    assert in_files(tmp_path, "held", backend="default") is None
    assert in_files(tmp_path, "done_total") == 1


def test_two_scrapes_may_remove_the_same_gauges(tmp_path: Path) -> None:
    """Each finds the file of a process that is gone; the second one has nothing left to remove."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    file = tmp_path / f"gauge_livesum_{child.pid}.db"
    file.touch()
    remove = Path.unlink

    def second(path: Path) -> None:
        remove(path)
        remove(path)

    with patch.object(Path, "unlink", second):
        prometheus._bury_the_dead(tmp_path)
    assert not file.exists()


def test_file_of_a_process_that_was_killed_before_it_wrote_fails_no_scrape(tmp_path: Path) -> None:
    """It stays empty, and nobody can read it; that of a process that lives is about to be filled.

    What was counted stays.
    """
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    empty, alive, counted = (
        tmp_path / name
        for name in (f"counter_{child.pid}.db", f"counter_{os.getpid()}.db",
                     f"histogram_{child.pid}.db")
    )  # fmt: skip
    empty.touch()
    alive.touch()
    counted.write_bytes(b"\0" * 8)
    prometheus._bury_the_dead(tmp_path)
    assert (empty.exists(), alive.exists(), counted.exists()) == (False, True, True)


def in_files(folder: Path, name: str, **labels: str) -> float | None:
    """Return a value of what processes have written to a folder."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
    return registry.get_sample_value(name, labels)


# What is asked at the scrape


def test_process_says_what_it_holds_and_who_waits(key: str, scraped: Scraped) -> None:
    """The gauges follow, without a signal in between."""
    before = scraped.value("active", backend="memory") or 0
    lock = distlock(f"{key}:1", backend="memory", wait=30)
    with lock:
        assert scraped.value("active", backend="memory") == before + 1
        waiter = Later(lock.acquire)
        assert eventually(lambda: scraped.value("waiting", backend="memory") == 1, 10)
    Later(waiter.result(10).release).result()
    assert eventually(lambda: scraped.value("waiting", backend="memory") == 0, 10)
    assert scraped.value("active", backend="memory") == before
    assert scraped.value("heartbeat_lag_seconds", backend="memory") is not None


def test_work_behind_its_lease_is_seen(key: str, scraped: Scraped) -> None:
    """A block that runs on although its lease is over, until it ends."""
    # Other tests may have left leases that are over.
    before = scraped.value("active_past_expiry", backend="memory") or 0
    lock = distlock(f"{key}:1", backend="memory", ttl=1.5, heartbeat=False)
    seen: list[float | None] = []

    def work() -> None:
        with lock as lease:
            seen.append(scraped.value("active_past_expiry", backend="memory"))
            assert eventually(lambda: lease.is_lost, 10)
            seen.append(scraped.value("active_past_expiry", backend="memory"))

    with pytest.raises(LockLost):
        work()
    assert seen == [before, before + 1]
    assert scraped.value("active_past_expiry", backend="memory") == before


def test_stores_say_what_is_held(key: str) -> None:
    """Whoever holds it: the stores are asked."""
    with alone(key, ALIASES):
        leases = [distlock("a:1", backend=alias).acquire() for alias in ALIASES]
        scraped = Scraped()
        for alias in ALIASES:
            assert scraped.value("store_up", backend=alias) == 1, alias
            assert scraped.value("locks_held", backend=alias) == 1, alias
            assert scraped.value("held_past_expiry", backend=alias) == 0, alias
        for lease in leases:
            lease.release()
        prometheus.uninstall(scraped.registry)


def test_record_of_a_dead_holder_is_past_its_expiry(key: str) -> None:
    """It is counted until somebody takes the key; what is kept behind its run is none."""
    databases = [each for each in ALIASES if each in ("sqlite", "mariadb", "postgres")]

    def is_clean(alias: str) -> bool:
        store = lock_backends[alias]
        return store.cleanup(store.clock()) >= 0 and store.read("a:kept") is None

    with alone(key, databases):
        dead = [distlock("a:dead", backend=alias, ttl=0.5).acquire() for alias in databases]
        for alias in databases:
            with distlock("a:kept", backend=alias, min_hold=0.5):
                pass
        time.sleep(0.8)
        scraped = Scraped()
        for lease, alias in zip(dead, databases, strict=True):
            assert scraped.value("held_past_expiry", backend=alias) == 1, alias
            lease.release()
            assert eventually(partial(is_clean, alias))
        prometheus.uninstall(scraped.registry)


def test_oldest_holding_has_its_age_by_prefix(key: str) -> None:
    """Of those that somebody works under: no leader, no queued task, and none behind its run."""
    with alone(key, STORES), ExitStack() as held:
        for alias in STORES:
            store = lock_backends[alias]
            held.enter_context(distlock("led:1", backend=alias, ttl=60, metadata=dict(LEADER)))
            if store.supports_ttl:
                with distlock("kept:1", backend=alias, ttl=60, hold=True):
                    pass
                queued = Holder(host="here", task_id="1")
                store.acquire(own_key("unique:queued"), new_token(), 60, queued)
            held.enter_context(distlock("a:1", backend=alias, ttl=60))
            held.enter_context(distlock("a:2", backend=alias, ttl=60))
        since = {each: there(lock_backends[each].read("a:1")).acquired_at for each in STORES}
        scraped = Scraped(named=["led", "kept", "a", "\u2329unique:queued"])

        def ages() -> dict[str, float]:
            return {
                alias: (lock_backends[alias].clock() - began).total_seconds()
                for alias, began in since.items()
            }

        least = ages()
        text = scraped.text()
        most = ages()
        for alias in STORES:
            found = scraped.value("oldest_holding_seconds", backend=alias, prefix="a")
            assert least[alias] <= there(found) <= most[alias], alias
        prometheus.uninstall(scraped.registry)
    assert text.count("distlock_oldest_holding_seconds{") == len(STORES)


def test_schedule_that_nothing_starts_is_overdue(key: str) -> None:
    """Every process that knows it says so, from the store, until any node has run it."""

    def work() -> str:
        return "done"

    async def work_async() -> str:
        return "done"

    about: dict[str, Any] = {"expected": 20, "margin": 10, "every": 60, "hold": False}
    called = {each: scheduled(f"{key}-{each}", backend=each, **about)(work) for each in STORES}
    awaited = {
        each: scheduled(f"{key}-{each}-async", backend=each, **about)(work_async) for each in STORES
    }
    names = [(each, f"{key}-{each}{more}") for each in STORES for more in ("", "-async")]

    def late() -> list[float]:
        # What a scrape was told is good for some seconds.
        with override_settings(DISTLOCK={each: settings.DISTLOCK[each] for each in STORES}):
            scraped = Scraped()
            found = [
                scraped.value("schedule_overdue_seconds", **of(own_key(f"schedule:{name}"), alias))
                for alias, name in names
            ]
            prometheus.uninstall(scraped.registry)
            return [there(each) for each in found]

    assert late() == [0] * len(names), "new ones count from now on"
    for alias, name in names:
        store = lock_backends[alias]
        long_ago = store.clock() - timedelta(seconds=60 + 30 + 500)
        store.notes.put(own_key(f"schedule:{name}"), int(long_ago.timestamp() * 1000), 3600)
    found = late()
    assert 500 <= min(found) <= max(found) < 560
    for alias in STORES:
        assert called[alias]() == "done"
        assert asyncio.run(awaited[alias]()) == "done"
    assert late() == [0] * len(names)


def test_store_that_fails_is_a_number_and_no_failed_scrape(key: str) -> None:
    """Nobody listens where the store should be: 0, beside one that answers."""
    broken = {"BACKEND": settings.DATABASE_BACKEND, "OPTIONS": {"using": "nowhere"}}
    both = {"away": DEAD, "broken": broken, "memory": settings.DISTLOCK["memory"]}
    with override_settings(DISTLOCK=both):
        scraped = Scraped()
        assert scraped.value("store_up", backend="away") == 0
        assert scraped.value("store_up", backend="broken") == 0
        assert scraped.value("store_up", backend="memory") == 1
        assert scraped.value("locks_held", backend="away") is None
        prometheus.uninstall(scraped.registry)


def test_store_that_fails_at_once_leaves_the_others_their_time(key: str) -> None:
    """The locks of a store are counted, though another one has refused before it answered."""
    slow = {"BACKEND": "tests.integration.brittle_backend.SlowListBackend"}
    with override_settings(DISTLOCK={"away": DEAD, "slow": slow}), distlock(key, backend="slow"):
        scraped = Scraped()
        assert scraped.value("store_up", backend="away") == 0
        assert scraped.value("locks_held", backend="slow") == 1
        prometheus.uninstall(scraped.registry)


def test_stores_are_asked_once_in_a_while(key: str) -> None:
    """Two scrapes in a row are one question; and one process of many is enough to ask."""
    # What other tests have left on other backends is none of it.
    with override_settings(DISTLOCK={key: settings.DISTLOCK["memory"]}):
        scraped = Scraped()
        assert scraped.value("locks_held", backend=key) == 0
        with distlock("a:1", backend=key):
            assert scraped.value("locks_held", backend=key) == 0
            assert scraped.value("active", backend=key) == 1
        prometheus.uninstall(scraped.registry)
    scraped = Scraped(stores=False)
    assert scraped.value("store_up", backend="memory") is None
    assert scraped.value("active", backend="memory") is not None
    prometheus.uninstall(scraped.registry)


def test_every_instrument_is_exported(scraped: Scraped) -> None:
    """With its name, its kind and what it says."""
    text = scraped.text()
    for each in INSTRUMENTS:
        name = each.prometheus_name + ("_total" if each.kind == "counter" else "")
        assert f"# TYPE {name} {each.kind}\n" in text
        assert f"# HELP {name} {each.help}\n" in text
