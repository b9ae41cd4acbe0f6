"""When a lease ends: ttl, grace, and what extend makes of them."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.conf import BackendConfig
from django_distlock.core.durations import GRACE
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from tests.processes import spawn

from .helpers import PATIENCE, contend, held, take
from .stores import Store

pytestmark = pytest.mark.requires("supports_ttl")


def test_grace_lasts_one_second(backend: BaseLockBackend, key: str) -> None:
    """A key is locked half a second behind its ttl, and free 1.1 s behind it."""
    # The grant was somewhere between these two readings of the clock.
    asked = time.monotonic()
    take(backend, key, 0.1)
    granted = time.monotonic()
    time.sleep(max(0, asked + 0.1 + 0.5 - time.monotonic()))
    answer = backend.acquire(key, new_token(), 30)
    if time.monotonic() < asked + 0.1 + GRACE:  # Otherwise, the machine stood still.
        assert isinstance(answer, Contended)
        assert not answer.busy
    if isinstance(answer, Grant):
        assert backend.release(answer)
    time.sleep(max(0, granted + 0.1 + 1.1 - time.monotonic()))
    take(backend, key)


def test_record_is_live_before_its_end_only() -> None:
    """At `free_at` the key is free; a microsecond before, it is not."""
    clock = [1000.0]
    backend = MemoryBackend(BackendConfig(), clock=lambda: clock[0])
    take(backend, "key", 8)
    clock[0] = 1008.999999
    contend(backend, "key")
    assert backend.read("key") is not None
    clock[0] = 1009.0
    assert backend.read("key") is None
    take(backend, "key")


@pytest.mark.requires("distributed", "supports_ttl", time_authority="server")
@pytest.mark.parametrize("hours", [1, -1])
def test_wrong_clock_of_a_client_changes_nothing(
    backend: BaseLockBackend, store: Store, key: str, hours: int
) -> None:
    """A client whose clock is an hour off gets and sees the same times as everybody else."""
    alias = store.registered.alias
    take(backend, f"{key}-held", 1800)
    with spawn(
        "tests.contract.workers:ask_with_clock_off", alias, key, f"{key}-held", hours * 3600
    ) as client:
        seen = client.result(PATIENCE)
    now = store.now().timestamp()
    # The wrong clock would be out by an hour, a slow machine by seconds.
    assert seen["clock"] == pytest.approx(now + hours * 3600, abs=300)
    assert seen["granted"] == pytest.approx(now + 1500, abs=300)
    assert seen["extended"] == pytest.approx(now + 1800, abs=300)
    assert seen["expires_in"] == pytest.approx(1800, abs=300)
    assert seen["reads"]
    assert backend.read(f"{key}-held") is not None
    record = held(backend, key)
    assert record.expires_at is not None
    assert record.expires_at.timestamp() == pytest.approx(seen["extended"], abs=1e-5)


@pytest.mark.requires("supports_ttl", time_authority="server")
def test_clock_of_this_process_changes_nothing(
    backend: BaseLockBackend, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer of the store depends on what `time.time()` says here."""
    grant = take(backend, key, 5)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 4e9)
        contended = contend(backend, key)
        extended = backend.extend(grant, 7)
    assert contended.expires_in is not None
    assert 0 < contended.expires_in <= 5
    assert isinstance(extended, Grant)
    assert extended.expires_at is not None
    assert timedelta(0) < extended.expires_at - store.now() <= timedelta(seconds=7)


def test_shortest_and_longest_ttl_are_exact(backend: BaseLockBackend, key: str) -> None:
    """The bounds of a ttl are legal, and the end lies just so far behind the grant."""
    for ttl in (0.1, 604_800):
        grant = take(backend, f"{key}-{ttl}", ttl)
        assert grant.expires_at == grant.acquired_at + timedelta(seconds=ttl)
        extended = backend.extend(grant, timedelta(seconds=ttl))
        assert isinstance(extended, Grant)
        assert extended.ttl == ttl


def test_registry_has_every_time_authority(backend: BaseLockBackend, store: Store) -> None:
    """Where the store has a clock of its own, that one decides."""
    expected = "client" if store.registered.store in ("memory", "sqlite") else "server"
    assert backend.time_authority == expected
