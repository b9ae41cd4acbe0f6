"""`dump()` gives a lease away, and `Lease.load()` takes it up, in another process."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core import signing
from django.db import transaction
from django.test import override_settings

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    Lease,
    Lock,
    LockError,
    LockLost,
    LockUsageError,
    Retry,
    distlock,
    signals,
)
from django_distlock.core.records import Contended
from django_distlock.handler import lock_backends
from tests.backends import Registered
from tests.processes import spawn

from .helpers import Later, held
from .locking import Heard, eventually, grantable, lock_of, take_away, taken
from .stores import Stranger

HANDS_OVER = pytest.mark.requires("supports_ttl")
ELSEWHERE = pytest.mark.stores(
    "sqlite", "postgresql", "mysql", "redis", "redis_cluster", why="no other process sees its locks"
)


@pytest.fixture(autouse=True)
def _leave_nothing(registered: Registered, key: str) -> Iterator[None]:
    """Free what a test that failed has left."""
    yield
    lock_backends[registered.alias].force_release(key)


def load_and_release(text: str) -> dict[str, Any]:
    """Take a lease up, in another process, and give it back when told."""
    lease = Lease.load(text)
    said = {
        "key": lease.key,
        "backend": lease.backend,
        "fence": lease.fence,
        "held": lease.held,
        "left": lease.remaining(),
        "token": lease.token,
    }
    lease.extend()
    print("loaded")
    input()
    return {**said, "released": lease.release()}


def load_to_the_end(text: str) -> None:
    """Take a lease up, in another process, and end this one without giving it back."""
    Lease.load(text)


def dump_and_end(alias: str, key: str, ttl: float) -> str:
    """Give a lease away, and end the process that took it."""
    return distlock(key, backend=alias, ttl=ttl).acquire().dump()


@HANDS_OVER
@ELSEWHERE
def test_another_process_goes_on(registered: Registered, key: str) -> None:
    """It extends and releases; whoever gave the lease away does neither any more."""
    lock = lock_of(registered, key, ttl=20)
    lease = lock.acquire()
    text = lease.dump()
    with spawn(f"{__name__}:load_and_release", text) as worker:
        worker.wait_for("loaded")
        assert taken(lock)
        assert lease.release() is False
        assert taken(lock)
        worker.send("release")
        said = worker.result()
    assert said["released"] is True
    assert (said["key"], said["backend"], said["held"]) == (key, registered.alias, True)
    assert 15 < said["left"] <= 20
    assert said["fence"] > lease.fence
    assert said["token"] != lease.token
    assert not taken(lock)
    assert grantable(lock)


@HANDS_OVER
@ELSEWHERE
def test_lease_outlives_the_process_that_gave_it_away(
    lock: Lock, registered: Registered, key: str
) -> None:
    """Its end releases nothing of it, and the end of who took it up does."""
    with spawn(f"{__name__}:dump_and_end", registered.alias, key, 30) as worker:
        text = worker.result()
    assert taken(lock)
    with spawn(f"{__name__}:load_to_the_end", text) as worker:
        worker.result()
    assert not taken(lock)
    with pytest.raises(LockLost):
        Lease.load(text)


@HANDS_OVER
def test_giver_does_not_hold_it(registered: Registered, key: str) -> None:
    """Neither for work nor for an end: what it has left says so."""
    lock = lock_of(registered, key, ttl=20)
    lease = lock.acquire()
    text = lease.dump()
    assert (lease.held, lease.is_released, lease.is_lost) == (False, True, False)
    assert lease.remaining() == 0.0
    assert lease.release() is False
    for call in (lease.extend, lease.check, lease.dump):
        with pytest.raises(LockUsageError):
            call()
    assert taken(lock)
    assert Lease.load(text).release() is True


@HANDS_OVER
def test_end_of_the_block_behind_a_dump_releases_nothing(registered: Registered, key: str) -> None:
    """Nor does it call the lease lost, nor renew it."""
    lock = lock_of(registered, key, ttl=1.5)
    with Heard(signals.lock_released, key) as freed, Heard(signals.lock_lost, key) as lost:
        with lock as lease:
            before = lease.expires_at
            text = lease.dump()
            time.sleep(0.8)
            record = Later(held, lock_backends[registered.alias], key).result()
            assert record.expires_at == before
        assert taken(lock)
    assert (freed.facts, lost.facts) == ([], [])
    loaded = Lease.load(text)
    assert loaded.held
    assert loaded.release() is True


@HANDS_OVER
async def test_end_of_the_awaited_block_behind_a_dump_releases_nothing(
    registered: Registered, key: str
) -> None:
    """The same for `async with`."""
    async with lock_of(registered, key) as lease:
        text = lease.dump()
    loaded = Later(Lease.load, text).result()
    assert loaded.held
    assert Later(loaded.release).result() is True


@HANDS_OVER
def test_loss_behind_a_dump_is_not_the_givers(registered: Registered, key: str) -> None:
    """Its callbacks are not called for what others do with the lease."""
    called: list[Lease] = []
    lease = lock_of(registered, key, ttl=0.3).acquire()
    lease.on_lost(called.append)
    with Heard(signals.lock_lost, key) as heard:
        lease.dump()
        time.sleep(1.2)
    assert (called, heard.facts, lease.is_lost) == ([], [], False)


@HANDS_OVER
def test_text_works_once(registered: Registered, key: str) -> None:
    """A message may be delivered twice: the second time finds the lease gone."""
    text = lock_of(registered, key, ttl=20).acquire().dump()
    loaded = Lease.load(text)
    for _ in range(2):
        with pytest.raises(LockLost, match=key) as caught:
            Lease.load(text)
        assert (caught.value.code, caught.value.key) == ("lost", key)
    loaded.check()
    loaded.extend()
    assert loaded.release() is True
    with pytest.raises(LockLost):
        Lease.load(text)
    assert not taken(lock_of(registered, key))


@HANDS_OVER
def test_of_many_that_load_one_has_it(registered: Registered, key: str) -> None:
    """Also where all do so at the same time."""
    text = lock_of(registered, key, ttl=20).acquire().dump()

    def load() -> Lease | None:
        try:
            return Lease.load(text)
        except LockLost:
            return None

    loaded = [each.result() for each in [Later(load) for _ in range(6)]]
    (won,) = (each for each in loaded if each is not None)
    won.extend()
    assert won.release() is True


@HANDS_OVER
def test_text_works_once_however_close_two_loads_come(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has seen the lease alive, and comes when another one was done with it, has not got it."""
    backend = lock_backends[registered.alias]
    lease = Later(lock_of(registered, key, ttl=20).acquire).result()
    text = lease.dump()
    extend = backend.extend

    def slowly(*args: Any, **kwargs: Any) -> Any:
        answer = extend(*args, **kwargs)
        monkeypatch.undo()
        # The text was delivered twice, and the other one is quicker.
        assert Later(lambda: Lease.load(text).release()).result() is True
        return answer

    monkeypatch.setattr(backend, "extend", slowly)
    with pytest.raises(LockLost):
        Lease.load(text)
    assert not taken(lock_of(registered, key))


