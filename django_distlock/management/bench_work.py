"""What a client of the bench does: it waits for a key, or competes, when it is told to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..core.errors import LockError
from ..handler import lock_backends
from ..locks import Lock, distlock
from .bench_floors import Floor, floor_of

#: What stands before the key of everything here. There is one bench of a backend at a time.
_PREFIX = "distlock-bench"
#: Held for as long as the bench runs.
RUN = _PREFIX
PAIR, HAND_OFF, HOT = (f"{_PREFIX}:{name}" for name in ("pair", "hand-off", "hot"))
#: Seconds that a key of the bench is held at most, were its holder killed.
TTL = 10.0
#: Seconds to wait for a key: what a killed bench has left is free by then.
PATIENCE = 12.0

#: Gives the next order; None: there are no more.
Hear = Callable[[], dict[str, Any] | None]
Say = Callable[[dict[str, Any]], object]


def own_key(number: int) -> str:
    """Return the key of one client alone: as few as there were clients, in all runs together."""
    return f"{_PREFIX}:client-{number}"


def keys(clients: int) -> list[str]:
    """Return all keys of a bench, but the one for the run."""
    return [PAIR, HAND_OFF, HOT, *map(own_key, range(clients))]


def lock_on(alias: str, key: str, wait: float = PATIENCE) -> Lock:
    """Return the lock on a key."""
    ttl = min(TTL, lock_backends[alias].config.max_ttl)
    return distlock(key, ttl=ttl, wait=wait, backend=alias)


@contextmanager
def floor_below(alias: str, key: str) -> Iterator[Floor | None]:
    """Open the floor of a key that was granted before.

    Yields:
        The floor; None: none is known.
    """
    floor = floor_of(lock_backends[alias], key)
    try:
        yield floor
    finally:
        if floor is not None:
            floor.close()


def serve(alias: str, hear: Hear, say: Say, is_over: Callable[[], bool]) -> None:
    """Be a client: do what is ordered, and say what came of it.

    Args:
        is_over: Whether nobody wants to know any more.
    """
    say({"step": "here"})
    while (order := hear()) is not None:
        try:
            if order["do"] == "wait":
                say(_wait(alias, say))
            else:
                say(_compete(alias, order, hear, say, is_over))
        except LockError as error:
            say({"step": "failed", "why": str(error), "code": error.code})


def _wait(alias: str, say: Say) -> dict[str, Any]:
    """Wait for the key that is handed over; say when it was granted."""
    say({"step": "waiting"})
    with lock_on(alias, HAND_OFF):
        granted_at = time.monotonic_ns()
    return {"step": "granted", "at": granted_at}


def _compete(
    alias: str, order: dict[str, Any], hear: Hear, say: Say, is_over: Callable[[], bool]
) -> dict[str, Any]:
    """Do pairs, or floors, from a common moment on; say how many in what time."""
    done, seconds = 0, 0.0
    with _work(alias, order["do"], order["key"]) as work:
        # The first one opens connections.
        work()
        say({"step": "ready"})
        begin = hear()
        if begin is not None:
            time.sleep(max(0.0, begin["at"] - time.monotonic()))
            # The one that is begun is counted with the time that it takes.
            while seconds < order["seconds"] and not is_over():
                work()
                done, seconds = done + 1, time.monotonic() - begin["at"]
    return {"step": "done", "rate": done / seconds if seconds else 0.0}


@contextmanager
def _work(alias: str, what: str, key: str) -> Iterator[Callable[[], None]]:
    if what == "floor":
        with floor_below(alias, key) as floor:

            def ask() -> None:
                if floor is not None:
                    floor.write()
                    floor.trip()

            yield ask
    else:
        lock = lock_on(alias, key)

        def pair() -> None:
            with lock:
                pass

        yield pair
