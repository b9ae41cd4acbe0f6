"""What the benchmarks of Redis rest on: peers that lock, rows that are real, and a count."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis

from django_distlock.core.holders import Holder
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from tests.benchmarks import redis_peers
from tests.benchmarks.candidates import NoLock
from tests.benchmarks.databases import FREE, LIVE, filled_grant
from tests.benchmarks.proxy import READ_BYTES, Proxy, RedisReader
from tests.benchmarks.redis_data import BATCH, store
from tests.benchmarks.redis_peers import Kind, prove, redis_py


@pytest.fixture
def client() -> Iterator[Redis]:
    """Give a client of the tests' server."""
    with Redis.from_url(os.environ["DISTLOCK_TEST_REDIS_URL"]) as made:
        yield made


class NotQuite:
    """A lock that has one fault."""

    def __init__(self, client: Redis, key: str, seconds: int, fault: str):
        self._client, self._key, self._seconds, self._fault = client, key, seconds, fault

    def acquire(self, *, blocking: bool) -> bool:
        """Take the key as the fault says."""
        if self._fault == "knows of no lock":
            return True
        ends = None if self._fault == "ends by itself" else self._seconds
        alone = self._fault != "granted the same key"
        return bool(self._client.set(self._key, "x", nx=alone, ex=ends))

    def release(self) -> None:
        """Give it back, unless that is the fault."""
        if self._fault != "not given back":
            self._client.delete(self._key)


@pytest.mark.parametrize(
    "fault", ["knows of no lock", "ends by itself", "granted the same key", "not given back"]
)
def test_candidate_that_does_not_lock_is_found_out(
    client: Redis, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """It must be in the server, with an end, for one at a time, and go."""
    proof = f"proof-{uuid4()}"
    monkeypatch.setattr(redis_peers, "PROOF", proof)
    kind = Kind(
        name="peer",
        make=lambda key, seconds: NotQuite(client, key, seconds, fault),
        extend=lambda lock: None,
    )
    with pytest.raises(NoLock, match=fault):
        prove(kind, client)
    client.delete(proof)


def test_candidate_that_locks_passes(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it leaves nothing behind."""
    proof = f"proof-{uuid4()}"
    monkeypatch.setattr(redis_peers, "PROOF", proof)
    prove(redis_py(client), client)
    assert not list(client.scan_iter(f"*{proof}*"))


def test_filled_locks_are_like_those_of_the_package() -> None:
    """They are listed, found, in the way, extended and released, and the counters go on."""
    number = BATCH + 1  # In the second batch.
    with store() as made:
        made.fill(locks=number, free=2)
        backend, keys = made.backend, {f"{LIVE}:{each}" for each in range(1, number + 1)}
        assert {each.key for each in backend.list(limit=number + 1).records} == keys
        # A record and a token for each, and counters: of these, of what was copied, of the free.
        assert made.client.dbsize() == 2 * number + number + 1 + 2
        token = new_token()
        template = backend.acquire(f"{FREE}:1", token, 30, Holder())
        assert isinstance(template, Grant)
        grant = filled_grant(template, number)
        found = backend.read_token(grant.token)
        assert found
        assert found.key == grant.key
        assert isinstance(backend.acquire(grant.key, new_token(), 30), Contended)
        assert isinstance(backend.extend(grant), Grant)
        assert backend.release(grant) is True
        again = backend.acquire(grant.key, new_token(), 30)
        assert isinstance(again, Grant)
        assert again.fence > found.fence


def test_round_trips_are_told_from_commands(client: Redis) -> None:
    """Commands that are sent together are one round trip, and so is a long one in pieces."""
    where: dict[str, Any] = client.connection_pool.connection_kwargs
    with (
        Proxy(where["host"], where["port"], RedisReader).running() as proxy,
        Redis(port=proxy.port) as through,
    ):
        through.ping()
        proxy.take()
        with through.pipeline(transaction=False) as together:
            together.ping().ping().execute()
        found = proxy.take()
        assert (found.round_trips, found.statements) == (1, 2)
        through.ping()
        through.ping()
        found = proxy.take()
        assert (found.round_trips, found.statements) == (2, 2)
        # More than the proxy reads at once.
        through.echo("x" * 5 * READ_BYTES)
        found = proxy.take()
        assert (found.round_trips, found.statements) == (1, 1)
