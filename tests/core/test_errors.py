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
from django_distlock.core.holders import Holder

CLASSES: list[type[LockError]] = [
    LockError,
    LockNotAcquired,
    LockLost,
    BackendUnavailable,
    InvalidArgument,
    LockUsageError,
]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LockError, "internal"),
        (LockNotAcquired, "acquisition_timeout"),
        (LockLost, "lost"),
        (BackendUnavailable, "service_unavailable"),
        (InvalidArgument, "invalid_argument"),
        (LockUsageError, "unsupported"),
    ],
)
def test_each_error_has_a_code(error: type[LockError], code: str) -> None:
    """A program can tell errors apart without reading their text."""
    assert error("text").code == error.code == code
    assert issubclass(error, LockError)


def test_invalid_argument_is_a_value_error() -> None:
    """Who checks arguments as Python does catches ours too."""
    assert issubclass(InvalidArgument, ValueError)


@pytest.mark.parametrize("error", CLASSES)
def test_error_without_facts_has_none(error: type[LockError]) -> None:
    """The key is known or None, and the text may be empty."""
    assert error().key is None
    assert str(error()) == ""
    assert str(error("the text")) == "the text"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BackendUnavailable, "network_timeout"),
        (BackendUnavailable, "auth_failed"),
        (BackendUnavailable, "rate_limited"),
        (LockUsageError, "reentrant"),
        (LockUsageError, "self_blocked"),
        (LockError, "aborted"),
    ],
)
def test_code_of_one_error_leaves_the_class_alone(error: type[LockError], code: str) -> None:
    """A more precise code belongs to one error."""
    before = error.code
    assert error("text", code=code).code == code
    assert error.code == error("text").code == before


def everything(error: BaseException) -> dict[str, Any]:
    """Give all that an error knows."""
    return {"class": type(error), "args": error.args, "code": error.code, **vars(error)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "error",
    [
        *(each("text", key="invoice:42") for each in CLASSES),
        BackendUnavailable("text", key="k", code="network_timeout"),
        LockUsageError("text", key="k", code="reentrant"),
        LockNotAcquired(
            "text", key="k", holder=Holder(host="h", pid=1), held_for=1.5, expires_in=2.5
        ),
    ],
    ids=lambda error: f"{type(error).__name__}-{error.code}-{error.key}",
)
def test_errors_survive_pickling_with_all_they_know(error: LockError, protocol: int) -> None:
    """Task queues and process pools send errors as pickles."""
    assert everything(pickle.loads(pickle.dumps(error, protocol))) == everything(error)
    assert everything(copy.copy(error)) == everything(error)


def test_not_acquired_knows_its_holder() -> None:
    """Who holds the key, since when and until when are attributes."""
    error = LockNotAcquired("text", key="k", holder=Holder(host="h"), held_for=1.0, expires_in=None)
    assert (error.key, error.holder, error.held_for, error.expires_in) == (
        "k", Holder(host="h"), 1.0, None,
    )  # fmt: skip
