"""Redis loses data, or a part of them: fences never repeat, and nobody holds what is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest

from django_distlock.core.errors import BackendUnavailable
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from tests.contract.helpers import held, take
from tests.keeper import Server
from tests.redis_servers import private_redis

from .servers import Restartable, backend_on, client_of, eventually, line_to, restartable, through

pytestmark = pytest.mark.faults

REDIS = "django_distlock.backends.redis.RedisBackend"


@pytest.fixture(params=[False, True], ids=["nothing kept", "all kept"])
def server(request: pytest.FixtureRequest) -> Iterator[Restartable]:
    """Give a server to kill, which keeps nothing, or each answer before it is given."""
    with restartable(durable=request.param) as server:
        yield server


def fences(backend: Any, key: str, times: int) -> list[int]:
    """Return the fences of so many grants in a row."""
    found = []
    for _ in range(times):
        grant = take(backend, key)
        found.append(grant.fence)
        assert backend.release(grant) is True
    return found


def rise(numbers: list[int]) -> bool:
    """Say whether each number is above the one before."""
    return all(before < after for before, after in pairwise(numbers))


def test_flush_ends_every_lease(backend: Any, client: Any, key: str) -> None:
    """After `FLUSHALL` the lease is gone and the key free, and no fence is taken back."""
    found: list[int] = []
    for _ in range(5):
        found += fences(backend, key, 5)
        grant = take(backend, key)
        found.append(grant.fence)
        client.flushall()
        assert backend.extend(grant) is None
        assert backend.extend_many([grant]) == [None]
        assert backend.release(grant) is False
        assert backend.read(key) is None
        assert backend.read_token(grant.token) is None
    assert rise(found)


def test_killed_server_is_trouble_until_it_is_back(server: Restartable, key: str) -> None:
    """Nothing is granted meanwhile. With its data the lease lives on; no fence is repeated."""
    backend = backend_on(server.url)
    found = fences(backend, key, 5)
    for _ in range(2):
        grant = take(backend, key, 60)
        found.append(grant.fence)
        server.kill()
        for operation, arguments in (
            ("acquire", (key, new_token(), 30)),
            ("extend", (grant,)),
            ("release", (grant,)),
            ("read", (key,)),
        ):
            with pytest.raises(BackendUnavailable) as caught:
                getattr(backend, operation)(*arguments)
            assert caught.value.code == "service_unavailable"
        server.start()
        if server.durable:
            assert held(backend, key).token == grant.token
            assert backend.extend(grant).fence == grant.fence
            assert backend.read_token(grant.token) is not None
        else:
            assert backend.extend(grant) is None
        assert backend.release(grant) is server.durable
        found += fences(backend, key, 5)
    assert rise(found)


def test_server_that_became_a_replica_is_left(private: Server, client: Any, key: str) -> None:
    """Whoever was told connects anew: an address may lead to the new primary by now."""
    with private_redis(stop="KILL") as primary, line_to(private.url) as line:
        backend = backend_on(through(line))
        take(backend, f"{key}-a")
        port = urlsplit(primary.url).port or 0
        line._server = ("127.0.0.1", port)
        client.replicaof("127.0.0.1", port)
        with pytest.raises(BackendUnavailable):
            backend.acquire(key, new_token(), 30)
        assert isinstance(backend.acquire(key, new_token(), 30), Grant)


def test_fences_rise_over_a_failover(key: str) -> None:
    """A replica that missed the last grants and is promoted gives higher fences than all before."""
    with ExitStack() as stack:
        primary = stack.enter_context(restartable(repl_diskless_sync_delay=0))
        replica = stack.enter_context(private_redis(stop="KILL"))
        line = stack.enter_context(line_to(primary.url))
        ask = stack.enter_context(client_of(replica.url))
        ask.replicaof("127.0.0.1", int(line.address["PORT"]))
        old, new = backend_on(primary.url), backend_on(replica.url)
        seen = fences(old, key, 3)
        counter, lock = (old._at(what, old._name(key)) for what in ("fence", "lock"))
        # Behind the last release: it has got the counter before that.
        eventually(
            lambda: ask.get(counter) == str(seen[-1]) and not ask.exists(lock),
            "the replica follows",
        )
        line.fate = "lost"
        missed = fences(old, key, 3)
        grant = take(old, key)
        primary.kill()
        ask.replicaof("NO", "ONE")
        assert ask.get(counter) == str(seen[-1])
        # The grant has not come over: its holder learns it, and the next has a higher fence.
        assert new.extend(grant) is None
        assert rise([*seen, *missed, grant.fence, *fences(new, key, 3)])
