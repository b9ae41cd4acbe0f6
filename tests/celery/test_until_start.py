"""Tasks that are at most once queued, until they start: what is called meanwhile runs behind."""

from __future__ import annotations

from typing import Any

import pytest
from celery import group

from django_distlock import distlock, lock_backends
from django_distlock.contrib.celery import LockedTask, locked_task
from django_distlock.core.errors import InvalidArgument
from django_distlock.core.keys import own_key
from tests.contract.locking import held_elsewhere

from .crews import Crew

KINDS = ["started", "started_late", "started_and_locked"]


def ended(crew: Crew, times: int) -> None:
    """Wait until so many runs have ended, none beside another one."""
    crew.until(lambda: len(crew.stage.told("ended")) == times, f"{times} runs have ended")
    assert not crew.stage.told("overlapped")


@pytest.mark.parametrize("name", KINDS)
def test_calls_from_the_running_body_are_queued_once(prefork: Crew, name: str) -> None:
    """What the body sends of its own kind is one task more, behind it."""
    send = f"send {prefork.store}.{name}"
    result = prefork.send(name, send, "tell sent", send, send, "wait go")
    prefork.until(lambda: bool(prefork.stage.told("sent")), "it has sent one")
    prefork.until(lambda: prefork.is_taken(prefork.claim), "one is queued")
    prefork.until(lambda: bool(prefork.stage.told("refused", "child")), "it has met the run")
    assert not prefork.stage.told("child")
    prefork.let_go(result)
    ended(prefork, 2)
    prefork.becomes_free(prefork.claim)
    assert len(prefork.stage.told("child")) == 1


@pytest.mark.parametrize("name", KINDS)
def test_call_amid_a_run_is_queued_once(prefork: Crew, name: str) -> None:
    """Whoever calls while it runs gets one further task, and calls while that waits join it."""
    first = prefork.send(name, "wait go")
    prefork.begun()
    later = [prefork.send(name, "tell later") for _ in range(3)]
    assert len({each.id for each in later}) == 1
    assert later[0].id != first.id
    prefork.until(lambda: bool(prefork.stage.told("refused", "later")), "it has met the run")
    prefork.let_go(first, later[0])
    ended(prefork, 2)
    assert len(prefork.stage.told("later")) == 1
    assert not prefork.is_taken(prefork.claim)


def test_task_that_waits_for_its_lock_has_not_started(prefork: Crew) -> None:
    """It is still the one that is queued, for it has seen nothing yet."""
    with held_elsewhere(distlock(prefork.key, backend=prefork.store, ttl=60)):
        first = prefork.send("started_and_locked")
        prefork.until(lambda: len(prefork.stage.told("refused")) >= 3, "three attempts")
        assert prefork.send("started_and_locked").id == first.id
    assert prefork.outcome(first) == "SUCCESS"
    ended(prefork, 1)
    assert not prefork.is_taken(prefork.claim)


@pytest.mark.parametrize("is_begun", [True, False], ids=["amid the body", "before it starts"])
def test_killed_run_comes_again(prefork: Crew, *, is_begun: bool) -> None:
    """What is delivered again runs, whoever has been queued meanwhile, and nothing is left."""
    if not is_begun:
        prefork.stage.open("doomed")
    first = prefork.send("started_late", *(["wait go", "die"] if is_begun else []))
    if is_begun:
        prefork.begun()
        later = prefork.send("started_late")
        assert later.id != first.id
        prefork.let_go(later)
    assert prefork.outcome(first) == "SUCCESS"
    ended(prefork, 2 if is_begun else 1)
    assert (
        f"its task {first.id} had not started before its process died" not in prefork.worker.said()
    )
    prefork.becomes_free(prefork.claim)
    prefork.becomes_free(own_key(f"runs:{prefork.key}"))


def test_killed_task_that_comes_no_more_leaves_no_claim(prefork: Crew) -> None:
    """Killed before its start, and acknowledged: who calls later is queued."""
    prefork.stage.open("doomed")
    assert prefork.outcome(prefork.send("started")) == "FAILURE"
    prefork.becomes_free(prefork.claim)
    assert "had not started before its process died" in prefork.worker.said()
    assert prefork.outcome(prefork.send("started")) == "SUCCESS"
    ended(prefork, 1)


