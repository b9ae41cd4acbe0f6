"""The promises of every backend, as tests for backends of other projects.

from django_distlock.testing.contract import BackendContract

class TestMine(BackendContract):
    alias = "mine"

The tests need pytest, and settings with the alias in `DISTLOCK`. Tests of features that a backend
lacks are skipped.
"""

# ruff: noqa: S101 - these are tests

from __future__ import annotations

import json
import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, ClassVar, TypeVar

import pytest

from ..backends.base import BaseLockBackend
from ..core.errors import InvalidArgument, LockUsageError
from ..core.keys import new_token
from ..core.records import Contended, Grant, Holder, Record
from ..handler import lock_backends

T = TypeVar("T")
#: The types of the fixtures of the same names.
Elapse = Callable[[float], None]
Clock = Callable[[], datetime]
IsNext = Callable[..., bool]

#: The mark that names the attributes of a backend that a test needs.
NEEDS = "distlock_needs"
#: Seconds that threads and processes may take on a busy machine.
_PATIENCE = 60
_PROCESSES = 4

_has_ttl = pytest.mark.distlock_needs("supports_ttl")


def take(
    backend: BaseLockBackend, key: str, ttl: float | None = 30, token: str = "", **more: Any
) -> Grant:
    """Acquire a key that is free."""
    answer = backend.acquire(key, token or new_token(), ttl, **more)
    assert isinstance(answer, Grant)
    return answer


def contend(backend: BaseLockBackend, key: str, ttl: float | None = 30, **more: Any) -> Contended:
    """Try to acquire a key that somebody holds."""
    answer = backend.acquire(key, new_token(), ttl, **more)
    assert isinstance(answer, Contended)
    return answer


def extend(backend: BaseLockBackend, grant: Grant, ttl: Any = None) -> Grant:
    """Extend a live lease."""
    answer = backend.extend(grant, ttl)
    assert isinstance(answer, Grant)
    return answer


def held(backend: BaseLockBackend, key: str) -> Record:
    """Read the record of a key that somebody holds."""
    record = backend.read(key)
    assert record is not None
    return record


def finds(backend: BaseLockBackend, token: str, record: Record | None) -> bool:
    """Say whether a token finds this record; True if the backend cannot look up tokens."""
    return not backend.supports_token_lookup or backend.read_token(token) == record


def only(fences: Iterable[int | None]) -> int:
    """Return the fence of the only grant of a key."""
    granted = [each for each in fences if each is not None]
    assert len(granted) == 1, f"{len(granted)} were granted the key at once"
    return granted[0]


def _at_once(backend: BaseLockBackend, calls: list[Callable[[], T]]) -> list[T]:
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        barrier.wait(_PATIENCE)
        return call()

    running = [backend.threads.submit(run, call) for call in calls]
    return [each.result(_PATIENCE) for each in running]


