"""Servers of production: a pooler, web servers, and a PostgreSQL that can be stopped."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from django.db import connections

from tests import services
from tests.fork_server import Forked, fork
from tests.poolers import without
from tests.services import folder, free_port, kept, server_user

from .counting import PATIENCE

ROOT = Path(__file__).parents[2]
#: No web server outlives its test by more, should the test itself be killed.
LIFETIME_SECONDS = 180

# The alarm is kept over `exec`. Forked workers do not inherit it; they end with their master.
LIMITED = """
import os, signal, sys
signal.alarm(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""


# Web servers


class Site:
    """A web server that serves the small project of these tests."""

    def __init__(self, port: int, process: Forked | subprocess.Popen[bytes], log: Path):
        self.port = port
        self.process = process
        self._log = log

    def get(self, view: str, **query: object) -> Any:
        """Ask, and give what the view answered."""
        connection = self.request(view, **query)
        try:
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        assert response.status == 200, f"{response.status}: {body!r}\n{self.said()}"
        return json.loads(body)

    def request(self, view: str, **query: object) -> http.client.HTTPConnection:
        """Ask, and do not wait for the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        # One request per connection, so that no worker is bound to one client.
        connection.request("GET", f"/{view}?{urlencode(query)}", headers={"Connection": "close"})
        return connection

    def said(self) -> str:
        """Give what the server has written."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End the server as its supervisor would, and wait for its end."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)


@contextmanager
def served(
    home: Path,
    program: str,
    *arguments: str,
    preload: str = "",
    database: dict[str, Any] | None = None,
) -> Iterator[Site]:
    """Run a web server from the environment of this Python.

    Args:
        home: A folder for what it writes.
        program: The module that a wheel brought, and its name among the programs.
        arguments: Its command line; `{port}` is where it shall listen.
        preload: What `DISTLOCK_TEST_PRELOAD` says.
        database: What is different in the settings of its database.
    """
    path = Path(sys.executable).parent / program
    if find_spec(program) is None or not path.exists():
        without(program, f"no wheel of {program} for this Python")
    port = free_port()
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.setups.web.settings",
        "DISTLOCK_TEST_DATABASES": json.dumps(
            {"default": str(connections["default"].settings_dict["NAME"])}
        ),
        "DISTLOCK_TEST_WEB": json.dumps(database or {}),
        "DISTLOCK_TEST_PRELOAD": preload,
    }
    command = [str(path), *(each.format(port=port) for each in arguments)]
    log = home / "log"
    # Greenlets come before all else that is imported.
    start = _started if "gevent" in arguments else _forked
    with log.open("wb") as output, Path(os.devnull).open() as nothing:
        process = start(command, environment, nothing.fileno(), output.fileno())
    site = Site(port, process, log)
    try:
        _wait_for_answer(site)
        yield site
    finally:
        if process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                site.process.send_signal(signal.SIGTERM)
                process.wait(10)
        # The workers are in the session that it began.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _forked(command: list[str], environment: dict[str, str], stdin: int, stdout: int) -> Forked:
    return fork("tests.fork_server:program", command, environment, stdin, stdout)


def _started(
    command: list[str], environment: dict[str, str], stdin: int, stdout: int
) -> subprocess.Popen[bytes]:
    more = {
        "PYTHONPATH": str(ROOT),
        # What a killed worker leaves open is not ours to close.
        "PYTHONDEVMODE": "",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", LIMITED, str(LIFETIME_SECONDS), *command],
        cwd=ROOT, env={**environment, **more}, stdin=stdin, stdout=stdout, stderr=stdout,
        start_new_session=True,
    )  # fmt: skip


def _wait_for_answer(site: Site) -> None:
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            site.get("ready")
        except OSError:
            if site.process.poll() is not None or time.monotonic() > give_up:
                # Each of its processes says where it stands.
                with suppress(ProcessLookupError):
                    os.killpg(site.process.pid, signal.SIGABRT)
                time.sleep(1)
                raise AssertionError(f"no answer:\n{site.said()}") from None
            time.sleep(0.02)
        else:
            return


# A PostgreSQL that a test stops and starts


class Restartable:
    """A PostgreSQL server whose data outlives it."""

    def __init__(self, home: Path):
        self.port = free_port()
        self._home = home
        self._binaries = services._postgres_binaries(home)
        self._running = ExitStack()
        self._starts = 0
        self._is_running = False
        services._run(
            [self._binaries / "initdb", "-D", home / "data", "-U", "postgres", "-A", "trust",
             "-E", "UTF8", "--no-locale", "--no-sync"], home
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Where it answers, whenever it runs."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped since."""
        return self._is_running

    def start(self) -> None:
        """Start, and wait until it answers."""
        # Its keeper removes this folder when it ends, and so not the one with the data.
        run = self._home / f"run{self._starts}"
        run.mkdir()
        if user := server_user():
            shutil.chown(run, user)
        self._starts += 1
        options = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self._home,
            "fsync": "on",
        }
        command = [part for item in options.items() for part in ("-c", "{}={}".format(*item))]
        self._running.enter_context(
            kept(
                [self._binaries / "postgres", "-D", self._home / "data", *command],
                run,
                lambda: services._answers(self.url),
            )
        )
        self._is_running = True

    def stop(self) -> None:
        """Pull the plug: no session ends in peace, and the next start recovers from the log."""
        pid = int((self._home / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGQUIT)
        self._running.close()
        self._is_running = False


@contextmanager
def restartable_postgres() -> Iterator[Restartable]:
    """Run a server that waits for the disk, and that can be stopped and started again."""
    with folder(owner=server_user()) as home:
        server = Restartable(home)
        server.start()
        try:
            yield server
        finally:
            server._running.close()
