"""Break the package on purpose, and see the tests fail: `python -m tests.mutants`.

Each mutant is one fault that lock packages have had, in one backend. A copy of the project gets it,
and the tests named for it must fail there. A mutant that survives is an error: either its test
proves nothing, or the line it changes does nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("django_distlock", "tests", "pyproject.toml")

RACES = "tests/contract/test_races.py"
EXPIRY = "tests/contract/test_expiry.py"
FENCES = "tests/contract/test_fences.py"
RELEASE = "tests/contract/test_transaction_release.py"

ACQUIRE = "django_distlock/sql/postgresql/acquire.sql"
EXTEND = "django_distlock/sql/postgresql/extend.sql"
DROP = "django_distlock/sql/postgresql/release.sql"
MANAGERS = "django_distlock/managers.py"
MEMORY = "django_distlock/backends/memory.py"
CONNECTIONS = "django_distlock/connections.py"
POSTGRESQL = "django_distlock/vendors/postgresql.py"
SQLITE = "django_distlock/vendors/sqlite.py"
RECORDS = "django_distlock/core/records.py"
TRANSACTIONS = "django_distlock/transactions.py"

COMMON = "django_distlock/backends/lua/common.lua"
REDIS = "django_distlock/backends/redis"
ADVISORY = "django_distlock/backends/advisory"
SESSIONS = "tests/integration/test_advisory_sessions.py"

ORM_LOCK, ORM_NO_LOCK = r"row = _only\(self.select_for_update\(\)", "row = _only(self"

FREE_AT_COMMIT = f"{RELEASE}::test_key_is_free_once_the_data_is_committed"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault: `old`, a regular expression, becomes `new` wherever it stands in `file`."""

    fault: str
    backend: str
    file: str
    old: str
    new: str
    test: str
    #: Which of the test's cases; "" where it has none.
    case: str = "{backend}"

    @property
    def test_id(self) -> str:
        """What pytest calls the test."""
        case = self.case.format(backend=self.backend)
        return f"{self.test}[{case}]" if case else self.test


