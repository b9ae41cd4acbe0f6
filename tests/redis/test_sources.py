"""Where a backend's Redis is: an address, a cache of the project, or a client factory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from redis import ConnectionPool, Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from django_distlock.backends.redis.clients import own_pool
from django_distlock.backends.redis.lines import ThreadLines
from django_distlock.conf import backend_config
from django_distlock.core.errors import BackendUnavailable
from django_distlock.exceptions import InvalidLockBackend
from tests.conftest import DECLARED
from tests.contract.helpers import take
from tests.contract.redis_clients import single_url
from tests.keeper import Server, folder, free_port, server_user
from tests.redis_servers import private_redis

from .asking import tell_story
from .servers import backend_on, with_query

DJANGO = "django.core.cache.backends.redis.RedisCache"
DJANGO_REDIS = "django_redis.cache.RedisCache"
PASSWORD = "pass-word-of-the-tests"


class OtherClient:
    """What a cache keeps for a client that is not redis-py's."""

    def __init__(self, *_: Any):
        pass

    def get_client(self, *, write: bool) -> object:
        """Return that client."""
        return object()

    def close(self) -> None:
        """Do nothing."""


def make_client() -> Any:
    """Make a client, as a project does."""
    return Redis.from_url(single_url())


@pytest.mark.parametrize("decode", [None, False, True])
@pytest.mark.parametrize("kind", [DJANGO, DJANGO_REDIS])
def test_cache_of_the_project_says_where(
    private: Server, client: Any, key: str, settings: Any, kind: str, decode: bool | None
) -> None:
    """Log-in, database, and whatever a cache's connections do with answers are no matter.

    The cache works on.
    """
    cache: dict[str, Any] = {"BACKEND": kind, "LOCATION": private.url}
    if decode is not None:
        client.config_set("requirepass", PASSWORD)
        pool = {"decode_responses": decode}
        cache["LOCATION"] = private.url.replace("//", f"//:{PASSWORD}@").replace("/0", "/3")
        cache["OPTIONS"] = pool if kind == DJANGO else {"CONNECTION_POOL_KWARGS": pool}
    if decode and kind == DJANGO_REDIS:
        # The way in which it takes a password beside the address.
        cache["LOCATION"] = private.url.replace("/0", "/3")
        cache["OPTIONS"]["PASSWORD"] = PASSWORD
    settings.CACHES = {"locks": cache}
    tell_story(backend_on(options={"cache": "locks"}), key)
    assert set(client.info("keyspace")) == {"db0" if decode is None else "db3"}
    if not decode:
        caches["locks"].set(key, "cached")
        assert caches["locks"].get(key) == "cached"


def test_password_beside_the_url(private: Server, client: Any, key: str) -> None:
    """An option of its own, for questions and listeners; a wrong one is told."""
    client.config_set("requirepass", PASSWORD)
    tell_story(backend_on(private.url, options={"password": PASSWORD}), key)
    for wrong in (None, f"{PASSWORD}!"):
        with pytest.raises(BackendUnavailable) as caught:
            backend_on(private.url, options={"password": wrong}).clock()
        assert caught.value.code == "auth_failed"
        assert PASSWORD not in str(caught.value)


def test_password_is_masked_where_settings_are_shown(settings: Any) -> None:
    """In the frames of an error that comes up while they are read."""
    options = {"url": "redis://127.0.0.1/1", "password": PASSWORD}
    path = "django_distlock.backends.redis.RedisBackend"
    settings.DISTLOCK = {"default": {"BACKEND": path, "OPTIONS": options}}
    config = backend_config("default")
    assert PASSWORD not in repr(config)
    assert config.options["password"] == PASSWORD


def test_cache_that_swallows_errors_swallows_none_of_locks(key: str, settings: Any) -> None:
    """`IGNORE_EXCEPTIONS` makes a cache quiet; a lock that cannot be had is trouble."""
    settings.CACHES = {
        "locks": {
            "BACKEND": DJANGO_REDIS,
            "LOCATION": f"redis://127.0.0.1:{free_port()}/0",
            "OPTIONS": {"IGNORE_EXCEPTIONS": True},
        }
    }
    assert caches["locks"].get(key) is None
    # Made without a server: settings can be read where none runs.
    backend = backend_on(options={"cache": "locks"})
    assert backend.supports_token_lookup
    with pytest.raises(BackendUnavailable):
        take(backend, key)
    with pytest.raises(BackendUnavailable):
        backend.read(key)


