"""The time that one call has, handed down to whatever waits for a store."""

from __future__ import annotations

import math
import threading
import time

import pytest

from django_distlock.core import durations, threads


def test_nobody_is_bounded_outside_of_a_call() -> None:
    """What takes seconds by itself takes those."""
    assert durations.left() == math.inf
    assert durations.left(3.0) == 3.0
    assert durations.end(3.0) == pytest.approx(time.monotonic() + 3, abs=1)


def test_call_takes_no_longer_than_one_around_it() -> None:
    """The sooner end counts, and nothing of it is left behind."""
    soon, late = time.monotonic() + 10, time.monotonic() + 20
    assert durations.spend(soon, durations.spend, late, durations.end) == soon
    assert durations.spend(late, durations.spend, soon, durations.end) == soon
    assert durations.spend(soon, durations.left, 3.0) == 3.0
    assert durations.end() == math.inf


def test_call_that_is_over_has_nothing_left() -> None:
    """Not less than that: it would be no timeout."""
    assert durations.spend(time.monotonic() - 1, durations.left) == 0.0


def test_work_without_a_bound_is_left_behind() -> None:
    """It goes on by itself, and its caller is told."""
    release, done = threading.Event(), threading.Event()

    def work() -> None:
        release.wait(20)
        done.set()

    with pytest.raises(durations.Over):
        durations.spend(time.monotonic() + 0.01, threads.apart, work, "work")
    release.set()
    assert done.wait(20)
    assert durations.spend(time.monotonic() + 20, threads.apart, threading.get_ident, "work") != (
        threading.get_ident()
    )
    assert threads.apart(threading.get_ident, "work") == threading.get_ident()
