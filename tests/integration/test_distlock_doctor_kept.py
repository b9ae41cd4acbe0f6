"""`manage.py distlock_doctor`: what it finds among locks, fences, waiters and pauses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pytest
from django.conf import settings
from django.test import override_settings

from django_distlock import lock_backends
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.holders import Holder
from django_distlock.core.keys import UNIQUE_PREFIX, own_key
from django_distlock.host import current_holder
from django_distlock.inspection.diagnosis import Finding, diagnose, kept, scanned, waiting
from django_distlock.models import HeldLock
from tests.contract.aliases import DATABASE
from tests.contract.helpers import take
from tests.contract.locking import eventually
from tests.processes import spawn

from .databases import ask, here, migrate
from .operating import run

ALIAS = "examined"
PATIENCE = 60


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
def like(request: pytest.FixtureRequest) -> str:
    """Give the alias of each store in turn."""
    return here(request.param)


@pytest.fixture
def store(like: str, key: str) -> Iterator[BaseLockBackend]:
    """Give a backend in which only this test has anything."""
    with examined(like, key) as made:
        yield made


def found(number: str) -> Finding:
    """Examine, and give the one finding with an id."""
    every = diagnose([ALIAS]).findings
    (finding,) = [each for each in every if each.id == f"distlock.{number}"]
    assert finding.backend == ALIAS
    return finding


def ids() -> set[str]:
    """Examine, and give the ids of what only a diagnosis finds."""
    every = {each.id.removeprefix("distlock.") for each in diagnose([ALIAS]).findings}
    return {each for each in every if each.startswith("D")}


def dead_holder(like: str, prefix: str, what: str, *arguments: Any) -> None:
    """Let another process take a lock, or wait, and kill it."""
    target = f"tests.integration.test_distlock_doctor_kept:{what}"
    with spawn(target, like, prefix, *arguments) as process:
        process.wait_for("done")
        os.kill(process.popen.pid, signal.SIGKILL)
        process.popen.wait(PATIENCE)


def hold(like: str, prefix: str, keys: list[str], ttl: float | None) -> None:
    """Take locks; run in a process of its own, which is killed."""
    with examined(like, prefix) as made:
        for each in keys:
            take(made, each, ttl, holder=current_holder())
        print("done")
        input()


def keep(like: str, prefix: str) -> None:
    """Keep a key behind its run; run in a process of its own, which is killed."""
    with examined(like, prefix) as made:
        made.settle(take(made, "settled", 60, holder=current_holder()), 60)
        print("done")
        input()


def leave(like: str, prefix: str) -> None:
    """Queue a unique task, and mark an entry of a schedule; run in a process that is killed."""
    from django_distlock.contrib.celery.beats import Marks
    from django_distlock.contrib.jobs import JobLock

    with examined(like, prefix) as made:
        job = JobLock(key=own_key("unique:report:2"), backend=ALIAS, task_id="t2", is_queued=True)
        job.acquire().let_go()
        Marks(made, own_key("celery-beat:shop")).learn("monthly", datetime.now(UTC), 0)
        print("done")
        input()


def wait(like: str, prefix: str) -> None:
    """Wait for a key, as far as people see; run in a process of its own, which is killed."""
    with examined(like, prefix) as made:
        assert made.note_waiter("invoice:1", current_holder(), 60)
        print("done")
        input()


# Nothing


def test_sound_store_has_nothing(store: BaseLockBackend) -> None:
    """Locks of live processes, those of other hosts, short pauses and a waiter are no finding."""
    take(store, "mine", 60, holder=current_holder())
    take(
        store, "theirs", 60, holder=Holder(host="web-7", boot_id="other", process="gunicorn", pid=1)
    )
    store.note_waiter("mine", current_holder(), 60)
    store.pause("report", store.clock() + timedelta(minutes=5), "Ada")
    assert ids() == set()


# Holders


def test_lock_of_a_dead_process(store: BaseLockBackend, like: str, key: str) -> None:
    """D005: it is named, with the process, until when it lasts, and where to read on."""
    take(store, "alive", 60, holder=current_holder())
    dead_holder(like, key, "hold", ["invoice:42"], 60)
    finding = found("D005")
    assert (finding.keys, finding.level) == (("invoice:42",), "warning")
    assert "1 key held by processes of this host that have ended" in finding.message
    assert "free at " in finding.message
    assert finding.address == "docs/runbooks/stuck-lock.md"


def test_lock_of_a_dead_process_without_expiry(key: str) -> None:
    """D005 is an error there: the key never becomes free by itself."""
    with examined("postgres", key):
        dead_holder("postgres", key, "hold", ["invoice:42"], None)
        finding = found("D005")
        assert finding.level == "error"
        assert run("distlock_doctor", f"--backend={ALIAS}").status == 1
        lock_backends[ALIAS].force_release("invoice:42")
        assert ids() == set()


def test_what_no_process_holds_is_not_dead(store: BaseLockBackend, like: str, key: str) -> None:
    """A queued task, one that a worker left to its retry, and the mark of a beat that has ended."""
    unique = own_key(f"{UNIQUE_PREFIX}report:1")
    dead_holder(like, key, "hold", [unique], 3600)
    dead_holder(like, key, "leave")
    assert ids() == set()
    (look,) = [each for each in diagnose([ALIAS]).looked_at if each.what == "locks"]
    assert look.text == "3 locks looked at, 2 of them held by queued tasks"


def test_key_that_is_kept_behind_its_run(store: BaseLockBackend, like: str, key: str) -> None:
    """Its process is gone on purpose."""
    dead_holder(like, key, "keep")
    assert store.read("settled") is not None
    assert ids() == set()


def test_lock_of_another_boot(key: str) -> None:
    """A process of the same number elsewhere proves nothing, also where names are settings'."""
    ours = current_holder()
    elsewhere = Holder(host=ours.host, boot_id="before/1", process="web", pid=2**22 - 1)
    with override_settings(DISTLOCK_HOLDER={"process": "web"}), examined("redis", key) as made:
        take(made, "invoice:42", 60, holder=elsewhere)
        assert ids() == set()


