"""The waiters of one process, in a queue for each key.

Whoever is first in a queue asks the store, and the others wait for their turn: a wake-up costs one
attempt per process, and not one per waiter.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..core.keys import whole_name

#: How many notes about released keys are kept.
_MANY = 1024
#: Seconds at least that a process leaves a key to others who wait: a wake-up takes some of it.
SHORTEST_REST = 0.03


@dataclass(slots=True, eq=False)
class Turn:
    """A place in the queue of a key.

    Attributes:
        ring: Wakes the waiter; may be called in any thread, and as often as one likes. False: it
            is not there any more.
        asked_at: When it asked the store last, or came to the front, by `time.monotonic`.
    """

    name: str
    ring: Callable[[], bool]
    asked_at: float = 0.0


class Queues(dict[str, deque[Turn]]):
    """The queues of one backend's keys, first come first served, by what the store calls them."""

    def __init__(self, name_of: Callable[[str], str] = str) -> None:
        self.name_of = name_of
        #: Seconds that the last attempt at any key took.
        self.took = 0.0
        self.forget()

    def forget(self) -> None:
        """Forget everybody. In a forked child too: the waiters are its parent's."""
        self._mutex = threading.Lock()
        self.clear()
        self._called: Callable[[str], str] = str
        self._by_call: dict[str, str] = {}
        #: When, and for how long it had been held.
        self.released_wanted: dict[str, tuple[float, float]] = {}

    def join(self, turn: Turn) -> None:
        """Queue up at the end."""
        turn.asked_at = time.monotonic()
        with self._mutex:
            self.setdefault(turn.name, deque()).append(turn)
            self._by_call[self._called(turn.name)] = turn.name

    def call_by(self, called: Callable[[str], str]) -> None:
        """Say what the store calls out for a storage key: itself, unless this says otherwise."""
        with self._mutex:
            self._called = called
            self._by_call = {called(name): name for name in self}

    def is_first(self, turn: Turn) -> bool:
        """Whether it is this waiter's turn to ask the store."""
        return self.front(turn.name) is turn

    def front(self, name: str) -> Turn | None:
        """Return who is first in the queue of a key."""
        queue = self.get(name)
        try:
            return None if queue is None else queue[0]
        except IndexError:
            return None

    def all(self) -> list[Turn]:
        """Return who waits for any key."""
        # Copied in one step each: other threads go on waiting.
        return [turn for queue in list(self.values()) for turn in list(queue)]

    def leave(self, turn: Turn) -> None:
        """Leave the queue, wherever in it; who comes first by that is woken."""
        if self._remove(turn):
            self.ring(turn.name)

    def ring(self, name: str) -> None:
        """Wake whoever is first in the queue of a key, or of a lease's key: it may be free."""
        name = whole_name(name)
        while (first := self.front(name)) is not None and not first.ring():
            # Such as a task of an event loop that was closed: it must not strand the others.
            self._remove(first)

    def answer(self, call: str) -> None:
        """Wake whoever waits for what was called out. A call that means nobody costs one look."""
        if (name := self._by_call.get(call)) is not None:
            self.ring(name)

    def ring_all(self) -> None:
        """Wake the first of every queue: wake-ups may have been missed."""
        for name in list(self):
            self.ring(name)

    def note_wanted(self, name: str) -> None:
        """Note that this process gave a key up for which only others wait: see `ring`."""
        name = whole_name(name)
        with self._mutex:
            if name in self:
                return  # Newcomers come behind the waiters of this process in any case.
            notes = self.released_wanted
            notes.pop(name, None)
            notes[name] = time.monotonic(), math.inf
            if len(notes) > _MANY:
                # The oldest: notes are in the order of their times.
                del notes[next(iter(notes))]

    def note_held(self, name: str, seconds: float) -> None:
        """Note for how long a key was held that has just been given up."""
        with self._mutex:
            if (noted := self.released_wanted.get(name)) is not None:
                self.released_wanted[name] = noted[0], seconds

    def rest(self, name: str, most: float) -> float:
        """Return the seconds to leave a key to those who waited when this process gave it up.

        As long as it was held, and `most` at most: whom nobody wakes asks as often as that.
        """
        if (noted := self.released_wanted.get(name)) is None:
            return 0.0
        at, held = noted
        # A test may have frozen time when it was noted, at seconds since 1970.
        return min(most, max(SHORTEST_REST, held)) - max(0.0, time.monotonic() - at)

    def _remove(self, turn: Turn) -> bool:
        """Take a waiter out of its queue; return whether another one may come first by that."""
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
                # Those behind it count its silence from here on: it could not ask before.
                queue[0].asked_at = time.monotonic()
            return was_first
