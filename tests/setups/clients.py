"""What the clients of a web server do in these tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from functools import partial
from typing import Any

from django_distlock import distlock
from django_distlock.handler import lock_backends
from tests.contract.locking import eventually, grantable, taken

from .counting import PATIENCE, assert_none_lost, new_counter, together
from .servers import Site
from .sessions import sessions

#: Processes that serve, where a server forks.
WORKERS = 2


def workers(site: Site, key: str, *, but: Collection[int] = ()) -> dict[int, dict[str, Any]]:
    """Ask until each worker has answered; give what they said, by process id.

    Args:
        but: Processes whose answers do not count: those that shall go.
    """
    said: dict[int, dict[str, Any]] = {}

    def all_have_answered() -> bool:
        try:
            answers = together([partial(site.get, "worker", key=key)] * 2 * WORKERS)
        except OSError:
            return False  # A worker that goes may take a connection with it.
        said.update({each["pid"]: each for each in answers if each["pid"] not in but})
        return len(said) >= WORKERS

    assert eventually(all_have_answered, PATIENCE), said
    return said


def masters_lease_is_nobody_elses(site: Site, key: str) -> None:
    """Check that no worker can end or extend what its master holds, or has a session of it."""
    held = distlock(f"{key}:master").key
    before = lock_backends["default"].read(held)
    assert before is not None
    said = workers(site, key)
    for each in said.values():
        assert each["master"] == {"held": False, "release": False, "extend": "foreign_context"}
    assert lock_backends["default"].read(held) == before
    # For each worker Django's and one of ours, and nothing of the master's.
    own = {each["session"] for each in said.values()}
    assert len(own) == WORKERS
    assert own < sessions(key)
    assert len(sessions(key)) == 2 * WORKERS


def killed_worker_is_ended_by_the_ttl(site: Site, key: str) -> None:
    """Kill a worker that holds a key, which is free again behind ttl and grace, not later."""
    lock = distlock(key, wait=0)
    request = site.request("hold", key=key, ttl=0.5)
    try:
        assert eventually(lambda: taken(lock), PATIENCE)
        record = lock_backends["default"].read(key)
        assert record is not None
        os.kill(record.holder.pid, signal.SIGKILL)
        assert eventually(lambda: grantable(lock), timeout=10)
    finally:
        request.close()
    # The one in its place locks as well.
    assert record.holder.pid not in workers(site, key)


def count(
    site: Site, key: str, times: int, *, view: str = "count", by: int = 1, **query: object
) -> None:
    """Let clients count at once, and check that nothing is lost.

    Args:
        by: Processes that shall have counted. Which of them takes a connection is up to the
            system, so that there are as many rounds of `times` as it takes.
    """
    clients = 6
    answers: list[Any] = []
    new_counter(key)

    def client() -> list[Any]:
        return [site.get(view, key=key, **query) for _ in range(times // clients)]

    def all_have_counted() -> bool:
        for counted in together([client] * clients):
            answers.extend(counted)
        return len({each["pid"] for each in answers}) >= by

    assert eventually(all_have_counted, PATIENCE), {each["pid"] for each in answers}
    assert_none_lost(each["counted"] for each in answers)
