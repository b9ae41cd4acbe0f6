"""Examines how a store answers: whether, how fast, by which clock, with how many connections."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.core import checks
from django.db import connections

from ...backends.base import BaseLockBackend
from ...backends.listening import Listener, NoWakeUps
from ...backends.tables import FenceTable
from ...checks.configured import is_redis
from ...core.errors import LockError
from ...core.keys import new_token
from ...core.records import Contended
from ...database.connections import rows_of
from ...locks.attempts import unclear
from ...process.host import current_holder
from .findings import Notes

if TYPE_CHECKING:
    from ...backends.redis import RedisBackend

#: The key that is acquired and released: always the same, because its fence counter stays.
KEY: Final = "distlock-doctor"
#: Seconds after which the key is free if this process dies meanwhile.
TTL: Final = 10.0
#: Round trips that are measured.
TRIPS: Final = 5
#: Seconds that a round trip takes at most if nothing is wrong.
SLOW: Final = 0.1
#: Seconds by which two clocks may differ.
APART: Final = 1.0
#: The part of a server's connections that may be used.
NEARLY: Final = 0.8

_REMEDY: Final = "Check the server's log, and whether the migrations are applied there."
_DOWN: Final = "Check that its server runs, is reachable from this host, and is the primary."
_SLOW: Final = f"{_DOWN} If it runs, check whether another session has locked the lock tables."
#: By the code of the error.
_REMEDIES: Final = {
    "auth_failed": "Check the user name, the password and the permissions of this user.",
    "network_timeout": _SLOW,
    "rate_limited": "Check the server's limits for connections and memory.",
    "service_unavailable": _DOWN,
}


# A limit of -1 is none.
_POSTGRESQL = """
SELECT 'the server', count(*), current_setting('max_connections')::bigint
    - current_setting('superuser_reserved_connections')::bigint
FROM pg_stat_activity WHERE backend_type = 'client backend'
UNION ALL
SELECT 'the database ' || d.datname, count(a.pid), d.datconnlimit
FROM pg_database d LEFT JOIN pg_stat_activity a
    ON a.datid = d.oid AND a.backend_type = 'client backend'
WHERE d.datname = current_database() AND d.datconnlimit > 0 GROUP BY d.datname, d.datconnlimit
UNION ALL
SELECT 'the user ' || r.rolname, count(a.pid), r.rolconnlimit
FROM pg_roles r LEFT JOIN pg_stat_activity a
    ON a.usesysid = r.oid AND a.backend_type = 'client backend'
WHERE r.rolname = current_user AND r.rolconnlimit > 0 GROUP BY r.rolname, r.rolconnlimit
"""
_MYSQL = """
SELECT 'the server', VARIABLE_VALUE + 0, @@max_connections
FROM {schema}.GLOBAL_STATUS WHERE VARIABLE_NAME = 'Threads_connected'
"""


class Offset(NamedTuple):
    """How far a store's clock is ahead of this host's, with the uncertainty of that, in seconds."""

    seconds: float
    uncertainty: float

    def __str__(self) -> str:
        return f"{self.seconds:+.3f} s ± {self.uncertainty:.3f} s"


class Used(NamedTuple):
    """The number of open connections, and the most that may be open."""

    of: str
    number: int
    most: int

    def __str__(self) -> str:
        return f"{self.of} has {self.number} of {self.most}"


def ask(store: BaseLockBackend, notes: Notes, *, writes: bool) -> bool:
    """Note how a store answers; return whether locks can be acquired, as far as that was tried."""
    store.clock()  # It connects, which must not count in the first round trip.
    trips = [_timed(store.clock) for _ in range(TRIPS)]
    _note_speed(notes, statistics.median(seconds for seconds, _answer in trips))
    _note_clocks(store, notes)
    works = _note_writing(store, notes, writes=writes)
    _note_wake_ups(store, notes)
    _note_connections(store, notes)
    return works


def remedy(error: LockError) -> str:
    """Return what to do about a store that gave this error."""
    return _REMEDIES.get(error.code, _REMEDY)


def host_clock() -> datetime:
    """Return the time by this host's clock."""
    return datetime.now(UTC)


