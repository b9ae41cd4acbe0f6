"""What a process has to end when its interpreter does."""

from __future__ import annotations

import atexit
from dataclasses import dataclass, field

import pytest

from django_distlock.process.heartbeat import EXIT_PATIENCE, HeldHere


@dataclass
class Held:
    """A lease that is released, or cannot be, and what ends it."""

    token: str
    raises: bool = False
    is_watched: bool = False
    patience: list[float] = field(default_factory=list)

    @property
    def holding(self) -> Held:
        """Return itself."""
        return self

    def is_over(self) -> bool:
        """It never is."""
        return False

    def at_exit(self, patience: float) -> None:
        """Note it, and raise."""
        self.patience.append(patience)
        if self.raises:
            raise RuntimeError(self.token)


def test_release_that_raises_keeps_no_other_from_its_own() -> None:
    """All are released, in the order in which they were taken, and the error is told."""
    held, leases = HeldHere(), [Held("a"), Held("b", raises=True), Held("c")]
    for lease in leases:
        held.add(lease)
    atexit.unregister(held.release_all)
    with pytest.raises(RuntimeError, match="b"):
        held.release_all()
    (first,), (second,), (third,) = (lease.patience for lease in leases)
    assert EXIT_PATIENCE >= first >= second >= third >= 0
