"""System checks of servers that refuse to write, or forget what they have written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.core import checks
from django.db import connections
from django.test import override_settings

from tests import services
from tests.contract.aliases import alias_like, locks_on
from tests.services import server_user
from tests.settings import database
from tests.setups.servers import restartable_postgres

from .databases import Routed, ask, here, migrate


def found(using: str) -> dict[str, checks.CheckMessage]:
    """Look into a database of locks; give what is said about it, by its id."""
    with locks_on(using):
        messages = checks.run_checks(tags=[checks.Tags.database], databases=[using])
    return {str(each.id): each for each in messages if str(each.id).startswith("distlock.")}


@contextmanager
def server_of(url: str, like: str) -> Iterator[str]:
    """Give the alias of a database on a server of one's own."""
    connected = {**database(url), "TEST": connections.settings[like]["TEST"]}
    with alias_like(like, **connected) as alias:
        yield alias


# Read-only


@pytest.mark.faults
def test_standby_is_an_error() -> None:
    """E105 and nothing else, although its tables and functions are all there.

    Before, nothing is said where `fsync` is on, whatever `synchronous_commit` says.
    """
    with restartable_postgres() as server, server_of(server.url, "default") as using:
        migrate(using)
        ask(using, "ALTER SYSTEM SET synchronous_commit = off")
        ask(using, "SELECT pg_reload_conf()")
        connections[using].close()
        assert found(using) == {}
        connections[using].close()
        server.stop()
        signal = server._home / "data" / "standby.signal"
        signal.touch()
        if user := server_user():
            shutil.chown(signal, user)
        server.start()
        told = found(using)
        connections[using].close()
    assert list(told) == ["distlock.E105"]
    assert "like a replica" in told["distlock.E105"].msg
    assert told["distlock.E105"].is_serious()


def test_sessions_that_only_read_on_postgresql(postgresql: str) -> None:
    """E105 where the role, the database or the alias says that transactions only read."""
    migrate(postgresql)
    name = connections[postgresql].settings_dict["NAME"]
    ask("default", f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    connections[postgresql].close()
    assert "are read-only" in found(postgresql)["distlock.E105"].msg


def test_sessions_that_only_read_on_mariadb(mysql: str) -> None:
    """E105 where the alias says so."""
    migrate(mysql)
    name = connections[mysql].settings_dict["NAME"]
    reads = {"init_command": "SET SESSION TRANSACTION READ ONLY"}
    with alias_like("mariadb", NAME=name, OPTIONS=reads) as using:
        assert "are read-only" in found(using)["distlock.E105"].msg


@pytest.mark.faults
def test_mariadb_that_only_reads() -> None:
    """E105 of the server as a whole, as a replica is set up, whatever the account may do."""
    here("mariadb")
    with (
        services.private_mariadb(read_only=1, innodb_flush_log_at_trx_commit=1) as server,
        server_of(server.url, "mariadb") as using,
    ):
        migrate(using)
        told = found(using)
    assert list(told) == ["distlock.E105"]


# Forgetful


@pytest.mark.faults
def test_server_that_does_not_wait_for_its_disk() -> None:
    """W108 with `fsync` off."""
    with services.private_postgres() as server, server_of(server.url, "default") as using:
        migrate(using)
        told = found(using)
        connections[using].close()
    assert list(told) == ["distlock.W108"]
    assert "fsync" in told["distlock.W108"].msg


def test_unlogged_table(postgresql: str) -> None:
    """W108 names the table that a crash would empty."""
    migrate(postgresql)
    assert "unlogged" not in str(found(postgresql))
    ask(postgresql, "ALTER TABLE django_distlock_fencecounter SET UNLOGGED")
    with locks_on(postgresql):
        messages = checks.run_checks(tags=[checks.Tags.database], databases=[postgresql])
    (told,) = [each.msg for each in messages if "unlogged" in each.msg]
    assert "table django_distlock_fencecounter of" in told


def test_fenced_rows_that_a_crash_may_undo(postgresql: str) -> None:
    """W108 where models refuse stale fences, and their commits do not wait; locks or not."""
    for setting in ("on", "off"):
        options = {"options": f"-c synchronous_commit={setting}"}
        with (
            alias_like(postgresql, OPTIONS=options) as using,
            override_settings(DATABASE_ROUTERS=[Routed(using, "shop")], DISTLOCK={}),
        ):
            messages = checks.run_checks(tags=[checks.Tags.database], databases=[using])
        told = [each.msg for each in messages if each.id == "distlock.W108"]
        assert len(told) == (setting == "off")
        assert all("synchronous_commit" in each and "shop." in each for each in told)