@HANDS_OVER
def test_load_whose_reply_was_lost_can_be_repeated(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has carried it out: the lease is neither lost nor in its own way."""
    backend = lock_backends[registered.alias]
    text = lock_of(registered, key, ttl=20).acquire().dump()
    acquire = backend.acquire

    def lose_the_reply(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.undo()
        acquire(*args, **kwargs)
        raise BackendUnavailable("The reply was lost.")

    monkeypatch.setattr(backend, "acquire", lose_the_reply)
    try:
        loaded = Lease.load(text)
    except BackendUnavailable:
        loaded = Lease.load(text)
    loaded.extend()
    assert loaded.release() is True


@HANDS_OVER
def test_lease_that_ends_while_it_is_loaded_is_not_granted_anew(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that has become free meanwhile may have been somebody else's: the lease is lost."""
    backend = lock_backends[registered.alias]
    text = lock_of(registered, key, ttl=1).acquire().dump()
    acquire, started = backend.acquire, time.monotonic()

    def busy(*args: Any, replace: str | None = None, **kwargs: Any) -> Any:
        if replace is not None and time.monotonic() - started < 2.5:
            return Contended(busy=True)
        return acquire(*args, replace=replace, **kwargs)

    monkeypatch.setattr(backend, "acquire", busy)
    # One long pause, so that the next attempt comes when the key is free.
    monkeypatch.setattr(Retry, "pauses", lambda _: iter([2.6]))
    with pytest.raises(LockLost):
        Lease.load(text)
    assert not taken(lock_of(registered, key))


@HANDS_OVER
def test_fence_rises_and_token_changes(registered: Registered, key: str) -> None:
    """Whoever gave the lease away cannot write under it any more."""
    lease = lock_of(registered, key, ttl=20).acquire()
    loaded = Lease.load(lease.dump())
    assert loaded.fence > lease.fence
    assert loaded.token != lease.token
    assert 19 < loaded.remaining() <= 20
    again = Lease.load(loaded.dump())
    assert again.fence > loaded.fence
    assert again.release() is True
    assert loaded.release() is False


@HANDS_OVER
def test_loaded_lease_is_like_an_acquired_one(registered: Registered, key: str) -> None:
    """It is extended, lost, checked and released; nobody renews it, and no block holds it."""
    loaded = Lease.load(lock_of(registered, key, ttl=20).acquire().dump())
    record = held(lock_backends[registered.alias], key)
    assert (record.token, record.fence) == (loaded.token, loaded.fence)
    assert (record.expires_at, record.ttl) == (loaded.expires_at, 20)
    loaded.extend(5)
    assert 4 < loaded.remaining() <= 5
    loaded.extend()
    assert 19 < loaded.remaining() <= 20
    take_away(loaded)
    with pytest.raises(LockLost):
        loaded.extend()


@HANDS_OVER
def test_secret_is_not_shown(registered: Registered, key: str) -> None:
    """The text holds the token; nothing that is logged of a loaded lease does."""
    lease = lock_of(registered, key, ttl=20).acquire()
    text = lease.dump()
    assert isinstance(text, str)
    loaded = Lease.load(text)
    assert loaded.token not in f"{loaded!r} {loaded!s}"
    assert loaded.token not in text
    loaded.release()
    with pytest.raises(LockLost) as caught:
        Lease.load(text)
    assert lease.token not in f"{caught.value!r} {caught.value!s}"


def tampered() -> list[Any]:
    """Give what is no text of ours."""
    payload = {"backend": "memory", "key": "k", "token": "t", "fence": 1, "ttl": 5, "hold": 0}
    return [
        "",
        "nonsense",
        "a:b:c",
        json.dumps(payload),
        signing.dumps(payload),
        signing.dumps(payload, salt="another"),
        None,
        5,
        b"bytes",
    ]


@pytest.mark.parametrize("text", tampered(), ids=range(len(tampered())))
def test_other_texts_are_refused(text: Any) -> None:
    """Nobody makes himself a lease."""
    with pytest.raises(InvalidArgument):
        Lease.load(text)


@HANDS_OVER
def test_tampered_text_is_refused_and_touches_nothing(registered: Registered, key: str) -> None:
    """One character is enough; the right text still works."""
    text = lock_of(registered, key, ttl=20).acquire().dump()
    middle = len(text) // 3
    for place in (0, middle, len(text) - 1):
        wrong = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        with pytest.raises(InvalidArgument):
            Lease.load(wrong)
    assert Lease.load(text).release() is True


@HANDS_OVER
def test_text_of_another_project_is_refused(registered: Registered, key: str) -> None:
    """It is signed with another secret; with a fallback, an old one counts."""
    with override_settings(SECRET_KEY="another"):
        text = lock_of(registered, key, ttl=20).acquire().dump()
    with pytest.raises(InvalidArgument, match="SECRET_KEY"):
        Lease.load(text)
    with override_settings(SECRET_KEY_FALLBACKS=["another"]):
        assert Lease.load(text).release() is True


@HANDS_OVER
def test_text_that_came_too_late_grants_nothing(registered: Registered, key: str) -> None:
    """Behind ttl and grace the key may be anybody's, or nobody's; it is not granted anew."""
    lock = lock_of(registered, key, ttl=0.2)
    lease = lock.acquire()
    text = lease.dump()
    time.sleep(1.4)
    with pytest.raises(LockLost, match=key):
        Lease.load(text)
    assert not taken(lock)
    following = lock_of(registered, key).acquire()
    assert registered.is_next(following.fence, lease.fence)
    with pytest.raises(LockLost):
        Lease.load(text)
    following.extend()
    assert following.release() is True


@HANDS_OVER
def test_lease_that_is_over_is_not_given_away(registered: Registered, key: str) -> None:
    """Nor one that was released."""
    lease = lock_of(registered, key, ttl=0.2).acquire()
    time.sleep(0.25)
    with pytest.raises(LockLost):
        lease.dump()
    lease.release()
    lease = lock_of(registered, key).acquire()
    lease.release()
    with pytest.raises(LockUsageError, match="released"):
        lease.dump()


@HANDS_OVER
def test_key_that_was_taken_away_is_not_taken_up(registered: Registered, key: str) -> None:
    """An operator's decision counts for what is on its way too."""
    lease = lock_of(registered, key, ttl=20).acquire()
    text = lease.dump()
    take_away(lease)
    with pytest.raises(LockLost):
        Lease.load(text)
    assert grantable(lock_of(registered, key))


@HANDS_OVER
@pytest.mark.parametrize("window", ["hold", "min_hold"])
def test_window_counts_from_the_first_grant(registered: Registered, key: str, window: str) -> None:
    """A hand-over does not make it longer, however many there are."""
    asked: dict[str, Any] = {"hold": True} if window == "hold" else {"min_hold": 20}
    lease = lock_of(registered, key, ttl=20, **asked).acquire()
    began = lease.acquired_at
    time.sleep(0.3)
    loaded = Lease.load(lease.dump())
    time.sleep(0.3)
    loaded = Lease.load(loaded.dump())
    assert loaded.acquired_at > began
    assert loaded.release() is True
    record = held(lock_backends[registered.alias], key)
    assert record.is_settled
    assert record.expires_at is not None
    off = (record.expires_at - began - timedelta(seconds=20)).total_seconds()
    assert abs(off) < 0.001


@HANDS_OVER
def test_window_that_is_over_frees_the_key_at_once(registered: Registered, key: str) -> None:
    """Where the work took longer than its window."""
    lease = lock_of(registered, key, ttl=20, min_hold=0.3).acquire()
    time.sleep(0.35)
    assert Lease.load(lease.dump()).release() is True
    assert not taken(lock_of(registered, key))


@HANDS_OVER
def test_basic_lock_is_handed_over_without_end(registered: Registered, key: str) -> None:
    """It has no ttl, and gets none."""
    lease = lock_of(registered, key, basic=True).acquire()
    loaded = Lease.load(lease.dump())
    assert (loaded.expires_at, loaded.deadline) == (None, math.inf)
    assert loaded.fence > lease.fence
    assert loaded.release() is True


@HANDS_OVER
def test_waiter_is_woken_when_the_loaded_lease_ends(registered: Registered, key: str) -> None:
    """Also one who has waited since before the hand-over."""
    lock = lock_of(registered, key, ttl=60, wait=20)
    lease = Later(lock.acquire).result()
    waiting = Later(lock.acquire)
    backend = lock_backends[registered.alias]
    assert eventually(lambda: backend.storage_name(key) in backend.queues)
    time.sleep(0.2)
    loaded = Later(lambda: Lease.load(lease.dump())).result()
    time.sleep(0.2)
    assert Later(loaded.release).result() is True
    following = waiting.result(5)
    assert following.fence > loaded.fence
    assert Later(following.release).result() is True


@HANDS_OVER
def test_paused_key_is_not_lost(registered: Registered, key: str) -> None:
    """A holder keeps its lease under a pause: what is on its way can be taken up behind it.

    Whatever is said meanwhile, it is not that the lease is over: who believes that drops the work.
    """
    backend = lock_backends[registered.alias]
    text = lock_of(registered, key, ttl=60).acquire().dump()
    backend.pause(key, datetime.now(UTC) + timedelta(hours=1))
    try:
        loaded = Lease.load(text)
    except LockLost:
        pytest.fail("said to be lost")
    except LockError:
        backend.resume(key)
        loaded = Lease.load(text)
    finally:
        backend.resume(key)
    assert loaded.release() is True


@HANDS_OVER
@pytest.mark.stores("postgresql", "mysql", why="no transaction can be in the way")
def test_busy_key_is_not_lost(registered: Registered, key: str, stranger: Stranger) -> None:
    """While a guarded transaction is open nobody can say whether the lease is over: it is not."""
    text = lock_of(registered, key, ttl=60).acquire().dump()
    stranger.guard(key)
    answer = lock_backends[registered.alias].acquire(key, "A" * 22, 30, replace="B" * 22)
    assert isinstance(answer, Contended)
    loading = Later(Lease.load, text)
    time.sleep(1.5)
    stranger.rollback()
    try:
        loaded = loading.result()
    except BackendUnavailable:
        loaded = Lease.load(text)
    assert loaded.release() is True


@HANDS_OVER
def test_dump_inside_a_transaction_is_refused(registered: Registered, key: str) -> None:
    """Another process would work under the lease before the data is committed."""
    lock = lock_of(registered, key, ttl=20)
    texts: list[str] = []
    lease = lock.acquire()
    with transaction.atomic():
        with pytest.raises(LockUsageError, match="on_commit") as caught:
            lease.dump()
        assert (caught.value.code, caught.value.key) == ("unsupported", key)

        async def adump() -> str:
            return lease.dump()

        with pytest.raises(LockUsageError, match="on_commit"):
            async_to_sync(adump)()
        # It stands as before.
        lease.extend()
        transaction.on_commit(lambda: texts.append(lease.dump()))
    assert taken(lock)
    assert Lease.load(texts[0]).release() is True


@HANDS_OVER
def test_dump_waits_for_the_outermost_transaction(registered: Registered, key: str) -> None:
    """The lock may be around the transaction, or the block inside of it: what counts is the end."""
    lock = lock_of(registered, key, ttl=20)
    with lock as lease:
        with transaction.atomic():
            with transaction.atomic():
                pass
            with pytest.raises(LockUsageError, match="on_commit"):
                lease.dump()
        text = lease.dump()
    assert Lease.load(text).release() is True
    with transaction.atomic(), lock as lease:
        with pytest.raises(LockUsageError, match="on_commit"):
            lease.dump()
        assert lease.held
    assert grantable(lock)


@pytest.mark.requires(supports_ttl=False)
def test_lease_of_a_connection_stays_where_it_is(lock: Lock, key: str) -> None:
    """It says so, and stands."""
    with lock as lease:
        with pytest.raises(LockUsageError, match="connection") as caught:
            lease.dump()
        assert (caught.value.code, caught.value.key) == ("unsupported", key)
        assert lease.held
        assert taken(lock)
    assert grantable(lock)


@pytest.mark.requires("supports_ttl")
def test_loaded_lease_is_extended_by_the_locks_ttl(registered: Registered, key: str) -> None:
    """The ttl of the lock counts, not that of an earlier extend."""
    lease = lock_of(registered, key, ttl=30).acquire()
    lease.extend(5)
    loaded = Lease.load(lease.dump())
    loaded.extend()
    left = loaded.remaining()
    loaded.release()
    assert left > 29, left
