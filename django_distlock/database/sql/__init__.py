"""The objects in PostgreSQL besides the models' tables: functions, a trigger, two more tables.

The files are plain SQL with the default table names. `script()` replaces these by the configured
ones, and inserts expressions with a secret. All names start with that of the locks' table. Those of
functions end with a version, because workers of the previous release still call their own version.

Every role that may connect can take any advisory lock, listen on any channel, and read the numbers
of locks and the names of sessions. So numbers and channels are hashes with a secret, computed only
in the server: docs/decisions/numbers-and-channels-have-a-secret.md.
"""

from __future__ import annotations

import re
from importlib.resources import files

from ...conf import DEFAULT_TABLES, SIDE_TABLES, table
from ...core.keys import PLACE_MARKER, prefix_end

#: The functions for locks.
FUNCTIONS = (
    *("acquire", "share", "acquire_many", "extend", "extend_many", "release"),
    "transaction_lock",
)
#: The `search_path` of each function, as PostgreSQL stores it: schemas where others cannot create.
FIXED_PATH = "search_path=pg_catalog, pg_temp"
#: A setting of a function, in its file.
_SETTING = re.compile(r"^SET (\w+) = (.+?)(?: AS \$body\$)?$", re.MULTILINE)
#: The scripts in the order of installation.
SCRIPTS = ("secret", "storage", "fence_guard", *FUNCTIONS)

#: The schema in which a session finds `{table}`, or would create it, and whether it finds it.
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
#: Quoted names of tables and functions, and a placeholder for their schema.
_IDENTIFIER, _HERE = re.compile(rf'"(?:{_NAMES.pattern})\w*"'), "\x1f"
#: The versions of functions that a database may have; all but the last are of pre-releases.
_VERSIONS = ("v1", "v2", "v3")


