"""The errors: one tree, codes, facts, and pickles that keep them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from django_distlock.core.errors import (
    BackendUnavailable,
    InvalidArgument,
    LockError,
    LockLost,
    LockNotAcquired,
    LockUsageError,
)
from django_distlock.core.records import Holder

CODES: dict[type[LockError], str] = {
    LockError: "internal",
    LockNotAcquired: "acquisition_timeout",
    LockLost: "lost",
    BackendUnavailable: "service_unavailable",
    InvalidArgument: "invalid_argument",
    LockUsageError: "unsupported",
}


@pytest.mark.parametrize("error", CODES)
def test_each_error_has_a_code(error: type[LockError]) -> None:
    """A program can tell errors apart without reading their text."""
    assert error("text").code == error.code == CODES[error]
    assert issubclass(error, LockError)
    assert error().key is None
    assert [str(each) for each in (error(), error("the text"))] == ["", "the text"]
    # Who checks arguments as Python does catches ours too.
    assert issubclass(error, ValueError) is (error is InvalidArgument)
    # A more precise code belongs to one error.
    assert error("text", code="auth_failed").code == "auth_failed"
    assert error("text").code == error.code


def everything(error: BaseException) -> dict[str, Any]:
    """Give all that an error knows."""
    return {"class": type(error), "args": error.args, "code": error.code, **vars(error)}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error",
    [
        *(each("text", key="invoice:42") for each in CODES),
        BackendUnavailable("text", key="k", code="network_timeout"),
        LockUsageError("text", key="k", code="reentrant"),
        LockNotAcquired(
            "text", key="k", holder=Holder(host="h", pid=1), held_for=1.5, expires_in=2.5
        ),
    ],
    ids=lambda error: f"{type(error).__name__}-{error.code}-{error.key}",
)
def test_errors_survive_pickling_with_all_they_know(error: LockError) -> None:
    """Task queues and process pools send errors as pickles."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert everything(pickle.loads(pickle.dumps(error, protocol))) == everything(error)
    assert everything(copy.copy(error)) == everything(error)


def test_lock_of_an_error_stays_at_home() -> None:
    """A pickle or a copy has none: it may be what no other process can load."""
    error = LockNotAcquired("text", key="k")
    assert error.lock is None
    error.lock = lambda: None
    for made in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert made.lock is None
        assert (made.args, made.key, made.settled) == (("text",), "k", False)


def test_not_acquired_knows_its_holder() -> None:
    """Who holds the key, since when and until when are attributes."""
    error = LockNotAcquired("text", key="k", holder=Holder(host="h"), held_for=1.0, expires_in=None)
    assert (error.key, error.holder, error.held_for, error.expires_in) == (
        "k", Holder(host="h"), 1.0, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("timed out", "network_timeout", "did not answer: timed out"),
        ("wrong password", "auth_failed", "denied access: wrong password"),
        ("too many", "rate_limited", "has reached a limit: too many"),
        (
            "connection failed: FATAL: no such role",
            "service_unavailable",
            "refused the connection: connection failed: FATAL: no such role",
        ),
    ],
)
def test_message_says_what_the_store_did(error: str, code: str, said: str) -> None:
    """Only what nobody answered was not answered."""
    made = BackendUnavailable.of("The lock store 'a'", error, code, "key")
    told = str(BackendUnavailable.of("The lock store 'a'", error, code, answered=True))
    assert "did not answer" not in told
    assert told.endswith(f": {error}")
    assert (str(made), made.code, made.key) == (f"The lock store 'a' {said}", code, "key")
    assert made.is_denied == (code == "auth_failed")
