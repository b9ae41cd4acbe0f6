"""Fences: the numbers that order writes."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

import pytest

from django_distlock.core.errors import InvalidArgument, LockError
from django_distlock.core.records import (
    FENCE_MAX,
    FENCE_WARNING,
    clock_fence,
    next_fence,
    validate_fence,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC)


def test_fence_limits_have_fifteen_digits() -> None:
    """As text of 15 digits, fences sort like numbers."""
    assert len(str(FENCE_MAX)) == len(str(FENCE_WARNING)) == 15
    assert FENCE_WARNING == 8 * 10**14
    assert FENCE_MAX == 9 * 10**14


def test_fences_count() -> None:
    """Without a floor, the next fence is the last one plus one, the first is 1."""
    assert next_fence("key", 0, None) == 1
    assert next_fence("key", 41, None) == 42


def test_fence_follows_the_clock() -> None:
    """With a floor, a fence is at least the time in 10 µs since 1970."""
    assert clock_fence(NOW) == 176_732_304_567_890 + 0
    assert next_fence("key", 0, NOW) == clock_fence(NOW)
    assert next_fence("key", clock_fence(NOW) - 1, NOW) == clock_fence(NOW)


def test_clock_never_takes_a_fence_back() -> None:
    """A counter ahead of the clock just counts on."""
    ahead = clock_fence(NOW) + 1000
    assert next_fence("key", ahead, NOW) == ahead + 1
    assert next_fence("key", clock_fence(NOW), NOW) == clock_fence(NOW) + 1


def test_fences_of_the_clock_last_until_2255() -> None:
    """Fences of the clock stay below the maximum for two centuries."""
    assert clock_fence(datetime(2255, 1, 1, tzinfo=UTC)) < FENCE_MAX
    assert clock_fence(NOW + timedelta(microseconds=10)) == clock_fence(NOW) + 1


def test_last_fence_is_the_last() -> None:
    """There is no fence behind the maximum."""
    assert next_fence("key", FENCE_MAX - 1, None) == FENCE_MAX
    with pytest.raises(LockError, match="'key' has used all its fences"):
        next_fence("key", FENCE_MAX, None)


def test_high_fence_warns(caplog: pytest.LogCaptureFixture) -> None:
    """A fence above 8e14 is logged with its key and the number of the last."""
    with caplog.at_level(logging.WARNING, "django_distlock"):
        next_fence("key", FENCE_WARNING - 1, None)
        assert str(FENCE_MAX) not in caplog.text
        next_fence("key", FENCE_WARNING, None)
    assert str(FENCE_MAX) in caplog.text


@pytest.mark.parametrize("value", [0, -1, FENCE_MAX + 1, True, 1.0, "1", None])
def test_illegal_fences_are_refused(value: object) -> None:
    """A counter is raised to an int from 1 to the maximum."""
    with pytest.raises(InvalidArgument, match=f"from 1 to {FENCE_MAX}"):
        validate_fence(value)


@pytest.mark.parametrize("value", [1, FENCE_MAX])
def test_legal_fences_are_returned(value: int) -> None:
    """The bounds themselves are legal."""
    assert validate_fence(value) == value
