"""The waiters of one process: who comes first, who is woken, and that nobody is forgotten."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from django_distlock.backends import queues as module
from django_distlock.backends.queues import Queues, Turn


class Waiter:
    """Somebody in a queue.

    Attributes:
        rung: How often.
        is_there: False: as the task of an event loop that was closed.
    """

    def __init__(self, queues: Queues, name: str = "a", *, is_there: bool = True):
        self.queues, self.rung, self.is_there = queues, 0, is_there
        self.turn = Turn(name, self.ring)
        queues.join(self.turn)

    def ring(self) -> bool:
        """Be woken."""
        self.rung += 1
        return self.is_there

    @property
    def is_first(self) -> bool:
        """Whether it is this one's turn."""
        return self.queues.is_first(self.turn)

    def leave(self) -> None:
        """Wait no more."""
        self.queues.leave(self.turn)


@pytest.fixture
def queues() -> Queues:
    """Give queues without anybody in them."""
    return Queues()


def test_first_to_come_is_first(queues: Queues) -> None:
    """Places are given in the order of arrival, and move up as those in front leave."""
    waiters = [Waiter(queues) for _ in range(5)]
    for number, waiter in enumerate(waiters):
        assert [each.is_first for each in waiters[number:]] == [True] + [False] * (4 - number)
        waiter.leave()
    assert not any(each.is_first for each in waiters)


def test_queue_is_that_of_a_key(queues: Queues) -> None:
    """Waiters of different keys do not see each other."""
    one, other = Waiter(queues, "a"), Waiter(queues, "b")
    assert one.is_first
    assert other.is_first
    queues.ring("a")
    assert (one.rung, other.rung) == (1, 0)


def test_only_the_first_is_rung(queues: Queues) -> None:
    """A key that became free wakes one waiter, not all of them."""
    waiters = [Waiter(queues) for _ in range(3)]
    queues.ring("a")
    queues.ring("a")
    assert [each.rung for each in waiters] == [2, 0, 0]


