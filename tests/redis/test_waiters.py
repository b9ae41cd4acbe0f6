"""Who waits for a key, for people to see: in notes that end by themselves."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from django_distlock.core.errors import BackendUnavailable
from django_distlock.core.records import Grant, Holder
from tests.contract.helpers import contend, listed, take
from tests.contract.stores_redis import RedisStore
from tests.keeper import Server

from .asking import tell_story
from .hearing import hand_over, waiting
from .servers import backend_on, eventually
from .test_keys import ODD

HOLDER = Holder(host="there", process="worker", pid=7, task_id="t", metadata={"why": "ünï 🔒 }{"})


def at(backend: Any, key: str) -> str:
    """Return the name under which the waiters of a key are kept."""
    return f"distlock:waiters:{backend.queues.name_of(key)}"


def shown(backend: Any, key: str) -> list[str]:
    """Return the hosts of those who wait, in the order in which they are shown."""
    return [each.holder.host for each in backend.waiters.of(key)]


def note(backend: Any, key: str, host: str = "", seconds: float = 60, again: str = "") -> str:
    """Note a waiter."""
    noted = backend.waiters.note(key, Holder(host=host), seconds, again or None)
    assert isinstance(noted, str)
    return noted


def test_waiter_is_shown(store: RedisStore, key: str) -> None:
    """With all that is known of it, since when, until when, and that it asks by itself."""
    # Whoever waited here a moment ago may still be listening.
    backend: Any = store.backend
    backend._listener.close_all()
    assert store.backend.waiters.of(key) == []
    before = store.now()
    assert store.backend.waiters.note(key, HOLDER, 60)
    (waiting_,) = store.backend.waiters.of(key)
    assert waiting_.holder == HOLDER
    assert before <= waiting_.since <= store.now()
    assert waiting_.until == waiting_.since + timedelta(seconds=60)
    assert waiting_.is_woken is False
    assert store.backend.waiters.of(f"{key}-b") == []


def test_note_is_renewed(backend: Any, key: str) -> None:
    """It lives for longer, and tells of the same beginning and of wake-ups as they are now."""
    first = note(backend, key, "a", 10)
    (before,) = backend.waiters.of(key)
    with waiting(backend, key) as waiter:
        again = note(backend, key, "a", 100, first)
        hand_over(backend, backend, waiter, key)
    (after,) = backend.waiters.of(key)
    assert after.since == before.since
    assert after.until > before.until + timedelta(seconds=89)
    assert (before.is_woken, after.is_woken) == (False, True)
    backend.waiters.drop(key, first)
    assert shown(backend, key) == ["a"]
    backend.waiters.drop(key, again)
    assert shown(backend, key) == []
    # One that was renewed too late, or lost with the data, begins where its waiter did.
    note(backend, key, "a", 60, again)
    assert backend.waiters.of(key)[0].since == before.since


def test_dropped_waiter_leaves_nothing(
    backend: Any, client: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to come is shown first, some of many, and no one who has left.

    The last one takes the key in Redis along. On a full server nobody more is noted.
    """
    notes = [note(backend, key, host) for host in "abc"]
    notes[0] = note(backend, key, "a", 600, notes[0])
    assert shown(backend, key) == ["a", "b", "c"]
    with monkeypatch.context() as few:
        few.setattr("django_distlock.backends.redis.MOST_SHOWN", 2)
        assert len(shown(backend, key)) == 2
    client.config_set("maxmemory", 1)
    with pytest.raises(BackendUnavailable) as caught:
        note(backend, key, "d")
    assert caught.value.code == "rate_limited"
    for each, left in zip(notes, (["b", "c"], ["c"], []), strict=True):
        backend.waiters.drop(key, each)
        backend.waiters.drop(key, each)
        assert shown(backend, key) == left
    assert client.dbsize() == 0


def test_dead_waiter_goes_by_itself(backend: Any, client: Any, key: str) -> None:
    """Those who are noted for longer stay, and Redis removes the key with the last one."""
    note(backend, key, "short", 1.5)
    note(backend, key, "long", 60)
    note(backend, key, "short too", 1.5)
    eventually(lambda: shown(backend, key) == ["long"], "they are not shown any more")
    (left,) = backend.waiters.of(key)
    until = left.until.timestamp() * 1000
    assert 0 <= client.pexpiretime(at(backend, key)) - until < 1
    assert client.zcard(at(backend, key)) == 3
    # Whoever is noted next clears them away.
    note(backend, key, "next", 60)
    assert client.zcard(at(backend, key)) == 2
    note(backend, f"{key}-b", "short", 0.1)
    eventually(lambda: not client.exists(at(backend, f"{key}-b")), "the key is gone")


def test_many_dead_waiters_are_cleared_away_in_parts(backend: Any, client: Any, key: str) -> None:
    """No note keeps the server for long, however many have died before it."""
    past = {f"1 0 {number} {{}}": 1_000_000 for number in range(250)}
    client.zadd(at(backend, key), past)
    for left in (151, 52, 3, 4):
        note(backend, key)
        assert client.zcard(at(backend, key)) == left
        assert len(shown(backend, key)) < 5


@pytest.mark.parametrize("prefix", ["", "[a*?]"])
def test_waiters_are_no_locks(private: Server, client: Any, prefix: str) -> None:
    """No key reaches another's, no listing shows them, and no fence is raised for them."""
    backend = backend_on(private.url, key_prefix=prefix)
    for name in ODD:
        note(backend, name, name)
    for name in (*ODD, "waiters:x", "waiters:{x}:x"):
        assert shown(backend, name) == ([name] if name in ODD else [])
    assert listed(backend) == []
    assert backend.raise_fences().raised == 0
    # Beside what lists them.
    assert client.dbsize() == len(ODD) + 1
    tell_story(backend, "story")
    assert all(shown(backend, name) == [name] for name in ODD)


def test_waiters_lie_beside_their_lock(on_cluster: RedisStore, key: str) -> None:
    """On a cluster too: in its slot, and so on its server."""
    slot = on_cluster.client.keyslot
    for number in range(12):
        name = f"{key}-{number}"
        note(on_cluster.backend, name, "a")
        assert shown(on_cluster.backend, name) == ["a"]
        assert slot(on_cluster.at("waiters", name)) == slot(on_cluster.at("lock", name))
        assert on_cluster.client.exists(on_cluster.at("waiters", name))


def test_no_decision_rests_on_notes(backend: Any, client: Any, key: str) -> None:
    """Whatever they say, the key is granted, marked, released and heard of as without them."""
    client.set(at(backend, key), "not ours")
    with waiting(backend, key) as waiter:
        hand_over(backend, backend, waiter, key)
    assert client.get(at(backend, key)) == "not ours"
    note(backend, f"{key}-b", "a")
    grant = take(backend, f"{key}-b")
    contend(backend, f"{key}-b", wanted=True)
    assert isinstance(backend.extend(grant), Grant)
    assert backend.release(grant) is True
    assert shown(backend, f"{key}-b") == ["a"]
