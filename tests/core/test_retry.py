"""Pauses between attempts."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from django_distlock.core.errors import InvalidArgument
from django_distlock.core.retry import Retry


def always(value: float) -> Callable[[], float]:
    """Answer the same number instead of a random one."""
    return lambda: value


def first(count: int, retry: Retry, uniform: Callable[[], float]) -> list[float]:
    """Take the first pauses."""
    return list(islice(retry.pauses(uniform), count))


def test_steps_double_up_to_the_cap() -> None:
    """Without luck the pauses are the steps: 0.1, 0.2, 0.4, 0.8, then 1 s."""
    almost_one = math.nextafter(1, 0)
    assert first(7, Retry(), always(almost_one)) == pytest.approx([0.1, 0.2, 0.4, 0.8, 1, 1, 1])


def test_jitter_takes_at_most_half_of_a_step() -> None:
    """With the smallest number each pause is half of its step."""
    assert first(6, Retry(), always(0.0)) == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.5, 0.5])
    assert first(2, Retry(), always(0.5)) == pytest.approx([0.075, 0.15])


def test_random_pauses_stay_within_their_step_and_spread() -> None:
    """Each pause is 50 to 100 % of its step, and not always the same."""
    retry = Retry(delay=0.2, factor=1, cap=0.2)
    pauses = list(islice(retry.pauses(), 2000))
    assert all(0.1 <= pause <= 0.2 for pause in pauses)
    assert min(pauses) < 0.11
    assert max(pauses) > 0.19


@pytest.mark.parametrize("count", [0, 1, 5])
def test_retries_end(count: int) -> None:
    """`max_retries` pauses lie between as many attempts and the first one."""
    assert len(list(Retry(max_retries=count).pauses())) == count


def test_retries_without_a_number_never_end() -> None:
    """Waiting for days overflows nothing; and each use starts again."""
    retry = Retry(factor=1e15, cap=5)
    assert first(5000, retry, always(0.0))[-1] == 2.5
    assert first(3, retry, always(0.0)) == first(3, retry, always(0.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delay": 0}, "delay must be at least 0.001"),
        ({"delay": -1}, "delay must be at least 0.001"),
        ({"delay": True}, "delay must be a number, not True"),
        ({"delay": "1"}, "delay must be a number, not '1'"),
        ({"delay": math.nan}, "delay must be at least 0.001 and finite, not nan"),
        ({"factor": 0.9}, "factor must be at least 1"),
        ({"factor": math.inf}, "factor must be at least 1 and finite, not inf"),
        ({"factor": False}, "factor must be a number"),
        ({"cap": 0.05}, "cap must be at least 0.1"),
        ({"cap": math.inf}, "cap must be at least 0.1 and finite, not inf"),
        ({"cap": 10**400}, "cap must be at least 0.1 and finite"),
        ({"cap": None}, "cap must be a number, not None"),
        ({"max_retries": -1}, "max_retries must be at least 0, not -1"),
        ({"max_retries": 1.5}, "max_retries must be an int or None, not 1.5"),
        ({"max_retries": True}, "max_retries must be an int or None, not True"),
        ({"max_retries": "3"}, "max_retries must be an int or None, not '3'"),
    ],
)
def test_value_out_of_bounds_is_refused_with_its_name(
    arguments: dict[str, Any], message: str
) -> None:
    """A bad value is refused when the description is made, not while somebody waits."""
    with pytest.raises(InvalidArgument, match=message):
        Retry(**arguments)


def test_retry_is_a_value() -> None:
    """Two descriptions with the same numbers are equal, and none can be changed."""
    assert Retry() == Retry(delay=0.1, factor=2.0, cap=1.0, max_retries=None)
    assert hash(Retry()) == hash(Retry())
    with pytest.raises(AttributeError):
        Retry().delay = 5  # type: ignore[misc]