def test_silence_counts_from_the_front(queues: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has stood in a queue for long is not taken for stuck when its turn comes."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    first, second, third = (Waiter(queues) for _ in range(3))
    now = 200.0
    first.leave()
    assert (second.turn.asked_at, third.turn.asked_at) == (200.0, 100.0)
    now = 300.0
    third.leave()
    assert second.turn.asked_at == 200.0


def test_ringing_where_nobody_waits_does_nothing(queues: Queues) -> None:
    """Nobody has to be there when a key becomes free."""
    queues.ring("a")
    queues.ring_all()
    assert "a" not in queues


def test_first_of_every_queue_is_rung(queues: Queues) -> None:
    """When wake-ups may have been missed, one of each queue looks."""
    waiters = [Waiter(queues, name) for name in "aabb"]
    queues.ring_all()
    assert [each.rung for each in waiters] == [1, 0, 1, 0]


def test_who_comes_first_by_a_leave_is_rung(queues: Queues) -> None:
    """The key may be free: the one in front was granted it, or gave up as it came."""
    waiters = [Waiter(queues) for _ in range(3)]
    waiters[0].leave()
    assert [each.rung for each in waiters] == [0, 1, 0]


def test_leaving_from_the_middle_rings_nobody(queues: Queues) -> None:
    """Nothing has changed for the one in front, and the one behind comes first in its time."""
    waiters = [Waiter(queues) for _ in range(3)]
    waiters[1].leave()
    assert [each.rung for each in waiters] == [0, 0, 0]
    waiters[0].leave()
    assert waiters[2].is_first
    assert waiters[2].rung == 1


def test_leaving_twice_is_leaving_once(queues: Queues) -> None:
    """It takes nobody else's place away."""
    one, other, third = (Waiter(queues) for _ in range(3))
    one.leave()
    one.leave()
    assert other.is_first
    assert not third.is_first
    assert other.rung == 1


def test_newcomer_behind_a_leave_has_a_new_place(queues: Queues) -> None:
    """Who left and comes again is the last."""
    one, other = Waiter(queues), Waiter(queues)
    one.leave()
    again = Waiter(queues)
    assert other.is_first
    assert not again.is_first


def test_queue_knows_whether_anybody_waits(queues: Queues) -> None:
    """An empty queue is no queue: nothing is kept of keys that were waited for."""
    assert not queues
    waiters = [Waiter(queues, f"key-{number}") for number in range(100)]
    assert len(queues) == 100
    assert "key-7" in queues
    for waiter in waiters:
        waiter.leave()
    assert not queues
    assert "key-7" not in queues
    assert queues == {}


def test_who_is_not_there_any_more_is_passed_over(queues: Queues) -> None:
    """A task of a loop that was closed strands nobody: the next one is rung, and is first."""
    gone, live = Waiter(queues, is_there=False), Waiter(queues)
    queues.ring("a")
    assert (gone.rung, live.rung) == (1, 1)
    assert live.is_first
    gone.leave()
    assert live.is_first


def test_however_many_are_not_there_the_next_is_rung(queues: Queues) -> None:
    """A loop may have been closed under thousands of tasks."""
    for _ in range(3000):
        Waiter(queues, is_there=False)
    live = Waiter(queues)
    queues.ring("a")
    assert live.rung == 1
    assert live.is_first


def test_only_those_who_are_not_there_leave_an_empty_queue(queues: Queues) -> None:
    """And nothing behind."""
    for _ in range(3):
        Waiter(queues, is_there=False)
    queues.ring("a")
    assert not queues


def test_forgetting_forgets_everybody(queues: Queues) -> None:
    """A forked child has no waiters: they are its parent's."""
    waiter = Waiter(queues)
    queues.note_wanted("b")
    queues.forget()
    assert not queues
    assert not waiter.is_first
    waiter.leave()
    assert "b" not in queues.released_wanted


# What was given up although others wanted it


def test_key_that_others_wanted_is_noted(queues: Queues) -> None:
    """With the time since then."""
    assert "a" not in queues.released_wanted
    queues.note_wanted("a")
    since = time.monotonic() - queues.released_wanted["a"][0]
    assert 0 <= since < 5
    assert "b" not in queues.released_wanted


def test_key_that_our_own_waiters_want_is_not_noted(queues: Queues) -> None:
    """A newcomer comes behind them in any case."""
    Waiter(queues)
    queues.note_wanted("a")
    assert "a" not in queues.released_wanted


def test_wanted_key_is_left_to_others_for_as_long_as_it_was_held(queues: Queues) -> None:
    """At least for as long as a wake-up takes, and at most for as long as the caller says."""
    assert queues.rest("a", 1.0) == 0
    queues.note_held("a", 0.2)  # Nobody wanted it.
    assert queues.rest("a", 1.0) == 0
    queues.note_wanted("a")
    assert queues.rest("a", 1.0) == pytest.approx(1.0, abs=0.1)
    queues.note_held("a", 0.5)
    assert queues.rest("a", 1.0) == pytest.approx(0.5, abs=0.1)
    assert queues.rest("a", 0.25) == pytest.approx(0.25, abs=0.1)
    queues.note_held("a", 0)
    assert queues.rest("a", 1.0) <= module.SHORTEST_REST


def test_notes_do_not_grow_without_end(queues: Queues) -> None:
    """Where many keys are given up within a minute, the latest are known."""
    for number in range(4 * module._MANY):
        queues.note_wanted(f"key-{number}")
    assert len(queues.released_wanted) <= 2 * module._MANY
    assert f"key-{4 * module._MANY - 1}" in queues.released_wanted


# In threads


def test_everybody_comes_to_be_first(queues: Queues) -> None:
    """However waiters come, go and give up at the same time, nobody waits for ever."""
    stuck: list[int] = []
    order = threading.Barrier(8)

    def wait(number: int) -> None:
        order.wait(10)
        for turn_number in range(200):
            woken = threading.Event()

            def ring(woken: threading.Event = woken) -> bool:
                woken.set()
                return True

            turn = Turn("a", ring)
            queues.join(turn)
            gives_up = (number + turn_number) % 5 == 0
            while not queues.is_first(turn) and not gives_up:
                if not woken.wait(10):
                    stuck.append(number)
                    break
                woken.clear()
            queues.leave(turn)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert stuck == []
    assert not queues


def test_ring_reaches_somebody_while_others_leave(queues: Queues) -> None:
    """A ring that meets one who is just leaving is not lost: the next one looks."""
    for _ in range(300):
        seen = threading.Event()

        def ring(seen: threading.Event = seen) -> bool:
            seen.set()
            return True

        leaving, staying = Waiter(queues), Turn("a", ring)
        queues.join(staying)
        calls: list[Callable[[], None]] = [leaving.leave, lambda: queues.ring("a")]
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert seen.is_set()
        queues.leave(staying)


def test_two_who_leave_at_once_do_not_strand_the_third(
    queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one goes as it comes first: whoever is first by both is rung."""
    first, second, third = (Waiter(queues) for _ in range(3))

    class Between:
        """Lets the first one go just before the second one takes the mutex."""

        def __init__(self, mutex: threading.Lock):
            self._mutex = mutex
            self._is_used = False

        def __enter__(self) -> None:
            if not self._is_used:
                self._is_used = True
                first.leave()
            self._mutex.acquire()

        def __exit__(self, *_: object) -> None:
            self._mutex.release()

    monkeypatch.setattr(queues, "_mutex", Between(queues._mutex))
    second.leave()
    assert third.is_first
    assert third.rung == 1
