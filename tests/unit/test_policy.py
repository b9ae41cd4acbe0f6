"""What becomes of work whose lock cannot be had."""

from __future__ import annotations

import pytest

from django_distlock.core.errors import BackendUnavailable
from django_distlock.locks.policy import where_unavailable

CHOICES = ("raise", "skip", "run", "retry")


@pytest.mark.parametrize("code", ["service_unavailable", "network_timeout", "rate_limited"])
def test_outage_is_what_the_policy_is_for(code: str) -> None:
    """Each choice stands."""
    error = BackendUnavailable(code=code)
    assert tuple(where_unavailable(error, each) for each in CHOICES) == CHOICES


def test_denied_access_is_no_outage() -> None:
    """A wrong password is seen: no work is skipped or runs without its lock for it."""
    error = BackendUnavailable(code="auth_failed")
    chosen = [where_unavailable(error, each) for each in CHOICES]
    assert chosen == ["raise", "raise", "raise", "retry"]
