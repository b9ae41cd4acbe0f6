"""The example project on a database of its own, and a visitor of its pages."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.cookiejar import CookieJar
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

from tests.fork_server import fork
from tests.keeper import free_port
from tests.processes import Process

from .commands import FOLDER

ROOT = FOLDER.parent
# A key is held by a process of its own, until it reads a line.
HOLD = """
from django_distlock import distlock
from django_distlock.core.keys import stored_key
with distlock(stored_key({!r}), backend={!r}, ttl=60, metadata={{"user": "the other one"}}):
    print("held", flush=True)
    input()
"""


class Page(NamedTuple):
    """What the server answered."""

    status: int
    text: str
    retry_after: str | None


class Program(Process):
    """A program of the shop, and those that it starts."""

    def says(self, text: str) -> None:
        """Return when it has said a text."""
        give_up = time.monotonic() + 120
        while (line := self._next(give_up)) is not None and text not in line:
            pass
        assert line is not None, self._said()

    def end(self, timeout: float = 60) -> str:
        """Return what it said, once all who hold its output have ended."""
        give_up = time.monotonic() + timeout
        while self._next(give_up) is not None:
            pass
        self.popen.wait()
        return self._said()

    def kill(self) -> None:
        """Kill it, unless it has ended; whoever still holds its output is not waited for."""
        self.popen.kill()
        self.popen.wait()
        self._input.close()
        self._reader.join(5)
        if not self._reader.is_alive():
            self._said_by.close()


class Shop:
    """The example project on a database of its own."""

    def __init__(self, **environment: str) -> None:
        self.environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "config.settings",
            "SHOP_LOCKS": "",
            "SHOP_PROVIDER_SECONDS": "0.1",
            **environment,
        }

    @property
    def can_pause(self) -> bool:
        """Whether a paused worker loses its key: what a session holds has no end."""
        return self.environment["SHOP_LOCKS"] != "session"

    def start(self, *command: str) -> Program:
        """Start a command of `manage.py`, which is forked; not so what it starts itself."""
        # The fork server of the example imports Celery ahead, as this second variable says.
        path = os.pathsep.join([str(FOLDER), str(ROOT)])
        environment = {**self.environment, "PYTHONPATH": path, "DISTLOCK_TEST_CELERY": ""}
        return Program(partial(fork, "tests.e2e.commands:manage", command, environment))

    def run(self, *command: str) -> str:
        """Run a command of `manage.py` to its end, which must be a good one."""
        with self.start(*command) as process:
            said = process.end(200)
        assert process.popen.returncode == 0, said
        return said

    def program(self, *command: str | Path, **environment: str) -> Program:
        """Start a program as a user does, in a session of its own."""
        return Program(
            lambda stdin, stdout: subprocess.Popen(
                command, cwd=ROOT, env={**self.environment, **environment},
                start_new_session=True, stdin=stdin, stdout=stdout, stderr=stdout,
            )
        )  # fmt: skip

    @contextmanager
    def demo(self) -> Iterator[Site]:
        """Run `./dev demo` as the README does, and stop it by Ctrl-C."""
        port = free_port()
        with self.program("./dev", "demo", "--rounds=0", f"--port={port}") as process:
            try:
                yield Site(port, process)
            finally:
                # A terminal sends it to the whole group.
                os.killpg(process.popen.pid, signal.SIGINT)
                said = process.end()
        assert "Traceback" not in said
        assert "Error" not in said

    @contextmanager
    def serve(
        self, *, stop: signal.Signals = signal.SIGINT, worker: bool = False
    ) -> Iterator[Site]:
        """Serve the shop as the demo does, and stop it by Ctrl-C, or as told."""
        port = free_port()
        demo = ["demo", "--rounds=0", f"--port={port}"]
        demo += [] if worker else ["--no-worker"]
        with self.start(*demo) as process:
            try:
                yield Site(port, process)
            finally:
                said = ended(process, stop)
        assert process.popen.returncode == (0 if stop == signal.SIGINT else -stop), said

    @contextmanager
    def held(self, key: str, backend: str = "default") -> Iterator[Program]:
        """Hold a key in another process."""
        with self.start("shell", "-c", HOLD.format(key, backend)) as process:
            process.wait_for("held")
            yield process
            if process.popen.poll() is None:
                process.send("let go")
            process.end()


class Site:
    """The shop's pages, for a visitor with cookies."""

    def __init__(self, port: int, process: Program) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.cookies = CookieJar()
        self._opener = build_opener(HTTPCookieProcessor(self.cookies))
        give_up = time.monotonic() + 120
        while not self._answers():
            assert process.popen.poll() is None, process.end()
            assert time.monotonic() < give_up, "the site does not answer"
            time.sleep(0.05)

    def get(self, path: str) -> Page:
        """Get a page."""
        return self._ask(path, None)

    def post(self, path: str) -> Page:
        """Press the button that posts to a path."""
        form = re.search(
            rf'action="{path}"><input[^>]*name="csrfmiddlewaretoken" value="([^"]+)"',
            self.get("/").text,
        )
        assert form, f"no button for {path}"
        return self._ask(path, urlencode({"csrfmiddlewaretoken": form[1]}).encode())

    def wait_for(self, path: str, condition: Callable[[str], object]) -> str:
        """Refresh a page until a condition holds, and return it."""
        give_up = time.monotonic() + 120
        while not condition(text := self.get(path).text):
            assert time.monotonic() < give_up, text
            time.sleep(0.4)
        return text

    def _ask(self, path: str, data: bytes | None) -> Page:
        try:
            with self._opener.open(self.address + path, data, timeout=60) as answer:
                return Page(answer.status, answer.read().decode(), None)
        except HTTPError as error:
            with error:
                return Page(error.code, error.read().decode(), error.headers["Retry-After"])

    def _answers(self) -> bool:
        try:
            return self.get("/").status == 200
        except URLError:
            return False


def ended(process: Program, by: signal.Signals) -> str:
    """Send a signal, and return what the process said once all who hold its output have ended."""
    process.popen.send_signal(by)
    return process.end()
