"""The clients of a bench: other processes of the project, or threads of this one."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ..core.errors import BackendUnavailable, LockError
from .bench_processes import program
from .bench_work import PATIENCE, serve

COMMAND = "distlock_bench"
#: What the lines of a client start with: settings may print, too.
_MARK = f"{COMMAND}: "
#: Seconds that a process may take to start.
_START_SECONDS = 60.0
#: Seconds that clients have to release what they hold.
_GOODBYE_SECONDS = 5.0
#: From the word to the common begin, so that the last client has heard it.
_NOTICE_SECONDS = 0.1
_UNAVAILABLE = {"service_unavailable", "network_timeout", "auth_failed", "rate_limited"}


class Client(ABC):
    """Someone else who uses the same locks, one order at a time."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    @abstractmethod
    def tell(self, order: dict[str, Any]) -> None:
        """Let it do something, one thing at a time; or say when to begin."""

    @abstractmethod
    def leave(self) -> None:
        """Let it end, behind the pair that it is at."""

    @abstractmethod
    def end(self, until: float) -> None:
        """Wait until it has ended.

        Args:
            until: When it has had its time, by the monotonic clock.
        """

    def wait_for(self, step: str, seconds: float) -> dict[str, Any]:
        """Return what it says when it has come to a step.

        Raises:
            LockError: Its store did not answer, it has ended, or it says nothing for so long.
        """
        try:
            said = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise LockError(f"A client of the bench says nothing for {seconds:g} s.") from None
        if said is None:
            raise LockError("A client of the bench has ended before it was done.")
        if said["step"] == "failed":
            kind = BackendUnavailable if said["code"] in _UNAVAILABLE else LockError
            raise kind(said["why"], code=said["code"])
        if said["step"] != step:
            raise LockError(f"A client of the bench is at {said['step']!r} instead of {step!r}.")
        return said


class ProcessClient(Client):
    """A process of its own, by the same settings."""

    def __init__(self, alias: str) -> None:
        super().__init__()
        # A group apart from the terminal's: Ctrl-C is for us. Its input ends when we leave it, or
        # end, even by SIGKILL.
        apart = {"process_group": 0} if os.name == "posix" else {"creationflags": 0x200}
        self._process: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]  # noqa: S603 - our own command
            [*program(COMMAND), COMMAND, "--client", alias],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(each or "." for each in sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **apart,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, order: dict[str, Any]) -> None:
        """See `Client`."""
        assert self._process.stdin  # noqa: S101 - asked for
        with suppress(OSError):  # It has ended, which `wait_for` says.
            self._process.stdin.write(f"{json.dumps(order)}\n")
            self._process.stdin.flush()

    def leave(self) -> None:
        """See `Client`."""
        assert self._process.stdin  # noqa: S101 - asked for
        with suppress(OSError):
            self._process.stdin.close()

    def end(self, until: float) -> None:
        """See `Client`: then it is killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout  # noqa: S101 - asked for
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith(_MARK):
                    self._answers.put(json.loads(line.removeprefix(_MARK)))
        self._answers.put(None)


class ThreadClient(Client):
    """A thread of this process."""

    def __init__(self, alias: str) -> None:
        super().__init__()
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(alias,), daemon=True)
        self._thread.start()

    def tell(self, order: dict[str, Any]) -> None:
        """See `Client`."""
        self._orders.put(order)

    def leave(self) -> None:
        """See `Client`."""
        self._over.set()
        self._orders.put(None)

    def end(self, until: float) -> None:
        """See `Client`: then it is left alone."""
        self._thread.join(max(0.0, until - time.monotonic()))

    def _serve(self, alias: str) -> None:
        try:
            serve(alias, self._orders.get, self._answers.put, self._over.is_set)
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self._answers.put({"step": "failed", "why": repr(error), "code": "internal"})
        finally:
            connections.close_all()
            self._answers.put(None)


class Team:
    """So many clients. Leaving its block ends them, whatever they are doing.

    Raises:
        LockError: One of them did not start.
    """

    def __init__(self, alias: str, size: int, kind: Callable[[str], Client]):
        self._clients: list[Client] = []
        self._alias = alias
        self._size = size
        self._kind = kind

    def __enter__(self) -> Self:
        try:
            for _ in range(self._size):
                self._clients.append(self._kind(self._alias))
            for each in self._clients:
                each.wait_for("here", _START_SECONDS)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def wait(self) -> Client:
        """Let one of them wait for the key that is handed over, and return it."""
        client = self._clients[0]
        client.tell({"do": "wait"})
        client.wait_for("waiting", PATIENCE)
        return client

    def compete(self, what: str, keys: Sequence[str], seconds: float) -> float:
        """Let all work from the same moment on; return how often they are done in a second.

        Args:
            what: "pair" or "floor".
            keys: The key of each.
        """
        for client, key in zip(self._clients, keys, strict=True):
            client.tell({"do": what, "key": key, "seconds": seconds})
        for client in self._clients:
            client.wait_for("ready", 2 * PATIENCE)
        begin = {"at": time.monotonic() + _NOTICE_SECONDS}
        for client in self._clients:
            client.tell(begin)
        patience = seconds + 2 * PATIENCE
        rates = [float(client.wait_for("done", patience)["rate"]) for client in self._clients]
        return sum(rates)

    def _end(self) -> None:
        for each in self._clients:
            each.leave()
        until = time.monotonic() + _GOODBYE_SECONDS
        for each in self._clients:
            each.end(until)


def be_client(alias: str, write: Callable[[str], object]) -> None:
    """Be such a process, until the input ends, or behind the pair that it is at then."""
    over = threading.Event()
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def listen() -> None:
        # Without a buffer, whose lock would be in the way of an end for another reason.
        with open(0, "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                orders.put(json.loads(line))
        over.set()
        orders.put(None)

    def say(what: dict[str, Any]) -> None:
        write(_MARK + json.dumps(what))

    threading.Thread(target=listen, daemon=True).start()
    with suppress(BrokenPipeError):  # Whoever started us is gone.
        try:
            serve(alias, orders.get, say, over.is_set)
        except ImproperlyConfigured as error:
            say({"step": "failed", "why": str(error), "code": "misconfigured"})
