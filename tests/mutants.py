"""Break the package on purpose, and see the tests fail: `python -m tests.mutants`.

Each mutant is one fault that lock packages have had, in one backend. A copy of the project gets it,
and the tests named for it must fail there. A mutant that survives is an error: either its test
proves nothing, or the line it changes does nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from itertools import repeat
from pathlib import Path
from queue import Queue
from typing import NoReturn
from urllib.parse import urlsplit

import psycopg
import pytest

from .services import mysql_connect
from .services_plugin import KINDS

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("django_distlock", "tests", "pyproject.toml")
# Only whether a test fails is asked, and not why. The plugins are named because looking for them
# takes as long as many of these tests.
PLUGINS = ("xdist.plugin", "pytest_django.plugin", "pytest_asyncio.plugin")
PYTEST = (
    "-q", "-n", "0", "--assert=plain", "--tb=native",
    "--disable-plugin-autoload", *(f"-p{each}" for each in PLUGINS),
)  # fmt: skip
#: What every run imports, and no fault touches: half of the time of a run.
PRELOADED = """
    pytest django.test django.core.management psycopg redis.cluster
""".split()  # noqa: SIM905 - as a list it would be eight lines
FORKS = multiprocessing.get_context("forkserver")
# All passed, or some failed. A process that ends by an exception of its own exits with 1.
PASSED, FAILED, NO_VERDICT = 10, 11, 12

#: Tests that wait long for what a fault keeps from coming. They come first: at the end, they would
#: run alone.
WAIT_IN_VAIN = ("tests/celery/", "tests/contract/test_renewed_calls.py")

RACES = "tests/contract/test_races.py"
EXPIRY = "tests/contract/test_expiry.py"
OPERATORS = "tests/contract/test_operators.py"
TRAPS = "tests/integration/test_dashboard_traps.py"
FENCES = "tests/contract/test_fences.py"
CONTRACT = "tests/contract/test_grants.py::TestBackend"
BLOCKS = "tests/contract/test_interrupted_blocks.py"
RELEASE = "tests/contract/test_transaction_release.py"

ACQUIRE = "django_distlock/database/sql/postgresql/acquire.sql"
EXTEND = "django_distlock/database/sql/postgresql/extend.sql"
DROP = "django_distlock/database/sql/postgresql/release.sql"
SHARING = "tests/contract/test_sharing.py"
TOGETHER = "tests/contract/test_acquire_many.py"
MANAGERS = "django_distlock/managers/lock.py"
MEMORY = "django_distlock/backends/memory.py"
COMPACT = "django_distlock/managers/compact.py"
MARIADB = "django_distlock/database/sql/mariadb"
CONNECTIONS = "django_distlock/database/connections.py"
BORROWING = "django_distlock/database/borrowing.py"
POSTGRESQL = "django_distlock/database/vendors/postgresql.py"
SQLITE = "django_distlock/database/vendors/sqlite.py"
RECORDS = "django_distlock/core/records.py"
TRANSACTIONS = "django_distlock/process/deferred_release.py"
TRANSACTION_LOCK = "django_distlock/database/sql/postgresql/transaction_lock.sql"
TRANSACTION_ROWS = "django_distlock/backends/transactions.py"
LOCKED = "tests/contract/test_transaction_locks.py"

COMMON = "django_distlock/backends/lua/common.lua"
REDIS = "django_distlock/backends/redis"
ADVISORY = "django_distlock/backends/advisory"
SESSIONS = "tests/integration/test_advisory_sessions.py"

FENCING_FIELDS = "django_distlock/fencing/fields.py"
ROWS = "tests/integration/test_fencing_rows.py"
MADE_ROWS = "tests/integration/test_fencing_made_rows.py"
NEW_ROWS = "tests/integration/test_fencing_new_rows.py"
COPIES = "tests/integration/test_fencing_copies.py"
SEEN = "tests/integration/test_seen_fences.py"
GUARD = "tests/contract/test_guard.py"
SCHEMAS = "tests/integration/test_schemas.py"
HOSTILE = "tests/integration/test_hostile_schema.py"
RUN_NOTES = "tests/integration/test_run_notes.py"

CALLED = "tests/integration/test_wakeups_postgresql.py"
LATE = "tests/contract/test_late_questions.py"
CHANGING = "django_distlock/locks/changing.py"
INTERRUPTED = "tests/integration/test_interrupted_connections.py"
SILENCE = "tests/redis/test_silence.py"

ORM_LOCK, ORM_NO_LOCK = r"row = only\(self.select_for_update\(\)", "row = only(self"

FREE_AT_COMMIT = f"{RELEASE}::test_key_is_free_once_the_data_is_committed"


#: Where the protocol of locks is.
PROTOCOL = ("backends", "core", "database", "fencing", "locks", "managers")
#: What random operations show of a fault there, beside the test that is named for it.
AGREEMENT = {
    "any": "tests/contract/test_agreement.py::test_histories_agree",
    "advisory": "tests/contract/test_session_agreement.py::test_session_histories_agree",
}
#: Where they meet faults of what is every store's, and of the one that they compare others with.
MET_ON = {
    "all": "redis", "memory": "redis", "default": "postgres", "functions": "postgres",
    "postgresql": "postgres", "wsgi": "postgres",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A fault: `old`, a regular expression, becomes `new` wherever it stands in `file`."""

    fault: str
    backend: str
    file: str
    _: KW_ONLY
    old: str
    new: str
    test: str
    #: Which of the test's cases; "" where it has none.
    case: str = "{backend}"
    #: Another test that catches a fault outside the protocol, where random operations do not get.
    also: str = ""

    @property
    def test_id(self) -> str:
        """What pytest calls the test."""
        case = self.case.format(backend=self.backend)
        return f"{self.test}[{case}]" if case else self.test


