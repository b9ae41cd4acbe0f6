"""What is held, over all backends: pages, filters, and backends that cannot be asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from django.conf import settings
from django.test import override_settings

from django_distlock import InvalidArgument, InvalidLockBackend, distlock, lock_backends
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant, Holder
from django_distlock.inspection import HeldKey, LockPage, State, list_locks
from django_distlock.models import HeldLock
from tests.contract.helpers import take, there

from .operating import ALIASES, DEAD


class Deaf(MemoryBackend):
    """A backend that cannot list."""

    supports_listing: ClassVar[bool] = False


@pytest.fixture
def taken(key: str) -> Iterator[dict[str, list[Grant]]]:
    """Hold three keys on each of several backends."""
    grants: dict[str, list[Grant]] = {}
    for alias in ALIASES:
        for number in range(3):
            holder = Holder(host=f"host-{number}", pid=4711, task_id=f"{key}-task-{number % 2}")
            answer = take(lock_backends[alias], f"{key}:{number}", 60, holder=holder)
            grants.setdefault(alias, []).append(answer)
    yield grants
    for alias, each in grants.items():
        for grant in each:
            lock_backends[alias].release(grant)


def everything(limit: int, **filters: Any) -> list[HeldKey]:
    """List through all pages; each is as large as it may be."""
    found: list[HeldKey] = []
    cursor = None
    while True:
        page = list_locks(cursor=cursor, limit=limit, **filters)
        assert page.failures == ()
        assert len(page.locks) <= limit
        found += page.locks
        if (cursor := page.cursor) is None:
            return found
        assert re.fullmatch(r"[\w-]+", cursor, re.ASCII)


def test_pages_show_each_lock_of_each_backend_once(taken: dict[str, list[Grant]], key: str) -> None:
    """However large the pages are, and wherever one backend ends and the next begins."""
    fences = {(alias, grant.key): grant.fence for alias, all_ in taken.items() for grant in all_}
    for limit in (1, 2, 3, 4, 100):
        found = everything(limit, backends=ALIASES, prefix=key)
        assert {(each.backend, each.key): each.fence for each in found} == fences
        # While others come and go, Redis may show a lock twice.
        once = [each.key for each in found if not each.backend.startswith("redis")]
        assert len(once) == sum(not alias.startswith("redis") for alias, _key in fences)


def test_all_backends_are_asked_unless_told(taken: dict[str, list[Grant]], key: str) -> None:
    """What is held anywhere is shown, in the order of the settings; nothing held is a page too."""
    page = list_locks(prefix=key, limit=1000)
    assert set(taken) <= {each.backend for each in page.locks}
    assert page.cursor is None
    page = list_locks(backends=["redis", "sqlite", "postgres"], prefix=key)
    assert list(dict.fromkeys(each.backend for each in page.locks)) == [
        "sqlite", "postgres", "redis",
    ]  # fmt: skip
    assert list_locks(backends=["postgres", "memory"], prefix=f"{key}-none") == LockPage(())


def test_times_are_filters(taken: dict[str, list[Grant]], key: str) -> None:
    """By the store's clock, whatever the size of the pages: age, end, and the last renewal."""
    store = lock_backends["postgres"]
    # Who never renewed has no beat, and what has no expiry never ends.
    store.extend(taken["postgres"][1], 60)
    for number, moved, seconds in ((1, "renewed_at", 40), (2, "acquired_at", 7200)):
        row = HeldLock.objects.filter(pk=store.queues.name_of(f"{key}:{number}"))
        row.update(**{moved: store.clock() - timedelta(seconds=seconds)})
    for alias in ("postgres", "redis"):
        lock_backends[alias].acquire(f"{key}:soon", new_token(), 9)
        lock_backends[alias].acquire(f"{key}:never", new_token(), None)
    asked: list[tuple[dict[str, Any], list[str]]] = [
        ({"held_longer_than": 3600}, ["2"]),
        ({"held_longer_than": timedelta(hours=3)}, []),
        ({"overdue": 0.5}, ["1"]),
        ({"overdue": 0.9}, []),
        ({"ends_within": 10}, ["soon", "soon"]),
    ]
    for limit in (1, 2, 100):
        for filters, names in asked:
            found = everything(limit, backends=ALIASES, prefix=key, **filters)
            assert [each.key for each in found] == [f"{key}:{name}" for name in names]


