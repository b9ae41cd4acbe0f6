"""Tasks that are at most once queued or running. The numbers are those of the survey."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from unittest import mock

import pytest
from celery import Task, chain, chord
from django.db import transaction
from kombu.exceptions import EncodeError, OperationalError

from django_distlock import distlock, lock_backends
from django_distlock.core.keys import BACKLOG_PREFIX, UNIQUE_PREFIX, own_key
from tests.contract.helpers import Later
from tests.contract.locking import held_elsewhere, rolled_back
from tests.services import free_port

from .crews import Crew
from .project import create


def sends_again(crew: Crew, name: str = "unique") -> bool:
    """Say whether the task can be sent and runs, as what was sent before has left nothing."""
    began = len(crew.stage.told("began"))
    result = crew.send(name)
    return crew.outcome(result) == "SUCCESS" and len(crew.stage.told("began")) == began + 1


def test_duplicate_is_the_task_that_runs(prefork: Crew) -> None:
    """Whoever sends a task that is queued or running gets its result, and runs nothing."""
    first = prefork.send("unique", "wait go")
    duplicates = [prefork.send("unique")]
    prefork.begun()
    duplicates.append(prefork.send("unique"))
    assert [each.id for each in duplicates] == [first.id] * 2
    assert prefork.is_taken(prefork.claim)
    prefork.let_go(duplicates[0])
    prefork.becomes_free(prefork.claim)
    assert sends_again(prefork)
    assert len(prefork.stage.told("began")) == 2


def test_unique_task_is_sent_again_behind_each_ending(prefork: Crew) -> None:
    """However a run ends, the next one can be sent."""
    endings = ("raise oops", "ignore", "reject", "die")
    crews = {ending: prefork.beside(ending.partition(" ")[0]) for ending in endings}
    for ending, crew in crews.items():
        crew.send("unique", ending)
    for crew in crews.values():
        crew.begun()
        crew.becomes_free(crew.claim)
        assert sends_again(crew)


def test_unique_task_retries_itself(prefork: Crew) -> None:
    """Its own retry is no duplicate of it, and it stays unique in between."""
    result = prefork.send("unique", "retry 1")
    assert prefork.outcome(result) == "SUCCESS"
    runs = [(each["retries"], each["lease"]) for each in prefork.stage.told("began")]
    assert runs == [(0, prefork.claim), (1, prefork.claim)]
    prefork.becomes_free(prefork.claim)
    # Long before this one comes again.
    result = prefork.send("unique", "retry 300")
    prefork.until(lambda: len(prefork.stage.told("failed")) == 2, "the first run")
    assert prefork.is_taken(prefork.claim)
    assert prefork.send("unique").id == result.id


@pytest.mark.parametrize("store", ["redis"])
def test_unique_task_replaces_itself(prefork: Crew) -> None:
    """Its replacement is no duplicate of it, and it stays unique in between."""
    prefork.stage.open("go")
    result = prefork.send("unique", "replace go")
    assert prefork.outcome(result) == "SUCCESS"
    assert prefork.stage.told("replaced")
    prefork.becomes_free(prefork.claim)
    # Long before this one comes again.
    result = prefork.send("unique", "replace go 300")
    ignored = f"[{result.id}] ignored"
    prefork.until(lambda: ignored in prefork.worker.said(), "the first run")
    assert prefork.is_taken(prefork.claim)
    assert prefork.send("unique").id == result.id


@pytest.mark.parametrize("store", ["default"])
def test_unique_key_stays_between_automatic_retries(prefork: Crew) -> None:
    """Also where Celery retries by itself, behind the end of the body."""
    result = prefork.send("again", "fail_until 1")
    prefork.until(lambda: result.state == "RETRY", "it is queued again")
    assert prefork.is_taken(prefork.claim)
    assert prefork.send("again").id == result.id


#: Tasks that wait in their worker, and what the key of each one's claim begins with.
WAITING = [("unique_and_locked_wait", UNIQUE_PREFIX), ("bounded_wait", BACKLOG_PREFIX)]


def test_killed_task_that_waits_frees_its_claim(prefork: Crew) -> None:
    """At its hard time limit, or with its child, and acknowledged: its body has not begun."""
    claims = [own_key(prefix + prefork.key) for _, prefix in WAITING]
    with held_elsewhere(distlock(prefork.key, backend=prefork.store, ttl=60)):
        limited = [prefork.send(name, time_limit=1) for name, _ in WAITING]
        holders = [prefork.record(claim).holder.task_id for claim in claims]
        assert holders == [each.id for each in limited]
        assert [prefork.outcome(each) for each in limited] == ["FAILURE"] * len(WAITING)
        claims_end(prefork, claims)
        results = [prefork.send(name) for name, _ in WAITING]
        prefork.until(lambda: {each.state for each in results} == {"STARTED"}, "both wait")
        assert all(map(prefork.record, claims))
        for child in prefork.worker.children():
            os.kill(child, signal.SIGKILL)
        assert [prefork.outcome(each) for each in results] == ["FAILURE"] * len(WAITING)
        claims_end(prefork, claims)


@pytest.mark.parametrize("is_revoked", [True, False], ids=["revoked", "limit"])
def test_greenlet_killed_while_it_waits_frees_its_claims(gevent: Crew, *, is_revoked: bool) -> None:
    """No process ends there: what is raised in a greenlet is the end of its task."""
    claims = [own_key(prefix + gevent.key) for _, prefix in WAITING]
    options = {} if is_revoked else {"time_limit": 1}
    with held_elsewhere(distlock(gevent.key, backend=gevent.store, ttl=60)):
        results = [gevent.send(name, **options) for name, _ in WAITING]
        assert all(map(gevent.record, claims))
        gevent.until(lambda: "PENDING" not in {each.state for each in results}, "both wait")
        for each in results if is_revoked else []:
            each.revoke(terminate=True)
        ends = "REVOKED" if is_revoked else "FAILURE"
        assert [gevent.outcome(each) for each in results] == [ends] * len(WAITING)
        claims_end(gevent, claims)


def claims_end(crew: Crew, claims: Sequence[str]) -> None:
    """Wait until nothing is kept of any claim."""
    read = lock_backends[crew.store].read
    crew.until(lambda: not any(Later(read, each).result() for each in claims), "all are released")


@pytest.mark.skipif(
    not hasattr(Task, "retry_on_worker_lost"), reason="declared: Celery below 5.7 sends no retry"
)
def test_retry_of_a_lost_process_is_unique(prefork: Crew) -> None:
    """With `retry_on_worker_lost` the parent, which ends what the child held, sends the retry."""
    result = prefork.send("unique_retried", "die")
    prefork.until(lambda: result.state == "RETRY", "the retry is sent")
    assert prefork.send("unique_retried").id == result.id
    assert prefork.outcome(result) == "SUCCESS"
    assert len(prefork.stage.told("began")) == 2
    prefork.becomes_free(prefork.claim)


def test_unique_task_that_is_thrown_away_can_be_sent_again(prefork: Crew) -> None:
    """A message that a worker throws away, revoked or too old, takes its claim with it."""
    thrown = [(prefork.beside(name), name) for name in ("unique", "started")]
    expired = prefork.beside("expired")
    results = [crew.send(name, countdown=2) for crew, name in thrown]
    for each in results:
        each.revoke()
    results.append(expired.send("unique", countdown=2, expires=1))
    for (crew, name), result in zip([*thrown, (expired, "unique")], results, strict=True):
        assert crew.outcome(result) == "REVOKED"
        crew.becomes_free(crew.claim)
        assert sends_again(crew, name)


def test_unique_and_locked_are_two_keys(prefork: Crew) -> None:
    """A unique task that waits for its lock is still the one that is queued."""
    with held_elsewhere(distlock(prefork.key, backend=prefork.store, ttl=60)):
        result = prefork.send("unique_and_locked")
        prefork.until(lambda: len(prefork.stage.told("refused")) >= 3, "three attempts")
        assert prefork.send("unique_and_locked").id == result.id
    assert prefork.outcome(result) == "SUCCESS"
    assert len(prefork.stage.told("began")) == 1
    prefork.becomes_free(prefork.claim)
    assert not prefork.is_taken()


def to_nobody(crew: Crew) -> None:
    """Send by a broker that nobody can reach."""
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    with create({"broker_url": nowhere}) as app:
        app.tasks[f"{crew.store}.unique"].apply_async((crew.key,), **crew.to(retry=False))


def what_has_no_text(crew: Crew) -> None:
    """Send what cannot be encoded."""
    crew.task("unique").apply_async((crew.key, object()), **crew.to())


def interrupted(crew: Crew) -> None:
    """Press Ctrl-C meanwhile."""
    with mock.patch.object(crew.app.amqp, "send_task_message", side_effect=KeyboardInterrupt):
        crew.send("unique")


def test_c8_what_could_not_be_sent_leaves_no_claim(prefork: Crew) -> None:
    """The task can be sent later."""
    for send, error in (
        (to_nobody, OperationalError),
        (what_has_no_text, EncodeError),
        (interrupted, KeyboardInterrupt),
    ):
        with pytest.raises(error):
            send(prefork)
        assert not prefork.is_taken(prefork.claim)
    assert sends_again(prefork)


def test_c8_rollback_leaves_no_claim(prefork: Crew) -> None:
    """What is sent on commit claims its key then, and not before."""
    unique = prefork.task("unique")
    with rolled_back():
        unique.apply_async_on_commit((prefork.key,), **prefork.to())
        assert not prefork.is_taken(prefork.claim)
    assert not prefork.is_taken(prefork.claim)
    with transaction.atomic():
        unique.apply_async_on_commit((prefork.key, ["wait go"]), **prefork.to())
        assert not prefork.is_taken(prefork.claim)
    prefork.begun()
    assert prefork.is_taken(prefork.claim)
    prefork.stage.open("go")
    prefork.becomes_free(prefork.claim)


def test_c9_claim_outlives_the_countdown(prefork: Crew) -> None:
    """A task that shall run later than its ttl is unique until it has run."""
    result = prefork.send("unique_brief", "wait go", countdown=5)
    # The ttl and the grace are over long ago.
    assert prefork.stays_taken(3.5, prefork.claim)
    assert prefork.send("unique_brief").id == result.id
    prefork.let_go(result)
    assert len(prefork.stage.told("began")) == 1
    prefork.becomes_free(prefork.claim)


def test_what_a_canvas_waits_for_is_sent_though_the_key_is_taken(prefork: Crew) -> None:
    """The last of a chain, the body of a chord and a callback are skipped when they come.

    So is what has an id that its caller chose, and may have told to somebody who waits for it.
    """
    holder = prefork.send("unique", "wait go")
    prefork.begun()
    first = prefork.task("collect").si([], prefork.key).set(**prefork.to())
    ends = [
        chain(first, prefork.signature("unique"), app=prefork.app).apply_async(),
        chord([first, first], app=prefork.app)(prefork.signature("unique")),
    ]
    callback = prefork.signature("unique")
    ends.append(callback.freeze())
    first.clone().apply_async(link=callback)
    behind = prefork.task("collect").s(prefork.key).set(**prefork.to())
    first.clone().apply_async(link=chain(prefork.signature("unique"), behind, app=prefork.app))
    ends.append(prefork.send("unique", task_id=f"{prefork.key}-named"))
    assert ends[-1].id == f"{prefork.key}-named"
    assert [prefork.outcome(each) for each in ends] == ["SUCCESS"] * 4
    assert all(each.result["distlock"] == "skipped" for each in ends)
    assert {each.result["holder"]["task_id"] for each in ends} == {holder.id}
    prefork.until(lambda: len(prefork.stage.told("collected")) == 6, "what is behind the callback")
    prefork.let_go(holder)
    assert len(prefork.stage.told("began")) == 1
    # A moment behind its result, which is seen at once.
    prefork.becomes_free(prefork.claim)
    assert sends_again(prefork)


def test_refused_unique_task_frees_its_key(prefork: Crew) -> None:
    """A task that is over because somebody else has its lock swallows nothing sent later."""
    for ending, state in (("raise", "FAILURE"), ("skip", "SUCCESS")):
        crew, name = prefork.beside(ending), f"unique_and_locked_{ending}"
        with held_elsewhere(distlock(crew.key, backend=crew.store, ttl=60)):
            result = crew.send(name)
            assert crew.outcome(result) == state
            crew.becomes_free(crew.claim)
        again = crew.send(name)
        assert again.id != result.id
        assert crew.outcome(again) == "SUCCESS"
        assert len(crew.stage.told("began")) == 1
