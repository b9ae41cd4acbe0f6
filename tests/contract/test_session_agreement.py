"""Seeded histories of session locks: a dictionary says what two backends are to answer.

Each knows as little of the other as another process would. One seed is one history:
`DISTLOCK_TEST_SEED=7` repeats it alone.
"""

# ruff: noqa: D102 - what the rules do, the contract says

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
from django.db import connections

from django_distlock import BackendUnavailable, LockUsageError, distlock
from django_distlock.backends.advisory import AdvisoryBackend
from django_distlock.backends.advisory.session import Session
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant, Record, clock_fence
from tests.integration.databases import ask, server
from tests.integration.test_advisory_crash import kill, mortal_alias
from tests.poolers import pgbouncer
from tests.salted import number_of

from .aliases import alias_like
from .helpers import Later, listed, take, there
from .interrupting import interrupt_at
from .locking import eventually
from .stores_session import SessionStore, another
from .test_agreement import DAILY, STEPS, run_each

pytestmark = pytest.mark.aliases("advisory")

#: How many locks each of them may hold: fewer than there are keys.
MOST = 3


class Held(NamedTuple):
    """Which of the two has a key."""

    by: AdvisoryBackend
    grant: Grant
    session: Session


class History:
    """Operations in a row, by dice with a seed."""

    def __init__(self, store: SessionStore, mark: str, seed: int):
        self.store, self.chance, self.seed = store, random.Random(seed), seed
        self.said, self.using = list[str](), store.registered.using
        self.mark, self.both = f"{mark}-{seed}", [self.process(), self.process()]
        self.keys = [f"{self.mark}-{each}" for each in "abcde"]
        self.held, self.past = dict[str, Held](), list[Held]()
        self.fences, self.paused = dict.fromkeys(self.keys, 0), set[str]()
        #: The fences whose holders are asked to stop.
        self.asked = set[int]()
        self.rules: list[Callable[[str, AdvisoryBackend], object]] = [
            *[self.acquire] * 5, *[self.extend] * 2, *[self.release] * 2, self.force_release,
            self.request_stop, self.pause, *[self.end] * 2, self.stranger, self.look, self.nest,
        ]  # fmt: skip

    def process(self, using: str = "") -> AdvisoryBackend:
        options = {"using": using or self.using, "max_connections": MOST}
        return another(self.store.advisory, options=options)

    def run(self) -> None:
        for _ in range(STEPS):
            rule, key = self.chance.choice(self.rules), self.chance.choice(self.keys)
            self.said.append(f"{rule.__name__} {key}")
            rule(key, self.chance.choice(self.both))
        for key in self.keys:
            self.look(key, self.both[0])
        for held in self.held.values():
            assert held.by.release(held.grant) is True
        self.race(f"{self.mark}:", *self.both)
        if self.seed >= DAILY:
            [self.interrupt, self.pool, self.crash][self.seed % 3](f"{self.mark}::")
        for backend in self.both:
            backend._sessions.close_all()

    # The rules

    def acquire(self, key: str, backend: AdvisoryBackend) -> None:
        held = self.held.get(key)
        theirs = self.chance.choice([None, held.grant.token]) if held else None
        takes_over = held and held.by is backend and theirs
        ask_for = partial(backend.acquire, key, new_token(), 30, replace=theirs)
        if self.is_full(backend) and not takes_over:
            with pytest.raises(BackendUnavailable):
                ask_for()
        elif (held and not takes_over) or key in self.paused:
            self.refused(key, ask_for())
        else:
            self.granted(key, backend, ask_for())

    def is_full(self, backend: AdvisoryBackend) -> bool:
        return sum(each.by is backend for each in self.held.values()) == MOST

    def refused(self, key: str, answer: Any) -> None:
        assert isinstance(answer, Contended)
        assert (answer.paused, answer.busy) == (key in self.paused, False)
        assert answer.fence == (self.held[key].grant.fence if key in self.held else None)

    def granted(self, key: str, backend: AdvisoryBackend, grant: Any) -> None:
        """Note a grant, whose fence tells the time, or follows one that was ahead of the clock."""
        assert isinstance(grant, Grant)
        assert grant.fence > self.fences[key]
        assert grant.fence in (self.fences[key] + 1, clock_fence(grant.acquired_at))
        session = there(backend._holdings.of_token(grant.token)).session
        self.fences[key], self.held[key] = grant.fence, Held(backend, grant, session)
        self.past = [*self.past[-7:], self.held[key]]

    def is_held(self, one: Held, backend: AdvisoryBackend) -> bool:
        return one.by is backend and self.held.get(one.grant.key) is one

    def extend(self, key: str, backend: AdvisoryBackend) -> None:
        some = self.past[::2]
        for each, answer in zip(some, backend.extend_many([x.grant for x in some]), strict=True):
            assert isinstance(answer, Grant) is self.is_held(each, backend)
            if isinstance(answer, Grant):
                assert (answer.fence, answer.expires_at) == (each.grant.fence, None)
                assert answer.stop_requested is (answer.fence in self.asked)

    def release(self, key: str, backend: AdvisoryBackend) -> None:
        for each in self.chance.sample(self.past, min(1, len(self.past))):
            is_held = self.is_held(each, backend)
            assert backend.release(each.grant) is is_held
            if is_held:
                del self.held[each.grant.key]

    def seen(self, key: str) -> tuple[int | None, Held | None]:
        """Choose what an operator has seen, and say whom that is for."""
        held, last = self.held.get(key), self.fences[key] or 1
        fence = self.chance.choice([None, last, last, last + 1, max(1, last - 1)])
        return fence, held if held and fence in (None, held.grant.fence) else None

    def force_release(self, key: str, backend: AdvisoryBackend) -> None:
        fence, held = self.seen(key)
        removed = backend.force_release(key, fence=fence)
        assert isinstance(removed, Record) is (held is not None)
        if held:
            assert held.by.is_cut_off(held.grant)
            assert held.by.extend(self.held.pop(key).grant) is None
            before, self.fences[key] = self.fences[key], self.store.fence(key)
            assert self.fences[key] > before

    def request_stop(self, key: str, backend: AdvisoryBackend) -> None:
        fence, held = self.seen(key)
        assert isinstance(backend.request_stop(key, fence=fence), Record) is (held is not None)
        self.asked |= {held.grant.fence} if held else set()

    def pause(self, key: str, backend: AdvisoryBackend) -> None:
        was, until = key in self.paused, self.store.now() + timedelta(hours=1)
        assert backend.pause(key, None if was else until) is True
        self.paused ^= {key}

    def end(self, key: str, backend: AdvisoryBackend) -> None:
        """End a session, as its process does that dies, or unlock behind its back."""
        if held := self.held.pop(key, None):
            if self.chance.random() < 0.5:
                ask(self.using, "SELECT pg_terminate_backend(%s, 5000)", held.session.pid)
                assert held.by.is_cut_off(held.grant)
            else:
                held.session._raw.execute("SELECT pg_advisory_unlock_all()")
            assert self.chance.random() < 0.5 or held.by.extend(held.grant) is None
            assert held.by.release(held.grant) is False

    def stranger(self, key: str, backend: AdvisoryBackend) -> None:
        """Take the number of a key without being granted it: nobody is shown, or ended."""
        if key in self.held or key in self.paused or self.is_full(backend):
            return
        number = number_of(self.using, self.store.name(key))
        with server(connections[self.using].settings_dict["NAME"]) as raw:
            raw.execute("SELECT pg_advisory_lock(%s)", [number])
            self.refused(key, backend.acquire(key, new_token(), 30))
            assert backend.force_release(key) is backend.request_stop(key) is None
            self.look(key, backend)
            assert raw.execute("SELECT pg_advisory_unlock(%s)", [number]).fetchone() == (True,)

    def nest(self, key: str, backend: AdvisoryBackend) -> None:
        lock = distlock(f"{key}:", backend=self.store.registered.alias, wait=0)
        with lock, pytest.raises(LockUsageError), lock:
            pass

    def look(self, key: str, backend: AdvisoryBackend) -> None:
        backend.cleanup(self.store.now())
        record, held, counter = backend.read(key), self.held.get(key), backend.counter(key)
        assert set(listed(backend, f"{self.mark}-")) == self.held.keys()
        assert (record and record.fence) == (held and held.grant.fence)
        if record and held and held.by is backend:
            assert (record.token, backend.is_cut_off(held.grant)) == (held.grant.token, False)
        elif record:
            # The holder itself hears of a request when it extends.
            assert bool(record.stop_requested_at) is (record.fence in self.asked)
            assert record.token == ""
        assert (counter.fence if counter else 0) == self.fences[key]
        assert bool(counter and counter.paused_until) is (key in self.paused)

    # What comes at the end

    def race(self, key: str, holder: AdvisoryBackend, operator: AdvisoryBackend) -> None:
        """Let a holder come and go beside an operator, who hits what was seen, or nobody."""
        told, met = set[tuple[str, int]](), set[tuple[str, int]]()

        def operate() -> None:
            for what in ["request_stop"] * 40 + ["force_release"] * 8:
                answer = getattr(operator, what)(key)
                if isinstance(answer, Record):
                    told.add((what, answer.fence))

        operating = Later(operate)
        while not operating.is_done:
            grant: Any = None
            # A session that ends while it is given back may be asked for the next lease.
            with suppress(BackendUnavailable):
                grant = holder.acquire(key, new_token(), 30)
            if isinstance(grant, Grant):
                if getattr(holder.extend(grant), "stop_requested", False):
                    met.add(("request_stop", grant.fence))
                if not holder.release(grant):
                    met.add(("force_release", grant.fence))
        operating.result()
        assert met <= told

    def interrupt(self, key: str) -> None:
        """Let an exception come at any line of an extend: the lease can be released."""
        line, reached = 0, True
        while reached:
            line, grant = line + 1, take(self.both[0], key)
            reached = interrupt_at(line, partial(self.both[0].extend, grant))
            self.both[0].release(grant)
            # A session that is closed on the way ends in the server a little later.
            assert eventually(lambda: self.both[0].read(key) is None)

    def pool(self, key: str) -> None:
        """Come through a pooler: nothing is locked."""
        mode = self.chance.choice(["session", "transaction"])
        with (
            pgbouncer(pool_mode=mode, default_pool_size=1) as address,
            alias_like(self.using, **address) as using,
            pytest.raises(LockUsageError),
        ):
            self.process(using).acquire(key, new_token(), 30)

    def crash(self, key: str) -> None:
        """Kill a server that has not written down everything: holders are told, fences rise."""
        with mortal_alias() as (mortal, using):
            backend = self.process(using)
            grant = take(backend, key)
            backend.release(grant)
            # Ahead of the clock, which would make up for what the crash undoes.
            backend.raise_fences(grant.fence + 10**9, key=key)
            for _ in range(self.chance.randrange(1, 5)):
                backend.release(grant)
                grant = take(backend, key)
            kill(mortal)
            assert backend.extend(grant) is None
            mortal.start()
            assert take(backend, key).fence > grant.fence
            backend._sessions.close_all()
            backend._connections.close_all()


def test_session_histories_agree(store: SessionStore, key: str) -> None:
    """What is drawn by a seed is answered as the dictionary says."""
    using, planted = store.registered.using, "public.pg_try_advisory_lock(bigint)"
    # What somebody may do to a schema that others write to: it wins where that comes first.
    ask(using, f"CREATE FUNCTION {planted} RETURNS bool LANGUAGE sql AS 'SELECT true'")
    try:
        run_each(partial(History, store, key))
    finally:
        ask(using, f"DROP FUNCTION {planted}")
