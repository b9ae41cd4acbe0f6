"""Values in Redis that refuse stale writers, on one server and on a cluster, called and awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import redis.asyncio
from redis import Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry

from django_distlock import InvalidArgument, LockUsageError, distlock
from django_distlock.core.errors import FenceRejected
from django_distlock.core.records import FENCE_MAX
from django_distlock.fencing.redis import FencedValue
from django_distlock.fencing.rejecting import Fence
from tests.contract.helpers import race
from tests.contract.locking import held_elsewhere
from tests.contract.redis_clients import close, cluster_url, single_url
from tests.keeper import free_port
from tests.processes import spawn

from .histories import Attempt, attempted, rising, wrong


@dataclass
class Called:
    """A fenced value whose operations are called, or awaited, over a client of each kind.

    Attributes:
        client: Looks at Redis beside the value.
        runner: Awaits the operations; None: they are called.
        awaited: The client that they are awaited by.
    """

    name: str
    client: Any
    runner: asyncio.Runner | None = None
    awaited: Any = None

    def __getattr__(self, operation: str) -> Any:
        if self.runner is None:
            return getattr(FencedValue(self.client, self.name), operation)
        call, run = getattr(FencedValue(self.awaited, self.name), f"a{operation}"), self.runner.run
        return lambda *args: run(call(*args))


def client_on(where: str) -> Any:
    """Connect to the single server, or to the cluster."""
    if where == "server":
        return Redis.from_url(single_url())
    return RedisCluster.from_url(cluster_url())


@pytest.fixture(params=["server", "cluster"])
def value(request: pytest.FixtureRequest, key: str) -> Iterator[Called]:
    """Give a value that nobody wrote yet: the server's is called, the cluster's awaited."""
    client = client_on(request.param)
    if request.param == "server":
        yield Called(key, client)
    else:
        awaited: Any = redis.asyncio.RedisCluster.from_url(cluster_url())
        with asyncio.Runner() as runner:
            yield Called(key, client, runner, awaited)
            runner.run(awaited.aclose())
    client.delete(key)
    close(client)


def by(fence: int) -> Fence:
    """Give a fence of any key."""
    return Fence("stock", fence)


def test_value_comes_back(value: Called) -> None:
    """What a holder writes it reads, as bytes, and may write again with the same fence."""
    assert value.get(by(5)) is None
    value.set(b"\x00\xff", by(5))
    assert value.get(by(5)) == b"\x00\xff"
    value.set("é🔒", by(5))
    assert value.get(by(5)) == value.read() == "é🔒".encode()
    value.set(b"", by(6))
    assert value.get(by(6)) == b""


def test_lease_is_what_one_writes_with(value: Called) -> None:
    """A lease and the next one of its key are in order."""
    lock = distlock(value.name, backend="redis")
    with lock as before:
        value.set("first", before)
    with lock as lease:
        assert value.get(lease) == b"first"
        with pytest.raises(FenceRejected):
            value.set("late", before)
        assert value.read() == b"first"


def test_lower_fence_is_refused_and_changes_nothing(value: Called) -> None:
    """Whatever a stale holder asks, the error tells both fences."""
    value.set("new", by(7), 3600)
    before = (value.client.hgetall(value.name), value.client.pexpiretime(value.name))
    stale: list[tuple[Any, ...]] = [("get", by(6)), ("set", "old", by(6)), ("delete", by(6))]
    for operation, *arguments in stale:
        with pytest.raises(FenceRejected, match="fence 7.*refuses fence 6") as caught:
            getattr(value, operation)(*arguments)
        assert (caught.value.current, caught.value.fence, caught.value.key) == (7, 6, "stock")
        assert value.name in caught.value.row
        assert (value.client.hgetall(value.name), value.client.pexpiretime(value.name)) == before


def test_first_read_refuses_lower_fences_from_then_on(value: Called) -> None:
    """Who read an older value, or none, may not write behind somebody who read to change it."""
    assert value.get(by(5)) is None
    with pytest.raises(FenceRejected):
        value.set("late", by(4))
    assert value.read() is None
    value.set("old", by(9))
    # As numbers: its text is not above that of 9.
    assert value.get(by(10)) == b"old"
    with pytest.raises(FenceRejected):
        value.set("late", by(9))
    assert value.get(by(10)) == b"old"


def test_plain_read_raises_nothing(value: Called) -> None:
    """Whoever only looks is in nobody's way, and makes no key."""
    assert value.read() is None
    assert not value.client.exists(value.name)
    value.set("x", by(5))
    assert value.read() == b"x"
    value.set("y", by(5))


def test_delete_keeps_the_fence(value: Called) -> None:
    """The value is gone, also one with a ttl, and a stale writer does not bring it back."""
    assert value.delete(by(4)) is False
    value.set("x", by(5), 3600)
    assert value.delete(by(6)) is True
    assert value.delete(by(6)) is False
    assert value.read() is None
    assert value.client.ttl(value.name) == -1
    with pytest.raises(FenceRejected):
        value.set("late", by(5))


def test_ttl_takes_value_and_fence(value: Called) -> None:
    """Never sooner than said; then any fence passes, as the documentation says."""
    for ttl in (1.0009, timedelta(seconds=1.0009)):
        value.set("x", by(7), ttl)
        assert 0 < value.client.pttl(value.name) <= 1001
    value.set("x", by(7), 0.001)
    while value.client.exists(value.name):
        pass
    value.set("y", by(1))
    assert value.get(by(1)) == b"y"


