"""Bad arguments are refused before the store is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
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


Calls = dict[str, Callable[[BaseLockBackend, Any], object]]
BY_KEY: Calls = {
    "acquire": lambda backend, key: backend.acquire(key, TOKEN, 30),
    "extend": lambda backend, key: backend.extend(grant(key)),
    "extend_many": lambda backend, key: backend.extend_many([grant(), grant(key)]),
    "release": lambda backend, key: backend.release(grant(key)),
    "settle": lambda backend, key: backend.release(grant(key), 5),
    "read": lambda backend, key: backend.read(key),
    "counter": lambda backend, key: backend.counter(key),
    "guards": lambda backend, key: backend.guards.sessions(key),
    "shorten": lambda backend, key: backend.request_stop(key, 5),
    "force_release": lambda backend, key: backend.force_release(key),
    "request_stop": lambda backend, key: backend.request_stop(key),
    "pause": lambda backend, key: backend.pause(key, NOW),
    "resume": lambda backend, key: backend.pause(key, None),
}
BY_TOKEN: Calls = {
    "acquire": lambda backend, token: backend.acquire("key", token, 30),
    "replace": lambda backend, token: backend.acquire("key", TOKEN, 30, replace=token),
    "extend": lambda backend, token: backend.extend(grant(token=token)),
    "extend_many": lambda backend, token: backend.extend_many([grant(), grant(token=token)]),
    "release": lambda backend, token: backend.release(grant(token=token)),
    "settle": lambda backend, token: backend.release(grant(token=token), 5),
    "read_token": lambda backend, token: backend.read_token(token),
    "shorten": lambda backend, token: backend.request_stop("key", 5, token=token),
}
BY_TTL: Calls = {
    "acquire": lambda backend, ttl: backend.acquire("key", TOKEN, ttl),
    "extend": lambda backend, ttl: backend.extend(grant(), ttl),
    "extend_many": lambda backend, ttl: backend.extend_many([grant(), grant(ttl=ttl)]),
}
BY_SECONDS: Calls = {"shorten": lambda backend, seconds: backend.request_stop("key", seconds)}
BY_AGE: Calls = {"settle": lambda backend, age: backend.release(grant(), age)}
BY_BOUND: Calls = {
    "acquire": lambda backend, bound: backend.acquire("key", TOKEN, 30, bound=bound),
    "extend": lambda backend, bound: backend.extend(grant(), bound=bound),
    "release": lambda backend, bound: backend.release(grant(), bound=bound),
    "settle": lambda backend, bound: backend.release(grant(), 5, bound=bound),
    "shorten": lambda backend, bound: backend.request_stop("key", 5, bound=bound),
    "force_release": lambda backend, bound: backend.force_release("key", bound=bound),
    "request_stop": lambda backend, bound: backend.request_stop("key", bound=bound),
    "pause": lambda backend, bound: backend.pause("key", NOW, bound=bound),
    "resume": lambda backend, bound: backend.pause("key", None, bound=bound),
}
BY_TIME: Calls = {
    "pause": lambda backend, when: backend.pause("key", when),
    "cleanup": lambda backend, when: backend.cleanup(when),
}
BY_LIMIT: Calls = {
    "list": lambda backend, limit: backend.list(limit=limit),
    "cleanup": lambda backend, limit: backend.cleanup(NOW, limit=limit),
}

BAD_KEYS = [
    "", None, 7.5, b"key", ["key"], "a\0b", "\ud800", "k" * 513, "é" * 257, "🔒" * 128 + "k",
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
BAD_SECONDS = [*NOT_SECONDS, 604_801]
BAD_AGES = [*NOT_SECONDS, 3.2e9 + 1]
BAD_BOUNDS = [*NOT_SECONDS, None]
BAD_TIMES = [0, 1e9, "2026-01-01", datetime(2026, 1, 1), timedelta(1)]  # noqa: DTZ001
BAD_TEXTS: list[Any] = [7, b"a", "a\0", "\ud800"]
BAD_LIMITS = [0, -1, True, 1.5, "10", None, 100_001]


def refuse(call: Callable[[], object]) -> InvalidArgument:
    """Check that a call is refused as the contract says."""
    with pytest.raises(InvalidArgument) as caught:
        pytest.fail(f"{call} was answered by {call()!r}")
    error = caught.value
    assert isinstance(error, LockError)
    assert isinstance(error, ValueError)
    assert error.code == "invalid_argument"
    assert str(error)
    return error


#: A key as the contract has it, a ttl from 0.1 to `MAX_TTL`, seconds from 0, an age of at most a
#: hundred years, bounds without an end of their own, aware points in time, and whole numbers.
REFUSED = {
    f"{kind} {name}": (call, values)
    for kind, calls, values in (
        ("key", BY_KEY, BAD_KEYS),
        ("ttl", BY_TTL, BAD_TTLS),
        ("seconds", BY_SECONDS, BAD_SECONDS),
        ("age", BY_AGE, BAD_AGES),
        ("bound", BY_BOUND, BAD_BOUNDS),
        ("time", BY_TIME, BAD_TIMES),
        ("no time", {"cleanup": BY_TIME["cleanup"]}, [None]),
        # Where some time zones have no date.
        (
            "edge of time",
            {"pause": BY_TIME["pause"]},
            [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)],
        ),
        ("limit", BY_LIMIT, BAD_LIMITS),
        (
            "prefix",
            {"list": lambda backend, bad: backend.list(bad)},
            ["a\0", "\ud800", "k" * 513, 7.5],
        ),
        ("cursor", {"list": lambda backend, bad: backend.list("", bad)}, BAD_TEXTS),
        ("host", {"list": lambda backend, bad: backend.list(host=bad)}, BAD_TEXTS),
        ("task", {"list": lambda backend, bad: backend.list(task_id=bad)}, BAD_TEXTS),
        (
            "who",
            {"pause": lambda backend, bad: backend.pause("key", NOW, bad)},
            [*BAD_TEXTS, "x" * 201],
        ),
    )
    for name, call in calls.items()
}


def test_bad_argument_is_refused(asked: BaseLockBackend) -> None:
    """Every operation refuses what is not legal, for each of its arguments."""
    for call, values in REFUSED.values():
        for bad in values:
            refuse(partial(call, asked, bad))


def test_bad_token_is_refused(asked: BaseLockBackend) -> None:
    """Every operation that takes a token refuses another form, and does not repeat it."""
    for operation, call in BY_TOKEN.items():
        for bad in [*BAD_TOKENS, *([None] if operation not in ("replace", "shorten") else [])]:
            error = refuse(partial(call, asked, bad))
            assert not (isinstance(bad, str) and bad.strip() and bad in str(error))


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
    refuse(lambda: backend.release(mine, -1))
    refuse(lambda: backend.release(mine, bound=-1))
    assert backend.read(key) == before
