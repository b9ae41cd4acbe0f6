"""Seeded histories of all operations: each store answers as the dictionary of the memory backend.

Statements, functions and scripts share no line with it, and no case of the contract is repeated. On
the memory backend itself, that shows nothing: its faults are differences on the other stores. One
seed is one history: `DISTLOCK_TEST_SEED=7` repeats it alone.
"""

# ruff: noqa: D102 - what the rules do, the contract says

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import DEFAULT, patch
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.core import checks
from django.db import connections, transaction
from django.db.models.signals import post_save
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from django.views.debug import ExceptionReporter

from django_distlock import (
    BackendUnavailable,
    FenceRejected,
    InvalidLockBackend,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    conf,
    distlock,
    distlock_all,
    transaction_lock,
)
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.durations import MAX_BOUND
from django_distlock.core.keys import new_token
from django_distlock.core.pacing import SAFETY_SECONDS
from django_distlock.core.records import (
    FENCE_MAX,
    UNKNOWN,
    Contended,
    Grant,
    Holder,
    KeysAsked,
    Record,
    Waits,
    clock_fence,
)
from django_distlock.database.sql import number
from django_distlock.fencing import Fence
from django_distlock.fencing.http import (
    HEADER,
    BadFence,
    RequestFence,
    fence_header,
    fence_required,
    read_fence_header,
)
from django_distlock.fencing.seen import FenceJump, see
from django_distlock.handler import lock_backends
from django_distlock.locks.policy import attempt
from tests.drawn import MORE
from tests.integration.wires import wire
from tests.processes import spawn
from tests.shop.models import Account, Entry, Savings, Shelf, Vault

from .aliases import in_a_fork, outcome
from .helpers import Later, at_once
from .locking import eventually, receiving
from .stores import Clock, DatabaseStore, Store
from .stores_redis import RedisStore

pytestmark = pytest.mark.requires("supports_ttl", "supports_operators", "supports_listing")

#: The seeds of every day. What takes a second comes behind them.
DAILY, STEPS = 2, 60
SEEDS = DAILY * MORE
#: What ends does so half of a step behind a question: how long an operation takes decides nothing.
STEP, SOON, LATER, LAST = 1000.0, 500, 2500, 9500
TTLS = (SOON, SOON, LATER, LAST)
#: What is left of a lease behind which a rival stands.
RACE = 0.3
REST = STEP - (SOON + 1 - RACE)
ENDED = [("extend", LATER), ("release",), ("release", LATER)]
#: What may stand in the way of a key that nobody has.
UNCLEAR = {"postgresql": ["hold_table", "delete", "queue"], "mysql": ["hold_table", "delete"]}
HOLDERS = [Holder(host=each, pid=1) for each in ("one", "two")]
TIMES = ("acquired_at", "expires_at", "free_at", "renewed_until")
FACTS = ("key", "token", "ttl", "shared", "wanted", "busy", "paused", "guarded", "stop_requested")
COPIES: list[Callable[[Any], Any]] = [
    lambda row: row, copy.copy, copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row)),
]  # fmt: skip
Pair = tuple[Grant, Grant]


class Behind:
    """Sends what is read to a replica that is behind, and the locks elsewhere."""

    def __init__(self, using: str, replica: str):
        self.using, self.replica = using, replica

    def db_for_write(self, model: Any, **_: Any) -> str:
        return self.replica if model._meta.app_label == "django_distlock" else self.using

    def db_for_read(self, model: Any, **_: Any) -> str:
        return self.replica


class Place:
    """A key in the store, and in the dictionary that it is compared with.

    Attributes:
        fences: What the fences of the store are there.
        grants: The last grants, in both of them.
    """

    def __init__(self, key: str, mine: BaseLockBackend, theirs: MemoryBackend):
        self.key, self.mine, self.theirs = key, mine, theirs
        self.tokens = [new_token() for _ in range(3)]
        self.fences: dict[int, int] = {}
        self.grants: list[Pair] = []
        #: The fence of its fenced row.
        self.mark = 0

    @property
    def is_taken(self) -> bool:
        counter = self.theirs.counter(self.key)
        is_paused = counter is not None and counter.paused_until is not None
        return is_paused or self.theirs.read(self.key) is not None


