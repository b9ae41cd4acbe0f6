"""Two limits at once, and a backlog with an end: what a worker does with them."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, chain

from django_distlock import (
    InvalidArgument,
    LockNotAcquired,
    LockUsageError,
    distlock,
    lock_backends,
)
from django_distlock.contrib.celery import locked_task
from django_distlock.core.keys import own_key
from tests.contract.helpers import Later
from tests.contract.locking import held_elsewhere

from .crews import Crew


def places(crew: Crew) -> list[Any]:
    """Return what waits behind the key, by the store."""
    key = own_key(f"queue:{crew.key}")
    store = lock_backends[crew.store]
    record = Later(store.read, key).result()
    if record is None:
        return []
    return list(Later(store.records.sharing, key).result()) if record.shared else [record]


def no_place_is_left(crew: Crew) -> None:
    """Wait until nothing waits behind the key."""
    crew.until(lambda: not places(crew), "no place is taken")


def test_two_limits_all_or_none(prefork: Crew) -> None:
    """What lacks one of them holds none of the other, goes back to the queue, and runs in time."""
    shared = distlock(f"{prefork.key}:shared", backend=prefork.store, ttl=60)
    with held_elsewhere(shared):
        result = prefork.send("limited")
        prefork.until(lambda: result.state == "RETRY", "it is queued again")
        prefork.becomes_free()
        assert not prefork.stage.told("began")
    assert prefork.outcome(result) == "SUCCESS"
    prefork.becomes_free()
    prefork.becomes_free(shared.key)


def test_narrower_limit_holds_among_tasks(prefork: Crew) -> None:
    """Two permits of the one key do not let two past the other; all of them run."""
    results = [prefork.send("limited", "sleep 0.3") for _ in range(4)]
    assert [prefork.outcome(each) for each in results] == ["SUCCESS"] * 4
    assert len(prefork.stage.told("ended")) == 4
    assert not prefork.stage.told("overlapped")


def test_killed_child_gives_all_of_its_limits_back(prefork: Crew) -> None:
    """Long before their time: the parent sees its death. The task comes again if it is to."""
    late = prefork.beside("late")
    results = [
        crew.send(name, "die", "tell survived")
        for crew, name in ((prefork, "limited"), (late, "limited_late"))
    ]
    assert [prefork.outcome(each) for each in results] == ["FAILURE", "SUCCESS"]
    assert not prefork.stage.told("survived")
    assert len(late.stage.told("survived")) == 1
    for crew in (prefork, late):
        assert not crew.stage.told("overlapped")
        crew.becomes_free()
        crew.becomes_free(f"{crew.key}:shared")


def test_full_backlog_raises(prefork: Crew) -> None:
    """One runs and two wait: the next one is refused, until one of those has begun."""
    first = prefork.send("bounded", "wait go")
    prefork.begun()
    waiting = [prefork.send("bounded", "wait go") for _ in range(2)]
    assert len(places(prefork)) == 2
    for _ in range(2):
        with pytest.raises(LockNotAcquired) as caught:
            prefork.send("bounded", "tell one too many")
        assert caught.value.code == "backlog_full"
    assert len(places(prefork)) == 2
    prefork.let_go(first, *waiting)
    no_place_is_left(prefork)
    assert prefork.outcome(prefork.send("bounded")) == "SUCCESS"
    assert not prefork.stage.told("overlapped", "one too many")


def test_full_backlog_drops(prefork: Crew) -> None:
    """The call is not queued, and its result says so; in a chain it is sent, and skipped."""
    first = prefork.send("bounded_drop", "wait go")
    prefork.begun()
    waiting = [prefork.send("bounded_drop") for _ in range(2)]
    dropped = prefork.send("bounded_drop", "tell dropped")
    assert (dropped.get()["distlock"], dropped.get()["why"]) == ("skipped", "backlog_full")
    name = prefork.task("bounded_drop").name
    last = chain(
        prefork.signature("bounded_drop", "tell dropped"),
        prefork.app.signature("collect", (prefork.key,)).set(**prefork.to()),
    ).apply_async()
    prefork.until(lambda: bool(prefork.stage.told("collected")), "the chain has gone on")
    assert prefork.stage.told("collected")[0]["results"]["why"] == "backlog_full", name
    prefork.stage.open("go")
    ended = (first, *waiting, last)
    assert [prefork.outcome(each) for each in ended] == ["SUCCESS"] * 4
    no_place_is_left(prefork)
    assert not prefork.stage.told("dropped")


def test_full_backlog_replaces_the_oldest(prefork: Crew) -> None:
    """The newest ones run; each of those before ends with a marker, and is not lost unseen."""
    first = prefork.send("bounded_replace", "wait go")
    prefork.begun()
    sent = [prefork.send("bounded_replace", f"tell number {number}") for number in range(5)]
    assert len(places(prefork)) == 2
    prefork.let_go(first, *sent)
    told = sorted(each["event"] for each in prefork.stage.told("number 0", "number 1", "number 2"))
    assert told == []
    assert len(prefork.stage.told("number 3", "number 4")) == 2
    assert [each.result.get("why") for each in sent[:3]] == ["superseded"] * 3
    no_place_is_left(prefork)


def test_unique_call_that_finds_no_place_is_not_queued(prefork: Crew) -> None:
    """It gives its unique key back, so that it may be called again."""
    first = prefork.send("bounded_unique", "wait go")
    prefork.begun()
    waiting = [prefork.send("bounded_unique", f"tell {number}") for number in "ab"]
    assert prefork.send("bounded_unique", "tell a").id == waiting[0].id
    assert prefork.send("bounded_unique", "tell c").get()["why"] == "backlog_full"
    prefork.let_go(first, *waiting)
    assert prefork.outcome(prefork.send("bounded_unique", "tell c")) == "SUCCESS"
    assert [len(prefork.stage.told(each)) for each in "abc"] == [1, 1, 1]
    no_place_is_left(prefork)


def test_call_that_cannot_be_sent_keeps_no_place(prefork: Crew) -> None:
    """Nor does one that is revoked before it began."""
    with pytest.raises(Exception, match="serializ"):
        prefork.task("bounded").apply_async((prefork.key, [object()]), **prefork.to())
    assert not places(prefork)
    with held_elsewhere(distlock(prefork.key, backend=prefork.store, ttl=60)):
        result = prefork.send("bounded")
        prefork.until(lambda: result.state == "RETRY", "it waits")
        assert len(places(prefork)) == 1
        result.revoke()
        no_place_is_left(prefork)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"lock": "k", "locks": ["k"]}, "not both"),
        ({"locks": []}, "list of keys and permits"),
        ({"locks": [("k", 0)]}, "from 1 to 10,000, not 0"),
        ({"locks": [("k", 2)], "permits": 3}, "leave permits out"),
        ({"locks": [("k", 2)], "inherit": True}, "inherit works with one lock"),
        ({"locks": [("k", 2)], "steal_if_dead": True}, "steal_if_dead"),
        ({"lock": "k", "max_queued": 0}, "max_queued must be an int from 1"),
        ({"lock": "k", "on_full": "drop"}, "requires max_queued="),
        ({"lock": "k", "max_queued": 1, "on_full": "wait"}, "on_full must be one of"),
        ({"unique": "k", "max_queued": 1}, "requires lock= or locks="),
        ({"unique": "k", "permits": 3}, "permits applies to the lock of a run"),
        (
            {"lock": "k", "unique": "k", "debounce": 5, "max_queued": 1},
            "cannot be combined with debounce",
        ),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, Any], rule: str) -> None:
    """They are refused where the decorator stands, and named."""
    with pytest.raises(InvalidArgument, match=rule):
        locked_task(**options)(lambda: None)


def test_backlog_needs_the_base() -> None:
    """Without it nobody would count what is queued."""
    app = Celery("without", set_as_current=False)

    @app.task(name="without.base")
    @locked_task("k", max_queued=1)
    def body() -> None:
        pass

    with pytest.raises(LockUsageError, match="has max_queued, but only LockedTask"):
        body.apply(throw=True)
