"""Who waits for a key, as people see it: in a table, on every database."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction

from django_distlock import LockUsageError, distlock
from django_distlock.backends import redis
from django_distlock.backends.database import DatabaseBackend
from django_distlock.core.durations import MAX_BOUND
from django_distlock.core.records import Holder, Waiting, Waits
from django_distlock.handler import lock_backends
from django_distlock.inspection.showing import show_present
from django_distlock.managers import waiter
from django_distlock.models import Waiter
from tests.backends import BACKENDS, Registered
from tests.contract.aliases import counted_alias, locks_on, sessions
from tests.contract.helpers import Later, prompt, take, there
from tests.contract.locking import eventually, held_elsewhere
from tests.processes import spawn

from .databases import ask, here

#: One of each database: the other paths to its locks have the same waiters.
DATABASES = [BACKENDS[each] for each in ("postgres", "sqlite", "mariadb") if each in BACKENDS]
SERVERS = [each for each in DATABASES if each.store != "sqlite"]
WAITERS = "django_distlock_waiter"


@pytest.fixture(params=DATABASES, ids=lambda each: each.alias)
def registered(request: pytest.FixtureRequest) -> Registered:
    """Give each database of the registry."""
    registered: Registered = request.param
    here(registered.using)
    return registered


@pytest.fixture
def backend(registered: Registered) -> Iterator[DatabaseBackend]:
    """Give the backend under test."""
    backend = lock_backends[registered.alias]
    assert isinstance(backend, DatabaseBackend)
    # A test before may have left it listening: then whoever is noted counts as woken.
    end_listening(backend)
    yield backend
    end_listening(backend)


def end_listening(backend: DatabaseBackend) -> None:
    """Let this process hear no wake-ups of a backend."""
    if backend._listener is not None:
        backend._listener.close_all()


def noted(backend: DatabaseBackend, key: str, host: str, seconds: float = 60) -> str:
    """Let somebody wait for a key."""
    note = backend.waiters.note(key, Holder(host=host), seconds)
    assert note is not None
    return note


def waiting(backend: DatabaseBackend, key: str) -> list[str]:
    """Return the hosts of those who wait for a key."""
    return [each.holder.host for each in backend.waiters.of(key)]


def end(backend: DatabaseBackend, note: str) -> None:
    """Let the time of a note be over."""
    past = f"UPDATE {WAITERS} SET until = until - 100000000 WHERE id = %s"
    ask(backend.using, past, int(note))


def test_waiter_is_shown(backend: DatabaseBackend, key: str) -> None:
    """With all that is known of it, by the store's clock."""
    grant = take(backend, f"{key}-clock")
    holder = Holder(host="somewhere", pid=42, task_id="nightly", metadata={"user": "ann é🔒"})
    assert backend.waiters.note(key, holder, 30) is not None
    (seen,) = backend.waiters.of(key)
    assert isinstance(seen, Waiting)
    assert seen.holder == holder
    assert timedelta(0) <= seen.since - grant.acquired_at < timedelta(seconds=20)
    assert seen.until - seen.since == timedelta(seconds=30)
    assert seen.since.tzinfo is UTC
    assert seen.is_woken is False


def test_waiters_are_shown_in_order(backend: DatabaseBackend, key: str) -> None:
    """The first to come first, also when it was noted again; each is forgotten by itself."""
    notes = [noted(backend, key, host) for host in "abc"]
    # The column takes what the table of locks takes.
    longest = key.ljust(512, "k")
    other = noted(backend, longest, "elsewhere")
    before, *_ = backend.waiters.of(key)
    assert backend.waiters.note(key, Holder(host="a"), 600, notes[0]) == notes[0]
    after, *_ = backend.waiters.of(key)
    assert after.since == before.since
    assert after.until - before.until >= timedelta(seconds=540)
    assert waiting(backend, key) == ["a", "b", "c"]
    assert waiting(backend, f"{key}-nobody") == []
    for note in (other, notes[0], notes[0]):
        backend.waiters.drop(key, note)
    assert waiting(backend, key) == ["b", "c"]
    assert waiting(backend, longest) == ["elsewhere"]


