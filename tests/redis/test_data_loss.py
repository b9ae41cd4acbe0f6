"""Redis loses data, or a part of them: fences never repeat, and nobody holds what is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest

from django_distlock.core.errors import BackendUnavailable
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from tests.contract.helpers import held
from tests.redis_servers import private_redis

from .asking import Way
from .servers import Proxy, Restartable, backend_on, client_of, eventually, restartable

pytestmark = pytest.mark.faults

REDIS = "django_distlock.backends.redis.RedisBackend"


@pytest.fixture(params=[False, True], ids=["nothing kept", "all kept"])
def server(request: pytest.FixtureRequest) -> Iterator[Restartable]:
    """Give a server to kill, which keeps nothing, or each answer before it is given."""
    with restartable(durable=request.param) as server:
        yield server


def fences(backend: Any, key: str, way: Way, times: int) -> list[int]:
    """Return the fences of so many grants in a row."""
    found = []
    for _ in range(times):
        grant = way.take(backend, key)
        found.append(grant.fence)
        assert way.ask(backend, "release", grant) is True
    return found


def rise(numbers: list[int]) -> bool:
    """Say whether each number is above the one before."""
    return all(before < after for before, after in pairwise(numbers))


def test_fences_rise_over_flushes(backend: Any, client: Any, key: str, way: Way) -> None:
    """`FLUSHALL` in the middle of a run of grants takes no fence back."""
    found: list[int] = []
    for _ in range(10):
        found += fences(backend, key, way, 5)
        client.flushall()
    assert rise(found)


def test_flush_ends_every_lease(backend: Any, client: Any, key: str, way: Way) -> None:
    """After `FLUSHALL` the holder is told that the lease is gone, and the key is free."""
    grant = way.take(backend, key)
    client.flushall()
    assert way.ask(backend, "extend", grant) is None
    assert backend.extend_many([grant]) == [None]
    assert way.ask(backend, "release", grant) is False
    assert way.ask(backend, "read", key) is None
    assert backend.read_token(grant.token) is None
    assert way.take(backend, key).fence > grant.fence


def test_killed_server_is_trouble_until_it_is_back(server: Restartable, key: str, way: Way) -> None:
    """While the server is down nothing is granted, and nothing is contended."""
    backend = backend_on(server.url)
    grant = way.take(backend, key)
    server.kill()
    for _ in range(3):
        for operation, arguments in (
            ("acquire", (key, new_token(), 30)),
            ("extend", (grant,)),
            ("release", (grant,)),
            ("read", (key,)),
        ):
            with pytest.raises(BackendUnavailable) as caught:
                way.ask(backend, operation, *arguments)
            assert caught.value.code == "service_unavailable"
    server.start()
    assert isinstance(way.take(backend, f"{key}-b"), Grant)


def test_fences_rise_over_a_killed_server(server: Restartable, key: str, way: Way) -> None:
    """With its data or without, the server that is started again repeats no fence."""
    backend = backend_on(server.url)
    found = fences(backend, key, way, 5)
    for _ in range(2):
        server.kill()
        server.start()
        _reconnected(backend, key)
        found += fences(backend, key, way, 5)
    assert rise(found)


def test_lease_outlives_a_killed_server_that_keeps_its_data(
    server: Restartable, key: str, way: Way
) -> None:
    """With every answer on the disk the lease is still the holder's; without, the key is free."""
    backend = backend_on(server.url)
    grant = way.take(backend, key, 60)
    server.kill()
    server.start()
    _reconnected(backend, key)
    if server.durable:
        assert held(backend, key).token == grant.token
        extended = way.ask(backend, "extend", grant)
        assert extended.fence == grant.fence
        assert backend.read_token(grant.token) is not None
        assert way.ask(backend, "release", grant) is True
    else:
        assert way.ask(backend, "extend", grant) is None
        assert way.ask(backend, "release", grant) is False
    assert way.take(backend, key).fence > grant.fence


def _reconnected(backend: Any, key: str) -> None:
    """Find out that the connection of a moment ago is gone: one error at most."""
    try:
        backend.read(key)
    except BackendUnavailable:
        backend.read(key)


def test_stale_counter_repeats_no_fence(backend: Any, client: Any, key: str, way: Way) -> None:
    """A counter that lies behind, as on a replica that lagged, is passed over."""
    before = fences(backend, key, way, 3)
    name = f"distlock:fence:{backend._name(key)}"
    assert int(client.get(name)) == before[-1]
    client.set(name, before[0] - 5000)
    assert rise([*before, *fences(backend, key, way, 3)])
    client.delete(name)
    assert fences(backend, key, way, 1)[0] > before[-1]


def test_fences_rise_over_a_failover(key: str, way: Way) -> None:
    """A replica that missed the last grants and is promoted gives higher fences than all before."""
    with ExitStack() as stack:
        primary = stack.enter_context(restartable(repl_diskless_sync_delay=0))
        replica = stack.enter_context(private_redis(stop="KILL"))
        line = stack.enter_context(Proxy(primary.url))
        ask = stack.enter_context(client_of(replica.url))
        ask.replicaof("127.0.0.1", line.port)
        old, new = backend_on(primary.url), backend_on(replica.url)
        seen = fences(old, key, way, 3)
        counter = f"distlock:fence:{old._name(key)}"
        eventually(lambda: ask.get(counter) == str(seen[-1]), "the replica follows")
        line.replies = "lost"
        missed = fences(old, key, way, 3)
        grant = way.take(old, key)
        primary.kill()
        ask.replicaof("NO", "ONE")
        assert ask.get(counter) == str(seen[-1])
        # The grant has not come over: its holder learns it, and the next has a higher fence.
        assert way.ask(new, "extend", grant) is None
        assert rise([*seen, *missed, grant.fence, *fences(new, key, way, 3)])
