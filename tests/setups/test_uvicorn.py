"""uvicorn: asynchronous views, and synchronous ones in threads beside the event loop."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from django_distlock import distlock
from django_distlock.handler import lock_backends
from tests.contract.helpers import Later
from tests.contract.locking import eventually, grantable, taken
from tests.shop.models import Row

from .clients import count
from .counting import PATIENCE, assert_none_lost, new_counter, together
from .servers import Site, served
from .sessions import named, sessions


def uvicorn(home: Path, **more: Any) -> AbstractContextManager[Site]:
    """Serve the project."""
    return served(
        home, "uvicorn", "tests.setups.web.asgi:application", "--host", "127.0.0.1",
        "--port", "{port}", "--lifespan", "off", "--no-access-log", **more,
    )  # fmt: skip


def test_requests_exclude_each_other(key: str, tmp_path: Path) -> None:
    """Asynchronous and synchronous views count without a loss, alone and on one key."""
    with uvicorn(tmp_path) as site:
        count(site, f"{key}:async", 24, view="acount")
        count(site, f"{key}:sync", 12, view="count")
        count(site, f"{key}:inside", 12, view="count", inside=1)
        new_counter(key)
        views = ["acount", "acount", "count"] * 2

        def client(view: str) -> list[Any]:
            return [site.get(view, key=key)["counted"] for _ in range(3)]

        counted = together(partial(client, view) for view in views)
        assert_none_lost(each for answers in counted for each in answers)


def test_many_requests_share_few_connections(key: str, tmp_path: Path) -> None:
    """However many views hold locks at once, ours are never more than `LOCK_CONNECTIONS`."""
    clients = 30
    held: set[str] = set()
    seen: list[int] = []
    with uvicorn(tmp_path, database=named(key)) as site:
        holding = []
        try:
            for each in range(clients):
                holding.append(site.request("await_alone", key=f"{key}:{each}"))
                seen.append(len(sessions(key)))

            def all_hold() -> bool:
                seen.append(len(sessions(key)))
                held.update(each.key for each in lock_backends["default"].list(key).records)
                return len(held) == clients

            assert eventually(all_hold, PATIENCE)
        finally:
            for request in holding:
                request.close()
        assert 1 <= max(seen) <= lock_backends["default"].config.lock_connections
        assert eventually(lambda: not lock_backends["default"].list(key).records, PATIENCE)


def test_client_that_goes_away_leaves_nothing(key: str, tmp_path: Path) -> None:
    """Django cancels its view: what it holds is given back, and who waits is granted nothing."""
    lock = distlock(key, wait=0)
    with uvicorn(tmp_path) as site:
        holder = site.request("ahold", key=key)
        assert eventually(lambda: taken(lock), PATIENCE)
        first = lock_backends["default"].read(key)
        assert first is not None
        waiters = [site.request("ahold", key=key) for _ in range(3)]
        new_counter(f"{key}:beside")
        # They are on their way when another one has been answered.
        site.get("acount", key=f"{key}:beside")
        for waiter in waiters:
            waiter.close()
        holder.close()
        assert eventually(lambda: grantable(lock), PATIENCE)


def test_end_of_the_server_frees_the_key(key: str, tmp_path: Path) -> None:
    """A request in flight at SIGTERM may finish; then the process ends with nothing held."""
    lock = distlock(key)
    with uvicorn(tmp_path) as site:
        holding = Later(site.get, "ahold", key=key)
        assert eventually(lambda: taken(lock), PATIENCE)
        stopping = Later(site.stop)
        Row.objects.create(name=f"{key}:let go")
        assert holding.result(PATIENCE)["fence"] == 1
        stopping.result(PATIENCE)
        assert not taken(lock)
