"""Fences in Redis: counted and checked inside the script, above the server's clock."""

from __future__ import annotations

import re

import pytest

from django_distlock.core.errors import LockError
from django_distlock.core.keys import new_token
from django_distlock.core.records import FENCE_MAX
from tests.contract.helpers import take
from tests.contract.stores_redis import RedisStore


def kept(store: RedisStore, key: str) -> tuple[str | None, dict[str, str]]:
    """Return the counter and the record of a key as they are kept."""
    return store.client.get(store.at("fence", key)), store.fields(key)


@pytest.mark.parametrize(
    "before", [None, "0017", 10**14, 2 * 10**14, 799_999_999_999_999, FENCE_MAX - 1]
)
def test_fence_is_kept_in_digits(store: RedisStore, key: str, before: int | str | None) -> None:
    """It is the clock, in units of 10 µs, or one above the counter: each digit, no exponent."""
    if before is not None:
        store.client.set(store.at("fence", key), before)
    grant = take(store.backend, key)
    counter, record = kept(store, key)
    assert grant.fence == max(int(record["acquired_at"]) // 10, int(before or 0) + 1)
    assert counter == record["fence"] == str(grant.fence)
    assert re.fullmatch("[0-9]{15}", counter)
    for time in ("acquired_at", "renewed_at", "expires_at", "free_at"):
        assert re.fullmatch("[0-9]{16}", record[time])


@pytest.mark.parametrize("counter", [str(FENCE_MAX), "9" * 15, "9" * 40])
def test_no_fence_is_left(store: RedisStore, key: str, counter: str) -> None:
    """Behind the last one the script refuses, and has written nothing."""
    store.client.set(store.at("fence", key), counter)
    token = new_token()
    for _ in range(2):
        with pytest.raises(LockError, match=re.escape(repr(key))) as caught:
            store.backend.acquire(key, token, 30)
        assert (type(caught.value), caught.value.code) == (LockError, "internal")
    assert kept(store, key) == (counter, {})
    assert not store.client.exists(f"distlock:token:{token}")


def test_counter_that_is_no_number(store: RedisStore, key: str) -> None:
    """What somebody else wrote there is an error, and stays as it is."""
    numbers = ("nan", "-nan", "inf", "-5", "1.5", "1e3", "0x1f", " 7", "7\n")
    for counter in ("garbage", "", "12three", *numbers):
        store.client.set(store.at("fence", key), counter)
        with pytest.raises(LockError):
            store.backend.acquire(key, new_token(), 30)
        assert kept(store, key) == (counter, {})
