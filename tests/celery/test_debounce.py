"""Debounced tasks: of many calls the last one's arguments run, once, and no call is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from celery import Celery, chain, group
from celery.result import AsyncResult
from celery.signals import after_task_publish, before_task_publish
from django.db import transaction
from kombu.exceptions import OperationalError

from django_distlock import BackendUnavailable, LockNotAcquired, distlock, lock_backends
from django_distlock.contrib.celery import LockedTask, claims, locked_task
from django_distlock.core.keys import own_key
from django_distlock.testing import lose_connection, memory_locks
from tests.contract.helpers import there
from tests.contract.locking import held_elsewhere, rolled_back
from tests.processes import spawn
from tests.services import free_port

from .brokers import Broker
from .crews import Crew, Hire
from .project import create

HERE = "tests.celery.test_debounce"
#: Seconds behind the last call, in these tests.
DEBOUNCE = 2.0
LONG_TEXT = "tell " + 100_000 * "long "


def say(crew: Crew, word: str, *steps: str, name: str = "last", **options: Any) -> AsyncResult[Any]:
    """Call the task, to tell a word."""
    return crew.send(name, f"tell say {word}", *steps, **options)


def said(crew: Crew) -> list[str]:
    """Return what the bodies have told so far."""
    events = [each["event"] for each in crew.stage.told()]
    return [each.removeprefix("say ") for each in events if each.startswith("say ")]


def gave_way(result: AsyncResult[Any]) -> bool:
    """Say whether a task has ended without its body, because a later call was sent."""
    return isinstance(result.result, dict) and result.result.get("why") == "superseded"


def all_ended(crew: Crew, *results: AsyncResult[Any]) -> None:
    """Wait until tasks have succeeded, with or without their bodies, and left nothing."""
    assert [crew.outcome(each) for each in results] == ["SUCCESS"] * len(results)
    crew.becomes_free(crew.claim)
    assert not crew.stage.told("overlapped")
    crew.becomes_free(own_key(f"runs:{crew.key}"))


#: Each kind on one store, and on the other one in the test behind.
KINDS = [("default", "last"), ("redis", "last_late"), ("default", "last_and_locked")]
OTHERS = [("redis", "last"), ("default", "last_late"), ("redis", "last_and_locked")]


@pytest.mark.parametrize(("store", "name"), KINDS)
def test_last_of_many_calls_runs_once(prefork: Crew, name: str) -> None:
    """With its arguments, when nobody has called for so long; the others say why they did not."""
    results = []
    for number in range(8):
        called_at = time.monotonic()
        results.append(say(prefork, str(number), name=name))
    all_ended(prefork, *results)
    assert said(prefork) == ["7"]
    assert prefork.stage.told("began")[0]["at"] >= called_at + DEBOUNCE - 0.1
    assert [gave_way(each) for each in results] == [True] * 7 + [False]
    assert results[0].result == {
        "distlock": "skipped",
        "key": prefork.claim,
        "why": "superseded",
        "holder": None,
    }
    again = say(prefork, "again", name=name)
    all_ended(prefork, again)
    assert said(prefork) == ["7", "again"]


@pytest.mark.parametrize(("store", "name"), OTHERS)
def test_call_amid_a_run_is_run_behind_it(prefork: Crew, name: str) -> None:
    """Once, with the last one's arguments, although its time comes while the first one runs."""
    first = say(prefork, "first", "wait go", name=name)
    prefork.begun()
    results = [say(prefork, word, name=name) for word in ("second", "third", "last")]
    assert [prefork.outcome(each) for each in results[:2]] == ["SUCCESS"] * 2
    prefork.until(lambda: bool(prefork.stage.told("refused")), "the last one has met the run")
    results.append(say(prefork, "very last", name=name))
    # What has given way does not wait for the end of the run.
    assert prefork.outcome(results[2]) == "SUCCESS"
    assert said(prefork) == ["first"]
    prefork.stage.open("go")
    all_ended(prefork, first, *results)
    assert said(prefork) == ["first", "very last"]


def test_calls_from_the_body_are_run_behind_it(prefork: Crew) -> None:
    """A task that calls itself amid its run has seen too little, and runs once more."""
    send = f"send {prefork.store}.last"
    result = say(prefork, "first", send, send, send)
    prefork.until(lambda: bool(prefork.stage.told("child")), "it runs again")
    all_ended(prefork, result)
    prefork.until(lambda: len(prefork.stage.told("ended")) == 2, "both have ended")
    assert len(prefork.stage.told("child")) == 1


