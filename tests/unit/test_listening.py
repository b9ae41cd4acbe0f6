"""One thread of a process hears wake-ups, while somebody waits, and comes back when it was cut."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from django_distlock.backends import listening as module
from django_distlock.backends.listening import Listener, NoWakeUps
from django_distlock.backends.queues import Queues, Turn
from tests.contract.locking import eventually

from .test_heartbeat_thread import Interrupted, interrupted_starts


class LocalLine:
    """A subscription within this process: what `say` says is heard."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[str | Exception] = queue.SimpleQueue()
        self.closed = 0

    def hear(self, seconds: float) -> Iterable[str]:
        """See `listening.Line`."""
        try:
            said = self.said.get(timeout=seconds)
        except queue.Empty:
            return []
        if isinstance(said, Exception):
            raise said
        return [said]

    def say(self, said: str | Exception) -> None:
        """Call a key out, or break."""
        self.said.put(said)

    def close(self) -> None:
        """See `listening.Line`."""
        self.closed += 1
        self.said.put(ConnectionError("closed"))


class Server:
    """Where lines lead to.

    Attributes:
        lines: Those that were opened.
        asked: How often somebody tried.
        refuses: What is raised instead, the first for the next one.
        before: Called before a line is opened.
    """

    def __init__(self) -> None:
        self.lines: list[LocalLine] = []
        self.asked = 0
        self.refuses: list[Exception] = []
        self.before: Callable[[], object] = lambda: None

    def subscribe(self) -> LocalLine:
        """Open a line."""
        self.asked += 1
        self.before()
        if self.refuses:
            raise self.refuses.pop(0)
        line = LocalLine()
        self.lines.append(line)
        return line


class Waiter:
    """Somebody who waits for a key."""

    def __init__(self, queues: Queues, name: str):
        self.rung = 0
        self._queues = queues
        self._turn = Turn(name, self._ring)
        queues.join(self._turn)

    def _ring(self) -> bool:
        self.rung += 1
        return True

    def leave(self) -> None:
        """Wait no more."""
        self._queues.leave(self._turn)


@pytest.fixture
def server() -> Server:
    """Give a server that takes everybody."""
    return Server()


@pytest.fixture
def queues() -> Queues:
    """Give queues without anybody in them."""
    return Queues()


