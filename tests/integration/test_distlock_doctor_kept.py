"""What the doctor finds among the locks, fences, waiters and pauses that a store keeps."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
from django.conf import settings
from django.test import override_settings

from django_distlock import lock_backends
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.keys import UNIQUE_PREFIX, own_key
from django_distlock.core.records import Holder
from django_distlock.inspection.diagnosis import Mark, kept, told
from django_distlock.inspection.diagnosis.findings import Notes
from django_distlock.models import HeldLock
from django_distlock.process.host import current_holder
from tests.contract.aliases import DATABASE
from tests.contract.helpers import take
from tests.contract.locking import eventually
from tests.processes import spawn

from .databases import ask, here, migrate
from .operating import run
from .test_distlock_doctor_stores import look

ALIAS = "examined"
PATIENCE = 60
ELSEWHERE = Holder(host="web-7", boot_id="other", process="gunicorn", pid=1)


class StrangeBackend(MemoryBackend):
    """A backend that this package does not know, which says that all processes see its locks."""

    distributed: ClassVar[bool] = True


@contextmanager
def examined(like: str, prefix: str, **more: Any) -> Iterator[BaseLockBackend]:
    """Configure a backend like that of an alias, with a key prefix of its own."""
    with override_settings(
        DISTLOCK={ALIAS: {**settings.DISTLOCK[like], "KEY_PREFIX": prefix, **more}}
    ):
        yield lock_backends[ALIAS]


@pytest.fixture(params=["postgres", "redis", "mariadb", "sqlite", "redis_cluster"])
def store(request: pytest.FixtureRequest, key: str) -> Iterator[BaseLockBackend]:
    """Give a backend of each kind in turn, in which only this test has anything."""
    with examined(here(request.param), key) as made:
        yield made


@pytest.fixture
def dead() -> Holder:
    """Give a process of this host that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    # Whoever gets its number now has begun later.
    return replace(current_holder(), pid=process.pid, started_at=1.0)


def scan(store: BaseLockBackend, limit: int = 1000) -> Notes:
    """Look into a store."""
    notes = Notes(store.alias)
    kept.scan(store, notes, limit)
    return notes


def ids(store: BaseLockBackend) -> list[str]:
    """Look into a store; give the ids of what is found."""
    return [str(each.id) for each in scan(store).findings]


def found(store: BaseLockBackend, number: str, level: str = "warning") -> dict[str, Any]:
    """Look into a store; give the one finding with an id and a level."""
    every = map(told, scan(store).findings)
    wanted = (f"distlock.{number}", level, ALIAS)
    (finding,) = [each for each in every if (each["id"], each["level"], each["backend"]) == wanted]
    return finding


# Holders and waiters


