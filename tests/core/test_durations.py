"""Durations: seconds as a float, an int or a timedelta."""

from __future__ import annotations

import math
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from django_distlock.core.durations import (
    GRACE,
    MAX_BOUND,
    MIN_TTL,
    number,
    seconds,
    ttl_seconds,
    wait_seconds,
)
from django_distlock.core.errors import InvalidArgument

NOT_DURATIONS: list[Any] = [True, False, "5", None, [5], Decimal(5), 5j, b"5", object]
OUT_OF_BOUNDS: list[Any] = [math.nan, math.inf, -math.inf, -1, -0.001, timedelta(seconds=-1)]
OUT_OF_BOUNDS += [10**400, -(10**400)]


def test_legal_durations_become_floats() -> None:
    """Ints, floats and timedeltas are seconds."""
    made = [seconds(each, "ttl") for each in (0, 1, 0.25, timedelta(minutes=2), timedelta(0))]
    assert made == [0.0, 1.0, 0.25, 120.0, 0.0]
    assert {type(each) for each in made} == {float}


def test_other_types_are_refused_with_name_unit_and_value() -> None:
    """A bool is no number here, and nothing is parsed; the message names unit and value."""
    for value in NOT_DURATIONS:
        with pytest.raises(InvalidArgument) as caught:
            seconds(value, "ttl")
        assert str(caught.value) == f"ttl (seconds) must be a number, not {value!r}."


def test_numbers_out_of_bounds_are_refused() -> None:
    """NaN, infinity, negatives and numbers no float can hold are refused, never clamped."""
    told = r"^wait \(seconds\) must be at least 0 and finite"
    for value in OUT_OF_BOUNDS:
        with pytest.raises(InvalidArgument, match=told):
            wait_seconds(value)


def test_wait_means_one_attempt_or_for_ever() -> None:
    """0 and None are legal waits, and not the same."""
    assert wait_seconds(0) == 0.0
    assert wait_seconds(None) is None
    assert wait_seconds(0.5) == 0.5
    assert wait_seconds(timedelta(milliseconds=5)) == 0.005


def test_ttl_has_inclusive_bounds() -> None:
    """A ttl is at least 0.1 s and at most what the settings allow; None is none."""
    for value in (*NOT_DURATIONS, *OUT_OF_BOUNDS, 0, 0.0999, 60.1):
        with pytest.raises(InvalidArgument, match=r"^ttl \(seconds\) must be"):
            ttl_seconds(value, maximum=60)
    for value in (0.1, 1, 60, timedelta(milliseconds=100), timedelta(minutes=1)):
        assert MIN_TTL <= ttl_seconds(value, maximum=60) <= 60


def test_number_has_inclusive_bounds() -> None:
    """A plain number is checked by the same rules, without a unit; the message says the bounds."""
    assert number(1, "factor", minimum=1, maximum=2) == 1.0
    assert number(2, "factor", minimum=1, maximum=2) == 2.0
    with pytest.raises(InvalidArgument, match=r"^factor must be at least 1 and at most 2, not 2.1"):
        number(2.1, "factor", minimum=1, maximum=2)
    with pytest.raises(InvalidArgument, match="must be at least 0.1 and at most 60, not 61"):
        ttl_seconds(61, maximum=60)
    # Python refuses to print an int of 5000 digits.
    for check in (wait_seconds, ttl_seconds):
        with pytest.raises(InvalidArgument):
            check(10**5000)


def test_fixed_times_are_those_of_the_contract() -> None:
    """Every backend and every version agrees on grace, shortest ttl and longest bound."""
    assert (GRACE, MIN_TTL, MAX_BOUND) == (1.0, 0.1, 1.0)
