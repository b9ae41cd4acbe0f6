"""What operators do through `inspection`: what comes of it, and what is kept of it."""

from __future__ import annotations

import io
import json
import logging
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.core.management import call_command
from django.test import override_settings

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    InvalidLockBackend,
    LockUsageError,
    distlock,
    lock_backends,
)
from django_distlock.core.records import Contended, Counter, Holder
from django_distlock.inspection import (
    Operation,
    Result,
    State,
    cleanup,
    expire_soon,
    force_release,
    may,
    pause,
    request_stop,
    resume,
    show,
)
from django_distlock.models import HeldLock, LockEvent
from django_distlock.process import event_log
from django_distlock.signals import lock_forced, lock_operated
from tests.contract.aliases import alias_like
from tests.contract.helpers import take, there
from tests.contract.locking import Heard, rolled_back

from .databases import Routed
from .operating import ALIASES, DEAD, WHO, event_of, no_event_of, run

KEPT = [alias for alias in ALIASES if alias != "memory"]
#: A store of each sort: what each of them does to a key, the contract tells.
SORTS = [alias for alias in ("postgres", "redis", "advisory") if alias in ALIASES]

each_backend = pytest.mark.parametrize("alias", ALIASES)
each_sort = pytest.mark.parametrize("alias", SORTS)


# Force-release


@each_backend
def test_forced_key_is_free_and_its_fence_is_higher(key: str, alias: str) -> None:
    """Outcome, signal and event say what was taken from whom, by whom, and why; no token."""
    lock = distlock(key, backend=alias, ttl=60, basic=alias != "advisory", metadata={"user": "Bob"})
    lease = lock.acquire()
    with Heard(lock_forced, key) as told:
        outcome = force_release(key, backend=alias, **WHO)
    assert (outcome.operation, outcome.result) == (Operation.FORCE_RELEASE, Result.DONE)
    assert (outcome.backend, outcome.key) == (alias, key)
    assert outcome.is_done
    assert there(outcome.held).fence == outcome.fence_before == lease.fence
    assert outcome.fence_after is not None
    assert outcome.fence_after > lease.fence
    facts = told.once
    assert (facts["alias"], facts["fence"]) == (alias, lease.fence)
    assert (facts["actor"], facts["reason"]) == ("Ada", "it hangs")
    assert facts["holder"].pid > 0
    shown = [repr(outcome), json.dumps(outcome.as_json()), repr(facts)]
    if alias in KEPT:
        event = event_of(key)
        assert event.kind == LockEvent.Kind.FORCED
        assert (event.backend, event.fence) == (alias, lease.fence)
        assert (event.actor, event.reason) == ("Ada", "it hangs")
        assert event.holder["metadata"] == {"user": "Bob"}
        shown.append(repr(vars(event)))
    assert not any(lease.token in each for each in shown)
    assert not lock.locked()
    assert lease.release() is False
    with lock as successor:
        assert successor.fence > outcome.fence_after


@each_sort
def test_key_that_nobody_holds_is_no_loss(key: str, alias: str) -> None:
    """Nothing is done, no fence is used up, and nothing is told."""
    with Heard(lock_forced, key) as told:
        outcome = force_release(key, backend=alias, **WHO)
    assert (outcome.result, outcome.held) == (Result.NOTHING, None)
    assert (outcome.fence_before, outcome.fence_after) == (None, None)
    assert told.facts == []
    assert no_event_of(key)
    with distlock(key, backend=alias) as lease:
        fence = lease.fence
    again = force_release(key, backend=alias, **WHO)
    assert (again.result, again.fence_before, again.fence_after) == (Result.NOTHING, fence, fence)


def test_operation_needs_an_actor_and_a_reason(key: str) -> None:
    """A user with a row, or a name; without what can be kept, nothing is touched."""
    slips: dict[str, list[Any]] = {
        "reason": ["", "  ", "x" * 201, "a\0b", "\ud800", None, 5],
        "actor": ["", " ", "x" * 201, " " * 200 + "x", None, 5, AnonymousUser()],
    }
    with distlock(key, backend="memory") as lease:
        for name, wrong in ((word, each) for word in slips for each in slips[word]):
            with pytest.raises(InvalidArgument, match=name):
                force_release(key, backend="memory", **{**WHO, name: wrong})
        lease.check()


