"""What a conflict makes of a task. The numbers are those of the survey of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, _state, chain, chord, shared_task

from django_distlock import InvalidArgument, LockNotAcquired, distlock
from django_distlock.contrib.celery import locked_task
from django_distlock.core.records import Holder, Waits
from django_distlock.handler import lock_backends
from django_distlock.inspection import list_locks
from tests.contract.helpers import there
from tests.contract.locking import held_elsewhere

from .brokers import Broker
from .crews import Crew, Hire
from .project import create


def lock_of(crew: Crew, suffix: str = "") -> Any:
    """Describe the lock of a crew's key."""
    return distlock(crew.key + suffix, backend=crew.store, ttl=60, wait=0)


def marker(crew: Crew, value: Any) -> bool:
    """Say whether a task's value is the marker of one that was skipped."""
    return (
        isinstance(value, dict)
        and value.get("distlock") == "skipped"
        and value["key"] == crew.key
        and value["why"] == "acquisition_timeout"
    )


def test_c1_canvas_goes_on_behind_a_skipped_task(prefork: Crew) -> None:
    """What follows gets the marker in place of a result, which names the holder."""
    other = f"{prefork.key}:other"
    end = prefork.task("collect").s(prefork.key).set(**prefork.to())
    header = [prefork.signature("early"), prefork.task("early").si(other).set(**prefork.to())]
    with held_elsewhere(lock_of(prefork)):
        of_chord = chord(header, app=prefork.app)(end.clone())
        of_chain = chain(prefork.signature("early"), end, app=prefork.app).apply_async()
        assert [prefork.outcome(each) for each in (of_chord, of_chain)] == ["SUCCESS"] * 2
    skipped, ran = of_chord.result
    assert marker(prefork, skipped)
    assert marker(prefork, of_chain.result)
    assert isinstance(skipped["holder"]["pid"], int)
    assert ran["lease"] == other
    assert not prefork.stage.told("began")


def test_c1_c17_chord_of_one_key_waits_for_tasks_that_are_queued_again(prefork: Crew) -> None:
    """A conflict that is not the end of a task is not the end of its part; the body waits, too."""
    with held_elsewhere(lock_of(prefork)):
        header = [prefork.signature(name, "sleep 0.2") for name in ("retry", "late")]
        result = chord(header, app=prefork.app)(prefork.signature("late", "tell body"))
        prefork.until(lambda: len(prefork.stage.told("refused")) >= 4, "several attempts")
        assert not prefork.stage.told("began")
    assert prefork.outcome(result) == "SUCCESS"
    assert [each["lease"] for each in prefork.stage.told("ended")] == [prefork.key] * 3
    assert [each["event"] for each in prefork.stage.told("ended", "body")][2:] == ["body", "ended"]
    assert not prefork.stage.told("overlapped")


def test_c2_waiting_in_the_queue_is_seen(prefork: Crew) -> None:
    """However often a task goes round, it is one who retries, until it runs or has ended.

    It keeps its id, and burns no retries; behind `max_wait`, it fails with what it met.
    """
    store = lock_backends[prefork.store]

    def waits() -> Waits:
        return store.waiters.count([prefork.key])[0]

    with held_elsewhere(lock_of(prefork)):
        results = [prefork.send("retry", "wait go") for _ in range(2)]
        prefork.until(lambda: waits() == Waits(0, 2), "two are seen")
        note = there(store.waiters.note(prefork.key, Holder(host="web-7", pid=7), 60))
        (held,) = list_locks(backends=[prefork.store], prefix=prefork.key, waits=True).locks
        assert held.waits == waits()
        assert waits().waiting == 1
        store.waiters.drop(prefork.key, note)
        ending = prefork.send("retry_for_a_second")
        assert prefork.outcome(ending) == "FAILURE"
        assert isinstance(ending.result, LockNotAcquired)
        prefork.until(lambda: waits() == Waits(0, 2), "who gave up is gone")
        counted, before = set(), len(prefork.stage.told("refused"))

        def several() -> bool:
            counted.add(waits())
            return len(prefork.stage.told("refused")) >= before + 8

        prefork.until(several, "several attempts")
        assert counted == {Waits(0, 2)}
        seen = {each.holder.task_id: each for each in store.waiters.of(prefork.key)}
        assert set(seen) == {each.id for each in results}
        assert all(each.is_retrying for each in seen.values())
    prefork.begun()
    assert waits().retrying <= 1
    prefork.let_go(*results)
    assert waits() == Waits()
    assert [each.result["task_id"] for each in results] == [each.id for each in results]
    assert [each.result["retries"] for each in results] == [0, 0]
    assert len(prefork.stage.told("began")) == 2


