"""Wake-ups: whoever ends a grant that somebody marked calls out its key, and nobody else does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from tests.contract.helpers import contend, held, take
from tests.contract.redis_clients import single_url
from tests.contract.stores_redis import RedisStore
from tests.keeper import Server

from .asking import Way
from .hearing import Waiter, hand_over, overheard, waiting
from .servers import backend_on
from .test_keys import ODD

Heard = Callable[[], list[tuple[str, str]]]

#: What ends a grant, or lets it end sooner than its waiters were told.
ENDS: dict[str, Callable[[Any, Grant], object]] = {
    "release": lambda backend, grant: backend.release(grant),
    "settle": lambda backend, grant: backend.settle(grant, 60),
    "settle what is past": lambda backend, grant: backend.settle(grant, 0),
    "force_release": lambda backend, grant: backend.force_release(grant.key),
    "takeover": lambda backend, grant: take(backend, grant.key, replace=grant.token),
    "shortening extend": lambda backend, grant: backend.extend(grant, 5),
    "shortening extends": lambda backend, grant: backend.extend_many([replace(grant, ttl=5)]),
}

#: What leaves a grant in its place for as long as its waiters were told.
STAYS: dict[str, Callable[[Any, Grant], object]] = {
    "extend": lambda backend, grant: backend.extend(grant, 60),
    "extend without end": lambda backend, grant: backend.extend(grant, 604_800),
    "extends": lambda backend, grant: backend.extend_many([grant]),
    "shorten": lambda backend, grant: backend.shorten(grant.key, 5),
    "shorten a token's": lambda backend, grant: backend.shorten(grant.key, 5, grant.token),
    "shorten to more": lambda backend, grant: backend.shorten(grant.key, 600),
    "shorten another token's": lambda backend, grant: backend.shorten(grant.key, 5, new_token()),
    "release another's": lambda backend, grant: backend.release(_of_another(grant)),
    "settle another's": lambda backend, grant: backend.settle(_of_another(grant), 5),
    "extend another's": lambda backend, grant: backend.extend(_of_another(grant), 5),
    "takeover of another": lambda backend, grant: contend(
        backend, grant.key, replace=new_token(), wanted=True
    ),
    "stop": lambda backend, grant: backend.request_stop(grant.key),
    "pause": lambda backend, grant: backend.pause(
        grant.key, datetime.now(UTC) + timedelta(hours=1)
    ),
    "read": lambda backend, grant: backend.read(grant.key),
    "raise_fences": lambda backend, grant: backend.raise_fences(key=grant.key),
}


def _of_another(grant: Grant) -> Grant:
    return replace(grant, token=new_token())


@pytest.fixture
def heard(private: Server) -> Iterator[Heard]:
    """Give what was called out since it was called last."""
    with overheard(private.url) as so_far:
        yield so_far


@pytest.mark.parametrize("ttl", [30, None], ids=["ends", "does not end"])
@pytest.mark.parametrize("end", ENDS)
def test_end_of_a_marked_grant_is_called_out(
    backend: Any, heard: Heard, key: str, end: str, ttl: float | None
) -> None:
    """Once, by the name that the queues of waiters have for the key."""
    grant = take(backend, key, ttl)
    contend(backend, key, wanted=True)
    assert heard() == []
    assert ENDS[end](backend, grant)
    assert heard() == [("distlock:wake", backend.storage_name(key))]


@pytest.mark.parametrize("end", ENDS)
def test_end_of_a_grant_that_nobody_marked_is_silent(
    backend: Any, heard: Heard, key: str, end: str
) -> None:
    """Also where somebody was contended who does not wait, and another key is marked."""
    grant = take(backend, key)
    take(backend, f"{key}-b")
    contend(backend, key)
    contend(backend, f"{key}-b", wanted=True)
    assert ENDS[end](backend, grant)
    assert heard() == []


@pytest.mark.parametrize("event", STAYS)
def test_marked_grant_that_stays_is_silent(
    backend: Any, heard: Heard, key: str, event: str
) -> None:
    """What does not let a waiter in wakes none; the mark stays for what will."""
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    STAYS[event](backend, grant)
    assert heard() == []
    assert held(backend, key).wanted
    assert backend.release(grant) is True
    assert heard() == [("distlock:wake", backend.storage_name(key))]


def test_end_of_a_pause_is_called_out(backend: Any, heard: Heard, key: str) -> None:
    """Always: who is told of a pause has no grant to mark."""
    backend.pause(key, datetime.now(UTC) + timedelta(hours=1))
    assert contend(backend, key, wanted=True).paused
    for resumed in (True, False):
        assert backend.resume(key) is resumed
        assert heard() == [("distlock:wake", backend.storage_name(key))]


def test_mark_is_of_one_grant(backend: Any, heard: Heard, key: str) -> None:
    """A new grant begins without it, behind a release and by a takeover."""
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    assert backend.release(grant) is True
    assert backend.release(take(backend, key)) is True
    assert len(heard()) == 1
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    taken = take(backend, key, replace=grant.token)
    assert len(heard()) == 1
    assert backend.release(taken) is True
    assert heard() == []


def test_settled_key_that_goes_sooner_is_called_out_again(
    backend: Any, heard: Heard, key: str
) -> None:
    """Who was woken by the settlement, and marked what is left, is woken by its end."""
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    assert backend.settle(grant, 600) is True
    contend(backend, key, wanted=True)
    assert len(heard()) == 1
    assert backend.shorten(key, 5) is not None
    assert backend.force_release(key) is not None
    assert heard() == [("distlock:wake", backend.storage_name(key))] * 2


def test_expired_grant_is_called_out_by_nobody(store: RedisStore, key: str) -> None:
    """Its waiters know when it ended, also where Redis is late to remove it."""
    with overheard(single_url()) as heard:
        for number in range(3):
            grant = take(store.backend, f"{key}-{number}", 1)
            contend(store.backend, grant.key, wanted=True)
            store.outlast(5)
            assert store.has_record(grant.key)
            if number == 0:
                assert store.backend.release(grant) is False
            elif number == 1:
                assert store.backend.force_release(grant.key) is None
            else:
                take(store.backend, grant.key, replace=grant.token)
        assert not [name for _channel, name in heard() if key in name]


def test_cycles_that_nobody_waits_for_send_nothing(
    backend: Any, client: Any, heard: Heard, key: str, way: Way
) -> None:
    """Two hundred times to lock, extend and release is no message."""
    for number in range(200):
        grant = way.take(backend, f"{key}-{number % 3}")
        assert isinstance(way.ask(backend, "extend", grant), Grant)
        assert way.ask(backend, "release", grant) is True
    assert heard() == []
    assert client.info("commandstats")["cmdstat_publish"]["calls"] == 1


def test_process_knows_that_it_gave_up_a_wanted_key(backend: Any, key: str, way: Way) -> None:
    """So that it may let the others go first; a key that nobody waited for is none of these."""
    name = backend.storage_name(key)
    grant = way.take(backend, key)
    assert way.ask(backend, "release", grant) is True
    assert backend.queues.since_wanted(name) is None
    settled = take(backend, f"{key}-b")
    grant = way.take(backend, key)
    for each in (grant, settled):
        contend(backend, each.key, wanted=True)
    assert way.ask(backend, "release", grant) is True
    assert 0 <= backend.queues.since_wanted(name) < 60
    assert way.ask(backend, "release", grant) is False
    assert backend.settle(settled, 60) is True
    assert backend.queues.since_wanted(backend.storage_name(settled.key)) is not None


def test_without_a_subscription_waiters_of_the_process_are_rung(
    backend: Any, key: str, way: Way
) -> None:
    """Where this process frees the key, threads and coroutines alike; and not where it does not."""
    grant = way.take(backend, key)
    waiter, other = Waiter(backend, key), Waiter(backend, f"{key}-b")
    assert way.ask(backend, "release", _of_another(grant)) is False
    assert waiter.rung == []
    assert way.ask(backend, "release", grant) is True
    assert (waiter.rung, other.rung) == ([False], [])


@pytest.mark.parametrize("prefix", ["", "distlock", "shop:locks", "[a*?]", "ünï", "x" * 600])
def test_odd_names_are_called_out_whole(private: Server, heard: Heard, prefix: str) -> None:
    """Each prefix has a channel of its own, and each key its name, as the queues have it."""
    backend, other = (backend_on(private.url, key_prefix=prefix) for _ in range(2))
    channel = f"{prefix}:wake" if prefix else "wake"
    for name in ODD:
        with waiting(backend, name) as waiter:
            hand_over(other, backend, waiter, name)
        assert heard() == [(channel, backend.storage_name(name))]


def test_prefixes_hear_their_own(private: Server, key: str) -> None:
    """A release under another prefix wakes nobody here."""
    backend, other = (backend_on(private.url, key_prefix=each) for each in ("a", "b"))
    with waiting(backend, key) as waiter:
        for each, count in ((other, 0), (backend, 1)):
            grant = take(each, key)
            contend(each, key, wanted=True)
            assert each.release(grant) is True
            if count:
                waiter.sleep()
            assert len(waiter.rung) == count


@pytest.mark.parametrize(
    ("rights", "may"), [("&*", True), ("resetchannels &other:*", False), ("&* -publish", False)]
)
def test_user_who_may_not_publish_releases(
    private: Server, client: Any, heard: Heard, key: str, way: Way, rights: str, *, may: bool
) -> None:
    """The key is free, and the process knows that it was wanted; only the message is missing."""
    client.execute_command("ACL SETUSER", "locker", "on", ">secret", "~*", "+@all", *rights.split())
    backend = backend_on(private.url.replace("//", "//locker:secret@"))
    for end in (*ENDS, "awaited"):
        grant = take(backend, key)
        contend(backend, key, wanted=True)
        assert way.ask(backend, "release", grant) if end == "awaited" else ENDS[end](backend, grant)
        assert len(heard()) == may
        backend.force_release(key)
        heard()
    assert backend.resume(key) is False
    assert backend.queues.since_wanted(backend.storage_name(key)) is not None


def test_full_server_calls_out(backend: Any, client: Any, heard: Heard, key: str) -> None:
    """At `maxmemory` what is marked is called out when it ends."""
    grants = [take(backend, f"{key}-{number}") for number in range(4)]
    for grant in grants:
        contend(backend, grant.key, wanted=True)
    client.config_set("maxmemory", 1)
    assert backend.release(grants[0]) is True
    assert backend.settle(grants[1], 60) is True
    assert isinstance(backend.extend(grants[2], 5), Grant)
    assert backend.force_release(grants[3].key) is not None
    names = [backend.storage_name(grant.key) for grant in grants]
    assert heard() == [("distlock:wake", name) for name in names]
