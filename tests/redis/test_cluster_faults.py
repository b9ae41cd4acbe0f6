"""A cluster whose servers go, and whose slots move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis.connection import DefaultParser
from redis.crc import key_slot

from django_distlock.backends.redis import cluster as cluster_lines
from django_distlock.core.errors import BackendUnavailable, LockError
from django_distlock.core.keys import new_token
from django_distlock.core.records import UNKNOWN, Contended, Grant
from tests.contract.helpers import held, listed, take

from .clusters import Cluster, at, spoilable
from .servers import eventually

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Give a cluster whose slots the tests of this module move."""
    with spoilable() as cluster:
        yield cluster


@pytest.fixture
def doomed() -> Iterator[Cluster]:
    """Give a cluster of this test alone, which may lose a server."""
    with spoilable() as cluster:
        yield cluster


def test_only_the_server_that_is_gone_is_trouble(doomed: Cluster, key: str) -> None:
    """Its leases are unknown, and its keys neither granted nor contended; others are as before."""
    # The one that a client would ask about the cluster.
    port = doomed.client.get_primaries()[0].port
    others = [each for each in doomed.ports if each != port]
    lost, *more = doomed.keys_of(port, key, 4)
    gone = [take(doomed.backend, name) for name in more]
    safe = [take(doomed.backend, name) for each in others for name in doomed.keys_of(each, key)]
    assert all(isinstance(each, Grant) for each in doomed.backend.extend_many([*gone, *safe]))
    with at(port) as node:
        node.shutdown(nosave=True, now=True, force=True)
    for _ in range(2):
        answers = doomed.backend.extend_many([*gone, *safe])
        assert answers[:3] == [UNKNOWN] * 3
        assert all(isinstance(each, Grant) for each in answers[3:])
        with pytest.raises(BackendUnavailable) as caught:
            doomed.backend.acquire(lost, new_token(), 30)
        assert caught.value.code == "service_unavailable"
        assert isinstance(doomed.backend.extend(safe[0]), Grant)
    with pytest.raises(BackendUnavailable):
        doomed.backend.extend_many(gone)
    # A list that lacked what one server has would look complete.
    with pytest.raises(BackendUnavailable):
        listed(doomed.backend, key)
    assert doomed.backend.release(safe[0]) is True


def test_lock_follows_its_slot(cluster: Cluster, key: str) -> None:
    """A lease whose slot has moved to another server is extended and released there."""
    grant = take(cluster.backend, key)
    source = cluster.node_of(key).port
    cluster.move(key)
    assert isinstance(cluster.backend.acquire(key, new_token(), 30), Contended)
    assert cluster.backend.read(key).token == grant.token
    assert isinstance(cluster.backend.extend(grant), Grant)
    assert cluster.backend.release(grant) is True
    assert take(cluster.backend, key).fence > grant.fence
    with at(source) as node:
        assert node.keys(f"*{key}*") == []


def test_redirections_are_known_to_any_redis_py(
    cluster: Cluster, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 6, its parsers have no class for them: its cluster's client has one of its own."""
    for word in ("ASK", "MOVED", "TRYAGAIN"):
        monkeypatch.delitem(DefaultParser.EXCEPTION_CLASSES, word, raising=False)
    grant = take(cluster.backend, key)
    with cluster.moving(key) as move_one:
        move_one()
        with pytest.raises(BackendUnavailable):
            cluster.backend.acquire(key, new_token(), 30)
        move_one()
        assert isinstance(cluster.backend.extend(grant), Grant)
    assert isinstance(cluster.backend.extend(grant), Grant)


def test_many_leases_follow_their_slots(cluster: Cluster, key: str) -> None:
    """Of leases extended together, those whose slots have moved are found where they are."""
    grants = [take(cluster.backend, f"{key}-{number}") for number in range(6)]
    for grant in grants[:2]:
        cluster.move(grant.key)
    for _ in range(2):
        answers = cluster.backend.extend_many(grants)
        assert all(isinstance(each, Grant) for each in answers)
    assert sorted(listed(cluster.backend, key)) == sorted(grant.key for grant in grants)


def test_slot_on_its_way_to_a_server_that_has_joined(doomed: Cluster, key: str) -> None:
    """A record that is there already is asked for there, though the client knows no such server."""
    grant = take(doomed.backend, key)
    other = take(doomed.backend, f"{key}-b")
    with doomed.joined() as port, doomed.moving(key, port) as move_one:
        move_one()
        move_one()
        assert isinstance(doomed.backend.extend(grant), Grant)
        answers = doomed.backend.extend_many([grant, other])
        assert all(isinstance(each, Grant) for each in answers)
        assert doomed.backend.release(grant) is True


def test_server_that_is_told_is_asked_whatever_the_others_know(
    cluster: Cluster, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks another one where a slot is may hear where it was."""
    backend = cluster.another()
    grant = take(backend, key)
    monkeypatch.setattr(backend.store._lines, "_look", lambda: None)
    cluster.move(key)
    assert isinstance(backend.extend(grant), Grant)


def test_what_a_command_asks_for_follows_its_slot(cluster: Cluster, key: str) -> None:
    """A note is read and written where it is, also by a process that asks for nothing else."""
    cluster.backend.notes.put(key, 5, 60)
    other = cluster.another()
    assert other.notes.get(key) == 5
    with cluster.moving(key) as move_one:
        move_one()
        assert other.notes.get(key) == 5
    assert other.notes.get(key) == 5
    other.notes.put(key, 6, 60)
    assert cluster.backend.notes.get(key) == 6


def test_keys_on_a_server_that_has_joined_are_listed(
    doomed: Cluster, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a process that asks about no key, and so is told of no slot that has moved."""
    monkeypatch.setattr(cluster_lines, "LOOK_SECONDS", 0)
    take(doomed.backend, key)
    lister = doomed.another()
    assert listed(lister, key) == [key]
    with doomed.joined() as port:
        doomed.move(key, port)
        eventually(lambda: listed(lister, key) == [key], "the key is listed")
        assert len(lister._clocks()) == 4


def test_slot_on_its_way_is_trouble_and_no_grant(cluster: Cluster, key: str) -> None:
    """With the record here and the fence there, nothing is granted, and it is said why."""
    grant = take(cluster.backend, key)
    with cluster.moving(key) as move_one:
        move_one()
        with pytest.raises(LockError) as caught:
            cluster.backend.acquire(key, new_token(), 30)
    assert type(caught.value) is BackendUnavailable
    assert caught.value.code == "service_unavailable"
    assert held(cluster.backend, key).token == grant.token


def test_slot_without_a_server_keeps_no_other_from_its_extend(doomed: Cluster, key: str) -> None:
    """A lease whose slot nobody serves is unknown; those of the others get their time."""
    lost, *safe = [take(doomed.backend, f"{key}-{number}") for number in range(4)]
    slot = key_slot(doomed.lock(lost.key).encode())
    for port in doomed.ports:
        with at(port) as node:
            node.cluster("DELSLOTS", slot)
    answers: list[Any] = []

    def answered() -> bool:
        # The nodes tell one another; one of them may still redirect to another.
        answers[:] = doomed.backend.extend_many([lost, *safe])
        return answers[0] is UNKNOWN

    eventually(answered, "the lease is unknown")
    assert all(isinstance(each, Grant) for each in answers[1:])
    # The client has learned by now that nobody serves the slot.
    again = doomed.backend.extend_many([lost, *safe])
    assert again[0] is UNKNOWN
    assert all(isinstance(each, Grant) for each in again[1:])
    with pytest.raises(BackendUnavailable):
        doomed.backend.read(lost.key)
