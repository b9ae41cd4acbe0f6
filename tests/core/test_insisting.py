"""Asking again about a lease of one's own, driven by hand: no clock, no store, no sleep."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import pytest

from django_distlock.core.errors import BackendUnavailable
from django_distlock.core.insisting import Answer, insisting
from django_distlock.core.records import UNKNOWN, Grant

GRANT = Grant("key", "token", 1, 10.0, datetime(2026, 1, 2, tzinfo=UTC), None)
DOWN = BackendUnavailable("down")

#: An answer, or why there is none.
Given = Answer | BackendUnavailable


def ask(
    answer: Callable[[int], Given],
    *,
    deadline: float = 10.0,
    latency: float = 0.0,
    pauses: Iterable[float] = (),
) -> tuple[Given, list[float], list[float]]:
    """Insist; give the answer, the times of the questions, and the pauses."""
    now = 0.0
    asked: list[float] = []
    slept: list[float] = []

    def question(bound: float) -> Answer:
        nonlocal now
        assert 0 < bound <= 1.0
        given = answer(len(asked))
        asked.append(now)
        now += latency
        if isinstance(given, BackendUnavailable):
            raise given
        return given

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    try:
        found: Given = insisting(
            question, clock=lambda: now, sleep=sleep, deadline=deadline, pauses=iter(pauses)
        )
    except BackendUnavailable as error:
        found = error
    return found, asked, slept


@pytest.mark.parametrize("answer", [GRANT, True, False, None])
def test_answer_of_a_store_that_knows_is_final(answer: Answer) -> None:
    """Extended, released or gone: one question is enough."""
    assert ask(lambda _: answer) == (answer, [0.0], [])


def test_unknown_is_asked_again_with_pauses() -> None:
    """A row that a transaction holds is asked for until it is let go."""
    answer, asked, slept = ask(lambda n: UNKNOWN if n < 3 else True, pauses=[0.1, 0.2, 0.4])
    assert answer is True
    assert asked == pytest.approx([0.0, 0.1, 0.3, 0.7])
    assert slept == [0.1, 0.2, 0.4]


def test_unknown_is_asked_until_the_lease_is_over() -> None:
    """The last question is asked at the deadline, and pauses never run out before it."""
    answer, asked, slept = ask(lambda _: UNKNOWN, deadline=2.5, pauses=[0.5])
    assert answer is UNKNOWN
    assert asked == pytest.approx([0.0, 0.5, 1.5, 2.5])
    assert slept == pytest.approx([0.5, 1.0, 1.0])


@pytest.mark.parametrize("answer", [GRANT, True, None])
def test_store_that_fails_once_is_asked_once_more_at_once(answer: Answer) -> None:
    """A broken connection costs one question, and no pause."""
    assert ask(lambda n: DOWN if n == 0 else answer) == (answer, [0.0, 0.0], [])


def test_store_that_fails_twice_is_down() -> None:
    """The second failure is the answer, however much time is left."""
    assert ask(lambda _: DOWN, pauses=itertools.repeat(0.1)) == (DOWN, [0.0, 0.0], [])
    answer, asked, _ = ask(lambda n: UNKNOWN if n == 1 else DOWN, pauses=itertools.repeat(0.1))
    assert (answer, len(asked)) == (DOWN, 3)


def test_release_whose_answer_was_lost_did_release() -> None:
    """Gone before it could end by itself: the question without an answer was heard."""
    assert ask(lambda n: DOWN if n == 0 else False)[0] is True


def test_lease_that_ended_by_itself_was_not_released() -> None:
    """Gone behind its deadline, nobody knows that the lost question released it."""
    assert ask(lambda n: DOWN if n == 0 else False, deadline=0.5, latency=0.3)[0] is False


def test_lease_that_is_over_is_asked_about_once() -> None:
    """Behind the deadline a release is still sent, and nothing is repeated."""
    assert ask(lambda _: UNKNOWN, deadline=-1.0) == (UNKNOWN, [0.0], [])
