"""The workers as processes, each with a wire of its own to the store."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tests.integration.wires import Wire

ROOT = Path(__file__).parent.parent.parent
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


class _Valve(threading.Event):
    """Opens for what goes through a wire, and lets it wait."""

    delay = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        opened = super().wait(timeout)
        time.sleep(self.delay)
        return opened


class BadWire(Wire):
    """A wire that can be spoiled. What it holds back arrives later, also from who has ended.

    Attributes:
        loses: "requests" or "answers": what comes in that direction never arrives, nor does what
            follows it on its connection, which stays open until it is cut; "answer": the next one
            is lost, and its connection cut; "": nothing is lost.
    """

    loses = ""

    def __init__(self, host: str, port: int):
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._flows = self.valve = _Valve()
        self._flows.set()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def ports(self) -> set[int]:
        """Where the server sees the ends of what goes through it: others may get their numbers."""
        ports = set()
        for each in self._sockets[1::2]:
            with suppress(OSError):  # It has just been closed.
                ports.add(each.getsockname()[1])
        return ports

    def cut(self) -> None:
        """End all connections; new ones are welcome."""
        cut, self._sockets = self._sockets, []
        for each in cut:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._threads = [each for each in self._threads if each.is_alive()]

    def _next_fate(self, *, is_answer: bool) -> str:
        if is_answer and self.loses == "answer":
            self.loses = ""
            return "cut"
        return "lost" if self.loses == ("answers" if is_answer else "requests") else "passed"


class Member:
    """A worker's process.

    Args:
        place: Which of the crew's places it has.
        name: No other process of the round has it.
    """

    def __init__(self, place: int, name: str, spec: dict[str, Any], environment: dict[str, str]):
        self.place, self.name = place, name
        history = Path(spec["history"])
        self._clock = history.with_suffix(".clock")
        self.shift_clock(0)
        if spec["clocks"] and FAKETIME is not None:
            environment |= {
                "LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }  # fmt: skip
        self._log = history.with_suffix(".log").open("wb")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.worker", json.dumps(spec)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )

    def shift_clock(self, seconds: float) -> None:
        """Let its wall clock be so much ahead."""
        self._clock.write_text(f"{seconds:+g}\n")

    def says(self, line: str, until: float) -> bool:
        """Wait until it says this; return whether that was in time."""
        assert self.popen.stdout
        # Wires may have more files open than `select()` can count.
        with selectors.DefaultSelector() as ready:
            ready.register(self.popen.stdout, selectors.EVENT_READ)
            while ready.select(max(0.0, until - time.monotonic())):
                said = self.popen.stdout.readline().decode().strip()
                if said in ("", line):
                    return said == line
        return False

    def stacks(self) -> str:
        """Return what it said last, and where all of its threads are."""
        self.popen.send_signal(signal.SIGUSR2)
        time.sleep(1)
        return Path(self._log.name).read_text(errors="replace")[-6000:]

    def end(self) -> None:
        """Kill it, unless it has ended."""
        self.popen.kill()
        self.popen.wait()
        for each in (self.popen.stdin, self.popen.stdout, self._log):
            assert each
            each.close()


class Crew:
    """The workers of a round.

    Args:
        spec: What a worker is told; see `worker.Worker`.
        variable: The environment's name for the address that wires are put before; "": none.
        pooler: The port of a pooler, which every third worker gets to instead; 0: there is none.
    """

    def __init__(
        self, size: int, folder: Path, spec: dict[str, Any], variable: str, pooler: int = 0
    ):
        self._folder, self._spec, self._variable = folder, spec, variable
        self.keys: list[str] = spec["keys"]
        self._lives = 0
        self.wires: list[BadWire] = []
        if variable:
            url = urlsplit(os.environ[variable])
            ports = [pooler if pooler and each % 3 == 1 else url.port or 0 for each in range(size)]
            self.wires = [BadWire(url.hostname or "", port) for port in ports]
        self.members = [self._started(place) for place in range(size)]

    @property
    def ports(self) -> set[int]:
        """Where the store's server sees the workers."""
        return set[int]().union(*(wire.ports for wire in self.wires))

    def say(self, line: str) -> None:
        """Write to all of them."""
        for member in self.members:
            assert member.popen.stdin
            with suppress(OSError):
                member.popen.stdin.write(line.encode() + b"\n")

    def hear(self, line: str, seconds: float) -> list[Member]:
        """Wait until all have said this, or ended where it is ""; return who has not in time."""
        until = time.monotonic() + seconds
        return [each for each in self.members if not each.says(line, until)]

    def replace(self, member: Member) -> None:
        """Kill a worker and start another one in its place."""
        member.end()
        self.members[member.place] = self._started(member.place)

    def close(self) -> None:
        """End everything."""
        for member in self.members:
            member.end()
        for wire in self.wires:
            wire.close()

    def _started(self, place: int) -> Member:
        self._lives += 1
        name = f"{place}.{self._lives}"
        more = {
            "name": name,
            "seed": f"{self._spec['seed']} {name}",
            "history": str(self._folder / f"{name}.jsonl"),
            # Some are left in peace, so that blocks go on for longer than 50 ms.
            "signals": self._spec["signals"] and place % 2 == 0,
        }
        return Member(place, name, {**self._spec, **more}, self._environment(place))

    def _environment(self, place: int) -> dict[str, str]:
        if not self.wires:
            return {}
        url = urlsplit(os.environ[self._variable])
        there = url.netloc.replace(f":{url.port}", f":{self.wires[place].port}")
        # Some have less patience with a server than what is held back takes.
        query = "socket_timeout=0.5" if url.scheme == "redis" and place % 3 else url.query
        return {self._variable: urlunsplit(url._replace(netloc=there, query=query))}
