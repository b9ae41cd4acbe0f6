"""`permits` on tasks: at most so many of a key run at a time, whatever becomes of the workers."""

from __future__ import annotations

import os
import signal

import pytest

from tests.contract.locking import eventually

from .crews import Hire

both_stores = pytest.mark.parametrize("store", ["default", "redis"])


@both_stores
def test_no_more_than_the_permits_run(hire: Hire) -> None:
    """What finds all permits taken goes back to the queue, and runs behind one of them."""
    with hire(slots=3) as crew:
        results = [crew.send("permit", "wait go") for _ in range(3)]
        crew.begun(2)
        assert not eventually(lambda: len(crew.stage.told("began")) > 2, 2.0)
        crew.let_go(*results)
        assert len(crew.stage.told("began")) == 3
        crew.becomes_free()


@both_stores
def test_permit_of_a_killed_child_comes_back(hire: Hire) -> None:
    """Behind its ttl; and its task, which is delivered again, takes one of the permits."""
    with hire(slots=3) as crew:
        results = [crew.send("permit_late", "wait go") for _ in range(2)]
        child = crew.begun(2)["pid"]
        os.kill(child, signal.SIGKILL)
        results.append(crew.send("permit_late", "wait go"))
        crew.begun(3)
        crew.let_go(*results)
        crew.becomes_free()
