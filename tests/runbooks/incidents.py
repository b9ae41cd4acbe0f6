"""Short words for what happens to locks in an incident."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from redis import Redis

from django_distlock import BackendUnavailable, distlock, inspection
from django_distlock.inspection import KeyView
from tests.contract.locking import eventually
from tests.processes import Process

from .sites import Site

#: For a machine with much else to do.
PATIENCE = 90


@contextmanager
def holder(site: Site, key: str, ttl: float) -> Iterator[Process]:
    """Let a process hold a key."""
    with site.start("tests.runbooks.workers:hold", key, ttl) as process:
        process.wait_for("held", PATIENCE)
        yield process


@contextmanager
def waiter(site: Site, key: str, number: int = 1) -> Iterator[Process]:
    """Let threads of a process wait for a key, until all of them are seen to do so."""
    with site.start("tests.runbooks.workers:wait_in_threads", key, number) as process:
        process.wait_for("waiting", PATIENCE)
        noted = eventually(lambda: len(shown(site, key).waiters) >= number, PATIENCE)
        assert noted, shown(site, key).waiters
        yield process


def as_json(value: Any) -> Any:
    """Return what a column of JSON holds: some drivers give its text."""
    return json.loads(value) if isinstance(value, str) else value


def shown(site: Site, key: str) -> KeyView:
    """Return all that is known about a key, as this process sees it."""
    with site.locks() as alias:
        return inspection.show(key, alias)


def counter(site: Site, key: str) -> int:
    """Return the last fence of a key."""
    return shown(site, key).fence


def record_fence(site: Site, key: str) -> int:
    """Return the fence of the key's holder."""
    held = shown(site, key).held
    assert held is not None
    return held.fence


def grantable(site: Site, key: str) -> bool:
    """Try once to take the key, and give it back; a store that is slow to say grants nothing."""
    with site.locks() as alias, suppress(BackendUnavailable):
        lease = distlock(key, backend=alias, ttl=60).try_acquire()
        return lease is not None and lease.release()
    return False


def event_kinds(site: Site) -> list[str]:
    """Return what is kept of what happened, in its order."""
    rows = site.ask("SELECT kind FROM django_distlock_lockevent ORDER BY id")
    return [str(kind) for (kind,) in rows]


def age(site: Site, key: str, seconds: int) -> None:
    """Let a lock look as if it had been held for so much longer."""
    _move(site, key, -seconds, "acquired_at")


def shift(site: Site, key: str, seconds: int) -> None:
    """Let a lock stand as a clock has left it that was so far ahead of the one of now."""
    _move(site, key, seconds, "acquired_at", "renewed_at", "expires_at", "free_at")


def _move(site: Site, key: str, seconds: int, *names: str) -> None:
    by = seconds * 1_000_000
    if site.store == "redis":
        with redis_of(site) as client:
            (name,) = client.scan_iter(f"distlock:lock:*:{key}")
            for each in names:
                client.hincrby(name, each, by)
            if "free_at" in names:
                client.pexpireat(name, int(client.hget(name, "free_at")) // 1000 + 1)
        return
    moved = ", ".join(f"{each} = {each} + {by}" for each in names)
    site.ask(f"UPDATE django_distlock_heldlock SET {moved} WHERE storage_key = 'distlock:{key}'")


def notes(site: Site) -> int:
    """Count the notes of waiters, also of those that are over."""
    return int(site.ask("SELECT count(*) FROM django_distlock_waiter")[0][0])


def let_notes_end(site: Site) -> None:
    """Let the time of all notes be over, as it is a while later."""
    site.ask("UPDATE django_distlock_waiter SET until = until - 3600000000")


def pause(site: Site, key: str) -> None:
    """Let somebody pause a key for hours."""
    with site.locks() as alias:
        paused = inspection.pause(key, 7200, backend=alias, actor="Ada", reason="restoring it")
        assert paused.is_done


@contextmanager
def redis_of(site: Site) -> Iterator[Any]:
    """Connect to the site's Redis."""
    with Redis.from_url(site.redis, decode_responses=True) as client:
        yield client


def port_of(url: str) -> int:
    """Return the port of an address."""
    port = urlsplit(url).port
    assert port
    return port