#: The current time in microseconds since 1970, at each evaluation.
NOW = "(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint"
#: The held advisory locks of this database, as `l`, and the expression for the number of one.
HELD_LOCKS = """
    pg_locks l WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
LOCK_NUMBER = "((l.classid::bigint << 32) | l.objid::bigint)"
#: Text that several scripts contain, by its placeholder.
_PIECES = {
    "{now}": NOW,
    "{of_key}": (
        "(l.storage_key = p_storage_key OR l.storage_key >= v_from AND l.storage_key < v_to)"
    ),
    # An older snapshot would not show rows that were committed while the function waited.
    "{require_isolation}": (
        "IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN"
        " RAISE EXCEPTION 'distlock needs READ COMMITTED' USING ERRCODE = '25001'; END IF;"
    ),
    "{require_salt}": (
        "IF NOT FOUND THEN RAISE EXCEPTION 'the table django_distlock_heldlock_salt is empty'"
        " USING ERRCODE = '58000', HINT = 'Run manage.py migrate.'; END IF;"
    ),
    # Locked by a transaction that goes on, or by several, whose number is another one. The number
    # of the last one stays in the row, as an acquire leaves its own.
    "{is_locked}": (
        "c.xmax <> 0 AND (pg_catalog.mxid_age(c.xmax) >= 0 OR pg_catalog.age(c.xmax) <= (SELECT"
        " pg_catalog.age(pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::xid)))"
    ),
    # Not a SET clause, which ends before the commit. A stronger setting stays.
    "{durable}": (
        "IF pg_catalog.current_setting('synchronous_commit') <> 'remote_apply' THEN"
        " v_ignored := pg_catalog.set_config('synchronous_commit', 'on', true); END IF;"
    ),
}

# With the OID of the table, because a copy of the schema has the same seed.
_SEED = "pg_catalog.textcat(s.seed, s.tableoid::text)"


def function_name(operation: str, version: str = _VERSIONS[-1]) -> str:
    """Return the name of the function for an operation, such as `"acquire"`."""
    return f"{table('locks')}_{operation}_{version}"


def side_table(what: str) -> str:
    """Return the name of one of the tables without models, such as `"salt"`."""
    return f"{table('locks')}_{what}"


def number(use: str, name: str, seed: str = _SEED) -> str:
    """Return an expression for the number of an advisory lock, in a query `FROM` the salt as `s`.

    Args:
        use: The purpose; each has a number of its own.
        name: An expression for the storage key.
        seed: An expression for the secret, if it was read before.
    """
    first = f"pg_catalog.substr({_sha256(_salted(use, name, seed))}, 1, 8)"
    return f"pg_catalog.textcat('x', {_hex(first)})::bit(64)::bigint"


def mark() -> str:
    """Return an expression for the number that sessions with transaction locks share."""
    return number("transactions", "''")


def channel() -> str:
    """Return an expression for the channel of wake-ups, as `number` does."""
    return f"pg_catalog.textcat('distlock_', pg_catalog.left({_digest('channel')}, 32))"


def word() -> str:
    """Return an expression for the word that names in wake-ups are hashed with; see `number`."""
    return _digest("word")


def called(name: str) -> str:
    """Return an expression for the payload of a wake-up for a storage key; see `number`."""
    return f"pg_catalog.left({_hex(_sha256(f'pg_catalog.textcat({word()}, {name})'))}, 32)"


def _digest(use: str) -> str:
    return _hex(_sha256(_salted(use, "''", _SEED)))


def _salted(use: str, name: str, seed: str) -> str:
    return f"pg_catalog.textcat({seed}, pg_catalog.textcat(':{use}:', {name}))"


def _sha256(text: str) -> str:
    return f"pg_catalog.sha256(pg_catalog.convert_to({text}, 'UTF8'))"


def _hex(octets: str) -> str:
    return f"pg_catalog.encode({octets}, 'hex')"


def script(name: str, schema: str) -> str:
    """Return one file of SQL with the configured table names.

    Args:
        schema: The schema of the tables. It is needed because names in a function's body are
            looked up at each call.
    """
    text = (files(__package__) / "postgresql" / f"{name}.sql").read_text(encoding="utf-8")
    put_in = _PIECES | {
        "{turn}": number("turn", "p_storage_key"),
        "{turn_of_seed}": number("turn", "p_storage_keys[v_at]", "v_seed"),
        "{turn_of_row}": number("turn", "k.storage_key", "s.seed"),
        "{seed}": _SEED,
        "{mark}": mark(),
        "{channel}": channel(),
        "{place}": PLACE_MARKER,
        "{place_end}": str(prefix_end(PLACE_MARKER)),
        "{called}": called("p_storage_key"),
        "{called_whole}": called(f"pg_catalog.split_part(p_storage_key, '{PLACE_MARKER}', 1)"),
    }
    for stands_for, expression in put_in.items():
        text = text.replace(stands_for, expression)
    configured = {default: table(what) for what, default in DEFAULT_TABLES.items()}
    # In two steps, because the schema may have the name of a table.
    within = _IDENTIFIER.sub(rf"{_HERE}.\g<0>", text)
    renamed = _NAMES.sub(lambda match: configured[match[0]], within)
    return renamed.replace(_HERE, quoted(schema))


def settings_in(text: str) -> list[str]:
    """Return the settings of the function in a script, as PostgreSQL stores them."""
    return [f"{name}={value}" for name, value in _SETTING.findall(text)]


def removal(schema: str) -> list[str]:
    """Return the statements that remove the objects of all versions.

    Triggers and storage parameters are removed with their tables.
    """
    within = quoted(schema)
    return [
        f'DROP FUNCTION IF EXISTS {within}."{function_name(operation, version)}"'
        for version in _VERSIONS
        for operation in FUNCTIONS
    ] + [
        f'DROP FUNCTION IF EXISTS {within}."{fence_guard_name()}" CASCADE',
        *(f'DROP TABLE IF EXISTS {within}."{side_table(each)}"' for each in SIDE_TABLES),
    ]


def quoted(name: str) -> str:
    """Return a name as a quoted identifier of PostgreSQL."""
    return '"{}"'.format(name.replace('"', '""'))


def fence_guard_name() -> str:
    """Return the name of the trigger function that protects the fence counters."""
    return f"{table('fences')}_guard_v1"
