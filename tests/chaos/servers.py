"""The servers of a run, which a round kills, starts again, spoils, and lets lose their data."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.keeper import Server, children, folder, free_port, server_user
from tests.services import (
    _postgres_binaries,
    _run,
    private_mariadb,
    private_postgres,
    private_redis,
    private_redis_cluster,
)


class Killable:
    """A server that is killed, and started again on the same port and data.

    Args:
        run: Runs it, and kills it in the end.
        data: The folder with its data; None: it has none.

    Attributes:
        facts: The address and the version of the running server.
    """

    def __init__(self, run: Callable[[], AbstractContextManager[Any]], data: Path | None = None):
        self._run, self.data, self._running = run, data, ExitStack()
        self.facts: Any = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.facts = self._running.enter_context(self._run())

    def kill(self) -> None:
        """Kill it and all of its processes: nothing is written any more."""
        # PostgreSQL alone has children, and starts again only when all of them have ended.
        if self.data is not None and (self.data / "postmaster.pid").exists():
            master = int((self.data / "postmaster.pid").read_text().split()[0])
            for pid in (master, *children(master)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._running.close()

    def fill(self) -> None:
        """Leave no room on the disk that it has to itself."""
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1 << 20)):
                pass

    def make_room(self) -> None:
        """Take back what `fill` did."""
        self._filler.unlink()

    @property
    def _filler(self) -> Path:
        assert self.data is not None
        return self.data.with_name("filler")

    def lose(self) -> None:
        """Remove the data of a server that was killed."""
        assert self.data is not None
        shutil.rmtree(self.data)

    def back_up(self) -> None:
        """Keep what a running PostgreSQL has."""
        assert self.data is not None
        program = _postgres_binaries(self.data.parent) / "pg_basebackup"
        copy = self.data.with_name("copy")
        _run([program, "-D", copy, "-c", "fast", "-d", self.facts.url], self.data.parent)

    def restore(self) -> None:
        """Let a server that was killed have what was kept, and nothing else."""
        assert self.data is not None
        self.lose()
        self.data.with_name("copy").rename(self.data)


#: By the environment's name for the server's address.
_SERVERS: dict[str, Callable[[Path, int, bool], Callable[[], AbstractContextManager[Server]]]] = {
    "DISTLOCK_TEST_POSTGRES_URL": lambda data, port, durable: partial(
        private_postgres, data=data, port=port, durable=durable
    ),
    "DISTLOCK_TEST_MYSQL_URL": lambda data, port, durable: partial(
        private_mariadb, data, port=port, stop="KILL", innodb_flush_log_at_trx_commit=int(durable)
    ),
    "DISTLOCK_TEST_REDIS_URL": lambda data, port, durable: partial(
        private_redis, data=data, port=port, stop="KILL", durable=durable
    ),
    "DISTLOCK_TEST_REDIS_CLUSTER_URL": lambda _data, _port, _durable: private_redis_cluster,
}


@dataclass(frozen=True)
class Ground:
    """What the workers of a round stand on.

    Attributes:
        store: The server with the locks; None: it has none.
        pooler: Behind which some workers are; None: there is none.
    """

    store: Killable | None = None
    pooler: Killable | None = None


@contextmanager
def disk(path: Path) -> Iterator[None]:
    """Let a folder be a small disk of its own.

    Raises:
        CalledProcessError: This user may not mount one.
    """
    mode = f"size=512m,mode=0700,uid={path.stat().st_uid}"
    _mount("mount", "-t", "tmpfs", "-o", mode, "tmpfs", str(path))
    try:
        yield
    finally:
        _mount("umount", "--lazy", str(path))


def has_disks() -> bool:
    """Whether this user may make one."""
    with suppress(OSError, subprocess.CalledProcessError), folder() as path, disk(path):
        return True
    return False


def _mount(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def started(variables: set[str], *, durable: bool, disks: bool) -> Iterator[dict[str, Killable]]:
    """Start servers, and put their addresses into the environment.

    Args:
        variables: The environment's names for their addresses.
        durable: Whether an answer waits for the disk.
        disks: Whether each has a small disk of its own.
    """
    servers: dict[str, Killable] = {}
    with ExitStack() as stack:
        for variable, make in _SERVERS.items():
            os.environ.pop(variable, None)
            if variable in variables:
                home = stack.enter_context(folder(owner=server_user()))
                if disks:
                    stack.enter_context(disk(home))
                run = make(home / "data", free_port(), durable)
                servers[variable] = server = Killable(run, home / "data")
                server.start()
                stack.callback(server.kill)
                os.environ[variable] = server.facts.url
        yield servers


@contextmanager
def pooler() -> Iterator[Killable]:
    """Run a PgBouncer before PostgreSQL, with Django set up."""
    # It asks Django where the server is.
    from tests.poolers import pgbouncer

    port = free_port()
    made = Killable(partial(pgbouncer, port=port, stop="KILL"))
    made.start()
    try:
        yield made
    finally:
        made.kill()
