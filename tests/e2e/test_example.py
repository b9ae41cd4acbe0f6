"""The example project, run as its users run it."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from django_distlock.core.keys import own_key
from tests.integration.runs import state_of
from tests.redis_servers import private_redis

from .commands import FOLDER
from .dashboards import LOCKS
from .shops import Shop, Site, ended

# What a program does that knows nothing of fences.
LOWER = """
from django.db import IntegrityError, connection
with connection.cursor() as cursor:
    cursor.execute("UPDATE shop_payment SET fence = 5 WHERE id = 1")
    try:
        cursor.execute("UPDATE shop_payment SET fence = 4 WHERE id = 1")
    except IntegrityError:
        print("refused")
"""
#: Ends when the stock of some product went down.
WAIT_FOR_SALES = """
import time
from shop.models import Product
while len({each.stock for each in Product.objects.all()}) < 2:
    time.sleep(0.05)
"""


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


#: For what is in the database wherever the locks are: jobs, and fences of rows.
DATABASES = pytest.mark.parametrize("shop", ["sqlite", "postgresql"], indirect=True)


def test_demo_loses_updates_without_the_lock_and_none_with_it(shop: Shop) -> None:
    """From nothing, and again on what the first run left behind."""
    for workers, rounds in (3, 10), (2, 20):
        said = shop.run("demo", "--no-serve", f"--workers={workers}", f"--rounds={rounds}")
        sold = workers * rounds
        without, with_lock = re.findall(
            rf"the lock: {sold} sold, the stock fell by (\d+), (\d+) updates lost", said
        )
        assert int(without[1]) > 0
        assert int(without[0]) + int(without[1]) == sold
        assert with_lock == (str(sold), "0")
        assert "rising with each grant" in said
        assert ("its stale write is refused" in said) == shop.can_pause, said
        assert ("The payment is captured" in said) == shop.can_pause, said
        # As a terminal of 80 columns shows it.
        assert ("the lease expired\n" in said) == shop.can_pause, said


@pytest.mark.parametrize("shop", ["sqlite", "session"], indirect=True)
def test_demo_stops_on_ctrl_c_while_the_processes_compete(shop: Shop) -> None:
    """The demo ends well, its processes with it, and no lock stays behind."""
    with shop.start("demo", "--workers=2", "--rounds=500") as process:
        process.says("processes sell")
        shop.run("shell", "-c", WAIT_FOR_SALES)
        said = ended(process, signal.SIGINT)
    assert process.popen.returncode == 0, said
    assert "Stopped." in said
    assert "Traceback" not in said


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_demo_stops_on_ctrl_c_while_a_worker_is_paused(shop: Shop) -> None:
    """The demo ends well, and the paused worker with it: whoever held our pipe would be seen."""
    with shop.start("demo", "--workers=2", "--rounds=1") as process:
        process.says("is paused, together")
        said = ended(process, signal.SIGINT)
    assert process.popen.returncode == 0, said
    assert "Stopped." in said
    assert "Traceback" not in said


def test_site_captures_and_sells_once(shop: Shop) -> None:
    """The button captures, and is gone afterwards; the asynchronous view sells one piece less.

    While another process holds the payment, or the product: 409, and when to come back.
    """
    # Of a lock that a session holds, nobody else sees more than that.
    holder = "the other one" if shop.can_pause else "another process"
    with shop.serve() as site:
        page = site.get("/").text
        assert all(name in page for name in ("Kettle", "Ada", "Locks held now"))
        page = site.post("/payments/1/capture/").text
        # What just happened, where to see it, and under which fence: they count from one.
        strip = re.search(r"What just happened:</b> (.+?) <a href=\"([^\"]+)\">(.+?)</a>", page)
        assert strip, page
        assert strip[1] == "The payment was captured."
        assert strip[2] == f"{LOCKS}key/?backend=default&amp;key=payment%3A1"
        # Those of Redis and of sessions follow the clock.
        first = r"\d{13,}" if shop.environment["SHOP_LOCKS"] else "1"
        assert re.fullmatch(f"Lock payment:1, fence {first}", strip[3])
        assert "/payments/1/capture/" not in site.get("/").text

        with shop.held("payment:2"):
            assert holder in site.get("/").text
            busy = site.post("/payments/2/capture/")
            assert busy.status == 409
            assert busy.retry_after
            assert 1 <= int(busy.retry_after) <= 61
            assert holder in busy.text
            assert f"{LOCKS}key/?backend=default&amp;key=payment%3A2" in busy.text
            assert "/payments/2/capture/" in site.get("/").text

        before = _stock(site)
        assert "Sold one" in site.post("/products/1/sell/").text
        assert _stock(site) == before - 1
        with shop.held("product:1"):
            assert site.post("/products/1/sell/").status == 409
        assert _stock(site) == before - 1


def test_site_goes_on_without_the_store_of_its_locks(tmp_path: Path) -> None:
    """It says so, and shows the rest: products and payments are in the database."""
    with ExitStack() as servers:
        locks = servers.enter_context(private_redis())
        shop = Shop(DATABASE_URL="", SHOP_DATA_DIR=str(tmp_path), SHOP_LOCKS=locks.url)
        with shop.serve() as site:
            servers.close()
            for page in (site.get("/"), site.post("/payments/1/capture/")):
                assert page.status == 200
                assert "did not answer" in page.text
                assert "/payments/1/capture/" in page.text


def test_site_refuses_the_write_of_a_worker_that_was_paused(shop: Shop) -> None:
    """Paused, taken over, refused: on the page, with the fences, and both processes are gone."""
    with shop.serve() as site:
        if not shop.can_pause:
            assert "no takeover is shown" in site.get("/").text
            assert "/pause/" not in site.get("/").text
            return
        assert 'http-equiv="refresh"' not in site.get("/").text
        assert 'http-equiv="refresh"' in site.post("/payments/2/pause/").text
        # Also behind a refresh.
        assert "What just happened:</b> A worker acquires the lock" in site.get("/").text
        page = site.wait_for("/", lambda text: 'http-equiv="refresh"' not in text)
        story = re.findall(
            r"The (\w+) worker \(pid (\d+)\) ([^.]+)\. <span class=\"fence\">fence ([\d,]+)<", page
        )
        assert [(worker, text.split(",")[0]) for worker, _, text, _ in story] == [
            ("first", "acquires the lock"),
            ("first", "is paused"),
            ("second", "takes the lock over after the lease expired"),
            ("second", "captures the payment"),
            ("first", "resumes"),
        ], page
        first, second = story[0], story[2]
        assert _number(first[3]) < _number(second[3])
        # Who wrote is on the row, and who was refused in the list.
        assert f'Grace <span class="fence">fence {second[3]}</span>' in page
        assert "/payments/2/capture/" not in page
        assert re.search(
            rf"payment:2</code></td>\s*<td class=\"fences\"><b>{first[3]}</b> refused<br>"
            rf"{second[3]} on the row",
            page,
        )
        assert not [pid for _, pid, _, _ in story if state_of(int(pid))]


@DATABASES
def test_database_refuses_to_lower_the_fence_of_a_payment(shop: Shop) -> None:
    """Also where the statement is not Django's."""
    shop.run("demo", "--no-serve", "--rounds=0")
    assert shop.run("shell", "-v0", "-c", LOWER) == "refused"


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_site(shop: Shop, stop: signal.Signals) -> None:
    """Also where the site is killed while a worker of its own is paused."""
    with shop.serve(stop=stop) as site:
        site.post("/payments/2/pause/")
        page = site.wait_for("/", lambda text: "is paused, together" in text)
        workers = {int(pid) for pid in re.findall(r"\(pid (\d+)\)", page)}
    give_up = time.monotonic() + 60
    while left := [pid for pid in workers if state_of(pid)]:
        assert time.monotonic() < give_up, f"still there: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("shop", "stop"), [("sqlite", signal.SIGINT), ("redis", signal.SIGKILL)], indirect=["shop"]
)
def test_worker_does_what_was_left_to_it(shop: Shop, stop: signal.Signals) -> None:
    """A payment, and what the schedule says. It ends with the demo: it would hold our pipe."""
    shop.environment["SHOP_REPORT_SECONDS"] = "1"
    with shop.serve(stop=stop, worker=True) as site:
        assert "All payments are captured" not in site.get("/").text
        # It says so until there is one.
        page = site.wait_for("/", lambda text: "No Celery worker runs" not in text)
        # Whose locks are not among those of the shop.
        assert f'href="{LOCKS}?backend=jobs"' in page
        assert "celery-beat" not in page
        assert "A worker captures the payment" in site.post("/payments/1/later/").text
        site.wait_for("/", lambda text: "/payments/1/capture/" not in text)
        site.wait_for("/", lambda text: "pieces in stock" in text)
        for payment in "234":
            site.post(f"/payments/{payment}/later/")
        site.wait_for("/", lambda text: "All payments are captured" in text)


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_site_says_what_it_has_no_worker_for(shop: Shop) -> None:
    """Before anything is left to one of Celery, and behind it; one worker is paused at a time.

    The second button is off meanwhile, and whoever presses it all the same is told.
    """
    with shop.serve() as site:
        form = site.get("/").text
        assert "No Celery worker runs." in form
        assert "queued, but no Celery worker runs." in site.post("/payments/1/later/").text
        page = site.post("/payments/1/pause/").text
        assert "disabled>Pause a worker" in page
        assert "disabled>Pause a worker" not in form
        assert "A worker is already paused" in site.post("/payments/2/pause/").text


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_demo_looks_at_its_port_first(shop: Shop) -> None:
    """Where it is taken, nothing is done, and the message says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with shop.start("demo", f"--port={port}") as process:
            said = process.end()
    assert process.popen.returncode == 1
    assert re.fullmatch(rf"CommandError: Port {port} cannot be used: .+\. .+ --port\.", said), said
    assert not Path(shop.environment["SHOP_DATA_DIR"], "shop.sqlite3").exists()


@pytest.mark.parametrize("shop", ["redis"], indirect=True)
def test_payments_are_captured_by_locks_of_another_store(shop: Shop) -> None:
    """Its counters begin above the fences on the rows, which those of Redis have raised."""
    with shop.serve() as site:
        site.post("/payments/1/capture/")
    shop.environment["SHOP_LOCKS"] = ""
    with shop.serve() as site:
        assert "The payment was captured." in site.post("/payments/1/capture/").text


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_demo_of_the_readme_has_a_worker(shop: Shop) -> None:
    """`./dev demo`, started from the root of the repository, captures what was left to it."""
    with shop.demo() as site:
        site.post("/payments/1/later/")
        site.wait_for("/", lambda text: "/payments/1/capture/" not in text)


@DATABASES
def test_nightly_report_runs_once(shop: Shop) -> None:
    """Two processes start it at the same time: one report, no failure, and none right behind it."""
    shop.run("demo", "--no-serve", "--rounds=0")
    with shop.start("nightly_report") as one, shop.start("nightly_report") as other:
        said = [one.end(), other.end()]
    assert (one.popen.returncode, other.popen.returncode) == (0, 0), said
    made = ["pieces in stock" in each for each in said]
    assert sorted(made) == [False, True], said
    assert "Nothing to do" in said[made.index(False)]
    assert "Nothing to do" in shop.run("nightly_report")


@DATABASES
def test_nightly_report_does_not_wait_for_a_process_that_was_killed(shop: Shop) -> None:
    """Its successor takes over at once, although the key would be taken for a minute."""
    shop.run("demo", "--no-serve", "--rounds=0")
    with shop.held(
        own_key(f"schedule:nightly-report:{datetime.now(UTC).date()}"), "jobs"
    ) as process:
        assert "Nothing to do" in shop.run("nightly_report")
        process.popen.kill()
        process.popen.wait()
        assert "pieces in stock" in shop.run("nightly_report")


@pytest.mark.parametrize("shop", ["sqlite", "postgresql", "session"], indirect=True)
def test_deployments_migrate_once(shop: Shop) -> None:
    """Two at the same time, on empty databases: one migrates, one waits, both end well."""
    with ExitStack() as stack:
        deployments = [
            stack.enter_context(shop.program(FOLDER / "deploy.sh", PYTHON=sys.executable))
            for _ in range(2)
        ]
        said = [each.end(200) for each in deployments]
    assert [each.popen.returncode for each in deployments] == [0, 0], said
    assert sorted("Applying shop.0001_initial" in each for each in said) == [False, True]
    assert "Applying" not in shop.run("migrate_all")


def _stock(site: Site) -> int:
    found = re.search(r"<td>Coffee grinder</td>\s*<td[^>]*>(\d+)</td>", site.get("/").text)
    assert found
    return int(found[1])


def _number(text: str) -> int:
    return int(text.replace(",", ""))
