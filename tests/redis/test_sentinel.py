"""Redis behind Sentinel: after a failover locks go on at the new primary, and fences rise."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.sentinel import Sentinel

from django_distlock.core.errors import BackendUnavailable
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from tests import redis_servers
from tests.contract.helpers import at_once, take
from tests.keeper import folder, free_port, kept, server_user
from tests.redis_servers import private_redis

from .asking import tell_story
from .hearing import Warned, hand_over, subscriptions, waiting
from .servers import Restartable, backend_on, client_of, eventually, restartable

pytestmark = pytest.mark.faults

SERVICE = "locks"
DJANGO_REDIS = "django_redis.cache.RedisCache"


@dataclass(frozen=True)
class Watched:
    """A primary, a replica, and a Sentinel that watches them."""

    primary: Restartable
    replica: str
    sentinel: int

    @property
    def replica_port(self) -> int:
        """The port of the replica."""
        return int(self.replica.rpartition(":")[2].partition("/")[0])

    def hand_to_the_replica(self) -> None:
        """Let the replica be the primary; the old one neither ends nor closes a connection."""
        with client_of(self.replica) as client:
            client.replicaof("NO", "ONE")
        with client_of(f"redis://127.0.0.1:{self.sentinel}/0") as client:
            client.sentinel_remove(SERVICE)
            client.sentinel_monitor(SERVICE, "127.0.0.1", self.replica_port, 1)

    def is_at(self, port: int) -> bool:
        """Say whether the Sentinel sends clients to this port."""
        with client_of(f"redis://127.0.0.1:{self.sentinel}/0") as client:
            told = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
            return told is not None and int(told[1]) == port


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Give a primary with a replica that has all its data, and their Sentinel."""
    with ExitStack() as stack:
        primary = stack.enter_context(restartable(repl_diskless_sync_delay=0))
        replica = stack.enter_context(private_redis(stop="KILL"))
        with client_of(replica.url) as client:
            client.replicaof("127.0.0.1", primary.port)
            eventually(
                lambda: client.info("replication").get("master_link_status") == "up",
                "the replica follows",
            )
        sentinel = stack.enter_context(_sentinel(primary.port))
        with client_of(f"redis://127.0.0.1:{sentinel}/0") as client:
            eventually(
                lambda: client.sentinel_slaves(SERVICE), "the Sentinel has found the replica"
            )
        yield Watched(primary, replica.url, sentinel)


@contextmanager
def _sentinel(primary: int) -> Iterator[int]:
    with folder(owner=server_user()) as home:
        settings, port = home / "sentinel.conf", free_port()
        settings.write_text(
            f"bind 127.0.0.1\nport {port}\nprotected-mode no\ndir {home}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {primary} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 300\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
        )
        if user := server_user():
            # It writes into its settings what it finds out.
            shutil.chown(settings, user)
        program = redis_servers._program(home)
        command: list[str | Path] = [program, settings, "--sentinel"]
        with kept(command, home, lambda: _answers(port), stop="KILL"):
            yield port


def _answers(port: int) -> bool:
    with client_of(f"redis://127.0.0.1:{port}/0") as client, suppress(Exception):
        return bool(client.ping())
    return False


@pytest.fixture(params=["client_factory", "cache"])
def backend(request: pytest.FixtureRequest, watched: Watched, settings: Any) -> Any:
    """Give a backend that asks the Sentinel, by itself or as django-redis does."""
    sentinels = [("127.0.0.1", watched.sentinel)]
    if request.param == "client_factory":
        manager: Any = Sentinel(sentinels, socket_timeout=2)  # type: ignore[no-untyped-call]
        return backend_on(options={"client_factory": lambda: manager.master_for(SERVICE)})
    options = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": sentinels,
        "SENTINEL_KWARGS": {"socket_timeout": 2},
    }
    # What django-redis has made for an address, it gives to the next test too.
    address = f"redis://{SERVICE}/0?client_name=at-{watched.sentinel}"
    settings.CACHES = {"locks": {"BACKEND": DJANGO_REDIS, "LOCATION": address, "OPTIONS": options}}
    return backend_on(options={"cache": "locks"})


def test_locks_go_on_after_a_failover(
    watched: Watched, backend: Any, key: str, warned: Warned
) -> None:
    """Waiters are told, and whoever asks; then the replica grants, higher fences, and is heard."""
    tell_story(backend, f"{key}-a")
    before = take(backend, f"{key}-kept", 600)
    with waiting(backend, key) as waiter:
        watched.primary.kill()
        with pytest.raises(BackendUnavailable):
            backend.acquire(key, new_token(), 30)
        eventually(lambda: waiter.rung == [False, True], "wake-ups are heard again")
        eventually(
            lambda: watched.is_at(watched.replica_port) and _grants(backend, key),
            "the replica grants",
        )
        with client_of(watched.replica) as client:
            eventually(lambda: subscriptions(client) == 1, "the replica is heard")
            assert client.info("replication")["role"] == "master"
        hand_over(backend, backend, waiter, key)
        assert len(warned()) == 1
    after = take(backend, f"{key}-kept", 600, replace=before.token)
    assert after.fence > before.fence
    assert backend.release(after) is True
    tell_story(backend, f"{key}-b")


@pytest.mark.usefixtures("restless")
def test_primary_of_the_past_is_left(
    watched: Watched, backend: Any, key: str, warned: Warned
) -> None:
    """One that goes on answering is not heard any more than it is asked."""
    with waiting(backend, key) as waiter, client_of(watched.primary.url) as past:
        hand_over(backend, backend, waiter, key)
        assert subscriptions(past) == 1
        waiter.rung.clear()
        watched.hand_to_the_replica()
        # As long as nobody in the process knows, both go to the old one.
        hand_over(backend, backend, waiter, key)
        assert waiter.rung == [True]

        def heard_again() -> bool:
            # So many at once need a new connection, for which the Sentinel is asked.
            assert at_once([lambda: backend.read(key)] * 8) == [None] * 8
            return waiter.rung[-2:] == [False, True]

        eventually(heard_again, "wake-ups are heard again")
        eventually(lambda: subscriptions(past) == 0, "the old primary is not heard")
        hand_over(backend, backend, waiter, key)
    assert len(warned()) == 1


class Translating(Sentinel):
    """As `force_master_ip` of newer versions: the address that the Sentinels tell is not used."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return an address that leads to the same server."""
        told: Any = super().discover_master(service_name)  # type: ignore[no-untyped-call]
        return "localhost", told[1]


def test_address_is_what_the_project_makes_of_the_answer(watched: Watched, key: str) -> None:
    """Where Sentinels tell one that its processes do not reach; they are left with the backend."""
    manager: Any = Translating([("127.0.0.1", watched.sentinel)])  # type: ignore[no-untyped-call]
    backend = backend_on(options={"client_factory": lambda: manager.master_for(SERVICE)})
    take(backend, key)
    assert [each.host for each in backend.store._lines._idle] == ["localhost"]
    with client_of(f"redis://127.0.0.1:{watched.sentinel}/0") as client:
        assert len(client.client_list()) > 1
        backend._keep_no_connections()
        eventually(lambda: len(client.client_list()) == 1, "no connection to the Sentinel is left")


def _grants(backend: Any, key: str) -> bool:
    try:
        answer = backend.acquire(key, new_token(), 30)
    except BackendUnavailable:
        return False
    assert isinstance(answer, Grant)
    return backend.release(answer) is True
