"""Gauges of a process for whoever cannot ask it: written down every second, while they change."""

from __future__ import annotations

import os
import threading
import time
import weakref

from prometheus_client import CollectorRegistry, Gauge

from ...core.threads import start_thread
from ...locks import attempts
from ..metrics.instruments import LAG, PROCESS_GAUGES
from ..metrics.processes import process_numbers

#: Seconds between two looks.
INTERVAL = 1.0
#: Seconds that the thread stays when there is nothing to see: leases come and go quickly.
LINGER_SECONDS = 10.0


class Sampler:
    """Writes the gauges of a process to the files of `PROMETHEUS_MULTIPROC_DIR`.

    In a thread that begins with the first lock of the process, and never in a process that only
    forks others.
    """

    def __init__(self, registry: CollectorRegistry):
        self._gauges = {
            each: Gauge(
                each.prometheus_name, each.help, each.labels, registry=registry,
                multiprocess_mode="livemax" if each is LAG else "livesum",
            )
            for each in PROCESS_GAUGES
        }  # fmt: skip
        self._forget()
        attempts.when_waiting.append(self.wake)
        _every.add(self)

    def close(self, registry: CollectorRegistry) -> None:
        """Write no more."""
        attempts.when_waiting.remove(self.wake)
        _every.discard(self)
        for each in self._gauges.values():
            registry.unregister(each)

    def _forget(self) -> None:
        self._pid = os.getpid()
        # Reentrant, because a signal's handler may interrupt its holder, and take a lock.
        self._mutex = threading.RLock()
        self._woken_at = 0.0
        self._runs = False

    def wake(self) -> None:
        """Look from now on: there may be something to see."""
        if self._pid != os.getpid():
            self._forget()  # Not everybody who forks tells Python of it: uWSGI does not.
        with self._mutex:
            self._woken_at = time.monotonic()
            if self._runs:
                return
            try:
                start_thread(
                    threading.Thread(target=self._run, name="distlock-gauges", daemon=True)
                )
            except RuntimeError:
                return  # No more threads now, or ever: the interpreter ends.
            self._runs = True

    def _run(self) -> None:
        while self._look():
            time.sleep(INTERVAL)

    def _look(self) -> bool:
        """Write the gauges down; return whether to look again."""
        # Not while somebody forks: the child would find the library's mutex taken, for ever.
        with self._mutex:
            is_idle = True
            for instrument, numbers in process_numbers().items():
                for labels, value in numbers.items():
                    self._gauges[instrument].labels(*labels).set(value)
                    is_idle = is_idle and not value
            if is_idle and time.monotonic() - self._woken_at > LINGER_SECONDS:
                self._runs = False
            return self._runs


_every: weakref.WeakSet[Sampler] = weakref.WeakSet()


def _before_fork() -> None:
    for each in list(_every):
        each._mutex.acquire()


def _in_parent() -> None:
    for each in list(_every):
        each._mutex.release()


def _in_child() -> None:
    for each in list(_every):
        each._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