def test_slips_are_errors(key: str) -> None:
    """No alias, no key, no end of a pause that lies ahead, an empty batch, no operation."""
    with pytest.raises(InvalidLockBackend):
        force_release(key, backend="nowhere", **WHO)
    with pytest.raises(InvalidArgument):
        force_release("", backend="memory", **WHO)
    with pytest.raises(InvalidArgument):
        show("a\0", "memory")
    past, naive = datetime.now(UTC) - timedelta(hours=1), datetime(2999, 1, 1)  # noqa: DTZ001
    for until in (past, naive, -5, 1e12, "soon"):
        with pytest.raises(InvalidArgument, match="until"):
            pause(key, until, backend="memory", **WHO)  # type: ignore[arg-type]
    assert show(key, "memory").counter is None
    for batch in (0, True, "many"):
        with pytest.raises(InvalidArgument, match="limit"):
            cleanup(backend="memory", actor="Ada", batch=batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="release_all"):
        may(User(is_superuser=True), "release_all")


def test_store_that_is_down_is_no_outcome(key: str) -> None:
    """Nobody is told that a key was free, or was taken, when the store said nothing."""
    with override_settings(DISTLOCK={"dead": DEAD}):
        for ask in (
            lambda: force_release(key, backend="dead", **WHO),
            lambda: pause(key, 5, backend="dead", **WHO),
            lambda: show(key, "dead"),
        ):
            with pytest.raises(BackendUnavailable):
                ask()
    assert no_event_of(key)


# Shorter, asked, paused


@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_expire_soon_brings_the_end_nearer(key: str, alias: str) -> None:
    """The outcome shows the lease as it is now; its holder may still renew it."""
    lease = distlock(key, backend=alias, ttl=600).acquire()
    outcome = expire_soon(key, timedelta(seconds=20), backend=alias, **WHO)
    assert outcome.result is Result.DONE
    assert outcome.held is not None
    assert outcome.held.expires_in is not None
    assert 15 < outcome.held.expires_in <= 21
    assert outcome.fence_before == outcome.fence_after == lease.fence
    assert show(key, alias).held is not None
    lease.extend()
    assert lease.release() is True
    assert expire_soon(key, 20, backend=alias, **WHO).result is Result.NOTHING
    event = event_of(key)
    assert (event.kind, event.details) == (LockEvent.Kind.SHORTENED, {"within": 20.0})
    assert (event.actor, event.reason, event.fence) == ("Ada", "it hangs", lease.fence)


@each_sort
def test_lease_without_expiry_is_not_shortened(key: str, alias: str) -> None:
    """Its holder would not notice: the error says what can be done, and nothing is changed."""
    lease = distlock(key, backend=alias, basic=alias != "advisory", ttl=None).acquire()
    with pytest.raises(LockUsageError, match="no expiry|do not expire"):
        expire_soon(key, 5, backend=alias, **WHO)
    assert not lease.stop_requested
    assert lease.release() is True
    assert no_event_of(key)


@each_sort
def test_holder_is_asked_to_finish(key: str, alias: str) -> None:
    """It sees so with its next extend, and keeps its lease."""
    with distlock(key, backend=alias, ttl=60) as lease:
        outcome = request_stop(key, backend=alias, actor="Ada")
        assert outcome.result is Result.DONE
        assert there(outcome.held).state is State.STOP_REQUESTED
        lease.extend()
        assert lease.stop_requested
    assert request_stop(key, backend=alias, actor="Ada").result is Result.NOTHING
    assert event_of(key).kind == LockEvent.Kind.STOP_REQUESTED


@each_sort
def test_key_is_paused_and_resumed(key: str, alias: str) -> None:
    """Nobody is granted it meanwhile; who wanted it so is shown."""
    lock = distlock(key, backend=alias, wait=0)
    assert resume(key, backend=alias, actor="Ada").result is Result.NOTHING
    outcome = pause(key, 600, backend=alias, **WHO)
    assert (outcome.result, outcome.fence_after) == (Result.DONE, None)
    assert json.loads(json.dumps(outcome.as_json())) == {
        "operation": "pause", "backend": alias, "key": key, "result": "done", "held": None,
        "fence_before": None, "fence_after": None, "sessions": [], "removed": 0,
    }  # fmt: skip
    assert lock.try_acquire() is None
    view = show(key, alias)
    assert (view.held, view.fence) == (None, 0)
    assert there(view.counter).paused_by == "Ada"
    assert 590 < (there(view.paused_until) - view.observed_at).total_seconds() <= 600
    assert resume(key, backend=alias, **WHO).result is Result.DONE
    assert show(key, alias).paused_until is None
    with lock:
        assert show(key, alias).counter == Counter(show(key, alias).fence)


