"""What the clients of a web server do in these tests."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from tests.contract.locking import eventually

from .counting import PATIENCE, assert_none_lost, new_counter, together
from .servers import Site

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
