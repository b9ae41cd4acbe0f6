"""Bad arguments are refused before the store is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import InvalidArgument, LockError
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from tests.backends import Registered

from .helpers import take
from .stores import Store
from .unreachable import unreachable

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TOKEN = "abcdefghijklmnopqrstuv"


@pytest.fixture
def asked(registered: Registered, store: Store) -> BaseLockBackend:
    """Give a backend whose store cannot be reached: asked, it raises something else.

    Memory cannot fail. What was refused must have left nothing there.
    """
    return unreachable(registered) or store.backend


def grant(key: Any = "key", token: Any = TOKEN, ttl: Any = 30) -> Grant:
    """Make up a grant."""
    return Grant(key, token, 1, ttl, NOW, NOW)


BY_KEY: dict[str, Callable[[BaseLockBackend, Any], object]] = {
    "acquire": lambda backend, key: backend.acquire(key, TOKEN, 30),
    "extend": lambda backend, key: backend.extend(grant(key)),
    "extend_many": lambda backend, key: backend.extend_many([grant(), grant(key)]),
    "release": lambda backend, key: backend.release(grant(key)),
    "settle": lambda backend, key: backend.settle(grant(key), 5),
    "read": lambda backend, key: backend.read(key),
    "counter": lambda backend, key: backend.counter(key),
    "guards": lambda backend, key: backend.guards(key),
    "shorten": lambda backend, key: backend.shorten(key, 5),
    "force_release": lambda backend, key: backend.force_release(key),
    "request_stop": lambda backend, key: backend.request_stop(key),
    "pause": lambda backend, key: backend.pause(key, NOW),
    "resume": lambda backend, key: backend.resume(key),
}
BY_TOKEN: dict[str, Callable[[BaseLockBackend, Any], object]] = {
    "acquire": lambda backend, token: backend.acquire("key", token, 30),
    "replace": lambda backend, token: backend.acquire("key", TOKEN, 30, replace=token),
    "extend": lambda backend, token: backend.extend(grant(token=token)),
    "extend_many": lambda backend, token: backend.extend_many([grant(), grant(token=token)]),
    "release": lambda backend, token: backend.release(grant(token=token)),
    "settle": lambda backend, token: backend.settle(grant(token=token), 5),
    "read_token": lambda backend, token: backend.read_token(token),
    "shorten": lambda backend, token: backend.shorten("key", 5, token=token),
}
BY_TTL: dict[str, Callable[[BaseLockBackend, Any], object]] = {
    "acquire": lambda backend, ttl: backend.acquire("key", TOKEN, ttl),
    "extend": lambda backend, ttl: backend.extend(grant(), ttl),
    "extend_many": lambda backend, ttl: backend.extend_many([grant(), grant(ttl=ttl)]),
}
BY_SECONDS: dict[str, Callable[[BaseLockBackend, Any], object]] = {
    "settle": lambda backend, seconds: backend.settle(grant(), seconds),
    "shorten": lambda backend, seconds: backend.shorten("key", seconds),
}
BY_BOUND: dict[str, Callable[[BaseLockBackend, Any], object]] = {
    "acquire": lambda backend, bound: backend.acquire("key", TOKEN, 30, bound=bound),
    "extend": lambda backend, bound: backend.extend(grant(), bound=bound),
    "release": lambda backend, bound: backend.release(grant(), bound=bound),
    "settle": lambda backend, bound: backend.settle(grant(), 5, bound=bound),
    "shorten": lambda backend, bound: backend.shorten("key", 5, bound=bound),
    "force_release": lambda backend, bound: backend.force_release("key", bound=bound),
    "request_stop": lambda backend, bound: backend.request_stop("key", bound=bound),
    "pause": lambda backend, bound: backend.pause("key", NOW, bound=bound),
    "resume": lambda backend, bound: backend.resume("key", bound=bound),
}
BY_TIME: dict[str, Callable[[BaseLockBackend, Any], object]] = {
    "pause": lambda backend, when: backend.pause("key", when),
    "cleanup": lambda backend, when: backend.cleanup(when),
}
BY_LIMIT: dict[str, Callable[[BaseLockBackend, Any], object]] = {
    "list": lambda backend, limit: backend.list(limit=limit),
    "cleanup": lambda backend, limit: backend.cleanup(NOW, limit=limit),
}

BAD_KEYS = [
    "", None, 7, b"key", ["key"], "a\0b", "\ud800", "k" * 513, "é" * 257, "🔒" * 128 + "k",
]  # fmt: skip
BAD_TOKENS = [
    "", 22, b"abcdefghijklmnopqrstuv", "short", TOKEN[:-1], TOKEN + "w", TOKEN + "\n",
    " " + TOKEN[1:], TOKEN[:-1] + " ", TOKEN[:-1] + "+", TOKEN[:-1] + "/", TOKEN[:-1] + "=",
    TOKEN[:-1] + "é", TOKEN[:-1] + "\0", TOKEN[:-1] + "\u0661",
]  # fmt: skip
NOT_SECONDS = [
    "5", True, False, math.nan, math.inf, -math.inf, -1, -0.001, timedelta(seconds=-1), 10**400, 1j,
]  # fmt: skip
BAD_TTLS = [*NOT_SECONDS, 0, 0.0999, timedelta(milliseconds=99), 604_800.001, 604_801, 1e300]
BAD_SECONDS = [*NOT_SECONDS, None, 604_801]
BAD_BOUNDS = [*NOT_SECONDS, None]
BAD_TIMES = [None, 0, 1e9, "2026-01-01", datetime(2026, 1, 1), timedelta(1)]  # noqa: DTZ001
BAD_LIMITS = [0, -1, True, 1.5, "10", None, 100_001]


def names(value: object) -> str:
    """Name a value in the ids of tests, briefly."""
    return ascii(value)[:24]


def refuse(call: Callable[[], object]) -> InvalidArgument:
    """Check that a call is refused as the contract says."""
    with pytest.raises(InvalidArgument) as caught:
        call()
    error = caught.value
    assert isinstance(error, LockError)
    assert isinstance(error, ValueError)
    assert error.code == "invalid_argument"
    assert str(error)
    return error


@pytest.mark.parametrize("operation", BY_KEY)
def test_bad_key_is_refused(asked: BaseLockBackend, operation: str) -> None:
    """Every operation that takes a key refuses one that is not legal."""
    for bad in BAD_KEYS:
        refuse(lambda bad=bad: BY_KEY[operation](asked, bad))  # type: ignore[misc]


@pytest.mark.parametrize("operation", BY_TOKEN)
def test_bad_token_is_refused(asked: BaseLockBackend, operation: str) -> None:
    """Every operation that takes a token refuses another form, and does not repeat it."""
    for bad in [*BAD_TOKENS, *([None] if operation not in ("replace", "shorten") else [])]:
        error = refuse(lambda bad=bad: BY_TOKEN[operation](asked, bad))  # type: ignore[misc]
        assert not (isinstance(bad, str) and bad.strip() and bad in str(error))


@pytest.mark.parametrize("operation", BY_TTL)
def test_bad_ttl_is_refused(asked: BaseLockBackend, operation: str) -> None:
    """A ttl is a number of seconds from 0.1 to `MAX_TTL`."""
    for bad in BAD_TTLS:
        refuse(lambda bad=bad: BY_TTL[operation](asked, bad))  # type: ignore[misc]


@pytest.mark.parametrize("operation", BY_SECONDS)
def test_bad_seconds_are_refused(asked: BaseLockBackend, operation: str) -> None:
    """To settle for and to shorten to are numbers of seconds from 0 to `MAX_TTL`."""
    for bad in BAD_SECONDS:
        refuse(lambda bad=bad: BY_SECONDS[operation](asked, bad))  # type: ignore[misc]


@pytest.mark.parametrize("operation", BY_BOUND)
def test_bad_bound_is_refused(asked: BaseLockBackend, operation: str) -> None:
    """A bound is a finite number of seconds of at least 0."""
    for bad in BAD_BOUNDS:
        refuse(lambda bad=bad: BY_BOUND[operation](asked, bad))  # type: ignore[misc]


@pytest.mark.parametrize("operation", BY_TIME)
def test_bad_time_is_refused(asked: BaseLockBackend, operation: str) -> None:
    """A point in time is an aware datetime."""
    for bad in BAD_TIMES:
        refuse(lambda bad=bad: BY_TIME[operation](asked, bad))  # type: ignore[misc]


@pytest.mark.parametrize("operation", BY_LIMIT)
def test_bad_limit_is_refused(asked: BaseLockBackend, operation: str) -> None:
    """A limit is a whole number of at least 1, with an end."""
    for bad in BAD_LIMITS:
        refuse(lambda bad=bad: BY_LIMIT[operation](asked, bad))  # type: ignore[misc]


def test_bad_prefix_and_cursor_are_refused(asked: BaseLockBackend) -> None:
    """What a listing starts with is the start of a key; its cursor is that of a page."""
    for bad in ("a\0", "\ud800", "k" * 513, 7):
        refuse(lambda bad=bad: asked.list(bad))  # type: ignore[misc]
    for cursor in (7, b"a", "a\0", "\ud800"):
        refuse(lambda bad=cursor: asked.list("", bad))  # type: ignore[misc]


def test_bad_filters_are_refused(asked: BaseLockBackend) -> None:
    """Host and task of a listing are text that a store can compare."""
    for bad in (7, b"a", "a\0", "\ud800"):
        refuse(lambda bad=bad: asked.list(host=bad))  # type: ignore[misc]
        refuse(lambda bad=bad: asked.list(task_id=bad))  # type: ignore[misc]


def test_bad_name_of_who_pauses_is_refused(asked: BaseLockBackend) -> None:
    """Who pauses a key is named in at most 200 characters."""
    for bad in ("x" * 201, "a\0", "\ud800", 7):
        refuse(lambda bad=bad: asked.pause("key", NOW, bad))  # type: ignore[misc]


def test_errors_name_the_value_and_the_rule(asked: BaseLockBackend) -> None:
    """An error says what was wrong and what would be right."""
    assert "513" in str(refuse(lambda: asked.read("k" * 513)))
    assert "512" in str(refuse(lambda: asked.read("k" * 513)))
    assert "604801" in str(refuse(lambda: asked.acquire("key", TOKEN, 604_801)))
    assert "0.05" in str(refuse(lambda: asked.acquire("key", TOKEN, 0.05)))
    assert "0.1" in str(refuse(lambda: asked.acquire("key", TOKEN, 0.05)))
    assert "-3" in str(refuse(lambda: asked.release(grant(), bound=-3)))


def test_refused_calls_leave_no_trace(
    backend: BaseLockBackend, store: Store, registered: Registered, key: str
) -> None:
    """Behind a refusal, the key is free and has its first fence."""
    for bad in BAD_TTLS:
        refuse(lambda bad=bad: backend.acquire(key, new_token(), bad))  # type: ignore[misc]
    for bad in BAD_TOKENS:
        refuse(lambda bad=bad: backend.acquire(key, bad, 30))  # type: ignore[misc]
    assert backend.read(key) is None
    assert store.fence(key) == 0
    assert registered.is_next(take(backend, key).fence)


def test_refused_calls_leave_a_holder_alone(backend: BaseLockBackend, key: str) -> None:
    """A lease is not changed by a call about it that was refused."""
    mine = take(backend, key)
    before = backend.read(key)
    refuse(lambda: backend.extend(mine, 0))
    refuse(lambda: backend.extend_many([mine, replace(mine, ttl=-1)]))
    refuse(lambda: backend.settle(mine, -1))
    refuse(lambda: backend.release(mine, bound=-1))
    assert backend.read(key) == before
