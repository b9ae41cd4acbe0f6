"""Finish the work of ended tasks when a store that was unavailable answers again.

That work is to release unique keys and to store failed tasks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...core.clock import monotonic
from ...core.errors import BackendUnavailable, LockError
from ...core.logs import log_fields
from ...core.retry import Retry
from ...core.threads import TimerThread, in_child
from ...database.connections import close_here, use_own_connections

logger = logging.getLogger("django_distlock")

#: The pauses between two attempts.
PAUSES: Final = Retry(delay=0.5, factor=2.0, cap=15.0)
#: How many pieces of work may be left at the same time. More are logged and given up.
MOST: Final = 10_000


class Words(NamedTuple):
    """The event of a log record, and its texts for another attempt and for giving up."""

    event: str
    later: str
    never: str


_KEY: Final = Words(
    "release_failed", "%r stays held until its store answers: %s", "%r stays held for its ttl: %s"
)


def free(release: Callable[[], object], backend: str, key: str, words: Words = _KEY) -> None:
    """Release a key now, or as soon as the store is available, if this process still lives.

    Args:
        release: Releases the key, if it is still held. It may be called again, in another thread.
    """
    leftover = _Leftover(backend, key, release, words)
    if not leftover.is_done():
        _leftovers.put(leftover)


@dataclass(frozen=True, slots=True, eq=False)
class _Leftover:
    """One piece of work that is left to do."""

    alias: str
    key: str
    release: Callable[[], object]
    words: Words

    def is_done(self) -> bool:
        """Make one attempt; return False if the store is unavailable, so that it is repeated."""
        try:
            self.release()
        except BackendUnavailable as error:
            self.log(logging.WARNING, self.words.later, error)
            return False
        except LockError as error:
            self.log(logging.WARNING, self.words.never, error)
        return True

    def log(self, level: int, text: str, error: LockError) -> None:
        """Log why the work is not done."""
        extra = log_fields(self.words.event, backend=self.alias, key=self.key, error=error)
        logger.log(level, text, self.key, error, extra=extra)


class _Leftovers(TimerThread[_Leftover]):
    """Repeats the attempts of all leftovers in the same rounds until they succeed."""

    linger = 0.0
    _again_at = 0.0
    _pauses: Iterator[float]

    def __init__(self) -> None:
        super().__init__("distlock-leftovers", lambda _each: self._again_at, monotonic)

    def put(self, leftover: _Leftover) -> None:
        """Repeat the attempts of a leftover until it is done."""
        if len(self._leases) >= MOST:
            full = LockError(f"{MOST} others wait for it")
            leftover.log(logging.ERROR, leftover.words.never, full)
            return
        with suppress(RuntimeError):  # No thread can be started. The next leftover may start one.
            self.add(leftover)

    def _begin(self) -> None:
        use_own_connections(keeps_leases=True)
        self._pauses = PAUSES.pauses()
        self._again_at = monotonic() + next(self._pauses)

    def _look(self, now: float, due: float) -> None:
        if monotonic() < due:
            return
        silent: set[str] = set()
        try:
            for each in self.all():
                # One request per round to an unavailable store: other stores' leftovers wait.
                if each.alias not in silent and each.is_done():
                    self.discard(each)
                else:
                    silent.add(each.alias)
        finally:
            close_here()
            self._again_at = monotonic() + next(self._pauses)


_leftovers = _Leftovers()

in_child(_leftovers.forget)
