"""Find waiters of this process that wait for each other, and would wait in vain.

A key that was acquired inside `atomic()` stays taken until the transaction ends. So two
transactions that acquire the same keys in opposite order would wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..core.threads import in_child
from . import deferred_release

#: The alias of a backend, and a key.
Name = tuple[str, str]


@dataclass(eq=False, slots=True, kw_only=True)
class Wait:
    """One caller that waits for a key.

    Attributes:
        home: The thread whose transactions it works in: `deferred_release.home`.
        inside: The keys that its outer blocks hold while it waits, and whether they share them.
        until: When it gives up, by the store's `monotonic`.
        is_for_one: Whether it waits for one particular holder, and not for any of several permits.
        shared: Whether it waits to share the key, so that those who share it are not in the way.
        closes: Whether it has closed the key to those who want to share it: they wait for it.
        in_vain_for: If it waits in vain: the key that it holds and its holder waits for.
    """

    name: Name
    home: int
    inside: Mapping[Name, bool]
    until: float
    ring: Callable[[], object]
    is_for_one: bool = True
    shared: bool = False
    closes: bool = False
    in_vain_for: str | None = None

    def is_for(self, other: Wait) -> bool:
        """Whether it waits for a key that another waiter holds, or has closed."""
        if not self.is_for_one:
            return False
        held = [other.inside[self.name]] if self.name in other.inside else []
        # A lease that its own transactions keep is taken over, and not waited for.
        if self.home != other.home:
            held += deferred_release.kept_by_thread(self.name, other.home)
        if not self.shared:
            return bool(held)
        return not all(held) or (other.closes and other.name == self.name)


class _Waits:
    """All waiters of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all: in a forked child, the waiters are the parent's."""
        self._mutex = threading.Lock()
        self._all: set[Wait] = set()

    def begin(self, wait: Wait) -> None:
        """Add a waiter; if that closes a circle, stop one of its waiters."""
        with self._mutex:
            self._all.add(wait)
            self._break(wait)

    def end(self, wait: Wait) -> None:
        """Remove a waiter."""
        self._all.discard(wait)

    def closed(self, wait: Wait) -> None:
        """Note that a waiter has closed its key; if that makes a circle, stop one waiter."""
        with self._mutex:
            wait.closes = True
            self._break(wait)

    def deferred(self, name: Name) -> None:
        """Note that the transactions of the running code keep a key from now on.

        Waiters for it in the same transactions can take it over, and are woken.
        """
        if not self._all:
            return
        home = deferred_release.home()
        with self._mutex:
            # Iterate over a copy, because others end their waits meanwhile.
            for wait in list(filter(lambda each: each.home == home, [*self._all])):
                if wait.name == name:
                    wait.ring()
                else:
                    self._break(wait)

    def _break(self, wait: Wait) -> None:
        """Stop the waiter of each circle that would give up first anyway."""
        while (circle := self._circle(wait)) is not None:
            first = min(circle, key=lambda each: each.until)
            first.in_vain_for = circle[circle.index(first) - 1].name[1]
            first.ring()

    def _circle(self, wait: Wait) -> list[Wait] | None:
        """Return a circle of waiters through this one, in which each waits for the next."""
        # Each waiter is visited once: with keys that many share, there are very many paths.
        before: dict[Wait, Wait] = {}
        left = [wait]
        while left:
            each = left.pop()
            for other in list(self._all):
                if other in before or other.in_vain_for is not None or not each.is_for(other):
                    continue
                before[other] = each
                if other is wait:
                    circle = [each]
                    while circle[0] is not wait:
                        circle.insert(0, before[circle[0]])
                    return circle
                left.append(other)
        return None


waits = _Waits()

in_child(waits.forget)