def test_sound_store_until_its_keys_are_fought_for_or_paused(
    store: BaseLockBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks of live processes, those of other hosts, short pauses and a waiter are no finding.

    D003 names a key for which many wait, and no other; D007 a key with a long pause.
    """
    take(store, "mine", 60, holder=current_holder())
    # A process of the same number elsewhere proves nothing, nor does one before a restart.
    take(store, "theirs", 60, holder=ELSEWHERE)
    take(store, "before", 60, holder=replace(current_holder(), boot_id="before/1", pid=2**22 - 1))
    store.waiters.note("mine", current_holder(), 60)
    store.pause("ledger", store.clock() + timedelta(minutes=50), "Ada")
    assert ids(store) == []
    store.pause("report", store.clock() + timedelta(hours=30), "Ada")
    paused = found(store, "D007")
    assert paused["keys"] == ["report"]
    assert "by Ada for another 1 d 5 h" in paused["message"]
    store.pause("report", None)
    assert ids(store) == []
    monkeypatch.setattr(kept, "MANY_WAITERS", 6)
    for number in range(6):
        store.waiters.note("invoice:42", Holder(host=f"web-{number}"), 60)
        if number:
            store.waiters.note("invoice:43", Holder(host=f"web-{number}"), 60)
    wanted = found(store, "D003")
    assert wanted["keys"] == ["invoice:42"]
    assert "'invoice:42' (6)" in wanted["message"]


def test_what_dead_processes_leave(store: BaseLockBackend, dead: Holder) -> None:
    """D005, an error where a key never becomes free by itself; D002: notes of who waits no more."""
    take(store, "alive", 60, holder=current_holder())
    store.waiters.note("alive", current_holder(), 60)
    take(store, "invoice:42", 60, holder=dead)
    take(store, "ledger", None, holder=dead)
    # Its process is gone on purpose.
    store.release(take(store, "settled", 60, holder=dead), 60)
    store.waiters.note("invoice:1", dead, 60)
    leased, endless = found(store, "D005"), found(store, "D005", "error")
    assert (leased["keys"], endless["keys"]) == (["invoice:42"], ["ledger"])
    assert "1 key held by processes of this host that have ended" in leased["message"]
    assert "free at " in leased["message"]
    waiter = found(store, "D002")
    assert waiter["keys"] == ["invoice:1"]
    assert "0 have expired, 1 of processes of this host that have ended" in waiter["message"]


def test_process_that_stands_still_is_not_dead(key: str) -> None:
    """It may go on, and needs its locks then; its number in another time is no holder."""
    with examined("redis", key) as made, subprocess.Popen(["sleep", "60"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            stopped = replace(current_holder(), pid=process.pid, started_at=None)
            take(made, "invoice:42", 60, holder=stopped)
            made.waiters.note("invoice:43", stopped, 60)
            assert ids(made) == []
            take(made, "ledger", 60, holder=replace(stopped, started_at=1.0))
            assert found(made, "D005")["keys"] == ["ledger"]
        finally:
            process.kill()


def leave(like: str, prefix: str) -> None:
    """Hold what no process has to live for, and a lock; run in a process that is killed."""
    from django_distlock.contrib.celery.beats import Marks
    from django_distlock.contrib.jobs import JobLock

    with examined(like, prefix) as made:
        take(made, own_key(f"{UNIQUE_PREFIX}report:1"), 3600, holder=current_holder())
        job = JobLock(key=own_key("unique:report:2"), backend=ALIAS, task_id="t2", is_queued=True)
        job.acquire()._let_go()
        Marks(made, own_key("celery-beat:shop")).learn("monthly", datetime.now(UTC), 0)
        take(made, "invoice:42", 3600, holder=current_holder())
        print("done")
        input()


@pytest.mark.parametrize("like", ["postgres", "redis"])
def test_what_no_process_holds_is_not_dead(like: str, key: str) -> None:
    """A queued task, one that a worker left to its retry, the mark of a beat: a killed process's.

    Its lock is told of all the same.
    """
    target = "tests.integration.test_distlock_doctor_kept:leave"
    with spawn(target, like, key) as process:
        process.wait_for("done")
        os.kill(process.popen.pid, signal.SIGKILL)
        process.popen.wait(PATIENCE)
    with examined(like, key) as made:
        assert found(made, "D005")["keys"] == ["invoice:42"]
        text = "4 locks checked, 2 of them held by queued tasks"
        assert look(scan(made), "locks") == (Mark.OK, text)


@pytest.mark.parametrize("alias", ["postgres", "mariadb"])
def test_what_is_over_and_was_not_removed(alias: str, key: str) -> None:
    """D004 of leases and D002 of waiters; after a cleanup nothing is found."""
    with examined(here(alias), key) as made:
        made.waiters.note("invoice:1", ELSEWHERE, 0.1)
        for number in range(5):
            take(made, f"invoice:{number}", 0.1, holder=current_holder())
        made.release(take(made, "settled", 60), 0.1)
        assert eventually(
            lambda: all(made.read(f"invoice:{n}") is None for n in range(5)), PATIENCE
        )
        finding = found(made, "D004")
        assert "5 leases expired without a release" in finding["message"]
        assert len(finding["keys"]) == 3
        assert finding["message"].endswith("…")
        assert "1 have expired" in found(made, "D002")["message"]
        assert run("distlock_cleanup", f"--backend={ALIAS}").status == 0
        assert ids(made) == []


def is_over(made: BaseLockBackend, key: str) -> bool:
    """Say whether a lease is over, and perhaps its grace as well."""
    record = made.read(key)
    return record is None or record.expires_at is None or record.expires_at <= made.clock()


def test_lock_in_its_grace(key: str) -> None:
    """D004: its lease is over, nobody has renewed it, and nobody else may have it yet."""
    with examined("redis", key) as made:

        def is_seen() -> bool:
            # The grace lasts for a second: on a busy machine it may be over before the look.
            take(made, "invoice:42", 0.1)
            assert eventually(lambda: is_over(made, "invoice:42"), PATIENCE)
            messages = [each.msg for each in scan(made).findings]
            made.force_release("invoice:42")
            return any("in the grace period: 'invoice:42'" in each for each in messages)

        assert eventually(is_seen, PATIENCE)


# Fences and clocks


def test_fence_above_its_counter(postgresql: str, key: str) -> None:
    """D006: the counters are gone while a lock is held. An error: fences come again."""
    migrate(postgresql)
    configured = {ALIAS: {"BACKEND": DATABASE, "OPTIONS": {"using": postgresql}}}
    with override_settings(DISTLOCK=configured):
        made = lock_backends[ALIAS]
        grant = take(made, key, 60)
        assert ids(made) == []
        ask(postgresql, "TRUNCATE django_distlock_fencecounter")
        finding = found(made, "D006", "error")
    assert finding["keys"] == [key]
    assert f"held with {grant.fence}, counter at 0" in finding["message"]


@pytest.mark.parametrize("alias", ["redis", "redis_cluster"])
def test_fence_counter_of_redis_is_lost(alias: str, key: str) -> None:
    """D006: as after a `DEL`, or on a replica that has lost the last writes."""
    with examined(alias, key) as made:
        take(made, "invoice:42", 60)
        take(made, "invoice:43", 60)
        made.store.command("DEL", made._at("fence", made._name("invoice:42")))  # type: ignore[attr-defined]
        assert found(made, "D006", "error")["keys"] == ["invoice:42"]


def test_store_that_is_asked_one_by_one(key: str) -> None:
    """D006 is found on a backend of somebody else's as well."""
    path = "tests.integration.test_distlock_doctor_kept.StrangeBackend"
    with examined("postgres", key, BACKEND=path, OPTIONS={}) as made:
        take(made, "invoice:42", 60)
        made._fences.clear()  # type: ignore[attr-defined]
        assert found(made, "D006", "error")["keys"] == ["invoice:42"]


def test_grant_in_the_future(key: str) -> None:
    """D012: the store's clock stands before what it has said, so it was set back."""
    with examined("postgres", key) as made:
        take(made, "invoice:42", 60)
        later = made.clock() + timedelta(minutes=10)
        assert HeldLock.objects.filter(storage_key=f"{key}:invoice:42").update(acquired_at=later)
        finding = found(made, "D012")
    assert finding["keys"] == ["invoice:42"]
    assert "9 min 5" in finding["message"]


# Bounds


def test_scan_is_bounded(store: BaseLockBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at the limit, or when its time is over, and says that there is more."""
    for number in range(4):
        take(store, f"invoice:{number}", 60)
        store.waiters.note(f"invoice:{number}", ELSEWHERE, 60)
    more, bounded = "; there are more", scan(store, 3)
    assert look(bounded, "locks")[1] == f"3 locks checked{more}"
    said = "none among 3 waiters (the first 3; there are more)"
    assert look(bounded, "orphan waiters")[1] == said
    # At exactly all there is nothing more.
    whole = scan(store, 4)
    assert look(whole, "locks")[1] == "4 locks checked"
    assert look(whole, "orphan waiters")[1] == "none among 4 waiters"
    monkeypatch.setattr(kept, "LOCK_SECONDS", 0.0)
    monkeypatch.setattr(kept, "PAGE", 2)
    monkeypatch.setattr(kept, "WAITER_SECONDS", 0.0)
    late = scan(store)
    assert look(late, "locks")[1].endswith(more)
    assert "(the first 0; there are more)" in look(late, "orphan waiters")[1]


def test_large_redis_is_not_walked_through(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above so many keys it would keep the server busy for seconds: it says so instead."""
    monkeypatch.setattr(kept, "MANY_KEYS", 0)
    with examined("redis", key) as made:
        take(made, "invoice:42", 60)
        mark, text = look(scan(made), "locks")
    assert mark is Mark.SKIPPED
    assert "not scanned" in text
