"""The example project, run as its users run it."""

from __future__ import annotations

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import HTTPCookieProcessor, build_opener
from uuid import uuid4

import psycopg
import pytest

from tests.redis_servers import private_redis

FOLDER = Path(__file__).parents[2] / "example_project"
# A key is held by a process of its own, until it reads a line.
HOLD = """
import sys, django
django.setup()
from django_distlock import distlock
with distlock(sys.argv[1], ttl=60, metadata={"user": "the other one"}):
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
            "PYTHONPATH": os.pathsep.join([str(FOLDER), *sys.path]),
            "SHOP_LOCKS": "",
            "SHOP_PROVIDER_SECONDS": "0.1",
            **environment,
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start Python with these arguments."""
        return subprocess.Popen(
            [sys.executable, "-u", *command],
            cwd=FOLDER,
            env=self.environment,
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
    def serve(self) -> Iterator[Site]:
        """Serve the shop as the demo does, and stop it by Ctrl-C."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        demo = ["manage.py", "demo", "--rounds=0", f"--port={port}"]
        with self.start(*demo) as process:
            try:
                yield Site(port, process)
            finally:
                process.send_signal(signal.SIGINT)
                said = process.communicate(timeout=60)[0]
        assert process.returncode == 0, said

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """Hold a key in another process."""
        with self.start("-c", HOLD, key) as process:
            assert process.stdout
            try:
                assert process.stdout.readline() == "held\n", process.stdout.read()
                yield
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


@pytest.fixture(params=["sqlite", "postgresql", "redis", "session"])
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """Give the shop without any table."""
    if request.param == "sqlite":
        yield Shop(DATABASE_URL="", SHOP_DATA_DIR=str(tmp_path))
        return
    if request.param == "redis":
        with private_redis() as locks:
            yield Shop(DATABASE_URL="", SHOP_DATA_DIR=str(tmp_path), SHOP_LOCKS=locks.url)
        return
    choice = {"SHOP_LOCKS": "session"} if request.param == "session" else {}
    server = os.environ["DISTLOCK_TEST_POSTGRES_URL"]
    name = f"shop_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        yield Shop(DATABASE_URL=urlsplit(server)._replace(path=f"/{name}").geturl(), **choice)
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def test_demo_loses_updates_without_the_lock_and_none_with_it(shop: Shop) -> None:
    """From nothing, and again on what the first run left behind."""
    for _ in range(2):
        said = shop.run("demo", "--no-serve", "--workers=3", "--rounds=10")
        without, with_lock = re.findall(
            r"the lock: 30 sold, the stock fell by (\d+), (\d+) updates lost", said
        )
        assert int(without[1]) > 0
        assert int(without[0]) + int(without[1]) == 30
        assert with_lock == ("30", "0")
        assert "each above the one before" in said


def test_demo_stops_on_ctrl_c_while_the_processes_compete(shop: Shop) -> None:
    """The demo ends well, its processes with it, and no lock stays behind."""
    with shop.start("manage.py", "demo", "--workers=3", "--rounds=500") as process:
        shop.wait_for_sales(process)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert "Stopped." in said
    assert "Traceback" not in said


def test_site_captures_a_payment_once(shop: Shop) -> None:
    """The button captures, and is gone afterwards."""
    with shop.serve() as site:
        page = site.get("/").text
        assert all(name in page for name in ("Kettle", "Ada", "Locks held now"))
        assert "The payment was captured." in site.post("/payments/1/capture/").text
        assert "/payments/1/capture/" not in site.get("/").text


def test_site_sends_away_who_comes_second(shop: Shop) -> None:
    """While another process holds the payment: 409, and when to come back."""
    # Of a lock that a session holds, nobody else sees more than that.
    holder = "another process" if shop.environment["SHOP_LOCKS"] == "session" else "the other one"
    with shop.serve() as site, shop.held("payment:1"):
        assert holder in site.get("/").text
        busy = site.post("/payments/1/capture/")
        assert busy.status == 409
        assert busy.retry_after
        assert 1 <= int(busy.retry_after) <= 61
        assert holder in busy.text
        assert "/payments/1/capture/" in site.get("/").text


def test_site_sells_in_an_asynchronous_view(shop: Shop) -> None:
    """One piece less; and 409 while another process holds the product."""
    with shop.serve() as site:
        before = _stock(site)
        assert "Sold one" in site.post("/products/1/sell/").text
        assert _stock(site) == before - 1
        with shop.held("product:1"):
            assert site.post("/products/1/sell/").status == 409
        assert _stock(site) == before - 1


def test_nightly_report_runs_once(shop: Shop) -> None:
    """Two processes start it at the same time: one report, no failure."""
    shop.run("demo", "--no-serve", "--rounds=0")
    processes = [shop.start("manage.py", "nightly_report") for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    made = ["pieces in stock" in each for each in said]
    assert sorted(made) == [False, True], said
    assert "Nothing to do" in said[made.index(False)]


def _stock(site: Site) -> int:
    found = re.search(r"<td>Coffee grinder</td>\s*<td[^>]*>(\d+)</td>", site.get("/").text)
    assert found
    return int(found[1])
