"""Run a function in a process of its own, on the same test databases.

    with spawn("tests.integration.workers:hold", "invoice:42", PYTHONDEVMODE="0") as worker:
        worker.wait_for("held")
        worker.send("let go")
        assert worker.result() == {"fence": 1}

The function talks by `print` and `input`, and returns something that JSON can carry.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import django
from django.core.management import execute_from_command_line
from django.db import connections

from .ending import WHOLE
from .fork_server import LIFETIME_SECONDS, Forked, fork

RESULT = "result: "
#: A function for `manage`.
BE_PYTHON = f"{__name__}:python"
#: For a test about the end of the interpreter: see `tests.ending`.
WHOLE_END = {WHOLE: "1"}


def spawn(target: str, *arguments: Any, **environment: str) -> Process:
    """Start `module:function` with arguments that JSON can carry."""
    variables = _environment(environment)
    what = [target, json.dumps(arguments)]
    module = target.partition(":")[0]
    return Process(
        lambda stdin, stdout: fork(
            f"{__name__}:main", what, variables, stdin, stdout, module=module
        )
    )


def spawn_by(program: Sequence[str], target: str, *arguments: Any, **environment: str) -> Process:
    """Do the same in an interpreter of its own, whose parent the test is, or this program."""
    command = [*program, sys.executable, "-u", "-m", __name__, target, json.dumps(arguments)]
    variables = _environment(environment)
    return Process(
        lambda stdin, stdout: subprocess.Popen(
            command, env=variables, stdin=stdin, stdout=stdout, stderr=stdout
        )
    )


def _environment(more: dict[str, str]) -> dict[str, str]:
    names = {alias: str(connections[alias].settings_dict["NAME"]) for alias in connections}
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DISTLOCK_TEST_DATABASES": json.dumps(names),
        **more,
    }


class Process:
    """A running function. Leaving its block ends it, whatever it is doing.

    Args:
        start: Starts it on two descriptors: of its standard input, and of its output and errors.
    """

    def __init__(self, start: Callable[[int, int], Forked | subprocess.Popen[bytes]]) -> None:
        theirs, ours = os.pipe()
        said, says = os.pipe()
        self._input = os.fdopen(ours, "w", buffering=1)
        self._said_by = os.fdopen(said)
        try:
            self.popen = start(theirs, says)
        finally:
            os.close(theirs)
            os.close(says)
        self._output: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        hangs = error is not None and self.popen.poll() is None
        if hangs:
            # It writes where its threads stand, and ends.
            self.popen.send_signal(signal.SIGALRM)
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(2)
        self.kill()
        if hangs and error is not None:
            error.add_note(f"The process had not ended:\n{self._said()}")

    def wait_for(self, line: str, timeout: float = 60) -> None:
        """Return when the function has printed this line."""
        give_up = time.monotonic() + timeout
        while (printed := self._next(give_up)) != line:
            if printed is None:
                raise AssertionError(f"ended before it said {line!r}:\n{self._said()}")

    def send(self, line: str) -> None:
        """Answer the function's `input()`."""
        self._input.write(line + "\n")

    def result(self, timeout: float = 30) -> Any:
        """Wait for the end, and give what the function returned."""
        give_up = time.monotonic() + timeout
        while self._next(give_up) is not None:
            pass
        self.popen.wait()
        results = [line for line in self._output if line.startswith(RESULT)]
        if not results:
            raise AssertionError(f"exit status {self.popen.returncode}:\n{self._said()}")
        return json.loads(results[-1].removeprefix(RESULT))

    def leave(self) -> None:
        """Let it read the end of its input, and end well."""
        self._input.close()
        assert self.popen.wait(60) == 0, self._said()

    def stop(self) -> None:
        """Let it stand still, wherever it is."""
        self.popen.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on behind `stop`."""
        self.popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, unless it has ended, and clear up after it."""
        self.popen.kill()
        self.popen.wait()
        self._reader.join()
        for pipe in (self._input, self._said_by):
            pipe.close()

    def _read(self) -> None:
        for line in self._said_by:
            self._output.append(line.rstrip("\n"))
            self._lines.put(self._output[-1])
        self._lines.put(None)

    def _next(self, give_up: float) -> str | None:
        """Give the next line, or None at the end."""
        try:
            return self._lines.get(timeout=max(0, give_up - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"nothing more in time after:\n{self._said()}") from None

    def _said(self) -> str:
        return "\n".join(self._output)


def main(target: str, arguments: str) -> None:
    """Be the process: call the function and print what it returns."""
    # A line in one piece: what other threads log shall not come between it and its end.
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True, write_through=False)
    django.setup()
    module, _, function = target.partition(":")
    result = getattr(import_module(module), function)(*json.loads(arguments))
    print(RESULT + json.dumps(result))


def manage(
    arguments: Sequence[str],
    environment: dict[str, str],
    timeout: float,
    function: str = f"{__name__}:django_admin",
) -> tuple[str, int]:
    """Run `python -m django`, or another function; return what it said, and its status."""
    said, says = os.pipe()
    with Path(os.devnull).open() as nothing, os.fdopen(said) as output:
        try:
            run = fork(function, arguments, environment, nothing.fileno(), says)
        finally:
            os.close(says)
        # Or a command that never ends would be waited for.
        late = threading.Timer(timeout, run.kill)
        late.start()
        text = output.read()
        late.cancel()
        return text, run.wait()


def python(path: str, errors: str, *arguments: str) -> None:
    """Be `python`, in the first folder of a path; its errors go to a file, if one is named."""
    if errors:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.path[:0] = path.split(os.pathsep)
    os.chdir(sys.path[0])
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")


def django_admin(*arguments: str) -> None:
    """Be `python -m django`."""
    program = Path(django.__file__).with_name("__main__.py")
    sys.argv = [str(program), *arguments]
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(LIFETIME_SECONDS)
    main(*sys.argv[1:])
