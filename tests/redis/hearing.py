"""Those who hear what is called out: a stranger with a connection of his own, and waiters."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django_distlock.backends.queues import Turn
from tests.contract.helpers import contend, take

from .servers import PATIENCE, client_of, eventually

#: Returns the warnings so far.
Warned = Callable[[], list[str]]


def subscriptions(client: Any) -> int:
    """Return how many connections hear a server's wake-ups."""
    ((_channel, number),) = client.pubsub_numsub("distlock:wake")
    return int(number)


def threads(backend: Any) -> int:
    """Return how many threads of this process hear wake-ups for a backend of this alias."""
    name = f"distlock-{backend.alias}-wakeups"
    return sum(each.name == name for each in threading.enumerate())


@contextmanager
def overheard(url: str) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """Hear all channels of a server.

    Yields:
        What returns the channels and messages that were heard since it was called last.
    """
    # Said to oneself: whatever was said before has been heard by then.
    end = secrets.token_hex(6)
    with client_of(url) as client, client.pubsub() as hearing:

        def next_one() -> tuple[str, str]:
            message = hearing.get_message(timeout=PATIENCE)
            assert message is not None
            return message["channel"], message["data"]

        def so_far() -> list[tuple[str, str]]:
            client.publish(end, end)
            return list(iter(next_one, (end, end)))

        hearing.psubscribe("*")
        next_one()
        yield so_far


class Waiter:
    """Who waits for a key in this process.

    Attributes:
        rung: What the backend said about wake-ups, each time the waiter was rung.
    """

    def __init__(self, backend: Any, key: str):
        self.rung: list[bool] = []
        self._backend = backend
        self._changed = threading.Event()
        self._turn = Turn(backend.queues.name_of(key), self._ring)
        backend.queues.join(self._turn)

    def _ring(self) -> bool:
        self.rung.append(self._backend.is_listening)
        self._changed.set()
        return True

    def sleep(self) -> None:
        """Sleep until rung, which has to come."""
        assert self._changed.wait(PATIENCE), "nobody rang"

    def clear(self) -> None:
        """Forget that somebody rang."""
        self._changed.clear()

    def leave(self) -> None:
        """Wait no more."""
        self._backend.queues.leave(self._turn)


@contextmanager
def waiting(backend: Any, key: str) -> Iterator[Waiter]:
    """Wait for a key, and be woken."""
    was_listening = backend.is_listening
    waiter = Waiter(backend, key)
    try:
        # A server that has just been promoted ends what is connected once more.
        eventually(lambda: backend.listen(PATIENCE), "wake-ups are heard")
        # A new subscription rings once, since something may have gone unheard before.
        eventually(lambda: was_listening or waiter.rung, "the subscription rings")
        waiter.rung.clear()
        waiter.clear()
        yield waiter
    finally:
        waiter.leave()
        backend._listener.close_all()


def hand_over(holder: Any, backend: Any, waiter: Waiter, key: str) -> None:
    """Hold a key, give it back, and see that the waiter is woken by that."""
    grant = take(holder, key)
    contend(backend, key, wanted=True)
    waiter.clear()
    assert holder.release(grant) is True
    waiter.sleep()
    assert waiter.rung[-1]
    taken = take(backend, key)
    assert backend.release(taken) is True
