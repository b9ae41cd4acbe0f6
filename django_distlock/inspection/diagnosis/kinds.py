"""What kind of store it is, where that decides what can be asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...backends.base import BaseLockBackend

_REDIS = "django_distlock.backends.redis.RedisBackend"


def is_redis(store: BaseLockBackend) -> bool:
    """Whether it is the backend of Redis, whose driver need not be installed for the others."""
    return any(f"{each.__module__}.{each.__qualname__}" == _REDIS for each in type(store).__mro__)


def redis_servers(store: BaseLockBackend) -> Callable[..., Mapping[str, Any]] | None:
    """Return what runs a command on each server of Redis; None: it is none."""
    if not is_redis(store):
        return None
    commands: Callable[..., Mapping[str, Any]] = store.store.of_each_server  # type: ignore[attr-defined]
    return commands
