"""Waiters of this process that wait for each other, and so would wait in vain.

A key that was locked inside `atomic()` stays taken until the transaction ends. So a transaction
that waits for its next key has those before: two that go on in opposite order never end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..core.threads import in_child
from . import deferred_release

#: The alias of a backend, and a key.
Name = tuple[str, str]


@dataclass(eq=False, slots=True, kw_only=True)
class Wait:
    """One caller who waits for a key.

    Attributes:
        home: Whose transactions it works in: see `transactions.home`.
        inside: What is held by the blocks that it cannot leave before.
        until: When it gives up, by `host.monotonic`.
        is_for_one: Whether nobody else's end lets it go on.
        in_vain_for: The key that it has and that is waited for, where it waits in vain.
    """

    name: Name
    home: int
    inside: tuple[Name, ...]
    until: float
    ring: Callable[[], object]
    is_for_one: bool = True
    in_vain_for: str | None = None

    def is_for(self, other: Wait) -> bool:
        """Whether it cannot end before another one does."""
        if not self.is_for_one:
            return False
        if self.name in other.inside:
            return True
        # What its own transactions keep is nothing to wait for: a block goes on with it.
        return self.home != other.home and other.home in deferred_release.keepers(self.name)


class _Waits:
    """All who wait in this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget everybody: in a forked child, the waiters are its parent's."""
        self._mutex = threading.Lock()
        self._all: set[Wait] = set()

    def begin(self, wait: Wait) -> None:
        """Let a caller wait; where a circle is closed by that, somebody in it is told."""
        with self._mutex:
            self._all.add(wait)
            self._break(wait)

    def end(self, wait: Wait) -> None:
        """Say that a caller does not wait any more."""
        self._all.discard(wait)

    def deferred(self, name: Name) -> None:
        """Say that the transactions of the running code keep a key from now on.

        Those who wait for it in the same transactions can go on with it, and are woken.
        """
        if not self._all:
            return
        home = deferred_release.home()
        with self._mutex:
            # Of a copy: others end their waits meanwhile.
            for wait in list(filter(lambda each: each.home == home, [*self._all])):
                if wait.name == name:
                    wait.ring()
                else:
                    self._break(wait)

    def _break(self, wait: Wait) -> None:
        """Tell the one of a circle who gives up first: until then, nobody in it can go on."""
        while (circle := self._circle(wait)) is not None:
            first = min(circle, key=lambda each: each.until)
            first.in_vain_for = circle[circle.index(first) - 1].name[1]
            first.ring()

    def _circle(self, wait: Wait) -> list[Wait] | None:
        """Return a circle of waits, each for the next one, that begins with this one."""
        # Each is looked at once: of keys that many share, there are very many ways.
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
