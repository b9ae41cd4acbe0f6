"""Wake-ups on a cluster: one of its servers is heard, and passes on what the others were told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from django_distlock.core.errors import LockError
from tests.contract.helpers import take

from .clusters import Cluster, at, spoilable
from .hearing import Warned, hand_over, subscriptions, waiting
from .servers import eventually

pytestmark = pytest.mark.faults


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Give a cluster of this test alone, which may lose a server."""
    with spoilable() as cluster:
        yield cluster


def heard_at(ports: list[int]) -> int:
    """Return the port of the server with the subscription, which is on one of them."""
    found: list[int] = []

    def is_one() -> bool:
        found.clear()
        for port in ports:
            with at(port) as node:
                found.extend([port] * subscriptions(node))
        return len(found) == 1

    # Servers take a moment to notice that a connection was closed.
    eventually(is_one, "one server is heard")
    return found[0]


def test_every_server_is_heard(cluster: Cluster, key: str, warned: Warned) -> None:
    """On one connection to one of them, and not always to the same, whichever has the key.

    Where that one ends another is heard, and no waiter misses it.
    """
    backend, ports = cluster.backend, cluster.ports
    names = [cluster.keys_of(port, key, 1)[0] for port in ports]
    heard: set[int] = set()
    for name in names * 5:
        with waiting(backend, name) as waiter:
            heard.add(heard_at(ports))
            hand_over(backend, backend, waiter, name)
    assert len(heard) > 1
    assert warned() == []
    with waiting(backend, f"{key}-none") as other:
        port = heard_at(ports)
        (name,) = cluster.keys_of(next(each for each in ports if each != port), key, 1)
        with waiting(backend, name) as waiter:
            hand_over(backend, backend, waiter, name)
            other.rung.clear()
            with at(port) as node:
                node.shutdown(nosave=True, now=True, force=True)
            eventually(lambda: other.rung == [False, True], "another server is heard")
            hand_over(backend, backend, waiter, name)
    assert len(warned()) == 1


@pytest.mark.usefixtures("restless")
def test_server_that_left_the_cluster_is_left(cluster: Cluster, key: str, warned: Warned) -> None:
    """It would go on answering, and hear of no key any more."""
    backend, ports = cluster.backend, cluster.ports
    with waiting(backend, key) as waiter:
        port = heard_at(ports)
        others = [each for each in ports if each != port]
        waiter.rung.clear()
        _take_out(port, others)
        (name,) = cluster.keys_of(port, key, 1)
        eventually(lambda: _is_granted(backend, name), "another server has its keys")
        eventually(lambda: waiter.rung == [False, True], "another server is heard")
        assert heard_at(ports) != port
        hand_over(backend, backend, waiter, key)
    assert len(warned()) == 1


def _take_out(port: int, others: list[int]) -> None:
    """Take a server out of a cluster; another one gets its slots, and it goes on by itself."""
    with at(port) as node:
        gone = node.cluster("MYID")
        slots = [
            slot
            for first, last, owner, *_more in node.execute_command("CLUSTER SLOTS")
            if owner[1] == port
            for slot in range(first, last + 1)
        ]
        node.flushall()
        node.cluster("RESET", "HARD")
    for other in others:
        with at(other) as node:
            node.cluster("FORGET", gone)
    with at(others[0]) as heir:
        heir.execute_command("CLUSTER ADDSLOTS", *slots)


def _is_granted(backend: Any, key: str) -> bool:
    # What is wrong meanwhile depends on how far they are.
    with suppress(LockError):
        return bool(backend.release(take(backend, key)))
    return False