MUTANTS = (
    Mutant(
        fault="no row lock",
        backend="postgres",
        file=ACQUIRE,
        old=r"(?s) FOR UPDATE;(.*?) AND \(l.token = p_replace OR l.free_at <= t\);",
        new=r";\1;",
        test=f"{RACES}::test_stalled_extend_wins_over_an_acquire",
    ),
    Mutant(
        fault="no row lock",
        backend="postgres_orm",
        file=MANAGERS,
        old=ORM_LOCK,
        new=ORM_NO_LOCK,
        test=f"{RACES}::test_stalled_extend_wins_over_an_acquire",
    ),
    Mutant(
        fault="no row lock",
        backend="mariadb",
        file=MANAGERS,
        old=ORM_LOCK,
        new=ORM_NO_LOCK,
        test=f"{RACES}::test_stalled_extend_wins_over_an_acquire",
    ),
    Mutant(
        fault="a collation that pads with spaces",
        backend="mariadb",
        file="django_distlock/fields.py",
        old=r"utf8mb4_nopad_bin",
        new="utf8mb4_bin",
        test="tests/integration/test_mysql.py::test_texts_that_look_alike_are_different_rows",
        case="storage_key",
    ),
    Mutant(
        fault="fences that forget their floor",
        backend="postgres",
        file=ACQUIRE,
        old=r"CASE WHEN p_floor THEN t / 10 ELSE 1 END",
        new="1",
        test="tests/contract/test_fence_floor.py::test_fences_rise_over_a_lost_counter",
        case="{backend}-missing",
    ),
    Mutant(
        fault="no row lock",
        backend="sqlite",
        file=CONNECTIONS,
        old=r'"IMMEDIATE"',
        new='"DEFERRED"',
        test=f"{RACES}::test_extend_and_acquire_have_one_winner",
    ),
    Mutant(
        fault="no row lock",
        backend="memory",
        file=MEMORY,
        old=r"threading.RLock\(\)",
        new="__import__('contextlib').nullcontext()",
        test=f"{RACES}::test_stalled_acquire_has_no_rival",
    ),
    Mutant(
        fault="transaction time for the clock",
        backend="postgres",
        file=ACQUIRE,
        old=r"clock_timestamp\(\)",
        new="now()",
        test=f"{RACES}::test_waiter_gets_its_full_ttl",
    ),
    Mutant(
        fault="transaction time for the clock",
        backend="postgres_orm",
        file=POSTGRESQL,
        old=r"clock_timestamp\(\)",
        new="now()",
        test=f"{RACES}::test_waiter_gets_its_full_ttl",
    ),
    Mutant(
        fault="transaction time for the clock",
        backend="sqlite",
        file=SQLITE,
        old=r"(?s)return datetime.now\(UTC\)(.*?)( +)with super\(\).short_transaction\(bound\):",
        new=(
            r"return getattr(self.connection, 'began', None) or datetime.now(UTC)\1"
            r"\2self.connection.began = datetime.now(UTC)\n"
            r"\2with super().short_transaction(bound):"
        ),
        test=f"{RACES}::test_waiter_gets_its_full_ttl",
    ),
    *(
        Mutant(
            fault="an extend that does not lock its row",
            backend=backend,
            file=file,
            old=old,
            new=new,
            test=f"{RACES}::test_extend_that_waited_gives_its_full_ttl",
        )
        for backend, file, old, new in (
            ("postgres", EXTEND, r" FOR UPDATE;", ";"),
            ("postgres_orm", MANAGERS, ORM_LOCK, ORM_NO_LOCK),
        )
    ),
    *(
        Mutant(
            fault="a release that judges by the time before its wait",
            backend=backend,
            file=file,
            old=old,
            new=new,
            test=f"{RACES}::test_lease_that_ends_while_waiting_is_gone",
            case="{backend}-release",
        )
        for backend, file, old, new in (
            ("postgres", DROP, r"clock_timestamp\(\)", "now()"),
            ("postgres_orm", MANAGERS, ORM_LOCK, ORM_NO_LOCK),
        )
    ),
    Mutant(
        fault="`now <= free_at` for `now < free_at`",
        backend="memory",
        file=RECORDS,
        old=r"now < self.free_at",
        new="now <= self.free_at",
        test=f"{EXPIRY}::test_record_is_live_before_its_end_only",
        case="",
    ),
    Mutant(
        fault="counter deleted with the lock",
        backend="memory",
        file=MEMORY,
        old=r"(        del self._by_token\[self._records.pop\(name\).token\])",
        new=r"\1\n        self._fences.pop(name, None)",
        test=f"{FENCES}::test_fences_grow_over_releases",
    ),
    Mutant(
        fault="counter deleted with the lock",
        backend="postgres",
        file=DROP,
        old=r"(v_outcome := 'released';)",
        new=r'\1 DELETE FROM "django_distlock_fencecounter" WHERE storage_key = p_storage_key;',
        test=f"{FENCES}::test_fences_grow_over_releases",
    ),
    *(
        Mutant(
            fault="counter deleted with the lock",
            backend=backend,
            file=MANAGERS,
            old=r"(                self.filter\(pk=name\).delete\(\))",
            new=r"\1\n                models.QuerySet.delete(self._counters.filter(pk=name))",
            test=f"{FENCES}::test_fences_grow_over_releases",
        )
        for backend in ("postgres_orm", "sqlite")
    ),
    *(
        Mutant(
            fault="release before the caller's commit",
            backend=backend,
            file=TRANSACTIONS,
            old=r"return bool\(transactions\)",
            new="return False",
            test=FREE_AT_COMMIT,
            case="{backend}-by_block",
        )
        for backend in ("memory", "sqlite", "postgres", "postgres_orm")
    ),
    Mutant(
        fault="fences that forget their floor",
        backend="redis",
        file=COMMON,
        old=r"math.max\(last_fence\(fence\) \+ 1, math.floor\(now / 10\)\)",
        new="last_fence(fence) + 1",
        test="tests/contract/test_fence_floor.py::test_fences_rise_over_a_lost_counter",
        case="{backend}-missing",
    ),
    Mutant(
        fault="a token that nobody compares",
        backend="redis",
        file=COMMON,
        old=r"held\[1\] ~= token",
        new="false",
        test="tests/contract/test_release.py::test_other_token_changes_nothing",
        case="{backend}-another",
    ),
    Mutant(
        fault="an expiry that is rounded down",
        backend="redis",
        file=COMMON,
        old=r"math.ceil\(time / 1000\)",
        new="math.floor(time / 1000) - 1",
        test="tests/redis/test_expiry.py::test_record_expires_when_its_key_is_free",
        case="604800",
    ),
    Mutant(
        fault="a command that is sent again",
        backend="redis",
        file=f"{REDIS}/lines.py",
        old=r"( +)(answer = self._exchange\(\[\*first, call.command\(\)\]\)\[-1\])",
        new=r"\1try:\n\1    \2\n\1except exceptions.RedisError:\n\1    \2",
        test="tests/redis/test_silence.py::test_lost_reply_of_a_release_is_not_asked_for_again",
        case="sync-cut",
    ),
    Mutant(
        fault="keys of a lock on several servers",
        backend="redis_cluster",
        file=f"{REDIS}/__init__.py",
        old=r'return f"\{\{\{key_hash\(prefix \+ key\)\}\}\}:\{key\}"',
        new='return f"{key_hash(prefix + key)}:{key}"',
        test="tests/contract/test_grants.py::test_free_key_is_granted",
    ),
    Mutant(
        fault="an unlock whose answer nobody reads",
        backend="advisory",
        file=f"{ADVISORY}/__init__.py",
        old=r'session.ask\("distlock_release", holding.number\)\[0\] == "t"',
        new='bool(session.ask("distlock_release", holding.number))',
        test=f"{SESSIONS}::test_unlock_that_answers_no_is_a_loss",
        case="",
    ),
    Mutant(
        fault="a pooler that is taken for the server",
        backend="advisory",
        file=f"{ADVISORY}/session.py",
        old=r"\(pg_backend_pid\(\) = \{self.pid\}\)::int",
        new="1",
        test="tests/integration/test_advisory_pgbouncer.py::test_pooler_in_between_is_refused",
        case="transaction",
    ),
    Mutant(
        fault="fences that a crash takes back",
        backend="advisory",
        file=f"{ADVISORY}/sql.py",
        old=r"CASE WHEN done.fence > done.now / 10 THEN",
        new="CASE WHEN false THEN",
        test="tests/integration/test_advisory_crash.py"
        "::test_fences_rise_where_the_counter_is_ahead_of_the_clock",
        case="",
    ),
)