MUTANTS = (
    Mutant(
        "an open transaction is taken for a holder",
        "postgres", "django_distlock/locks/attempts.py",
        old=r"elif outcome.is_unclear and outcome.holder is None:", new="elif False:",
        test="tests/contract/test_busy.py::test_locked_table_is_trouble", case="{backend}-called",
    ),
    Mutant(
        "transactions that only look at a fence exclude each other",
        "postgres", "django_distlock/managers/fence.py",
        old=r"if is_shared:\n +self.lock\(name\)", new="return is_shared",
        test="tests/contract/test_busy.py::test_uncommitted_delete_is_nobody",
    ),
    Mutant(
        "each statement of a call gets the whole time limit of the call",
        "postgres_orm", "django_distlock/core/durations.py",
        old=r"min\(until, _end\.get\(\)\)", new="math.inf",
        test="tests/integration/test_slow_stores.py::test_call_on_a_slow_store_ends_in_its_time",
    ),
    Mutant(
        "noting a waiter costs it the rest of its waiting time", "memory",
        "django_distlock/locks/attempts.py",
        old=r"return due and self\._has_time_for_notes", new="return due",
        test="tests/integration/test_slow_stores.py::test_who_waits_is_not_noted_on_a_slow_store",
        case="",
    ),
    Mutant(
        "the doctor gives each store a time limit of its own",
        "postgres", "django_distlock/inspection/diagnosis/__init__.py",
        old=r"began \+ PATIENCE \* FOR_STORES", new="time.monotonic() + PATIENCE * FOR_STORES",
        test="tests/integration/test_distlock_doctor_stores.py::test_slow_stores_have_one_time_together",
        case="",
        also="tests/integration/test_distlock_doctor.py::test_stores_have_one_deadline",
    ),
    Mutant(
        "a thread reuses a session that has been closed", "postgres", BORROWING,
        old=r"if not _has_ended\(template\):", new="if True:",
        test="tests/integration/test_connections.py::test_session_cut_while_idle_is_replaced_unseen",
        case="functions-thread",
    ),
    Mutant(
        "a closed connection is reused", "redis", f"{REDIS}/lines.py",
        old=r"return wire is not None and is_readable\(wire.fileno\(\)\)", new="return False",
        test=f"{SILENCE}::test_closed_idle_connection_is_no_error", case="",
    ),
    Mutant(
        "two operators send a failed task twice",
        "redis", "django_distlock/contrib/celery/failed.py",
        old=r"filter\(pk=row.pk, sent_at=None\)", new="filter(pk=row.pk)",
        test="tests/celery/test_outages.py::test_two_operators_send_a_task_once",
        also="tests/celery/test_locked_task.py::test_failed_task_that_another_operator_sends_meanwhile",
    ),
    Mutant(
        "a queued task is visible between two retries only",
        "default", "django_distlock/contrib/celery/runs.py",
        old=r"if state != states.RETRY:\n", new="if True:\n",
        test="tests/celery/test_traps_policies.py::test_c2_waiting_in_the_queue_is_seen",
        also="tests/celery/test_locked_task.py::test_task_that_goes_round_is_one_who_retries",
    ),
    Mutant(
        "a queued task is not listed", "mariadb", "django_distlock/managers/waiter.py",
        old=r"Waits\(number - retrying, retrying\)", new="Waits(number)",
        test="tests/integration/test_waiters.py::test_tasks_in_their_queue_are_told_apart",
    ),
    Mutant(
        "the row is not locked", "postgres", ACQUIRE,
        old=r"(?s) FOR UPDATE;(.*?) AND \(\s+l.free_at <= t OR .*?\)\s+\);", new=r";\1;",
        test=f"{RACES}::test_stalled_extend_wins_over_an_acquire",
    ),
    Mutant(
        "the row is not locked", "postgres_orm", MANAGERS,
        old=ORM_LOCK, new=ORM_NO_LOCK,
        test=f"{RACES}::test_stalled_extend_wins_over_an_acquire",
    ),
    Mutant(
        "the row is not locked", "mariadb_orm", MANAGERS,
        old=ORM_LOCK, new=ORM_NO_LOCK,
        test=f"{RACES}::test_stalled_extend_wins_over_an_acquire",
    ),
    Mutant(
        "the row is not locked", "mariadb", f"{MARIADB}/acquire.sql",
        old=r"(FROM \{locks\} l WHERE l.storage_key = %\(name\)s) FOR UPDATE;", new=r"\1;",
        test=f"{RACES}::test_stalled_extend_wins_over_an_acquire",
    ),
    Mutant(
        "extend does not lock its row", "mariadb", f"{MARIADB}/owned.sql",
        old=r" FOR UPDATE;", new=";",
        test=f"{RACES}::test_extend_that_waited_gives_its_full_ttl",
    ),
    Mutant(
        "release judges by the time before it waited", "mariadb", f"{MARIADB}/owned.sql",
        old=r" FOR UPDATE;", new=";",
        test=f"{RACES}::test_lease_that_ends_while_waiting_is_gone", case="{backend}-release",
    ),
    Mutant(
        "acquire does not check again after it has waited", "mariadb", f"{MARIADB}/acquire.sql",
        old=r"SET v_outcome = 'again';", new="SET v_outcome = 'granted';",
        test=f"{RACES}::test_stalled_extend_wins_over_an_acquire",
    ),
    Mutant(
        "a token is left in the frames of a driver",
        "mariadb", "django_distlock/database/schemas.py",
        old=r"forget_frames\(error\)", new="pass",
        test="tests/integration/test_secrets.py::test_report_of_a_failing_store_shows_no_token",
        case="mysql",
    ),
    Mutant(
        "the collation ignores trailing spaces", "mariadb", "django_distlock/database/fields.py",
        old=r"utf8mb4_nopad_bin", new="utf8mb4_bin",
        test="tests/integration/test_mysql.py::test_texts_that_look_alike_are_different_rows",
        case="",
    ),
    Mutant(
        "fences forget their floor", "postgres", ACQUIRE,
        old=r"CASE WHEN p_floor THEN t / 10 ELSE 1 END", new="1",
        test="tests/contract/test_fence_floor.py::test_fences_rise_over_a_lost_counter",
        case="{backend}-missing",
    ),
    Mutant(
        "the row is not locked", "sqlite", COMPACT,
        old="BEGIN IMMEDIATE", new="BEGIN",
        test=f"{RACES}::test_extend_and_acquire_have_one_winner",
    ),
    Mutant(
        "the row is not locked", "sqlite_orm", CONNECTIONS,
        old=r'"IMMEDIATE"', new='"DEFERRED"',
        test=f"{RACES}::test_extend_and_acquire_have_one_winner",
    ),
    Mutant(
        "names are resolved in a schema where others may create objects", "postgres", ACQUIRE,
        old=r"SET search_path = pg_catalog, pg_temp ", new="",
        test=f"{HOSTILE}::test_functions_call_postgresql_alone", case="public",
    ),
    Mutant(
        "names are resolved in a schema where others may create objects",
        "advisory", f"{ADVISORY}/session.py",
        old=r'"search_path": "pg_catalog, pg_temp",', new='"search_path": "public, pg_catalog",',
        test=f"{HOSTILE}::test_sessions_call_postgresql_alone", case="public",
    ),
    Mutant(
        "another user's session is ended because its lock has the same number",
        "advisory", f"{ADVISORY}/sql.py",
        old=r"ON l.pid = x.pid AND l.number", new="ON l.number",
        test=f"{SESSIONS}::test_stranger_with_the_number_of_a_key", case="",
    ),
    Mutant(
        "anybody can compute the number of an advisory lock",
        "postgresql", "django_distlock/database/sql/__init__.py",
        old=r"pg_catalog\.textcat\(s\.seed, s\.tableoid::text\)", new="''::text",
        test="tests/integration/test_traps.py::test_d20_advisory_numbers_are_salted", case="",
    ),
    Mutant(
        "notifications carry the key", "postgresql",
        "django_distlock/database/sql/__init__.py",
        old=r'"\{called_whole\}": called\(.*\),', new='"{called_whole}": "p_storage_key",',
        test="tests/integration/test_hostile_role.py::test_what_is_called_out_is_not_heard",
        case="",
    ),
    Mutant(
        "a request to stop applies to whatever the session holds",
        "advisory", f"{ADVISORY}/sql.py",
        old=r" AND storage_key = %s AND fence = %s RETURNING",
        new=" AND storage_key = %s AND %s > 0 RETURNING",
        test="tests/contract/test_advisory.py::test_request_to_stop_that_comes_late_is_for_nobody",
    ),
    Mutant(
        "the row is not locked", "memory", MEMORY,
        old=r"threading.RLock\(\)", new="__import__('contextlib').nullcontext()",
        test=f"{RACES}::test_stalled_acquire_has_no_rival",
    ),
    Mutant(
        "the time of the transaction is used as the current time", "postgres", ACQUIRE,
        old=r"\{now\}", new="(date_part('epoch', now()) * 1000000)::bigint",
        test=f"{RACES}::test_waiter_gets_its_full_ttl",
        case="{backend}-expired",
    ),
    Mutant(
        "the time of the transaction is used as the current time", "postgres_orm", POSTGRESQL,
        old=r"clock_timestamp\(\)", new="now()",
        test=f"{RACES}::test_waiter_gets_its_full_ttl",
        case="{backend}-expired",
    ),
    Mutant(
        "the time of the transaction is used as the current time", "sqlite", COMPACT,
        old=r"( +)(with writing\(\):\n +kept, last, )at, _, is_shared =",
        new=r"\1at = time.time_ns() // 1000\n\1\2_, _, is_shared =",
        test=f"{RACES}::test_waiter_gets_its_full_ttl",
        case="{backend}-expired",
    ),
    Mutant(
        "the time of the transaction is used as the current time", "sqlite_orm", SQLITE,
        old=r"(?s)return datetime.now\(UTC\)(.*?)( +)with super\(\).short_transaction\(bound\):",
        new=r"return getattr(self.connection, 'began', None) or datetime.now(UTC)\1"
            r"\2self.connection.began = datetime.now(UTC)\n"
            r"\2with super().short_transaction(bound):",
        test=f"{RACES}::test_waiter_gets_its_full_ttl",
        case="{backend}-expired",
    ),
    Mutant(
        "extend does not lock its row", "postgres", EXTEND,
        old=r" FOR UPDATE;", new=";",
        test=f"{RACES}::test_extend_that_waited_gives_its_full_ttl",
    ),
    Mutant(
        "extend does not lock its row", "postgres_orm", MANAGERS,
        old=r"row = only\(self.select_for_update\(\)", new="row = only(self",
        test=f"{RACES}::test_extend_that_waited_gives_its_full_ttl",
    ),
    Mutant(
        "release judges by the time before it waited", "postgres", DROP,
        old=r"\{now\}", new="(date_part('epoch', now()) * 1000000)::bigint",
        test=f"{RACES}::test_lease_that_ends_while_waiting_is_gone", case="{backend}-release",
    ),
    Mutant(
        "release judges by the time before it waited", "postgres_orm", MANAGERS,
        old=r"row = only\(self.select_for_update\(\)", new="row = only(self",
        test=f"{RACES}::test_lease_that_ends_while_waiting_is_gone", case="{backend}-release",
    ),
    Mutant(
        "two connections are mixed up", "postgres", BORROWING,
        old=r'f"distlock:\{self.alias\}:\{id\(self\)\}:\{number\}"', new="self.alias",
        test=f"{INTERRUPTED}::test_line_that_is_interrupted_changes_no_connection",
        case="inside-functions",
    ),
    Mutant(
        "the place of a dead borrower is never free again", "postgres", BORROWING,
        old=r"return user is not None and user\(\) is None", new="return False",
        test=f"{INTERRUPTED}::test_line_that_is_interrupted_changes_no_connection",
        case="inside-functions",
    ),
    Mutant(
        "a transaction that only the driver knows of is overlooked", "postgres", CONNECTIONS,
        old=r"return raw.info.transaction_status in _OPEN", new="return False",
        test="tests/contract/test_transaction_visibility.py::test_transaction_that_django_does_not_know_is_refused",
    ),
    Mutant(
        "`now <= free_at` instead of `now < free_at`", "memory", RECORDS,
        old=r"now < self.free_at", new="now <= self.free_at",
        test=f"{EXPIRY}::test_record_is_live_before_its_end_only", case="",
    ),
    Mutant(
        "the fence counter is deleted with the lock", "memory", MEMORY,
        old=r"(                self._shelf.drop\(name\)\n)(            return True)",
        new=r"\1                self._fences.pop(name, None)\n\2",
        test=f"{CONTRACT}::test_fences_grow_over_releases",
    ),
    Mutant(
        "the fence counter is deleted with the lock", "postgres", DROP,
        old=r"(v_outcome := 'released';)",
        new=r'\1 DELETE FROM "django_distlock_fencecounter" WHERE storage_key = p_storage_key;',
        test=f"{CONTRACT}::test_fences_grow_over_releases",
    ),
    Mutant(
        "a settled key is released once more", "sqlite", COMPACT,
        old=" AND free_at IS NOT expires_at", new="",
        test=f"{CONTRACT}::test_settle_ends_the_lease",
    ),
    Mutant(
        "a lease is released by another token", "sqlite", COMPACT,
        old=r"storage_key = \? AND token = \?", new="storage_key = ? AND ? <> ''",
        test=f"{CONTRACT}::test_release_is_true_for_one_of_many",
    ),
    Mutant(
        "the fence counter is deleted with the lock", "sqlite", COMPACT,
        old=r"( +)(run\(self._statements.)delete(, \[name\]\))",
        new=r"\1\2delete\3\n\1\2delete.replace('heldlock', 'fencecounter')\3",
        test=f"{CONTRACT}::test_fences_grow_over_releases",
    ),
    Mutant(
        "the fence counter is deleted with the lock", "postgres_orm", MANAGERS,
        old=r"(                self.filter\(pk=name\).delete\(\))",
        new=r"\1\n                models.QuerySet.delete(self._counters.filter(pk=name))",
        test=f"{CONTRACT}::test_fences_grow_over_releases",
    ),
    Mutant(
        "the key is released before the caller commits", "memory", TRANSACTIONS,
        old=r"return bool\(transactions\)", new="return False",
        test=FREE_AT_COMMIT, case="by_block-{backend}",
        also="tests/contract/test_transaction_visibility.py"
        "::test_key_is_not_free_before_a_transaction_that_django_does_not_know_ends[memory]",
    ),
    Mutant(
        "the key is released before the caller commits", "postgres", TRANSACTIONS,
        old=r"return bool\(transactions\)", new="return False",
        test=FREE_AT_COMMIT, case="by_block-{backend}",
        also="tests/contract/test_transaction_requests.py"
        "::test_key_is_taken_until_the_request_is_over[postgres]",
    ),
    Mutant(
        "a release that another thread defers amid a rollback waits for ever", "memory",
        TRANSACTIONS, old=r"if thread is not None or any\(", new="if any(", case="",
        test="tests/contract/test_transaction_deadlocks.py"
        "::test_release_that_is_deferred_amid_a_rollback_is_carried_out",
        also=f"{RELEASE}"
        "::test_lease_that_another_thread_releases_amid_the_rollback_is_given_back[memory]",
    ),
    Mutant(
        "the end of a program is not seen while another thread asks for it", "memory",
        "django_distlock/management/programs.py",
        old=r"return ended is None", new="return self._process.poll() is None", case="",
        test="tests/integration/test_distlock_run.py"
        "::test_end_of_a_program_is_seen_while_another_thread_asks",
        also="tests/integration/test_distlock_run.py"
        "::test_number_of_a_program_is_its_own_until_its_end_is_waited_for",
    ),
    Mutant(
        "a program begins before anybody watches over it", "memory",
        "django_distlock/management/gate.py",
        old=r"if not os\.read\(int\(told\), 1\):", new="if False:", case="",
        test="tests/integration/test_distlock_run.py"
        "::test_program_does_not_begin_before_it_is_watched",
        also="tests/integration/test_distlock_run.py::test_gate_becomes_the_program_at_a_word",
    ),
    Mutant(
        "a fork comes amid a transaction on an SQLite file", "sqlite",
        "django_distlock/database/borrowing.py",
        old=r"pool\.finish_files\(until\)", new="pass",
        test="tests/contract/test_promises_of_waiting.py"
        "::test_child_does_not_find_a_transaction_of_its_parent",
    ),
    Mutant(
        "a session lock is missed whose answer was taken by who was interrupted", "advisory",
        f"{ADVISORY}/session.py", old=r"self\._receive\(until\)\n\n    def look",
        new="self._receive(until)[0]\n\n    def look",
        test="tests/contract/test_advisory.py::test_answer_that_was_taken_is_not_missed",
    ),
    Mutant(
        "settings that change leave the connections of before open", "redis",
        f"{REDIS}/__init__.py", old=r"self\.store\.keep_none\(\)", new="pass", case="",
        test="tests/redis/test_threads.py::test_settings_that_change_close_the_connections",
    ),
    Mutant(
        "fences forget their floor", "redis", COMMON,
        old=r"math.max\(last_fence\(fence\) \+ 1, math.floor\(now / 10\)\)",
        new="last_fence(fence) + 1",
        test="tests/contract/test_fence_floor.py::test_fences_rise_over_a_lost_counter",
        case="{backend}-missing",
    ),
    Mutant(
        "the token is not compared", "redis", COMMON,
        old=r"held\[1\] ~= token", new="false",
        test=f"{CONTRACT}::test_other_token_changes_nothing",
        case="{backend}-another",
    ),
    Mutant(
        "the expiry is rounded down", "redis", COMMON,
        old=r"math.ceil\(time / 1000\)", new="math.floor(time / 1000) - 1",
        test="tests/redis/test_expiry.py::test_record_expires_when_its_key_is_free", case="604800",
    ),
    Mutant(
        "a command is sent twice", "redis", f"{REDIS}/lines.py",
        old=r"( +)(answer = self._exchange\(\[\*first, call.command\(\)\]\)\[-1\])",
        new=r"\1try:\n\1    \2\n\1except exceptions.RedisError:\n\1    \2",
        test="tests/redis/test_silence.py::test_lost_reply_of_a_release_is_not_asked_for_again",
        case="cut",
    ),
    Mutant(
        "the keys of one lock are on several servers", "redis_cluster", f"{REDIS}/__init__.py",
        old=r'return f"\{\{\{key_hash\(prefix \+ key\)\}\}\}:\{key\}"',
        new='return f"{key_hash(prefix + key)}:{key}"',
        test=f"{CONTRACT}::test_free_key_is_granted",
    ),
    Mutant(
        "the answer of an unlock is not read", "advisory", f"{ADVISORY}/__init__.py",
        old=r'session.ask\("distlock_release", holding.number\)\[0\] == "t"',
        new='bool(session.ask("distlock_release", holding.number))',
        test=f"{SESSIONS}::test_unlock_that_answers_no_is_a_loss", case="",
    ),
    Mutant(
        "a pooler is taken for the server", "advisory", f"{ADVISORY}/session.py",
        old=r"\(pg_catalog.pg_backend_pid\(\) = \{self.pid\}\)::int", new="1",
        test="tests/integration/test_advisory_pgbouncer.py::test_pooler_in_between_is_refused",
        case="transaction",
    ),
    Mutant(
        "fences go back after a crash", "advisory", f"{ADVISORY}/sql.py",
        old=r"CASE WHEN done.fence > done.now / 10 THEN", new="CASE WHEN false THEN",
        test="tests/integration/test_advisory_crash.py::test_fences_rise_where_the_counter_is_ahead_of_the_clock",
        case="",
    ),
    Mutant(
        "release notifies nobody", "postgres", DROP,
        old=r"pg_notify\(", new="concat(",
        test=f"{CALLED}::test_event_calls_out_the_key_that_is_wanted", case="functions",
    ),
    Mutant(
        "a request to stop outlives the grant it was for", "postgres", ACQUIRE,
        old=r"wanted = false, holder = p_holder", new="holder = p_holder",
        test=f"{CALLED}::test_new_grant_is_not_wanted", case="functions",
    ),
    Mutant(
        "release notifies nobody", "redis", COMMON,
        old=r"'PUBLISH'", new="'PING'",
        test="tests/redis/test_wakeups.py::test_end_of_a_marked_grant_is_called_out",
        case="ends",
    ),
    Mutant(
        "a waiter that gives up does not wake the next one",
        "all", "django_distlock/backends/queues.py",
        old=r"return was_first", new="return False",
        test="tests/unit/test_queues.py::test_who_comes_first_by_a_leave_is_rung", case="",
    ),
    Mutant(
        "renewals that fail are never given up", "all", "django_distlock/process/heartbeat.py",
        old=r"return self.failures >= MOST_FAILURES", new="return False",
        test="tests/core/test_renewing.py::test_third_failure_in_a_row_is_one_too_many", case="",
        also="tests/contract/test_lost_leases.py::test_three_failures_in_a_row_lose_the_lease",
    ),
    Mutant(
        "a loss is reported twice", "memory", "django_distlock/locks/callbacks.py",
        old=r"first, self.told = not self.told, True", new="first, self.told = True, True",
        test="tests/contract/test_lost_leases.py::test_loss_is_told_once", case="{backend}-timer",
    ),
    Mutant(
        "a loss swallows a cancellation by somebody else", "memory",
        "django_distlock/locks/callbacks.py",
        old=r"task.uncancel\(\) <= self._cancelling", new="task.uncancel() >= 0",
        test="tests/contract/test_lost_async.py::test_cancellation_of_somebody_else_is_not_eaten_by_a_loss",
        case="",
    ),
    Mutant(
        "the minimum holding time ends with the work", "memory", "django_distlock/locks/release.py",
        old="holding.terms.hold or None", new="None",
        test="tests/contract/test_modes.py::test_held_key_stays_taken_for_the_ttl",
        case="in_a_block-{backend}",
    ),
    Mutant(
        "polling ignores how long the key has been held", "all",
        "django_distlock/core/pacing.py",
        old=r"if outcome.held_for is not None:", new="if False:",
        test="tests/core/test_acquiring.py::test_pause_is_no_longer_than_the_key_is_held_for",
        case="",
    ),
    Mutant(
        "a key is taken again at once, although others wait for it",
        "all", "django_distlock/backends/queues.py",
        old=r"return min\(most, max\(SHORTEST_REST, held\)\)", new="return 0.0",
        test="tests/unit/test_queues.py::test_wanted_key_is_left_to_others_for_as_long_as_it_was_held",
        case="",
    ),
    Mutant(
        "a transaction lock ignores leases", "postgres", TRANSACTION_LOCK,
        old=r"NOT \(l.token = ANY \(p_tokens\)\)", new="false",
        test=f"{LOCKED}::test_lease_keeps_transactions_out",
    ),
    Mutant(
        "a transaction lock ignores leases", "mariadb", TRANSACTION_ROWS,
        old=r"if row.is_live\(now\) and", new="if False and",
        test=f"{LOCKED}::test_lease_keeps_transactions_out",
    ),
    Mutant(
        "a transaction lock overlooks an extend in flight", "postgres", TRANSACTION_LOCK,
        old=r"l.free_at <= t FOR SHARE", new="false FOR SHARE",
        test=f"{LOCKED}::test_extend_in_flight_is_waited_for", case="{backend}-1",
    ),
    Mutant(
        "a transaction keeps the locks it was refused", "postgres", TRANSACTION_LOCK,
        old=r"RAISE EXCEPTION 'not locked' USING ERRCODE = 'DLOCK'", new="NULL",
        test=f"{LOCKED}::test_what_was_refused_leaves_nothing_locked", case="{backend}-0-lease",
    ),
    Mutant(
        "a lease is granted beside the transaction that has locked its key",
        "mariadb", TRANSACTION_ROWS,
        old=r"\(name, True\)\)", new="(_door(name), True))",
        test=f"{LOCKED}::test_key_is_locked_until_the_transaction_ends",
    ),
    Mutant(
        "a lease waits for its own transaction", "postgres",
        "django_distlock/process/transaction_locks.py",
        old=r"return any\(key in each.keys", new="return any(key is each.keys",
        test=f"{LOCKED}::test_lease_within_is_refused",
        also=f"{LOCKED}::test_what_stays_locked_behind_a_refusal_is_known[mariadb-transaction]",
    ),
    Mutant(
        "several keys are locked in the order of the call", "postgres",
        "django_distlock/locks/transactions.py",
        old=r"sorted\(map\(normalize_key, keys\)\)", new="map(normalize_key, keys)",
        test=f"{LOCKED}::test_order_of_the_arguments_does_not_matter",
    ),
    Mutant(
        "who waits for a key has locked others behind it", "postgres",
        TRANSACTION_LOCK,
        old=r"END LIMIT 1", new="END ORDER BY k.place DESC LIMIT 1",
        test=f"{LOCKED}::test_waiting_keeps_none_of_the_keys_behind", case="{backend}-False",
    ),
    Mutant(
        "an acquire in flight is taken for a transaction", "postgres",
        "django_distlock/backends/guards.py",
        old=r"= \(SELECT mark FROM numbers\)\)", new="<> 0)",
        test=f"{LOCKED}::test_acquire_under_way_is_no_transaction",
    ),
    Mutant(
        "the minimum holding time of a dead holder is cut short",
        "memory", "django_distlock/core/acquiring.py",
        old=r"and (outcome.expires_at != outcome.free_at|not record.is_settled)", new="and True",
        test="tests/contract/test_takeover.py::test_window_of_a_dead_process_is_kept",
    ),
    Mutant(
        "a stopped process is taken for dead", "all", "django_distlock/process/host.py",
        old=r'b"ZXx"', new='b"ZXxT"',
        test="tests/integration/test_host.py::test_stopped_process_is_not_gone", case="",
        also="tests/integration/test_distlock_doctor_kept.py"
        "::test_process_that_stands_still_is_not_dead",
    ),
    Mutant(
        "a reused process number is taken for the old process",
        "all", "django_distlock/process/host.py",
        old=r"if _differ\(seen.started_at, started_at\):", new="if False:",
        test="tests/integration/test_host.py::test_number_that_was_given_out_again", case="",
        also="tests/integration/test_host.py::test_name_of_a_process_does_not_matter",
    ),
    Mutant(
        "a lease is handed over twice", "memory", "django_distlock/locks/transfer.py",
        old=r"self._token = new_token\(\)", new="self._token = grant.token",
        test="tests/contract/test_handing_over.py::test_text_works_once",
    ),
    Mutant(
        "a fence refuses the second write of its own holder", "postgres", FENCING_FIELDS,
        old=r"CASE WHEN \{fence\} <= ", new="CASE WHEN {fence} < ",
        test=f"{ROWS}::test_equal_and_higher_fences_write", case="default",
    ),
    Mutant(
        "a save forgets the fence its row was read under",
        "sqlite", "django_distlock/fencing/querysets.py",
        old=r"row._fenced_by = by", new="row._fenced_by = None",
        test=f"{ROWS}::test_row_goes_on_with_what_it_was_read_under",
    ),
    Mutant(
        "a copy forgets the fence its row was read under",
        "sqlite", "django_distlock/fencing/models.py",
        old=r"without_lease\(self._fenced_by\)", new="None",
        test=f"{COPIES}::test_copy_of_a_stale_row_is_refused", case="{backend}-pickle",
    ),
    Mutant(
        "`bulk_update` forgets the fence its rows were read under",
        "sqlite", "django_distlock/fencing/querysets.py",
        old=r"_read_under\(each\) is not None for each in objs", new="False for each in objs",
        test=f"{COPIES}::test_bulk_update_of_a_stale_row_is_refused",
    ),
    Mutant(
        "a copy starts with the fence of another key",
        "sqlite", "django_distlock/fencing/models.py",
        old=r"            self.fence = 0\n\n", new="            pass\n\n",
        test=f"{NEW_ROWS}::test_copy_begins_without_a_fence", case="{backend}-pk and adding",
    ),
    Mutant(
        "a save past the column of the fence needs no lease",
        "sqlite", "django_distlock/fencing/models.py",
        old=r'refuse_without_lease\(type\(self\), "save\(\)"\)', new="pass",
        test="tests/integration/test_fence_keys.py::test_model_that_requires_a_lease",
    ),
    Mutant(
        "the rest of a row comes from a replica",
        "sqlite", "django_distlock/fencing/models.py",
        old=r"if using is None and from_queryset is None and", new="if False and",
        test=f"{COPIES}::test_rest_of_a_row_is_read_from_where_it_is_written", case="",
    ),
    Mutant(
        "a row leaves a relation without its lease",
        "sqlite", "django_distlock/fencing/relations.py",
        old=r"under._by = by", new="under._by = None",
        test=f"{COPIES}::test_relation_of_what_requires_a_lease",
    ),
    Mutant(
        "a transaction locks a key beside the guard of a lease that is over", "postgres",
        TRANSACTION_LOCK,
        old=r"IF v_outcome = 'locked' AND v_locked THEN", new="IF false THEN",
        test=f"{LOCKED}::test_guard_keeps_transactions_out",
    ),
    Mutant(
        "a guard begins behind the end of its lease", "postgres",
        "django_distlock/database/vendors/postgresql.py",
        old=r"timed.at < settings.until", new="true",
        test=f"{GUARD}::test_lease_that_ends_before_the_question_is_refused",
    ),
    Mutant(
        "several keys that were refused stay taken", "memory", "django_distlock/locks/several.py",
        old=r"hold=False,\n                min_hold=0.0,\n", new="\n",
        test="tests/contract/test_several_keys.py::test_nothing_is_kept_behind_a_refusal",
        case="{backend}-call",
    ),
    Mutant(
        "a busy key is taken for a lease that is lost", "postgres",
        CHANGING,
        old=r"if answer.busy else None", new="if answer.is_unclear else None",
        test="tests/contract/test_shared_locks.py::test_downgrade_waits_for_a_transaction",
        case="{backend}-guard",
    ),
    Mutant(
        "one holder of a shared key stands for all", "sqlite",
        "django_distlock/management/commands/distlock_release.py",
        old=r"\(each.key, each.fence\): each", new="each.key: each",
        test=(
            "tests/integration/test_distlock_release.py"
            "::test_all_who_share_a_key_are_shown_and_lose_it"
        ),
        case="{backend}",
        also="tests/integration/test_distlock_release.py"
        "::test_question_counts_all_who_share_a_key",
    ),
    Mutant(
        "a task that calls itself is taken for its delivery", "default",
        "django_distlock/contrib/celery/deliveries.py",
        old=r"if run_of\(request\) is not None:", new="if False:",
        test="tests/celery/test_locked_task.py::test_task_that_calls_itself", case="",
        also="tests/celery/test_locked_task.py::test_run_of_a_class_above",
    ),
    Mutant(
        "a form that nobody has parsed is compared by nothing", "default",
        "django_distlock/idempotency.py",
        old=r'request.method == "POST" or request.POST or request.FILES', new="True",
        test=(
            "tests/integration/test_idempotency.py"
            "::test_form_that_django_does_not_parse_is_compared_by_its_body"
        ),
        case="",
        also="tests/integration/test_idempotency.py::test_another_file_put_under_the_key_is_refused",
    ),
    Mutant(
        "a stale holder creates a deleted row again", "redis", "django_distlock/locks/state.py",
        old=r"counter is None or counter.fence <= self.fence", new="True",
        test=f"{MADE_ROWS}::test_deleted_row_is_not_made_again",
    ),
    Mutant(
        "a row is created while its key is granted to somebody else", "postgres",
        "django_distlock/locks/state.py",
        old=r"hold and self.store.guards.hold\(self.grant, using\)", new="False",
        test=f"{MADE_ROWS}::test_nobody_is_granted_the_key_before_the_row_is_there",
    ),
    Mutant(
        "a save writes an old fence back", "sqlite", FENCING_FIELDS,
        old=r"else models.F\(self.attname\)", new="else super().pre_save(model_instance, add)",
        test=f"{ROWS}::test_save_without_a_lease_keeps_the_fence",
    ),
    Mutant(
        "a fence of another key is accepted", "mariadb", FENCING_FIELDS,
        old=r"matches \+= .*", new="continue",
        test="tests/integration/test_fence_keys.py::test_lease_of_another_key_is_refused",
    ),
    Mutant(
        "tables are looked up in the schema of the caller", "functions",
        "django_distlock/database/server_functions.py",
        old=r"self._named\(function_name\(operation\)\)",
        new="'\"{}\"'.format(function_name(operation))",
        test=f"{SCHEMAS}::test_caller_that_moves_meets_the_same_lock",
    ),
    Mutant(
        "a prefix overlaps with another one", "sqlite", "django_distlock/core/keys.py",
        old=r'\.replace\(":", "%3A"\)', new="",
        test="tests/contract/test_keys.py::test_no_key_prefix_reaches_into_another",
    ),
    Mutant(
        "a router chooses the database of the locks",
        "default", "django_distlock/backends/tables.py",
        old=r"if routed != DEFAULT_DB_ALIAS:(?s:.*?)return DEFAULT_DB_ALIAS", new="return routed",
        test="tests/integration/test_routers.py::test_processes_with_other_contexts_exclude_each_other",
        case="",
    ),
    Mutant(
        "functions resolve names by the search path of the caller",
        "functions", "django_distlock/database/sql/__init__.py",
        old=r"return renamed.replace\(_HERE, quoted\(schema\)\)",
        new='return renamed.replace(f"{_HERE}.", "")',
        test=f"{SCHEMAS}::test_caller_that_moves_meets_the_same_lock",
    ),
    Mutant(
        "a guard does not lock the fence row",
        "postgres", "django_distlock/database/vendors/postgresql.py",
        old=r" FOR SHARE OF c", new="",
        test=f"{GUARD}::test_nobody_takes_the_key_over_before_the_end",
        case="{backend}-guard",
    ),
    Mutant(
        "a guard does not lock the fence row",
        "mariadb", "django_distlock/database/vendors/mysql.py",
        old=r" LOCK IN SHARE MODE", new="",
        test=f"{GUARD}::test_nobody_takes_the_key_over_before_the_end",
        case="{backend}-guard",
    ),
    Mutant(
        "a guard does not compare the fence",
        "postgres", "django_distlock/database/vendors/postgresql.py",
        old=r" AND c.fence = %%s AND s.bound", new=" AND %%s > 0 AND s.bound",
        test=f"{GUARD}::test_lease_that_was_taken_over_is_refused",
    ),
    Mutant(
        "a guard has no time limit", "postgres",
        "django_distlock/database/vendors/postgresql.py",
        old=r"WHEN asked.most > 0 AND", new="WHEN false AND",
        test=f"{GUARD}::test_silent_holder_is_cut_off",
    ),
    Mutant(
        "a beat sends what another beat has sent",
        "postgres", "django_distlock/contrib/celery/beats.py",
        old=r"raise Moved\n        self\._doubts", new=r"pass\n        self._doubts",
        test="tests/celery/test_beat_marks.py::test_one_of_two_moves_a_mark",
        also="tests/celery/test_beat_marks.py::test_mark_that_was_moved_is_not_sent[postgres]",
    ),
    Mutant(
        "a beat trusts the clock of the beat before it",
        "postgres", "django_distlock/contrib/celery/beats.py",
        old=r"made_at = min\(record.acquired_at \+ self._own_lead\(\), now\)",
        new="made_at = sent_at",
        test="tests/celery/test_beat_marks.py::test_tick_that_was_sent_early_is_not_sent_again",
        also="tests/celery/test_beat_marks.py::test_clock_that_was_ahead_silences_nobody[postgres-ahead0]",
    ),
    Mutant(
        "the mark of a beat ends with its process",
        "postgres", "django_distlock/contrib/celery/beats.py",
        old=r"replace\(current_holder\(told\), pid=0, started_at=None, thread=\"\"\)",
        new="current_holder(told)",
        test="tests/integration/test_distlock_doctor_kept.py::test_what_no_process_holds_is_not_dead",
        also="tests/celery/test_beat_marks.py::test_mark_is_not_taken_from_a_beat_that_is_gone[postgres]",
    ),
    Mutant(
        "an alarm fires after the trouble has ended",
        "default", "django_distlock/contrib/monitoring/alerts.yml",
        old=r"\[2m\]\)\) > 2\n        for: 3m", new=r"[5m])) > 5\n        for: 5m",
        test="tests/integration/test_metrics_alarms.py::test_no_alarm_in_a_healthy_hour", case="",
        also="tests/integration/test_metrics_alarms.py::test_alarms_fire_in_their_faults",
    ),
    Mutant(
        "a waiting candidate for leader counts as a timeout",
        "memory", "django_distlock/contrib/metrics/recording.py",
        old=r"cause.holder is not None and cause.holder.leads", new="False",
        test="tests/integration/test_metrics_prometheus.py::test_refusal_says_for_how_long_the_key_was_held",
        case="",
        also="tests/integration/test_metrics_opentelemetry.py::test_candidate_that_stands_by_is_no_timeout",
    ),
    Mutant(
        "a task that could not be sent keeps its key",
        "postgres", "django_distlock/contrib/celery/claims.py",
        old=r"except BaseException:\n        give_back\(claim.lock, claim.grant\)",
        new=r"except BaseException:",
        test="tests/celery/test_locked_task.py::test_sending_that_fails_gives_the_key_back",
        case="",
        also="tests/celery/test_limits.py::test_call_that_cannot_be_sent_keeps_no_place[default]",
    ),
    Mutant(
        "queued tasks fail while the store is unavailable",
        "postgres", "django_distlock/contrib/celery/runs.py",
        old=r'"retry" if self._is_late else "raise"', new='"raise"',
        test="tests/celery/test_outages.py::test_queued_tasks_outlast_an_outage",
        case="default-late",
        also="tests/celery/test_locked_task.py::test_task_that_is_acknowledged_late_outlasts_an_outage",
    ),
    Mutant(
        "a refused task keeps its unique key", "postgres", "django_distlock/contrib/celery/runs.py",
        old=r"if is_over or .+:\n                self", new="if False:\n                self",
        test="tests/celery/test_traps_queueing.py::test_refused_unique_task_frees_its_key",
        case="default",
        also="tests/celery/test_locked_task.py::test_keys_of_a_task_that_runs_without_its_lock[None]",
    ),
    Mutant(
        "a canvas waits for a task that was never sent",
        "postgres", "django_distlock/contrib/celery/queueing.py",
        old=r"is_awaited = follows or task_id is not None or any", new="is_awaited = any",
        test="tests/celery/test_traps_queueing.py::test_what_a_canvas_waits_for_is_sent_though_the_key_is_taken",
        case="default",
        also="tests/celery/test_locked_task.py::test_duplicate_that_is_awaited_is_sent[follows]",
    ),
    Mutant(
        "the key of a queued task is taken for an orphan",
        "postgres", "django_distlock/contrib/celery/orphans.py",
        old=r"found \|= _listed\(", new="_listed(",
        test="tests/celery/test_orphans.py::test_purged_tasks_leave_keys_that_are_found",
        case="default",
        also="tests/celery/test_orphans.py::test_keys_are_dropped_and_told[default]",
    ),
    Mutant(
        "a conflict inside the body is taken for one about the task",
        "postgres", "django_distlock/locks/policy.py",
        old=r"if entered:\n            raise", new=r"if False:\n            raise",
        test="tests/integration/test_tasks.py::test_conflict_of_the_bodys_own_is_raised",
        case="",
    ),
    Mutant(
        "a shortened lease is free before its holder knows", "postgres", RECORDS,
        old=r"expires_at=expires_at,\n( +)stop",
        new=r"expires_at=expires_at, free_at=expires_at,\n\1stop",
        test=f"{OPERATORS}::test_shortened_key_stays_with_a_holder_who_may_not_know",
    ),
    Mutant(
        "a shortened lease is free before its holder knows",
        "redis", "django_distlock/backends/lua/request_stop.lua",
        old=r"if settled then", new="if true then",
        test=f"{OPERATORS}::test_shortened_key_stays_with_a_holder_who_may_not_know",
    ),
    Mutant(
        "a shortened lease is renewed for ever", "postgres", EXTEND,
        old=r" OR t >= r.renewed_until", new="",
        test=f"{OPERATORS}::test_shortened_lease_is_renewed_until_its_end",
    ),
    Mutant(
        "a force-release applies to any holder", "redis", COMMON,
        old=r"return fence == '' or redis.call\('HGET', lock, 'fence'\) == fence",
        new="return true",
        test=f"{OPERATORS}::test_operation_is_for_the_fence_that_was_seen",
        case="{backend}-force_release",
    ),
    Mutant(
        "a force-release applies to any holder", "postgres", MANAGERS,
        old=r" and record.is_seen\(fence\)", new="",
        test=f"{OPERATORS}::test_operation_is_for_the_fence_that_was_seen",
        case="{backend}-force_release",
    ),
    Mutant(
        "a force-release applies to any holder", "mariadb", MANAGERS,
        old=r" and record.is_seen\(fence\)", new="",
        test=f"{OPERATORS}::test_operation_is_for_the_fence_that_was_seen",
        case="{backend}-force_release",
    ),
    Mutant(
        "a force-release applies to any holder",
        "advisory", "django_distlock/backends/advisory/views.py",
        old=r"found is None or not found\[0\].is_seen\(fence\)", new="found is None",
        test=f"{OPERATORS}::test_operation_is_for_the_fence_that_was_seen",
        case="{backend}-force_release",
    ),
    Mutant(
        "one spoiled record hides the others", "redis", "django_distlock/backends/redis/store.py",
        old=r"except \(LockError, \*SPOILED\) as error:", new="except ZeroDivisionError as error:",
        test="tests/integration/test_spoiled_records.py::test_dashboard_shows_them", case="",
    ),
    Mutant(
        "one spoiled record hides the others", "postgres", MANAGERS,
        old=r"except SPOILED as error:", new="except ZeroDivisionError as error:",
        test="tests/integration/test_spoiled_records.py::test_row_of_a_table_that_was_changed_by_hand",
    ),
    Mutant(
        "a dead holder is counted for a second only",
        "postgres", "django_distlock/backends/counting.py",
        old=r'"past_expiry": Q\(expires_at__lte=now, free_at__gt=F\("expires_at"\)\)',
        new='"past_expiry": Q(expires_at__lte=now, free_at__gt=now)',
        test=f"{TRAPS}::test_lease_that_nobody_gave_back_is_counted_and_named",
    ),
    Mutant(
        "a sum omits an unavailable store without saying so",
        "postgres", "django_distlock/admin/overview.py",
        old=r"is_least=bool\(outages\)", new="is_least=False",
        test=f"{TRAPS}::test_outage_of_one_makes_sums_the_least", case="",
        also="tests/integration/test_dashboard.py"
        "::test_none_held_is_a_number_only_where_all_have_answered",
    ),
    Mutant(
        "a force-release ends the session of the next holder", "advisory", f"{ADVISORY}/views.py",
        old=r"!= \[\(moved,\)\]", new="== []",
        test=f"{SESSIONS}::test_force_release_spares_the_next_grant_of_the_same_session", case="",
    ),
    Mutant(
        "a lease is renewed after its block was interrupted",
        "memory", "django_distlock/locks/state.py",
        old=r"return is_left or ", new="return ",
        test=f"{BLOCKS}::test_lease_of_a_block_that_is_gone_is_not_renewed", case="",
    ),
    Mutant(
        "a lease that was dropped without release is renewed for ever",
        "memory", "django_distlock/locks/owning.py",
        old=r"return self\._gone\(\) is not None", new="return True",
        test="tests/contract/test_renewed_calls.py::test_dropped_lease_warns_and_expires",
        case="acquire-{backend}",
    ),
    Mutant(
        "a block that a signal interrupted is never ended",
        "redis", "django_distlock/locks/blocks.py",
        old=r"when_gone\(sentinel, self._end\)", new="when_gone(sentinel, int)",
        test=f"{BLOCKS}::test_interruption_at_any_line_leaves_nothing_held", case="{backend}-block",
    ),
    Mutant(
        "a closed block is ended again",
        "memory", "django_distlock/locks/blocks.py",
        old=r"if self not in every or self.is_open or self in _giving_up:", new="if False:",
        test=f"{BLOCKS}::test_who_looks_at_all_blocks_ends_none", case="{backend}-acquire",
    ),
    Mutant(
        "the place of a session is never free again",
        "advisory", "django_distlock/backends/advisory/sessions.py",
        old=r"weakref.ref\(place, self._changed.put\)", new="lambda place=place: place",
        test=f"{SESSIONS}::test_signals_leave_the_place_of_a_session_free", case="",
    ),
    Mutant(
        "release swallows a time limit of Celery", "redis", "django_distlock/locks/release.py",
        old=r"except LockError as error:", new="except Exception as error:",
        test=f"{BLOCKS}::test_signal_amid_a_release_reaches_the_caller",
        case="{backend}-nullcontext",
    ),
    Mutant(
        "any signed fence is accepted", "default", "django_distlock/fencing/seen.py",
        old=r"if fence <= highest:", new="if highest:",
        test=f"{SEEN}::test_fence_far_above_the_clock_raises_nothing",
    ),
    Mutant(
        "a header signed for another service is accepted", "all", "django_distlock/fencing/http.py",
        old=r"_signer\(audience\).unsign", new="_signer(None).unsign",
        test="tests/integration/test_fence_header.py::test_header_for_another_service_is_refused",
        case="",
    ),
    Mutant(
        "a header with the fence of another key is accepted",
        "wsgi", "django_distlock/fencing/http.py",
        old=r"if request.fence.key == wanted:", new="if wanted:",
        test="tests/integration/test_fence_middleware.py::test_view_may_require_the_fence_of_its_key",
        case="{backend}-keyed",
    ),
    Mutant(
        "clients choose the label of a metric",
        "all", "django_distlock/contrib/metrics/prefixes.py",
        old=r"if not key.startswith\(prefix\):",
        new="if prefix:\n            return True\n        if not key:",
        test="tests/integration/test_metrics_prometheus.py::test_what_clients_choose_is_in_no_label",
        case="",
        also="tests/integration/test_metrics_opentelemetry.py::test_names_that_clients_choose_are_in_no_attribute",
    ),
    Mutant(
        "a schedule that never started is not reported as overdue",
        "postgres", "django_distlock/scheduling.py",
        old=r"if noted is None:", new="if noted:",
        test="tests/integration/test_metrics_prometheus.py::test_schedule_that_nothing_starts_is_overdue",
        case="",
        also="tests/integration/test_metrics_opentelemetry.py::test_gauges_are_asked_for",
    ),
    Mutant(
        "a Redis with other data is taken for the same one",
        "redis", "django_distlock/inspection/diagnosis/data_loss.py",
        old=r" and found\[0\] == mark", new="",
        test="tests/integration/test_distlock_doctor_stores.py::test_redis_that_was_emptied_and_marked_anew_is_found",
        case="",
        also="tests/integration/test_distlock_doctor_stores.py"
        "::test_address_of_another_redis_is_found_by_the_command",
    ),
    Mutant(
        "a leader counts as the longest holder",
        "redis", "django_distlock/contrib/metrics/gauges.py",
        old=r" or holder.leads", new="",
        test="tests/integration/test_metrics_prometheus.py::test_oldest_holding_has_its_age_by_prefix",
        case="",
        also="tests/integration/test_metrics_opentelemetry.py::test_leader_is_not_what_is_held_the_longest",
    ),
    Mutant(
        "the time in the queue counts as silence of the store", "all",
        "django_distlock/backends/queues.py",
        old="elif was_first:", new="elif False:",
        test="tests/unit/test_queues.py::test_silence_counts_from_the_front", case="",
    ),
    Mutant(
        "an extend without an answer is forgotten", "memory", CHANGING,
        old="if not answered:", new="if False:",
        test="tests/contract/test_lock_leases.py::"
        "test_extend_that_is_heard_late_ends_no_lease_before_its_deadline",
        case="called-{backend}",
    ),
    Mutant(
        "a renewal that was cut short counts in full", "memory",
        "django_distlock/locks/state.py",
        old=r"self.counted\(self._asked_for\)", new="self.counted(self.grant.ttl)",
        test=f"{LATE}::test_renewal_that_was_cut_short_counts_when_it_is_heard_late",
        case="no answer",
    ),
    Mutant(
        "an acquire without an answer is forgotten", "memory",
        "django_distlock/locks/attempts.py",
        old="ttl if self._unanswered else math.inf", new="math.inf",
        test=f"{LATE}::test_acquire_that_is_heard_late_ends_no_lease_before_its_deadline",
        case="called-{backend}",
    ),
    Mutant(
        "a late answer of an acquire ends the minimum holding time", "memory", RECORDS,
        old="not \\(is_own and record.is_settled\\)", new="True",
        test=f"{CONTRACT}::test_question_behind_the_end_of_its_work_takes_nothing",
    ),
    Mutant(
        "a release without an answer leaves the lease held", "memory",
        "django_distlock/locks/release.py",
        old="holding.given_up = holding.given_up, True",
        new="holding.given_up = holding.given_up, False",
        test=f"{LATE}::test_release_without_an_answer_ends_the_work", case="",
    ),
    Mutant(
        "a key stays taken by an acquire whose answer came late", "memory",
        "django_distlock/locks/release.py",
        old="if holding.unheard < math.inf:", new="if False:",
        test=f"{LATE}::test_key_that_a_late_acquire_takes_is_given_back", case="called",
    ),
    Mutant(
        "an extend asks the store after the lease is lost", "memory", CHANGING,
        old="if holding.is_lost:", new="if False:",
        test=f"{LATE}::test_extend_does_not_ask_behind_the_loss", case="",
    ),
    Mutant(
        "a report of an error shows a token", "postgres", "django_distlock/core/records.py",
        old=r'if type\(self.token\) is not Token:\s+(object.*)Token\(self.token\)',
        new=r"\1str.__str__(self.token)",
        test="tests/integration/test_secrets.py::test_report_of_a_block_shows_no_token",
    ),
    Mutant(
        "a pickle contains a token", "all", "django_distlock/core/secrets.py",
        old=r"def __reduce_ex__", new="def reduce",
        test="tests/core/test_secrets.py::test_nothing_with_a_token_is_pickled", case="grant",
    ),
    Mutant(
        "the message of a check shows a password", "all", "django_distlock/core/secrets.py",
        old=r"return _CREDENTIALS.*", new="return text",
        test="tests/integration/test_secrets.py::test_checks_echo_no_password", case="",
    ),
    Mutant(
        "each waiter computes the value again", "redis", "django_distlock/flights.py",
        old=r"if not found\.is_fresh:\n", new="if True:\n",
        test="tests/integration/test_flights.py::test_many_threads_of_processes_compute_once",
        also="tests/integration/test_flights.py::test_key_that_was_waited_for_is_looked_up_again[called]",
    ),
    Mutant(
        "a value that comes after the lease has ended is kept",
        "memory", "django_distlock/flights.py",
        old="if lease is None or lease.held:", new="if True:",
        test="tests/integration/test_flights.py::test_who_lost_the_lock_keeps_nothing", case="",
        also="tests/integration/test_flights.py::test_value_of_a_lock_that_an_operator_released_is_not_kept",
    ),
    Mutant(
        "a response goes to another client with the same key",
        "default", "django_distlock/idempotency.py",
        old=r'return f"\{user.*?", client or ""', new='return "", client or "all"',
        test="tests/integration/test_idempotency.py::test_users_share_no_key", case="",
        also="tests/integration/test_idempotency.py::test_framework_takes_a_request_once[/api/class/-False]",
    ),
    Mutant(
        "an error is answered again for a day", "default", "django_distlock/idempotency.py",
        old="if status >= 500 or", new="if",
        test="tests/integration/test_idempotency.py::test_what_is_not_kept_is_rolled_back", case="",
        also="tests/integration/test_idempotency.py::test_refusal_of_a_lock_is_not_kept",
    ),
    Mutant(
        "a leader's term outlasts its lease", "postgres", "django_distlock/leading.py",
        old=r"lasts = lease\.held and not \(", new="lasts = not (",
        test="tests/contract/test_leader.py::test_term_ends_with_its_lease",
        also="tests/contract/test_leader.py::test_block_leads[postgres]",
    ),
    Mutant(
        "a leader goes on after it was told to stop", "postgres", "django_distlock/leading.py",
        old=r" or self\._leader\._is_stopped", new="",
        test="tests/contract/test_leader.py::test_leader_that_is_told_to_end_steps_down",
        case="{backend}-run",
        also="tests/contract/test_leader.py::test_signal_is_handled_as_before_behind_the_block[postgres]",
    ),
    Mutant(
        "one holder more than there are permits", "memory", "django_distlock/core/sharing.py",
        old=r"len\(others\) >= attempt.permits", new="len(others) > attempt.permits",
        test=f"{SHARING}::test_no_more_than_the_permits",
    ),
    Mutant(
        "one holder more than there are permits", "postgres",
        "django_distlock/database/sql/postgresql/share.sql",
        old=r"v_others >= p_permits", new="v_others > p_permits",
        test=f"{SHARING}::test_no_more_than_the_permits",
    ),
    Mutant(
        "one holder more than there are permits", "redis", "django_distlock/backends/lua/share.lua",
        old=r"#others >= tonumber", new="#others > tonumber",
        test=f"{SHARING}::test_no_more_than_the_permits",
    ),
    Mutant(
        "readers join while a writer waits", "postgres",
        "django_distlock/database/sql/postgresql/share.sql",
        old=r"v_closed_until > t THEN", new="false THEN",
        test=f"{SHARING}::test_who_waits_to_be_alone_closes_the_door",
    ),
    Mutant(
        "readers join while a writer waits", "redis", "django_distlock/backends/lua/share.lua",
        old=r" and now < closed", new=" and false",
        test=f"{SHARING}::test_who_waits_to_be_alone_closes_the_door",
    ),
    Mutant(
        "readers come before a waiting writer, behind the last of them", "memory",
        "django_distlock/core/sharing.py",
        old=r"if closed_until is not None and", new="if others and closed_until is not None and",
        test=f"{SHARING}::test_door_stays_closed_behind_the_last_of_them",
        case="{backend}-released-shared",
    ),
    Mutant(
        "readers come before a waiting writer, behind the last of them", "postgres",
        "django_distlock/database/sql/postgresql/share.sql",
        old=r"ELSIF v_alone OR v_has_place", new="ELSIF v_others = 0 OR v_alone OR v_has_place",
        test=f"{SHARING}::test_door_stays_closed_behind_the_last_of_them",
        case="{backend}-released-shared",
    ),
    Mutant(
        "the door goes with the last reader's lease", "redis",
        "django_distlock/backends/lua/share.lua",
        old=r"keep_name\(shared, 'closed',", new="redis.call('HSET', shared, 'closed',",
        test=f"{SHARING}::test_door_stays_closed_behind_the_last_of_them",
        case="{backend}-over-shared",
    ),
    Mutant(
        "a writer that gives up leaves the door closed", "memory",
        "django_distlock/locks/attempts.py",
        old=r"self\._has_closed = True", new="pass",
        test="tests/contract/test_shared_locks.py::test_writer_that_gives_up_lets_readers_join",
        case="{backend}-refused",
    ),
    Mutant(
        "a transaction lock overlooks those who share its key", "postgres",
        "django_distlock/database/sql/postgresql/transaction_lock.sql",
        old=r"bool_or\(c.closed_until IS NOT NULL\)", new="bool_or(false)",
        test="tests/contract/test_transaction_locks.py::test_leases_that_share_a_key",
    ),
    Mutant(
        "an extend loses the place of its lease", "redis",
        "django_distlock/backends/lua/extend.lua",
        old=r"    keep_name\(shared, lock, free_at\)", new="",
        test=f"{SHARING}::test_lease_that_was_extended_keeps_its_place",
    ),
    Mutant(
        "a lease that was renewed is no longer listed", "redis",
        "django_distlock/backends/lua/extend.lua",
        old=r"list\(listing, lock, free_at\)", new="",
        test="tests/redis/test_listing.py::test_what_is_over_leaves_with_the_next_grants", case="",
    ),
    Mutant(
        "some of several keys are kept although one is contended", "postgres",
        "django_distlock/database/sql/postgresql/acquire_many.sql",
        old=r"RAISE EXCEPTION 'not all' USING ERRCODE = 'DLOCK';\n( +)END IF;\n( +)v_answers",
        new=r"EXIT;\n\1END IF;\n\2v_answers",
        test=f"{TOGETHER}::test_refusal_that_is_seen_late_undoes_what_came_before",
    ),
    Mutant(
        "the first of several keys are granted before all are checked", "redis",
        "django_distlock/backends/lua/acquire_many.lua",
        old=r"ask\(place, '1'\)", new="ask(place, place > 1 and '1' or nil)",
        test=f"{TOGETHER}::test_one_key_in_the_way_is_enough",
    ),
    Mutant(
        "two calls run in one place of the backlog", "redis",
        "django_distlock/contrib/celery/backlog.py",
        old=r" or store\.notes\.get\(_note\(place\.task_id\)\) == number", new="",
        test="tests/celery/test_limits.py::test_full_backlog_replaces_the_oldest",
        also="tests/celery/test_locked_task.py::test_call_like_one_that_was_replaced_is_queued",
    ),
)  # fmt: skip