def test_runs_side_by_side_if_asked_to(prefork: Crew) -> None:
    """A run beside another one has started, too: what is called behind that is queued."""
    results = [prefork.send("started_beside", "wait go")]
    prefork.begun()
    results.append(prefork.send("started_beside", "wait go"))
    prefork.begun(2)
    prefork.becomes_free(prefork.claim)
    results.append(prefork.send("started_beside", "wait go"))
    assert len({each.id for each in results}) == 3
    prefork.begun(3)
    prefork.let_go(*results)


def test_retry_is_queued_as_others_are(prefork: Crew) -> None:
    """Until it starts, calls join it; where one has been called before, both run."""
    result = prefork.send("started", "retry 300")
    prefork.until(lambda: result.state == "RETRY", "it is queued again")
    assert prefork.send("started").id == result.id
    assert len(prefork.stage.told("began")) == 1


def test_retry_beside_another_call_runs(prefork: Crew) -> None:
    """A run that has called its task, and fails then, comes again as well."""
    result = prefork.send("started", f"send {prefork.store}.started", "retry 1")
    assert prefork.outcome(result) == "SUCCESS"
    prefork.until(lambda: len(prefork.stage.told("ended")) >= 2, "retry and child")
    assert [each["retries"] for each in prefork.stage.told("began", task_id=result.id)] == [0, 1]
    assert prefork.stage.told("child")
    prefork.becomes_free(prefork.claim)


def test_parts_of_a_group_run_one_behind_another(prefork: Crew) -> None:
    """Somebody waits for each of them: none is left out."""
    parts = [prefork.signature("started", f"tell {number}") for number in range(3)]
    result = group(parts, app=prefork.app).apply_async()
    prefork.until(result.ready, "all have run")
    assert result.successful()
    ended(prefork, 3)
    assert not prefork.is_taken(prefork.claim)


def test_one_call_says_how_long_it_keeps_its_key(prefork: Crew) -> None:
    """The key of this one is free earlier than that of others, behind its countdown."""
    store, nowhere = lock_backends[prefork.store], {"queue": f"nowhere-{prefork.key}"}
    for name in ("unique", "started"):
        prefork.send(name, unique_ttl=120, **nowhere)
        assert prefork.record(prefork.claim).ttl == 120
        store.force_release(prefork.claim)
        prefork.send(name, unique_ttl=1, countdown=60, **nowhere)
        assert 60 < (prefork.record(prefork.claim).ttl or 0) <= 61
        store.force_release(prefork.claim)
        first = prefork.send(name, unique_ttl=0.1, **nowhere)
        prefork.becomes_free(prefork.claim)
        assert prefork.send(name, **nowhere).id != first.id
        store.force_release(prefork.claim)


@pytest.mark.parametrize("store", ["default"])
def test_wrong_times_are_refused(prefork: Crew) -> None:
    """Before anything is queued."""
    unique, plain = prefork.task("unique"), LockedTask()
    plain.name = "nobody"
    wrong: list[tuple[Any, Any, str]] = [
        (unique, 0, "unique_ttl"),
        (unique, "1", "unique_ttl"),
        (plain, 120, "is not unique"),
    ]
    for task, unique_ttl, says in wrong:
        with pytest.raises(InvalidArgument, match=says):
            task.apply_async((prefork.key,), unique_ttl=unique_ttl)
    assert not prefork.is_taken(prefork.claim)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"unique_until": "start"}, "unique_until requires unique="),
        ({"unique": "{key}", "unique_until": "begin"}, "unique_until must be one of"),
        ({"unique": "{key}", "unique_until": "start", "on_conflict": "skip"}, "on_conflict='skip'"),
        ({"debounce": 30}, "debounce requires unique="),
        ({"unique": "{key}", "debounce": 0.5}, "debounce"),
        ({"unique": "{key}", "debounce": 30, "unique_until": "done"}, "requires unique_until"),
        ({"unique": "{key}", "debounce": 30, "on_conflict": "skip"}, "on_conflict='skip'"),
        ({"unique": "{key}", "debounce": 30, "on_conflict": "run"}, "on_conflict='run'"),
    ],
)
def test_wrong_terms_are_refused(options: dict[str, Any], says: str) -> None:
    """They name what is wrong, when the module is imported."""
    with pytest.raises(InvalidArgument, match=says):

        @locked_task(**options)
        def work(key: str) -> None: ...
