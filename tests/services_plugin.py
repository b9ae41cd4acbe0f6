"""Choose the addresses of the servers before Django reads its settings; start what tests ask for.

A server is started once a run, in the process that reports, when the first worker has collected a
test that needs it: see `tests.tiers.servers`. Until then its port is reserved.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Client, Connection, Listener
from threading import Lock, Thread

import pytest

from tests import services
from tests.keeper import Server
from tests.redis_servers import node_port

#: What brings MariaDB's drivers.
DRIVERS = {"MySQLdb": "mysqlclient", "pymysql": "PyMySQL"}
#: The servers that answer, in a process that runs tests.
answering: set[str] = set()
#: The variable with the address of what starts the servers.
DESK = "DISTLOCK_TEST_DESK"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of server.

    Attributes:
        variable: Names the variable with its address.
        find: Gives the server that the environment names.
        start: Starts one of our own on a port.
        address: What its address is then.
    """

    variable: str
    find: Callable[[], AbstractContextManager[Server | None]]
    start: Callable[..., AbstractContextManager[Server]]
    address: str

    def is_given(self) -> bool:
        """Say whether the environment names a server."""
        return self.variable in os.environ or os.environ.get("DISTLOCK_TEST_USE_RUNNING") == "1"


KINDS = {
    "PostgreSQL": Kind(
        variable="DISTLOCK_TEST_POSTGRES_URL",
        find=services.postgres,
        start=services.private_postgres,
        address="postgresql://postgres@127.0.0.1:{}/postgres",
    ),
    "MariaDB": Kind(
        variable="DISTLOCK_TEST_MYSQL_URL",
        find=services.mariadb,
        start=services.private_mariadb,
        address="mysql://root@127.0.0.1:{}/distlock",
    ),
    "Redis": Kind(
        variable="DISTLOCK_TEST_REDIS_URL",
        find=services.redis,
        start=services.private_redis,
        address="redis://127.0.0.1:{}/0",
    ),
    "Redis Cluster": Kind(
        variable="DISTLOCK_TEST_REDIS_CLUSTER_URL",
        find=services.redis_cluster,
        start=services.private_redis_cluster,
        address="redis://127.0.0.1:{}/0",
    ),
}


class Desk:
    """Starts each server when it is asked for, once, and ends it with the run."""

    def __init__(self, stack: ExitStack) -> None:
        self.missing: list[str] = []
        self.told: dict[str, str] = {}
        self._stack = stack
        self._locks = {name: Lock() for name in KINDS}
        self._reserved: dict[str, socket.socket] = {}
        for name, kind in KINDS.items():
            self._choose(name, kind)

    def serve(self, path: str) -> None:
        """Answer the workers in a thread of its own."""
        listener = self._stack.enter_context(Listener(path, "AF_UNIX", backlog=16))
        Thread(target=self._accept, args=[listener], daemon=True, name="tests' desk").start()
        os.environ[DESK] = path

    def _accept(self, listener: Listener) -> None:
        # The end of the run closes the listener.
        with suppress(OSError):
            while True:
                Thread(target=self._answer, args=[listener.accept()], daemon=True).start()

    def _answer(self, worker: Connection) -> None:
        with worker:
            try:
                self._start(worker.recv())
            except Exception as error:  # noqa: BLE001 - the worker fails by it
                worker.send(f"{error}")
            else:
                worker.send("")

    def _choose(self, name: str, kind: Kind) -> None:
        """Say where a server is, or will be."""
        if kind.is_given() and (server := self._stack.enter_context(kind.find())):
            os.environ[kind.variable] = server.url
            self._tell(name, server)
            return
        if name == "MariaDB" and not services.has_mariadb():
            # An error, where it is required.
            self._stack.enter_context(services.mariadb())
            self.missing.append(services.NO_MARIADB)
            return
        port = node_port() if name == "Redis Cluster" else 0
        reserved = self._reserved[name] = socket.socket()
        reserved.bind(("127.0.0.1", port))
        os.environ[kind.variable] = kind.address.format(reserved.getsockname()[1])

    def _start(self, name: str) -> None:
        with self._locks[name]:
            if reserved := self._reserved.get(name):
                port = reserved.getsockname()[1]
                reserved.close()
                server = self._stack.enter_context(KINDS[name].start(port=port))
                self._tell(name, server)
                del self._reserved[name]

    def _tell(self, name: str, server: Server) -> None:
        if name == "MariaDB":
            driver = DRIVERS[services.mysql_driver().__name__]
            by = f", by {driver} {version(driver)}"
        else:
            by = f", by redis-py {version('redis')}" if "Redis" in name else ""
        self.told[name] = f"{name}: {server.version} ({server.source}){by}"


class Reporting:
    """Tells what the tests run against, where the servers are started."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def pytest_report_header(self) -> list[str]:
        """Say what is there already, and what cannot be."""
        return [*self._desk.told.values(), *self._desk.missing]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what the tests ran against."""
        terminalreporter.section("servers")
        for line in sorted(self._desk.told.values()) or ["none was asked for"]:
            terminalreporter.write_line(line)


def ask_for(names: Iterable[str]) -> None:
    """Wait until these servers answer.

    Raises:
        pytest.UsageError: One of them does not start.
    """
    path = os.environ[DESK]

    def ask(name: str) -> str:
        with Client(path, "AF_UNIX") as desk:
            desk.send(name)
            return str(desk.recv())

    with ThreadPoolExecutor() as pool:
        if troubles := [trouble for trouble in pool.map(ask, names) if trouble]:
            raise pytest.UsageError("\n".join(troubles))
    answering.update(names)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None]:
    """Choose the addresses, once a run: the workers of xdist, and runs of tests, inherit them."""
    if DESK not in os.environ:
        stack = ExitStack()
        early_config.add_cleanup(stack.close)
        scratch = stack.enter_context(services.folder())
        os.environ["DISTLOCK_TEST_SCRATCH"] = str(scratch)
        desk = Desk(stack)
        desk.serve(str(scratch / "desk"))
        early_config.pluginmanager.register(Reporting(desk))
    return (yield)
