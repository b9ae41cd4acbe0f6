"""`manage.py` of the example, in a process that is forked from one that has imported Django."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from django.conf import settings
from django.core.management import execute_from_command_line

FOLDER = Path(__file__).parents[2] / "example_project"


def manage(*arguments: str) -> None:
    """Be `manage.py`."""
    os.setsid()
    # A site stays open for as long as there are tests of it.
    signal.alarm(0)
    # The usual hash of a password computes for half a second, so that nobody guesses many.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    sys.argv = [str(FOLDER / "manage.py"), *arguments]
    execute_from_command_line(sys.argv)