def judged_by_agreement() -> list[Mutant]:
    """Return the faults of the protocol on stores with such histories, to be judged by these."""
    return [
        replace(each, backend=store, test=AGREEMENT.get(store, AGREEMENT["any"]), case="{backend}")
        for each in MUTANTS
        for store in [met_on(each)]
        if each.file.split("/")[1] in PROTOCOL
    ]


def judged_by_another_test() -> list[Mutant]:
    """Return the other faults, to be judged by a second test each."""
    return [replace(each, test=each.also, case="") for each in MUTANTS if each.also]


def met_on(mutant: Mutant) -> str:
    """Return the store that such histories are to run on."""
    # The dictionary uses the rules for records as much as databases do, and Redis does not.
    return "redis" if mutant.file == RECORDS else MET_ON.get(mutant.backend, mutant.backend)


def serve(stack: ExitStack) -> dict[str, str]:
    """Start the servers that all runs share; return the variables with their addresses."""
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda kind: stack.enter_context(kind.find()), KINDS.values())
        return {
            kind.variable: server.url
            for kind, server in zip(KINDS.values(), found, strict=True)
            if server
        }


@dataclass(frozen=True)
class Slot:
    """Where one run after another takes place: a copy of the project, and its databases."""

    copy: Path
    environment: dict[str, str]


