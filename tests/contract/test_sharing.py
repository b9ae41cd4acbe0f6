"""Several who hold a key at the same time: any number, or so many, or one alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.errors import InvalidArgument, LockUsageError
from django_distlock.core.keys import new_token
from django_distlock.core.pacing import SAFETY_SECONDS
from django_distlock.core.records import Attempt, Contended, Grant, Record
from django_distlock.core.sharing import MAX_PERMITS
from django_distlock.managers.lock import HeldLockManager

from .helpers import KEEPS_EXPIRED, at_once, contend, extend, finds, held, listed, take
from .stores import Store

pytestmark = pytest.mark.requires("supports_sharing")

#: What joins those who share a key, and a place of three.
SHARED: dict[str, Any] = {"permits": None}
PERMIT: dict[str, Any] = {"permits": 3}
BOTH = pytest.mark.parametrize("how", [SHARED, PERMIT], ids=["shared", "permit"])


@BOTH
def test_several_hold_a_key_or_one_alone(
    backend: BaseLockBackend, key: str, how: dict[str, Any]
) -> None:
    """Each has a record, a token and a fence of its own; neither joins the other kind."""
    alone = take(backend, key)
    assert contend(backend, key, **how).fence == alone.fence
    assert backend.records.sharing(key) in ([], ())
    assert backend.release(alone) is True
    grants = [take(backend, key, **how) for _ in range(3)]
    fences = [each.fence for each in grants]
    assert fences == sorted(set(fences))
    assert alone.fence < fences[0]
    assert all(each.shared for each in grants)
    sharing = backend.records.sharing(key)
    assert {each.token for each in sharing} == {each.token for each in grants}
    assert all(each.shared for each in sharing)
    assert [each.key for each in sharing] == [key] * 3
    assert contend(backend, key).fence in fences
    for each in grants:
        assert finds(backend, each.token, held_by(backend, each))
        assert backend.release(each) is True
        assert backend.release(each) is False
    again = take(backend, key)
    assert fences[-1] < again.fence
    assert not again.shared


def held_by(backend: BaseLockBackend, grant: Grant) -> Record:
    """Return the record of one of those who share a key."""
    return next(each for each in backend.records.sharing(grant.key) if each.token == grant.token)


def test_no_more_than_the_permits(backend: BaseLockBackend, key: str) -> None:
    """A place is free when its holder has released it, and a second release frees no other."""
    first, *others = [take(backend, key, **PERMIT) for _ in range(3)]
    assert contend(backend, key, **PERMIT).fence == first.fence
    assert backend.release(first) is True
    assert backend.release(first) is False
    others.append(take(backend, key, **PERMIT))
    assert backend.release(first) is False
    contend(backend, key, **PERMIT)
    assert len(backend.records.sharing(key)) == 3


def test_other_number_of_permits(backend: BaseLockBackend, key: str) -> None:
    """Each caller goes by its own number: a lower one lets nobody in until so many have ended."""
    grants = [take(backend, key, permits=5) for _ in range(5)]
    for each in grants[:3]:
        contend(backend, key, permits=2)
        assert backend.release(each) is True
    contend(backend, key, permits=2)
    assert backend.release(grants[3]) is True
    take(backend, key, permits=2)
    contend(backend, key, permits=2)
    take(backend, key, permits=5)


@BOTH
def test_place_of_who_is_over_is_free(
    backend: BaseLockBackend, store: Store, key: str, how: dict[str, Any]
) -> None:
    """A crashed holder's place heals by itself, behind its ttl and a second."""
    over = take(backend, key, 5, **how)
    others = [take(backend, key, 60, **how) for _ in range(2)]
    for each in backend.records.sharing(key):
        assert each.expires_at is not None
        assert each.free_at == each.expires_at + timedelta(seconds=1)
    store.elapse(3)
    if how is PERMIT:
        contend(backend, key, **how)
    store.elapse(3.1)
    others.append(take(backend, key, 60, **how))
    assert {each.token for each in backend.records.sharing(key)} == {each.token for each in others}
    assert backend.extend(over) is None
    assert backend.release(over) is False


