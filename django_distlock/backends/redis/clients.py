"""Clients of Redis for locks: made from what the project has, with connections of their own.

A lock's command must be sent once. The project's clients send it again where a connection breaks,
and so a release that had worked would answer that there was nothing to release: from them comes
only where the server is and how to log in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

import redis
from django.core.cache import InvalidCacheBackendError, caches
from django.core.cache.backends.redis import RedisCache
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from ...core import budgets
from ...core.errors import BackendUnavailable, LockError, shown
from ...exceptions import InvalidLockBackend

#: Seconds to wait for a connection, and for an answer, where the project does not say. Without
#: them a server that hangs would hang whoever wants a lock.
SOCKET_SECONDS = 5.0

#: What redis-py raises when a server is asked.
ERRORS = (exceptions.RedisError, exceptions.RedisClusterException)

#: What of a project's connection tells where the server is and how to log in.
_ADDRESS = re.compile(
    r"host|port|path|db|username|password|credential_provider|client_name|protocol|ssl_.*"
    r"|socket_(timeout|connect_timeout|keepalive|keepalive_options)|health_check_interval"
)

#: By class; the first that fits counts.
_CODES: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    ((exceptions.TimeoutError, budgets.Over), "network_timeout"),
    (
        (
            exceptions.AuthenticationError,
            exceptions.AuthenticationWrongNumberOfArgsError,
            exceptions.AuthorizationError,
            exceptions.NoPermissionError,
        ),
        "auth_failed",
    ),
    ((exceptions.MaxConnectionsError, exceptions.OutOfMemoryError), "rate_limited"),
    (
        (
            exceptions.ClusterError,  # also where a slot is on its way for too long
            exceptions.ConnectionError,
            exceptions.ReadOnlyError,
            exceptions.RedisClusterException,
            exceptions.TryAgainError,
        ),
        "service_unavailable",
    ),
)

#: By the word that an error of the server begins with, where no class stands for it.
_WORDS: Mapping[str, str] = {
    "BUSY": "service_unavailable",  # a script runs too long
    "DENIED": "auth_failed",  # protected mode
    "MASTERDOWN": "service_unavailable",
    "MISCONF": "service_unavailable",  # cannot save, and does not accept writes
    "NOREPLICAS": "service_unavailable",
    "NOPERM": "auth_failed",
    "OOM": "rate_limited",
    "READONLY": "service_unavailable",
    "UNKILLABLE": "service_unavailable",
}
#: Redis before 7 wraps an error in the script's: "…@user_script: 3: -OOM command not allowed".
_WRAPPED = re.compile(r"@user_script:? ?\d+: -([A-Z]+) ")

#: Connections are counted by who uses them, and not by their pool.
_UNCOUNTED = 2**31

#: What a server with a password says to who gives none and sends many words.
_NO_LOGIN = "unauthenticated"

#: What a server says that takes no more connections, for which redis-py has no class of its own.
_TOO_MANY = "max number of clients reached"

#: What Redis 7.0 and later ones say where a script comes to a command that its user may not run: no
#: word of its own, and no class.
_FORBIDDEN = ("The user executing the script can't run this command", "ACL failure in script")

Options = Mapping[str, Any]


class _Pool(redis.ConnectionPool):
    """A pool whose repr has no password: redis-py puts those of Sentinels into an error."""

    def __repr__(self) -> str:
        return f"<{self.connection_kwargs.get('host')}:{self.connection_kwargs.get('port')}>"


def client_source(where: str, options: Options, password: str | None = None) -> Callable[[], Any]:
    """Return what makes the client that the options name. Nothing connects before it is called.

    Args:
        options: `cache`, `url` and `client_factory`: one is given, the others are None.
        password: What the server of `url` asks for, which the address does not tell then.

    Raises:
        InvalidLockBackend: None is given, or several, or it leads to no Redis; or `password` is no
            text, stands beside another one than `url`, or in its address, too.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if len(given) != 1:
        raise InvalidLockBackend(
            f"{where}: OPTIONS requires exactly one of cache, url and client_factory, not"
            f" {' and '.join(given) or 'none'}."
        )
    ((name, value),) = given.items()
    if password is not None and (name != "url" or not isinstance(password, str) or not password):
        raise InvalidLockBackend(
            f"{where}: password must be a str that is not empty, and requires url."
        )
    makers: Mapping[str, Callable[[Any], Callable[[], Any]]] = {
        "cache": from_cache,
        "url": partial(_from_url, password=password),
        "client_factory": _from_factory,
    }
    try:
        return makers[name](value)
    except InvalidLockBackend as error:
        raise InvalidLockBackend(f"{where}: {name}: {error}") from error
    except ImportError as error:
        raise InvalidLockBackend(f"{where}: {name}: It cannot be imported: {error}") from error