def slots(stack: ExitStack, addresses: dict[str, str], runs: int) -> Queue[Slot]:
    """Return what so many runs that go on at once need."""
    free: Queue[Slot] = Queue()
    postgres, mariadb = KINDS["PostgreSQL"].variable, KINDS["MariaDB"].variable
    for number in range(runs):
        name = f"mutant{number}"
        with psycopg.connect(addresses[postgres], autocommit=True) as raw:
            raw.execute(f"DROP DATABASE IF EXISTS {name}")
            raw.execute(f"CREATE DATABASE {name}")
        if mariadb in addresses:
            other = mysql_connect(addresses[mariadb])
            other.cursor().execute(f"CREATE OR REPLACE DATABASE {name}")
            other.close()
        mine = {
            variable: urlsplit(url)._replace(path=f"/{name}").geturl()
            for variable, url in addresses.items()
            if variable in (postgres, mariadb)
        }
        # What a process of a test still writes may come between the removal of its folder.
        folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        copy = Path(stack.enter_context(folder))
        for each in COPIED:
            if (ROOT / each).is_dir():
                shutil.copytree(
                    ROOT / each, copy / each, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / each, copy / each)
        free.put(Slot(copy, {**os.environ, **addresses, **mine, "PYTHONPATH": str(copy)}))
    return free