def test_pause_leaves_events(key: str) -> None:
    """One for its begin, with its end, and one for the resume; a user is there by name."""
    until = datetime.now(UTC) + timedelta(hours=1)
    with Heard(lock_operated, key) as told:
        pause(key, until, backend="postgres", **WHO)
        resume(key, backend="postgres", actor=User(pk=7, username="grace"))
        resume(key, backend="postgres", **WHO)
    assert [each["operation"] for each in told.facts] == ["pause", "resume"]
    assert not no_event_of(key)
    first, second = LockEvent.objects.filter(key=key).order_by("pk")
    assert (first.kind, first.details) == (LockEvent.Kind.PAUSED, {"until": until.isoformat()})
    assert (second.kind, second.actor) == (LockEvent.Kind.RESUMED, "grace")


# Cleanup


def test_cleanup_removes_what_is_over_in_batches(key: str) -> None:
    """Records go, counters and live locks stay; one event tells how many went."""
    store, actor = lock_backends["postgres"], f"cron of {key}"
    names = [f"{key}:{number}" for number in range(5)]
    fences = [take(store, each, 60).fence for each in names]
    take(store, f"{key}:live", 60)
    over = HeldLock.objects.filter(key__in=names)
    ended = store.clock() - timedelta(hours=2)
    over.update(acquired_at=ended, renewed_at=ended, expires_at=ended, free_at=ended)
    cleanup(backend="postgres", older_than=3 * 3600, actor="Ada")
    assert over.count() == 5
    steps: list[int] = []
    asked: dict[str, Any] = {"backend": "postgres", "older_than": 3600, "actor": actor}
    outcome = cleanup(batch=2, progress=steps.append, **asked)
    assert (outcome.result, outcome.removed) == (Result.DONE, steps[-1])
    assert outcome.removed >= 5
    assert all(0 < later - before <= 2 for before, later in pairwise([0, *steps]))
    assert cleanup(**asked).result is Result.NOTHING
    assert [each.key for each in HeldLock.objects.filter(key__startswith=key)] == [f"{key}:live"]
    assert [store.counter(each) for each in names] == [*map(Counter, fences)]
    event_log.finish()
    (event,) = LockEvent.objects.filter(actor=actor)
    assert (event.kind, event.key) == (LockEvent.Kind.CLEANED, "")
    assert event.details["removed"] == outcome.removed


# All about one key


@each_backend
def test_key_is_shown_with_all_that_is_known(key: str, alias: str) -> None:
    """Held, shared or not; as JSON too, and without its token."""
    free = show(key, alias)
    assert (free.held, free.counter, free.waiters, free.fence) == (None, None, (), 0)
    with distlock(key, backend=alias, ttl=60, metadata={"user": "Ada"}) as lease:
        view = show(key, alias)
        assert view.held is not None
        assert view.held.fence == view.fence == lease.fence
        assert view.held.holder.metadata == {"user": "Ada"}
        document = json.loads(json.dumps(view.as_json()))
        assert document["held"]["key"] == document["key"] == key
        assert document["fence"] == lease.fence
        for shown in (repr(view), json.dumps(document)):
            assert lease.token not in shown
    assert view.sharing == ()
    # Where several share it, each is in the list, and the key can be taken from one of them.
    store = lock_backends[alias]
    if not store.supports_sharing:
        return
    with distlock(key, backend=alias, shared=True) as one:
        other = take(store, key, 60, holder=Holder(host="there"), permits=None)
        view = show(key, alias)
        assert there(view.held).state is State.SHARED
        assert sorted(each.fence for each in view.sharing) == [one.fence, other.fence]
        assert {each["shared"] for each in view.as_json()["sharing"]} == {True}
        if store.distributed:
            said = io.StringIO()
            call_command("distlock_show", key, "--backend", alias, stdout=said)
            assert "HELD BY" in said.getvalue()
        force_release(key, backend=alias, fence=other.fence, **WHO)
        assert [each.fence for each in show(key, alias).sharing] == [one.fence]
        one.check()


