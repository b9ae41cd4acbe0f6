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
PATIENCE_SECONDS = 60
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


class Team:
    """Clients that wait for work. They end with the block of `hire`, or with this process."""

    def __init__(self, size: int) -> None:
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, number), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for number in range(size):
            self._answer(number, PATIENCE_SECONDS)

    def turn(self, clients: int, seconds: float, prepare: Prepare, *arguments: Any) -> list[Tally]:
        """Let so many clients work for so long, all from the same moment on."""
        self.begin(clients, seconds, prepare, *arguments)
        return self.finish(clients, seconds)

    def begin(self, clients: int, seconds: float, prepare: Prepare, *arguments: Any) -> None:
        """Prepare so many clients, and let them go."""
        for pipe in self._pipes[:clients]:
            pipe.send((prepare, arguments, seconds))
        for number in range(clients):
            self._answer(number, PATIENCE_SECONDS)
        at = time.monotonic() + NOTICE_SECONDS
        for pipe in self._pipes[:clients]:
            pipe.send(at)

    def finish(self, clients: int, seconds: float) -> list[Tally]:
        """Wait for what `begin` has begun."""
        return [self._answer(number, seconds + PATIENCE_SECONDS) for number in range(clients)]

    def close(self) -> None:
        """Send everybody home."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(GOODBYE_SECONDS)
            process.kill()
            process.join()
            process.close()

    def _answer(self, number: int, patience: float) -> Any:
        pipe = self._pipes[number]
        try:
            if not pipe.poll(patience):
                raise RuntimeError(f"client {number} says nothing for {patience:.0f} s")
            answer = pipe.recv()
        except EOFError:
            raise RuntimeError(f"client {number} has ended") from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"client {number}: {answer!r}") from answer
        return answer


@contextmanager
def hire(size: int) -> Iterator[Team]:
    """Start a team for the block."""
    team = Team(size)
    try:
        yield team
    finally:
        team.close()


def serve(pipe: Connection, number: int) -> None:
    """Be a client: work when told, until the other end of the pipe closes."""
    django.setup()
    pipe.send("here")
    try:
        while True:
            prepare, arguments, seconds = pipe.recv()
            try:
                pipe.send(_work(pipe, prepare(number, *arguments), seconds))
            except Exception as error:  # noqa: BLE001 - whoever waits is told
                pipe.send(RuntimeError(repr(error)))
    except (EOFError, KeyboardInterrupt, ConnectionError):
        pass


def _work(pipe: Connection, prepared: AbstractContextManager[Work], seconds: float) -> Tally:
    outcomes: Counter[str] = Counter()
    with prepared as work:
        # The first one opens connections and fills caches.
        work()
        pipe.send("ready")
        begin = pipe.recv()
        time.sleep(max(0, begin - time.monotonic()))
        until = begin + seconds
        while (now := time.monotonic()) < until:
            outcomes[work()] += 1
        return Tally(outcomes, now - begin)
