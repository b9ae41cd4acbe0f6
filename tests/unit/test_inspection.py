"""Lookups show hashes, and raw values only to those who ask for them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import pickle
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.serializers.json import DjangoJSONEncoder
from django.test import override_settings

from django_distlock import InvalidArgument, InvalidLockBackend, Lease, LockInfo, distlock
from django_distlock.inspection import aowns, get_by_key, get_by_token, owns

KEY = "invoice:42"
STRANGER = "A" * 22


@pytest.fixture
def lease() -> Iterator[Lease]:
    """Hold a key in memory."""
    configured = {"memory": {"BACKEND": "django_distlock.backends.memory.MemoryBackend"}}
    lock = distlock(KEY, ttl=20, backend="memory", metadata={"user": "Ada"})
    with override_settings(DISTLOCK=configured), lock as lease:
        yield lease


def look(lease: Lease, *, raw: bool = False) -> LockInfo:
    """Look the key up."""
    info = get_by_key(lease.key, backend="memory", raw=raw)
    assert info is not None
    return info


def test_lookup_tells_who_holds_the_key(lease: Lease) -> None:
    """Fence, times and holder are those of the lease."""
    info = look(lease)
    assert (info.fence, info.acquired_at, info.expires_at) == (
        lease.fence, lease.acquired_at, lease.expires_at,
    )  # fmt: skip
    assert info.renewed_at == lease.acquired_at
    assert info.holder.metadata == {"user": "Ada"}
    lease.extend(60)
    extended = look(lease)
    assert extended.renewed_at > info.renewed_at
    assert extended.acquired_at == info.acquired_at
    assert extended.expires_at == lease.expires_at == extended.renewed_at + timedelta(seconds=60)


@pytest.mark.usefixtures("lease")
def test_lookup_of_a_free_key_finds_nothing() -> None:
    """Nobody holds it: None."""
    assert get_by_key("other", backend="memory") is None
    assert get_by_token(STRANGER, backend="memory") is None
    assert owns(STRANGER, backend="memory") is False


def test_token_finds_what_it_holds(lease: Lease) -> None:
    """Who has the token finds its lock; behind the release, nobody does."""
    assert get_by_token(lease.token, backend="memory") == look(lease)
    assert owns(lease.token, backend="memory") is True
    assert asyncio.run(aowns(lease.token, backend="memory")) is True
    token = lease.token
    lease.release()
    assert get_by_token(token, backend="memory") is None
    assert get_by_key(KEY, backend="memory") is None
    assert owns(token, backend="memory") is False
    assert asyncio.run(aowns(token, backend="memory")) is False


def test_keys_and_tokens_are_checked(lease: Lease) -> None:
    """A malformed key or token is refused, and the token is not repeated."""
    for bad in ("", None, "a\0"):
        with pytest.raises(InvalidArgument):
            get_by_key(bad, backend="memory")  # type: ignore[arg-type]
    for function in (get_by_token, owns):
        with pytest.raises(InvalidArgument) as caught:
            function("not-a-token", backend="memory")
        assert "not-a-token" not in str(caught.value)
    with pytest.raises(InvalidLockBackend, match="'nowhere' is not configured"):
        get_by_key(KEY, backend="nowhere")


def test_hashes_are_24_hex_digits_and_keyed_with_the_secret(lease: Lease) -> None:
    """Equal values hash alike; without the project's secret nobody can test a guess."""
    info = look(lease)
    for value in (info.key_hash, info.token_hash):
        assert re.fullmatch(r"[0-9a-f]{24}", value)
    assert info.key_hash != info.token_hash
    assert look(lease) == info
    with override_settings(SECRET_KEY="another"):
        other = look(lease)
    assert other.key_hash != info.key_hash
    assert other.token_hash != info.token_hash


def test_equal_keys_hash_alike_and_others_do_not(lease: Lease) -> None:
    """A hash stands for its key, whoever holds it."""
    info = look(lease)
    lease.release()
    with distlock(KEY, backend="memory") as again:
        assert look(again).key_hash == info.key_hash
        assert look(again).token_hash != info.token_hash
    with distlock("invoice:43", backend="memory") as other:
        assert look(other).key_hash != info.key_hash


def test_raw_values_are_for_who_asks(lease: Lease) -> None:
    """`key` and `token` are there with `raw=True`, and only then."""
    assert (look(lease).key, look(lease).token) == (None, None)
    info = look(lease, raw=True)
    assert (info.key, info.token) == (KEY, lease.token)
    by_token = get_by_token(lease.token, backend="memory", raw=True)
    assert by_token is not None
    assert by_token.token == lease.token


def as_vars(info: LockInfo) -> object:
    """Give what `vars` does, if it does."""
    try:
        return vars(info)
    except TypeError:
        return {}


VIEWS: dict[str, Callable[[LockInfo], object]] = {
    "repr": repr,
    "str": str,
    "format": "{}".format,
    "asdict": dataclasses.asdict,
    "astuple": dataclasses.astuple,
    "fields": lambda info: [getattr(info, each.name) for each in dataclasses.fields(info)],
    "vars": as_vars,
    "json": lambda info: json.dumps(dataclasses.asdict(info), cls=DjangoJSONEncoder),
    "json by str": lambda info: json.dumps(info, default=str),
    "pickle": pickle.dumps,
    "pickle 2": lambda info: pickle.dumps(info, protocol=2),
    "getstate": lambda info: info.__getstate__(),
    "reduce": lambda info: info.__reduce_ex__(4),
    "dict of attributes": lambda info: getattr(info, "__dict__", {}),
}


@pytest.mark.parametrize("raw", [False, True])
def test_no_view_shows_raw_values(lease: Lease, raw: bool) -> None:
    """No text, dictionary, pickle or JSON of a lookup shows the key or the token."""
    for name, view in VIEWS.items():
        shown = repr(view(look(lease, raw=raw)))
        assert lease.token not in shown, name
        assert KEY not in shown, name


COPIES: dict[str, Callable[[LockInfo], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda info: pickle.loads(pickle.dumps(info)),
    "replace": lambda info: dataclasses.replace(info, fence=info.fence),
}


def test_copies_are_equal_but_without_raw_values(lease: Lease) -> None:
    """A copy travels: it tells the same, and no secret."""
    info = look(lease, raw=True)
    for name, way in COPIES.items():
        made = way(info)
        assert (made.key, made.token) == (None, None), name
        assert made == look(lease), name
    assert info.token == lease.token


def test_lookup_cannot_be_changed(lease: Lease) -> None:
    """An answer is a value."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        look(lease).fence = 5  # type: ignore[misc]


def test_lease_shows_its_token_in_no_view(lease: Lease) -> None:
    """Nor does a lease, which has it as an attribute."""
    assert lease.token not in f"{lease!r} {lease!s}"
    with pytest.raises(TypeError):
        pickle.dumps(lease)
    with pytest.raises(TypeError):
        copy.copy(lease)
