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
        waits._all.add(Ending(name=name, home=0, inside=(), until=math.inf, ring=int))
    waits.deferred(("memory", "key"))
    assert not waits._all
