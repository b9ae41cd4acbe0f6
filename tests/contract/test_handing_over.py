"""`dump()` gives a lease away, and `Lease.load()` takes it up, in another process."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
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
from django_distlock.core.records import Contended, Record
from django_distlock.handler import lock_backends
from tests.backends import Registered
from tests.processes import spawn

from .conftest import Hold
from .helpers import ELSEWHERE, HAS_TTL, Later, at_once, held
from .locking import Heard, eventually, grantable, lock_of, take_away, taken
from .stores import Stranger


def dumped(registered: Registered, key: str, **more: Any) -> str:
    """Take a lock, and give its lease away."""
    return lock_of(registered, key, **{"ttl": 20, **more}).acquire().dump()


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


@HAS_TTL
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


@HAS_TTL
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


@HAS_TTL
def test_giver_does_not_hold_it(registered: Registered, key: str) -> None:
    """Neither for work nor for an end: what it has left says so, and it is told of no loss."""
    called: list[Lease] = []
    lease = lock_of(registered, key, ttl=0.5).acquire()
    lease.on_lost(called.append)
    with Heard(signals.lock_lost, key) as heard:
        lease.dump()
        time.sleep(1.2)
    assert (called, heard.facts) == ([], [])
    assert (lease.held, lease.is_released, lease.is_lost) == (False, True, False)
    assert lease.remaining() == 0.0
    assert lease.release() is False
    for call in (lease.extend, lease.check, lease.dump):
        with pytest.raises(LockUsageError):
            call()


@HAS_TTL
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


@HAS_TTL
def test_end_of_the_block_behind_a_dump_releases_nothing(
    registered: Registered, key: str, hold: Hold
) -> None:
    """Nor does it call the lease lost, nor renew it."""
    lock, texts = lock_of(registered, key, ttl=1.5), []

    def work(lease: Lease) -> None:
        before = lease.expires_at
        texts.append(lease.dump())
        time.sleep(0.8)
        record = Later(held, lock_backends[registered.alias], key).result()
        assert record.expires_at == before

    with Heard(signals.lock_released, key) as freed, Heard(signals.lock_lost, key) as lost:
        hold(lock, work)
        assert taken(lock)
    assert (freed.facts, lost.facts) == ([], [])
    assert Lease.load(texts[0]).release() is True


@pytest.mark.requires("supports_ttl", "supports_operators")
@pytest.mark.parametrize("within", [None, 10])
@pytest.mark.parametrize("shared", [False, True])
def test_request_to_stop_is_handed_over(
    registered: Registered, key: str, within: float | None, *, shared: bool
) -> None:
    """Whoever takes the lease up is asked, and no longer than the one before."""
    store = lock_backends[registered.alias]
    if shared and not store.supports_sharing:
        pytest.skip("it is shared by nobody")
    lease = lock_of(registered, key, ttl=20, shared=shared).acquire()
    asked = store.request_stop(key, within)
    assert isinstance(asked, Record)
    loaded = Lease.load(lease.dump())
    record = held(store, key)
    assert record.stop_requested_at == asked.stop_requested_at
    assert record.renewed_until == asked.renewed_until
    assert within is None or record.expires_at == asked.renewed_until
    loaded.extend()
    assert loaded.stop_requested
    assert loaded.release() is True


@HAS_TTL
def test_text_works_once(registered: Registered, key: str) -> None:
    """A message may be delivered twice: the second time finds the lease gone."""
    text = dumped(registered, key)
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


@HAS_TTL
def test_of_many_that_load_one_has_it(registered: Registered, key: str) -> None:
    """Also where all do so at the same time."""
    text = dumped(registered, key)

    def load() -> Lease | None:
        try:
            return Lease.load(text)
        except LockLost:
            return None

    (won,) = (each for each in at_once([load] * 6) if each is not None)
    won.extend()
    assert won.release() is True


@HAS_TTL
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


@HAS_TTL
def test_load_whose_reply_was_lost_can_be_repeated(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has carried it out: the lease is neither lost nor in its own way."""
    backend = lock_backends[registered.alias]
    text = dumped(registered, key)
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


@HAS_TTL
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


@HAS_TTL
def test_loaded_lease_is_like_an_acquired_one(registered: Registered, key: str) -> None:
    """With a token and a higher fence of its own, which the store has; it is extended, and lost."""
    lease = lock_of(registered, key, ttl=20).acquire()
    lease.extend(5)
    text = lease.dump()
    loaded = Lease.load(text)
    assert loaded.fence > lease.fence
    assert loaded.token not in f"{lease.token} {text} {loaded!r} {loaded!s}"
    record = held(lock_backends[registered.alias], key)
    assert (record.token, record.fence) == (loaded.token, loaded.fence)
    assert record.expires_at == loaded.expires_at
    loaded.extend(7)
    assert 6 < loaded.remaining() <= 7
    # The ttl of the lock counts, not that of an earlier extend.
    loaded.extend()
    assert 19 < loaded.remaining() <= 20
    again = Lease.load(loaded.dump())
    assert again.fence > loaded.fence
    assert loaded.release() is False
    take_away(again)
    with pytest.raises(LockLost):
        again.extend()
    with pytest.raises(LockLost) as caught:
        Lease.load(text)
    assert lease.token not in f"{caught.value!r} {caught.value!s}"


