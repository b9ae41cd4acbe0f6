"""System checks of Redis: servers that forget, lag behind, or are somebody else's to empty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.core import checks
from django.core.cache import cache
from django.test import override_settings
from redis import Redis

from django_distlock import distlock
from tests.backends import REDIS
from tests.contract.redis_clients import cluster_url, single_url
from tests.redis_servers import private_redis

DJANGO_REDIS = "django_redis.cache.RedisCache"
LOCAL = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
NOWHERE = "redis://127.0.0.1:1/0"


def found(options: dict[str, Any], *, deploy: bool = True) -> dict[str, str]:
    """Check a backend with these options; give ids and texts of what is said about it."""
    with override_settings(DISTLOCK={"locks": {"BACKEND": REDIS, "OPTIONS": options}}):
        messages = checks.run_checks(include_deployment_checks=deploy)
    # What other tests have declared is silenced.
    loud = [each for each in messages if not each.is_silenced()]
    ours = [each for each in loud if str(each.id).startswith("distlock.")]
    assert all("'locks'" in each.msg for each in ours)
    return {str(each.id): each.msg for each in ours}


# Servers


def test_server_that_keeps_what_it_has_or_evicts_it() -> None:
    """With an append-only file and without eviction there is nothing to warn of.

    W202: a held lock could be evicted, whichever keys the policy chooses from.
    """
    with private_redis(save="900 1") as server:
        assert found({"url": server.url}) == {}
    with private_redis(durable=True) as server, Redis.from_url(server.url) as client:
        assert found({"url": server.url}) == {}
        for policy in ("allkeys-lru", "volatile-ttl"):
            client.config_set("maxmemory-policy", policy)
            told = found({"url": server.url})
            assert list(told) == ["distlock.W202"]
            assert policy in told["distlock.W202"]


def test_server_that_keeps_nothing() -> None:
    """W203: held locks would be granted again after a restart. In both protocols.

    What cannot be asked is not warned of: hosted servers allow no CONFIG.
    """
    with private_redis() as server, Redis.from_url(server.url) as client:
        port = urlsplit(server.url).port
        for protocol in (2, 3):
            told = found({"url": f"{server.url}?protocol={protocol}"})
            assert list(told) == ["distlock.W203"]
            assert f"127.0.0.1:{port}" in told["distlock.W203"]
        client.execute_command("ACL", "SETUSER", "shop", "on", ">secret", "~*", "+@all", "-config")
        address = server.url.replace("redis://", "redis://shop:secret@")
        assert found({"url": address}) == {}


def test_replica() -> None:
    """W204: no lock can be taken on it."""
    with private_redis(durable=True) as primary, private_redis(durable=True) as replica:
        with Redis.from_url(replica.url) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", urlsplit(primary.url).port)
        assert list(found({"url": replica.url})) == ["distlock.W204"]


def test_node_of_a_cluster() -> None:
    """E201: a plain client would be refused most keys; a client of the cluster is right."""
    assert "distlock.E201" in found({"url": cluster_url()})
    told = found({"client_factory": "tests.contract.redis_clients.cluster"})
    assert list(told) == ["distlock.W203"]


def test_server_that_does_not_answer() -> None:
    """W205: nothing can be said about it. No password is told."""
    told = found({"url": "redis://:secret@127.0.0.1:1/0"})
    assert list(told) == ["distlock.W205"]
    assert "secret" not in told["distlock.W205"]


def test_nothing_connects_without_deploy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain check opens no connection, nor does it call the factory of a client."""
    called: list[str] = []
    monkeypatch.setattr("socket.socket.connect", lambda *_: called.append("connect"))
    assert found({"url": NOWHERE}, deploy=False) == {}
    assert found({"client_factory": lambda: called.append("factory")}, deploy=False) == {}
    assert called == []


# Caches


def caches(**more: dict[str, Any]) -> Any:
    """Configure a cache for locks, and others."""
    locks = {"BACKEND": DJANGO_REDIS, "LOCATION": single_url().replace("/0", "/1")}
    return override_settings(CACHES={"default": LOCMEM, "locks": locks, **more})


LOCMEM = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}


@pytest.fixture
def emptied() -> Iterator[str]:
    """Give the address of a database that a test may empty."""
    with private_redis() as server:
        yield server.url


def test_default_cache(emptied: str) -> None:
    """W201: the project's cache is emptied now and then; so would be the locks, as happens here."""
    cached = {"default": {"BACKEND": DJANGO_REDIS, "LOCATION": emptied}}
    shared = {"locks": {"BACKEND": REDIS, "OPTIONS": {"cache": "default"}}}
    with override_settings(CACHES=cached, DISTLOCK=shared):
        assert "'default'" in found({"cache": "default"}, deploy=False)["distlock.W201"]
        lease = distlock("invoice", backend="locks").acquire()
        cache.clear()
        assert not lease.release()
    with caches():
        assert found({"cache": "locks"}, deploy=False) == {}
    # An alias is no database of its own.
    location = single_url().replace("/0", "/1")
    with caches(pages={"BACKEND": DJANGO_REDIS, "LOCATION": location}):
        assert "'pages'" in found({"cache": "locks"}, deploy=False)["distlock.W201"]


def test_cache_in_the_database_of_an_address() -> None:
    """W201: locks that are given an address may still lie in the database of a cache."""
    pages = {"pages": {"BACKEND": DJANGO_REDIS, "LOCATION": "redis://127.0.0.1:1/3"}}
    with override_settings(CACHES=pages | {"default": LOCAL}):
        for same in ("redis://localhost:1/3", "redis://:secret@127.0.0.1:1?db=3"):
            told = found({"url": same}, deploy=False)["distlock.W201"]
            assert "'pages'" in told
            assert "secret" not in told
        for other in ("redis://127.0.0.1:1/4", "redis://127.0.0.1:2/3", "unix:///tmp/redis?db=3"):
            assert found({"url": other}, deploy=False) == {}
