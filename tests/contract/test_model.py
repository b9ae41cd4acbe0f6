"""Any operations in any order: each backend answers as a model of a page does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant, Record
from tests.drawn import drawn

pytestmark = pytest.mark.requires("supports_ttl", "supports_operators", "supports_listing")

F = TypeVar("F", bound=Callable[..., None])

#: Of the tokens of a key, that of its holder comes most often.
KEYS, TOKENS = some.sampled_from("ab"), some.sampled_from([-1, -1, 0, 1])
TTLS = some.sampled_from([60, 600, None])


#: The operations, and what their arguments are drawn from.
OPERATIONS: dict[str, dict[str, some.SearchStrategy[Any]]] = {}


def operation(**drawn_from: some.SearchStrategy[Any]) -> Callable[[F], F]:
    """Make a method an operation that a history has."""

    def note(method: F) -> F:
        OPERATIONS[method.__name__] = drawn_from
        return method

    return note


@dataclass
class Held:
    """What the model knows of a held key."""

    token: str
    fence: int
    ttl: float | None
    settled: bool = False
    asked_to_stop: bool = False


class Model(RuleBasedStateMachine):
    """Two keys, and two tokens for each; no time passes."""

    backend: BaseLockBackend
    mark: str

    def __init__(self) -> None:
        super().__init__()
        # Of this example alone: what examples before have left is not in its way.
        self.start = f"{self.mark}{new_token()}"
        self.tokens = {each: [new_token() for _ in range(2)] for each in "ab"}
        self.held: dict[str, Held] = {}
        self.fences = dict.fromkeys("ab", 0)
        self.paused: set[str] = set()

    def key(self, key: str) -> str:
        """Return what is asked for."""
        return f"{self.start}-{key}"

    def token(self, key: str, by: int) -> str:
        """Return one of the tokens of a key; -1: that of its holder, or the last."""
        held = self.held.get(key)
        return held.token if by < 0 and held is not None else self.tokens[key][by]

    def grant(self, key: str, token: str) -> Grant:
        """Return a grant as who has acquired it has it."""
        now = self.backend.clock()
        return Grant(self.key(key), token, 1, 60, now, None)

    def owned(self, key: str, token: str) -> Held | None:
        """Return what a token may extend and release."""
        held = self.held.get(key)
        return held if held is not None and held.token == token and not held.settled else None

    def seen(self, key: str, record: Record | None) -> None:
        """Compare a record with what the model knows."""
        held = self.held.get(key)
        assert (record is None) is (held is None)
        if record is not None and held is not None:
            said = (record.key, record.token, record.fence, record.is_settled)
            assert said == (self.key(key), held.token, held.fence, held.settled)
            assert held.settled or record.ttl == held.ttl
            assert (record.stop_requested_at is not None) is held.asked_to_stop

    @operation(key=KEYS, by=TOKENS, ttl=TTLS, replace=some.none() | TOKENS, wanted=some.booleans())
    def acquire(
        self, key: str, by: int, ttl: float | None, replace: int | None, wanted: bool
    ) -> None:
        """Be granted the key, or told who has it."""
        token = self.token(key, by)
        theirs = None if replace is None else self.token(key, replace)
        answer = self.backend.acquire(self.key(key), token, ttl, wanted=wanted, replace=theirs)
        held = self.held.get(key)
        spent = held is not None and held.settled and theirs == token
        if key in self.paused or (held is not None and (held.token != theirs or spent)):
            assert isinstance(answer, Contended)
            assert answer.paused is (key in self.paused)
            assert answer.fence == (None if held is None else held.fence)
            assert answer.settled is (held is not None and held.settled)
            return
        assert isinstance(answer, Grant)
        assert answer.fence > self.fences[key]
        self.fences[key] = answer.fence
        # All of them have one holder, who stays asked.
        asked = held is not None and held.asked_to_stop
        self.held[key] = Held(token, answer.fence, ttl, asked_to_stop=asked)

    @operation(key=KEYS, by=TOKENS, ttl=TTLS, many=some.booleans())
    def extend(self, key: str, by: int, ttl: float | None, many: bool) -> None:
        """Replace the ttl, or hear that the lease is gone."""
        token = self.token(key, by)
        grant = self.grant(key, token)
        grant = Grant(grant.key, token, 1, ttl, grant.acquired_at, None)
        held = self.owned(key, token)
        answer = self.backend.extend_many([grant])[0] if many else self.backend.extend(grant)
        if held is None:
            assert answer is None
            return
        assert isinstance(answer, Grant)
        assert (answer.fence, answer.ttl) == (held.fence, ttl)
        assert answer.stop_requested is held.asked_to_stop
        held.ttl = ttl

    @operation(key=KEYS, by=TOKENS, seconds=some.sampled_from([None, 0, 300]))
    def release(self, key: str, by: int, seconds: float | None) -> None:
        """Free the key, or keep it taken behind the work."""
        token = self.token(key, by)
        held = self.owned(key, token)
        assert self.backend.release(self.grant(key, token), seconds) is (held is not None)
        if held is not None and seconds:
            held.settled = True
        elif held is not None:
            del self.held[key]

    @operation(key=KEYS, is_seen=some.booleans())
    def force_release(self, key: str, is_seen: bool) -> None:
        """Take a key from the holder that was seen, or from nobody."""
        held = self.held.get(key)
        fence = None if held is None or is_seen else held.fence + 1
        removed = self.backend.force_release(self.key(key), fence=fence)
        if held is None or fence is not None:
            assert removed is None
            return
        assert isinstance(removed, Record)
        assert removed.token == held.token
        del self.held[key]
        # It moved on, so that what the old holder writes is refused.
        counter = self.backend.counter(self.key(key))
        assert counter is not None
        assert counter.fence > held.fence
        self.fences[key] = counter.fence

    @operation(key=KEYS)
    def request_stop(self, key: str) -> None:
        """Request a stop; a holder that was asked is left alone or marked."""
        held = self.held.get(key)
        answer = self.backend.request_stop(self.key(key))
        assert (answer is None) is (held is None)
        if held is not None:
            held.asked_to_stop = True

    @operation(key=KEYS, pause=some.booleans())
    def pause(self, key: str, pause: bool) -> None:
        """Grant a key to nobody, or to somebody again."""
        was = key in self.paused
        until = self.backend.clock() + timedelta(hours=1) if pause else None
        assert self.backend.pause(self.key(key), until) is (pause or was)
        (self.paused.add if pause else self.paused.discard)(key)

    @operation()
    def clean(self) -> None:
        """Remove nothing that is live."""
        self.backend.cleanup(self.backend.clock() + timedelta(days=1))

    @operation(key=KEYS, by=TOKENS)
    def look(self, key: str, by: int) -> None:
        """Read a key, all of them, a token, a counter."""
        self.seen(key, self.backend.read(self.key(key)))
        listed = {each.key: each for each in self.backend.list(self.start).records}
        assert set(listed) == {self.key(each) for each in self.held}
        for each in self.held:
            self.seen(each, listed[self.key(each)])
        if self.backend.supports_token_lookup:
            token = self.token(key, by)
            found = self.backend.read_token(token)
            assert (found is None) is (self.owned(key, token) is None)
        counter = self.backend.counter(self.key(key))
        assert (0 if counter is None else counter.fence) >= self.fences[key]
        paused = counter is not None and counter.paused_until is not None
        assert paused is (key in self.paused)

    # One rule: of several, Hypothesis leaves some out of each history, and most need an acquire.
    @rule(name=some.sampled_from(["acquire", "acquire", *OPERATIONS]), data=some.data())
    def operate(self, name: str, data: some.DataObject) -> None:
        """Do any of them."""
        getattr(self, name)(**{each: data.draw(of) for each, of in OPERATIONS[name].items()})

    def teardown(self) -> None:
        """Leave nothing that is held or paused."""
        for key in "ab":
            self.backend.pause(self.key(key), None)
            self.backend.force_release(self.key(key))


@pytest.mark.aliases("memory", "sqlite", "postgres", "postgres_orm", "mariadb", "redis")
def test_any_operations_are_answered_as_by_the_model(backend: BaseLockBackend, key: str) -> None:
    """Forty operations in a row, which are drawn by chance and made fewer where they fail."""

    class OnTheBackend(Model):
        mark = key

    OnTheBackend.backend = backend
    run_state_machine_as_test(OnTheBackend, settings=drawn(20, steps=40))
