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
#: How PostgreSQL notes where each function looks names up: nobody else may create there.
FIXED_PATH = "search_path=pg_catalog, pg_temp"
#: In the order of installation.
SCRIPTS = ("storage", "fence_guard", *FUNCTIONS)

#: Where a session finds `{table}`, and whether it does: else, where it would make it.
SCHEMA_OF = """
SELECT coalesce(found.schema, pg_catalog.current_schema(), 'public'), found.schema IS NOT NULL
FROM (
    SELECT (
        SELECT n.nspname FROM pg_catalog.pg_class c
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = pg_catalog.to_regclass('"{table}"')
    ) AS schema
) found
"""

_NAMES = re.compile("|".join(sorted(DEFAULT_TABLES.values(), key=len, reverse=True)))
#: Tables and functions, and what stands in for their schema meanwhile.
_IDENTIFIER, _HERE = re.compile(rf'"(?:{_NAMES.pattern})\w*"'), "\x1f"
#: The versions that a database may have. The last one is called.
_VERSIONS = ("v1", "v2")


def function_name(operation: str, version: str = _VERSIONS[-1]) -> str:
    """Return the name of the function for an operation, such as `"acquire"`."""
    return f"{table('locks')}_{operation}_{version}"


def script(name: str, schema: str) -> str:
    """Return one file of SQL with the configured table names.

    Args:
        schema: That of the tables. The names in a function's body are looked up when it is called,
            by whatever path the caller has.
    """
    text = (files(__package__) / "postgresql" / f"{name}.sql").read_text(encoding="utf-8")
    configured = {default: table(what) for what, default in DEFAULT_TABLES.items()}
    # Two steps, because the schema may be called like a table.
    within = _IDENTIFIER.sub(rf"{_HERE}.\g<0>", text)
    renamed = _NAMES.sub(lambda match: configured[match[0]], within)
    return renamed.replace(_HERE, _quoted(schema))


def removal(schema: str) -> list[str]:
    """Return the statements that take away what the scripts of any version installed.

    Functions only: triggers and storage parameters go with their tables.
    """
    within = _quoted(schema)
    return [
        f'DROP FUNCTION IF EXISTS {within}."{function_name(operation, version)}"'
        for version in _VERSIONS
        for operation in FUNCTIONS
    ] + [f'DROP FUNCTION IF EXISTS {within}."{fence_guard_name()}" CASCADE']


def _quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


def fence_guard_name() -> str:
    """Return the name of the trigger function that keeps the fence counters."""
    return f"{table('fences')}_guard_v1"