def catches(mutant: Mutant, slot: Slot) -> bool:
    """Return whether the mutant's test fails on a copy that has the fault.

    A run that ends without a verdict, as one whose interpreter breaks down on its way out, is asked
    for one once more.
    """
    said = slot.copy / "said"
    with mutated(slot.copy / mutant.file, mutant):
        for _ in range(2):
            run = FORKS.Process(target=judge, args=(slot, mutant.test_id, said))
            run.start()
            run.join()
            if run.exitcode in (PASSED, FAILED):
                return run.exitcode == FAILED
    raise RuntimeError(
        f"pytest ended with {run.exitcode} on {mutant.test_id}:\n{said.read_text(errors='replace')}"
    )


def judge(slot: Slot, test_id: str, said: Path) -> NoReturn:
    """Be the process that runs a test on a copy."""
    with said.open("w", encoding="utf-8") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.chdir(slot.copy)
    os.environ.update(slot.environment)
    sys.path.insert(0, str(slot.copy))
    # Those of the project itself, of which this function is one.
    for name in [each for each in sys.modules if each.partition(".")[0] == "tests"]:
        del sys.modules[name]
    verdict = Verdict()
    ended = pytest.main([*PYTEST, test_id], plugins=[verdict])
    without_failure = PASSED if ended == pytest.ExitCode.OK else NO_VERDICT
    sys.exit(FAILED if verdict.has_failed else without_failure)


