"""What the long drill makes of the reports of its processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from django_distlock.handler import lock_backends
from django_distlock.management import endurance
from django_distlock.management.drill import TTL
from django_distlock.management.endurance import Endurance, Turn, violations
from tests.contract.helpers import Later
from tests.contract.locking import eventually


def turn(fence: int, asked: float, granted: float, held: float, **more: Any) -> Turn:
    """Give a turn on the one key of these tests."""
    return Turn(**{"key": "k", **more}, fence=fence, asked=asked, granted=granted, held=held)


def test_turns_one_after_the_other_are_as_promised() -> None:
    """In any order of reports; also a write of nobody's that stands between two others."""
    turns = [
        turn(7, 0, 4, 5, wrote=(4.1, 4.2)),
        turn(3, 0, 1, 2, wrote=(1.1, 1.2)),
        # It stood still behind its grant, and wrote before the next one had written.
        turn(5, 0, 3, 3, wrote=(3.5, 4.15)),
        turn(3, 0, 1, 9, key="another", wrote=(8, 9)),
    ]
    assert violations(turns) == []


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([turn(1, 0, 1, 2.5), turn(2, 0, 2, 3)], "k: fence 1 was held 0.500 s after a higher one"),
        ([turn(1, 0, 1, 3.5), turn(2, 0, 4, 5), turn(3, 0, 3, 3)], "fence 1 was held 0.500 s"),
        ([turn(1, 0, 1, 2), turn(1, 2, 3, 4)], "the fence 1 was granted twice"),
        ([turn(2, 0, 1, 2), turn(1, 3, 4, 5)], "fence 1 was granted behind a higher one"),
        (
            [turn(1, 0, 1, 1, wrote=(6, 7)), turn(2, 0, 4, 5, wrote=(4, 5))],
            "fence 1 was written behind a higher one",
        ),
    ],
)
def test_broken_promise_is_named(turns: list[Turn], said: str) -> None:
    """With the key and the fences that it is about."""
    assert any(said in each for each in violations(turns))


class Slow:
    """A process that begins when it has been looked at three times, and is disturbed then only."""

    pid = 1

    def __init__(self, *_: object):
        self.turns: list[Turn] = []
        self.steps = Counter[str]()
        self._looks = 0

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def raise_if_ended(self) -> None:
        """Begin, perhaps."""
        self._looks += 1
        if self._looks == 3:
            self.steps += {"granted": 1, "refused": 1}

    def send(self, _: object = None) -> bool:
        """Be stopped, killed, or told to end."""
        assert self.steps, "it has not begun"
        return True

    kill = let_go = finish = send


def test_process_that_begins_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine all would be killed before they lock anything."""
    monkeypatch.setattr(endurance, "Toiler", Slow)
    monkeypatch.setattr(endurance, "PROCESSES", 1)
    monkeypatch.setattr(endurance, "_targets", lambda *_: {})
    monkeypatch.setattr(endurance, "_CALM", (0, 0))
    # It tells of no grant.
    monkeypatch.setattr(endurance, "_WAIT", 0)
    monkeypatch.setattr(endurance, "_OVERDUE", (-TTL, -TTL))
    drill = Endurance(lock_backends["memory"], "drill", 0.05, 7, lambda _: None)
    drill.run()
    assert drill._has_met_all()
    assert drill._found == []


def test_process_that_is_granted_a_key_next_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was granted one before may have written, and then nothing stale is left."""
    monkeypatch.setattr(endurance, "_targets", lambda *_: {})
    drill: Any = Endurance(lock_backends["memory"], "drill", 1, 7, lambda _: None)
    before, next_one = Slow(), Slow()
    grants = drill._granted
    grants.put(before)
    victim = Later(drill._next_holder, [before, next_one])
    assert eventually(lambda: drill._granted is not grants)
    drill._granted.put(next_one)
    assert victim.result() is next_one
