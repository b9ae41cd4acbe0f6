"""What one thread waits for and another one says."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class Bell:
    """An event that a signal's exception cannot leave locked.

    `threading.Event` is Python around a lock: interrupted in `wait`, it may keep the lock, and
    whoever sets it would hang. A simple queue is C alone.
    """

    __slots__ = ("_rung", "put")

    def __init__(self) -> None:
        self._rung: SimpleQueue[object] = SimpleQueue()
        #: Rings it, without any Python: as the callback of a weak reference, which it takes.
        self.put = self._rung.put

    @property
    def is_rung(self) -> bool:
        """Whether somebody has rung it since it was cleared."""
        return not self._rung.empty()

    def ring(self) -> None:
        """Wake everybody who waits, one after the other, and let nobody wait from now on."""
        self._rung.put(None)

    def clear(self) -> None:
        """Let the next ones wait."""
        with suppress(Empty):
            while True:
                self._rung.get_nowait()

    def wait(self, seconds: float) -> None:
        """Wait until it is rung, for so many seconds at most."""
        with suppress(Empty):
            self._rung.get(timeout=max(0.0, seconds))
            self._rung.put(None)