def test_lock_of_others_puts_the_last_call_off(prefork: Crew) -> None:
    """Who has the lock may have seen too little: it is not skipped, without acks_late either."""
    with held_elsewhere(distlock(prefork.key, backend=prefork.store, ttl=60)):
        results = [say(prefork, word, name="last_and_locked") for word in ("first", "last")]
        prefork.until(lambda: len(prefork.stage.told("refused")) >= 2, "two attempts")
        assert not prefork.stage.told("began")
    all_ended(prefork, *results)
    assert said(prefork) == ["last"]


def test_call_that_waits_in_its_worker_gives_way(prefork: Crew) -> None:
    """What is called until it has its lock takes its place."""
    with held_elsewhere(distlock(prefork.key, backend=prefork.store, ttl=60)):
        first = say(prefork, "first", name="last_that_waits")
        prefork.until(lambda: first.state == "STARTED", "it waits")
        last = say(prefork, "last", name="last_that_waits")
        prefork.until(lambda: last.state == "STARTED", "so does the last one")
    all_ended(prefork, first, last)
    assert said(prefork) == ["last"]
    assert gave_way(first)


@pytest.mark.parametrize(
    ("store", "is_begun", "is_called"),
    [
        pytest.param("default", True, True, id="amid the body, called again"),
        pytest.param("redis", True, False, id="amid the body"),
        pytest.param("redis", False, True, id="before it begins, called again"),
        pytest.param("default", False, False, id="before it begins"),
    ],
)
def test_killed_run_is_not_lost(prefork: Crew, *, is_begun: bool, is_called: bool) -> None:
    """It comes again, or leaves what there is to do to a later call."""
    if not is_begun:
        prefork.stage.open("doomed")
    results = [say(prefork, "first", *(["wait go", "die"] if is_begun else []), name="last_late")]
    if is_begun:
        prefork.begun()
    if is_called:
        results.append(say(prefork, "last", name="last_late"))
    prefork.stage.open("go")
    all_ended(prefork, *results)
    assert said(prefork)[-1] == ("last" if is_called else "first")
    assert len(said(prefork)) == len(prefork.stage.told("began"))
    assert len(prefork.stage.told("ended")) == 1
    assert not is_called or gave_way(results[0])


def test_order_of_the_calls_counts(prefork: Crew) -> None:
    """A message that comes late, or was put off, does not bring older arguments back."""
    late = say(prefork, "late", countdown=3)
    last = say(prefork, "last")
    all_ended(prefork, last, late)
    assert said(prefork) == ["last"]
    put_off = say(prefork, "put off", countdown=2)
    assert prefork.record(prefork.claim).holder.task_id == put_off.id
    all_ended(prefork, put_off)
    assert said(prefork) == ["last", "put off"]


def test_call_that_could_not_be_sent_replaces_none(prefork: Crew) -> None:
    """What was called before it runs."""
    before = say(prefork, "before")
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    with create({"broker_url": nowhere}) as app, pytest.raises(OperationalError):
        app.tasks[f"{prefork.store}.last"].apply_async(
            (prefork.key, ["tell say nobody"]), **prefork.to(retry=False)
        )
    assert not prefork.is_taken(prefork.claim)
    all_ended(prefork, before)
    assert said(prefork) == ["before"]


def call_and_die(settings: dict[str, Any], store: str, key: str, queue: str, when: str) -> None:
    """Call the task from a process that is killed when its message is about to go, or has gone."""
    signal = {"before": before_task_publish, "after": after_task_publish}[when]

    def die(**_: Any) -> None:
        print("dies", flush=True)
        os._exit(0)

    signal.connect(die, weak=False)
    app = create(settings)
    app.loader.import_default_modules()
    app.tasks[f"{store}.last"].apply_async((key, ["tell say dead"]), queue=queue)


@pytest.mark.parametrize(("store", "when"), [("default", "before"), ("redis", "after")])
def test_caller_that_dies_loses_no_call(prefork: Crew, broker: Broker, when: str) -> None:
    """Not of others, whose call its own would have replaced, and not its own message."""
    before = say(prefork, "before")
    arguments = broker.settings, prefork.store, prefork.key, prefork.worker.queue, when
    with spawn(f"{HERE}:call_and_die", *arguments) as caller:
        caller.wait_for("dies")
    expected = ["before"] if when == "before" else ["before", "dead"]
    prefork.until(lambda: len(said(prefork)) == len(expected), "all have run")
    # The claim of the dead is in nobody's way.
    all_ended(prefork, before, say(prefork, "later"))
    assert said(prefork) == [*expected, "later"]


