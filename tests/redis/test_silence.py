"""Redis does not answer, or its answer gets lost: nobody waits for long, and nothing runs twice."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from django_distlock.backends.redis import clients
from django_distlock.core import durations
from django_distlock.core.errors import BackendUnavailable
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from django_distlock.locks.acquire import acquire
from django_distlock.locks.attempts import Request
from django_distlock.locks.blocks import Block
from django_distlock.process import deferred_release
from django_distlock.process.host import current_holder
from tests.contract.helpers import Later, held, take
from tests.integration.wires import Wire
from tests.keeper import Server

from .servers import SILENCE, backend_on, eventually, line_to, stopped, through, with_query

pytestmark = pytest.mark.faults

#: How a reply gets lost, and the code of the error that tells it.
LOSSES = {"lost": "network_timeout", "cut": "service_unavailable"}


@pytest.fixture(autouse=True)
def _nobody_else_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a connection that was told no bound wait for longer than any test."""
    monkeypatch.setattr(clients, "SOCKET_SECONDS", 600)


@pytest.fixture
def line(private: Server) -> Iterator[Wire]:
    """Give a way to the private server that can be spoiled."""
    with line_to(private.url) as line:
        yield line


@pytest.fixture
def impatient(private: Server) -> Any:
    """Give a backend on the private server that gives up soon."""
    return backend_on(with_query(private.url, socket_timeout=SILENCE))


@pytest.fixture
def behind(line: Wire) -> Any:
    """Give a backend behind the line that gives up soon."""
    return backend_on(through(line, socket_timeout=SILENCE))


@pytest.mark.parametrize("operation", ["acquire", "extend", "release", "read"])
def test_server_that_hangs_is_trouble_in_time(
    impatient: Any, client: Any, key: str, operation: str
) -> None:
    """Nobody waits longer than `socket_timeout`; what was asked is done when the server goes on."""
    _warm(impatient, key)
    grant = take(impatient, key)
    token = new_token()
    arguments = {"acquire": (f"{key}-b", token, 30), "read": (key,)}.get(operation, (grant,))
    with stopped(client), pytest.raises(BackendUnavailable) as caught:
        Later(getattr(impatient, operation), *arguments).result()
    assert caught.value.code == "network_timeout"
    if operation == "acquire":
        eventually(lambda: impatient.read(f"{key}-b"), "the key is granted to the token")
        assert held(impatient, f"{key}-b").token == token
    elif operation == "release":
        eventually(lambda: impatient.read(key) is None, "the key is free")
    assert isinstance(impatient.extend(grant), Grant) is (operation != "release")


@pytest.mark.parametrize("how", LOSSES)
def test_lost_reply_of_a_release_is_not_asked_for_again(
    line: Wire, behind: Any, client: Any, key: str, how: str
) -> None:
    """Nor of an acquire, or of extends: the server saw each question once, and did what it asked.

    The key is granted to the token; then it is free, and a release takes nothing from others.
    """

    def lost(ask: Callable[..., object], *arguments: object, times: int = 1) -> None:
        client.config_resetstat()
        line.fate = how
        with pytest.raises(BackendUnavailable) as caught:
            ask(*arguments)
        assert caught.value.code == LOSSES[how]
        # A server whose line is cut may not have come to all of them.
        assert _asked(client) == times or (how == "cut" and _asked(client) < times)

    _warm(behind, key)
    token = new_token()
    lost(behind.acquire, key, token, 30)
    record = held(behind, key)
    assert record.token == token
    grant = Grant(key, token, record.fence, 30, record.acquired_at, record.expires_at)
    assert isinstance(behind.acquire(key, new_token(), 30), Contended)
    grants = [grant, *(take(behind, f"{key}-{number}") for number in range(2))]
    lost(behind.extend_many, grants, times=3)
    assert all(isinstance(answer, Grant) for answer in behind.extend_many(grants))
    lost(behind.release, grant)
    other = take(behind, key)
    assert other.fence > grant.fence
    assert behind.release(grant) is False
    assert held(behind, key).token == other.token


def _warm(backend: Any, key: str) -> None:
    """Let the server know all scripts, and open a connection."""
    grant = take(backend, key)
    assert isinstance(backend.extend(grant), Grant)
    backend.read(key)
    assert backend.release(grant) is True


def _asked(client: Any) -> int:
    """Return how many scripts were called."""
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{each}", {"calls": 0})["calls"] for each in ("eval", "evalsha"))


def test_server_that_takes_no_connection_is_trouble_in_time(
    line: Wire, behind: Any, key: str
) -> None:
    """Also the log-in of a new connection is waited for no longer than `socket_timeout`."""
    line.fate = "lost"
    with pytest.raises(BackendUnavailable) as caught:
        Later(take, behind, key).result()
    assert caught.value.code == "network_timeout"
    assert take(behind, key).fence > 0


def test_handshake_of_tls_ends_in_the_time_of_the_call(key: str) -> None:
    """The server takes the connection, and says nothing, for less than `socket_timeout`."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        backend = backend_on(f"rediss://127.0.0.1:{silent.getsockname()[1]}/0")
        until = time.monotonic() + SILENCE
        with pytest.raises(BackendUnavailable) as caught:
            Later(durations.spend, until, backend.read, key).result()
        assert caught.value.code == "network_timeout"


def test_closed_idle_connection_is_no_error(backend: Any, client: Any, key: str) -> None:
    """A connection that the server closed between two questions is replaced unseen."""
    grant = take(backend, key)
    calls: list[Callable[[], object]] = [
        lambda: backend.read(key),
        lambda: backend.extend(grant),
        lambda: backend.extend_many([grant]),
        lambda: backend.list(key),
        lambda: backend.acquire(f"{key}-b", new_token(), 30),
        lambda: backend.release(grant),
    ]
    for call in calls:
        assert client.client_kill_filter(_type="normal", skipme=True) == 1
        assert call()


def test_grant_behind_both_releases_ends_by_its_ttl(
    private: Server, client: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stood still may grant what nobody waits for, and only for its ttl."""
    url = with_query(private.url, socket_timeout=SILENCE)
    backend = backend_on(url)
    _warm(backend, key)
    # Both releases find the server silent.
    monkeypatch.setattr(deferred_release, "later", lambda work, seconds=0.0: work())
    monkeypatch.setattr(deferred_release, "apart", lambda backend, work, most: not work())
    request = Request(
        key=key, ttl=1.0, wait=0.0, holder=current_holder(), retry=backend.config.retry
    )
    with stopped(client), pytest.raises(BackendUnavailable):
        acquire(backend, request, Block(None))
    eventually(lambda: backend.read(key), "the key is granted to nobody's use")
    eventually(lambda: backend.read(key) is None, "the lease ends by itself")
