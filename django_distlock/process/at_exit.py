"""The leases that this process has to release when the interpreter exits."""

from __future__ import annotations

import atexit
import multiprocessing
import os
from contextlib import ExitStack
from multiprocessing.util import Finalize
from typing import Protocol

from ..core.clock import monotonic

#: Seconds that the exit of the interpreter may take for releases.
EXIT_PATIENCE = 2.0


class Held(Protocol):
    """The state of a lease."""

    token: str

    @property
    def is_watched(self) -> bool:
        """Whether the timer still watches it."""

    def is_over(self) -> bool:
        """Whether its deadline has passed."""


class Ending(Protocol):
    """Releases a lease."""

    @property
    def holding(self) -> Held:
        """The lease."""

    def at_exit(self, patience: float) -> None:
        """Release within `patience` seconds."""


class HeldHere:
    """The leases that this process has to release."""

    def __init__(self) -> None:
        self._by_token: dict[str, Ending] = {}
        # The process that has registered `release_all`.
        self._process = 0
        # The number of leases at which expired ones are removed.
        self._sweep_at = 0

    def __contains__(self, lease: Held) -> bool:
        found = self._by_token.get(lease.token)
        return found is not None and found.holding is lease

    def add(self, ending: Ending) -> None:
        """Add a lease, or replace the one whose token it continues."""
        if self._process != os.getpid():
            self._begin()
        if len(self._by_token) >= self._sweep_at:
            self._sweep()
        self._by_token[ending.holding.token] = ending

    def _begin(self) -> None:
        self._process = os.getpid()
        # Again in a fork, where `multiprocessing` forgets what the parent has registered.
        atexit.register(self.release_all)
        if multiprocessing.parent_process() is not None:
            # Before Python 3.13, its forks do not call `atexit` functions.
            Finalize(None, self.release_all, exitpriority=0)

    def rename(self, lease: Held, token: str) -> None:
        """Give a lease another token."""
        ending, before = self._by_token.get(lease.token), lease.token
        if ending is not None:
            self._by_token[token] = ending
        lease.token = token
        self._by_token.pop(before, None)

    def discard(self, lease: Held) -> bool:
        """Forget a lease that has ended; return False if somebody else has done so."""
        return lease in self and self._by_token.pop(lease.token, None) is not None

    def all(self) -> list[Ending]:
        """Return the releases of all leases."""
        # Copied in one step, because other threads add leases meanwhile.
        return list(self._by_token.values())

    def release_all(self) -> None:
        """Release all leases at the exit of the interpreter, even if some releases raise."""
        until = monotonic() + EXIT_PATIENCE

        def release(ending: Ending) -> None:
            ending.at_exit(max(0.0, until - monotonic()))

        with ExitStack() as stack:
            for ending in reversed(self.all()):
                stack.callback(release, ending)

    def _sweep(self) -> None:
        """Forget expired leases that nobody has released, such as dropped ones."""
        for lease in [each.holding for each in self.all()]:
            if not lease.is_watched and lease.is_over():
                self.discard(lease)
        self._sweep_at = max(1024, 2 * len(self._by_token))


held_here = HeldHere()
