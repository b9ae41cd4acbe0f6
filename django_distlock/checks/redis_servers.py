"""`distlock.E2xx` and `W2xx`: Redis servers that may lose locks, or cannot acquire them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core import checks

from ..core.errors import LockError
from ..core.pages import page
from ..exceptions import InvalidLockBackend
from .configured import DOCS, REDIS, check_each, where

if TYPE_CHECKING:
    from ..backends.redis import RedisBackend

_GUARANTEES = f"For the consequences, see {page('explanation/guarantees')}."


@check_each(REDIS)
def check_redis_cache(backend: RedisBackend) -> Iterator[checks.CheckMessage]:
    """W201: clearing a cache does not remove the locks."""
    # A factory may connect, which only deployment checks may do.
    if "client_factory" in backend.config.options:
        return
    from ..backends.redis.clients import database_of  # The driver may not be installed.

    ours = database_of(backend.store.client)
    same = [
        alias
        for alias in settings.CACHES
        # The backend's own cache is for locks alone, unless it is the default one.
        if (alias != backend.cache or alias == "default")
        and ours is not None
        and ours == _database_of_cache(alias)
    ]
    if same:
        yield checks.Warning(
            f"{where(backend)} keeps its locks in the Redis database of the cache {same[0]!r}. Its"
            " clear() would remove the locks and their fences.",
            hint="Give the locks their own Redis database or server, by a url or a cache alias."
            f" {DOCS}",
            id="distlock.W201",
        )


@check_each(REDIS, deploy=True)
def check_redis_servers(backend: RedisBackend) -> Iterator[checks.CheckMessage]:
    """E201 and W202 to W205: query the servers, which only `check --deploy` does."""
    try:
        answers = backend.store.of_each_server("INFO", "everything")
    except LockError as error:
        said = f"{where(backend)} cannot be checked: {error}"
        yield checks.Warning(said, hint=DOCS, id="distlock.W205")
        return
    for server, answer in answers.items():
        about = f"{where(backend)}: the Redis server {server}"
        yield from _findings(backend, about, _fields(answer))


def _database_of_cache(alias: str) -> tuple[Any, ...] | None:
    """Return the Redis database of a cache's entries; None: they are not on one Redis server."""
    from ..backends.redis.clients import database_of, from_cache

    try:
        return database_of(from_cache(alias)())
    except (ImportError, InvalidLockBackend):
        return None


def _findings(
    backend: RedisBackend, about: str, fields: dict[str, str]
) -> Iterator[checks.CheckMessage]:
    if fields.get("cluster_enabled") == "1" and not backend.store.is_cluster:
        yield checks.Error(
            f"{about} is a cluster node, but is used as a standalone server. It refuses keys of"
            " the other nodes.",
            hint="Set OPTIONS['client_factory'] to a callable that returns a redis.RedisCluster."
            f" {DOCS}",
            id="distlock.E201",
        )
    policy = fields.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield checks.Warning(
            f"{about} may evict keys ({policy}). A held lock could then be granted again.",
            hint="Set maxmemory-policy to noeviction on a server that is used for locks only."
            f" {_GUARANTEES} {DOCS}",
            id="distlock.W202",
        )
    if fields.get("aof_enabled") == "0" and not _saves(backend):
        yield checks.Warning(
            f"{about} does not persist its data. After a restart, held locks could be granted"
            " again.",
            hint=f"Set appendonly to yes. {_GUARANTEES} {DOCS}",
            id="distlock.W203",
        )
    if fields.get("role") == "slave":
        yield checks.Warning(
            f"{about} is a replica and refuses writes. No lock can be acquired.",
            hint=f"Connect to the primary, or use Sentinel to find it. {DOCS}",
            id="distlock.W204",
        )


def _saves(backend: RedisBackend) -> bool:
    """Whether the servers save snapshots; True if they cannot be queried."""
    try:
        answers = backend.store.of_each_server("CONFIG", "GET", "save")
    except LockError:
        return True
    # RESP 3 returns a mapping, RESP 2 a list of names and values.
    pairs = [
        each if isinstance(each, dict) else {each[0]: each[1]} for each in answers.values() if each
    ]
    return all(any(pair.values()) for pair in pairs)


def _fields(answer: Any) -> dict[str, str]:
    text = answer if isinstance(answer, str) else str(answer, "utf-8")
    lines = (line.partition(":") for line in text.splitlines())
    return {name: value for name, colon, value in lines if colon}
