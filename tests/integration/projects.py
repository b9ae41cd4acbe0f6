"""Projects with settings of their own, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from tests.processes import Process, manage, spawn

ROOT = Path(__file__).parent.parent.parent
# For a machine with much else to do.
PATIENCE = 300


class Project:
    """A project whose `default` database is the one of an alias of this process.

    Args:
        using: The alias, or several: their names in the project, and the aliases here.
        settings: What else its settings say; values that JSON can carry.
    """

    def __init__(self, using: str | dict[str, str], **settings: Any):
        aliases = {"default": using} if isinstance(using, str) else using
        databases = {name: _plain(connections.settings[here]) for name, here in aliases.items()}
        self.settings = {"DATABASES": databases, **settings}

    def manage(self, *arguments: str, status: int = 0) -> str:
        """Run a command of `manage.py`; return what it printed."""
        said, ended = manage(arguments, {**os.environ, **self._environment()}, PATIENCE)
        assert ended == status, f"exit status {ended}:\n{said}"
        return said

    def document(self, *arguments: str, status: int = 0) -> Any:
        """Run a command by an interpreter of its own; return what it printed, which is JSON."""
        done = subprocess.run(
            [sys.executable, "-m", "django", *arguments, "--json"],
            cwd=ROOT,
            env={**os.environ, **self._environment()},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout)

    def start(self, target: str, *arguments: Any) -> Process:
        """Start `module:function` in the project."""
        return spawn(target, *arguments, **self._environment())

    def run(self, target: str, *arguments: Any) -> Any:
        """Run `module:function` in the project; return what it returns."""
        with self.start(target, *arguments) as process:
            return process.result(PATIENCE)

    def _environment(self) -> dict[str, str]:
        return {
            "DJANGO_SETTINGS_MODULE": "tests.integration.project",
            "DISTLOCK_TEST_PROJECT": json.dumps(self.settings),
            "DISTLOCK_TEST_DATABASES": "{}",
            # What commands leave open at their end is Django's.
            "PYTHONDEVMODE": "",
        }


def run_python(folder: Path, *arguments: str, status: int = 0, **environment: str) -> str:
    """Run Python in a folder, without the settings of the tests; return what it said."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={
            **{name: each for name, each in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"},
            "PYTHONPATH": f"{folder}:{ROOT}",
            "PYTHONDEVMODE": "",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


@contextmanager
def importable(folder: Path, files: dict[str, str]) -> Iterator[None]:
    """Write modules that can be imported in the block, and are forgotten behind it.

    Args:
        files: What stands in each, by its path without `.py`.
    """
    for name, text in files.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        invalidate_caches()
        yield
    tops = {name.split("/")[0] for name in files}
    for module in [each for each in sys.modules if each.split(".")[0] in tops]:
        del sys.modules[module]


def _plain(database: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a database without what only tests need."""
    wanted = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")
    return {name: database[name] for name in wanted}