@pytest.mark.parametrize("alias", ["postgres", "mariadb", "sqlite"])
def test_leases_that_nobody_gave_back(alias: str, key: str) -> None:
    """D004: their records outlive the grace; cleaned up, nothing is found."""
    with examined(here(alias), key) as made:
        for number in range(5):
            take(made, f"invoice:{number}", 0.1, holder=current_holder())
        kept_on_purpose = take(made, "settled", 60)
        made.settle(kept_on_purpose, 0.1)
        assert eventually(
            lambda: all(made.read(f"invoice:{n}") is None for n in range(5)), PATIENCE
        )
        finding = found("D004")
        assert "5 leases ended by expiry, and nobody gave them back" in finding.message
        assert len(finding.keys) == 3
        assert finding.message.endswith("…")
        assert finding.address == "docs/runbooks/held-past-expiry.md"
        assert run("distlock_cleanup", f"--backend={ALIAS}").status == 0
        assert ids() == set()


def is_over(made: BaseLockBackend, key: str) -> bool:
    """Say whether a lease is over, and perhaps its grace as well."""
    record = made.read(key)
    return record is None or record.expires_at is None or record.expires_at <= made.clock()


@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_lock_in_its_grace(alias: str, key: str) -> None:
    """D004: its lease is over, nobody has renewed it, and nobody else may have it yet."""
    with examined(alias, key) as made:

        def is_seen() -> bool:
            # The grace lasts for a second: on a busy machine it may be over before the look.
            take(made, "invoice:42", 0.1)
            assert eventually(lambda: is_over(made, "invoice:42"), PATIENCE)
            messages = [each.message for each in diagnose([ALIAS], writes=False).findings]
            made.force_release("invoice:42")
            return any("in the grace: 'invoice:42'" in each for each in messages)

        assert eventually(is_seen, PATIENCE)


# Fences


def test_fence_above_its_counter(postgresql: str, key: str) -> None:
    """D006: the counters are gone while a lock is held. An error: fences come again."""
    migrate(postgresql)
    configured = {ALIAS: {"BACKEND": DATABASE, "OPTIONS": {"using": postgresql}}}
    with override_settings(DISTLOCK=configured):
        grant = take(lock_backends[ALIAS], key, 60)
        assert "D006" not in ids()
        ask(postgresql, "TRUNCATE django_distlock_fencecounter")
        finding = found("D006")
        assert (finding.level, finding.keys) == ("error", (key,))
        assert f"held with {grant.fence}, counter at 0" in finding.message
        assert finding.address == "docs/runbooks/failover.md"


@pytest.mark.parametrize("alias", ["redis", "redis_cluster"])
def test_fence_counter_of_redis_is_lost(alias: str, key: str) -> None:
    """D006: as after a `DEL`, or on a replica that has lost the last writes."""
    with examined(alias, key) as made:
        take(made, "invoice:42", 60)
        take(made, "invoice:43", 60)
        made.store.command("DEL", made._at("fence", made._name("invoice:42")))  # type: ignore[attr-defined]
        assert found("D006").keys == ("invoice:42",)


def test_store_that_is_asked_one_by_one(key: str) -> None:
    """D006 is found on a backend of somebody else's as well."""
    path = "tests.integration.test_distlock_doctor_kept.StrangeBackend"
    with examined("postgres", key, BACKEND=path, OPTIONS={}) as made:
        take(made, "invoice:42", 60)
        made._fences.clear()  # type: ignore[attr-defined]
        assert found("D006").keys == ("invoice:42",)


