"""The threads that end what is gone."""

from __future__ import annotations

import pytest

from django_distlock.database.workers import Worker
from tests.contract.locking import eventually

from .test_heartbeat_thread import Interrupted, interrupted_starts, threads


def test_thread_whose_start_was_interrupted_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal's exception behind the start leaves no second worker, and none without work."""
    worker = Worker("distlock-test-worker")
    with interrupted_starts(monkeypatch), pytest.raises(Interrupted):
        worker.start()
    worker.start()
    done: list[int] = []
    worker.put(lambda: done.append(1))
    assert eventually(lambda: done == [1])
    assert len(threads("distlock-test-worker")) == 1


def test_worker_that_was_replaced_leaves_its_work() -> None:
    """What it took for the one in its place is done by that."""
    worker = Worker("distlock-test-replaced")
    worker.start()
    worker._thread = None
    worker.start()
    found: list[int] = []
    for number in range(3):
        worker.put(lambda number=number: found.append(number))  # type: ignore[misc]
    assert eventually(lambda: sorted(found) == [0, 1, 2])
    assert eventually(lambda: len(threads("distlock-test-replaced")) == 1)