def catches(mutant: Mutant) -> bool:
    """Return whether the mutant's test fails on a copy that has the fault."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name)
            else:
                shutil.copy(source, copy / name)
        mutate(copy / mutant.file, mutant)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:randomly", mutant.test_id],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    if run.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run {mutant.test_id}:\n{run.stdout}\n{run.stderr}")
    return run.returncode == 1


def mutate(path: Path, mutant: Mutant) -> None:
    """Put the fault into the file."""
    text, count = re.subn(mutant.old, mutant.new, path.read_text(encoding="utf-8"))
    if not count:
        sys.exit(f"{mutant.file} has nothing like {mutant.old}")
    path.write_text(text, encoding="utf-8")


def table() -> str:
    """Return the faults and their tests as a table in Markdown."""
    lines = ["| fault | backend | caught by |", "|---|---|---|"]
    lines += [f"| {each.fault} | {each.backend} | `{each.test}` |" for each in MUTANTS]
    return "\n".join(lines)


def main() -> None:
    """Try every mutant, and exit with 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print faults and tests, run nothing")
    parser.add_argument("fault", nargs="?", default="", help="only faults with this in their name")
    arguments = parser.parse_args()
    if arguments.table:
        print(table())
        return
    chosen = [each for each in MUTANTS if arguments.fault in each.fault]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        survivors = 0
        for mutant, caught in zip(chosen, pool.map(catches, chosen), strict=True):
            survivors += not caught
            outcome = "caught" if caught else "SURVIVED"
            print(f"{outcome:8}  {mutant.backend:12} {mutant.fault}", flush=True)
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