@pytest.mark.aliases("memory")
def test_other_texts_are_refused(registered: Registered) -> None:
    """Nobody makes himself a lease."""
    payload = {"backend": "memory", "key": "k", "token": "t", "fence": 1, "ttl": 5, "hold": 0}
    signed = (signing.dumps(payload), signing.dumps(payload, salt="another"))
    text: Any
    for text in ("", "nonsense", "a:b:c", json.dumps(payload), *signed, None, 5, b"bytes"):
        with pytest.raises(InvalidArgument):
            Lease.load(text)


#: What another version of this package may write, whose text is signed with the same secret.
OTHER_VERSIONS: list[dict[str, Any]] = [
    {"token": None},
    {"acquired_at": None},
    {"acquired_at": "yesterday"},
    {"acquired_at": "2026-01-01T00:00:00"},
    {"ttl": "20"},
    {"fence": True},
    {"hold": [1]},
    {"places": 3},
]


@pytest.mark.aliases("memory")
def test_text_of_another_version_is_refused_and_touches_nothing(
    registered: Registered, key: str
) -> None:
    """The error names what is missing, unknown, or of another kind, and never the token."""
    text = dumped(registered, key)
    salt = "django_distlock.lease"
    given = signing.loads(text, salt=salt)
    for change in OTHER_VERSIONS:
        ((name, value),) = change.items()
        other = {**given, **change}
        if name in given and value is None:
            del other[name]
        with pytest.raises(InvalidArgument, match=name) as caught:
            Lease.load(signing.dumps(other, salt=salt))
        assert given["token"] not in str(caught.value)
    with pytest.raises(InvalidArgument):
        Lease.load(signing.dumps([given], salt=salt))
    assert Lease.load(text).release() is True


@pytest.mark.aliases("memory")
def test_tampered_text_is_refused_and_touches_nothing(registered: Registered, key: str) -> None:
    """One character is enough. With another secret it is another project's; an old one counts."""
    text, ours = dumped(registered, key), settings.SECRET_KEY
    for place in (0, len(text) // 3, len(text) - 1):
        wrong = text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :]
        with pytest.raises(InvalidArgument):
            Lease.load(wrong)
    with override_settings(SECRET_KEY="another"):
        with pytest.raises(InvalidArgument, match="SECRET_KEY"):
            Lease.load(text)
        with override_settings(SECRET_KEY_FALLBACKS=[ours]):
            assert Lease.load(text).release() is True


@HAS_TTL
@pytest.mark.parametrize("end", ["late", "taken away"])
def test_text_that_came_too_late_grants_nothing(registered: Registered, key: str, end: str) -> None:
    """Behind ttl and grace, or an operator's decision, the key is anybody's: it is not granted."""
    lock = lock_of(registered, key, ttl=1 if end == "late" else 20)
    lease = lock.acquire()
    text = lease.dump()
    if end == "late":
        assert eventually(lambda: not taken(lock), timeout=30)
    else:
        take_away(lease)
    with pytest.raises(LockLost, match=key):
        Lease.load(text)
    assert not taken(lock)
    following = lock_of(registered, key).acquire()
    assert following.fence > lease.fence
    with pytest.raises(LockLost):
        Lease.load(text)
    following.extend()
    assert following.release() is True


@HAS_TTL
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


@HAS_TTL
@pytest.mark.parametrize("more", [{}, {"basic": True}], ids=str)
def test_lease_that_is_older_than_the_longest_ttl_is_handed_over(
    registered: Registered, key: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting limits what an extend asks for; a basic lock has no ttl, and gets none."""
    backend = lock_backends[registered.alias]
    monkeypatch.setattr(backend, "config", replace(backend.config, max_ttl=backend.config.ttl))
    lease = lock_of(registered, key, **more).acquire()
    loaded = Lease.load(lease.dump())
    assert not more or (loaded.expires_at, loaded.deadline) == (None, math.inf)
    assert loaded.fence > lease.fence
    assert loaded.release() is True


@HAS_TTL
def test_waiter_is_woken_when_the_loaded_lease_ends(registered: Registered, key: str) -> None:
    """Also one who has waited since before the hand-over."""
    lock = lock_of(registered, key, ttl=60, wait=20)
    lease = Later(lock.acquire).result()
    waiting = Later(lock.acquire)
    backend = lock_backends[registered.alias]
    assert eventually(lambda: backend.queues.name_of(key) in backend.queues)
    time.sleep(0.2)
    loaded = Later(lambda: Lease.load(lease.dump())).result()
    time.sleep(0.2)
    assert Later(loaded.release).result() is True
    following = waiting.result(5)
    assert following.fence > loaded.fence
    assert Later(following.release).result() is True


@HAS_TTL
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
        backend.pause(key, None)
        loaded = Lease.load(text)
    finally:
        backend.pause(key, None)
    assert loaded.release() is True


@HAS_TTL
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


@HAS_TTL
def test_dump_inside_a_transaction_is_refused(registered: Registered, key: str) -> None:
    """Another process would work under the lease before the data of the outermost is committed."""
    lock = lock_of(registered, key, ttl=20)
    texts: list[str] = []
    lease = lock.acquire()

    async def adump() -> str:
        return lease.dump()

    with transaction.atomic():
        with transaction.atomic():
            pass
        for dump in (lease.dump, async_to_sync(adump)):
            with pytest.raises(LockUsageError, match="on_commit") as caught:
                dump()
            assert (caught.value.code, caught.value.key) == ("unsupported", key)
        # It stands as before.
        lease.extend()
        transaction.on_commit(lambda: texts.append(lease.dump()))
    assert taken(lock)
    assert Lease.load(texts[0]).release() is True


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
