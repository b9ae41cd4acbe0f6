"""Who waits for whom in this process."""

from __future__ import annotations

import math

from django_distlock.process.deadlocks import Wait, _Waits


def test_wait_that_ends_while_it_is_looked_at_is_in_nobodys_way() -> None:
    """Others end their waits without a mutex, while a block leaves its key to a transaction."""
    waits = _Waits()

    class Ending(Wait):
        def look(self) -> int:
            waits.end(self)
            return 0

        home = property(look, lambda *_: None)

    for number in range(3):
        name = "memory", f"key-{number}"
        waits._all.add(Ending(name=name, home=0, inside={}, until=math.inf, ring=int))
    waits.deferred(("memory", "key"))
    assert not waits._all


def test_each_wait_is_looked_at_once() -> None:
    """Where many share each of several keys, there are thousands of ways through who waits."""
    waits, asked = _Waits(), 0

    class Counted(Wait):
        def is_for(self, other: Wait) -> bool:
            nonlocal asked
            asked += 1
            return super().is_for(other)

    def begin(step: int, home: int, *more: int) -> Wait:
        inside = {("memory", f"key-{each}"): True for each in (step, *more)}
        name = "memory", f"key-{step + 1}"
        wait = Counted(name=name, home=home, inside=inside, until=home, ring=int)
        waits.begin(wait)
        return wait

    # Each wants to be alone with what all of the next step share.
    every = [begin(step, home) for step in range(4, 0, -1) for home in range(8)]
    assert asked <= len(every) ** 3
    assert not any(each.in_vain_for for each in every)
    # A circle is found all the same, and the first of it to give up is told.
    last = begin(0, -1, 5)
    assert last.in_vain_for == "key-5"