@contextmanager
def amid_sending(act: Any) -> Iterator[None]:
    """Let something happen once between the number of a call and its message."""
    done: list[bool] = []

    def receive(**_: Any) -> None:
        if not done:
            done.append(True)
            act()

    before_task_publish.connect(receive, weak=False)
    try:
        yield
    finally:
        before_task_publish.disconnect(receive)


def test_call_that_is_overtaken_is_run(prefork: Crew) -> None:
    """A call of which a later one has begun before it was sent: that run has not seen its cause."""

    def call_and_run() -> None:
        say(prefork, "later", "wait go")
        prefork.begun()

    with amid_sending(call_and_run):
        result = say(prefork, "slow")
    prefork.stage.open("go")
    all_ended(prefork, result)
    assert said(prefork) == ["later", "slow"]


def test_call_that_somebody_awaits_keeps_its_id(prefork: Crew) -> None:
    """Overtaken, what it was called for is run as another task, and its own one ends."""
    with amid_sending(lambda: (say(prefork, "later"), prefork.begun())):
        result = say(prefork, "slow", task_id=f"{prefork.key}-named")
    assert result.id == f"{prefork.key}-named"
    prefork.until(lambda: said(prefork) == ["later", "slow"], "both have run")
    all_ended(prefork, result)
    assert gave_way(result)


def test_call_that_another_one_follows_at_once_gives_way(prefork: Crew) -> None:
    """Where the later call has not begun, that will see what this one was for."""
    with amid_sending(lambda: say(prefork, "later")):
        result = say(prefork, "first")
    all_ended(prefork, result)
    prefork.until(lambda: bool(said(prefork)), "the later one has run")
    assert gave_way(result)
    assert said(prefork) == ["later"]


def test_retry_gives_way_to_a_later_call(prefork: Crew) -> None:
    """And else it runs. In between nobody is kept from running."""
    first = say(prefork, "first", "retry 4")
    prefork.until(lambda: first.state == "RETRY", "it is queued again")
    last = say(prefork, "last")
    all_ended(prefork, last, first)
    assert gave_way(first)
    assert said(prefork) == ["first", "last"]
    alone = say(prefork, "alone", "retry 1")
    all_ended(prefork, alone)
    assert said(prefork)[2:] == ["alone", "alone"]


def test_parts_of_a_canvas_are_calls(prefork: Crew) -> None:
    """The last part of a group runs; those before it, and what waits for them, come to an end."""
    parts = [prefork.signature("last", f"tell say {number}") for number in range(3)]
    result = group(parts, app=prefork.app).apply_async()
    prefork.until(result.ready, "the group has ended")
    assert result.successful()
    assert said(prefork) == ["2"]
    behind = prefork.task("collect").s(prefork.key).set(**prefork.to())
    ends = chain(parts[0], behind, app=prefork.app).apply_async()
    assert prefork.outcome(ends) == "SUCCESS"
    assert said(prefork) == ["2", "0"]


def test_what_is_sent_on_commit_is_called_then(prefork: Crew) -> None:
    """A rollback replaces nothing."""
    task = prefork.task("last")
    before = say(prefork, "before")
    with rolled_back():
        task.apply_async_on_commit((prefork.key, ["tell say gone"]), **prefork.to())
    assert prefork.record(prefork.claim).holder.task_id == before.id
    with transaction.atomic():
        task.apply_async_on_commit((prefork.key, ["tell say last"]), **prefork.to())
        assert prefork.record(prefork.claim).holder.task_id == before.id
    prefork.until(lambda: bool(said(prefork)), "it has run")
    all_ended(prefork, before)
    assert said(prefork) == ["last"]


def test_arguments_travel_with_the_message(prefork: Crew) -> None:
    """Of any size, and never through the store of the locks."""
    results = [say(prefork, "first"), prefork.send("last", LONG_TEXT, "tell say last")]
    all_ended(prefork, *results)
    assert said(prefork) == ["last"]


