"""What is cut short in this process gives nobody another one's answer."""

from __future__ import annotations

from typing import Any

import pytest

from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant, Record
from tests.contract.helpers import contend, held, take
from tests.contract.stores_redis import RedisStore
from tests.interrupting import Interrupted
from tests.keeper import Server

from .servers import backend_on, eventually


def interrupt_next_answer(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt whoever reads the next answer, before any of it is read."""
    asked = backend.store._lines
    every = getattr(asked, "_lines", {"": asked}).values()
    for connection in (each for lines in every for each in lines._idle):

        def interrupt(*_: object, **__: object) -> None:
            monkeypatch.undo()
            raise Interrupted

        monkeypatch.setattr(connection, "read_response", interrupt)


@pytest.fixture(params=["redis", "redis_cluster"])
def backend(request: pytest.FixtureRequest, store: RedisStore, on_cluster: RedisStore) -> Any:
    """Give a backend on one server, and one on a cluster."""
    return (store if request.param == "redis" else on_cluster).variant()


def test_interrupted_question_leaves_no_answer_behind(
    backend: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grant of a key is not taken for that of another key, which somebody else holds."""
    other = take(backend, f"{key}-b")
    # Opens a connection, on which the script is known.
    assert backend.release(take(backend, f"{key}-a")) is True
    interrupt_next_answer(backend, monkeypatch)
    with pytest.raises(Interrupted):
        backend.acquire(f"{key}-a", new_token(), 30)
    # In the same slot of the cluster or not: whoever asks next gets the answer to that.
    for _ in range(3):
        assert contend(backend, f"{key}-b").fence == other.fence
        assert isinstance(backend.acquire(f"{key}-a", new_token(), 30), Contended)
    assert backend.release(other) is True


def test_interrupted_extends_leave_no_answer_behind(
    backend: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are the answers to several questions at once."""
    grants = [take(backend, f"{key}-{number}") for number in range(5)]
    backend.extend_many(grants)
    interrupt_next_answer(backend, monkeypatch)
    with pytest.raises(Interrupted):
        backend.extend_many(grants)
    assert [backend.release(grant) for grant in grants] == [True] * 5


def test_connection_to_a_primary_of_the_past_is_not_used(
    private: Server, client: Any, key: str
) -> None:
    """Behind Sentinel, what one connection has learnt about the primary holds for all of them."""
    backend = backend_on(private.url)
    take(backend, key)
    before = {each["id"] for each in client.client_list()}
    pool = backend.store.client.connection_pool
    # As a pool behind Sentinel tells who the primary is.
    pool.master_address = ("127.0.0.1", 1)
    assert held(backend, key).fence
    after = {each["id"] for each in client.client_list()}
    assert len(after) == len(before)
    assert after != before
    settings = pool.connection_kwargs
    pool.master_address = (settings["host"], settings["port"])
    assert held(backend, key).fence
    assert {each["id"] for each in client.client_list()} == after


def test_settled_record_that_is_ended_at_once_is_gone(store: RedisStore, key: str) -> None:
    """Whatever the moment, it is described, and leaves nothing that Redis would keep."""
    for number in range(30):
        grant = take(store.backend, f"{key}-{number}")
        assert isinstance(grant, Grant)
        store.backend.release(grant, 60)
        record = store.backend.request_stop(grant.key, 0)
        assert record is not None
        assert isinstance(record, Record)
        assert record.token == grant.token
    # Redis counts milliseconds.
    names = [f"{key}-{number}" for number in range(30)]
    eventually(lambda: not any(map(store.has_record, names)), "the records are gone")
