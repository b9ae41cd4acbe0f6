"""What this process still has to end when the interpreter does."""

from __future__ import annotations

import atexit
import multiprocessing
import os
from contextlib import ExitStack
from multiprocessing.util import Finalize
from typing import Protocol

from ..core.clock import monotonic

#: Seconds that the end of the interpreter spends on leases that are in somebody's way.
EXIT_PATIENCE = 2.0


class Held(Protocol):
    """The state of a lease."""

    token: str

    @property
    def is_watched(self) -> bool:
        """Whether somebody has yet to be told of its end."""

    def is_over(self) -> bool:
        """Whether its time has passed."""


class Ending(Protocol):
    """What ends a lease."""

    @property
    def holding(self) -> Held:
        """What it ends."""

    def at_exit(self, patience: float) -> None:
        """Release within so many seconds."""


class HeldHere:
    """The leases that this process has to end, once each."""

    def __init__(self) -> None:
        self._by_token: dict[str, Ending] = {}
        # The process that has registered `release_all`.
        self._process = 0
        # How many there may be before those that are over are forgotten.
        self._sweep_at = 0

    def __contains__(self, lease: Held) -> bool:
        found = self._by_token.get(lease.token)
        return found is not None and found.holding is lease

    def add(self, ending: Ending) -> None:
        """Take a lease in, or the one that goes on with its token."""
        if self._process != os.getpid():
            self._begin()
        if len(self._by_token) >= self._sweep_at:
            self._sweep()
        self._by_token[ending.holding.token] = ending

    def _begin(self) -> None:
        self._process = os.getpid()
        # In a fork as well: `multiprocessing` forgets there what the parent has registered.
        atexit.register(self.release_all)
        if multiprocessing.parent_process() is not None:
            # Before Python 3.13, its forks call nothing that `atexit` knows.
            Finalize(None, self.release_all, exitpriority=0)

    def rename(self, lease: Held, token: str) -> None:
        """Give a lease another token, by which it is found from now on."""
        ending, before = self._by_token.get(lease.token), lease.token
        if ending is not None:
            self._by_token[token] = ending
        lease.token = token
        self._by_token.pop(before, None)

    def discard(self, lease: Held) -> bool:
        """Forget a lease, which has ended; return False if somebody has done so."""
        return lease in self and self._by_token.pop(lease.token, None) is not None

    def all(self) -> list[Ending]:
        """Return what ends each of them."""
        # Copied in one step: other threads go on taking leases.
        return list(self._by_token.values())

    def release_all(self) -> None:
        """Release what is still held: the interpreter ends.

        What one release raises keeps no other lease from its own.
        """
        until = monotonic() + EXIT_PATIENCE

        def release(ending: Ending) -> None:
            ending.at_exit(max(0.0, until - monotonic()))

        with ExitStack() as stack:
            for ending in reversed(self.all()):
                stack.callback(release, ending)

    def _sweep(self) -> None:
        """Forget what is over: whoever takes leases and drops them leaves them to the ttl."""
        for lease in [each.holding for each in self.all()]:
            if not lease.is_watched and lease.is_over():
                self.discard(lease)
        self._sweep_at = max(1024, 2 * len(self._by_token))


held_here = HeldHere()