def _timed(question: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    answer = question()
    return time.monotonic() - began, answer


def _note_speed(notes: Notes, median: float) -> None:
    text = f"a round trip takes {median * 1000:.1f} ms (median of {TRIPS})"
    if median <= SLOW:
        notes.look("store", f"answers; {text}")
        return
    notes.find(
        "D009",
        "store",
        f"{text}, more than {SLOW * 1000:g} ms",
        "Every lock needs at least two round trips. Check the network path to the server and the"
        " server's load.",
    )


def _note_clocks(store: BaseLockBackend, notes: Notes) -> None:
    if store.time_authority == "client":
        notes.skip("clock", "leases expire by this host's own clock")
        return
    best: dict[str, Offset] = {}
    for _ in range(TRIPS):
        for server, offset in _offsets(store).items():
            # The fastest answer is the most precise.
            if server not in best or offset.uncertainty < best[server].uncertainty:
                best[server] = offset
    # Servers are named only if there are several.
    shown = {f"{server}: " if len(best) > 1 else "": offset for server, offset in best.items()}
    wrong = {
        server: offset
        for server, offset in shown.items()
        if abs(offset.seconds) - offset.uncertainty > APART
    }
    if not wrong:
        notes.look("clock", _listed(shown) + " against this host")
        return
    notes.find(
        "D001",
        "clock",
        f"the store's clock differs from this host's by {_listed(wrong)}",
        "Find out which clock is wrong (chronyc tracking, timedatectl). Slew it, do not step it:"
        " if the store's clock steps forward, held leases expire.",
    )


def _offsets(store: BaseLockBackend) -> Mapping[str, Offset]:
    before = host_clock()
    seconds, clocks = _timed(store._clocks)
    # The clocks were read at some time in between.
    middle = before + timedelta(seconds=seconds / 2)
    return {
        name: Offset((clock - middle).total_seconds(), seconds / 2)
        for name, clock in clocks.items()
    }


def _listed(offsets: Mapping[str, Offset]) -> str:
    return ", ".join(f"{server}{offset}" for server, offset in offsets.items())


def _note_writing(store: BaseLockBackend, notes: Notes, *, writes: bool) -> bool:
    """Acquire a lock and release it; return whether that worked, or was not tried."""
    if not writes:
        notes.skip("locking", "not tried")
        return True
    try:
        seconds, text = _timed(lambda: _locked(store))
    except LockError as error:
        # The store has reported its clock, so it runs: a replica, or a user who may only read.
        text = f"answers, but no lock can be acquired: {error}"
        notes.find("D011", "locking", text, remedy(error), level=checks.ERROR)
        return False
    notes.look("locking", text or f"a lock was acquired and released in {seconds * 1000:.1f} ms")
    return True


def _locked(store: BaseLockBackend) -> str:
    ttl = min(TTL, store.config.max_ttl)
    asked_at = store.monotonic()
    answer = store.acquire(KEY, new_token(), ttl, current_holder())
    if isinstance(answer, Contended):
        if answer.is_unclear:
            # No other doctor holds the key. Something blocks every lock, such as a locked table.
            raise unclear(store, KEY, store.monotonic() - asked_at)
        return f"answers; the key {KEY!r} is held, so no lock was acquired for this test"
    store.release(answer)
    return ""


def _note_wake_ups(store: BaseLockBackend, notes: Notes) -> None:
    if not store.supports_wakeups:
        notes.skip("wake-ups", "this store has no wake-ups: waiters use polling")
        return
    listener = getattr(store, "_listener", None)
    if not isinstance(listener, Listener):
        notes.skip("wake-ups", "this store does not report how wake-ups are received")
        return
    try:
        listener._subscribe().close()
    except NoWakeUps as error:
        text, hint = str(error), "Until then, waiters use polling, which takes longer."
        notes.find("D008", "wake-ups", text, hint)
    except Exception as error:  # noqa: BLE001 - a driver may raise anything
        notes.find(
            "D008",
            "wake-ups",
            f"the connection that receives wake-ups cannot be opened: {error}",
            "Check whether the migrations are applied, the alias in OPTIONS['listen_using'] and the"
            " server's connection limits.",
        )
    else:
        notes.look("wake-ups", "a connection that receives wake-ups was opened")


def _note_connections(store: BaseLockBackend, notes: Notes) -> None:
    found: list[Used] = []
    # A store that does not report its connections is no finding.
    with suppress(LockError):
        if is_redis(store):
            found = list(_of_redis(store))
        elif isinstance(store, FenceTable):
            found = store._connections.ask(_of_database, writes=False, long=True)
    many = [each for each in found if each.number >= each.most * NEARLY]
    if many:
        notes.find(
            "D010",
            "connections",
            f"nearly all connections are used: {', '.join(map(str, many))}",
            "Find out which clients use them, add a pooler, or raise the limit. A process without"
            " a connection can neither acquire nor renew locks.",
        )
    elif found:
        notes.look("connections", ", ".join(map(str, found)))


def _of_redis(store: RedisBackend) -> Iterator[Used]:
    for name, told in store.store.of_each_server("INFO", "clients").items():
        text = told if isinstance(told, str) else str(told, "utf-8")
        found = dict(re.findall(r"^(connected_clients|maxclients):(\d+)", text, re.MULTILINE))
        if len(found) == 2:
            most = int(found["maxclients"])
            yield Used(f"the server {name}", int(found["connected_clients"]), most)


def _of_database(using: str) -> list[Used]:
    connection = connections[using]
    if connection.vendor == "postgresql":
        question = _POSTGRESQL
    elif connection.vendor == "mysql":
        mariadb = getattr(connection, "mysql_is_mariadb", False)
        schema = "information_schema" if mariadb else "performance_schema"
        question = _MYSQL.format(schema=schema)
    else:
        return []
    return [Used(of, int(number), int(most)) for of, number, most in rows_of(using, question)]
