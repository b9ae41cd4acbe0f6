"""Processes that are forked from one that has imported Django, instead of started from nothing.

A Python that imports Django and its drivers computes for most of a second. One that is forked
behind these imports computes for a tenth of a second, and for half of that behind `django.setup()`.
It is a process as any other: it has settings, an environment, a standard input and output and an
end of its own, and signals reach it.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

# First: what others have `atexit` call comes before it.
from . import ending  # isort: skip

import django

#: What most processes of tests import, and what reads no settings while it is imported.
AHEAD = (
    "django.contrib.admin.options",
    "django.contrib.auth.hashers",
    "django.contrib.auth.management",
    "django.contrib.contenttypes.apps",
    "django.core.management",
    "django.core.serializers.json",
    "django.db.backends.postgresql.base",
    "django.db.backends.sqlite3.base",
    "django.forms",
    "django.template.defaulttags",
    "django.test",
    "django.views.debug",
    "django_distlock.apps",
    "django_distlock.core.records",
    "psycopg",
    "redis",
)
#: The same for what runs Celery: its environment has one of these variables.
CELERY = ("DISTLOCK_TEST_CELERY", "DISTLOCK_TEST_BEAT_HOME")
CELERY_AHEAD = (
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.fixups.django",
    "celery.worker.consumer",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
)
#: A variable that begins so works when an interpreter starts, or a program.
EARLY = ("PYTHON", "LD_", "MALLOC_")
# No process outlives its test by more, should the test itself be killed.
LIFETIME_SECONDS = 300
#: The variable in which pytest names the test of the moment.
OF_PYTEST = "PYTEST_CURRENT_TEST"
#: What auditing hooks hear when a process is forked.
FORKED = "tests.forked"
#: Bytes of a number on the way between a fork server and the tests.
SIZE = 8


def fork(
    function: str,
    arguments: Sequence[Any],
    environment: dict[str, str],
    stdin: int,
    stdout: int,
    *,
    module: str = "",
) -> Forked:
    """Let a process call `module:function`: see `ForkServer.fork`.

    Args:
        module: What a process imports behind `django.setup()`; "" where it sets up nothing. If
            the same environment is asked for again, another fork server does both ahead.
    """
    early = frozenset(each for each in environment.items() if each[0].startswith(EARLY))
    if early not in _fork_servers:
        _keep(early, ForkServer(partial(_start, environment)))
    plain = _fork_servers[early]
    whole = frozenset(environment.items() - {(OF_PYTEST, environment.get(OF_PYTEST))})
    _asked[whole] += bool(module)
    if not module or _asked[whole] == 1:
        return plain.fork(function, arguments, environment, stdin, stdout)
    if whole not in _fork_servers:
        own = "tests.fork_server:set_up"
        _keep(whole, ForkServer(lambda ours: plain.fork(own, [], dict(whole), ours.fileno(), 2)))
    return _fork_servers[whole].fork(function, arguments, None, stdin, stdout, module=module)


def _start(environment: dict[str, str], orders: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "tests.fork_server", str(orders.fileno())],
        env=environment,
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.DEVNULL,
        pass_fds=[orders.fileno()],
    )


def _keep(environment: frozenset[tuple[str, str]], server: ForkServer) -> None:
    _fork_servers[environment] = server
    atexit.register(server.close)


#: The fork servers of this process: by what makes an interpreter another one, and those that have
#: set Django up, by all of the environment.
_fork_servers: dict[frozenset[tuple[str, str]], ForkServer] = {}
#: How often an environment was asked for.
_asked: Counter[frozenset[tuple[str, str]]] = Counter()


class Forked:
    """A process of a fork server, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        # A status comes through this pipe when the process has ended.
        self._ended = ended

    def poll(self) -> int | None:
        """Return the status, or None while the process runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the status; that of a signal is negative."""
        status = self._wait(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"the process {self.pid}", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            said = os.read(self._ended, 16)
            os.close(self._ended)
            # A fork server that was killed says nothing any more.
            self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode


class ForkServer:
    """A process that forks others.

    Args:
        start: Starts it, with the socket that it reads its orders from.
    """

    def __init__(self, start: Callable[[socket.socket], Forked | subprocess.Popen[bytes]]) -> None:
        self._orders, theirs = socket.socketpair()
        with theirs:
            self._process = start(theirs)

    def fork(
        self,
        function: str,
        arguments: Sequence[Any],
        environment: dict[str, str] | None,
        stdin: int,
        stdout: int,
        *,
        module: str = "",
    ) -> Forked:
        """Let a process call `module:function`.

        Args:
            arguments: What JSON can carry.
            environment: All its variables; None: those of the fork server.
            stdin: The descriptor of its standard input.
            stdout: That of its standard output, and of its errors.
            module: What the fork server imports first, if it has not yet; "": nothing.
        """
        ended, says_end = os.pipe()
        order = json.dumps([function, arguments, environment, module]).encode()
        try:
            size = len(order).to_bytes(SIZE)
            socket.send_fds(self._orders, [size], [stdin, stdout, says_end])
        finally:
            os.close(says_end)
        self._orders.sendall(order)
        sys.audit(FORKED)
        return Forked(int.from_bytes(_read(self._orders, SIZE)), ended)

    def close(self) -> None:
        """End the fork server; its processes go on."""
        self._orders.close()
        self._process.wait()


class _Parent:
    """What a fork server does."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._ends: dict[int, int] = {}
        self._bell, self._rings = os.pipe()
        os.set_blocking(self._rings, False)
        signal.set_wakeup_fd(self._rings)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def serve(self) -> tuple[str, list[Any]]:
        """Fork until there are no more orders; return in a child, with what that shall do."""
        while True:
            orders = self._orders.fileno()
            ready, _, _ = select.select([orders, self._bell], [], [])
            if self._bell in ready:
                os.read(self._bell, 4096)
                self._tell_ends()
            if orders in ready and (todo := self._obey()):
                return todo

    def _tell_ends(self) -> None:
        while self._ends:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            says_end = self._ends.pop(pid)
            # Nobody listens where the test was killed.
            with suppress(BrokenPipeError):
                os.write(says_end, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(says_end)

    def _obey(self) -> tuple[str, list[Any]] | None:
        head, descriptors, _, _ = socket.recv_fds(self._orders, SIZE, 3)
        if not head:
            sys.exit()
        order = json.loads(_read(self._orders, int.from_bytes(head)))
        function, arguments, environment, module = order
        stdin, stdout, says_end = descriptors
        if module and module not in sys.modules:
            import_module(module)
            gc.freeze()
        if pid := os.fork():
            os.close(stdin)
            os.close(stdout)
            self._ends[pid] = says_end
            self._orders.sendall(pid.to_bytes(SIZE))
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._orders.close()
        for number, descriptor in enumerate((stdin, stdout, stdout)):
            os.dup2(descriptor, number)
        for descriptor in (*descriptors, *self._ends.values(), self._bell, self._rings):
            os.close(descriptor)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        return function, arguments


def _read(source: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size:
        if not (more := source.recv(size - len(said))):
            raise EOFError("the other end has ended")
        said += more
    return said


def set_up() -> None:
    """Be a fork server that has set Django up; its orders come by the standard input."""
    # It lives as long as the tests, and not as one of their processes.
    signal.alarm(0)
    django.setup()
    _serve(socket.socket(fileno=os.dup(sys.stdin.fileno())))


def program(*command: str) -> None:
    """Run the script of an installed program, in a session of its own."""
    os.setsid()
    faulthandler.enable()
    sys.argv = [*command]
    runpy.run_path(command[0], run_name="__main__")


def _serve(orders: socket.socket) -> None:
    """Be a fork server, and each process that it forks."""
    # What is here already need not be looked at by the collectors of the children.
    gc.freeze()
    function, arguments = _Parent(orders).serve()
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(LIFETIME_SECONDS)
    module, _, name = function.partition(":")
    try:
        getattr(import_module(module), name)(*arguments)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            ending.status = (ended.code or 0) % 256
        raise
    ending.status = 0


def main(descriptor: str) -> None:
    """Be the fork server that others come from."""
    is_for_celery = any(name in os.environ for name in CELERY)
    for name in (*AHEAD, *(CELERY_AHEAD if is_for_celery else ())):
        import_module(name)
    _serve(socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    main(*sys.argv[1:])
