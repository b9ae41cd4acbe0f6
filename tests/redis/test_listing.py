"""What is held is listed in one key, so that nobody scans all the keys of a server for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from django_distlock.core.errors import LockError
from django_distlock.core.keys import new_token
from django_distlock.core.records import Holder
from tests.contract.helpers import listed, take
from tests.contract.stores_redis import RedisStore

from .asking import Interrupted, tell_story


def names(client: Any) -> set[str]:
    """Return what is listed."""
    found = client.keys("*listing:{*}:listing")
    return {text(each) for each in client.zrange(found[0], 0, -1)} if found else set()


def text(name: str | bytes) -> str:
    """Return a name as text, however the client reads it."""
    return name if isinstance(name, str) else name.decode()


def kept(client: Any) -> set[str]:
    """Return the names of all records, and of who waits."""
    return {
        text(each) for role in ("lock", "waiters") for each in client.keys(f"distlock:{role}:*")
    }


def test_what_is_kept_is_listed(backend: Any, client: Any, key: str) -> None:
    """Before each question of a story, and at its end."""
    seen: list[int] = []

    def compare() -> None:
        assert names(client) == kept(client)
        for name in (each for each in names(client) if ":lock:" in each):
            # Until its key is free at least, or a grant would take it from the listing before.
            (listing,) = client.keys("*listing:{*}:listing")
            assert client.zscore(listing, name) >= float(client.hget(name, "free_at") or "inf")
        seen.append(len(names(client)))

    tell_story(Interrupted(backend, compare), key)
    compare()
    assert max(seen) >= 3
    assert seen[-1] == 0


def test_nobody_scans_a_server(backend: Any, client: Any, key: str) -> None:
    """Not for a page, a filter, or the numbers above them, which are exact, too."""
    client.mset({f"foreign-{each}": "" for each in range(20_000)})
    for number in range(3):
        take(backend, f"{key}-{number}")
    backend.waiters.note(f"{key}-paused", Holder(host="there"), 30)
    assert len(listed(backend, limit=2)) == 3
    assert listed(backend, host="nobody") == []
    states, _strain = backend.states(5)
    assert (states.held.number, states.held.is_exact) == (3, True)
    assert (states.waiting.number, states.waiting.is_exact) == (1, True)
    stats = client.info("commandstats")
    assert "cmdstat_scan" not in stats
    assert stats["cmdstat_zscan"]["calls"] < 10


def test_what_is_over_leaves_with_the_next_grants(
    backend: Any, client: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred at a time; what has no end, or another one by now, stays."""
    take(backend, f"{key}-for-ever", None)
    renewed = take(backend, f"{key}-renewed")
    (listing,) = client.keys("*listing:{*}:listing")
    # As it is when the lease has nearly gone.
    client.zadd(listing, {each: 1 for each in names(client) if each.endswith("renewed")})
    backend.extend(renewed, 60)
    client.zadd(listing, {f"distlock:lock:over-{each}": 1 for each in range(150)})
    sizes = []
    for each in range(3):
        take(backend, f"{key}-{each}")
        sizes.append(client.zcard(listing))
    assert sizes == [2 + 150 - 100 + 1, 2 + 2, 2 + 3]
    assert {each.rpartition(":")[2] for each in names(client)} == {
        *(f"{key}-{each}" for each in ("for-ever", "renewed", 0, 1, 2)),
    }


def test_those_who_share_a_key_are_listed(backend: Any, client: Any, key: str) -> None:
    """Each of them; and none that was replaced, or left."""

    def share(replace: str | None = None) -> Any:
        return backend.acquire(key, new_token(), 30, permits=None, replace=replace)

    first, second = share(), share()
    assert names(client) == kept(client)
    assert len(names(client)) == 2
    third = share(first.token)
    assert names(client) == kept(client)
    for each in (second, third):
        assert backend.release(each)
        assert names(client) == kept(client)
    assert names(client) == set()


SPOIL: dict[str, Callable[[Any, str], object]] = {
    "another type": lambda client, listing: client.set(listing, "x"),
    "gone": lambda client, listing: client.delete(listing),
}


@pytest.mark.parametrize("how", SPOIL)
def test_spoiled_listing_stops_no_lock(backend: Any, client: Any, key: str, how: str) -> None:
    """A listing fails or is short; who holds a key extends and releases, and others are granted."""
    grant = take(backend, key)
    (listing,) = client.keys("*listing:{*}:listing")
    SPOIL[how](client, listing)
    if how == "gone":
        assert listed(backend) == []
    else:
        with pytest.raises(LockError, match="WRONGTYPE"):
            listed(backend)
    other = take(backend, f"{key}-other")
    note = backend.waiters.note(key, Holder(host="there"), 30)
    backend.waiters.drop(key, note)
    assert backend.extend(grant, 60)
    if how == "gone":
        assert sorted(listed(backend)) == [key, f"{key}-other"]
    assert backend.release(grant)
    assert backend.force_release(f"{key}-other").token == other.token


def test_cluster_has_none(on_cluster: RedisStore, alone_on_cluster: Any, key: str) -> None:
    """Its servers are scanned: a lock is listed, and nothing lists it."""
    take(alone_on_cluster, key)
    assert listed(alone_on_cluster) == [key]
    assert not on_cluster.client.keys(f"{key}:listing:*", target_nodes="primaries")
