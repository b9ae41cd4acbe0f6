"""Count the files of `with distlock(key):`, and the moves between them: `python -m tests.trip`.

One warm call without contention, on SQLite. A move is a call from one file of the package into
another; what lies between the two, in Django or in Python, is passed over.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import django
from django.conf import settings
from django.core.management import call_command

PACKAGE = "django_distlock"


def main() -> None:
    """Make a database, lock twice to be warm, and print the trip of the third time."""
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, "trip.sqlite3")  # noqa: PTH118 - a setting is a text
        settings.configure(
            INSTALLED_APPS=[PACKAGE],
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": name}},
        )
        django.setup()
        call_command("migrate", verbosity=0)
        from django_distlock import distlock

        for _ in range(2):
            with distlock("trip"):
                pass
        entered, left = Trip(), Trip()
        lock = distlock("trip")
        sys.setprofile(entered.see)
        with lock:
            sys.setprofile(left.see)
        sys.setprofile(None)
    for title, trip in (("enter", entered), ("leave", left)):
        print(f"{title}: {len(trip.files)} files, {trip.moves} moves")
        for file, calls in trip.files.most_common():
            print(f"  {calls:4} {file}")


class Trip:
    """Counts the calls in each file, and those from one file into another."""

    def __init__(self) -> None:
        self._root = f"{Path(__file__).parent.parent / PACKAGE}{os.sep}"
        self.files: Counter[str] = Counter()
        self.moves = 0

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event of the interpreter."""
        name = self._name(frame)
        if event == "call" and name:
            self.files[name] += 1
            caller = frame.f_back
            while caller is not None and not self._name(caller):
                caller = caller.f_back
            self.moves += caller is not None and self._name(caller) != name

    def _name(self, frame: FrameType) -> str:
        file = frame.f_code.co_filename
        return file.removeprefix(self._root) if file.startswith(self._root) else ""


if __name__ == "__main__":
    main()