class BackendContract:
    """The promises of a backend. Subclass it in a test module, and set the alias.

    Attributes:
        alias: The backend's name in `DISTLOCK`.
        ages: Seconds that a lock without expiry must outlive.
    """

    alias: ClassVar[str] = "default"
    ages: ClassVar[float] = 1.5

    @pytest.fixture
    def backend(self) -> BaseLockBackend:
        """Give the backend under test."""
        return lock_backends[self.alias]

    @pytest.fixture
    def key(self) -> str:
        """Give a text that only this test uses: a key, or the start of several."""
        return f"t{secrets.token_hex(6)}"

    @pytest.fixture
    def elapse(self) -> Elapse:
        """Give a function that lets seconds pass for leases; override it to avoid real waiting."""
        return time.sleep

    @pytest.fixture
    def now(self, backend: BaseLockBackend) -> Clock:
        """Give the clock by which leases expire."""
        return backend.clock

    @pytest.fixture
    def is_next(self) -> IsNext:
        """Give a function that says whether a fence may be that of the grant after another one."""
        return lambda fence, before=0: fence > before

    @pytest.fixture(autouse=True)
    def _can_do_it(self, request: pytest.FixtureRequest, backend: BaseLockBackend) -> None:
        for mark in request.node.iter_markers(NEEDS):
            for name in mark.args:
                if not getattr(backend, name):
                    pytest.skip(f"{type(backend).__name__}: {name} is not so")

    # Grants

    def test_free_key_is_granted(self, backend: BaseLockBackend, now: Clock, key: str) -> None:
        """A grant names key, token, fence and ttl, and lasts from the store's now to now + ttl."""
        token = new_token()
        before = now()
        grant = take(backend, key, 20, token=token)
        after = now()
        assert (grant.key, grant.token, grant.ttl) == (key, token, 20)
        assert grant.fence >= 1
        assert grant.stop_requested is False
        assert before <= grant.acquired_at <= after
        end = grant.acquired_at + timedelta(seconds=20) if backend.supports_ttl else None
        assert grant.expires_at == end

    def test_answer_is_what_is_stored(self, backend: BaseLockBackend, key: str) -> None:
        """The times and the fence of a grant are those of the record, to the microsecond."""
        grant = take(backend, key, 0.123457)
        record = held(backend, key)
        assert (record.key, record.token, record.fence) == (key, grant.token, grant.fence)
        assert record.ttl == grant.ttl == 0.123457
        assert record.acquired_at == record.renewed_at == grant.acquired_at
        assert record.expires_at == grant.expires_at
        assert record.wanted is False
        assert record.stop_requested_at is None

    @_has_ttl
    def test_times_are_aware(self, backend: BaseLockBackend, key: str) -> None:
        """No time comes back naive."""
        grant = take(backend, key)
        record = held(backend, key)
        contended = contend(backend, key)
        for when in (
            grant.acquired_at, grant.expires_at,
            record.acquired_at, record.renewed_at, record.expires_at, record.free_at,
            contended.acquired_at, contended.expires_at, contended.free_at, contended.observed_at,
        ):  # fmt: skip
            assert when is not None
            assert when.utcoffset() is not None

    @_has_ttl
    def test_held_key_is_contended(self, backend: BaseLockBackend, now: Clock, key: str) -> None:
        """A second acquire learns the holder, its fence, and the start and end of its lease."""
        holder = Holder(host="app-1", pid=4711, task_id="job-7")
        grant = take(backend, key, 20, holder=holder)
        before = now()
        contended = contend(backend, key)
        after = now()
        assert contended.holder == holder
        assert contended.fence == grant.fence
        assert contended.acquired_at == grant.acquired_at
        assert contended.expires_at == grant.expires_at
        assert grant.expires_at is not None
        assert contended.free_at == grant.expires_at + timedelta(seconds=1)
        assert contended.observed_at is not None
        assert before <= contended.observed_at <= after
        assert (contended.busy, contended.paused) == (False, False)

    def test_contention_leaves_the_holder_alone(self, backend: BaseLockBackend, key: str) -> None:
        """The holder's record is the same after others were refused, and its lease works."""
        grant = take(backend, key)
        before = held(backend, key)
        for _ in range(3):
            contend(backend, key)
        assert held(backend, key) == before
        assert isinstance(backend.extend(grant), Grant)
        assert backend.release(grant) is True

    def test_own_token_contends_too(self, backend: BaseLockBackend, key: str) -> None:
        """A token is no way around its own lock."""
        grant = take(backend, key)
        assert isinstance(backend.acquire(key, grant.token, 30), Contended)

    def test_holder_comes_back_whole(self, backend: BaseLockBackend, key: str) -> None:
        """Everything that a holder says about itself is read as it was written."""
        odd = {"list": [1, 2.5, None, True, "\\ \" ' % {}"]}
        holder = Holder(
            host="prefix/höst",
            boot_id="b" * 36,
            process="gunicorn:3",
            pid=2**22,
            started_at=12345.678,
            thread="worker-1",
            task_id="id:ümläut 🔒",
            metadata={"user": "Zoë", "deep": odd, "": {}},
        )
        take(backend, key, holder=holder)
        assert held(backend, key).holder == holder
        assert contend(backend, key).holder == holder

    @pytest.mark.distlock_needs("supports_token_lookup")
    def test_token_holds_one_key(self, backend: BaseLockBackend, is_next: IsNext, key: str) -> None:
        """A token that holds a key is refused for another one, which stays free."""
        grant = take(backend, key)
        with pytest.raises(InvalidArgument) as caught:
            backend.acquire(f"{key}-other", grant.token, 30)
        assert grant.token not in str(caught.value)
        assert backend.read(f"{key}-other") is None
        assert held(backend, key).token == grant.token
        assert is_next(take(backend, f"{key}-other").fence)

    def test_replace_takes_over_from_the_named_token(
        self, backend: BaseLockBackend, key: str
    ) -> None:
        """With `replace`, the holder of this token loses the key to a higher fence."""
        old = take(backend, key)
        new = take(backend, key, replace=old.token)
        assert new.fence > old.fence
        assert held(backend, key).token == new.token
        assert backend.release(old) is False
        assert backend.extend(old) is None
        assert finds(backend, old.token, None)
        assert backend.release(new) is True

    def test_replace_spares_every_other_token(
        self, backend: BaseLockBackend, is_next: IsNext, key: str
    ) -> None:
        """A holder with another token than the named one keeps the key; a free one is granted."""
        first = take(backend, key, replace=new_token())
        assert is_next(first.fence)
        second = take(backend, key, replace=first.token)
        contended = contend(backend, key, replace=first.token)
        assert contended.fence == second.fence
        assert held(backend, key).token == second.token

    def test_replace_by_the_same_token_renews_a_lost_answer(
        self, backend: BaseLockBackend, key: str
    ) -> None:
        """A caller whose answer was lost tries again with its own token, and gets a grant."""
        lost = take(backend, key, 10)
        found = take(backend, key, 20, token=lost.token, replace=lost.token)
        assert found.fence > lost.fence
        assert held(backend, key).token == lost.token
        assert backend.release(found) is True

    @_has_ttl
    def test_question_behind_the_end_of_its_work_takes_nothing(
        self, backend: BaseLockBackend, key: str
    ) -> None:
        """A late acquire that replaces its own token is refused if that token has settled."""
        grant = take(backend, key, 10)
        assert backend.release(grant, 60) is True
        settled = held(backend, key)
        for wanted in (False, True):
            refused = backend.acquire(key, grant.token, 30, replace=grant.token, wanted=wanted)
            assert isinstance(refused, Contended)
            assert (refused.fence, refused.free_at) == (grant.fence, settled.free_at)
        assert held(backend, key).free_at == settled.free_at
        # A takeover is granted, and so is the same on a lease without expiry that is not settled.
        assert backend.release(take(backend, key, replace=grant.token)) is True
        lasting = take(backend, key, None)
        assert take(backend, key, token=lasting.token, replace=lasting.token).fence > lasting.fence

    def test_lost_answer_is_released_by_its_token(self, backend: BaseLockBackend, key: str) -> None:
        """The caller made the token, so it can release a grant that it never heard of."""
        token = new_token()
        unheard = take(backend, key, token=token)
        guess = Grant(key, token, 0, 30, unheard.acquired_at, None)
        assert backend.release(guess) is True
        assert backend.read(key) is None

    # Ends

    def test_release_is_true_for_one_of_many(self, backend: BaseLockBackend, key: str) -> None:
        """Of releases at the same time, one frees the key; a late one spares the next holder."""
        grant = take(backend, key)
        answers = _at_once(backend, [lambda: backend.release(grant)] * 4)
        assert sorted(answers, key=str) == [False, False, False, True]
        assert backend.read(key) is None
        second = take(backend, key)
        assert backend.release(grant) is False
        assert held(backend, key).token == second.token

    @pytest.mark.parametrize("token", [new_token, "swapped case"], ids=["another", "other case"])
    def test_other_token_changes_nothing(
        self, backend: BaseLockBackend, key: str, token: object
    ) -> None:
        """With a token that does not hold the key, nothing is released, extended or settled."""
        grant = take(backend, key, token="abcdefghijklmnopqrst" + new_token()[:2])
        wrong = replace(grant, token=new_token() if token is new_token else grant.token.swapcase())
        record = held(backend, key)
        assert backend.release(wrong) is False
        assert backend.extend(wrong) is None
        assert backend.extend_many([wrong]) == [None]
        if backend.supports_ttl:
            assert backend.release(wrong, 0) is False
            assert backend.release(wrong, 100) is False
        if backend.supports_ttl and backend.supports_operators:
            assert backend.request_stop(key, 1, token=wrong.token) is None
        assert finds(backend, wrong.token, None)
        contend(backend, key, replace=wrong.token)
        assert held(backend, key) == record
        assert backend.release(grant) is True

    def test_token_of_one_key_is_no_use_on_another(
        self, backend: BaseLockBackend, key: str
    ) -> None:
        """A token opens the key that it holds and no other."""
        mine, other = take(backend, f"{key}-a"), take(backend, f"{key}-b")
        crossed = replace(mine, key=other.key)
        assert backend.release(crossed) is False
        assert backend.extend(crossed) is None
        assert held(backend, other.key).token == other.token
        assert held(backend, mine.key).token == mine.token

    def test_missing_record_is_gone(self, backend: BaseLockBackend, key: str) -> None:
        """Of a key that was never held, nothing can be released, extended or settled."""
        never = replace(take(backend, f"{key}-a"), key=f"{key}-b", token=new_token())
        assert backend.release(never) is False
        assert backend.extend(never) is None
        assert backend.extend_many([never]) == [None]
        assert not backend.supports_ttl or backend.release(never, 10) is False
        assert backend.read(f"{key}-b") is None

    def test_fence_in_the_grant_proves_nothing(self, backend: BaseLockBackend, key: str) -> None:
        """The token decides; the answer carries the fence of the record."""
        grant = take(backend, key)
        extended = backend.extend(replace(grant, fence=grant.fence + 100))
        assert isinstance(extended, Grant)
        assert extended.fence == grant.fence

    @_has_ttl
    def test_extend_moves_the_end(
        self, backend: BaseLockBackend, now: Clock, elapse: Elapse, key: str
    ) -> None:
        """The new end is the store's now + ttl; fence, grant and holder stay."""
        grant = take(backend, key, 5)
        elapse(1)
        granted = held(backend, key)
        before = now()
        extended = backend.extend(grant, 8)
        after = now()
        assert isinstance(extended, Grant)
        assert extended.expires_at is not None
        assert before <= extended.expires_at - timedelta(seconds=8) <= after
        record = held(backend, key)
        assert extended.acquired_at == record.acquired_at == granted.acquired_at
        assert extended.fence == record.fence == grant.fence
        assert extended.ttl == record.ttl == 8
        assert record.expires_at == extended.expires_at
        assert record.renewed_at == extended.expires_at - timedelta(seconds=8)
        assert record.holder == granted.holder

    @_has_ttl
    def test_store_says_when_the_key_is_free(self, backend: BaseLockBackend, key: str) -> None:
        """`free_at` is a second after `expires_at`; without a ttl, extend gives the same again."""
        grant = take(backend, key, 7)
        for ttl, expected in ((None, 7), (3, 3), (None, 3)):
            record = held(backend, key)
            assert record.expires_at is not None
            assert record.free_at == record.expires_at + timedelta(seconds=1)
            grant = extend(backend, grant, ttl)
            assert grant.ttl == expected

    @_has_ttl
    def test_holder_is_honoured_in_the_grace(
        self, backend: BaseLockBackend, elapse: Elapse, key: str
    ) -> None:
        """In the second after `expires_at`, the holder may extend and release; others wait."""
        grant = take(backend, key, 0.5)
        for _ in range(2):
            elapse(0.7)
            contend(backend, key)
            assert extend(backend, grant).fence == grant.fence
        elapse(0.7)
        assert backend.read(key) is not None
        assert backend.release(grant) is True
        take(backend, key)

    @_has_ttl
    @pytest.mark.parametrize("followed", [False, True])
    def test_lease_is_gone_behind_the_grace(
        self, backend: BaseLockBackend, elapse: Elapse, key: str, followed: bool
    ) -> None:
        """After `free_at`, a lease never comes back: the key is free, or another holder's."""
        old = take(backend, key, 0.2)
        elapse(1.4)
        if followed:
            assert take(backend, key, 50).fence > old.fence
        elif backend.supports_operators:
            for gone in (backend.request_stop, backend.force_release):
                assert gone(key) is None
        before = backend.read(key)
        assert (before is not None) is followed
        assert finds(backend, old.token, None)
        if backend.supports_operators:
            assert backend.request_stop(key, 1, token=old.token) is None
        assert backend.extend_many([old]) == [None]
        assert backend.release(old, 100) is False
        assert backend.extend(old, 100) is None
        assert backend.release(old) is False
        assert backend.read(key) == before
        assert followed or take(backend, key).fence > old.fence

    def test_lock_without_expiry(self, backend: BaseLockBackend, elapse: Elapse, key: str) -> None:
        """With ttl None, a lock has no expiry, also when it is read, and lasts until released."""
        grant = take(backend, key, None)
        assert (grant.ttl, grant.expires_at) == (None, None)
        elapse(self.ages)
        record = held(backend, key)
        assert (record.ttl, record.expires_at, record.free_at) == (None, None, None)
        contended = contend(backend, key)
        assert (contended.expires_at, contended.free_at) == (None, None)
        extended = extend(backend, grant)
        assert extended.expires_at is None
        assert backend.release(grant) is True
        take(backend, key)

    # Settled leases

    @_has_ttl
    @pytest.mark.parametrize("ttl", [5, 30, None])
    def test_settle_keeps_the_key_until_the_time_is_over(
        self, backend: BaseLockBackend, elapse: Elapse, key: str, ttl: float | None
    ) -> None:
        """A settled key stays held until acquired_at + seconds, exactly and without grace."""
        grant = take(backend, key, ttl)
        assert backend.release(grant, 1) is True
        record = held(backend, key)
        assert record.expires_at == record.free_at == grant.acquired_at + timedelta(seconds=1)
        assert record.fence == grant.fence
        assert contend(backend, key).free_at == record.free_at
        elapse(1.01)
        take(backend, key)

    @_has_ttl
    def test_settle_counts_from_the_grant(
        self, backend: BaseLockBackend, elapse: Elapse, key: str
    ) -> None:
        """The time of a settled lease counts from its grant, however often it was extended."""
        grant = take(backend, key, 30)
        elapse(0.5)
        extended = extend(backend, grant, 60)
        assert backend.release(extended, 40) is True
        assert held(backend, key).free_at == extended.acquired_at + timedelta(seconds=40)

    @_has_ttl
    def test_settle_ends_the_lease(self, backend: BaseLockBackend, key: str) -> None:
        """Settle answers as release does: True once. A late heartbeat does not undo it."""
        grant = take(backend, key, 30)
        assert backend.release(grant, 10) is True
        settled = held(backend, key)
        assert backend.extend(grant) is None
        assert backend.extend_many([grant]) == [None]
        assert backend.release(grant) is False
        assert backend.release(grant, 20) is False
        assert held(backend, key) == settled

    # Many in one call

    @_has_ttl
    def test_answers_are_in_the_order_of_the_grants(
        self, backend: BaseLockBackend, now: Clock, key: str
    ) -> None:
        """Each lease gets its own ttl, and the answers are in the order of the grants."""
        ttls = {"c": 20, "a": 5.5, "e": 300, "b": 0.5, "d": None}
        grants = [take(backend, f"{key}-{name}", ttl) for name, ttl in ttls.items()]
        before = now()
        answers = backend.extend_many(grants)
        after = now()
        for answer, grant in zip(answers, grants, strict=True):
            assert isinstance(answer, Grant)
            assert (answer.key, answer.token, answer.fence) == (grant.key, grant.token, grant.fence)
            assert answer.acquired_at == grant.acquired_at
            assert answer.ttl == grant.ttl
            assert held(backend, grant.key).expires_at == answer.expires_at
            assert (answer.expires_at is None) is (grant.ttl is None)
            if answer.expires_at is not None:
                renewed_at = answer.expires_at - timedelta(seconds=grant.ttl or 0)
                assert before <= renewed_at <= after

    @_has_ttl
    def test_some_are_gone(self, backend: BaseLockBackend, elapse: Elapse, key: str) -> None:
        """Expired, released, foreign and unknown leases answer None among live ones."""
        expired = take(backend, f"{key}-expired", 0.2)
        elapse(1.4)
        live = [take(backend, f"{key}-live-{number}") for number in range(2)]
        released = take(backend, f"{key}-released")
        backend.release(released)
        foreign = replace(live[0], token=new_token())
        unknown = replace(live[0], key=f"{key}-never", token=new_token())
        answers = backend.extend_many([expired, live[1], released, foreign, live[0], unknown])
        assert [each and getattr(each, "key", each) for each in answers] == [
            None, live[1].key, None, None, live[0].key, None,
        ]  # fmt: skip

    def test_many_are_legal(self, backend: BaseLockBackend, key: str) -> None:
        """Thirty leases can be extended in one call, and so can none."""
        assert backend.extend_many([]) == []
        grants = [take(backend, f"{key}-{number}") for number in range(30)]
        answers = backend.extend_many(grants[::-1])
        assert [answer.key for answer in answers if isinstance(answer, Grant)] == [
            grant.key for grant in grants[::-1]
        ]

    # Fences

    def test_fences_grow_over_releases(self, backend: BaseLockBackend, key: str) -> None:
        """Each grant after a release has a higher fence, as a number and as text of 15 digits."""
        fences = []
        for _ in range(11):
            grant = take(backend, key)
            fences.append(grant.fence)
            backend.release(grant)
        assert fences == sorted(set(fences))
        texts = [f"{fence:015d}" for fence in fences]
        assert texts == sorted(set(texts))

    @_has_ttl
    def test_fences_grow_over_other_ends(
        self, backend: BaseLockBackend, elapse: Elapse, key: str
    ) -> None:
        """The counter outlasts an expired lease, a settled one, and the removal of both."""
        fences = [take(backend, key, 0.1).fence]
        elapse(1.2)
        settled = take(backend, key)
        fences.append(settled.fence)
        backend.release(settled, 0)
        fences.append(take(backend, key, 0.1).fence)
        elapse(1.2)
        backend.cleanup(backend.clock())
        fences.append(take(backend, key).fence)
        assert fences == sorted(set(fences))

    def test_counter_is_never_behind(self, backend: BaseLockBackend, key: str) -> None:
        """The counter has the fence of the last grant; for a free key, it may be refused."""
        grant = take(backend, key)
        counter = backend.counter(key)
        assert counter is not None
        assert counter.fence == grant.fence
        backend.release(grant)
        with suppress(LockUsageError):
            counter = backend.counter(key)
            assert counter is not None
            assert counter.fence >= grant.fence

    # Races

    @pytest.mark.parametrize("how", ["new", "release", "takeover"])
    def test_one_of_many_is_granted(
        self, backend: BaseLockBackend, is_next: IsNext, key: str, how: str
    ) -> None:
        """One of the threads that acquire a free key, or replace a holder, gets the next fence."""
        old = None if how == "new" else take(backend, key)
        if old is not None and how == "release":
            backend.release(old)
        token = old.token if old is not None and how == "takeover" else None
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            answers = _at_once(
                backend, [lambda: backend.acquire(key, new_token(), 30, replace=token)] * 10
            )
        finally:
            sys.setswitchinterval(before)
        fence = only(each.fence if isinstance(each, Grant) else None for each in answers)
        assert is_next(fence, 0 if old is None else old.fence)
        assert held(backend, key).fence == fence

    @pytest.mark.distlock_needs("distributed", "supports_ttl")
    def test_one_of_many_processes_is_granted(self, backend: BaseLockBackend, key: str) -> None:
        """Other processes contend for the same keys, and count the same fences."""
        old = take(backend, key)
        backend.release(old)
        asked = [self.attempt_elsewhere(backend, key) for _ in range(_PROCESSES)]
        for each in asked:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        told = [json.loads(each.communicate("go\n", _PATIENCE)[0]) for each in asked]
        assert only(told) > old.fence
        assert held(backend, key).fence == only(told)

    def attempt_elsewhere(self, backend: BaseLockBackend, key: str) -> subprocess.Popen[str]:
        """Start a process that says "ready", and acquires a key when it is told to."""
        from django.conf import settings

        project = {
            "DISTLOCK": {"default": settings.DISTLOCK[backend.alias]},
            "DATABASES": getattr(settings, "DATABASES", {}),
            "CACHES": settings.CACHES,
            "INSTALLED_APPS": ["django_distlock"],
            "SECRET_KEY": settings.SECRET_KEY,
            "USE_TZ": True,
        }
        return subprocess.Popen(  # noqa: S603 - this interpreter, and what the test gives it
            [sys.executable, "-m", __name__, pickle.dumps(project).hex(), key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    # What is refused

    @pytest.mark.parametrize("bad", ["", None, True, 7.5, b"key", "a\0b", "\ud800", "k" * 513])
    def test_bad_keys_are_refused(self, backend: BaseLockBackend, bad: Any) -> None:
        """An illegal key is refused before the store is called."""
        token = new_token()
        for call in (lambda: backend.acquire(bad, token, 30), lambda: backend.read(bad)):
            with pytest.raises(InvalidArgument):
                call()

    @pytest.mark.parametrize("bad", ["5", True, -1, 0, 0.09, 604_801, float("nan")])
    def test_bad_ttls_are_refused(
        self, backend: BaseLockBackend, is_next: IsNext, key: str, bad: Any
    ) -> None:
        """A refused call leaves no trace: the key is free, and has its first fence."""
        with pytest.raises(InvalidArgument):
            backend.acquire(key, new_token(), bad)
        assert backend.read(key) is None
        grant = take(backend, key)
        assert is_next(grant.fence)
        with pytest.raises(InvalidArgument):
            backend.extend(grant, bad)
        assert held(backend, key).ttl == 30

    @pytest.mark.parametrize(
        "end", [":a:b", "/../b", " a ", "{a}", "%s%%", "🔒", "\n", "\x01", "."]
    )
    def test_any_text_is_a_key(self, backend: BaseLockBackend, key: str, end: str) -> None:
        """Punctuation, spaces and every script make keys that are held and read."""
        given = f"{key}{end}"
        grant = take(backend, given)
        contend(backend, given)
        assert held(backend, given).key == grant.key == given
        assert backend.read(key) is None
        assert backend.release(grant) is True

    # Optional features

    @pytest.mark.distlock_needs("supports_listing")
    def test_held_keys_are_listed(self, backend: BaseLockBackend, key: str) -> None:
        """Held keys with a prefix, and no others, are listed page by page."""
        names = [f"{key}-{number}" for number in range(5)]
        for each in names:
            take(backend, each)
        backend.release(take(backend, f"{key}-over"))
        found, cursor = [], None
        while True:
            page = backend.list(key, cursor, limit=2)
            found += [record.key for record in page.records]
            if (cursor := page.cursor) is None:
                break
        assert sorted(set(found)) == names
        assert backend.list(f"{key}-none").records == ()

    @pytest.mark.distlock_needs("supports_operators")
    def test_force_release_moves_the_fence_on(self, backend: BaseLockBackend, key: str) -> None:
        """Only the lease with the given fence goes, and the next grant has a higher fence."""
        grant = take(backend, key)
        assert backend.force_release(key, fence=grant.fence + 1) is None
        forced = backend.force_release(key, fence=grant.fence)
        assert isinstance(forced, Record)
        assert forced.token in (grant.token, "")
        assert backend.extend(grant) is None
        assert backend.read(key) is None
        assert take(backend, key).fence > grant.fence

    @pytest.mark.distlock_needs("supports_operators")
    def test_request_to_stop_is_seen(self, backend: BaseLockBackend, key: str) -> None:
        """The next answer to the holder has the request, and no answer to other holders has it."""
        grants = [take(backend, f"{key}-{number}") for number in range(2)]
        backend.request_stop(f"{key}-1")
        answers = backend.extend_many(grants)
        assert [each.stop_requested for each in answers if isinstance(each, Grant)] == [False, True]

    @pytest.mark.distlock_needs("supports_operators", "supports_ttl")
    def test_shortened_lease_is_renewed_until_its_end(
        self, backend: BaseLockBackend, elapse: Elapse, key: str
    ) -> None:
        """A lease whose ttl is shorter than its end is renewed until then, and not longer."""
        grant = take(backend, key, 1)
        backend.request_stop(key, 2)
        elapse(1)
        assert extend(backend, grant).stop_requested
        elapse(1.1)
        assert backend.extend(grant) is None

    @pytest.mark.distlock_needs("supports_listing")
    def test_what_is_held_is_counted(self, backend: BaseLockBackend, key: str) -> None:
        """Counts and states work for every backend that lists its locks."""
        take(backend, key)
        counted = backend.counts().held
        assert counted is not None
        assert counted.number >= 1
        assert backend.states(10)[0].held.number >= 1


def _attempt(project: str, key: str) -> None:
    import django
    from django.conf import settings

    settings.configure(**pickle.loads(bytes.fromhex(project)))  # noqa: S301 - the test's own
    django.setup()
    backend = lock_backends["default"]
    print("ready", flush=True)  # noqa: T201 - the parent process reads it
    sys.stdin.readline()
    answer = backend.acquire(key, new_token(), 30)
    print(json.dumps(answer.fence if isinstance(answer, Grant) else None))  # noqa: T201


if __name__ == "__main__":
    _attempt(*sys.argv[1:])
