"""Cleanup takes away what is over, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from django_distlock import conf
from django_distlock.backends.base import BaseLockBackend
from django_distlock.managers import lock, rows

from .helpers import KEEPS_EXPIRED, Later, at_once, held, listed, prompt, take
from .locking import eventually
from .stores import DatabaseStore, Store, Stranger


def sweep(backend: BaseLockBackend, store: Store) -> None:
    """Remove what other tests left behind."""
    while backend.cleanup(store.now()):
        pass


@KEEPS_EXPIRED
def test_cleanup_removes_expired_records(backend: BaseLockBackend, store: Store, key: str) -> None:
    """Records past `free_at` go, and are counted: no more than the limit at once."""
    keys = [f"{key}-{number}" for number in range(5)]
    for each in keys:
        take(backend, each, 5)
    store.elapse(6.1)
    assert backend.cleanup(store.now(), limit=2) == 2
    assert backend.cleanup(store.now(), limit=1) == 1
    assert sum(store.has_record(each) for each in keys) >= 2
    sweep(backend, store)
    assert not any(store.has_record(each) for each in keys)


@pytest.mark.requires("supports_ttl")
def test_cleanup_spares_live_records(backend: BaseLockBackend, store: Store, key: str) -> None:
    """Held, settled, in their grace and endless; a time in the future removes none of them."""
    take(backend, f"{key}-held", 50)
    backend.extend(take(backend, f"{key}-long", 5), 3600)
    take(backend, f"{key}-expired", 0.1)
    take(backend, f"{key}-endless", None)
    backend.release(take(backend, f"{key}-settled"), 50)
    sweep(backend, store)
    take(backend, f"{key}-grace", 5)
    store.elapse(5.05)
    # The first one's grace lasts a second.
    keys = [f"{key}-{name}" for name in ("grace", "held", "long", "endless", "settled")]
    before: list[Any] = [held(backend, each) for each in keys]
    while backend.cleanup(store.now() + timedelta(days=365)):
        pass
    graced, *others = [backend.read(each) for each in keys]
    assert others == before[1:]
    # A machine that took longer than its grace has made it one that is over.
    assert graced == before[0] or before[0].free_at <= store.now()
    assert not store.has_record(f"{key}-expired")


@KEEPS_EXPIRED
def test_cleanup_before_a_time_spares_what_ended_later(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """Only what was over before the time given goes; long ago, that is nothing."""
    take(backend, f"{key}-old", 5)
    take(backend, f"{key}-young", 50)
    store.elapse(60)
    assert backend.cleanup(store.now() - timedelta(days=10_000)) == 0
    while backend.cleanup(store.now() - timedelta(seconds=30)):
        pass
    assert not store.has_record(f"{key}-old")
    assert store.has_record(f"{key}-young")


@pytest.mark.requires("supports_ttl")
def test_cleanup_leaves_the_counters(backend: BaseLockBackend, store: Store, key: str) -> None:
    """Fences and pauses outlive every cleanup."""
    grant = take(backend, key, 5)
    backend.pause(f"{key}-paused", store.now() + timedelta(hours=1))
    store.elapse(6.1)
    sweep(backend, store)
    assert store.fence(key) >= grant.fence, "a fence fell"
    assert store.fence(key) == grant.fence
    assert backend.pause(f"{key}-paused", None) is True
    fence = take(backend, key).fence
    assert fence > grant.fence, "a fence came again"
    assert store.registered.is_next(fence, grant.fence)


@pytest.mark.stores("postgresql", "mysql", why="no transaction can hold a single record")
def test_cleanup_skips_locked_rows(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """What a transaction holds is left for the next time, without waiting."""
    others = [f"{key}-other-{number}" for number in range(5)]
    # More than one, or no planner would think of walking through the table.
    for each in (f"{key}-locked", *others):
        take(backend, each, 5)
    store.elapse(6.1)
    stranger.hold(f"{key}-locked")
    with prompt():
        Later(sweep, backend, store).result(10)
    assert store.has_record(f"{key}-locked")
    assert not any(store.has_record(each) for each in others)
    stranger.rollback()
    sweep(backend, store)
    assert not store.has_record(f"{key}-locked")


@pytest.mark.stores("sqlite", "postgresql", "mysql", why="each operation is atomic by itself")
def test_cleanup_of_a_busy_store_is_zero(
    backend: BaseLockBackend, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """Where another transaction holds the table, cleanup gives up within a second."""
    take(backend, key, 5)
    store.elapse(6.1)
    stranger.hold_table()
    with prompt(1):
        assert Later(backend.cleanup, store.now()).result(10) == 0
    stranger.rollback()
    assert store.has_record(key)


@pytest.mark.stores("sqlite", "postgresql", "mysql", why="no read has to remove an expired record")
def test_cleanup_on_read_is_an_option(
    backend: BaseLockBackend, store: DatabaseStore, key: str
) -> None:
    """With `cleanup_on_read`, a read removes the expired record that it finds, and no live one."""
    options = {**backend.config.options, "cleanup_on_read": True}
    tidy = store.variant(options=options)
    live = take(backend, f"{key}-live")
    expired = take(backend, key, 5)
    store.elapse(6.1)
    take(backend, f"{key}-other", 5)
    assert tidy.read(f"{key}-live") is not None
    assert store.has_record(key)
    assert tidy.read(key) is None
    assert not store.has_record(key)
    assert tidy.read_token(expired.token) is None
    assert tidy.read_token(live.token) is not None
    assert store.fence(key) >= expired.fence, "a fence fell"
    assert store.fence(key) == expired.fence


# Notes of what is done, beside the locks of a store and apart from them


def test_note_is_found_by_its_name(backend: BaseLockBackend, key: str) -> None:
    """The last of a name counts, for its seconds; it is no lock, and no other name has it."""
    assert backend.notes.get(key) is None
    backend.notes.put(key, 7, 60)
    backend.notes.put(key, 8, 60)
    assert backend.read(key) is None
    take(backend, key)
    assert backend.notes.get(key) == 8
    assert backend.notes.get(f"{key}0") is None
    backend.notes.put(key, 9, 0.1)
    assert eventually(lambda: backend.notes.get(key) is None)


def test_first_notes_of_a_name_at_the_same_moment(backend: BaseLockBackend, key: str) -> None:
    """None of their writers has found another one's; one of the notes stays."""
    for number in range(10):
        name = f"{key}-{number}"
        at_once([partial(backend.notes.put, name, fence, 60) for fence in range(1, 7)])
        assert backend.notes.get(name) in range(1, 7)