def own_client(client: Any, what: str = "What client_factory makes") -> Any:
    """Return a client with the address of another that sends each command once, or refuse it."""
    if isinstance(client, redis.RedisCluster):
        # It tells where keys are, and is asked for nothing else: see `cluster`.
        client.set_retry(_once())
        _bound(client.nodes_manager.connection_kwargs)
        for node in client.get_nodes():  # type: ignore[no-untyped-call]
            _bound(client.get_redis_connection(node).connection_pool.connection_kwargs)
        return client
    pool = getattr(client, "connection_pool", None)
    if not isinstance(client, redis.Redis) or not isinstance(pool, redis.ConnectionPool):
        raise InvalidLockBackend(
            f"{what} must be a redis.Redis or a redis.RedisCluster, not a {type(client).__name__}."
        )
    return redis.Redis(connection_pool=own_pool(pool))


def own_pool(pool: Any) -> Any:
    """Return what makes connections to where `pool` connects to, that send a command once."""
    settings = address_of(pool.connection_kwargs) | {
        "connection_class": pool.connection_class,
        "retry": _once(),
        "max_connections": _UNCOUNTED,
    }
    if not isinstance(pool, SentinelConnectionPool):
        return _Pool(**settings)
    # A copy keeps the project's options, such as a forced address.
    ours = copy(pool.sentinel_manager)
    ours.sentinels = [
        redis.Redis(connection_pool=own_pool(each.connection_pool)) for each in ours.sentinels
    ]
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        pool.service_name, ours, **settings
    )


def translated(error: Exception, alias: str, key: str | None) -> LockError:
    """Return what an error of redis-py means."""
    about = f"The lock store {alias!r}"
    # The words of a command that a server does not know: they may hold a token.
    said = str(error).partition(", with args beginning")[0]
    if isinstance(error, exceptions.MovedError | exceptions.ClusterCrossSlotError):
        return LockError(
            f"{about} is a node of a cluster: OPTIONS needs a client_factory that makes a"
            f" redis.RedisCluster. {said}",
            key=key,
        )
    met = _met(error)
    code = _code(met)
    if code is None:
        return LockError(f"{about} failed: {said}", key=key)
    answered = isinstance(met, exceptions.ResponseError | exceptions.BusyLoadingError)
    return BackendUnavailable.of(about, said, code, key, answered=answered)


def _met(error: Any) -> Any:
    """Return what a cluster's client met with at its nodes: the cause of its own error."""
    while isinstance(error, exceptions.RedisClusterException) and (
        error.__cause__ or error.__context__
    ):
        error = error.__cause__ or error.__context__
    return error


def _code(met: Any) -> str | None:
    if _TOO_MANY in str(met):
        return "rate_limited"
    code = next((code for classes, code in _CODES if isinstance(met, classes)), None)
    if code is not None or not isinstance(met, exceptions.ResponseError):
        return code
    wrapped = _WRAPPED.search(str(met))
    word = wrapped[1] if wrapped else str(met).partition(" ")[0]
    if any(said in str(met) for said in (*_FORBIDDEN, _NO_LOGIN)):
        return "auth_failed"
    return _WORDS.get(word)