def test_write_without_a_ttl_stays(value: Called) -> None:
    """It lasts for ever, also where the value before did not; a read leaves the time as it is."""
    value.set("x", by(5), 3600)
    assert value.get(by(6)) == b"x"
    assert 3500 < value.client.ttl(value.name) <= 3600
    value.set("y", by(6))
    assert value.client.ttl(value.name) == -1


def test_highest_fences_are_told_apart(value: Called) -> None:
    """Fifteen digits lose none, in neither direction, and are stored as digits."""
    value.set("x", by(FENCE_MAX - 1))
    value.set("y", by(FENCE_MAX))
    assert value.client.hget(value.name, "fence") == str(FENCE_MAX).encode()
    with pytest.raises(FenceRejected, match=str(FENCE_MAX)):
        value.get(by(FENCE_MAX - 1))


@pytest.mark.parametrize("kind", ["string", "list", "hash", "hash with a word"])
def test_key_of_another_kind_is_refused(value: Called, kind: str) -> None:
    """Nothing of others is overwritten, and the error names the key."""
    refused: list[tuple[Any, ...]] = [("get", by(5)), ("set", "x", by(5)), ("delete", by(5))]
    if kind == "string":
        value.client.set(value.name, "mine")
    elif kind == "list":
        value.client.rpush(value.name, "mine")
    else:
        value.client.hset(value.name, "fence" if kind.endswith("word") else "other", "mine")
    dump = value.client.dump(value.name)
    if kind.startswith("hash"):
        assert value.read() is None  # A plain look does not judge.
    else:
        refused.append(("read",))
    for operation, *arguments in refused:
        with pytest.raises(LockUsageError, match=f"'{value.name}' in Redis is .*no fenced value"):
            getattr(value, operation)(*arguments)
        assert value.client.dump(value.name) == dump


def test_bad_argument_is_refused(value: Called) -> None:
    """Before anything is asked."""
    bad: list[tuple[list[Any], str]] = [
        *(([each, by(5)], "bytes or str") for each in (5, None, ["x"])),
        *((["x", by(5), each], "ttl") for each in (0, -1, True, float("nan"), 1e12)),
    ]
    for arguments, named in bad:
        with pytest.raises(InvalidArgument, match=named):
            value.set(*arguments)
    assert not value.client.exists(value.name)


def test_lease_without_a_fence_is_refused(value: Called) -> None:
    """A block that runs without its lock has nothing to write with."""
    lock = distlock(value.name, backend="redis", wait=0, on_conflict="run")
    with held_elsewhere(lock), lock as lease:
        assert not lease.held
        with pytest.raises(LockUsageError, match="no fence"):
            value.set("x", lease)
    assert not value.client.exists(value.name)


def test_client_that_decodes_gives_the_same(key: str) -> None:
    """Text in UTF-8 comes back as its bytes, and a refusal is one."""
    with Redis.from_url(single_url(), decode_responses=True) as decoding:
        value = FencedValue(decoding, key)
        value.set("é", by(5))
        assert value.get(by(6)) == value.read() == "é".encode()
        with pytest.raises(FenceRejected, match="fence 6"):
            value.get(by(5))
        decoding.delete(key)


def test_server_that_forgot_the_script_is_told_again(value: Called) -> None:
    """After a restart, or SCRIPT FLUSH, an operation works at once."""
    value.set("x", by(5))
    value.client.script_flush()
    assert value.get(by(5)) == b"x"


def test_server_that_is_not_there_is_no_missing_value(key: str) -> None:
    """What redis-py raises comes through."""
    with (
        Redis(port=free_port(), retry=Retry(NoBackoff(), 0)) as nowhere,
        pytest.raises(RedisConnectionError),
    ):
        FencedValue(nowhere, key).get(by(5))


# Many at once

LAST = 300


@pytest.mark.parametrize("where", ["server", "cluster"])
def test_no_lower_fence_lands_behind_a_higher_one(key: str, where: str) -> None:
    """Four processes read and write with fences that mostly rise; the order is right throughout."""
    target = "tests.integration.test_fenced_redis:write_rising"
    with ExitStack() as stack:
        workers = [stack.enter_context(spawn(target, where, key, seed)) for seed in range(4)]
        for worker in workers:
            worker.wait_for("ready", timeout=60)
        histories = [[Attempt(*each) for each in history] for history in race(workers, 60)]
    together = [each for history in histories for each in history]
    assert wrong(together) == []
    assert {each.passed for each in together} == {True, False}
    # They met: each was refused by what another wrote.
    assert all(any(not a.passed and b.passed for a, b in pairwise(each)) for each in histories)
    client = client_on(where)
    assert client.hgetall(key) == {b"fence": b"%d" % LAST, b"value": b"%d" % LAST}
    client.delete(key)
    close(client)


def write_rising(where: str, key: str, seed: int) -> list[Attempt]:
    """Be a process of writers."""
    client = client_on(where)
    value = FencedValue(client, key)
    client.exists(key)
    print("ready")
    input()

    def read(fence: int) -> None:
        found = value.get(by(fence))
        # Whoever may read with this fence finds no higher one's value.
        assert found is None or int(found) <= fence

    def write(fence: int) -> None:
        value.set(str(fence), by(fence))

    fences = rising(LAST, seed)
    history = [attempted(fence, act) for fence in fences for act in (read, write)]
    close(client)
    return history
