"""Processes that ask a store at the same time, told when to begin."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import django

#: Does one operation and says what came of it.
Work = Callable[[], str]
#: Prepares the work of the client with this number, and clears up after it.
Prepare = Callable[..., AbstractContextManager[Work]]

#: What is not answered by then never will be.
PATIENCE_SECONDS = 180
#: Whoever has not gone home by then is in the middle of something, and is stopped.
GOODBYE_SECONDS = 2
#: From the word to the begin, so that the last client has heard it.
NOTICE_SECONDS = 0.05


@dataclass(frozen=True)
class Tally:
    """What one client did.

    Attributes:
        outcomes: How many operations ended how.
        seconds: From the common begin to the end of its last one.
    """

    outcomes: Counter[str]
    seconds: float


class Partner:
    """Another process, which makes calls for this one, one after the other.

    It ends with the block of `hired`, or with this process.
    """

    def __init__(self, name: str = "the other process") -> None:
        context = get_context("spawn")
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, function: Callable[..., object], *arguments: Any) -> None:
        """Let it call a function. Function and arguments are pickled."""
        self.tell((function, arguments))

    def tell(self, what: object) -> None:
        """Send it what it waits for."""
        self._pipe.send(what)

    def result(self, patience: float = PATIENCE_SECONDS) -> Any:
        """Wait for what it says next: what came of the call, unless that itself says more."""
        try:
            if not self._pipe.poll(patience):
                raise RuntimeError(f"{self._name} says nothing for {patience:.0f} s")
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self._name} has ended") from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"{self._name}: {answer}") from answer
        return answer

    def leave(self) -> None:
        """Send it home."""
        self._pipe.close()

    def end(self) -> None:
        """Wait until it has gone home, or stop it."""
        self._process.join(GOODBYE_SECONDS)
        self._process.kill()
        self._process.join()
        self._process.close()


class Team:
    """Clients that wait for work."""

    def __init__(self, partners: list[Partner]) -> None:
        self._partners = partners

    def turn(self, clients: int, seconds: float, prepare: Prepare, *arguments: Any) -> list[Tally]:
        """Let so many clients work for so long, all from the same moment on."""
        self.begin(clients, seconds, prepare, *arguments)
        return self.finish(clients, seconds)

    def begin(self, clients: int, seconds: float, prepare: Prepare, *arguments: Any) -> None:
        """Prepare so many clients, and let them go."""
        chosen = self._partners[:clients]
        for number, each in enumerate(chosen):
            each.begin(work_together, seconds, prepare, number, *arguments)
        for each in chosen:
            each.result()
        at = time.monotonic() + NOTICE_SECONDS
        for each in chosen:
            each.tell(at)

    def finish(self, clients: int, seconds: float) -> list[Tally]:
        """Wait for what `begin` has begun."""
        return [each.result(seconds + PATIENCE_SECONDS) for each in self._partners[:clients]]


@contextmanager
def hired(size: int = 1) -> Iterator[list[Partner]]:
    """Start so many processes for the block."""
    partners = [Partner(f"process {number}") for number in range(size)]
    try:
        for each in partners:
            each.result()
        yield partners
    finally:
        for each in partners:
            each.leave()
        for each in partners:
            each.end()


@contextmanager
def hire(size: int) -> Iterator[Team]:
    """Start a team for the block."""
    with hired(size) as partners:
        yield Team(partners)


#: The way to whoever started this process.
_home: list[Connection] = []


def serve(pipe: Connection) -> None:
    """Be a partner: make calls until the other end of the pipe closes."""
    _home.append(pipe)
    try:
        django.setup()
        pipe.send(None)
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send(function(*arguments))
            except Exception as error:  # noqa: BLE001 - whoever waits is told
                pipe.send(RuntimeError(repr(error)))
    except (EOFError, KeyboardInterrupt, ConnectionError):
        pass


def work_together(seconds: float, prepare: Prepare, *arguments: Any) -> Tally:
    """Be a client: say when the work is prepared, and begin when all do."""
    outcomes: Counter[str] = Counter()
    pipe = _home[0]
    with prepare(*arguments) as work:
        # The first one opens connections and fills caches.
        work()
        pipe.send("ready")
        begin = pipe.recv()
        time.sleep(max(0, begin - time.monotonic()))
        until = begin + seconds
        while (now := time.monotonic()) < until:
            outcomes[work()] += 1
        return Tally(outcomes, now - begin)