# Clock


def test_grant_in_the_future(key: str) -> None:
    """D012: the store's clock stands before what it has said, so it was set back."""
    with examined("postgres", key) as made:
        take(made, "invoice:42", 60)
        assert ids() == set()
        later = made.clock() + timedelta(minutes=10)
        assert HeldLock.objects.filter(storage_key=f"{key}:invoice:42").update(acquired_at=later)
        finding = found("D012")
    assert finding.keys == ("invoice:42",)
    assert "9 min 5" in finding.message
    assert finding.address == "docs/runbooks/clock-jump.md"


# Waiters


def test_waiter_of_a_dead_process(store: BaseLockBackend, like: str, key: str) -> None:
    """D002: its note lasts until its time is over; waiters that live are none of it."""
    store.note_waiter("invoice:1", current_holder(), 60)
    dead_holder(like, key, "wait")
    finding = found("D002")
    assert finding.keys == ("invoice:1",)
    assert "1 of processes of this host that have ended" in finding.message
    assert finding.address == "docs/runbooks/too-many-waiters.md"


def test_waiter_whose_time_is_over(key: str) -> None:
    """D002: a note that nobody removed."""
    with examined("postgres", key) as made:
        made.note_waiter("invoice:1", Holder(host="web-7"), 0.1)
        assert eventually(lambda: not made.waiters("invoice:1"), PATIENCE)
        assert "1 whose time is over" in found("D002").message
        run("distlock_cleanup", f"--backend={ALIAS}")
        assert ids() == set()


def test_very_many_waiters(store: BaseLockBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """D003: a key that is fought for is named, with how many wait; one with fewer is not."""
    monkeypatch.setattr(kept, "MANY_WAITERS", 12)
    for number in range(12):
        store.note_waiter("invoice:42", Holder(host=f"web-{number}"), 60)
        if number:
            store.note_waiter("invoice:43", Holder(host=f"web-{number}"), 60)
    finding = found("D003")
    assert finding.keys == ("invoice:42",)
    assert "'invoice:42' (12)" in finding.message
    assert finding.address == "docs/runbooks/too-many-waiters.md"


# Pauses


def test_long_pause(store: BaseLockBackend) -> None:
    """D007: who paused the key is told, and until when. Resumed, nothing is found."""
    store.pause("report", store.clock() + timedelta(hours=30), "Ada")
    store.pause("ledger", store.clock() + timedelta(minutes=50), "Ada")
    finding = found("D007")
    assert finding.keys == ("report",)
    assert "by Ada for another 1 d 5 h" in finding.message
    assert finding.address == "docs/runbooks/stuck-lock.md"
    store.resume("report")
    assert ids() == set()


# Bounds


def test_scan_is_bounded(store: BaseLockBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops at the limit, or when its time is over, and says that there is more."""
    for number in range(7):
        take(store, f"invoice:{number}", 60)
    text = run("distlock_doctor", f"--backend={ALIAS}", "--scan=5").out
    assert "5 locks looked at; there are more, and they were not" in text
    # At exactly all there is nothing more.
    assert "7 locks looked at\n" in run("distlock_doctor", f"--backend={ALIAS}", "--scan=7").out
    monkeypatch.setattr(scanned, "SECONDS", 0.0)
    monkeypatch.setattr(scanned, "PAGE", 2)
    (look,) = [each.text for each in diagnose([ALIAS]).looked_at if each.what == "locks"]
    assert "there are more, and they were not" in look


def test_large_redis_is_not_walked_through(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above so many keys it would keep the server busy for seconds: it says so instead."""
    monkeypatch.setattr(kept, "MANY_KEYS", 0)
    with examined("redis", key) as made:
        take(made, "invoice:42", 60)
        (look,) = [each for each in diagnose([ALIAS]).looked_at if each.what == "locks"]
    assert (look.mark, "not walked through" in look.text) == ("skipped", True)


def test_waiters_are_bounded(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many, so many are looked at as the limit says, or as there is time for."""
    with examined("postgres", key) as made:
        for number in range(4):
            made.note_waiter(f"invoice:{number}", Holder(host="web-7"), 60)
        looks = [each.text for each in diagnose([ALIAS], limit=3).looked_at]
        assert "none among 3 waiters (the first 3; there are more)" in looks
        assert "none among 4 waiters" in [each.text for each in diagnose([ALIAS]).looked_at]
        monkeypatch.setattr(waiting, "SECONDS", 0.0)
        looks = [each.text for each in diagnose([ALIAS]).looked_at]
        assert "none among 0 waiters (the first 0; there are more)" in looks