def test_lock_is_shown_whole_but_for_its_token(taken: dict[str, list[Grant]], key: str) -> None:
    """Key, fence, times, holder: as the record has them; of the token, a hash at most."""
    for alias, (grant, *_rest) in taken.items():
        (held,) = list_locks(backends=[alias], prefix=f"{key}:0").locks
        record = there(lock_backends[alias].read(grant.key))
        for name in ("fence", "ttl", "acquired_at", "renewed_at", "expires_at", "free_at"):
            assert getattr(held, name) == getattr(record, name), name
        assert (held.key, held.holder) == (record.key, record.holder)
        assert held.state is State.HELD
        assert held.acquired_at <= held.observed_at
        assert re.fullmatch(r"[0-9a-f]{24}", held.key_hash)
        document = json.loads(json.dumps(held.as_json()))
        assert (document["state"], document["holder"]["host"]) == ("held", "host-0")
        for shown in (repr(held), str(held), json.dumps(document)):
            assert grant.token not in shown


def test_silent_backend_is_reported_and_the_others_are_shown(
    taken: dict[str, list[Grant]], key: str
) -> None:
    """One that is down, cannot list, or is misconfigured, hides nothing of the others."""
    assert taken
    others = {
        "dead": DEAD,
        "deaf": {"BACKEND": f"{__name__}.Deaf"},
        "broken": {"BACKEND": "nowhere.Backend"},
    }
    with override_settings(DISTLOCK={**others, **settings.DISTLOCK}):
        page = list_locks(backends=["postgres", *others], prefix=key)
    assert [each.backend for each in page.locks] == ["postgres"] * 3
    codes = {each.backend: each.code for each in page.failures}
    assert codes == {
        "dead": "service_unavailable", "deaf": "unsupported", "broken": "misconfigured",
    }  # fmt: skip
    assert all(each.message for each in page.failures)
    assert json.loads(json.dumps(page.as_json()))["failures"][0]["backend"] == "dead"


@pytest.mark.usefixtures("taken")
def test_slips_are_refused(key: str) -> None:
    """An argument that breaks a rule is an error, and no empty page."""
    of_others = list_locks(backends=["postgres", "sqlite"], prefix=key, limit=2).cursor
    slips: list[dict[str, Any]] = [
        *({"cursor": each} for each in ("nonsense", "é", "", "W10")),  # The last one is [].
        {"cursor": of_others, "backends": ["redis"]},
        *({"limit": each} for each in (0, 10_001, True)),
        {"prefix": "a\0"},
        {"held_longer_than": -1},
        {"ends_within": -1},
        *({"overdue": each} for each in (1.1, True)),
        {"backends": "postgres"},
        *({"states": each} for each in ("held", ["lost"], 5)),
    ]
    for slip in slips:
        with pytest.raises(InvalidArgument):
            list_locks(**slip)
    with pytest.raises(InvalidLockBackend, match="'nowhere' is not configured"):
        list_locks(backends=["nowhere"])


def test_state_says_the_most_telling_thing(key: str) -> None:
    """Over comes before asked, asked before endless; each has a label for people."""
    with distlock(key, backend="postgres", ttl=30):
        (held,) = list_locks(backends=["postgres"], prefix=key).locks
    assert held.expires_at is not None
    over = replace(held, observed_at=held.expires_at + timedelta(seconds=0.5))
    asked = replace(held, stop_requested_at=held.acquired_at)
    endless = replace(held, expires_at=None, free_at=None, ttl=None)
    states = {
        State.HELD: held,
        State.PAST_EXPIRY: over,
        State.STOP_REQUESTED: asked,
        State.NO_EXPIRY: endless,
        State.QUEUED: replace(held, holder=replace(held.holder, pid=0, task_id="a")),
        State.SETTLED: replace(held, free_at=held.expires_at),
        State.SHARED: replace(held, shared=True),
    }
    assert {state: each.state for state, each in states.items()} == {each: each for each in states}
    assert len({str(state.label) for state in State}) == len(State) == len(states)
    assert replace(over, stop_requested_at=held.acquired_at).state is State.PAST_EXPIRY
    assert replace(endless, stop_requested_at=held.acquired_at).state is State.STOP_REQUESTED
    assert replace(endless, by_session=True).state is State.HELD
    assert (over.expires_in, endless.expires_in) == (0.0, None)
    assert 0 < there(held.expires_in) <= 30
