"""Trouble by class and code; no message tells a secret."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from redis.sentinel import Sentinel

from django_distlock.core.errors import BackendUnavailable, LockError
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from tests.contract.helpers import Later, take
from tests.contract.redis_clients import cluster_url
from tests.keeper import Server, folder, free_port, server_user
from tests.redis_servers import private_redis

from .servers import backend_on, client_of, eventually

PASSWORD = "pass-word-of-the-tests"


def refused(backend: Any, operation: str, *arguments: Any) -> LockError:
    """Return the error of a call, whose message tells neither a token nor a password."""
    with pytest.raises(LockError) as caught:
        getattr(backend, operation)(*arguments)
    told = f"{caught.value} {caught.value!r}"
    for each in arguments[1:] if operation == "acquire" else arguments:
        token = each.token if isinstance(each, Grant) else None
        token = each if operation == "acquire" and isinstance(each, str) else token
        assert token is None or token not in told
    assert PASSWORD not in told
    return caught.value


def attempt(backend: Any, key: str) -> LockError:
    """Return the error of an attempt."""
    return refused(backend, "acquire", key, new_token(), 30)


def is_unavailable(error: LockError, code: str) -> bool:
    """Say whether this is the trouble of that code, with its cause."""
    return type(error) is BackendUnavailable and error.code == code and error.__cause__ is not None


@pytest.mark.parametrize("kind", ["port that nobody listens on", "host without an address"])
def test_nobody_listens(key: str, kind: str) -> None:
    """Where nobody answers it is `service_unavailable`."""
    nowhere = f"127.0.0.1:{free_port()}" if kind.startswith("port") else "nowhere.invalid:6379"
    error = attempt(backend_on(f"redis://:{PASSWORD}@{nowhere}/0"), key)
    assert is_unavailable(error, "service_unavailable")
    assert error.key == key


def test_sentinels_do_not_answer(key: str) -> None:
    """What redis-py tells of the clients that ask them has no password, in the cause neither."""
    asked = [("127.0.0.1", free_port())]
    login = {"password": PASSWORD}
    manager: Any = Sentinel(asked, sentinel_kwargs=login)  # type: ignore[no-untyped-call]
    error = attempt(backend_on(options={"client_factory": lambda: manager.master_for("x")}), key)
    assert is_unavailable(error, "service_unavailable")
    assert "password" not in f"{error} {error.__cause__}"


@pytest.mark.parametrize("login", ["", f":{PASSWORD}@", f"nobody:{PASSWORD}@"])
def test_refused_login(private: Server, client: Any, key: str, login: str) -> None:
    """No password, a wrong one, or a user that does not exist is `auth_failed`."""
    client.config_set("requirepass", "the right one")
    error = attempt(backend_on(private.url.replace("//", f"//{login}")), key)
    assert is_unavailable(error, "auth_failed")
    client.config_set("requirepass", "")


def test_host_that_may_not_connect(key: str) -> None:
    """A server in protected mode talks to this host alone, and to others says so: `auth_failed`."""
    denied = b"-DENIED Redis is running in protected mode because no password is set.\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def deny() -> None:
            with server.accept()[0] as client:
                client.sendall(denied)
                client.recv(4096)

        denying = Later(deny)
        port = server.getsockname()[1]
        assert is_unavailable(attempt(backend_on(f"redis://127.0.0.1:{port}"), key), "auth_failed")
        denying.result()


def test_server_takes_no_more_connections(key: str) -> None:
    """At `maxclients` it answers, and that is `rate_limited`."""
    with private_redis() as server, client_of(server.url) as client:
        client.config_set("maxclients", 1)
        error = attempt(backend_on(server.url), key)
        client.config_set("maxclients", 100)
    assert is_unavailable(error, "rate_limited")
    assert "has reached a limit" in str(error)


def test_missing_right(private: Server, client: Any, key: str) -> None:
    """What the user may not run, or not touch, also inside a script, is `auth_failed`."""
    for number, rights in enumerate(
        ("~* +@all -eval -evalsha", "~other:* +@all", "~* +@all -hset", "~* +@all -@write")
    ):
        user = f"limited{number}"
        client.execute_command("ACL SETUSER", user, "on", f">{PASSWORD}", *rights.split())
        error = attempt(backend_on(private.url.replace("//", f"//{user}:{PASSWORD}@")), key)
        assert is_unavailable(error, "auth_failed")
    assert not client.exists(f"distlock:lock:{backend_on(private.url)._name(key)}")


@pytest.mark.parametrize("stale", ["yes", "no"])
def test_replica(private: Server, client: Any, key: str, stale: str) -> None:
    """A replica takes no writes: `service_unavailable`."""
    backend = backend_on(private.url)
    grant = take(backend, key)
    client.config_set("replica-serve-stale-data", stale)
    client.replicaof("127.0.0.1", free_port())
    for error in (
        attempt(backend, f"{key}-b"),
        refused(backend, "extend", grant),
        refused(backend, "release", grant),
    ):
        assert is_unavailable(error, "service_unavailable")
    client.replicaof("NO", "ONE")
    assert backend.release(grant) is True


def test_full_server(backend: Any, client: Any, key: str) -> None:
    """At `maxmemory` nothing is granted: `rate_limited`. What is held is extended and released.

    An attempt writes nothing, so that the next one is no takeover; what is contended stays so. A
    force-release moves the fence on, and a lease can be settled.
    """
    grant, settled = take(backend, key), take(backend, f"{key}-b")
    client.config_set("maxmemory", 1)
    assert is_unavailable(attempt(backend, f"{key}-c"), "rate_limited")
    assert isinstance(backend.extend(grant, 40), Grant)
    assert backend.request_stop(key, 20, grant.token) is not None
    assert isinstance(backend.acquire(key, new_token(), 30), Contended)
    assert backend.read(key).token == grant.token
    assert backend.release(grant) is True
    assert backend.release(settled, 60) is True
    assert client.exists(f"distlock:lock:{backend._name(f'{key}-c')}") == 0
    assert client.exists(f"distlock:fence:{backend._name(f'{key}-c')}") == 0
    client.config_set("maxmemory", 0)
    taken = take(backend, key)
    assert taken.fence > grant.fence
    client.config_set("maxmemory", 1)
    assert backend.force_release(key).token == taken.token
    assert int(client.get(f"distlock:fence:{backend._name(key)}")) > taken.fence


def test_server_that_cannot_save(key: str) -> None:
    """A server that refuses writes because it cannot save is `service_unavailable`."""
    # There is no folder that fewer may write to.
    with private_redis(dir="/proc", stop="KILL") as server, client_of(server.url) as client:
        client.config_set("save", "3600 1")
        client.bgsave()
        eventually(
            lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "saving fails"
        )
        error = attempt(backend_on(server.url), key)
        assert is_unavailable(error, "service_unavailable")
        # It did answer.
        assert "is unavailable: MISCONF" in str(error)


def test_server_that_runs_a_script_for_long(
    private: Server, backend: Any, client: Any, key: str
) -> None:
    """A server that is busy with somebody's script is `service_unavailable`."""
    client.config_set("busy-reply-threshold", 1)
    with client_of(private.url) as other:
        connection = other.connection_pool.make_connection()
        connection.send_command("EVAL", "while true do end", 0)
        with client_of(private.url) as killer:
            eventually(lambda: _is_busy(killer), "the script runs")
            error = attempt(backend, key)
            killer.script_kill()
        connection.disconnect()
    assert is_unavailable(error, "service_unavailable")