@pytest.mark.parametrize("kind", [DJANGO, DJANGO_REDIS])
def test_client_of_the_project_keeps_its_settings(
    private: Server, client: Any, key: str, settings: Any, monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:  # fmt: skip
    """Locks send each command once; the cache's own client goes on to try again."""
    # django-redis keeps the pools of a process by their address, whatever was said of them.
    monkeypatch.setattr("django_redis.pool.ConnectionFactory._pools", {})
    retry = Retry(ConstantBackoff(0.001), 3)
    pool = {"retry": retry, "socket_timeout": 7}
    options = pool if kind == DJANGO else {"CONNECTION_POOL_KWARGS": pool}
    settings.CACHES = {"locks": {"BACKEND": kind, "LOCATION": private.url, "OPTIONS": options}}
    cache: Any = caches["locks"]
    theirs = (
        cache._cache.get_client(write=True)
        if kind == DJANGO
        else cache.client.get_client(write=True)
    ).connection_pool
    backend = backend_on(options={"cache": "locks"})
    tell_story(backend, key)
    assert theirs.connection_kwargs["retry"] is retry
    ours = backend.store.client.connection_pool
    assert ours is not theirs
    assert ours.connection_kwargs["retry"]._retries == 0
    assert ours.connection_kwargs["socket_timeout"] == 7


@pytest.mark.parametrize("given", ["tests.redis.test_sources.make_client", make_client])
def test_client_factory_says_where(key: str, given: object) -> None:
    """A path, or what is callable; called once, when first needed."""
    calls = []

    def counted() -> Any:
        calls.append(1)
        return make_client()

    backend = backend_on(options={"client_factory": given if isinstance(given, str) else counted})
    assert calls == []
    for number in range(3):
        assert take(backend, f"{key}-{number}").fence
        assert backend.read(key) is None
    assert len(calls) == (not isinstance(given, str))


@pytest.mark.parametrize(
    "client",
    [lambda: None, lambda: "redis://127.0.0.1", ConnectionPool, object],
    ids=["none", "address", "pool", "object"],
)
def test_factory_that_makes_something_else(key: str, client: Callable[[], object]) -> None:
    """What is no client is named when it is first needed."""
    backend = backend_on(options={"client_factory": client})
    with pytest.raises(InvalidLockBackend, match="client_factory makes must be a redis.Redis"):
        backend.read(key)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "requires exactly one of cache, url and client_factory, not none"),
        ({"url": "redis://h", "cache": "c"}, "not cache and url"),
        ({"url": "redis://h", "client_factory": make_client}, "not url and client_factory"),
        ({"url": "redis://h", "timeout": 5}, "Unknown options: 'timeout'"),
        ({"url": "redis://h", "cleanup_on_read": 1}, "cleanup_on_read must be True or False"),
        ({"url": "redis://h", "password": ""}, "password must be a str"),
        ({"url": "redis://h", "password": 5}, "password must be a str"),
        ({"client_factory": make_client, "password": PASSWORD}, "requires url"),
        ({"url": f"redis://:{PASSWORD}@h", "password": PASSWORD}, "given twice"),
        ({"url": "http://h"}, "url: It is not a Redis address"),
        ({"url": "redis://h?socket_time=2"}, "an option that redis-py does not know"),
        ({"url": "rediss://h?ssl_cert_reqs=no"}, "an option that redis-py does not know"),
        ({"url": 6379}, "url: It must be the address"),
        ({"url": f"redis://:{PASSWORD}@h:port/0"}, "url: It is not a Redis address"),
        ({"cache": "nowhere"}, "cache: There is no cache 'nowhere'"),
        ({"cache": 5}, "cache: There is no cache 5"),
        ({"cache": "memory"}, "LocMemCache, which does not use Redis"),
        ({"cache": "sharded"}, "spreads its keys over several servers"),
        ({"cache": "misspelt"}, "'misspelt' is not a Redis address: ValueError"),
        ({"cache": "misspelt-too"}, "'misspelt-too' is not a Redis address: ValueError"),
        ({"cache": "no-location"}, "'no-location' is not a Redis address: ImproperlyConfigured"),
        ({"cache": "no-pool"}, "cache: It cannot be imported"),
        ({"cache": "no-client"}, "cache: It cannot be imported"),
        ({"cache": "other-client"}, "cache: Its client must be a redis.Redis or"),
        ({"client_factory": "tests.redis.nothing"}, "client_factory: It cannot be imported"),
        ({"client_factory": "nothing"}, "client_factory: It cannot be imported"),
        ({"client_factory": ".locks"}, "client_factory: It cannot be imported"),
        ({"client_factory": ".redis.locks"}, "client_factory: It cannot be imported"),
        ({"client_factory": 5}, "client_factory: It must be callable"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], rule: str, settings: Any) -> None:
    """A slip is an error when the backend is made; it names the alias and the option."""
    servers = [f"redis://127.0.0.1:{port}/0" for port in (1, 2)]
    settings.CACHES = {
        "memory": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
        "sharded": {
            "BACKEND": DJANGO_REDIS,
            "LOCATION": servers,
            "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
        },
        # What stands before the "#" would be the port.
        "misspelt": {"BACKEND": DJANGO_REDIS, "LOCATION": f"redis://:{PASSWORD}#@h/0"},
        "misspelt-too": {"BACKEND": DJANGO, "LOCATION": f"redis://:{PASSWORD}#@h/0"},
        "no-location": {"BACKEND": DJANGO_REDIS},
        "no-pool": {
            "BACKEND": DJANGO,
            "LOCATION": servers,
            "OPTIONS": {"pool_class": "redis.none.Pool"},
        },
        "no-client": {
            "BACKEND": DJANGO_REDIS,
            "LOCATION": servers,
            "OPTIONS": {"CLIENT_CLASS": "django_redis.none.Client"},
        },
        "other-client": {
            "BACKEND": DJANGO_REDIS,
            "LOCATION": servers,
            "OPTIONS": {"CLIENT_CLASS": f"{__name__}.OtherClient"},
        },
    }
    with pytest.raises(InvalidLockBackend) as caught:
        backend_on(options=options, alias="here")
    assert rule in str(caught.value)
    assert "DISTLOCK['here']" in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_sentinels_name_the_server_by_its_service() -> None:
    """It has no address of its own, and is on no port of this host."""
    manager: Any = Sentinel([("127.0.0.1", 1)])  # type: ignore[no-untyped-call]
    lines = ThreadLines(own_pool(manager.master_for("locks").connection_pool), 1)
    assert lines.name == "locks"