def test_holder_of_a_shared_key_who_is_left_is_told(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction is in the way of one of them; the events say who was released."""
    store = lock_backends["postgres"]
    fences = [take(store, key, 60, permits=9).fence for _ in range(3)]
    release = store.force_release

    def busy(key: str, *, fence: int | None = None) -> Any:
        return Contended(busy=True) if fence == fences[1] else release(key, fence=fence)

    monkeypatch.setattr(store, "force_release", busy)
    outcome = force_release(key, backend="postgres", **WHO)
    assert (outcome.result, there(outcome.held).fence) == (Result.BUSY, fences[1])
    event_log.finish()
    told = LockEvent.objects.filter(key=key).values_list("fence", flat=True)
    assert {*told} == {fences[0], fences[2]}


@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_event_tells_of_each_who_shares_a_key(key: str, alias: str) -> None:
    """Also where the lease of another one cannot be shortened."""
    store = lock_backends[alias]
    fences = [take(store, key, ttl, permits=9).fence for ttl in (60, 60, None)]
    with pytest.raises(LockUsageError, match="no expiry"):
        expire_soon(key, 5, backend=alias, **WHO)
    assert force_release(key, backend=alias, **WHO).is_done
    assert show(key, alias).held is None
    event_log.finish()
    events = LockEvent.objects.filter(key=key, backend=alias)
    for kind, of in ((LockEvent.Kind.SHORTENED, fences[:2]), (LockEvent.Kind.FORCED, fences)):
        assert {each.fence for each in events.filter(kind=kind)} == {*of}


def test_latest_events_are_shown_the_last_first(key: str) -> None:
    """Only this key's, only this backend's, and no more than ten."""
    for number in range(12):
        LockEvent.objects.create(
            backend="postgres", key=key, kind="lost", reason=str(number), fence=number
        )
    LockEvent.objects.create(backend="sqlite", key=key, kind="lost")
    view = show(key, "postgres")
    assert [each.reason for each in there(view.events)] == [str(n) for n in range(11, 1, -1)]
    assert json.loads(json.dumps(view.as_json()))["events"][0]["kind"] == "lost"


def test_events_that_cannot_be_read_are_not_taken_for_none(
    key: str, sqlite: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a table of events the key is shown all the same; it is asked for once."""
    routed = override_settings(DATABASE_ROUTERS=[Routed(sqlite, LockEvent)])
    with routed, caplog.at_level(logging.WARNING):
        view = show(key, "redis")
    assert view.events is view.releases is None
    assert caplog.text.count("events cannot be read") == 1


def test_project_without_databases_has_no_events(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """None can be kept there, so that nobody is warned of any."""
    with (
        alias_like("sqlite", ENGINE="django.db.backends.dummy") as nothing,
        override_settings(DATABASE_ROUTERS=[Routed(nothing, LockEvent)]),
        caplog.at_level(logging.WARNING),
    ):
        assert show(key, "redis").events == ()
        assert run("distlock_show", key, "--backend=redis").err == ""
    assert caplog.text == ""


# Permissions


def test_each_operation_has_a_permission_that_migrate_makes() -> None:
    """The codenames of the operations are those in the database."""
    made = set(
        Permission.objects.filter(content_type__app_label="django_distlock").values_list(
            "codename", flat=True
        )
    )
    named = {operation.codename for operation in Operation}
    assert len(named) == len(Operation)
    assert named <= made
    assert {each for each in made - named if not each.startswith("view_")} == set()


def test_user_may_do_what_the_permission_is_for(key: str) -> None:
    """That operation, and no other."""
    with rolled_back():
        for operation in Operation:
            user = User.objects.create(username=f"{key}-{operation}")
            assert not any(may(user, each) for each in Operation)
            user.user_permissions.add(Permission.objects.get(codename=operation.codename))
            user = User.objects.get(pk=user.pk)
            assert [each for each in Operation if may(user, each)] == [operation]
            assert may(user, operation.value)
            assert not may(User(is_superuser=True, is_active=False), operation)
            assert may(User(is_superuser=True, is_active=True), operation)
            assert not may(AnonymousUser(), operation)