def test_note_that_went_is_made_anew(backend: DatabaseBackend, key: str) -> None:
    """A waiter that stood still for too long is seen again when it goes on."""
    note = noted(backend, key, "a")
    end(backend, note)
    assert waiting(backend, key) == []
    # Where nobody has cleaned up meanwhile, it is the same one.
    assert backend.waiters.note(key, Holder(host="a"), 200, note) == note
    assert waiting(backend, key) == ["a"]
    end(backend, note)
    backend.cleanup(datetime.now(UTC))
    again = backend.waiters.note(key, Holder(host="a"), 60, note)
    assert again is not None
    assert waiting(backend, key) == ["a"]
    backend.waiters.drop(key, again)
    assert waiting(backend, key) == []


def test_notes_of_the_dead_are_cleaned_up(backend: DatabaseBackend, key: str) -> None:
    """They are seen no more, do not count, and go with a cleanup, within its limit."""
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    backend.cleanup(long_ago, 100_000)
    notes = [noted(backend, key, host) for host in ("alive", "dead", "gone", "over")]
    for note in notes[1:]:
        end(backend, note)
    assert waiting(backend, key) == ["alive"]
    left = []
    for _ in range(2):
        # Others' locks may be over too; none of them was before this.
        assert backend.cleanup(long_ago, 2) == 0
        found = f"SELECT id FROM {WAITERS} WHERE storage_key = %s"
        rows = ask(backend.using, found, backend.queues.name_of(key))
        left.append([str(pk) for (pk,) in rows])
    assert len(left[0]) == 2
    assert left[1] == notes[:1]


@pytest.mark.parametrize("registered", SERVERS, ids=lambda each: each.alias, indirect=True)
def test_note_in_somebodys_way_is_left(backend: DatabaseBackend, key: str) -> None:
    """Where its row is locked, nobody waits for long: neither its waiter nor a cleanup."""
    notes = [noted(backend, key, host) for host in "ab"]
    for note in notes:
        end(backend, note)
    with transaction.atomic(using=backend.using):
        rows = Waiter.objects.using(backend.using).select_for_update()
        assert rows.get(pk=int(notes[0])).storage_key == backend.queues.name_of(key)
        with prompt(2 * MAX_BOUND):
            again = Later(backend.waiters.note, key, Holder(host="a"), 200, notes[0]).result()
            Later(backend.waiters.drop, key, notes[0]).result()
        with prompt():
            Later(backend.cleanup, datetime(2020, 1, 1, tzinfo=UTC)).result()
    assert again == notes[0]
    left = Waiter.objects.using(backend.using).filter(pk__in=[int(note) for note in notes])
    assert [row.pk for row in left] == [int(notes[0])]
    # It is as it was.
    assert waiting(backend, key) == []


@pytest.mark.parametrize("registered", SERVERS, ids=lambda each: each.alias, indirect=True)
def test_note_outlives_the_transaction_of_the_caller(backend: DatabaseBackend, key: str) -> None:
    """It is written where others see it at once, whatever becomes of the transaction."""
    with transaction.atomic(using=backend.using):
        ask(backend.using, "SELECT 1")
        note = noted(backend, key, "a")
        assert Later(waiting, backend, key).result() == ["a"]
        transaction.set_rollback(True, using=backend.using)
    assert waiting(backend, key) == ["a"]
    with transaction.atomic(using=backend.using):
        ask(backend.using, "SELECT 1")
        backend.waiters.drop(key, note)
        transaction.set_rollback(True, using=backend.using)
    assert waiting(backend, key) == []


def test_note_from_within_a_transaction_on_its_file_is_refused(key: str) -> None:
    """On SQLite it is refused at once, as a lock is, instead of waiting for oneself."""
    backend = lock_backends["sqlite"]
    with transaction.atomic(using="sqlite"):
        ask("sqlite", "SELECT 1")
        with prompt(), pytest.raises(LockUsageError) as caught:
            backend.waiters.note(key, Holder(host="a"), 60)
    assert caught.value.code == "self_blocked"