def _is_busy(client: Any) -> bool:
    try:
        client.ping()
    except Exception as error:  # noqa: BLE001 - what it is called has changed
        return "BUSY" in str(error)
    return False


SPOILS: dict[str, Callable[[Any, Any, str], None]] = {
    "acquire": lambda client, backend, key: client.lpush(f"distlock:fence:{key}", "x"),
    "extend": lambda client, backend, key: client.set(f"distlock:lock:{key}", "x"),
    "release": lambda client, backend, key: client.set(f"distlock:lock:{key}", "x"),
    "read": lambda client, backend, key: client.set(f"distlock:lock:{key}", "x"),
}


@pytest.mark.parametrize("operation", SPOILS)
def test_something_else_under_our_name(backend: Any, client: Any, key: str, operation: str) -> None:
    """What is not ours under the name of a lock is an error, and stays as it is."""
    grant = take(backend, key)
    backend.release(grant)
    client.flushall()
    SPOILS[operation](client, backend, backend._name(key))
    arguments = {"acquire": (key, new_token(), 30), "read": (key,)}.get(operation, (grant,))
    error = refused(backend, operation, *arguments)
    assert (type(error), error.code) == (LockError, "internal")
    assert "WRONGTYPE" in str(error)
    assert client.dbsize() == 1


def test_node_of_a_cluster(key: str) -> None:
    """Who connects to a node as to a single server is told of `client_factory`."""
    backend = backend_on(cluster_url())
    errors = []
    for number in range(12):
        # Whatever the key, on this node or on another one.
        try:
            backend.read(f"{key}-{number}")
        except LockError as error:
            errors.append(error)
    assert errors
    assert all(type(error) is LockError for error in errors)
    assert all("client_factory" in str(error) for error in errors)


def unheard_of(key: str) -> Grant:
    """Make a grant that nobody gave."""
    return Grant(key, new_token(), 1, 30.0, datetime.now(UTC), None)


@pytest.fixture
def without(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the address of a server that does not know a command."""
    with folder(owner=server_user()) as home:
        directives = Path(home / "more")
        directives.write_text(f'rename-command {request.param} ""\n')
        directives.chmod(0o644)
        with private_redis(include=directives, stop="KILL") as server:
            yield server.url


@pytest.mark.parametrize(
    ("without", "operation"), [("EVALSHA", "release"), ("GET", "read_token")], indirect=["without"]
)
def test_unknown_command_tells_no_token(without: str, key: str, operation: str) -> None:
    """A server repeats the words of a command it does not know; the message leaves them out."""
    backend = backend_on(without)
    grant = unheard_of(key)
    with pytest.raises(LockError) as caught:
        getattr(backend, operation)(grant if operation == "release" else grant.token)
    assert "unknown command" in str(caught.value)
    assert grant.token[:8] not in str(caught.value)
