"""A `Lock` is a description: frozen, without state, shared by whoever likes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import uuid
from typing import Any

import pytest

from django_distlock import (
    InvalidLockBackend,
    Lease,
    Lock,
    LockUsageError,
    current_lease,
    distlock,
    distlock_all,
    held_keys,
)
from django_distlock.inspection import get_by_key
from tests.backends import Registered

from .locking import grantable, lock_of


def test_lock_cannot_be_changed() -> None:
    """It is a frozen value, equal to its copies, and neither true nor false: that is told."""
    lock = distlock("key", ttl=5)
    assert lock == distlock("key", ttl=5)
    assert lock != distlock("key", ttl=6)
    assert isinstance(lock, Lock)
    assert dataclasses.is_dataclass(lock)
    with pytest.raises(dataclasses.FrozenInstanceError):
        lock.key = "other"  # type: ignore[misc]
    with pytest.raises(LockUsageError, match=r"locked\(\)") as caught:
        bool(lock)
    assert (caught.value.code, caught.value.key) == ("unsupported", "key")
    # Also where the setting decides how long to wait.
    lock = distlock("a")
    for made in (copy.copy(lock), copy.deepcopy(lock), pickle.loads(pickle.dumps(lock))):
        assert made == lock
        assert len({made, lock}) == 1


def test_lock_holds_no_state(lock: Lock, registered: Registered, key: str) -> None:
    """Used again and again, it stays as it is; each use is a lease with a token and a fence."""
    before, leases = repr(lock), []
    for _ in range(3):
        with lock as lease:
            assert repr(lock) == before
            assert lock == lock_of(registered, key)
            assert lease.token not in repr(lock)
            leases.append(lease)
        assert repr(lock) == before
    assert len({lease.token for lease in leases}) == 3
    assert [lease.fence for lease in leases] == sorted({lease.fence for lease in leases})


def test_argument_without_behaviour_is_absent() -> None:
    """A parameter appears when it does something, and everything behind the key is named."""
    for name in ("timeout", "blocking", "fair"):
        with pytest.raises(TypeError, match=name):
            distlock("key", **{name: True})  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        distlock("key", 5)  # type: ignore[call-arg]


def test_unknown_alias_is_a_mistake_in_settings() -> None:
    """A lock on an alias that is not configured says which ones are."""
    with pytest.raises(InvalidLockBackend, match="'nowhere' is not configured"):
        distlock("key", backend="nowhere").acquire()


def test_what_a_lock_does_not_say_comes_from_the_settings(settings: Any, key: str) -> None:
    """Without ttl and wait the settings of the alias count."""
    settings.DISTLOCK = {
        "x": {"BACKEND": "django_distlock.backends.memory.MemoryBackend", "TTL": 7, "WAIT": 0}
    }
    lock = distlock(key, backend="x")
    with lock as lease:
        assert 6 < lease.remaining() <= 7
        assert not grantable(lock)
    lease = distlock(key, ttl=3, backend="x").acquire()
    assert isinstance(lease, Lease)
    assert 2 < lease.remaining() <= 3
    assert lease.release()


def test_metadata_is_copied(registered: Registered, key: str) -> None:
    """Changing the caller's dictionary changes no lock that was described before."""
    metadata = {"reason": "first"}
    lock = lock_of(registered, key, metadata=metadata)
    metadata["reason"] = "second"
    assert lock == lock_of(registered, key, metadata={"reason": "first"})


def test_int_and_its_digits_are_one_key(registered: Registered) -> None:
    """A primary key is a key as it is; whatever is asked by it, or by its text, is the same."""
    number = uuid.uuid4().int
    alias = registered.alias
    with distlock(number, backend=alias, ttl=5) as lease:
        assert lease.key == str(number)
        assert current_lease(number) is current_lease(str(number)) is lease
        assert distlock(str(number), backend=alias).locked()
        assert [*held_keys([number, str(number), 0], backend=alias)] == [str(number)]
        assert get_by_key(number, backend=alias) is not None
    with distlock_all(number, number + 1, str(number), backend=alias, ttl=5) as leases:
        assert [*leases] == sorted([str(number), str(number + 1)])