@pytest.mark.requires("supports_listing")
def test_notes_are_not_listed(backend: BaseLockBackend, key: str) -> None:
    """A listing shows locks alone, also one that goes through everything there is."""
    without_prefix = replace(backend.config, key_prefix="")
    bare = type(backend)(without_prefix, **without_prefix.options)
    for each, prefix in ((backend, key), (bare, "")):
        each.notes.put(key, 7, 60)
        take(each, f"{key}1")
        assert each.notes.get(key) == 7
        assert [name for name in listed(each, prefix) if key in name] == [f"{key}1"]


@KEEPS_EXPIRED
@pytest.mark.stores("sqlite", "postgresql", "mysql", why="its statements name no records")
def test_statement_names_no_more_than_a_database_takes(
    backend: BaseLockBackend, store: DatabaseStore, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the limit is: the cleanup goes on behind what was named."""
    for each in (rows, lock):
        monkeypatch.setattr(each, "MOST", 2)
    sweep(backend, store)
    for number in range(3):
        backend.notes.put(f"{key}{number}", 7, 0.1)
        take(backend, f"{key}{number}", 0.1)
    assert eventually(lambda: backend.notes.get(f"{key}2") is None)
    store.elapse(1.3)
    before = datetime.now(UTC) + timedelta(days=1)
    notes = f"SELECT count(*) FROM {conf.table('notes')}"
    left, pages = [store.ask(notes)[0][0]], []
    while gone := backend.cleanup(before, limit=100):
        pages.append(gone)
        left.append(store.ask(notes)[0][0])
    assert sum(pages) >= 6
    assert left[-1] <= left[0] - 3
    assert all(old - new <= 2 for old, new in pairwise(left))
    # PostgreSQL removes records by a statement that names none.
    assert store.registered.store == "postgresql" or max(pages) <= 4
    assert not any(store.has_record(f"{key}{number}") for number in range(3))


@pytest.mark.stores("sqlite", "postgresql", "mysql", why="its store removes notes itself")
def test_cleanup_goes_on_behind_a_page_of_notes(backend: BaseLockBackend, key: str) -> None:
    """It removes notes that are over as well: whoever stops at 0 has left nothing behind."""
    for number in range(3):
        backend.notes.put(f"{key}{number}", 7, 0.1)
    take(backend, key, 0.1)
    assert eventually(lambda: backend.notes.get(f"{key}2") is None)
    assert eventually(lambda: backend.read(key) is None)
    before = datetime.now(UTC) + timedelta(days=1)
    pages = list(iter(lambda: backend.cleanup(before, limit=2), 0))
    assert sum(pages) >= 4
