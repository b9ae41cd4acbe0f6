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

from .hearing import Waiter, hand_over, overheard, waiting
from .servers import backend_on
from .test_keys import ODD

Heard = Callable[[], list[tuple[str, str]]]

#: What ends a grant, or lets it end sooner than its waiters were told.
ENDS: dict[str, Callable[[Any, Grant], object]] = {
    "release": lambda backend, grant: backend.release(grant),
    "settle": lambda backend, grant: backend.release(grant, 60),
    "settle what is past": lambda backend, grant: backend.release(grant, 0),
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
    "shorten": lambda backend, grant: backend.request_stop(grant.key, 5),
    "shorten a token's": lambda backend, grant: backend.request_stop(grant.key, 5, grant.token),
    "shorten to more": lambda backend, grant: backend.request_stop(grant.key, 600),
    "shorten another token's": lambda backend, grant: backend.request_stop(
        grant.key, 5, new_token()
    ),
    "release another's": lambda backend, grant: backend.release(_of_another(grant)),
    "settle another's": lambda backend, grant: backend.release(_of_another(grant), 5),
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
def test_end_of_a_marked_grant_is_called_out(
    backend: Any, heard: Heard, key: str, ttl: float | None
) -> None:
    """Once, by the name that the queues of waiters have for the key. Unmarked, it is silent."""
    for end in ENDS.values():
        grant, other = take(backend, key, ttl), take(backend, f"{key}-b")
        # Somebody who does not wait, and somebody who waits for another key.
        contend(backend, key)
        contend(backend, other.key, wanted=True)
        assert end(backend, grant)
        backend.force_release(key)
        assert heard() == []
        assert backend.release(other) is True
        grant = take(backend, key, ttl)
        contend(backend, key, wanted=True)
        assert heard() == [("distlock:wake", backend.queues.name_of(other.key))]
        assert end(backend, grant)
        assert heard() == [("distlock:wake", backend.queues.name_of(key))]
        backend.force_release(key)
        heard()


def test_marked_grant_that_stays_is_silent(backend: Any, heard: Heard, key: str) -> None:
    """What does not let a waiter in wakes none; the mark stays for what will."""
    for event in STAYS.values():
        grant = take(backend, key)
        contend(backend, key, wanted=True)
        event(backend, grant)
        assert heard() == []
        assert held(backend, key).wanted
        assert backend.release(grant) is True
        assert heard() == [("distlock:wake", backend.queues.name_of(key))]
        backend.pause(key, None)
        heard()


def test_end_of_a_pause_is_called_out(backend: Any, heard: Heard, key: str) -> None:
    """Always: who is told of a pause has no grant to mark."""
    backend.pause(key, datetime.now(UTC) + timedelta(hours=1))
    assert contend(backend, key, wanted=True).paused
    for resumed in (True, False):
        assert backend.pause(key, None) is resumed
        assert heard() == [("distlock:wake", backend.queues.name_of(key))]


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
    # Who was woken by a settlement, and marked what is left, is woken by its end.
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    assert backend.release(grant, 600) is True
    contend(backend, key, wanted=True)
    assert len(heard()) == 1
    assert backend.request_stop(key, 5) is not None
    assert backend.force_release(key) is not None
    assert heard() == [("distlock:wake", backend.queues.name_of(key))] * 2


def test_expired_grant_is_called_out_by_nobody(store: RedisStore, key: str) -> None:
    """Its waiters know when it ended, also where Redis is late to remove it."""
    with overheard(single_url()) as heard:
        for number in range(3):
            grant = take(store.backend, f"{key}-{number}", 60)
            contend(store.backend, grant.key, wanted=True)
            store.outlast(65)
            assert store.has_record(grant.key)
            if number == 0:
                assert store.backend.release(grant) is False
            elif number == 1:
                assert store.backend.force_release(grant.key) is None
            else:
                take(store.backend, grant.key, replace=grant.token)
        assert not [name for _channel, name in heard() if key in name]


def test_without_a_subscription_waiters_of_the_process_are_rung(backend: Any, key: str) -> None:
    """Where this process frees the key, threads and coroutines alike; and not where it does not."""
    grant = take(backend, key)
    waiter, other = Waiter(backend, key), Waiter(backend, f"{key}-b")
    assert backend.release(_of_another(grant)) is False
    assert waiter.rung == []
    assert backend.release(grant) is True
    assert (waiter.rung, other.rung) == ([False], [])


@pytest.mark.parametrize("prefix", ["", "[a*?]ünï", "x" * 600])
def test_odd_names_are_called_out_whole(private: Server, heard: Heard, prefix: str) -> None:
    """Each prefix has a channel of its own, and each key its name, as the queues have it."""
    backend, other = (backend_on(private.url, key_prefix=prefix) for _ in range(2))
    channel = f"{prefix}:wake" if prefix else "wake"
    with waiting(backend, "waits") as waiter:
        hand_over(other, backend, waiter, "waits")
    assert heard() == [(channel, backend.queues.name_of("waits"))]
    for name in ODD:
        grant = take(other, name)
        contend(backend, name, wanted=True)
        assert other.release(grant) is True
        assert heard() == [(channel, backend.queues.name_of(name))]


@pytest.mark.parametrize(
    ("rights", "may"), [("&*", True), ("resetchannels &other:*", False), ("&* -publish", False)]
)
def test_user_who_may_not_publish_releases(
    private: Server, client: Any, heard: Heard, key: str, rights: str, *, may: bool
) -> None:
    """The key is free, and the process knows that it was wanted; only the message is missing."""
    client.execute_command("ACL SETUSER", "locker", "on", ">secret", "~*", "+@all", *rights.split())
    backend = backend_on(private.url.replace("//", "//locker:secret@"))
    for end in ENDS.values():
        grant = take(backend, key)
        contend(backend, key, wanted=True)
        assert end(backend, grant)
        assert len(heard()) == may
        backend.force_release(key)
        heard()
    assert backend.pause(key, None) is False
    assert backend.queues.name_of(key) in backend.queues.released_wanted


def test_full_server_calls_out(backend: Any, client: Any, heard: Heard, key: str) -> None:
    """At `maxmemory` what is marked is called out when it ends."""
    ends = [ENDS[name] for name in ("release", "settle", "force_release", "shortening extend")]
    grants = [take(backend, f"{key}-{number}") for number in range(len(ends))]
    for grant in grants:
        contend(backend, grant.key, wanted=True)
    client.config_set("maxmemory", 1)
    for grant, end in zip(grants, ends, strict=True):
        assert end(backend, grant)
        assert heard() == [("distlock:wake", backend.queues.name_of(grant.key))]