@pytest.fixture
def listener(server: Server, queues: Queues, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """Give a listener that looks and tries again soon."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.05)
    made = Listener("test-listener", server.subscribe, queues)
    yield made
    made.close_all()
    assert eventually(lambda: threads() == 0)


def threads() -> int:
    """Count the threads that listen."""
    return sum(each.name == "test-listener" for each in threading.enumerate())


def logged_by_listeners(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what they have logged; threads that earlier tests have left may log as well."""
    return [each for each in caplog.records if each.module == "listening"]


def test_listening_begins_with_the_subscription(listener: Listener, server: Server) -> None:
    """Nobody listens unasked; who asks is told that wake-ups come once the server subscribed."""
    assert not listener.is_live
    assert (threads(), server.asked) == (0, 0)
    assert listener.ensure(20)
    assert listener.is_live
    assert len(server.lines) == 1


def test_thread_whose_start_was_interrupted_is_the_only_one(
    listener: Listener, server: Server, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's exception behind the start leaves no second line that nobody closes."""
    Waiter(queues, "a")
    with interrupted_starts(monkeypatch), pytest.raises(Interrupted):
        listener.ensure(20)
    assert listener.ensure(20)
    assert (threads(), server.asked) == (1, 1)


def test_many_share_one_line(listener: Listener, server: Server, queues: Queues) -> None:
    """However many ask, at once or later."""
    answers: list[bool] = []
    asking = [
        threading.Thread(target=lambda: answers.append(listener.ensure(20))) for _ in range(10)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(10)
    assert answers == [True] * 10
    assert listener.ensure(0)
    assert (server.asked, threads()) == (1, 1)


def test_subscription_that_takes_long_is_waited_for_within_the_bound(
    listener: Listener, server: Server
) -> None:
    """Who may wait for less is told that wake-ups do not come yet."""
    goes_on = threading.Event()
    server.before = goes_on.wait
    for seconds in (0.1, 0):
        assert not listener.ensure(seconds)
    goes_on.set()
    assert listener.ensure(20)
    assert server.asked == 1


def test_first_waiter_of_what_is_called_out_is_rung(
    listener: Listener, server: Server, queues: Queues
) -> None:
    """And nobody else."""
    first, second, other = Waiter(queues, "a"), Waiter(queues, "a"), Waiter(queues, "b")
    assert listener.ensure(20)
    assert eventually(lambda: (first.rung, other.rung) == (1, 1))
    server.lines[0].say("a")
    server.lines[0].say("c")
    assert eventually(lambda: first.rung == 2)
    assert (second.rung, other.rung) == (0, 1)


def test_broken_line_is_told_once_and_opened_again(
    listener: Listener, server: Server, queues: Queues, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile nobody relies on it; whoever waits is rung when it goes and when it comes."""
    caplog.set_level(logging.INFO, "django_distlock")
    waiter = Waiter(queues, "a")
    assert listener.ensure(20)
    assert eventually(lambda: waiter.rung == 1)
    comes_back = threading.Event()
    server.before = comes_back.wait
    server.refuses = [OSError("still away"), OSError("and still")]
    server.lines[0].say(OSError("cut"))
    assert eventually(lambda: waiter.rung == 2)
    assert not listener.is_live
    assert server.lines[0].closed
    comes_back.set()
    assert eventually(lambda: listener.is_live)
    assert eventually(lambda: waiter.rung == 3)
    assert server.asked == 4
    told = logged_by_listeners(caplog)
    warnings = [each for each in told if each.levelno == logging.WARNING]
    assert [each.getMessage().count("cut") for each in warnings] == [1]
    assert "again" in told[-1].getMessage()


def test_server_that_cannot_wake_is_told_once_and_left_alone(
    listener: Listener,
    server: Server,
    queues: Queues,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Waiters go back to asking, and do not make the process try again and again."""
    server.refuses = [NoWakeUps("a pooler stands in between")] * 9
    Waiter(queues, "a")
    for _ in range(5):
        assert not listener.ensure(1)
    assert server.asked == 1
    told = logged_by_listeners(caplog)
    assert [each.getMessage().count("pooler") for each in told] == [1]


def test_server_that_could_not_wake_is_asked_again_after_a_while(
    listener: Listener, server: Server, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may have changed the settings of the pooler."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)
    server.refuses = [NoWakeUps("a pooler stands in between")]
    waiter = Waiter(queues, "a")
    assert eventually(lambda: listener.ensure(0.1))
    assert server.asked == 2
    waiter.leave()


def test_line_is_closed_when_nobody_waits(
    listener: Listener, server: Server, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ends with it; whoever waits later begins anew."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.2)
    waiter = Waiter(queues, "a")
    assert listener.ensure(20)
    time.sleep(0.6)
    assert listener.is_live, "closed while somebody waited"
    waiter.leave()
    assert eventually(lambda: not listener.is_live and threads() == 0)
    assert server.lines[0].closed
    assert listener.ensure(20)
    assert len(server.lines) == 2


def test_lost_line_is_not_opened_again_for_nobody(
    listener: Listener, server: Server, queues: Queues
) -> None:
    """Where nobody waits, a line that breaks is simply gone."""
    assert listener.ensure(20)
    server.lines[0].say(OSError("cut"))
    assert eventually(lambda: threads() == 0)
    assert server.asked == 1


def test_closing_ends_the_thread_and_the_line(listener: Listener, server: Server) -> None:
    """Such as before a database is dropped; it is no end, and who waits next listens."""
    assert listener.ensure(20)
    for _ in range(2):
        listener.close_all()
        assert not listener.is_live
        assert threads() == 0
    assert server.lines[0].closed
    assert listener.ensure(20)
    assert len(server.lines) == 2


def test_closing_while_a_line_is_opened_leaves_none_open(
    listener: Listener, server: Server
) -> None:
    """Whoever opens it closes it."""
    goes_on = threading.Event()
    server.before = goes_on.wait
    assert not listener.ensure(0)
    assert eventually(lambda: server.asked == 1)
    threading.Timer(0.2, goes_on.set).start()
    listener.close_all()
    assert eventually(lambda: threads() == 0)
    assert [each.closed > 0 for each in server.lines] == [True]
    assert not listener.is_live


def test_forgetting_begins_anew_and_touches_nothing(listener: Listener, server: Server) -> None:
    """As in a forked child: thread and connection are the parent's, who goes on with them."""
    assert listener.ensure(20)
    listener.forget()
    assert not listener.is_live
    assert server.lines[0].closed == 0
    assert listener.ensure(20)
    assert len(server.lines) == 2
    server.lines[0].say(OSError("the parent's ends"))
    assert eventually(lambda: threads() == 1)
    assert listener.is_live


def test_whoever_comes_as_the_line_closes_is_rung_or_heard(
    listener: Listener, server: Server, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No waiter relies on a line that was just given up for want of waiters."""
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.0)
    for _ in range(200):
        waiter = Waiter(queues, "a")
        relies = listener.is_live or listener.ensure(20)
        before = waiter.rung
        if relies:
            for line in list(server.lines):
                line.say("a")
            assert eventually(lambda w=waiter, b=before: w.rung > b or w.rung > 0)  # type: ignore[misc]
        waiter.leave()