def test_other_processes_see_it(backend: DatabaseBackend, registered: Registered, key: str) -> None:
    """Who waits is noted by each process, and seen by all."""
    target = "tests.integration.test_waiters:wait_until_told"
    with spawn(target, registered.alias, key) as worker:
        worker.wait_for("noted")
        noted(backend, key, "here")
        assert waiting(backend, key) == ["there", "here"]
        worker.send("leave")
        assert worker.result() == ["here"]
    assert waiting(backend, key) == ["here"]


def wait_until_told(alias: str, key: str) -> list[str]:
    """Note that somebody waits; run in a process of its own."""
    backend = lock_backends[alias]
    assert isinstance(backend, DatabaseBackend)
    note = noted(backend, key, "there")
    print("noted")
    input()
    backend.waiters.drop(key, note)
    return waiting(backend, key)


def test_whoever_is_woken_is_shown_so(key: str) -> None:
    """On PostgreSQL a note tells where wake-ups are heard, as of the last time it was made."""
    backend = lock_backends["postgres"]
    assert isinstance(backend, DatabaseBackend)
    end_listening(backend)
    note = noted(backend, key, "a")
    assert [each.is_woken for each in backend.waiters.of(key)] == [False]
    assert backend.listen(10) is True
    try:
        assert backend.waiters.note(key, Holder(host="a"), 60, note) == note
        assert [each.is_woken for each in backend.waiters.of(key)] == [True]
        found = f"SELECT channel FROM {WAITERS} WHERE id = %s"
        assert ask("default", found, int(note)) == [("LISTEN",)]
    finally:
        end_listening(backend)
    assert backend.waiters.note(key, Holder(host="a"), 60, note) == note
    assert [each.is_woken for each in backend.waiters.of(key)] == [False]


def test_notes_leave_no_session_behind(key: str) -> None:
    """Inside of a transaction they borrow one of the few lock connections, and give it back."""
    with counted_alias() as using, locks_on(using) as alias:
        backend = lock_backends[alias]
        assert isinstance(backend, DatabaseBackend)
        with transaction.atomic(using=using):
            ask(using, "SELECT 1")
            for _ in range(5):
                backend.waiters.drop(key, noted(backend, key, "a"))
            assert len(sessions(using)) == 2
        backend._connections.close_all()
        assert eventually(lambda: len(sessions(using)) == 1, timeout=10)


@pytest.mark.parametrize("alias", ["postgres", "mariadb", "sqlite", "redis", "redis_cluster"])
def test_tasks_in_their_queue_are_told_apart(alias: str, key: str) -> None:
    """On every store, in one question about many keys, as one by one."""
    store = lock_backends[alias]
    here = Holder(host='"pid": 0', pid=7, task_id="5f6d", metadata={"pid": 0, "task_id": "x"})
    for holder in (here, here.as_queued(), replace(here, task_id="6f6d").as_queued()):
        assert store.waiters.note(key, holder, 60) is not None
    assert store.waiters.note(f"{key}-b", Holder(host="a"), 60) is not None
    counted = store.waiters.count([key, f"{key}-b", f"{key}-c"])
    assert list(counted) == [Waits(1, 2), Waits(1, 0), Waits()]
    assert [each.is_retrying for each in store.waiters.of(key)].count(True) == 2


@pytest.mark.parametrize("alias", ["postgres", "mariadb", "sqlite", "redis", "redis_cluster"])
def test_all_are_counted_and_the_first_are_shown(
    alias: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd neither fills a page nor hides behind its length."""
    for module in (redis, waiter):
        monkeypatch.setattr(module, "MOST_SHOWN", 2)
    store = lock_backends[alias]
    for number in range(5):
        store.waiters.note(key, Holder(host=f"h-{number}"), 60)
    assert len(store.waiters.of(key)) == 2
    with held_elsewhere(distlock(key, backend=alias, ttl=60)):
        view = show_present(key, alias)
    assert (len(view.waiters), there(there(view.held).waits).total) == (2, 5)
