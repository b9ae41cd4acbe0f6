"""Tasks that are at most once queued or running. The numbers are those of the survey."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord
from django.db import transaction
from kombu.exceptions import EncodeError, OperationalError

from django_distlock import distlock
from django_distlock.core.keys import own_key
from tests.contract.locking import held_elsewhere, rolled_back
from tests.services import free_port

from .brokers import Broker
from .crews import Crew
from .project import create


@pytest.fixture
def unreachable(broker: Broker) -> Iterator[Celery]:
    """Give an app whose broker nobody can reach."""
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    with create({**broker.settings, "broker_url": nowhere}) as app:
        yield app


def unique_key(crew: Crew) -> str:
    """Return the key of what is queued or running."""
    return own_key(f"unique:{crew.key}")


def sends_again(crew: Crew) -> bool:
    """Say whether the task can be sent and runs, as what was sent before has left nothing."""
    began = len(crew.stage.told("began"))
    result = crew.send("unique")
    return crew.outcome(result) == "SUCCESS" and len(crew.stage.told("began")) == began + 1


def test_duplicate_is_the_task_that_runs(prefork: Crew) -> None:
    """Whoever sends a task that is queued or running gets its result, and runs nothing."""
    first = prefork.send("unique", "wait go")
    duplicates = [prefork.send("unique")]
    prefork.begun()
    duplicates.append(prefork.send("unique"))
    assert [each.id for each in duplicates] == [first.id] * 2
    assert prefork.is_taken(unique_key(prefork))
    prefork.stage.open("go")
    assert prefork.outcome(duplicates[0]) == "SUCCESS"
    assert prefork.is_free_within(2, unique_key(prefork))
    assert sends_again(prefork)
    assert len(prefork.stage.told("began")) == 2


@pytest.mark.parametrize("ending", ["raise oops", "ignore", "reject", "die"])
def test_unique_task_is_sent_again_behind_each_ending(prefork: Crew, ending: str) -> None:
    """However a run ends, the next one can be sent."""
    prefork.send("unique", ending)
    prefork.begun()
    assert prefork.is_free_within(8, unique_key(prefork))
    assert sends_again(prefork)


def test_unique_task_retries_itself(prefork: Crew) -> None:
    """Its own retry is no duplicate of it, and it stays unique in between."""
    result = prefork.send("unique", "retry 2")
    prefork.until(lambda: bool(prefork.stage.told("failed")), "the first run")
    assert prefork.is_taken(unique_key(prefork))
    assert prefork.send("unique").id == result.id
    assert prefork.outcome(result) == "SUCCESS"
    assert [each["retries"] for each in prefork.stage.told("began")] == [0, 1]
    assert prefork.is_free_within(2, unique_key(prefork))


def test_unique_task_that_is_revoked_can_be_sent_again(prefork: Crew) -> None:
    """A message that a worker throws away takes its claim with it."""
    result = prefork.send("unique", countdown=2)
    result.revoke()
    assert prefork.outcome(result) == "REVOKED"
    assert prefork.is_free_within(5, unique_key(prefork))
    assert sends_again(prefork)


def test_unique_task_that_expires_can_be_sent_again(prefork: Crew) -> None:
    """The same for a message that is too old when its time comes."""
    result = prefork.send("unique", countdown=2, expires=1)
    assert prefork.outcome(result) == "REVOKED"
    assert prefork.is_free_within(5, unique_key(prefork))
    assert sends_again(prefork)


def test_unique_and_locked_are_two_keys(prefork: Crew) -> None:
    """A unique task that waits for its lock is still the one that is queued."""
    with held_elsewhere(distlock(prefork.key, backend=prefork.store, ttl=60)):
        result = prefork.send("unique_and_locked")
        prefork.until(lambda: len(prefork.stage.told("refused")) >= 3, "three attempts")
        assert prefork.send("unique_and_locked").id == result.id
    assert prefork.outcome(result) == "SUCCESS"
    assert len(prefork.stage.told("began")) == 1
    assert prefork.is_free_within(2, unique_key(prefork))
    assert not prefork.is_taken()


def test_c8_broker_that_is_away_leaves_no_claim(prefork: Crew, unreachable: Celery) -> None:
    """A task that could not be sent can be sent, once the broker is back."""
    with pytest.raises(OperationalError):
        unreachable.tasks[f"{prefork.store}.unique"].apply_async(
            (prefork.key,), **prefork.to(retry=False)
        )
    assert not prefork.is_taken(unique_key(prefork))
    assert sends_again(prefork)


def test_c8_message_that_cannot_be_made_leaves_no_claim(prefork: Crew) -> None:
    """The same for arguments that cannot be encoded."""
    with pytest.raises(EncodeError):
        prefork.task("unique").apply_async((prefork.key, object()), **prefork.to())
    assert not prefork.is_taken(unique_key(prefork))
    assert sends_again(prefork)


def test_c8_interrupted_sender_leaves_no_claim(
    prefork: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for Ctrl-C."""

    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(prefork.app.amqp, "send_task_message", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prefork.send("unique")
    assert not prefork.is_taken(unique_key(prefork))
    assert sends_again(prefork)


def test_c8_rollback_leaves_no_claim(prefork: Crew) -> None:
    """What is sent on commit claims its key then, and not before."""
    unique = prefork.task("unique")
    with rolled_back():
        unique.apply_async_on_commit((prefork.key,), **prefork.to())
        assert not prefork.is_taken(unique_key(prefork))
    assert not prefork.is_taken(unique_key(prefork))
    with transaction.atomic():
        unique.apply_async_on_commit((prefork.key, ["wait go"]), **prefork.to())
        assert not prefork.is_taken(unique_key(prefork))
    prefork.begun()
    assert prefork.is_taken(unique_key(prefork))
    prefork.stage.open("go")
    assert prefork.is_free_within(5, unique_key(prefork))


def test_c9_claim_outlives_the_countdown(prefork: Crew) -> None:
    """A task that shall run later than its ttl is unique until it has run."""
    result = prefork.send("unique_brief", countdown=5)
    # The ttl and the grace are over long ago.
    assert not prefork.is_free_within(3.5, unique_key(prefork))
    assert prefork.send("unique_brief").id == result.id
    assert prefork.outcome(result) == "SUCCESS"
    assert len(prefork.stage.told("began")) == 1
    assert prefork.is_free_within(2, unique_key(prefork))


def test_what_a_canvas_waits_for_is_sent_though_the_key_is_taken(prefork: Crew) -> None:
    """The last of a chain, the body of a chord and a callback are skipped when they come."""
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
    assert [prefork.outcome(each) for each in ends] == ["SUCCESS"] * 3
    assert all(each.result["distlock"] == "skipped" for each in ends)
    assert {each.result["holder"]["task_id"] for each in ends} == {holder.id}
    prefork.until(lambda: len(prefork.stage.told("collected")) == 6, "what is behind the callback")
    prefork.stage.open("go")
    assert prefork.outcome(holder) == "SUCCESS"
    assert len(prefork.stage.told("began")) == 1
    assert sends_again(prefork)


def test_caller_of_an_id_gets_that_task(prefork: Crew) -> None:
    """Whoever chooses the id may have told it to somebody, who waits for it."""
    holder = prefork.send("unique", "wait go")
    prefork.begun()
    named = prefork.send("unique", task_id=f"{prefork.key}-named")
    assert named.id == f"{prefork.key}-named"
    assert prefork.outcome(named) == "SUCCESS"
    assert named.result["distlock"] == "skipped"
    prefork.stage.open("go")
    assert prefork.outcome(holder) == "SUCCESS"
    assert len(prefork.stage.told("began")) == 1


@pytest.mark.parametrize("name", ["unique_and_locked_raise", "unique_and_locked_skip"])
def test_refused_unique_task_frees_its_key(prefork: Crew, name: str) -> None:
    """A task that is over because somebody else has its lock swallows nothing sent later."""
    with held_elsewhere(distlock(prefork.key, backend=prefork.store, ttl=60)):
        result = prefork.send(name)
        ending = "FAILURE" if name.endswith("raise") else "SUCCESS"
        assert prefork.outcome(result) == ending
        assert prefork.is_free_within(5, unique_key(prefork))
    again = prefork.send(name)
    assert again.id != result.id
    assert prefork.outcome(again) == "SUCCESS"
    assert len(prefork.stage.told("began")) == 1
