"""Promises of the lock API that nothing keeps yet, by name.

Each is a declared skip that the summary counts. Its probe looks for the name that the promise will
come with; once that is there the probe fails, and tests of the promise take the line's place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

import django_distlock
from tests.conftest import DECLARED


def parameter(name: str) -> Callable[[], bool]:
    """Look for a parameter of `distlock`."""
    return lambda: name in inspect.signature(django_distlock.distlock).parameters


def method(name: str) -> Callable[[], bool]:
    """Look for an attribute of `Lease`."""
    return lambda: _has(django_distlock.Lease, name)


def module(name: str) -> Callable[[], bool]:
    """Look for a module of the package."""
    return (Path(django_distlock.__file__).parent / name).exists


def capability(name: str) -> Callable[[], bool]:
    """Look for a backend that can."""

    def has() -> bool:
        from django_distlock.handler import lock_backends

        return any(getattr(each, name) for each in lock_backends.all())

    return has


PENDING: dict[str, Callable[[], bool]] = {
    "heartbeat: live leases are extended at ttl/3": parameter("heartbeat"),
    "heartbeat: its module": module("heartbeat.py"),
    "lost: callbacks when a lease is lost or in danger": method("on_lost"),
    "wake-ups: a release wakes its waiters": capability("supports_wakeups"),
    "hold: the block's end settles the lease": parameter("hold"),
    "min_hold: the key stays taken for a while": parameter("min_hold"),
    "reentrancy: the same context may enter again": parameter("reentrant"),
    "hand-over: a lease is dumped": method("dump"),
    "hand-over: a lease is loaded": method("load"),
    "takeover: a dead holder is replaced": parameter("steal_if_dead"),
    "guard: a transaction that nobody can overtake": method("guard"),
    "guard: the same as a block": method("atomic"),
    "stop: the holder learns at a beat that an operator asked": module("heartbeat.py"),
    "basic: a lock without expiry": parameter("basic"),
    "on_conflict: the block runs without the lock": parameter("on_conflict"),
    "max_lifetime: an end to renewals": parameter("max_lifetime"),
    "fencing: writes with an older fence are rejected": module("fencing.py"),
}


def _has(owner: type, name: str) -> bool:
    return hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", {})


@pytest.mark.pending
@pytest.mark.parametrize("promise", PENDING)
def test_pending(promise: str) -> None:
    """What is listed as pending is absent."""
    assert not PENDING[promise](), f"{promise!r} may be there: test it, and take it off this list"
    pytest.skip(f"{DECLARED}pending: {promise}")


def test_probes_look_at_what_there_is() -> None:
    """A probe finds what is there: a list of misspelt owners would never go stale."""
    assert parameter("wait")()
    assert method("release")()
    assert module("handler.py")()
    assert capability("supports_fencing")()
