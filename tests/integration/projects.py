"""Projects with settings of their own, in processes of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

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


def _plain(database: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a database without what only tests need."""
    wanted = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")
    return {name: database[name] for name in wanted}
