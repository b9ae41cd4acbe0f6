"""Exit statuses of commands that run under a lock, after sysexits.h, and their messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from ..core.errors import LockNotAcquired

#: The arguments or the settings are wrong, as argparse says it.
USAGE: Final = 2
#: The store of the locks cannot be used (EX_UNAVAILABLE).
UNAVAILABLE: Final = 69
#: Somebody else holds the key (EX_TEMPFAIL).
BUSY: Final = 75
#: The lease ended before the program did (EX_PROTOCOL).
LOST: Final = 76
#: As of shells: the program exists but cannot be run; there is no such program.
NOT_EXECUTABLE: Final = 126
NOT_FOUND: Final = 127
#: The same: Ctrl-C ended it.
INTERRUPTED: Final = 130


def own_version() -> str | None:
    """Return the version of this package; None: it runs from a folder without being installed."""
    try:
        return version("django-distlock")
    except PackageNotFoundError:
        return None


def who_holds(error: LockNotAcquired) -> str:
    """Return a line that names the key, its holder, and since when."""
    if error.holder is None or error.held_for is None or error.settled:
        return str(error)
    # By this machine's clock, because people read it.
    since = datetime.now(UTC) - timedelta(seconds=error.held_for)
    program = error.holder.metadata.get("program")
    runs = f", and runs {program!r}" if isinstance(program, str) else ""
    return f"{str(error).removesuffix('.')} (since {since:%Y-%m-%d %H:%M:%S} UTC){runs}."
