"""The example project on a database of its own, and a visitor of its pages."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import psycopg

from tests.keeper import free_port

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "example_project"
# A key is held by a process of its own, until it reads a line.
HOLD = """
import sys, django
django.setup()
from django_distlock import distlock
from django_distlock.core.keys import stored_key
key, backend = stored_key(sys.argv[1]), sys.argv[2]
with distlock(key, backend=backend, ttl=60, metadata={"user": "the other one"}):
    print("held", flush=True)
    input()
"""


class Page(NamedTuple):
    """What the server answered."""

    status: int
    text: str
    retry_after: str | None


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

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start Python with these arguments, in the folder of the project."""
        return self._start(FOLDER, sys.executable, "-u", *command)

    @contextmanager
    def demo(self) -> Iterator[Site]:
        """Run `./dev demo` as the README does, and stop it by Ctrl-C."""
        port = free_port()
        with self._start(ROOT, "./dev", "demo", "--rounds=0", f"--port={port}") as process:
            try:
                yield Site(port, process)
            finally:
                # A terminal sends it to the whole group.
                said = ended(process, signal.SIGINT, send=os.killpg)
        assert "Traceback" not in said
        assert "Error" not in said

    def _start(self, folder: Path, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=self.environment,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str) -> str:
        """Run a command of the project to its end, which must be a good one."""
        with self.start("manage.py", *command) as process:
            said = process.communicate(timeout=200)[0]
        assert process.returncode == 0, said
        return said

    def wait_for_sales(self, process: subprocess.Popen[str]) -> None:
        """Return when the stock of some product went down."""
        give_up = time.monotonic() + 120
        while not self._has_sold():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < give_up, "nothing was sold"
            time.sleep(0.05)

    def _has_sold(self) -> bool:
        query = "SELECT min(stock) < max(stock) FROM shop_product"
        try:
            if url := self.environment["DATABASE_URL"]:
                with psycopg.connect(url) as connection:
                    found = connection.execute(query).fetchone()
            else:
                file = Path(self.environment["SHOP_DATA_DIR"], "shop.sqlite3")
                with closing(sqlite3.connect(file)) as connection:
                    found = connection.execute(query).fetchone()
        except (psycopg.Error, sqlite3.Error):
            return False
        return bool(found and found[0])

    @contextmanager
    def serve(
        self, *, stop: signal.Signals = signal.SIGINT, worker: bool = False
    ) -> Iterator[Site]:
        """Serve the shop as the demo does, and stop it by Ctrl-C, or as told."""
        port = free_port()
        demo = ["manage.py", "demo", "--rounds=0", f"--port={port}"]
        demo += [] if worker else ["--no-worker"]
        with self.start(*demo) as process:
            try:
                yield Site(port, process)
            finally:
                said = ended(process, stop)
        assert process.returncode == (0 if stop == signal.SIGINT else -stop), said

    @contextmanager
    def held(self, key: str, backend: str = "default") -> Iterator[subprocess.Popen[str]]:
        """Hold a key in another process."""
        with self.start("-c", HOLD, key, backend) as process:
            assert process.stdout
            try:
                assert process.stdout.readline() == "held\n", process.stdout.read()
                yield process
            finally:
                process.communicate("let go\n", timeout=60)


class Site:
    """The shop's pages, for a visitor with cookies."""

    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.cookies = CookieJar()
        self._opener = build_opener(HTTPCookieProcessor(self.cookies))
        give_up = time.monotonic() + 120
        while not self._answers():
            assert process.poll() is None, process.communicate()[0]
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
            time.sleep(0.1)
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


def ended(
    process: subprocess.Popen[str],
    by: signal.Signals,
    *,
    send: Callable[[int, int], None] = os.kill,
) -> str:
    """Send a signal, and return what the process said once all who hold its output have ended."""
    send(process.pid, by)
    try:
        return process.communicate(timeout=60)[0]
    finally:
        process.kill()
