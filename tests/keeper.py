"""How a server of the tests runs: where it lives, as whom, and when it ends."""

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
from pathlib import Path
from typing import Any

import pytest

FOLDER_PREFIX = "distlock-test-"
DAY = 86_400
#: A file system in memory, where there is one.
MEMORY = Path("/dev/shm")
#: Bytes that it must have free to be used: more than the servers of all tests write.
ROOM = 8 << 30
START_SECONDS = 120
STOP_SECONDS = 120

#: What `DISTLOCK_TEST_REQUIRE` may name.
REQUIRABLE = {
    "all",
    "postgresql",
    "mariadb",
    "redis",
    "rabbitmq",
    "pgbouncer",
    "gunicorn",
    "uvicorn",
    "pyuwsgi",
    "prometheus",
    "faketime",
}

# Runs a server until the pipe on standard input closes, which the end of this process does for us,
# however it ends; then stops the server and removes its folder. A PR_SET_PDEATHSIG would do that on
# Linux alone, and for the thread that started the server instead of the process.
KEEPER = """
exec 3<&0
"$@" 3<&- &
server=$!
{ cat <&3; kill -s "$STOP" $server; } &
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


def required(name: str) -> bool:
    """Say whether the tests may not go on without a server."""
    named = {each.strip() for each in os.environ.get("DISTLOCK_TEST_REQUIRE", "").split(",")}
    if unknown := named - REQUIRABLE - {""}:
        raise pytest.UsageError(
            f"DISTLOCK_TEST_REQUIRE: {', '.join(sorted(unknown))}? There are:"
            f" {', '.join(sorted(REQUIRABLE))}"
        )
    return bool(named & {name, "all"})


def only_wheels() -> bool:
    """Say whether the system's binaries are passed over."""
    only = os.environ.get("DISTLOCK_TEST_SERVERS", "")
    if only not in ("", "wheels"):
        raise pytest.UsageError(f"DISTLOCK_TEST_SERVERS={only!r}: leave it out, or say 'wheels'")
    return bool(only)


@contextmanager
def folder(owner: str | None = None, *, in_memory: bool = False) -> Iterator[Path]:
    """Make a folder that is removed afterwards, and remove what runs cut short left behind.

    Args:
        owner: The user that it belongs to; None: whoever runs the tests.
        in_memory: Whether it need not be on a disk. A database is 300 files, and a disk takes
            longer to make and to remove them.
    """
    # Root's own temporary folder may be closed to the user that runs the server.
    root = Path("/tmp" if owner else tempfile.gettempdir())
    if in_memory and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM:
        root = MEMORY
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


def reachable(path: Path) -> bool:
    """Say whether the user that runs the server can enter this folder."""
    return server_user() is None or all(
        parent.stat().st_mode & 0o001 for parent in (path, *path.parents)
    )


def server_user() -> str | None:
    """Name the user to run a server as: neither PostgreSQL nor MariaDB wants to be root."""
    if os.geteuid() != 0:
        return None
    return "postgres" if "postgres" in {entry.pw_name for entry in pwd.getpwall()} else "nobody"


def rights() -> dict[str, Any]:
    """Give the arguments of `subprocess` that drop root's rights."""
    user = server_user()
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}


@contextmanager
def kept(
    command: list[str | Path],
    home: Path,
    answers: Callable[[], bool],
    *,
    stop: str = "INT",
    pause: float = 0.02,
) -> Iterator[None]:
    """Run a server until the block ends, or this process does.

    Args:
        answers: Says whether the server answers yet.
        stop: The signal that ends it.
        pause: Seconds between asking and asking again.
    """
    with (home / "log").open("w+b") as log:
        keeper = subprocess.Popen(
            ["/bin/sh", "-c", KEEPER, "keeper", *command],
            cwd=home,
            env={**os.environ, "FOLDER": str(home), "STOP": stop},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # Ctrl-C belongs to the tests, which still need the server to clean up.
            start_new_session=True,
            **rights(),
        )
        assert keeper.stdin
        try:
            give_up = time.monotonic() + START_SECONDS
            while not _asked(answers):
                if keeper.poll() is not None or time.monotonic() > give_up:
                    # Through what is open: the keeper may have removed the folder.
                    log.seek(0)
                    raise pytest.UsageError(f"{command[0]} did not start: {log.read().decode()}")
                time.sleep(pause)
            yield
        finally:
            keeper.stdin.close()
            keeper.wait(STOP_SECONDS)


def _asked(answers: Callable[[], bool]) -> bool:
    try:
        return answers()
    except FileNotFoundError:
        return False  # The keeper has removed the folder: the server has ended.


def children(pid: int) -> list[int]:
    """Return the processes that one has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # It has just ended.
        if parent == pid:
            found.append(int(stat.parent.name))
    return found


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
