"""One connection of a process hears wake-ups, while somebody waits, and comes back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from redis import Redis

from tests.contract.helpers import at_once, contend, take
from tests.contract.stores_redis import RedisStore
from tests.keeper import Server
from tests.processes import spawn

from .hearing import Warned, hand_over, subscriptions, waiting
from .servers import PATIENCE, backend_on, eventually


def test_nobody_listens_before_somebody_waits(backend: Any, client: Any, key: str) -> None:
    """Who is granted at once or does not wait has no subscription; waiters share one."""
    grant = take(backend, key)
    contend(backend, key)
    assert backend.release(grant) is True
    assert backend.is_listening is False
    assert subscriptions(client) == 0
    with waiting(backend, key), waiting(backend, f"{key}-b"):
        assert all(at_once([partial(backend.listen, PATIENCE)] * 20))
        assert subscriptions(client) == 1
    assert backend.is_listening is False
    eventually(lambda: subscriptions(client) == 0, "the connection is closed")


def test_other_process_hands_over(store: RedisStore, key: str) -> None:
    """A waiter who asks nothing meanwhile is woken by a release elsewhere, and gets the key."""
    backend = store.variant()
    with spawn("tests.contract.lock_workers:hold_until_told", "redis", key, 60, "") as worker:
        worker.wait_for("held")
        with waiting(backend, key) as waiter:
            contend(backend, key, wanted=True)
            waiter.clear()
            worker.send("let go")
            # By nothing else than the message.
            waiter.sleep()
            assert backend.release(take(backend, key)) is True


@pytest.mark.parametrize(
    "settings",
    [
        {"protocol": 2},
        {"protocol": 3},
        {"decode_responses": True},
        {"health_check_interval": 0.01},
        {"socket_timeout": 1},
        {"db": 3},
        {"client_name": "shop"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("restless")
def test_connection_of_the_project(
    private: Server, client: Any, key: str, settings: dict[str, Any], warned: Warned
) -> None:
    """Whatever it is like, wake-ups come, and silence beyond its timeout is no trouble."""
    backend = backend_on(
        options={"client_factory": lambda: Redis.from_url(private.url, **settings)}
    )
    with waiting(backend, key) as waiter:
        before = _pings(client)
        eventually(lambda: _pings(client) > before + 2, "the server is asked time and again")
        for _ in range(10):
            hand_over(backend, backend, waiter, key)
        assert all(waiter.rung)
    assert warned() == []


def _pings(client: Any) -> int:
    return int(client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"])
