"""Seeded histories of all operations: each store answers as the dictionary of the memory backend.

Statements, functions and scripts share no line with it, and no case of the contract is repeated. On
the memory backend itself, that shows nothing: its faults are differences on the other stores. One
seed is one history: `DISTLOCK_TEST_SEED=7` repeats it alone.
"""

# ruff: noqa: D102 - what the rules do, the contract says

from __future__ import annotations

import copy
import os
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import transaction

from django_distlock import FenceRejected, conf, distlock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.fences import clock_fence
from django_distlock.core.holders import Holder
from django_distlock.core.keys import new_token
from django_distlock.core.pacing import SAFETY_SECONDS
from django_distlock.core.records import UNKNOWN, Contended, Grant, KeysAsked, Record
from django_distlock.fencing import Fence
from django_distlock.handler import lock_backends
from tests.drawn import MORE
from tests.shop.models import Account

from .helpers import Later, at_once
from .locking import eventually
from .stores import Clock, DatabaseStore, Store

pytestmark = pytest.mark.requires("supports_ttl", "supports_operators", "supports_listing")

SEEDS, STEPS = 2 * MORE, 60
#: What ends does so half of a step behind a question: how long an operation takes decides nothing.
STEP, SOON, LATER, LAST = 1000.0, 500, 2500, 9500
TTLS = (SOON, SOON, LATER, LAST)
#: What is left of a lease behind which a rival stands.
RACE = 0.3
REST = STEP - (SOON + 1 - RACE)
ENDED = [("extend", LATER), ("release",), ("release", LATER)]
HOLDERS = [Holder(host=each, pid=1) for each in ("one", "two")]
TIMES = ("acquired_at", "expires_at", "free_at", "renewed_until")
FACTS = ("key", "token", "ttl", "shared", "wanted", "busy", "paused", "guarded", "stop_requested")
COPIES: list[Callable[[Any], Any]] = [
    lambda row: row, copy.copy, copy.deepcopy, lambda row: pickle.loads(pickle.dumps(row)),
]  # fmt: skip
Pair = tuple[Grant, Grant]


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
        self.store, self.chance, self.clock = store, random.Random(seed), Clock()
        self.said: list[str] = []
        self.stalls = 5 * seed
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
        if isinstance(store, DatabaseStore):
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
        for _ in range(STEPS):
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
            place.fences[mine.fence] = theirs.fence
            place.grants = [*place.grants[-3:], (mine, theirs)]

    def compare(self, place: Place, mine: Any, theirs: Any) -> None:
        mine = self.shape(mine, place.mine, place.fences)
        assert mine == self.shape(theirs, place.theirs, None)

    def shape(self, answer: Any, backend: BaseLockBackend, fences: dict[int, int] | None) -> Any:
        """Return what is to be the same of an answer: times count from now."""
        if not isinstance(answer, Grant | Contended | Record):
            return answer
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
        place, alias = self.fresh(), self.store.registered.alias
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

    # Rows that refuse a fence that is lower than theirs

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
        places = sorted(self.chance.sample(self.plain, 2), key=lambda each: each.key)
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
        mine, theirs = self.chance.choice(place.grants or [(None, None)])
        if mine is None or theirs is None or mine.shared:
            return
        if is_over := self.chance.random() < 0.3:
            mine = replace(mine, expires_at=mine.acquired_at - timedelta(seconds=1))
        counter = place.theirs.counter(place.key)
        expected = counter is not None and counter.fence == theirs.fence and not is_over
        self.said.append(f"guard {place.key!r} {is_over=}")
        with transaction.atomic(using=self.using):
            assert place.mine.guards.hold(mine, self.using) is expected
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
        kinds: list[Callable[..., None]] = [
            self.extended, self.crossed, self.renewed, self.followed,
            *(partial(self.ended, each) for each in ENDED),
        ]  # fmt: skip
        if self.locks_keys:
            kinds.append(partial(self.extended, by=self.locks))
        self.stalls += 1
        # Each in its turn, on a key that nobody else has.
        place = self.fresh()
        self.said.append(f"stall {self.stalls % len(kinds)}")
        self.ask(place, "acquire", place.key, new_token(), SOON)
        kinds[self.stalls % len(kinds)](place, self.store.stranger())

    def fresh(self) -> Place:
        one = self.plain[0]
        return Place(f"{one.key}-{len(self.said)}", one.mine, one.theirs)

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
        free, token = self.nearly_over(place), new_token()
        stranger.hold(place.key)
        extend = Later(place.mine.extend, place.grants[-1][0], LATER)
        stranger.wait_until_blocked()
        free()
        acquire = Later(place.mine.acquire, place.key, token, LATER)
        stranger.wait_until_blocked(2, patience=0.5)
        stranger.rollback()
        extended, mine = extend.result(), acquire.result()
        assert not extended
        if isinstance(mine, Grant):
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


def test_histories_agree(store: Store, key: str) -> None:
    """What is drawn by a seed is answered alike by the store and by the dictionary."""
    one = os.environ.get("DISTLOCK_TEST_SEED")
    for seed in range(SEEDS) if one is None else [int(one)]:
        history = History(store, key, seed)
        try:
            history.run()
        except Exception as error:
            error.add_note("\n".join([f"seed {seed}:", *history.said]))
            raise
        finally:
            if history.using:
                Account.objects.using(history.using).filter(name__startswith=key).delete()