def test_arguments_may_be_pickled(hire: Hire) -> None:
    """Also where a call meets a run, and goes back to the queue."""
    settings = {"accept_content": ["json", "pickle"]}
    # Celery wants to be asked twice; nobody else sends to this broker.
    environment = {"C_FORCE_ROOT": "1"}
    with hire(slots=2, settings=settings, environment=environment) as hired:
        for name, how in (("last_pickled", {}), ("last", {"serializer": "pickle"})):
            crew = hired.beside(name)
            first = say(crew, "first", "wait go", name=name)
            crew.begun()
            last = crew.task(name).apply_async((crew.key, {"tell say last"}), **crew.to(**how))
            crew.until(partial(crew.stage.told, "refused"), "it has met the run")
            crew.stage.open("go")
            all_ended(crew, first, last)
            assert said(crew) == ["first", "last"]


def test_revoked_last_call_leaves_nothing(prefork: Crew) -> None:
    """It was the one for all before it; what is called later runs."""
    first, last = say(prefork, "first"), say(prefork, "last")
    last.revoke()
    assert [prefork.outcome(each) for each in (first, last)] == ["SUCCESS", "REVOKED"]
    all_ended(prefork, first, say(prefork, "later"))
    assert said(prefork) == ["later"]


def test_paused_key_takes_no_call(prefork: Crew) -> None:
    """An operator's pause is told to who calls; what was called before runs."""
    before = say(prefork, "before")
    store = lock_backends[prefork.store]
    store.pause(prefork.claim, datetime.now(UTC) + timedelta(seconds=60))
    began = time.monotonic()
    with pytest.raises(LockNotAcquired):
        say(prefork, "nobody")
    assert time.monotonic() - began < 3
    store.pause(prefork.claim, None)
    all_ended(prefork, before)
    assert said(prefork) == ["before"]


# Where no message travels


@pytest.fixture
def eager() -> Iterator[Celery]:
    """Give an app that runs tasks where they are sent."""
    made = Celery("eager", set_as_current=False, broker="memory://", backend="cache+memory://")
    made.conf.update(task_always_eager=True, task_store_eager_result=True)
    with memory_locks():
        yield made
    made.close()


def test_eager_calls_run_at_once(eager: Celery) -> None:
    """Each of them, for a test that calls wants to see what comes of it."""
    ran: list[int] = []

    @eager.task(shared=False, base=LockedTask)
    @locked_task(unique="one", debounce=30)
    def work(number: int) -> int:
        ran.append(number)
        return number

    assert [work.delay(number).get() for number in range(3)] == [0, 1, 2]
    assert ran == [0, 1, 2]
    assert work(3) == 3
    assert ran == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", [None, "skip", "run"])
def test_store_that_is_away_takes_no_call(eager: Celery, policy: Any) -> None:
    """It is told, or left to the policy: then the message gives way to none."""
    ran: list[str] = []

    @eager.task(shared=False, base=LockedTask)
    @locked_task(unique="one", debounce=30, on_unavailable=policy)
    def work() -> None:
        ran.append("ran")

    with lose_connection():
        if policy is None:
            with pytest.raises(BackendUnavailable):
                work.delay()
        else:
            result = work.delay().get()
            assert policy == "run" or result["distlock"] == "skipped"
    assert ran == (["ran"] if policy == "run" else [])


def test_store_that_goes_away_behind_the_message_replaces_none(
    prefork: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    """Who calls then is told nothing wrong: its message runs, and one more gives way to none."""
    with pytest.MonkeyPatch.context() as patch:

        def away(*_: Any) -> bool:
            raise BackendUnavailable("away")

        patch.setattr(claims, "is_overtaken", away)
        result = say(prefork, "told")
    assert "which call" in caplog.text
    all_ended(prefork, result)
    prefork.until(lambda: said(prefork) == ["told"] * 2, "both have run")


def test_last_call_runs_whatever_an_operator_raises(prefork: Crew) -> None:
    """Fences that are raised above all numbers, as after a restore, leave no call behind."""
    result = say(prefork, "first")
    store = lock_backends[prefork.store]
    above = 2 * prefork.record(prefork.claim).fence + 1001
    store.raise_fences(above, key=own_key(f"calls:{prefork.key}"))
    all_ended(prefork, result)
    assert said(prefork) == ["first"]
    all_ended(prefork, say(prefork, "later"))
    assert said(prefork) == ["first", "later"]
    fence = there(store.counter(prefork.claim))
    assert 2 * fence.fence > above
