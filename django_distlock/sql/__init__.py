"""What lives in PostgreSQL beside the tables: functions, a trigger, storage parameters.

The files are plain SQL over the default table names; `script()` puts the configured ones in their
place. Function names start with the locks' table and end with a version: a worker of the
release before keeps calling the version it knows.
"""

from __future__ import annotations

import re
from importlib.resources import files

from ..conf import DEFAULT_TABLES, table

#: What is called for locks.
FUNCTIONS = ("acquire", "extend", "extend_many", "release")
#: In the order of installation.
SCRIPTS = ("storage", "fence_guard", *FUNCTIONS)

_NAMES = re.compile("|".join(sorted(DEFAULT_TABLES.values(), key=len, reverse=True)))
#: The versions that a database may have. The last one is called.
_VERSIONS = ("v1", "v2")


def function_name(operation: str, version: str = _VERSIONS[-1]) -> str:
    """Return the name of the function for an operation, such as `"acquire"`."""
    return f"{table('locks')}_{operation}_{version}"


def script(name: str) -> str:
    """Return one file of SQL with the configured table names."""
    text = (files(__package__) / "postgresql" / f"{name}.sql").read_text(encoding="utf-8")
    configured = {default: table(what) for what, default in DEFAULT_TABLES.items()}
    return _NAMES.sub(lambda match: configured[match[0]], text)


def removal() -> list[str]:
    """Return the statements that take away what the scripts of any version installed.

    Functions only: triggers and storage parameters go with their tables.
    """
    return [
        f'DROP FUNCTION IF EXISTS "{function_name(operation, version)}"'
        for version in _VERSIONS
        for operation in FUNCTIONS
    ] + [f'DROP FUNCTION IF EXISTS "{fence_guard_name()}" CASCADE']


def fence_guard_name() -> str:
    """Return the name of the trigger function that keeps the fence counters."""
    return f"{table('fences')}_guard_v1"