class History:
    """Operations in a row, by dice with a seed."""

    def __init__(self, store: Store, mark: str, seed: int):
        self.store: Any = store
        self.chance, self.clock = random.Random(seed), Clock()
        self.said, self.alias = list[str](), store.registered.alias
        self.is_long = seed >= DAILY
        self.stalls, self.turns, self.made = 5 * seed, 5 * seed, 0
        self.using, kind = store.registered.using, store.registered.store
        # In a transaction on a file, nobody else may write to it.
        self.locks_keys = store.backend.supports_transactions and kind != "sqlite"
        # Each second history has fences that follow the clock, where a setting decides.
        self.floor: Any = "clock" if seed % 2 or store.registered.follows_clock else None
        pair = self.pair(store.backend.key_prefix)
        self.plain = [Place(f"{mark}-{seed}-{each}", *pair) for each in ("a", "a ", "c")]
        prefixed = [("p", f"q:{mark}-{seed}"), ("p:q", f"{mark}-{seed}")]
        self.places = [*self.plain, *(Place(key, *self.pair(name)) for name, key in prefixed)]
        self.rules: list[Callable[[], object]] = [
            self.acquire, self.acquire, self.acquire, self.extend, self.extend, self.release,
            self.release, self.several, self.force_release, self.request_stop, self.pause,
            self.elapse, self.clean, self.raise_fences, self.look, self.look, self.rush,
            self.shorten,
        ]  # fmt: skip
        self.rules += [self.share, self.share, self.knock] * store.backend.supports_sharing
        self.rules += [self.wake] * (store.backend.supports_wakeups and kind != "memory")
        self.rules += [self.beside] * (0 if kind == "memory" else 1 + 3 * self.is_long)
        if isinstance(store, DatabaseStore):
            # One for all of its turns: servers take 200 clients, of all who run side by side.
            self.other: Any = store.stranger()
            self.rules += [*[self.stall] * 3, self.write, self.write]
            self.rules += [self.guard, self.guard] * (kind != "sqlite")
            self.rules += [self.lock, self.lock] * self.locks_keys

    def pair(self, prefix: str) -> tuple[BaseLockBackend, MemoryBackend]:
        """Make a backend on the store, and a dictionary for it."""
        store: Any = self.store
        more = {"key_prefix": prefix, "fence_floor": self.floor}
        theirs = MemoryBackend(replace(conf.backend_config("memory"), **more), clock=self.clock)
        if hasattr(store, "variant"):
            return store.variant(**more), theirs
        return MemoryBackend(replace(store.backend.config, **more), clock=store.clock), theirs

    def run(self) -> None:
        for _ in range(STEPS * 3 // 2 if self.is_long else STEPS):
            self.chance.choice(self.rules)()
        for place in self.places:
            self.look(place)

    # What both are asked for

    def place(self, among: list[Place] | None = None) -> Place:
        # One of them is asked for most, so that its operations meet.
        return self.chance.choice([*(among or self.places), *self.plain[:1] * 3])

    def of_holder(self, place: Place) -> str:
        """Choose the token of who has the key, most of the times."""
        held = [*place.theirs.records.sharing(place.key), place.theirs.read(place.key)]
        tokens = [each.token for each in held if each is not None]
        return self.chance.choice(tokens if tokens and self.chance.random() < 0.8 else place.tokens)

    def ask(self, place: Place, operation: str, *arguments: Any, **how: Any) -> tuple[Any, Any]:
        """Ask both the same, which have the same answers; a tuple has an argument for each."""

        def of(each: Any, side: int) -> Any:
            return each[side] if isinstance(each, tuple) else each

        self.said.append(f"{operation} {place.key!r} {how}")
        mine, theirs = (
            getattr(backend, operation)(
                *(of(each, side) for each in arguments),
                **{name: of(each, side) for name, each in how.items()},
            )
            for side, backend in enumerate((place.mine, place.theirs))
        )
        if operation == "acquire":
            self.granted(place, mine, theirs)
        if operation in ("force_release", "request_stop") and mine and mine.shared:
            # It may be the record of any of those who share the key.
            self.look(place)
        else:
            self.compare(place, mine, theirs)
        return mine, theirs

    def granted(self, place: Place, mine: Any, theirs: Any) -> None:
        """Note a grant of both; its fence is above all earlier ones."""
        if isinstance(mine, Grant) and isinstance(theirs, Grant):
            assert mine.fence > max(place.fences, default=0)
            if self.floor:
                assert mine.fence >= clock_fence(mine.acquired_at - timedelta(seconds=1))
            if isinstance(self.store, RedisStore):
                ends = self.store.fields(place.key).get("free_at") or 0
                name = self.store.at("lock", place.key)
                assert not ends or self.store.client.pexpiretime(name) * 1000 >= int(ends)
            place.fences[mine.fence] = theirs.fence
            place.grants = [*place.grants[-3:], (mine, theirs)]

    def compare(self, place: Place, mine: Any, theirs: Any) -> None:
        mine = self.shape(mine, place.mine, place.fences)
        assert mine == self.shape(theirs, place.theirs, None)

    def shape(self, answer: Any, backend: BaseLockBackend, fences: dict[int, int] | None) -> Any:
        """Return what is to be the same of an answer: times count from now."""
        if not isinstance(answer, Grant | Contended | Record):
            return answer
        if token := getattr(answer, "token", None):
            assert str(token) not in repr(answer)
            with pytest.raises(TypeError, match="pickled"):
                pickle.dumps(answer)
        now, told = backend.clock(), {name: getattr(answer, name, None) for name in FACTS}
        for name in TIMES:
            at = getattr(answer, name, None)
            left = at and (at - now).total_seconds()
            told[name] = left if fences is not None else at and pytest.approx(left, abs=STEP / 5)
        holder = getattr(answer, "holder", None)
        told["asked"] = getattr(answer, "stop_requested_at", None) is not None
        told |= {"kind": type(answer), "holder": holder and holder.host, "fence": answer.fence}
        if fences is not None and answer.fence:
            told["fence"] = fences[answer.fence]
        return told

    # The rules

    def acquire(self, permits: int | None = 1) -> None:
        place, how = self.place(), dict[str, Any](permits=permits)
        how["wanted"] = permits == 1 and self.chance.random() < 0.3
        if self.chance.random() < 0.4:
            how["replace"] = self.of_holder(place)
        if self.chance.random() < 0.5:
            place.tokens = [new_token(), *place.tokens[:2]]
        ttl = self.chance.choice([*TTLS, None] if permits == 1 else TTLS)
        token, holder = self.chance.choice(place.tokens[:2]), self.chance.choice(HOLDERS)
        self.ask(place, "acquire", place.key, token, ttl, holder, **how)
        if how["wanted"]:
            # Longer than a door is closed behind the question.
            self.elapse(STEP)

    def share(self) -> None:
        self.acquire(self.chance.choice([2, 2, 3, None]))

    def knock(self) -> None:
        place = self.place()
        self.ask(place, "acquire", place.key, new_token(), SOON, wanted=True)
        for pair in place.grants if self.chance.random() < 0.5 else []:
            self.ask(place, "release", pair)
        if self.chance.random() < 0.2:
            for backend in (place.mine, place.theirs):
                backend.waiters.give_up(place.key)
        self.ask(place, "acquire", place.key, new_token(), SOON, permits=None)
        self.elapse(STEP)

    def extend(self) -> None:
        found = [(each, self.chance.choice(each.grants)) for each in self.plain if each.grants]
        if found and self.chance.random() < 0.4:
            self.said.append(f"extend_many {[place.key for place, _pair in found]}")
            mine = self.plain[0].mine.extend_many([pair[0] for _place, pair in found])
            theirs = self.plain[0].theirs.extend_many([pair[1] for _place, pair in found])
            for (place, _pair), one, other in zip(found, mine, theirs, strict=True):
                self.compare(place, one, other)
        elif (place := self.place()).grants:
            number = self.chance.randrange(len(place.grants))
            ttl = self.chance.choice(TTLS)
            mine, theirs = self.ask(place, "extend", place.grants[number], ttl)
            place.grants[number] = (mine, theirs) if mine else place.grants[number]

    def release(self) -> None:
        if (place := self.place()).grants:
            held = self.chance.choice([None, None, 0, LATER + STEP])
            self.ask(place, "release", self.chance.choice(place.grants), held)

    def several(self) -> None:
        places = self.chance.sample(self.plain, self.chance.choice([2, 3]))
        self.said.append(f"several {[each.key for each in places]}")
        tokens = {each.key: new_token() for each in places}
        mine, theirs = (
            each.records.acquire(tokens, LATER) for each in (places[0].mine, places[0].theirs)
        )
        assert isinstance(mine, list) is isinstance(theirs, list)
        if isinstance(mine, list) and isinstance(theirs, list):
            for place, one, other in zip(places, mine, theirs, strict=True):
                self.granted(place, one, other)
                self.compare(place, one, other)
        for place in places:
            self.look(place)

    def rush(self) -> None:
        """Let several acquire a key at once: one has it, and nobody where it is taken."""
        place = self.place()
        tokens, taken = [new_token() for _ in range(4)], place.is_taken
        self.said.append(f"rush {place.key!r}")
        asked = [lambda each=each: place.mine.acquire(place.key, each, LATER) for each in tokens]
        found = [each for each in at_once(asked) if isinstance(each, Grant)]
        # On a slow machine, all may have found another one in the way.
        assert len(found) <= (not taken)
        for mine in found:
            theirs = place.theirs.acquire(place.key, mine.token, LATER)
            self.granted(place, mine, theirs)
            self.compare(place, mine, theirs)

    def seen(self, place: Place) -> dict[str, Any]:
        """Choose the fence that an operator has seen, right or wrong; or none."""
        if self.chance.random() < 0.5 or not place.grants:
            return {}
        mine, theirs = self.chance.choice(place.grants)
        return {"fence": (mine.fence, theirs.fence)}

    def force_release(self) -> None:
        place = self.place()
        before = place.mine.counter(place.key)
        if self.ask(place, "force_release", place.key, **self.seen(place))[0] is not None:
            after = place.mine.counter(place.key)
            assert before is not None
            assert after is not None
            assert after.fence > before.fence

    def request_stop(self) -> None:
        place, within = self.place(), self.chance.choice([None, SOON])
        how: dict[str, Any] = {"token": self.of_holder(place)} if self.chance.random() < 0.3 else {}
        self.ask(place, "request_stop", place.key, within, **how, **self.seen(place))

    def shorten(self) -> None:
        """Let a lease end soon; behind that it is renewed no more, and its key is not yet free."""
        place = self.place()
        self.ask(place, "acquire", place.key, new_token(), LAST)
        self.ask(place, "request_stop", place.key, SOON)
        for _ in range(2):
            self.look(place)
            if place.grants:
                self.ask(place, "extend", place.grants[-1], LATER)
            self.elapse(STEP)

    def pause(self) -> None:
        place, wanted = self.place(), self.chance.random() < 0.4
        until = [
            each.clock() + timedelta(seconds=SOON + STEP) for each in (place.mine, place.theirs)
        ]
        self.ask(place, "pause", place.key, tuple(until) if wanted else None)

    def elapse(self, seconds: float = 0) -> None:
        seconds = seconds or self.chance.choice([STEP, STEP, 5 * STEP])
        self.said.append(f"elapse {seconds}")
        self.store.elapse(seconds)
        self.clock.offset += seconds

    def clean(self) -> None:
        place = self.place()
        for each in (place.mine, place.theirs):
            each.cleanup(each.clock())

    def raise_fences(self) -> None:
        place = self.place()
        if self.chance.random() < 0.3:
            self.said.append(f"raise_fences {place.key!r}")
            mine, theirs = (each.raise_fences(key=place.key) for each in (place.mine, place.theirs))
            assert mine.left == theirs.left

    def look(self, place: Place | None = None) -> None:
        place = place or self.place()
        self.ask(place, "read", place.key)
        both = place.mine, place.theirs
        listed = [sorted((x.key, x.token) for x in each.list(place.key).records) for each in both]
        assert sorted(set(listed[0])) == listed[1]
        shared = [
            sorted(each.records.sharing(place.key), key=lambda record: record.token)
            for each in both if place.mine.supports_sharing
        ]  # fmt: skip
        for one, other in zip(*shared, strict=True) if shared else ():
            self.compare(place, one, other)
        if place.mine.supports_token_lookup:
            self.ask(place, "read_token", self.of_holder(place))
        mine, theirs = (each.counter(place.key) for each in both)
        assert (mine.fence if mine else 0) >= max(place.fences, default=0)
        assert bool(mine and mine.paused_until) is bool(theirs and theirs.paused_until)

    def wake(self) -> None:
        """Let who waits be woken by a release: by the store, as it would be in another process."""
        place, alias = self.fresh(), self.alias
        if lock_backends[alias].listen(2):
            self.said.append(f"wake {place.key!r}")
            # The machine may stand still for as long as nobody is woken, but hardly so often.
            assert any(self.is_woken(place, alias) for _ in range(3))

    def is_woken(self, place: Place, alias: str) -> bool:
        self.ask(place, "acquire", place.key, new_token(), LAST)
        waiter = Later(distlock(place.key, backend=alias, ttl=LATER, wait=60).acquire)
        assert eventually(lambda: getattr(place.mine.read(place.key), "wanted", False), 30)
        began = time.monotonic()
        self.ask(place, "release", place.grants[-1])
        lease = waiter.result(90)
        took = time.monotonic() - began
        lease.release()
        return took < SAFETY_SECONDS - 0.5

    # What takes longer, or is of the store alone: each in its turn, on keys that nobody else has

    def beside(self) -> None:
        kind, kinds = self.store.registered.store, [self.hold_all, self.line_of_waiters]
        kinds += [self.remake, self.send, self.spoil, self.nest, self.cut, self.interrupt]
        kinds += [self.mistake, self.cancel, self.succeed]
        kinds += [self.fill] * self.store.backend.supports_sharing
        kinds += [self.vault, self.relate, self.leave, self.route] * bool(self.using)
        kinds += [self.line_up] * self.locks_keys + [self.begin, self.move] * (kind == "postgresql")
        kinds += [self.reconfigure, self.lose] * (kind == "redis")
        kinds += [self.fork] * (kind == "sqlite")
        self.turns += 1
        turn = kinds[self.turns % len(kinds)]
        self.said.append(turn.__name__)
        turn()

    def hold_all(self) -> None:
        """Keep several keys behind the work; but none that was granted beside a refusal."""
        places = [self.fresh() for _ in range(2)]
        self.ask(places[1], "acquire", places[1].key, new_token(), LATER)
        every = distlock_all(
            *(each.key for each in places), wait=0.1, ttl=LATER, hold=True, backend=self.alias
        )
        with pytest.raises(LockNotAcquired):
            every.acquire()
        assert [each.mine.read(each.key) is None for each in places] == [True, False]

    def line_of_waiters(self) -> None:
        place, holder = self.fresh(), replace(HOLDERS[0], task_id="5f6d")
        for each in (holder, holder.as_queued(), replace(holder, task_id="6f6d").as_queued()):
            assert place.mine.waiters.note(place.key, each, 60) is not None
        assert [*place.mine.waiters.count([place.key])] == [Waits(1, 2)]

    def remake(self) -> None:
        """Make a row under the last lease of a key, and no other; nobody gets the key meanwhile."""
        place, taken = self.fresh(), list[Any]()
        lock, using = distlock(place.key, backend=self.alias), self.using or "default"
        old, last = (lease for _ in range(2) if (lease := lock.acquire()).release())
        rows = Savings.objects.using(using)

        def meanwhile(sender: object, **_: Any) -> None:
            if sender is Savings:
                other = Later(place.mine.acquire, place.key, new_token(), SOON, bound=0.05)
                taken.append(other.result())

        with pytest.raises(FenceRejected):
            rows.fenced(old).create(name=place.key)
        if self.using:
            with receiving(post_save, meanwhile):
                rows.fenced(last).create(name=place.key)
            assert isinstance(taken[0], Contended)
            Account.objects.using(using).filter(name=place.key).delete()

    def send(self) -> None:
        """Send fences to a service, which believes what is for it, and may be true."""
        place = self.fresh()
        for fence, audience in ((1, "ledger"), (2, "mail"), (FENCE_MAX, "ledger"), (3, "ledger")):
            settings = {"DISTLOCK_FENCE_AUDIENCE": ["ledger"], "DISTLOCK_FENCE_SECRET": "s" * 60}
            with override_settings(**settings):
                text = fence_header(Fence(place.key, fence), audience=audience)[HEADER]
                try:
                    highest = see(read_fence_header(text), self.using or "default")
                except BadFence:
                    assert audience == "mail"
                except FenceJump:
                    assert fence == FENCE_MAX
                else:
                    assert highest == fence in (1, 3)
        request: Any = RequestFactory().get("/")
        request.fence = RequestFence(place.key, 3)
        for wanted in (place.key, f"{place.key}."):

            def view(_request: Any) -> HttpResponse:
                return HttpResponse()

            guarded = fence_required(key=lambda _request, key=wanted: key)(view)
            assert guarded(request).status_code == (200 if wanted == place.key else 403)

    def spoil(self) -> None:
        """Write to a record by hand: the other one is listed as ever."""
        places = [self.fresh() for _ in range(2)]
        for each in places:
            self.ask(each, "acquire", each.key, new_token(), LATER)
        spoiled, sound = places
        if isinstance(self.store, DatabaseStore):
            where = f"{self.store.locks} SET holder = '[1]' WHERE storage_key = %s"
            self.store.ask(f"UPDATE {where}", [self.store.name(spoiled.key)])
        elif isinstance(self.store, RedisStore):
            self.store.client.hset(self.store.at("lock", spoiled.key), "fence", "many")
        assert sound.key in [each.key for each in sound.mine.list(self.plain[0].key).records]
        if isinstance(self.store, RedisStore):
            self.store.client.delete(self.store.at("lock", spoiled.key))
        for backend in (spoiled.mine, spoiled.theirs):
            backend.force_release(spoiled.key)

    def leave(self) -> None:
        """Leave a lease to its end: it is counted for as long as nobody takes the key."""
        key = self.fresh().key
        place = Place(key, *self.pair(f"p{key}"))
        self.ask(place, "acquire", key, new_token(), SOON)
        self.elapse(STEP)
        assert place.mine.states(STEP)[0].past_expiry.number == 1

    def nest(self) -> None:
        """Let a body meet a conflict of its own, which is none about its lock."""
        taken = self.fresh()
        self.ask(taken, "acquire", taken.key, new_token(), LATER)
        inner, lock = (distlock(e.key, wait=0, backend=self.alias) for e in (taken, self.fresh()))
        with pytest.raises(LockNotAcquired), attempt(lock):
            inner.acquire()

    def interrupt(self) -> None:
        """Let an error that is none of the store's come amid a release: it reaches the caller."""
        place, store = self.fresh(), lock_backends[self.alias]
        lock = distlock(place.key, wait=0, backend=self.alias)
        # Once: whoever ends what the block has left may come before the end of the patch.
        fails = patch.object(
            store, "release", wraps=store.release, side_effect=[ZeroDivisionError, *[DEFAULT] * 9]
        )
        with pytest.raises(ZeroDivisionError), fails, lock:
            pass
        assert eventually(lambda: place.mine.read(place.key) is None, 30)

    def cut(self) -> None:
        """End the connections between two operations, which nobody notices."""
        self.look()
        if isinstance(self.store, RedisStore) and self.store.is_single:
            mine: Any = self.plain[0].mine
            number = mine.store.command("CLIENT", "ID")
            self.store.client.client_kill_filter(_id=number)
        elif self.store.registered.store in ("postgresql", "mysql"):
            for each in self.store.sessions():
                self.other.cut(each)
        place = self.fresh()
        self.ask(place, "acquire", place.key, new_token(), LATER)
        if self.using:
            connections[self.using].close()

    def begin(self) -> None:
        """Begin a transaction that the driver alone knows of: nobody locks in it."""
        lock = distlock(self.fresh().key, wait=0, backend=self.alias)
        with connections[self.using].cursor() as cursor:
            cursor.execute("BEGIN")
            with pytest.raises(LockUsageError):
                lock.acquire()
            cursor.execute("ROLLBACK")

    def move(self) -> None:
        """Let the caller look elsewhere, where somebody plants operators, and locks numbers."""
        place, schema, ask = self.fresh(), f"planted_{self.alias}_{self.turns}", self.store.ask
        # What everybody can compute of a key, who does not know the secret.
        for use in ("turn", "session"):
            told = number(use, "%s", seed="''")
            self.other.execute(f"SELECT pg_advisory_xact_lock({told})", self.store.name(place.key))
        never, numbers = f"{schema}.never", "LEFTARG = bigint, RIGHTARG = bigint"
        ask(f"CREATE SCHEMA {schema}")
        what = "RETURNS bool LANGUAGE plpgsql AS 'BEGIN RAISE ''planted''; END'"
        ask(f"CREATE FUNCTION {never}(bigint, bigint) {what}")
        ask(f"CREATE OPERATOR {schema}.< ({numbers}, FUNCTION = {never})")
        try:
            for path in ("pg_temp", f"{schema}, pg_catalog"):
                ask(f"SET search_path = {path}")
                for token in (new_token(), new_token()):
                    self.ask(place, "acquire", place.key, token, LATER)
                self.ask(place, "release", place.grants[-1])
        finally:
            ask("RESET search_path")
            ask(f"DROP SCHEMA {schema} CASCADE")
            self.other.rollback()

    def route(self) -> None:
        """Have routers that answer otherwise: there is one lock, and one row that is written."""
        place, replica = self.fresh(), "sqlite" if self.using == "default" else "default"
        self.ask(place, "acquire", place.key, new_token(), LATER)
        made = Account.objects.using(self.using).create(name=place.key, value=self.made)
        unnamed = replace(self.store.database.config, options={})
        with override_settings(DATABASE_ROUTERS=[Behind(self.using, replica)]):
            row = Account.objects.fenced(Fence(place.key, 1)).only("name").get(pk=made.pk)
            assert row.value == self.made
            with suppress(InvalidLockBackend):
                taken = DatabaseBackend(unnamed).acquire(place.key, new_token(), SOON)
                # The router sends those of other databases to the one that is asked without.
                assert isinstance(taken, Contended) or replica == "default"

    def fork(self) -> None:
        """Fork amid what a thread writes to the file: each child finds it free."""
        with spawn(f"{__name__}:forks", self.alias, self.fresh().key) as worker:
            assert worker.result(60) == ["True"] * 10

    def reconfigure(self) -> None:
        """Change the settings under a lease: it is released, and no connection is left."""
        key, name, given = self.fresh().key, new_token(), settings.DISTLOCK[self.alias]
        options = {"url": f"{given['OPTIONS']['url']}?client_name={name}"}
        with override_settings(DISTLOCK={self.alias: {**given, "OPTIONS": options}}):
            lease = distlock(key, backend=self.alias, wait=0).acquire()
        assert lease.release()
        assert eventually(lambda: name not in str(self.store.client.client_list()), 10)

    def lose(self) -> None:
        """Lose the answer to a question: it was asked once, and nobody knows what became of it."""
        url = urlsplit(settings.DISTLOCK[self.alias]["OPTIONS"]["url"])
        with wire(server=(str(url.hostname), url.port or 0)) as line:
            address = {"url": f"redis://127.0.0.1:{line.address['PORT']}{url.path}"}
            behind = self.store.variant(address, fence_floor=self.floor)
            warm, place = (Place(self.fresh().key, behind, self.plain[0].theirs) for _ in range(2))
            for each in (warm, place):
                self.ask(each, "acquire", each.key, new_token(), LATER)
            self.ask(warm, "extend", warm.grants[0], LATER)
            self.ask(warm, "release", warm.grants[0])
            asked = self.chance.choice(["extend", "release"])
            line.fate = "cut"
            with pytest.raises(BackendUnavailable):
                getattr(behind, asked)(place.grants[0][0])
            getattr(place.theirs, asked)(place.grants[0][1])
            place.mine = self.plain[0].mine
            self.look(place)

    def fill(self) -> None:
        """Let one more ask for a share of a key than there are, also when all but one are over."""
        place, permits = self.fresh(), self.chance.choice([2, 3])
        for ttl in (SOON, LATER):
            for _ in range(permits + 1):
                self.ask(place, "acquire", place.key, new_token(), ttl, permits=permits)
            self.ask(place, "extend", place.grants[-1], LATER)
            self.elapse(STEP)

    def succeed(self) -> None:
        """Ask a holder to stop, and wait; another one follows in its place, or behind its end."""
        for holder, is_over in ((0, False), (1, False), (1, True)):
            place, token = self.fresh(), new_token()
            self.ask(place, "acquire", place.key, token, SOON, HOLDERS[0])
            self.ask(place, "request_stop", place.key)
            self.ask(place, "acquire", place.key, new_token(), SOON, wanted=True)
            if is_over:
                self.elapse(STEP)
            how = {"replace": token}
            self.ask(place, "acquire", place.key, new_token(), LATER, HOLDERS[holder], **how)
            self.look(place)

    def mistake(self) -> None:
        """Have an address in the settings where none belongs: no message tells its password."""
        url = f"redis://ada:{(hidden := new_token())}@127.0.0.1:6379/1"
        for _ in range(3):
            given: dict[str, Any] = {**settings.DISTLOCK[self.alias], "OPTIONS": {"url": url}}
            where = self.chance.choice(["BACKEND", "KEY_PREFIX", "TTL", "WAIT", "RETRY", "OPTIONS"])
            with override_settings(DISTLOCK={"wrong": {**given, where: url}}):
                assert hidden not in str(checks.run_checks(tags=["distlock"]))

    def cancel(self) -> None:
        """Lose the lease of a task, and cancel the task or not: who cancels is obeyed."""
        place, is_cancelled = self.fresh(), self.chance.random() < 0.5
        lock = distlock(place.key, backend=self.alias, ttl=LATER, wait=0)

        async def work() -> None:
            task: Any = asyncio.current_task()
            async with lock as lease:
                Later(place.mine.force_release, place.key).result()
                try:
                    with suppress(LockLost):
                        await lease.aextend()
                    await asyncio.sleep(60)
                finally:
                    if is_cancelled:
                        task.cancel()
                        await asyncio.sleep(60)

        with pytest.raises(asyncio.CancelledError if is_cancelled else LockLost):
            asyncio.run(work())

    def line_up(self) -> None:
        """Whoever waits for a key has locked those before it alone, however it names them."""
        places = [self.fresh() for _ in range(4)]
        keys = [each.key for each in places]
        asked = KeysAsked(keys=dict.fromkeys(keys[1::2], False), using=self.using, bound=0.0)

        def work() -> None:
            with transaction.atomic(using=self.using):
                transaction_lock(keys[2], keys[1], keys[0], keys[3], wait=20, backend=self.alias)

        with transaction.atomic(using=self.using):
            assert places[0].mine.transactions.lock(asked) is None
            waiting = Later(work)
            assert eventually(lambda: not Later(self.locks, places[0]).result(), 5)
            assert Later(self.locks, places[2]).result()
        waiting.result()

    # Rows that refuse a fence that is lower than theirs

    def vault(self) -> None:
        """Write a row with a key of its own, which is not that of its copy."""
        rows, row = Vault.objects.using(self.using), Vault(value=1)
        row.save(using=self.using)
        right, wrong = (Fence(f"vault:{row.pk + each}", 5) for each in (0, 1))
        for lease, how in ((wrong, {}), (None, {"update_fields": ["value"]})):
            with pytest.raises(LockUsageError):
                row.save(lease=lease, **how)
        with pytest.raises(LockUsageError):
            rows.fenced(wrong).update(value=2)
        row.save(lease=right)
        copied = rows.get(pk=row.pk)
        copied.pk, copied._state.adding = None, True
        copied.save()
        assert copied.fence == 0

    def relate(self) -> None:
        """Take a row from a relation under the lease that it was read under."""
        shelf = Shelf.objects.using(self.using).create()
        made = Entry.objects.using(self.using).create(shelf=shelf)
        with patch.object(Entry, "fence_required", True):
            row = Entry.objects.using(self.using).fenced(Fence("a", 6)).get(pk=made.pk)
            shelf.entries.remove(row)
        assert not shelf.entries.exists()

    def write(self) -> None:
        """Let two read a row, the second under a later fence, and write it late or not."""
        place, rows = self.place(self.plain), Account.objects.using(self.using)
        # MariaDB's collation of a project's own columns ignores spaces at the end.
        plain = rows.get_or_create(name=f"{place.key}.")[0]
        read: list[tuple[Any, int]] = [(plain, 0)]
        for fence in (place.mark + 1, place.mark + 2):
            row = rows.fenced(Fence(place.key, fence)).get(pk=plain.pk)
            read.append((self.chance.choice(COPIES)(row), fence))
        place.mark = rows.get(pk=plain.pk).fence
        for row, fence in self.chance.sample(read, 3):
            row.value, is_late = self.chance.getrandbits(20), 0 < fence < place.mark
            self.said.append(f"write {place.key!r} {fence} over {place.mark}")
            try:
                if self.chance.random() < 0.4:
                    rows.bulk_update([row], ["value"])
                else:
                    row.save()
            except FenceRejected:
                assert is_late
            else:
                assert not is_late
                place.mark = max(fence, place.mark)
            assert rows.get(pk=plain.pk).fence == place.mark

    # Transactions

    def lock(self) -> None:
        """Lock keys in a transaction; nobody else has those, and all that it was refused."""
        places = self.chance.sample(self.plain, 2)
        # What several hold is rare, and is neither free nor one holder's.
        held = [each for each in self.plain if each.theirs.records.sharing(each.key)]
        if held and places[0] not in held and self.chance.random() < 0.5:
            places = [held[0], next(each for each in places if each is not held[0])]
        places.sort(key=lambda each: each.key)
        shared = self.chance.random() < 0.4
        self.said.append(f"lock {[each.key for each in places]} {shared=}")
        expected = not any(self.keeps_out(each, shared) for each in places)
        asked = KeysAsked(keys={each.key: shared for each in places}, using=self.using, bound=0.0)
        with transaction.atomic(using=self.using):
            assert (places[0].mine.transactions.lock(asked) is None) is expected
            for place in places:
                token = new_token()
                if expected:
                    other = Later(place.mine.acquire, place.key, token, SOON, bound=0.05)
                    assert isinstance(other.result(), Contended)
                elif self.store.registered.store == "postgresql":
                    # The others do not give up what was locked before the one in the way.
                    mine = Later(place.mine.acquire, place.key, token, SOON).result()
                    theirs = place.theirs.acquire(place.key, token, SOON)
                    self.granted(place, mine, theirs)
                    self.compare(place, mine, theirs)

    def keeps_out(self, place: Place, shared: bool) -> bool:
        record = place.theirs.read(place.key)
        return place.is_taken and not (record is not None and record.shared and shared)

    def locks(self, place: Place) -> bool:
        asked = KeysAsked(keys={place.key: False}, using=self.using, bound=0.5)
        with transaction.atomic(using=self.using):
            return place.mine.transactions.lock(asked) is None

    def guard(self) -> None:
        """Guard a transaction by a lease that is the last of its key, and not over."""
        place = self.place(self.plain)
        if not place.grants:
            return
        # An earlier one is refused for its fence, whatever else is wrong with it.
        mine, theirs = self.chance.choice([*place.grants, *place.grants[-1:] * 3])
        if mine.shared:
            return
        if is_over := self.chance.random() < 0.5:
            mine = replace(mine, expires_at=mine.acquired_at - timedelta(seconds=1))
        counter = place.theirs.counter(place.key)
        expected = counter is not None and counter.fence == theirs.fence and not is_over
        self.said.append(f"guard {place.key!r} {is_over=}")
        with transaction.atomic(using=self.using):
            assert place.mine.guards.hold(mine, self.using) is expected
            if expected and self.store.registered.store == "postgresql" and mine.ttl:
                # Whoever is silent for longer is cut off.
                assert self.store.ask("SHOW idle_in_transaction_session_timeout") != [("0",)]
            if expected:
                removed = Later(place.mine.force_release, place.key, bound=0.05).result()
                # Where nobody has the key, it may be as busy, or free.
                assert isinstance(removed, Contended) or place.theirs.read(place.key) is None
                other = Later(place.mine.acquire, place.key, new_token(), SOON, bound=0.05)
                assert isinstance(other.result(), Contended)
                assert not (self.locks_keys and Later(self.locks, place).result())

    # A stranger stands in the way until a lease ends, or was extended

    def stall(self) -> None:
        assert isinstance(self.store, DatabaseStore)
        kind = self.store.registered.store
        kinds: list[Callable[..., None]] = [
            self.extended, self.crossed, self.renewed, self.followed,
            *(partial(self.ended, each) for each in ENDED),
        ]  # fmt: skip
        if self.is_long:
            unclear = UNCLEAR.get(kind, ["hold_table"])
            kinds += [self.downgraded, *(partial(self.unclear, each) for each in unclear)]
            kinds += [self.silenced] * (kind != "sqlite")
        kinds += [partial(self.extended, by=self.locks)] * self.locks_keys
        self.stalls += 1
        # Each in its turn, on a key that nobody else has.
        place = self.fresh()
        self.said.append(f"stall {self.stalls % len(kinds)}")
        self.ask(place, "acquire", place.key, new_token(), SOON)
        kinds[self.stalls % len(kinds)](place, self.other)

    def fresh(self) -> Place:
        one, self.made = self.plain[0], self.made + 1
        return Place(f"{one.key}-{self.made:03}", one.mine, one.theirs)

    def unclear(self, way: str, place: Place, stranger: Any) -> None:
        """A transaction that may end without a lease is trouble, and nobody who has the key."""
        self.elapse(STEP)
        lock = distlock(place.key, wait=0, backend=self.alias)
        if way == "delete":
            where = f"{self.store.locks} WHERE storage_key = %s"
            stranger.execute(f"DELETE FROM {where}", self.store.name(place.key))
        else:
            getattr(stranger, way)(*[place.key] * (way == "queue"))

        def try_once() -> object:
            with suppress(BackendUnavailable):
                return lock.try_acquire()
            return BackendUnavailable

        assert at_once([try_once] * 4) == [BackendUnavailable] * 4
        stranger.rollback()

    def silenced(self, place: Place, stranger: Any) -> None:
        """An error of who asked when its session ended tells no token."""
        token = new_token()
        self.elapse(STEP)
        stranger.hold(place.key)
        call = Later(place.mine.acquire, place.key, token, LATER)
        stranger.wait_until_blocked()
        for each in stranger.blocked():
            stranger.cut(each)
        with pytest.raises(BackendUnavailable) as caught:
            call.result()
        stranger.rollback()
        page = ExceptionReporter(None, caught.type, caught.value, caught.tb).get_traceback_html()
        assert str(token) not in page

    def downgraded(self, place: Place, stranger: Any) -> None:
        """A guard that is in the way of a downgrade does not end the lease."""
        self.elapse(STEP)
        lease = distlock(place.key, wait=0, backend=self.alias).acquire()
        stranger.guard(place.key)
        store = lock_backends[self.alias]
        with patch.object(store, "acquire", wraps=store.acquire) as asked:
            sharing = Later(lease.downgrade)
            # The first answer was that it is busy.
            assert eventually(lambda: asked.call_count > 1, 30)
            stranger.rollback()
            sharing.result()
        assert lease.shared
        lease.release()

    def extended(
        self, place: Place, stranger: Any, by: Callable[[Place], object] | None = None
    ) -> None:
        """An extend under way wins over who found the key free."""
        place.theirs.extend(place.grants[-1][1], LATER + SOON + 1 - RACE)
        free = self.nearly_over(place)
        stranger.hold(place.key)
        free()
        acquire = partial(place.mine.acquire, place.key, new_token(), LATER)
        rival: Later[Any] = Later(acquire if by is None else partial(by, place))
        stranger.wait_until_blocked()
        stranger.extend(place.key, LATER)
        stranger.commit()
        answer = rival.result()
        assert not isinstance(answer, Grant)
        assert answer is not True
        self.elapse(REST)
        self.ask(place, "release", place.grants[-1])

    def ended(self, asked: tuple[Any, ...], place: Place, stranger: Any) -> None:
        """Whoever waited past the end of its lease has none."""
        free, (mine, theirs) = self.nearly_over(place), place.grants[-1]
        operation, *more = asked
        stranger.hold(place.key)
        call = Later(getattr(place.mine, operation), mine, *more)
        stranger.wait_until_blocked()
        free()
        stranger.rollback()
        assert not call.result()
        self.elapse(REST)
        assert not getattr(place.theirs, operation)(theirs, *more)

    def crossed(self, place: Place, stranger: Any) -> None:
        """Of an extend and an acquire that wait past the end of the lease, one wins at most."""
        free, token, began = self.nearly_over(place), new_token(), time.monotonic()
        stranger.hold(place.key)
        extend = Later(place.mine.extend, place.grants[-1][0], LATER)
        stranger.wait_until_blocked()
        free()
        acquire = Later(place.mine.acquire, place.key, token, LATER)
        stranger.wait_until_blocked(2, patience=0.5)
        stranger.rollback()
        extended, mine = extend.result(), acquire.result()
        assert not extended
        # Where nobody has waited for longer than they may, somebody wins.
        assert isinstance(mine, Grant) or time.monotonic() - began >= MAX_BOUND
        if isinstance(mine, Grant):
            # The dictionary was asked a moment later for the lease that is over.
            self.clock.offset += 1.0
            self.granted(place, mine, place.theirs.acquire(place.key, token, LATER))
            self.ask(place, "release", place.grants[-1])
        self.elapse(REST)

    def renewed(self, place: Place, stranger: Any) -> None:
        """An extend counts from the end of its wait."""
        pair = place.grants[-1]
        self.waits(place, stranger, lambda backend, side: backend.extend(pair[side], LATER))

    def followed(self, place: Place, stranger: Any) -> None:
        """So does an acquire behind a lease that is over."""
        self.elapse(STEP)
        token = new_token()
        self.waits(place, stranger, lambda backend, _side: backend.acquire(place.key, token, LATER))

    def waits(self, place: Place, stranger: Any, call: Callable[..., Any]) -> None:
        stranger.hold(place.key)
        waiter = Later(call, place.mine, 0)
        stranger.wait_until_blocked()
        time.sleep(0.1)
        freed = self.store.now()
        stranger.rollback()
        mine = waiter.result()
        if mine is UNKNOWN or (isinstance(mine, Contended) and mine.busy):
            return  # The machine stood still for longer than it may wait.
        theirs = call(place.theirs, 1)
        assert mine.expires_at - timedelta(seconds=mine.ttl) >= freed
        if mine.fence not in place.fences:
            self.granted(place, mine, theirs)
        self.compare(place, mine, theirs)

    def nearly_over(self, place: Place) -> Callable[[], None]:
        """Leave a lease a moment until its key is free; return how to wait for that."""
        self.elapse(SOON + 1 - RACE)
        record = place.mine.read(place.key)

        def free() -> None:
            if record is not None and record.free_at is not None:
                left = (record.free_at - self.store.now()).total_seconds()
                time.sleep(max(0.0, left) + 0.01)

        return free


def forks(alias: str, key: str) -> list[str]:
    """Fork while a thread writes; return what each child is told that takes a key of its own."""
    ours, theirs = (distlock(f"{key}-{each}", backend=alias) for each in "ab")
    ends = threading.Event()

    def write() -> None:
        while not ends.wait(0.001):
            ours.acquire().release()

    writing = Later(write)
    told = [in_a_fork(lambda: {"": outcome(lambda: theirs.acquire().release())}) for _ in range(10)]
    ends.set()
    writing.result()
    return [said[""] for said, _status in told]


def run_each(begin: Callable[[int], Any]) -> None:
    """Run the history of each seed; tell what it had done where one fails."""
    one = os.environ.get("DISTLOCK_TEST_SEED")
    for seed in range(SEEDS) if one is None else [int(one)]:
        history = begin(seed)
        try:
            history.run()
        except Exception as error:
            error.add_note("\n".join([f"seed {seed}:", *history.said]))
            raise


def test_histories_agree(store: Store, key: str) -> None:
    """What is drawn by a seed is answered alike by the store and by the dictionary."""
    try:
        run_each(partial(History, store, key))
    finally:
        if using := store.registered.using:
            Account.objects.using(using).filter(name__startswith=key).delete()