def database_of(client: Any) -> tuple[Any, ...] | None:
    """Return what tells one Redis database from another; None: it has several servers.

    Nothing is asked: two names of one host are two databases, but for those of this machine.
    """
    pool = getattr(client, "connection_pool", None)
    given: dict[str, Any] = getattr(pool, "connection_kwargs", {})
    host = given.get("host")
    if host in ("localhost", "::1"):
        host = "127.0.0.1"
    server = given.get("path") or (host and (host, given.get("port") or 6379))
    return None if server is None else (server, int(given.get("db") or 0))


def from_cache(alias: object) -> Callable[[], Any]:
    """Return what gives the client of a cache, which has to be on one Redis server."""
    try:
        cache: Any = caches[alias]  # type: ignore[index]
    except (InvalidCacheBackendError, TypeError, AttributeError) as error:
        raise InvalidLockBackend(f"There is no cache {shown(alias)}: {error}") from error
    if isinstance(cache, RedisCache):
        try:
            return _fixed(cache._cache.get_client(write=True))
        except (LookupError, TypeError, ValueError) as error:
            raise _no_address(alias, error) from None
    try:
        # What django-redis calls its own; without importing it.
        get_client = getattr(getattr(cache, "client", None), "get_client", None)
    except ImproperlyConfigured as error:
        raise _no_address(alias, error) from None
    if get_client is None:
        raise InvalidLockBackend(
            f"The cache {alias!r} is a {type(cache).__name__}, which does not use Redis."
        )
    try:
        # The client below the cache: what the cache does about errors, such as
        # IGNORE_EXCEPTIONS, does not concern locks.
        return _fixed(get_client(write=True))
    except (TypeError, NotImplementedError) as error:
        raise InvalidLockBackend(
            f"The cache {alias!r} spreads its keys over several servers; a lock needs one."
        ) from error
    except (LookupError, ValueError) as error:
        raise _no_address(alias, error) from None


def _no_address(alias: object, error: Exception) -> InvalidLockBackend:
    # Without its text, which may have the password.
    return InvalidLockBackend(
        f"The LOCATION of the cache {shown(alias)} is not a Redis address: {type(error).__name__}."
    )


def _from_url(url: object, password: str | None) -> Callable[[], Any]:
    if not isinstance(url, str):
        raise InvalidLockBackend(
            f"It must be the address of a server, as a str, not a {type(url).__name__}."
        )
    try:
        client = redis.Redis.from_url(url)
        # Opens nothing. A pool accepts any option, and a connection refuses unknown ones.
        client.connection_pool.make_connection()
    except (ValueError, TypeError, exceptions.RedisError):
        # Not the address, nor what is wrong with it: both may hold a part of a password.
        raise InvalidLockBackend(
            "It is not a Redis address, such as redis://127.0.0.1:6379/1, or has an option that"
            " redis-py does not know."
        ) from None
    given = client.connection_pool.connection_kwargs
    if password is not None:
        if given.get("password"):
            raise InvalidLockBackend("The password is given twice: in the address and as password.")
        given["password"] = password
    return _fixed(client)


def _from_factory(factory: object) -> Callable[[], Any]:
    if isinstance(factory, str):
        try:
            factory = import_string(factory)
        except (ImportError, TypeError, ValueError) as error:  # The last two: a leading dot
            raise InvalidLockBackend(f"It cannot be imported: {error}") from error
    if not callable(factory):
        raise InvalidLockBackend(f"It must be callable, or the path of that, not {shown(factory)}.")
    return factory


def _fixed(client: Any) -> Callable[[], Any]:
    made = own_client(client, "Its client")
    return lambda: made


def address_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a connection's settings where the server is and how to log in."""
    settings = {name: value for name, value in given.items() if _ADDRESS.fullmatch(name)}
    _bound(settings)
    return settings


def _bound(settings: dict[str, Any]) -> None:
    for name in ("socket_timeout", "socket_connect_timeout"):
        if settings.get(name) is None:
            settings[name] = SOCKET_SECONDS


def _once() -> Retry:
    return Retry(NoBackoff(), 0)
