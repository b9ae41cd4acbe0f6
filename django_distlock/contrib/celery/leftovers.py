"""What tasks that are over leave to do while a store is away: done when it is back.

Unique keys are given back, and tasks that failed are listed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from ...core.errors import BackendUnavailable, LockError
from ...core.logs import log_fields
from ...core.retry import Retry
from ...core.threads import start_thread
from ...database.connections import close_here, use_own_connections

logger = logging.getLogger("django_distlock")

#: The pauses between two attempts.
PAUSES: Final = Retry(delay=0.5, factor=2.0, cap=15.0)
#: What may be left at once: what comes behind it is told, and given up.
MOST: Final = 10_000


class Words(NamedTuple):
    """What the log says of something that is left to do.

    Attributes:
        event: The event of the records.
        later: Of what is tried again.
        never: Of what is given up.
    """

    event: str
    later: str
    never: str


_KEY: Final = Words(
    "release_failed", "%r stays held until its store answers: %s", "%r stays held for its ttl: %s"
)


def free(release: Callable[[], object], backend: str, key: str, words: Words = _KEY) -> None:
    """Give a key back: now, or as soon as the store answers and this process still lives.

    Args:
        release: Gives it back, or finds that this is over. It may be called again, elsewhere.
    """
    leftover = (backend, key, release, words)
    if not _is_done(leftover):
        _leftovers.put(leftover)


_Leftover = tuple[str, str, Callable[[], object], Words]


def _is_done(leftover: _Leftover) -> bool:
    """Try once. What fails for another reason than a store that is away is told, and is over."""
    alias, key, release, words = leftover
    try:
        release()
    except BackendUnavailable as error:
        extra = log_fields(words.event, backend=alias, key=key, error=error)
        logger.warning(words.later, key, error, extra=extra)
        return False
    except LockError as error:
        extra = log_fields(words.event, backend=alias, key=key, error=error)
        logger.warning(words.never, key, error, extra=extra)
    return True


class _Leftovers:
    """What is left to give back, and a thread that does so while there is any."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Have nothing to do. In a forked child too: the parent does its own."""
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._left: list[_Leftover] = []
        self._is_running = False

    def put(self, leftover: _Leftover) -> None:
        """Try again until it is done."""
        if self._pid != os.getpid():
            self.forget()  # Not everybody who forks tells Python of it.
        with self._mutex:
            is_full = len(self._left) >= MOST
            if not is_full:
                self._left.append(leftover)
                self._start()
        if is_full:
            alias, key, _release, words = leftover
            why = f"{MOST} others wait for it"
            logger.error(
                words.never, key, why, extra=log_fields(words.event, backend=alias, key=key)
            )

    def _start(self) -> None:
        if self._is_running:
            return
        try:
            start_thread(threading.Thread(target=self._run, name="distlock-leftovers", daemon=True))
        except RuntimeError:
            return  # No thread now, or ever: the next one may get it.
        self._is_running = True

    def _run(self) -> None:
        use_own_connections(keeps_leases=True)
        for pause in PAUSES.pauses():
            time.sleep(pause)
            try:
                self._try_all()
            finally:
                close_here()
            with self._mutex:
                if not self._left:
                    self._is_running = False
                    return

    def _try_all(self) -> None:
        with self._mutex:
            todo, self._left = self._left, []
        silent: set[str] = set()
        for leftover in todo:
            # One question for each round to a store that is away: others wait for their answers.
            if leftover[0] in silent or not _is_done(leftover):
                silent.add(leftover[0])
                with self._mutex:
                    self._left.append(leftover)


_leftovers = _Leftovers()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leftovers.forget)
