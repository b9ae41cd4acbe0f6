"""Texts, settings and records that somebody else has written: read, or an error that says so."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from django.core import signing
from django.test import override_settings
from hypothesis import given
from hypothesis import strategies as some

from django_distlock import InvalidArgument, Lease, LockError, LockLost
from django_distlock.conf import backend_config
from django_distlock.core.records import Grant
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.handler import LockBackendHandler, lock_backends
from django_distlock.locks.transfer import _FIELDS
from tests.backends import MEMORY, Registered
from tests.drawn import drawn

from .helpers import listed, take
from .locking import lock_of
from .stores_redis import RedisStore

VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(),
    lambda inside: some.lists(inside, max_size=3) | some.dictionaries(some.text(), inside),
    max_leaves=4,
)
SETTINGS = (
    "BACKEND", "KEY_PREFIX", "TTL", "WAIT", "MAX_TTL", "HEARTBEAT", "LOCK_CONNECTIONS", "RETRY",
    "FENCE_FLOOR", "OPTIONS",
)  # fmt: skip
FIELDS = (
    "token", "fence", "ttl", "acquired_at", "renewed_at", "expires_at", "free_at", "holder",
    "wanted", "stop_requested_at",
)  # fmt: skip


@pytest.mark.aliases("memory", why="what is read is read above the stores")
def test_any_text_of_a_lease_is_loaded_or_refused(registered: Registered, key: str) -> None:
    """Signed with our own secret, with any field changed, missing or new: see `Lease.load`."""

    @drawn(150)
    @given(
        changed=some.dictionaries(some.sampled_from([*_FIELDS]) | some.text(), VALUES, max_size=2),
        missing=some.sets(some.sampled_from([*_FIELDS]), max_size=1),
    )
    def load(changed: dict[str, Any], missing: set[str]) -> None:
        salt = "django_distlock.lease"
        lease = lock_of(registered, key, ttl=20).acquire()
        told = signing.loads(lease.dump(), salt=salt) | changed
        text = {name: value for name, value in told.items() if name not in missing}
        try:
            # A ttl, a window or an alias that is drawn may break a rule of its own.
            with suppress(InvalidArgument, InvalidLockBackend, LockLost):
                Lease.load(signing.dumps(text, salt=salt)).release()
        finally:
            lock_backends[registered.alias].force_release(key)

    load()


@drawn(200)
@given(
    given=some.dictionaries(some.sampled_from(SETTINGS) | some.text(), VALUES, max_size=3) | VALUES,
    is_whole=some.booleans(),
)
def test_any_settings_are_taken_or_refused(given: Any, is_whole: bool) -> None:
    """By an error that names the alias, before any store is asked."""
    if isinstance(given, dict) and is_whole:
        given = {"BACKEND": MEMORY, **given}
    with override_settings(DISTLOCK={"default": given}):
        told = "default"
        try:
            backend_config("default")
            assert LockBackendHandler()["default"].alias == "default"
        except InvalidLockBackend as error:
            told = str(error)
    # Or what all aliases are in.
    assert "default" in told or "DISTLOCK must be" in told


@pytest.mark.aliases("redis", why="its records are anybody's to write")
def test_any_record_of_redis_is_read_or_told(registered: Registered, key: str) -> None:
    """It is an error of its own key, which is still released, and granted again."""
    store = RedisStore(registered, key)
    raw = store.client

    @drawn(60)
    @given(
        fields=some.dictionaries(
            some.sampled_from(FIELDS),
            some.none() | some.integers().map(str) | some.text() | some.binary(),
            min_size=1,
            max_size=2,
        ),
        sound=some.booleans(),
    )
    def look(fields: dict[str, Any], sound: bool) -> None:
        backend, name = store.backend, store.at("lock", key)
        grant = take(backend, key)
        other = take(backend, f"{key}-other")
        for field, value in fields.items():
            raw.hdel(name, field) if value is None else raw.hset(name, field, _text(value))
        try:
            for ask in (
                lambda: backend.read(key),
                lambda: backend.extend(grant),
                lambda: backend.extend_many([grant]),
                lambda: backend.acquire(key, grant.token, 30, wanted=sound),
                lambda: backend.list(key),
                lambda: backend.release(grant),
            ):
                with suppress(LockError):
                    ask()
            assert f"{key}-other" in listed(backend, key)
            assert isinstance(backend.extend(other), Grant)
        finally:
            raw.delete(name)
            backend.release(other)

    look()
    store.close()


def _text(value: Any) -> Any:
    return value.encode(errors="replace") if isinstance(value, str) else value