def test_c2_retries_of_the_body_still_count(prefork: Crew) -> None:
    """Conflicts between the body's own retries leave their number as it is."""
    with held_elsewhere(lock_of(prefork)):
        result = prefork.send("late", "retry 1")
        prefork.until(lambda: len(prefork.stage.told("refused")) >= 2, "two attempts")
    prefork.until(lambda: bool(prefork.stage.told("failed")), "the first run")
    assert prefork.outcome(result) == "SUCCESS"
    assert [each["retries"] for each in prefork.stage.told("began")] == [0, 1]


@pytest.mark.parametrize("store", ["default"])
def test_end_is_stored_behind_the_state_of_the_attempt_before(hire: Hire, broker: Broker) -> None:
    """Although that is stored when the next attempt is in the queue already."""
    slowly = {"result_backend": f"tests.celery.slow_results.SlowResults+{broker.results}"}
    with hire(settings=slowly, slots=4) as crew:
        with held_elsewhere(lock_of(crew)):
            result = crew.send("retry_at_once")
            crew.until(lambda: len(crew.stage.told("refused")) >= 3, "it is queued again")
        crew.until(lambda: crew.stage.told("ended"), "it has run")
        refusals = len(crew.stage.told("refused"))
        # Celery writes this when it has stored that state.
        crew.until(lambda: crew.worker.said().count("] retry: ") == refusals, "each is stored")
        assert crew.outcome(result) == "SUCCESS"


def test_c7_tasks_sent_by_name_run_one_at_a_time(prefork: Crew, broker: Broker) -> None:
    """Who sends without knowing the task takes no lock, and need not: the worker does."""
    stranger = Celery("stranger", set_as_current=False)
    stranger.conf.update(broker.settings)
    with stranger:
        sent = [
            stranger.send_task(
                f"{prefork.store}.{name}", (prefork.key, ["sleep 0.3"]), queue=prefork.worker.queue
            ).id
            for name in ("unique_and_locked", "unique_and_locked", "late", "late")
        ]
        results = [prefork.app.AsyncResult(each) for each in sent]
        assert [prefork.outcome(each) for each in results] == ["SUCCESS"] * 4
    assert len(prefork.stage.told("ended")) == 4
    assert not prefork.stage.told("overlapped")
    assert not prefork.is_taken()


def test_c10_the_lock_goes_below_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Around a task, where it would guard the sending alone, it is refused at once."""
    app = create({})
    monkeypatch.setattr(_state._tls, "current_app", app)
    with pytest.raises(InvalidArgument, match="below"):

        @locked_task("wrong:{key}")
        @shared_task(name="wrong order")
        def one(key: str) -> None: ...

    with pytest.raises(InvalidArgument, match="below"):

        @locked_task("wrong:{key}")
        @app.task(name="wrong order too")
        def other(key: str) -> None: ...


def test_c10_each_automatic_retry_is_locked_anew(prefork: Crew) -> None:
    """`autoretry_for` is around the lock: each attempt has a grant of its own."""
    result = prefork.send("auto", "fail_until 2")
    assert prefork.outcome(result) == "SUCCESS"
    runs = prefork.stage.told("began")
    assert [each["retries"] for each in runs] == [0, 1, 2]
    assert [each["lease"] for each in runs] == [prefork.key] * 3
    fences = [each["fence"] for each in runs]
    assert fences == sorted(set(fences))


def test_c14_waiting_in_a_slot_is_bounded(hire: Hire) -> None:
    """A task that waits in the only slot makes way for one that could free the key.

    One that is queued again leaves the slot at once.
    """
    with hire(pool="threads") as crew:
        with held_elsewhere(lock_of(crew)):
            retrying = crew.send("retry")
            crew.until(lambda: bool(crew.stage.told("refused")), "an attempt")
            behind = crew.signature("plain").apply_async()
            assert crew.outcome(behind) == "SUCCESS"
            waiting = crew.send("wait")
            crew.until(lambda: waiting.state == "STARTED", "it waits")
            behind = crew.signature("plain").apply_async()
            assert crew.outcome(waiting) == "FAILURE"
            assert isinstance(waiting.result, LockNotAcquired)
            assert crew.outcome(behind) == "SUCCESS"
        assert crew.outcome(retrying) == "SUCCESS"


def test_c16_eager_tasks_take_the_same_lock(
    home: Path, crew_of: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks that run where they are sent hold the key, skip, refuse, and come to an end."""
    monkeypatch.setenv("DISTLOCK_TEST_STAGE", str(home))
    app = create({"task_always_eager": True, "task_eager_propagates": True})
    crew = crew_of(None, app)
    for name in ("early", "late", "retry", "unique"):
        result = app.tasks[f"{crew.store}.{name}"].delay(crew.key)
        assert result.state == "SUCCESS"
    leases = [each["lease"] for each in crew.stage.told("began")]
    assert leases[:3] == [crew.key] * 3
    assert not crew.is_taken()
    assert not crew.is_taken(crew.claim)
    with held_elsewhere(lock_of(crew)):
        assert marker(crew, app.tasks[f"{crew.store}.early"].delay(crew.key).result)
        with pytest.raises(LockNotAcquired):
            app.tasks[f"{crew.store}.raise"].delay(crew.key)
        with pytest.raises(LockNotAcquired):
            app.tasks[f"{crew.store}.retry_for_a_second"].delay(crew.key)
    assert len(crew.stage.told("began")) == 4


