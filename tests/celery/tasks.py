"""Tasks whose locks are tested, each on each store: `default.skip`, `redis.skip` and so on.

`shared_task` gives them to every Celery app of a process: the one of a worker, those of the tests.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import date
from typing import Any

from celery import shared_task

from django_distlock import Retry
from django_distlock.contrib.celery import LockedTask, locked_task

from .acting import play, stage_of

STORES = ("default", "redis")
#: Seconds that the lease of most tasks lives: longer than any test would wait for its end.
LONG = 300
#: Seconds of a lease whose end a test waits for; renewed at each third.
SHORT = 3
#: How tasks ask again whose tests wait for it.
SOON = Retry(delay=0.2, factor=1.5, cap=0.6)


#: What is delivered again if the process of its run dies.
LATE = {"acks_late": True, "reject_on_worker_lost": True}


def _act(name: str, task: dict[str, Any], **options: Any) -> None:
    """Make a task that plays what it is told, on each store."""
    for store in STORES:

        @shared_task(name=f"{store}.{name}", bind=True, **task)
        @locked_task(**{"lock": "{key}", "backend": store, "ttl": LONG, **options})
        def played(self: Any, key: str, steps: Sequence[str] = ()) -> Any:
            return play(self, key, steps)


_act("early", {})
_act("short", {}, ttl=SHORT)
_act("hasty", {}, grace=0.2)
_act("late", LATE, retry=SOON)
_act("late_wait", {"acks_late": True}, on_conflict="wait", retry=SOON)
_act("late_run", {"acks_late": True}, on_conflict="run", retry=SOON)
_act("late_short", LATE, ttl=SHORT, retry=SOON)
_act("late_permit", {"acks_late": True}, permits=2, retry=SOON)
_act("permit", {}, permits=2, on_conflict="retry", retry=SOON)
_act("permit_late", LATE, permits=2, ttl=SHORT, on_conflict="retry", retry=SOON)
_act("raise", {}, on_conflict="raise")
_act("wait", {}, on_conflict="wait")
_act("retry", {"max_retries": 0}, on_conflict="retry", retry=SOON)
_act("retry_at_once", {}, on_conflict="retry", retry=Retry(delay=0.01, cap=0.01))
_act("retry_for_a_second", {}, on_conflict="retry", retry=SOON, max_wait=1)
_act("hold", {}, ttl=SHORT, hold=True)
_act("min_hold", {}, min_hold=SHORT)
_act(
    "auto", {"autoretry_for": (ConnectionError,), "retry_backoff": False, "default_retry_delay": 1}
)
_act("inherited", {}, inherit=True, on_conflict="raise")
_act("not_inherited", {}, inherit=False, on_conflict="raise")


def _act_unique(name: str, task: dict[str, Any], **options: Any) -> None:
    """The same, at most once queued or running."""
    _act(name, {"base": LockedTask, **task}, **{"lock": None, "unique": "{key}", **options})


_act_unique("unique", {})
_act_unique("unique_brief", {}, ttl=1, unique_ttl=1)
_act_unique("unique_late", LATE, retry=SOON)
_act_unique("unique_retried", {"retry_on_worker_lost": True, "default_retry_delay": 3})
_act_unique("unique_late_second", {"acks_late": True}, retry=SOON, max_wait=1)
_act_unique("unique_and_locked", {}, lock="{key}", on_conflict="retry", retry=SOON)
_act_unique("unique_and_locked_raise", {}, lock="{key}", on_conflict="raise")
_act_unique("unique_and_locked_wait", {}, lock="{key}", on_conflict="wait", wait=30)
_act_unique("unique_and_locked_skip", {}, lock="{key}", on_conflict="skip")

_STARTED: dict[str, Any] = {"unique_until": "start", "retry": SOON}
_act_unique("started", {}, **_STARTED)
_act_unique("started_late", LATE, **_STARTED)
_act_unique("started_short", LATE, ttl=SHORT, **_STARTED)
_act_unique("started_beside", {}, on_conflict="run", **_STARTED)
_act_unique("started_and_locked", {}, lock="{key}", **_STARTED)
_LAST: dict[str, Any] = {"debounce": 2, "retry": SOON}
_act_unique("last", {}, **_LAST)
_act_unique("last_late", LATE, **_LAST)
_act_unique("last_short", LATE, ttl=SHORT, **_LAST)
_act_unique("last_pickled", {"serializer": "pickle"}, **_LAST)
_act_unique("last_and_locked", {}, lock="{key}", **_LAST)
_act_unique("last_that_waits", {}, lock="{key}", on_conflict="wait", wait=30, **_LAST)

#: Two limits: one of the key, and a narrower one that all share.
_LIMITED: dict[str, Any] = {
    "lock": None,
    "locks": [("{key}", lambda key, steps=(): 2), "{key}:shared"],
    "on_conflict": "retry",
    "retry": SOON,
}
_act("limited", {}, **_LIMITED)
_act("limited_late", LATE, **_LIMITED)


def _act_bounded(name: str, **options: Any) -> None:
    """The same, one at a time, of which two may wait."""
    again = {"on_conflict": "retry", "retry": SOON, **options}
    _act(name, {"base": LockedTask}, max_queued=2, **again)


_act_bounded("bounded")
_act_bounded("bounded_wait", on_conflict="wait", wait=30)
_act_bounded("bounded_drop", on_full="drop")
_act_bounded("bounded_replace", on_full="replace")
_act_bounded("bounded_unique", unique=lambda key, steps=(): ":".join((key, *steps)), on_full="drop")


@shared_task(name="plain", bind=True, **LATE)
def plain(self: Any, key: str, steps: Sequence[str] = ()) -> Any:
    """Play without a lock."""
    return play(self, key, steps)


for _store in STORES:

    @shared_task(name=f"{_store}.keyed", bind=True)
    @locked_task("{key}:{one}:{day}:{number}", backend=_store, ttl=LONG, on_conflict="raise")
    def keyed(self: Any, key: str, one: uuid.UUID | str, day: date | str, number: int = 3) -> Any:
        """Play under a key of several arguments."""
        return play(self, key, [])


@shared_task(name="called", bind=True)
@locked_task(lambda key, steps: f"{key}:called", ttl=LONG)
def called(self: Any, key: str, steps: Sequence[str]) -> Any:
    """Play under a key that a function makes."""
    return play(self, key, steps)


@shared_task(
    name="again", bind=True, base=LockedTask, autoretry_for=(ConnectionError,),
    retry_backoff=False, default_retry_delay=LONG, retry_kwargs={"max_retries": 1},
)  # fmt: skip
@locked_task(unique="{key}", ttl=LONG)
def again(self: Any, key: str, steps: Sequence[str] = ()) -> Any:
    """Play, and try again if it fails."""
    return play(self, key, steps)


@shared_task(name="collect")
def collect(results: Any, key: str) -> Any:
    """Be what follows in a chord or a chain."""
    stage_of(key).tell("collected", results=results)
    return results
