"""One timer for the deadlines of all leases of a process.

It waits on the monotonic clock and asks no store, so that nothing which hangs can delay it.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Protocol

from ..core.logs import log_fields
from ..core.threads import start_thread
from .host import monotonic

logger = logging.getLogger("django_distlock")

#: Seconds of one wait at most: the clock of a wait may stand while the machine sleeps.
LONGEST_WAIT = 1.0
#: Seconds that the thread stays when there is nothing to watch: leases come and go quickly.
LINGER_SECONDS = 10.0


class Watched(Protocol):
    """What a lease has to have to be watched."""

    def next_alarm(self) -> float:
        """Return when to be called, by `host.monotonic`; infinite: not as things are."""

    def is_over(self) -> bool:
        """Whether it has ended, also before its time."""

    def alarm(self) -> None:
        """Do what is due, without waiting for anything."""


class Alarms:
    """Calls leases when it is time, in a thread of its own."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Watch nothing. In a forked child too: the leases are its parent's."""
        self._pid = os.getpid()
        # Entered by itself: `Condition.__enter__` is Python, where a signal's exception leaks it.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._watched: dict[int, Watched] = {}
        self._thread: threading.Thread | None = None
        # When the thread looks next.
        self._looks_at = 0.0

    def watch(self, lease: Watched) -> None:
        """Call a lease at its times from now on; again, when they may have become sooner."""
        if self._pid != os.getpid():
            self.forget()  # Not everybody who forks tells Python of it: uWSGI does not.
        with self._mutex:
            self._watched[id(lease)] = lease
            if self._thread is None or not self._thread.is_alive():
                # Kept before it starts: a signal's handler may raise behind that.
                self._thread = threading.Thread(
                    target=self._run, name="distlock-alarms", daemon=True
                )
                self._looks_at = 0.0
                start_thread(self._thread)
            elif lease.next_alarm() < self._looks_at:
                self._changed.notify()

    def drop(self, lease: Watched) -> None:
        """Do not call a lease any more."""
        self._watched.pop(id(lease), None)

    def ring(self) -> None:
        """Call every lease whose time has come, in this thread."""
        now = monotonic()
        # Copied in one step: other threads go on taking leases.
        for lease in list(self._watched.values()):
            try:
                if lease.next_alarm() <= now or lease.is_over():
                    lease.alarm()
            except Exception:
                key = getattr(lease, "key", None)
                extra = log_fields(
                    "telling_failed", key=key, backend=getattr(lease, "backend", None)
                )
                logger.exception("A lease could not be told of its end", extra=extra)
                self.drop(lease)

    def _run(self) -> None:
        idle_since = monotonic()
        while True:
            self.ring()
            with self._mutex:
                if self._thread is not threading.current_thread():
                    return  # Another one was started in its place.
                now = monotonic()
                if self._watched:
                    idle_since = now
                elif now - idle_since >= LINGER_SECONDS:
                    self._thread = None
                    return
                times = [lease.next_alarm() for lease in list(self._watched.values())]
                longest = LONGEST_WAIT if times else LINGER_SECONDS
                self._looks_at = min([now + longest, *times])
                self._changed.wait(max(0.0, self._looks_at - now))


alarms = Alarms()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=alarms.forget)