def test_c16_a_direct_call_takes_the_lock(prefork: Crew) -> None:
    """A task that is called as a function, by another one, is under its lock as well."""
    assert prefork.outcome(prefork.send("early", f"call {prefork.store}.raise")) == "SUCCESS"
    called = f"{prefork.key}:called"
    with held_elsewhere(lock_of(prefork, ":called")):
        result = prefork.send("early", f"call {prefork.store}.raise")
        assert prefork.outcome(result) == "FAILURE"
    assert isinstance(result.result, LockNotAcquired)
    assert not prefork.is_taken(called)
    assert len(prefork.stage.of(called).told("called")) == 1


def test_c17_a_child_runs_under_the_lease_of_its_parent(prefork: Crew) -> None:
    """Sent from the body, it has the parent's fence, while nobody else is granted the key."""
    result = prefork.send("inherited", f"send {prefork.store}.inherited", "wait go", "check")
    prefork.until(lambda: bool(prefork.stage.told("child")), "the child runs")
    prefork.until(lambda: len(prefork.stage.told("ended")) == 1, "the child has ended")
    parent, child = prefork.stage.told("began")
    assert parent["fence"] == child["fence"] is not None
    # The end of the child is not the end of the lease.
    assert prefork.is_taken()
    prefork.let_go(result)
    assert prefork.stage.told("held")
    prefork.becomes_free()


@pytest.mark.parametrize("store", ["redis"])
def test_c17_replacement_inherits_nothing(prefork: Crew) -> None:
    """Its sender does not wait for it: under that lease it would run beside it, and lose it."""
    result = prefork.send("inherited", "replace go")
    waits = f"{result.id} was redelivered and waits"
    replaced = partial(prefork.stage.told, "replaced")
    prefork.until(lambda: waits in prefork.worker.said() or bool(replaced()), "it has come")
    prefork.let_go(result)
    assert replaced()
    assert not prefork.stage.told("overlapped")


def test_c17_nothing_is_inherited_unasked(prefork: Crew) -> None:
    """Without `inherit`, a child of the same key meets its parent as anybody would."""
    result = prefork.send("not_inherited", f"send {prefork.store}.not_inherited", "wait go")
    prefork.until(lambda: bool(prefork.stage.told("refused")), "the child is refused")
    prefork.let_go(result)
    assert not prefork.stage.told("child", "overlapped")


def test_c18_spellings_of_a_call_are_one_key(prefork: Crew) -> None:
    """Positional or by name, in any order, with or without defaults, as object or as text."""
    one, day = UUID("1b4e28ba-2fa1-11d2-883f-0016d3cca427"), date(2026, 2, 28)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((prefork.key, one, day), {}),
        ((prefork.key, str(one), day.isoformat(), 3), {}),
        ((prefork.key,), {"day": day, "one": one}),
        ((), {"number": 3, "day": day, "one": str(one), "key": prefork.key}),
    ]
    keyed = prefork.task("keyed")
    for args, kwargs in calls:
        result = keyed.apply_async(args, kwargs, **prefork.to())
        assert prefork.outcome(result) == "SUCCESS"
    keys = {each["lease"] for each in prefork.stage.told("began")}
    assert keys == {f"{prefork.key}:{one}:{day}:3"}
