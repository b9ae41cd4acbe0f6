"""PgBouncer in front of the tests' server, and what is left out where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pytest
from django.db import connections

from tests.conftest import DECLARED
from tests.services import folder, free_port, kept, required, server_user


def without(name: str, remedy: str) -> NoReturn:
    """Leave a test out, because the machine has no such server; fail where it is required."""
    if required(name):
        pytest.fail(f"DISTLOCK_TEST_REQUIRE asks for {name}: {remedy}")
    pytest.skip(f"{DECLARED}no {name} here: {remedy}")


@contextmanager
def pgbouncer(
    *, port: int | None = None, stop: str = "TERM", **settings: object
) -> Iterator[dict[str, Any]]:
    """Run a PgBouncer in transaction mode before the tests' server.

    Args:
        port: Where it listens, for one that is started again; None: anywhere.
        stop: The signal that ends it.
        settings: Of its own that shall be other than usual.

    Gives:
        What Django's settings of a database have to say to go through it.
    """
    # Where Debian puts it is not on every user's path.
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None:
        without("pgbouncer", "apt-get install pgbouncer")
    server = connections["default"].settings_dict
    port = port or free_port()
    with folder(owner=server_user()) as home:
        configured = {
            "listen_addr": "127.0.0.1",
            "listen_port": port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "max_client_conn": 200,
            "admin_users": "postgres",
            **settings,
        }
        lines = [f"{name} = {value}" for name, value in configured.items()]
        target = {
            "host": server["HOST"] or "127.0.0.1",
            "port": server["PORT"] or 5432,
            # With `auth_type=any`, it has to be told as whom to log in.
            "user": server["USER"],
            "password": server["PASSWORD"],
        }
        given = " ".join(f"{name}={value}" for name, value in target.items() if value)
        (home / "pgbouncer.ini").write_text(
            "\n".join(["[databases]", f"* = {given}", "[pgbouncer]", *lines])
        )
        # Told to end in peace, it would wait for the clients that are inside of transactions.
        command: list[str | Path] = [program, home / "pgbouncer.ini"]
        with kept(command, home, lambda: _accepts(port), stop=stop):
            yield {"HOST": "127.0.0.1", "PORT": str(port)}


def _accepts(port: int) -> bool:
    with suppress(psycopg.OperationalError):
        psycopg.connect(f"postgresql://postgres@127.0.0.1:{port}/pgbouncer").close()
        return True
    return False
