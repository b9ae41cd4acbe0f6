"""Which of many calls of a debounced task is the last one, by what each store knows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections

from django_distlock.contrib.celery import claims as calls
from django_distlock.contrib.celery.claims import replace_any
from django_distlock.contrib.jobs import JobLock
from django_distlock.core.keys import own_key
from django_distlock.core.records import Grant, Record
from django_distlock.handler import lock_backends
from tests.backends import Registered

pytestmark = pytest.mark.requires("supports_ttl")


@pytest.fixture
def lock(registered: Registered, key: str) -> JobLock:
    """Describe the claims of a task's calls."""
    unique = own_key(f"unique:{key}")
    return JobLock(key=unique, backend=registered.alias, ttl=60, wait=0, heartbeat=False)


def record_of(lock: JobLock) -> Record | None:
    """Return who has the claim."""
    return lock_backends[lock.backend].read(lock.key)


def call(lock: JobLock) -> Grant:
    """Take the number of a call."""
    lease = replace_any(lock)
    lease._let_go()
    return lease._holding.grant


def test_noted_call_replaces_those_before_it(lock: JobLock) -> None:
    """Not by its number alone, for its message may never be sent; whoever is slow, and for good."""
    # The second time, what was delivered late begins where the last one has begun.
    for is_slow in (False, True):
        first, last = call(lock), call(lock)
        assert first.fence < last.fence
        for each in (last, first) if is_slow else (first, last):
            assert not calls.is_overtaken(lock, each)
            assert calls.is_replaced(lock, first.fence) is (is_slow or each is last)
            assert not calls.is_replaced(lock, last.fence)
        assert not calls.begin(lock, first.fence)
        assert calls.begin(lock, last.fence)
        assert record_of(lock) is None
        assert [calls.is_replaced(lock, each.fence) for each in (first, last)] == [True, False]
        # Delivered again.
        assert calls.begin(lock, last.fence)


def test_call_is_overtaken_by_a_run(lock: JobLock) -> None:
    """Which has begun before the call was sent; not where a later call is still to begin."""
    for is_noted in (True, False):
        first, second, third = call(lock), call(lock), call(lock)
        assert not (is_noted and calls.is_overtaken(lock, second))
        assert calls.begin(lock, second.fence)
        assert calls.is_overtaken(lock, first)
        assert not calls.is_overtaken(lock, second)
        assert not calls.is_overtaken(lock, third)
        assert not calls.is_overtaken(lock, first)


def test_claim_of_another_call_stays(lock: JobLock) -> None:
    """What begins gives its own claim back, and no later one."""
    first, last = call(lock), call(lock)
    assert calls.begin(lock, first.fence)
    record = record_of(lock)
    assert record is not None
    assert record.fence == last.fence
    calls.free(lock, first.fence)
    assert record_of(lock) is not None
    calls.free(lock, last.fence)
    assert record_of(lock) is None


def test_raised_counters_stop_no_last_call(lock: JobLock) -> None:
    """An operator raises them all; then numbers go on above."""
    last = call(lock)
    notes = own_key(f"calls:{lock.key.partition(':')[2]}")
    above = 2 * last.fence + 1001
    lock_backends[lock.backend].raise_fences(above, key=notes)
    assert not calls.is_replaced(lock, last.fence)
    assert calls.is_overtaken(lock, last)
    again = call(lock)
    assert 2 * again.fence > above
    assert not calls.is_overtaken(lock, again)


def test_of_many_callers_one_is_last(lock: JobLock) -> None:
    """Each has its number, and all but one give way."""

    def make(_: int) -> int:
        try:
            grant = call(lock)
            assert not calls.is_overtaken(lock, grant)
            return grant.fence
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        numbers = sorted(pool.map(make, range(12)))
    assert len(set(numbers)) == 12
    assert [calls.is_replaced(lock, each) for each in numbers] == [True] * 11 + [False]
