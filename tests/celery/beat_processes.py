"""Beats and workers in processes of their own, on one broker and one store of locks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from django.conf import settings

from django_distlock.inspection import get_by_key
from tests.fork_server import Forked
from tests.integration.projects import Project

from . import programs

#: Seconds for what processes do on a machine with much else to do.
PATIENCE = 60
OURS = "django_distlock.contrib.celery.scheduler:DistlockScheduler"
INTERRUPTED = "tests.celery.beat_interrupted:Interrupted"
#: Seconds that a key stays taken behind the end of a lease.
GRACE = 1.0


class Site:
    """A Celery project: its schedule, its broker, its locks.

    Args:
        home: A folder of its own.
        key: What its leader holds.
        store: The alias of the lock backend, here; in the project it is "default".
        every: Seconds between two ticks.
        ttl: Seconds of the leader's lease.
        backend: What `DISTLOCK` says in the project, if it is not what it says here.
        using: The alias of the project's database, here.
        lifetime: Seconds after which its processes end by themselves.
        more: Other settings of the project.
    """

    def __init__(
        self,
        home: Path,
        key: str,
        store: str,
        *,
        every: float,
        ttl: float,
        backend: dict[str, Any] | None = None,
        using: str = "default",
        lifetime: int = 180,
        **more: Any,
    ):
        self.home, self.key, self.store, self.every, self.ttl = home, key, store, every, ttl
        self.project = Project(
            using,
            DISTLOCK={"default": backend or settings.DISTLOCK[store]},
            CELERY_BROKER_URL=settings.DISTLOCK["redis"]["OPTIONS"]["url"],
            CELERY_BROKER_TRANSPORT_OPTIONS={"global_keyprefix": f"{key}:"},
            CELERY_TASK_IGNORE_RESULT=True,
            CELERY_BEAT_DISTLOCK_KEY=key,
            CELERY_BEAT_DISTLOCK_TTL=ttl,
            **more,
        )
        self.environment = {
            "DISTLOCK_TEST_BEAT_HOME": str(home),
            "DISTLOCK_TEST_BEAT_EVERY": str(every),
            "DISTLOCK_TEST_BEAT_LIFETIME": str(lifetime),
        }
        self._number = 0

    def beat(self, scheduler: str = OURS, **environment: str) -> Program:
        """Start a beat that has no file of an earlier one."""
        file = self.home / f"schedule-{self._number + 1}"
        arguments = ("beat", "-S", scheduler, "-s", str(file), "--pidfile=", "-l", "INFO")
        return self._start(*arguments, **environment)

    def worker(self, *arguments: str, **environment: str) -> Program:
        """Start a worker."""
        name = f"worker-{self._number + 1}"
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "-c", "1")
        return self._start("worker", "-n", name, "-l", "INFO", *quiet, *arguments, **environment)

    def ran(self) -> list[dict[str, Any]]:
        """Return what workers have run so far, in the order in which it was sent."""
        with suppress(FileNotFoundError):
            lines = (self.home / "ran").read_text().splitlines()
            return sorted(map(json.loads, lines), key=lambda each: float(each["sent_at"]))
        return []

    def ticks(self) -> list[int]:
        """Return the numbers of the ticks that were run."""
        return [each["tick"] for each in self.ran()]

    def leader(self) -> int | None:
        """Return the number of the process that leads."""
        info = get_by_key(self.key, backend=self.store)
        return info.holder.pid if info else None

    def tell(self, what: str) -> None:
        """Let it happen to the next beat that comes there."""
        (self.home / what).touch()

    def wait_for_ticks(self, count: int) -> None:
        """Wait until so many were run."""
        patience = PATIENCE + count * self.every
        eventually(lambda: len(self.ran()) >= count, f"{count} ticks", patience)

    def wait_into(self, part: float) -> None:
        """Wait until so many parts of the next tick's time are over."""
        now = time.time() / self.every
        time.sleep(((1 + part - now % 1) % 1) * self.every)

    def _start(self, *arguments: str, **environment: str) -> Program:
        self._number += 1
        # Development mode counts what Celery leaves open.
        more = {
            **self.environment,
            **self.project._environment(),
            "PYTHONWARNINGS": "",
            **environment,
        }
        log = self.home / f"said-{self._number}"
        arguments = ("-A", "tests.celery.beat_project", *arguments)
        return Program(programs.start(arguments, {**os.environ, **more}, log), log)


class Program:
    """A running program. Leaving its block kills it, whatever it is doing."""

    def __init__(self, popen: Forked, log: Path):
        self._log = log
        self.popen = popen
        self.pid = popen.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            print(f"--- {self._log.name} (pid {self.pid})\n{self.said()}")
        self.kill()

    def said(self) -> str:
        """Return what it has said so far."""
        return self._log.read_text(errors="replace")

    def says(self, text: str, times: int = 1) -> None:
        """Wait until it has said this."""
        eventually(lambda: self.said().count(text) >= times or self.has_ended, text)
        assert self.said().count(text) >= times, f"ended before it said {text!r}:\n{self.said()}"

    @property
    def has_ended(self) -> bool:
        """Whether it has come to an end."""
        return self.popen.poll() is not None

    def signal(self, signum: int) -> None:
        """Send a signal to it."""
        os.kill(self.pid, signum)

    def kill(self) -> None:
        """End it at once, and what it has started."""
        programs.end(self.popen)

    def end(self) -> None:
        """Ask it to end, and wait until it has."""
        self.signal(signal.SIGTERM)
        self.popen.wait(PATIENCE)


@contextmanager
def two_beats(site: Site, scheduler: str = OURS) -> Iterator[tuple[Program, Program]]:
    """Run two beats; give the one that leads, and the one that stands by."""
    with site.beat(scheduler) as first:
        first.says("Beat leads")
        with site.beat(scheduler) as second:
            both = first, second
            # The second one leads where the machine stood still for longer than the ttl.
            eventually(lambda: any("Beat stands by" in each.said() for each in both), "one waits")
            yield both if site.leader() != second.pid else (second, first)


def eventually(is_so: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait until something is so."""
    give_up = time.monotonic() + patience
    while not is_so():
        assert time.monotonic() < give_up, f"not in {patience:g} s: {what}"
        time.sleep(0.05)
