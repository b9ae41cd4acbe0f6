"""What goes wrong, and what operators do: chosen by dice with a seed."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import DatabaseError, InterfaceError, connections
from redis import Redis
from redis.exceptions import RedisError

from django_distlock import LockError, inspection
from django_distlock.core.clock import monotonic
from django_distlock.handler import lock_backends
from tests.backends import BACKENDS
from tests.contract.locking import eventually

from .crew import Crew, Member
from .history import Writer
from .replicas import Replica
from .servers import Ground, Killable
from .worker import TTLS

ACTOR: dict[str, Any] = {"actor": "chaos", "reason": "a drill"}
_SESSIONS = {
    "mysql": "SELECT id, SUBSTRING_INDEX(host, ':', -1) FROM information_schema.processlist"
    " WHERE host LIKE '%%:%%' ORDER BY id",
    "postgresql": "SELECT pid, client_port FROM pg_stat_activity"
    " WHERE client_port > 0 ORDER BY pid",
}
_END = {"mysql": "KILL %s", "postgresql": "SELECT pg_terminate_backend(%s)"}
_END_ALL = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
)
_HIGHEST = "SELECT max(fence) FROM django_distlock_fencecounter"
#: Sets time-outs in milliseconds, of a statement and of an idle transaction, and takes them back.
_LIMIT = {
    # Sessions that are open have them at once.
    "postgresql": (
        ["ALTER SYSTEM SET statement_timeout = %s",
         "ALTER SYSTEM SET idle_in_transaction_session_timeout = %s", "SELECT pg_reload_conf()"],
        ["ALTER SYSTEM RESET statement_timeout",
         "ALTER SYSTEM RESET idle_in_transaction_session_timeout", "SELECT pg_reload_conf()"],
    ),
    # Seconds; of an idle transaction, whole ones.
    "mysql": (
        ["SET GLOBAL max_statement_time = %s / 1000",
         "SET GLOBAL idle_transaction_timeout = GREATEST(1, %s DIV 1000)"],
        ["SET GLOBAL max_statement_time = 0", "SET GLOBAL idle_transaction_timeout = 0"],
    ),
}  # fmt: skip
#: How sessions of this process are spared them: nobody would know what an operator has done.
_SPARED = {
    "postgresql": {"options": "-c statement_timeout=0 -c idle_in_transaction_session_timeout=0"},
    "mysql": {"init_command": "SET SESSION max_statement_time=0, idle_transaction_timeout=0"},
}
#: What a wire loses in one direction, while the other one works.
LOST = {"requests lost": "requests", "answers lost": "answers"}
#: Four thousand rows.
_FILLER = {"postgresql": "FROM generate_series(1, 4000)", "mysql": "FROM seq_1_to_4000"}
#: How often an operator names the fence of the holder whom it is about.
SEEN = 0.5
#: Seconds between two faults of the store itself: in between, there is work to lose.
RESTS = (4.0, 9.0)


class Chaos:
    """Does something bad now and then.

    Args:
        alias: The lock backend.
        faults: Which of `summary.FAULTS`.
        ground: What the workers stand on.
    """

    def __init__(
        self, alias: str, faults: set[str], crew: Crew, ground: Ground, chance: random.Random,
        write: Writer,
    ):  # fmt: skip
        self._alias, self._crew, self._ground = alias, crew, ground
        self._chance, self._write, self._using = chance, write, BACKENDS[alias].using
        self._later: list[tuple[float, Callable[[], object]]] = []
        acts = {
            "sessions": self._end_session, "pauses": self._pause, "kills": self._kill,
            "wires": self._spoil_wire, "expire_soon": self._expire_soon,
            "operators": self._operate, "clocks": self._shift_clock,
        }  # fmt: skip
        self._acts = [act for name, act in acts.items() if name in faults]
        # Each in its turn, or a short run would lack one.
        rare = {
            "crashes": self._crash, "poolers": self._restart_pooler, "timeouts": self._limit,
            "disks": self._fill_disk, "losses": self._flush, "losses, no data": self._start_empty,
            "restores": self._go_back, "promotions": self._fail_over,
        }  # fmt: skip
        self._rare = [act for name, act in rare.items() if name.split(",")[0] in faults]
        self._chance.shuffle(self._rare)
        self._next = monotonic() + self._chance.uniform(*RESTS) / 2
        if "timeouts" in faults:
            settings = connections[self._using].settings_dict
            settings["OPTIONS"] |= _SPARED[connections[self._using].vendor]
            connections[self._using].close()

    def act(self) -> None:
        """Do one thing, and end what has lasted for long enough."""
        self.settle(monotonic())
        if self._acts:
            self._chance.choice(self._acts)()
        if self._rare and monotonic() >= self._next:
            self._rare.append(self._rare.pop(0))
            self._rare[-1]()
            self._next = monotonic() + self._chance.uniform(*RESTS)

    def settle(self, now: float = math.inf) -> None:
        """End what was to last until `now`; by default, all of it."""
        due = [each for each in self._later if each[0] <= now]
        self._later = [each for each in self._later if each[0] > now]
        for _at, end in due:
            end()

    def _tell(self, what: str, **facts: Any) -> None:
        self._write("fault", form=what, **facts)

    def _lasts(
        self, what: str, seconds: float, member: Member | None, *ends: Callable[[], object]
    ) -> None:
        self._tell(what, to=member.name if member else "", seconds=seconds)
        self._later += [(monotonic() + seconds, end) for end in ends]

    def _member(self) -> Member:
        return self._chance.choice(self._crew.members)

    def _pause(self) -> None:
        member, seconds = self._member(), self._chance.uniform(0.5, 4.5)
        member.popen.send_signal(signal.SIGSTOP)
        self._lasts("pause", seconds, member, lambda: member.popen.send_signal(signal.SIGCONT))

    def _kill(self) -> None:
        member = self._member()
        # It takes a while until another one works.
        if self._chance.random() < 0.3:
            self._tell("kill", to=member.name)
            self._crew.replace(member)

    def _spoil_wire(self) -> None:
        member, seconds = self._member(), self._chance.uniform(0.2, 3.5)
        wire = self._crew.wires[member.place]
        what = self._chance.choice(("cut", "cut answer", "delay", "hold", "hold and cut", *LOST))
        if what == "cut":
            wire.cut()
            self._lasts("wire: cut", 0, member)
        elif what == "cut answer":
            # What was asked for is done: whoever asked a second time would get another answer.
            wire.loses = "answer"
            self._lasts("wire: cut answer", 0, member)
        elif what == "delay":
            wire.valve.delay = self._chance.uniform(0.02, 0.3)
            self._lasts("wire: delay", seconds, member, lambda: setattr(wire.valve, "delay", 0))
        elif what in LOST:
            wire.loses = LOST[what]
            # What was lost is asked for no more: its connections are at their end.
            loses = partial(setattr, wire, "loses", "")
            self._lasts(f"wire: {what}", seconds, member, loses, wire.cut)
        else:
            wire.hang()
            cut = [wire.cut] if what == "hold and cut" else []
            self._lasts(f"wire: {what}", seconds, member, *cut, wire.flow)

    def _shift_clock(self) -> None:
        member, seconds = self._member(), self._chance.choice((-3600, -5, -1, 0, 1, 5, 3600))
        member.shift_clock(seconds)
        self._lasts("shifted clock", seconds, member)

    def _end_session(self) -> None:
        with suppress(DatabaseError, InterfaceError, RedisError, LockError):
            # Never that of the operators: nobody would know what they have done.
            number = self._chance.choice(sessions(self._alias, self._crew.ports) or ["0"])
            self._end(number)
            self._tell("ended session", session=number)

    def _end(self, number: str) -> None:
        if self._using:
            self._ask(_END[connections[self._using].vendor], [int(number)])
        else:
            _redis(self._alias)("CLIENT", "KILL", "ID", number)

    def _ask(self, query: str, values: list[int]) -> None:
        with connections[self._using].cursor() as cursor:
            cursor.execute(query, values)

    # The store itself

    def _crash(self) -> None:
        assert self._ground.store
        self._ground.store.kill()
        self._tell("crash")
        self._start_again(self._ground.store)

    def _fill_disk(self) -> None:
        store = self._ground.store
        assert store
        write, ends = self._large_writes()
        store.fill()
        # A log of a fixed size has room left, so only a refused write shows that the disk is full.
        refused: type[Exception] | None = None
        until = monotonic() + 10
        while refused is None and monotonic() < until:
            try:
                write()
            except (DatabaseError, InterfaceError, LockError) as error:
                refused = type(error)
        time.sleep(self._chance.uniform(0.5, 2))
        if refused is not None:
            self._tell("disk full", refused=refused.__name__)
        # Some have ended by themselves, and others wait: an operator makes room and starts them.
        store.make_room()
        store.kill()
        self._start_again(store)
        ends()

    def _large_writes(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Give what writes eight megabytes to the store, and what removes them."""
        if self._using:
            lines = _FILLER[connections[self._using].vendor]
            self._ask("CREATE TABLE chaos_filler (x varchar(2000))", [])
            write = f"INSERT INTO chaos_filler SELECT REPEAT('x', 2000) {lines}"
            return partial(self._ask, write, []), partial(self._ask, "DROP TABLE chaos_filler", [])
        ask, key = _redis(self._alias), "chaos-filler"
        return partial(ask, "SET", key, "x" * 8_000_000), partial(ask, "DEL", key)

    def _restart_pooler(self) -> None:
        assert self._ground.pooler
        self._ground.pooler.kill()
        self._tell("pooler restarted")
        self._start_again(self._ground.pooler)

    def _start_again(self, server: Killable) -> None:
        time.sleep(self._chance.uniform(0, 1))
        server.start()
        # Those of this process have ended with the server.
        connections.close_all()

    def _limit(self) -> None:
        seconds, most = self._chance.uniform(1, 4), self._chance.choice((10, 40, 200))
        vendor = connections[self._using].vendor
        begins, ends = _LIMIT[vendor]
        for query in begins:
            self._ask(query, [most] * query.count("%s"))
        self._renew_sessions(vendor)
        self._lasts(f"timeouts: {most} ms", seconds, None, partial(self._unlimit, ends, vendor))

    def _unlimit(self, queries: list[str], vendor: str) -> None:
        for query in queries:
            self._ask(query, [])
        self._renew_sessions(vendor)

    def _renew_sessions(self, vendor: str) -> None:
        """End the sessions of workers, where only new ones have what is set."""
        for number in sessions(self._alias, self._crew.ports) if vendor == "mysql" else ():
            # It may have ended meanwhile.
            with suppress(DatabaseError):
                self._end(number)

    def _flush(self) -> None:
        since = monotonic()
        with Redis.from_url(os.environ["DISTLOCK_TEST_REDIS_URL"]) as client:
            client.flushall()
        self._lost("loss: flushed", since)

    def _start_empty(self) -> None:
        store = self._ground.store
        assert store
        since = monotonic()
        store.kill()
        self._lost("loss: started without data", since)
        store.lose()
        self._start_again(store)

    def _go_back(self) -> None:
        """Restore a backup of now, a while later."""
        store, kept = self._ground.store, monotonic()
        assert store
        store.back_up()
        restore = partial(self._replace, "restore", kept, store.restore)
        self._later.append((monotonic() + self._chance.uniform(1, 3), restore))

    def _fail_over(self) -> None:
        """Promote a replica, which has lagged for a while."""
        store, kept = self._ground.store, monotonic()
        assert store
        replica = Replica(store)
        lags = monotonic() + self._chance.uniform(0.2, 1)

        def promote() -> None:
            if self._using:
                # Nobody can ask the old server.
                self._replace("promotion", kept, replica.take_over, by_clock=True)
                return
            since = monotonic()
            store.kill()
            self._lost("promotion", since)
            replica.take_over()
            self._start_again(store)

        self._later.append((lags, replica.lag))
        self._later.append((lags + self._chance.uniform(0.5, 2), promote))

    def _replace(
        self, what: str, kept: float, take_over: Callable[[], object], *, by_clock: bool = False
    ) -> None:
        """Do what the runbook says: no worker gets to an older server before its fences rose."""
        store, pooler = self._ground.store, self._ground.pooler
        assert store
        for wire in self._crew.wires:
            wire.hang()
        if pooler:
            pooler.kill()
        # What has come through is at its end with its session: nothing is granted any more.
        assert eventually(lambda: not self._value(_END_ALL), 10)
        highest = None if by_clock else self._value(_HIGHEST)
        since = monotonic()
        store.kill()
        self._lost(what, since, kept=kept)
        take_over()
        self._start_again(store)
        # The copy may have them.
        for query in _LIMIT["postgresql"][1]:
            self._ask(query, [])
        for key in self._crew.keys:
            inspection.force_release(key, backend=self._alias, **ACTOR)
            lock_backends[self._alias].raise_fences(highest, key=key)
        if pooler:
            pooler.start()
        for wire in self._crew.wires:
            wire.cut()
            wire.flow()

    def _value(self, query: str) -> int:
        with connections[self._using].cursor() as cursor:
            cursor.execute(query)
            return int(cursor.fetchone()[0])

    def _lost(self, what: str, since: float, **facts: float) -> None:
        # A renewal just before it may have had the longest ttl.
        self._tell(what, since=since, over=monotonic() + max(TTLS), **facts)

    # Operators

    def _expire_soon(self) -> None:
        self._order(inspection.expire_soon, self._chance.choice((0.1, 0.5, 1.0)))

    def _operate(self) -> None:
        operation = self._chance.choice(
            (inspection.force_release, inspection.request_stop, inspection.pause, inspection.resume)
        )
        more = [self._chance.uniform(0.1, 1)] if operation is inspection.pause else []
        self._order(operation, *more)

    def _order(self, operation: Callable[..., Any], *arguments: Any) -> None:
        key, asked = self._chance.choice(self._crew.keys), monotonic()
        seen: dict[str, Any] = {}
        with suppress(LockError, DatabaseError, InterfaceError):
            ends = operation in (inspection.force_release, inspection.expire_soon)
            record = lock_backends[self._alias].read(key) if ends else None
            if record is not None and self._chance.random() < SEEN:
                seen = {"fence": record.fence}
                # By then, somebody else may hold it.
                time.sleep(self._chance.uniform(0, 0.8))
            outcome = operation(key, *arguments, backend=self._alias, **seen, **ACTOR)
            held = outcome.held.fence if outcome.held else outcome.fence_before
            self._write(
                "operator", form=operation.__name__, key=key, arguments=arguments,
                result=outcome.result.name, before=held, after=outcome.fence_after,
                seen=seen.get("fence"), asked=asked,
            )  # fmt: skip


def sessions(alias: str, ports: set[int]) -> list[str]:
    """Return the server's numbers of the sessions of workers, by the ports they come from."""
    using = BACKENDS[alias].using
    if using:
        with connections[using].cursor() as cursor:
            cursor.execute(_SESSIONS[connections[using].vendor], [])
            return [str(number) for number, port in cursor.fetchall() if int(port) in ports]
    if BACKENDS[alias].store == "redis_cluster":
        return []  # They are not behind the wires.
    lines = str(_redis(alias)("CLIENT", "LIST"), "utf-8").splitlines()
    facts = [dict(fact.split("=", 1) for fact in line.split()) for line in lines]
    return [each["id"] for each in facts if int(each["addr"].rpartition(":")[2]) in ports]


def _redis(alias: str) -> Callable[..., Any]:
    store: Any = lock_backends[alias]
    ask: Callable[..., Any] = store.store.command
    return ask