def test_lease_that_was_extended_keeps_its_place(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """By itself or together with others, so that nobody is alone beside it; the others end."""
    one, two = take(backend, key, 5, **SHARED), take(backend, key, 5, **SHARED)
    longer = extend(backend, one, 10)
    assert longer.shared
    assert longer.fence == one.fence
    store.elapse(7)
    contend(backend, key)
    assert [each.token for each in backend.records.sharing(key)] == [one.token]
    assert backend.extend(two) is None
    answers = backend.extend_many([longer, replace(one, token=new_token())])
    assert isinstance(answers[0], Grant)
    assert answers[0].shared
    assert answers[1] is None
    store.elapse(7)
    contend(backend, key)
    assert backend.release(longer) is True
    take(backend, key)


def test_lease_of_who_is_alone_is_no_place(backend: BaseLockBackend, key: str) -> None:
    """A token that holds the key alone ends nothing as a sharer, and the other way round."""
    for how in ({}, SHARED):
        grant = take(backend, key, **how)
        wrong = replace(grant, shared=not grant.shared)
        assert backend.extend(wrong) is None
        assert backend.release(wrong) is False
        assert backend.release(grant) is True


def test_who_waits_to_be_alone_closes_the_door(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """Nobody joins while somebody asks to be alone, and for some seconds behind that."""
    first = take(backend, key, 60, **SHARED)
    contend(backend, key)
    second = take(backend, key, 60, **SHARED)
    contend(backend, key, wanted=True)
    refused = contend(backend, key, **SHARED)
    assert refused.fence in (first.fence, second.fence)
    store.elapse(SAFETY_SECONDS - 1)
    contend(backend, key, wanted=True)
    store.elapse(SAFETY_SECONDS)
    contend(backend, key, **SHARED)
    store.elapse(1.5)
    third = take(backend, key, 60, **SHARED)
    contend(backend, key, wanted=True)
    for each in (first, second, third):
        contend(backend, key)
        assert backend.release(each) is True
    alone = take(backend, key)
    assert backend.release(alone) is True
    take(backend, key, **SHARED)


@BOTH
@pytest.mark.parametrize("is_released", [True, False], ids=["released", "over"])
def test_door_stays_closed_behind_the_last_of_them(
    backend: BaseLockBackend, store: Store, key: str, how: dict[str, Any], is_released: bool
) -> None:
    """Or readers that come one behind another would keep the waiter out for ever."""
    shared = take(backend, key, 1, **how)
    contend(backend, key, wanted=True)
    if is_released:
        assert backend.release(shared) is True
    else:
        store.elapse(2.5)
    refused = contend(backend, key, **how)
    assert (refused.fence, refused.holder, refused.busy) == (None, None, False)
    contend(backend, key, wanted=True, **how)
    alone = take(backend, key)
    assert backend.release(alone) is True
    # Nobody waits to be alone any more.
    take(backend, key, **how)


@BOTH
def test_waiter_that_is_gone_keeps_nobody_out(
    backend: BaseLockBackend, store: Store, key: str, how: dict[str, Any]
) -> None:
    """Whoever gives up opens the door; behind one that died, it opens by itself."""
    first = take(backend, key, 60, **how)
    contend(backend, key, wanted=True)
    contend(backend, key, **how)
    for _ in range(2):
        backend.waiters.give_up(key)
    second = take(backend, key, 60, **how)
    contend(backend, key, wanted=True)
    for each in (first, second):
        assert backend.release(each) is True
    contend(backend, key, **how)
    backend.waiters.give_up(key)
    shared = take(backend, key, 60, **how)
    contend(backend, key, wanted=True)
    assert backend.release(shared) is True
    store.elapse(SAFETY_SECONDS)
    contend(backend, key, **how)
    store.elapse(1.5)
    for _ in range(2):
        take(backend, key, **how)


@BOTH
def test_token_that_has_a_place(backend: BaseLockBackend, key: str, how: dict[str, Any]) -> None:
    """A late first question changes nothing; who names its own place is granted it again."""
    grants = [take(backend, key, 60, **how) for _ in range(3)]
    mine = grants[0]
    assert isinstance(backend.acquire(key, mine.token, 5, **how), Contended)
    assert backend.acquire(key, mine.token, 5) != mine
    assert {each.fence for each in backend.records.sharing(key)} == {each.fence for each in grants}
    again = take(backend, key, token=mine.token, replace=mine.token, **how)
    assert again.fence > mine.fence
    instead = take(backend, key, replace=mine.token, **how)
    assert len(backend.records.sharing(key)) == 3
    assert backend.release(again) is False
    assert backend.release(instead) is True


def test_place_of_another_that_is_gone(backend: BaseLockBackend, key: str) -> None:
    """Whoever shares a key in the place of a lease is refused without it: others may have been."""
    alone = take(backend, key)
    assert backend.release(alone) is True
    assert contend(backend, key, replace=alone.token, **SHARED).fence is None
    other = take(backend, key, **SHARED)
    assert contend(backend, key, replace=alone.token, **SHARED).fence == other.fence
    # An answer was lost, and the question is asked again.
    again = new_token()
    for _ in range(2):
        assert take(backend, key, token=again, replace=other.token, **SHARED).token == again
    # Whose late question was granted has two places by then: both make one.
    other = take(backend, key, **SHARED)
    last = take(backend, key, token=again, replace=other.token, **SHARED)
    assert [each.fence for each in backend.records.sharing(key)] == [last.fence]


def test_lease_becomes_a_shared_one_and_back(backend: BaseLockBackend, key: str) -> None:
    """In one step, so that nobody else is alone in between; of two sharers, none is replaced."""
    alone = take(backend, key, 60)
    one = take(backend, key, 60, replace=alone.token, **SHARED)
    assert one.fence > alone.fence
    assert backend.release(alone) is False
    contend(backend, key)
    two = take(backend, key, **SHARED)
    assert len(backend.records.sharing(key)) == 2
    contend(backend, key, replace=one.token)
    assert backend.release(two) is True
    again = take(backend, key, replace=one.token)
    assert not again.shared
    assert backend.records.sharing(key) in ([], ())
    assert held(backend, key).token == again.token


@pytest.mark.parametrize(("how", "ttl"), [(SHARED, 60), (PERMIT, 5)], ids=["shared", "permit"])
def test_settled_place_stays_taken(
    backend: BaseLockBackend, store: Store, key: str, how: dict[str, Any], ttl: float
) -> None:
    """Kept behind its run for as long as it says, also for longer than the lease had left."""
    first, *others = [take(backend, key, ttl, **how) for _ in range(3)]
    assert backend.release(first, 40) is True
    assert backend.extend(first) is None
    for each in others:
        assert backend.release(each, 20) is True
    store.elapse(15)
    contend(backend, key)
    if how is PERMIT:
        contend(backend, key, **PERMIT)
    assert len(backend.records.sharing(key)) == 3
    store.elapse(15)
    assert len(backend.records.sharing(key)) == 1
    contend(backend, key)
    store.elapse(10.5)
    take(backend, key)


@pytest.mark.requires("supports_sharing", "supports_operators")
def test_operator_reaches_one_or_all(backend: BaseLockBackend, key: str) -> None:
    """By token or fence, one; the next fence is above that of all whose leases were taken away."""
    grants = [take(backend, key, **SHARED) for _ in range(4)]
    assert backend.request_stop(key, token=grants[1].token) is not None
    asked = [extend(backend, each).stop_requested for each in grants]
    assert asked == [False, True, False, False]
    assert backend.request_stop(key) is not None
    assert all(extend(backend, each).stop_requested for each in grants)
    assert backend.force_release(key, fence=grants[0].fence) is not None
    assert backend.force_release(key, fence=grants[0].fence) is None
    assert [backend.release(each) for each in grants[:2]] == [False, True]
    taken = backend.force_release(key)
    assert taken is not None
    assert not isinstance(taken, Contended)
    assert backend.force_release(key) is None
    assert [backend.release(each) for each in grants] == [False] * 4
    assert take(backend, key).fence > grants[-1].fence + 1


@pytest.mark.requires("supports_sharing", "supports_operators")
@BOTH
def test_nobody_joins_a_key_that_is_paused(
    backend: BaseLockBackend, store: Store, key: str, how: dict[str, Any]
) -> None:
    """Those who share it go on, and who waits hears which of them is free last."""
    first, *_others, last = [take(backend, key, ttl, **how) for ttl in (30, 40, 50)]
    backend.pause(key, store.now() + timedelta(seconds=60))
    answer = contend(backend, key, **how)
    assert (answer.paused, answer.fence) == (True, last.fence)
    assert isinstance(backend.extend(first), Grant)
    assert backend.pause(key, None) is True
    assert backend.release(first) is True
    take(backend, key, **how)


@pytest.mark.requires("supports_sharing", "supports_listing")
def test_each_place_is_listed(backend: BaseLockBackend, key: str) -> None:
    """As a record of the key, page by page, and among what is held."""
    for _ in range(5):
        take(backend, key + "-a", **SHARED)
    take(backend, key + "-b")
    keys, cursor = [], None
    while True:
        page = backend.list(key, cursor, limit=2)
        keys += [(each.key, each.shared) for each in page.records]
        if (cursor := page.cursor) is None:
            break
    assert sorted(keys) == [(key + "-a", True)] * 5 + [(key + "-b", False)]
    assert listed(backend, key + "-b") == [key + "-b"]
    found = backend.records.of([key + "-a", key + "-b", key + "-c"])
    assert [each and each.shared for each in found] == [True, False, None]


@KEEPS_EXPIRED
def test_expired_places_are_told_and_cleaned_up(
    backend: BaseLockBackend, store: Store, key: str
) -> None:
    """The key's counter stays, and so does who is alive."""
    over = take(backend, key, 1, **SHARED)
    last = take(backend, key, 600, **SHARED)
    store.elapse(5)
    assert [each.fence for each in backend.expired(key)] == [over.fence]
    store.elapse(300)
    backend.cleanup(store.now())
    assert backend.expired(key) == []
    assert [each.token for each in backend.records.sharing(key)] == [last.token]
    assert take(backend, key, **SHARED).fence > last.fence


@pytest.mark.requires("supports_sharing", "supports_guard")
def test_shared_lease_guards_nothing(backend: BaseLockBackend, key: str) -> None:
    """Others hold the key as well."""
    grant = take(backend, key, **SHARED)
    with pytest.raises(LockUsageError, match="cannot guard a transaction"):
        backend.guards.hold(grant)


def test_keys_of_any_shape_are_shared(backend: BaseLockBackend, key: str) -> None:
    """Among them the longest, and one that looks like the place of another."""
    for text in (key + "\u232a", key + ":" + "x" * (512 - len(key) - 1), key + "%\U0001f512"):
        grants = [take(backend, text, **how) for how in (SHARED, PERMIT)]
        for each in grants:
            contend(backend, text)
            assert backend.release(each) is True
        take(backend, text)


@pytest.mark.aliases("memory", "redis")
def test_wrong_number_of_permits(backend: BaseLockBackend, key: str) -> None:
    """It is told by its value, and nothing was touched."""
    permits: Any
    for permits in (0, -1, MAX_PERMITS + 1, True, 1.5, "2"):
        with pytest.raises(InvalidArgument, match="permits must be an int from 1 to 10,000, not "):
            backend.acquire(key, new_token(), 5, permits=permits)
    assert backend.read(key) is None


def test_threads_at_once(backend: BaseLockBackend, key: str) -> None:
    """As many as there are permits; whoever is alone is so."""
    mixed = [PERMIT, PERMIT, {"permits": 1}, PERMIT] * 2
    for _ in range(5):
        answers = at_once(
            [partial(backend.acquire, key, new_token(), 30, **each) for each in mixed]
        )
        granted = [each for each in answers if isinstance(each, Grant)]
        alone = [each for each in granted if not each.shared]
        assert (len(alone), len(granted)) in ((1, 1), (0, 3), (0, 2), (0, 1)), granted
        for each in granted:
            assert backend.release(each) is True


@pytest.mark.aliases("postgres_orm", "mariadb", "mariadb_orm")
def test_lease_that_is_over_amid_the_look_is_locked_before_it_goes(
    backend: BaseLockBackend, store: Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An extend of it may be in flight, which was in time."""
    take(backend, key, 5, **SHARED)
    store.elapse(6.1)
    looks: list[int] = []
    real = HeldLockManager._settle_over

    def settle(locks: HeldLockManager, attempt: Attempt) -> set[str]:
        looks.append(1)
        # As if it were over since the first look.
        return real(locks, attempt) if len(looks) > 1 else set()

    monkeypatch.setattr(HeldLockManager, "_settle_over", settle)
    take(backend, key)
    assert len(looks) == 2