@pytest.mark.parametrize("kind", ["unix socket", "resp2"])
def test_other_ways_to_a_server(private: Server, client: Any, key: str, kind: str) -> None:
    """An address of a socket in a file, and the older protocol."""
    path = client.config_get("unixsocket")["unixsocket"]
    url = f"unix://{path}" if kind == "unix socket" else private.url
    tell_story(backend_on(with_query(url, db=2, protocol=2 if kind == "resp2" else 3)), key)
    assert set(client.info("keyspace")) == {"db2"}


def test_tls(key: str) -> None:
    """Spoken to in secret; a server that nobody vouches for is trouble."""
    with folder(owner=server_user()) as home:
        certificate, secret = _certificate(home)
        port = free_port()
        tls = {"tls_port": port, "tls_cert_file": certificate, "tls_key_file": secret}
        with ExitStack() as stack:
            try:
                settings: dict[str, Any] = {**tls, "tls_auth_clients": "no", "stop": "KILL"}
                stack.enter_context(private_redis(**settings))
            except pytest.UsageError:
                pytest.skip(f"{DECLARED}this server is built without TLS")
            url = with_query(f"rediss://127.0.0.1:{port}/0", ssl_ca_certs=certificate)
            backend = backend_on(url)
            tell_story(backend, key)
            with pytest.raises(BackendUnavailable):
                backend_on(f"rediss://127.0.0.1:{port}/0").read(key)


def _certificate(home: Path) -> tuple[Path, Path]:
    certificate, secret = home / "certificate", home / "key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", secret],
        check=True, capture_output=True,
    )  # fmt: skip
    for each in (certificate, secret):
        os.chmod(each, 0o644)  # noqa: PTH101
    return certificate, secret
