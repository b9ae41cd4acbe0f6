"""The threads that end what is gone."""

from __future__ import annotations

from threading import Thread

import pytest

from django_distlock.database import connections as module
from django_distlock.database.connections import Worker
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


def test_thread_that_begins_late_leaves_the_work_to_the_one_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal's exception may come before a thread that is being started lives."""
    worker = Worker("distlock-test-late")
    late: list[Thread] = []
    with monkeypatch.context() as interrupted:
        interrupted.setattr(module, "start_thread", late.append)
        worker.start()
    worker.start()
    late[0].start()
    late[0].join(10)
    assert not late[0].is_alive()
    done: list[int] = []
    worker.put(lambda: done.append(1))
    assert eventually(lambda: done == [1])
    assert len(threads("distlock-test-late")) == 1
