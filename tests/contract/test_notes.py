"""A store keeps notes of what is done, beside its locks and apart from them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from django_distlock.backends.base import BaseLockBackend

from .helpers import listed, take
from .locking import eventually


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


@pytest.mark.requires("supports_listing")
@pytest.mark.parametrize("prefix", ["as ever", ""], ids=["prefix", "bare"])
def test_notes_are_not_listed(backend: BaseLockBackend, key: str, prefix: str) -> None:
    """A listing shows locks alone, also one that goes through everything there is."""
    if not prefix:
        bare = replace(backend.config, key_prefix="")
        backend = type(backend)(bare, **bare.options)
    backend.notes.put(key, 7, 60)
    take(backend, f"{key}1")
    assert backend.notes.get(key) == 7
    assert [each for each in listed(backend, key if prefix else "") if key in each] == [f"{key}1"]


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
