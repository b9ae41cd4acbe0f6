"""Clients of Redis for locks, made from the project's own, but with other connections.

A lock's command must be sent only once. The project's clients repeat it after a lost connection, so
that a release which had worked would return that nothing was released. So only the address and the
credentials are taken from them.
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

from ...core import durations
from ...core.errors import BackendUnavailable, LockError, shown
from ...exceptions import InvalidLockBackend

#: The default seconds to wait for a connection, and for an answer. Without them, a server that
#: hangs would block every caller.
SOCKET_SECONDS = 5.0

#: The base classes of redis-py's errors.
ERRORS = (exceptions.RedisError, exceptions.RedisClusterException)

#: The settings of a project's connection with the address and the credentials.
_ADDRESS = re.compile(
    r"host|port|path|db|username|password|credential_provider|client_name|protocol|ssl_.*"
    r"|socket_(timeout|connect_timeout|keepalive|keepalive_options)|health_check_interval"
)

#: Our codes by class of error; the first that fits counts.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (exceptions.TimeoutError, "network_timeout"),
    (durations.Over, "network_timeout"),
    (exceptions.AuthenticationError, "auth_failed"),
    (exceptions.AuthenticationWrongNumberOfArgsError, "auth_failed"),
    (exceptions.AuthorizationError, "auth_failed"),
    (exceptions.NoPermissionError, "auth_failed"),
    (exceptions.MaxConnectionsError, "rate_limited"),
    (exceptions.OutOfMemoryError, "rate_limited"),
    (exceptions.ClusterError, "service_unavailable"),  # also if a slot takes long to migrate
    (exceptions.ConnectionError, "service_unavailable"),
    (exceptions.ReadOnlyError, "service_unavailable"),
    (exceptions.RedisClusterException, "service_unavailable"),
    (exceptions.TryAgainError, "service_unavailable"),
)

#: Our codes by the first word of the server's error, if redis-py has no class for it.
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

#: The limit of the pools: they do not count connections here.
_UNCOUNTED = 2**31

#: The error of a server with a password for a long command without a login.
_NO_LOGIN = "unauthenticated"

#: The error of a server at its limit of connections, for which redis-py has no class.
_TOO_MANY = "max number of clients reached"

#: The errors of Redis 7.0 and later for a script with a command that the user may not run.
_FORBIDDEN = ("The user executing the script can't run this command", "ACL failure in script")

Options = Mapping[str, Any]


class _Pool(redis.ConnectionPool):
    """A pool without a password in its repr, which redis-py puts into errors about Sentinels."""

    def __repr__(self) -> str:
        return f"<{self.connection_kwargs.get('host')}:{self.connection_kwargs.get('port')}>"


def client_source(where: str, options: Options, password: str | None = None) -> Callable[[], Any]:
    """Return a function that makes the client of the options. Nothing connects before its call.

    Args:
        options: `cache`, `url` and `client_factory`: one is given, the others are None.
        password: The password for the server of `url`, which then has none.

    Raises:
        InvalidLockBackend: None of the options is given, or several, or it is not a Redis; or
            `password` is not a text, is given without `url`, or `url` has one as well.
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
    """Return a client with the address of another one that sends each command only once."""
    if isinstance(client, redis.RedisCluster):
        # The client only provides the map of the cluster: see `cluster`.
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
    """Return a pool like another one, with connections that send each command only once."""
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
    """Translate an error of redis-py into one of this package."""
    about = f"The lock store {alias!r}"
    # For an unknown command, the server repeats its arguments, which may contain a token.
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
    """Return the error of a node that caused the error of a cluster's client."""
    while isinstance(error, exceptions.RedisClusterException) and (
        error.__cause__ or error.__context__
    ):
        error = error.__cause__ or error.__context__
    return error


def _code(met: Any) -> str | None:
    if _TOO_MANY in str(met):
        return "rate_limited"
    code = next((code for kind, code in _CODES if isinstance(met, kind)), None)
    if code is not None or not isinstance(met, exceptions.ResponseError):
        return code
    wrapped = _WRAPPED.search(str(met))
    word = wrapped[1] if wrapped else str(met).partition(" ")[0]
    if any(said in str(met) for said in (*_FORBIDDEN, _NO_LOGIN)):
        return "auth_failed"
    return _WORDS.get(word)


def database_of(client: Any) -> tuple[Any, ...] | None:
    """Return an id of a Redis database by its settings; None: it has several servers.

    Two names of a host are two databases, except for names of this machine.
    """
    pool = getattr(client, "connection_pool", None)
    given: dict[str, Any] = getattr(pool, "connection_kwargs", {})
    host = given.get("host")
    if host in ("localhost", "::1"):
        host = "127.0.0.1"
    server = given.get("path") or (host and (host, given.get("port") or 6379))
    return None if server is None else (server, int(given.get("db") or 0))


def from_cache(alias: object) -> Callable[[], Any]:
    """Return a function that returns the client of a cache, which must be on one Redis server."""
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
        # The API of django-redis, used without importing it.
        get_client = getattr(getattr(cache, "client", None), "get_client", None)
    except ImproperlyConfigured as error:
        raise _no_address(alias, error) from None
    if get_client is None:
        raise InvalidLockBackend(
            f"The cache {alias!r} is a {type(cache).__name__}, which does not use Redis."
        )
    try:
        # The client below the cache: IGNORE_EXCEPTIONS of the cache must not apply to locks.
        return _fixed(get_client(write=True))
    except (TypeError, NotImplementedError) as error:
        raise InvalidLockBackend(
            f"The cache {alias!r} spreads its keys over several servers; a lock needs one."
        ) from error
    except (LookupError, ValueError) as error:
        raise _no_address(alias, error) from None


def _no_address(alias: object, error: Exception) -> InvalidLockBackend:
    # Without the text of the error, which may contain the password.
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
        # This does not connect. A pool accepts any option, but a connection refuses unknown ones.
        client.connection_pool.make_connection()
    except (ValueError, TypeError, exceptions.RedisError):
        # Neither the address nor the error is shown, as both may contain a part of a password.
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
    # The other one is kept: the finaliser of its pool, which is Python code, would run amid locks,
    # and swallow the exception of a signal's handler.
    both = client, made
    return lambda: both[1]


def address_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the address and the credentials in a connection's settings."""
    settings = {name: value for name, value in given.items() if _ADDRESS.fullmatch(name)}
    _bound(settings)
    return settings


def _bound(settings: dict[str, Any]) -> None:
    for name in ("socket_timeout", "socket_connect_timeout"):
        if settings.get(name) is None:
            settings[name] = SOCKET_SECONDS


def _once() -> Retry:
    return Retry(NoBackoff(), 0)
