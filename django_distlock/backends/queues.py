"""The waiters of one process, in a queue for each key.

Only the first waiter of a queue makes attempts, and the others wait for their turn. So a wake-up
costs one attempt per process, and not one per waiter.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..core.keys import whole_name

#: How many released keys are remembered.
_MANY = 1024
#: The shortest time, in seconds, for which a process leaves a released key to others. They need
#: some of it to be woken.
SHORTEST_REST = 0.03


@dataclass(slots=True, eq=False)
class Turn:
    """A place in the queue of a key.

    Attributes:
        ring: Wakes the waiter; may be called in any thread, any number of times. Returns False if
            the waiter is gone.
        asked_at: When it made its last attempt, or came to the front, by `time.monotonic`.
    """

    name: str
    ring: Callable[[], bool]
    asked_at: float = 0.0


class Queues(dict[str, deque[Turn]]):
    """The queues of one backend, by the names of the keys in the store."""

    def __init__(self, name_of: Callable[[str], str] = str) -> None:
        self.name_of = name_of
        #: Seconds that the last attempt at any key took.
        self.took = 0.0
        self.forget()

    def forget(self) -> None:
        """Forget all waiters. Also called in a forked child, because they are the parent's."""
        self._mutex = threading.Lock()
        self.clear()
        self._called: Callable[[str], str] = str
        self._by_call: dict[str, str] = {}
        #: For released keys that others wanted: when that was, and for how long each was held.
        self.released_wanted: dict[str, tuple[float, float]] = {}

    def join(self, turn: Turn) -> None:
        """Join the end of the queue."""
        turn.asked_at = time.monotonic()
        with self._mutex:
            self.setdefault(turn.name, deque()).append(turn)
            self._by_call[self._called(turn.name)] = turn.name

    def call_by(self, called: Callable[[str], str]) -> None:
        """Set what the store's wake-up for a storage key says; the default is the key itself."""
        with self._mutex:
            self._called = called
            self._by_call = {called(name): name for name in self}

    def is_first(self, turn: Turn) -> bool:
        """Whether this waiter is the first in its queue."""
        return self.front(turn.name) is turn

    def front(self, name: str) -> Turn | None:
        """Return the first waiter in the queue of a key."""
        queue = self.get(name)
        try:
            return None if queue is None else queue[0]
        except IndexError:
            return None

    def all(self) -> list[Turn]:
        """Return all waiters."""
        # Copied in one step each, because other threads change the queues meanwhile.
        return [turn for queue in list(self.values()) for turn in list(queue)]

    def leave(self, turn: Turn) -> None:
        """Leave the queue, and wake the waiter that comes to the front by that."""
        if self._remove(turn):
            self.ring(turn.name)

    def ring(self, name: str) -> None:
        """Wake the first waiter for a key, which may be free; `name`: of the key or a lease."""
        name = whole_name(name)
        while (first := self.front(name)) is not None and not first.ring():
            # The waiter is gone, such as a task of a closed event loop. Wake the next one.
            self._remove(first)

    def answer(self, call: str) -> None:
        """Wake the first waiter for the key that a wake-up is about. Most are about other keys."""
        if (name := self._by_call.get(call)) is not None:
            self.ring(name)

    def ring_all(self) -> None:
        """Wake the first waiter of every queue, because wake-ups may have been missed."""
        for name in list(self):
            self.ring(name)

    def note_wanted(self, name: str) -> None:
        """Note that this process released a key for which only other processes wait: see `rest`."""
        name = whole_name(name)
        with self._mutex:
            if name in self:
                return  # Newcomers come behind the waiters of this process in any case.
            notes = self.released_wanted
            notes.pop(name, None)
            notes[name] = time.monotonic(), math.inf
            if len(notes) > _MANY:
                # Remove the oldest: the dictionary is in the order of time.
                del notes[next(iter(notes))]

    def note_held(self, name: str, seconds: float) -> None:
        """Note for how long a key was held that has just been released."""
        with self._mutex:
            if (noted := self.released_wanted.get(name)) is not None:
                self.released_wanted[name] = noted[0], seconds

    def rest(self, name: str, most: float) -> float:
        """Return the seconds to leave a key to others that waited when this process released it.

        That is as long as it was held, and `most` at most, because pollers pause for that long.
        """
        if (noted := self.released_wanted.get(name)) is None:
            return 0.0
        at, held = noted
        # Never negative: a test may have frozen the clock when this was noted.
        return min(most, max(SHORTEST_REST, held)) - max(0.0, time.monotonic() - at)

    def _remove(self, turn: Turn) -> bool:
        """Take a waiter out of its queue; return whether it was the first."""
        with self._mutex:
            queue = self.get(turn.name)
            if queue is None or turn not in queue:
                return False
            was_first = queue[0] is turn
            queue.remove(turn)
            if not queue:
                del self[turn.name]
                self._by_call.pop(self._called(turn.name), None)
            elif was_first:
                # Its silence counts from here on: it could make no attempt before.
                queue[0].asked_at = time.monotonic()
            return was_first
