"""`permits` on tasks: at most so many of a key run at a time, whatever becomes of the workers."""

from __future__ import annotations

import os
import signal

from .crews import Crew


def test_no_more_than_the_permits_run(prefork: Crew) -> None:
    """What finds all permits taken goes back to the queue, and runs behind one of them."""
    results = [prefork.send("permit", "wait go") for _ in range(3)]
    prefork.begun(2)
    prefork.until(lambda: len(prefork.stage.told("refused")) >= 4, "four attempts")
    assert len(prefork.stage.told("began")) == 2
    prefork.let_go(*results)
    assert len(prefork.stage.told("began")) == 3
    prefork.becomes_free()


def test_permit_of_a_killed_child_comes_back(prefork: Crew) -> None:
    """Behind its ttl; and its task, which is delivered again, takes one of the permits."""
    results = [prefork.send("permit_late", "wait go") for _ in range(2)]
    os.kill(prefork.begun(2)["pid"], signal.SIGKILL)
    results.append(prefork.send("permit_late", "wait go"))
    prefork.begun(3)
    prefork.let_go(*results)
    prefork.becomes_free()
