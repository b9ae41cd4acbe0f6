"""When a lease is renewed, and when its renewals are given up."""

from __future__ import annotations

import math

import pytest

from django_distlock.core.durations import MIN_TTL
from django_distlock.process.heartbeat import DANGER_PART, MOST_FAILURES, Renewing


def test_nothing_is_due_before_it_is_begun() -> None:
    """A lease that nobody asked to renew is never due."""
    assert Renewing(1 / 3).due_at == math.inf


def test_due_a_part_of_the_ttl_behind_the_request() -> None:
    """The next renewal counts from when the one before was sent, not from its answer."""
    renewing = Renewing(1 / 3)
    renewing.renewed(100.0, 30.0)
    assert renewing.due_at == pytest.approx(110)
    renewing.renewed(111.0, 6.0)
    assert renewing.due_at == pytest.approx(113)


def test_lease_without_expiry_is_never_due() -> None:
    """What does not end needs no renewal, also where it did end before."""
    renewing = Renewing(1 / 3)
    renewing.renewed(100.0, 30.0)
    renewing.renewed(101.0, None)
    assert renewing.due_at == math.inf


def test_third_failure_in_a_row_is_one_too_many() -> None:
    """Twice, the outcome is unknown and the lease goes on; the third time it is lost."""
    renewing = Renewing(1 / 3)
    renewing.renewed(100.0, 30.0)
    assert [renewing.failed(now) for now in (110.0, 120.0, 130.0)] == [False, False, True]
    assert MOST_FAILURES == 3


def test_success_between_failures_starts_again() -> None:
    """Only failures in a row count."""
    renewing = Renewing(1 / 3)
    renewing.renewed(100.0, 30.0)
    for _ in range(5):
        assert not renewing.failed(110.0)
        assert not renewing.failed(120.0)
        renewing.renewed(130.0, 30.0)
    assert renewing.failures == 0


def test_failure_is_repeated_an_interval_later() -> None:
    """A renewal that failed is asked for again, in time for two more before the deadline."""
    renewing = Renewing(1 / 3)
    renewing.renewed(100.0, 30.0)
    renewing.failed(110.0)
    assert renewing.due_at == pytest.approx(120)
    assert renewing.due_at < 130


def test_last_renewal_ends_with_the_lifetime() -> None:
    """Near its end a lease is renewed for what is left, and not for a ttl more."""
    renewing = Renewing(1 / 3, ends_at=160.0)
    assert renewing.ttl(120.0, 30.0) == 30.0
    assert renewing.ttl(130.0, 30.0) == 30.0
    assert renewing.ttl(140.0, 30.0) == pytest.approx(20)
    assert renewing.ttl(159.0, 30.0) == pytest.approx(1)


def test_nothing_is_renewed_behind_the_lifetime() -> None:
    """What is left must be a legal ttl."""
    renewing = Renewing(1 / 3, ends_at=160.0)
    assert renewing.ttl(160.0 - MIN_TTL / 2, 30.0) is None
    assert renewing.ttl(160.0, 30.0) is None
    assert renewing.ttl(1000.0, 30.0) is None


def test_without_a_lifetime_each_renewal_is_a_whole_one() -> None:
    """It goes on for as long as the block does."""
    assert Renewing(1 / 3).ttl(1e9, 30.0) == 30.0


def test_warning_comes_behind_two_failures() -> None:
    """By the default time of a warning two renewals of three have failed, and none is wasted."""
    renewing = Renewing(1 / 3)
    renewing.renewed(0.0, 1.0)
    renewing.failed(renewing.due_at)
    assert renewing.due_at < 1.0 - DANGER_PART
