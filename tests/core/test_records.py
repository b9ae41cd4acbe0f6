"""The values that backends take and answer."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from django_distlock.core.durations import GRACE
from django_distlock.core.records import UNKNOWN, Contended, Grant, Holder, Record, lease_ends

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TOKEN = "s3cret-s3cret-s3cret-s"
GRANT = Grant("key", TOKEN, 7, 10.0, NOW, NOW + timedelta(seconds=10))
RECORD = Record(
    key="key",
    token=TOKEN,
    fence=7,
    ttl=10.0,
    acquired_at=NOW,
    renewed_at=NOW,
    expires_at=NOW + timedelta(seconds=10),
    free_at=NOW + timedelta(seconds=11),
    holder=Holder(host="web-1"),
)


def test_lease_ends_a_grace_before_it_is_free() -> None:
    """`free_at` is `expires_at` plus the grace; without a ttl there is neither."""
    expires_at, free_at = lease_ends(NOW, 10)
    assert expires_at == NOW + timedelta(seconds=10)
    assert free_at == NOW + timedelta(seconds=10 + GRACE)
    assert lease_ends(NOW, None) == (None, None)


@pytest.mark.parametrize(
    ("after", "live"), [(0, True), (10, True), (10.999999, True), (11, False), (12, False)]
)
def test_record_is_live_before_free_at_only(after: float, live: bool) -> None:
    """The one predicate: live while now < free_at, grace included, the end itself not."""
    assert RECORD.is_live(NOW + timedelta(seconds=after)) is live


def test_record_without_expiry_is_always_live() -> None:
    """No expiry means no end."""
    assert replace(RECORD, expires_at=None, free_at=None).is_live(datetime.max.replace(tzinfo=UTC))


def test_contended_tells_times_by_the_stores_clock_alone() -> None:
    """Differences between two times of the store mean something on any client."""
    contended = RECORD.contended(NOW + timedelta(seconds=4))
    assert contended.held_for == 4
    assert contended.expires_in == 6
    assert contended.free_in == 7
    assert (contended.holder, contended.fence) == (RECORD.holder, 7)
    assert (contended.busy, contended.paused) == (False, False)


def test_contended_of_a_busy_store_knows_nothing() -> None:
    """Any field may be None when busy."""
    busy = Contended(busy=True)
    assert (busy.held_for, busy.expires_in, busy.free_in, busy.holder) == (None,) * 4


def test_contended_without_expiry_has_no_end() -> None:
    """A lock without expiry tells since when, and not until when."""
    contended = replace(RECORD, ttl=None, expires_at=None, free_at=None).contended(NOW)
    assert (contended.held_for, contended.expires_in, contended.free_in) == (0, None, None)


def test_unknown_is_neither_none_nor_false() -> None:
    """Unknown is false in a condition and itself in a comparison."""
    assert not UNKNOWN
    assert UNKNOWN is not None
    others: list[object] = [None, False]
    assert UNKNOWN not in others


@pytest.mark.parametrize("value", [GRANT, RECORD])
def test_tokens_are_not_shown(value: object) -> None:
    """No text of a grant or record shows its token."""
    assert TOKEN not in repr(value)
    assert TOKEN not in str(value)
    assert "key" in repr(value)