class Verdict:
    """What a test came to; an error before it began is none."""

    has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See a failure of the test itself, or of what it leaves."""
        self.has_failed = self.has_failed or (report.failed and report.when != "setup")


@contextmanager
def taken(free: Queue[Slot]) -> Iterator[Slot]:
    """Use a slot that nobody else uses meanwhile."""
    slot = free.get()
    try:
        yield slot
    finally:
        free.put(slot)


@contextmanager
def mutated(path: Path, mutant: Mutant) -> Iterator[None]:
    """Put the fault into the file until the block ends."""
    right = path.read_text(encoding="utf-8")
    text, count = re.subn(mutant.old, mutant.new, right)
    if not count:
        raise RuntimeError(f"{mutant.file} has nothing like {mutant.old}")
    path.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(right, encoding="utf-8")


def table() -> str:
    """Return the faults and their tests as a table in Markdown."""
    lines = ["| fault | backend | caught by |", "|---|---|---|"]
    lines += [f"| {each.fault} | {each.backend} | `{each.test}` |" for each in MUTANTS]
    return "\n".join(lines)


def report(mutant: Mutant, free: Queue[Slot]) -> bool:
    """Say what became of the mutant, and return whether it was caught."""
    try:
        with taken(free) as slot:
            caught = catches(mutant, slot)
        outcome, why = ("caught" if caught else "SURVIVED"), ""
    except RuntimeError as error:
        caught, outcome, why = False, "UNKNOWN", f"\n{error}"
    print(f"{outcome:8}  {mutant.backend:12} {mutant.fault}{why}", flush=True)
    return caught


def main() -> None:
    """Try every mutant, and exit with 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print faults and tests, run nothing")
    others = parser.add_mutually_exclusive_group()
    others.add_argument(
        "--agreement", action="store_true", help="see which faults random operations show"
    )
    others.add_argument(
        "--also", action="store_true", help="see faults outside the protocol fail a second test"
    )
    parser.add_argument("fault", nargs="?", default="", help="only faults with this in their name")
    arguments = parser.parse_args()
    if arguments.table:
        print(table())
        return
    if arguments.agreement:
        # Six seeds, of which the later ones meet what takes a second.
        os.environ.setdefault("DISTLOCK_TEST_EXAMPLES", "3")
    every: Sequence[Mutant] = MUTANTS
    if arguments.agreement:
        every = judged_by_agreement()
    elif arguments.also:
        every = judged_by_another_test()
    chosen = [each for each in every if arguments.fault in each.fault]
    chosen.sort(key=lambda each: not each.test.startswith(WAIT_IN_VAIN))
    # They wait for most of their time. A history keeps up to 50 of the 200 clients of a server.
    runs = 3 if arguments.agreement else (os.cpu_count() or 1) * 4
    FORKS.set_forkserver_preload([*PRELOADED, *PLUGINS])
    with ExitStack() as stack, ThreadPoolExecutor(runs) as pool:
        free = slots(stack, serve(stack), runs)
        caught = all([*pool.map(report, chosen, repeat(free))])
    sys.exit(0 if caught else 1)


if __name__ == "__main__":
    main()
