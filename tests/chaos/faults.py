"""What goes wrong, and what operators do: chosen by dice with a seed."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.db import DatabaseError, InterfaceError, connections
from redis.exceptions import RedisError

from django_distlock import LockError, inspection
from django_distlock.core.clock import monotonic
from django_distlock.handler import lock_backends
from tests.backends import BACKENDS

from .crew import Crew, Member
from .history import Writer

ACTOR = {"actor": "chaos", "reason": "a drill"}
_SESSIONS = {
    "mysql": "SELECT id, SUBSTRING_INDEX(host, ':', -1) FROM information_schema.processlist"
    " WHERE host LIKE '%%:%%' ORDER BY id",
    "postgresql": "SELECT pid, client_port FROM pg_stat_activity"
    " WHERE client_port > 0 ORDER BY pid",
}
_END = {"mysql": "KILL %s", "postgresql": "SELECT pg_terminate_backend(%s)"}


class Chaos:
    """Does something bad now and then.

    Args:
        alias: The lock backend.
        faults: Which of `__main__.FAULTS`.
    """

    def __init__(
        self, alias: str, faults: set[str], crew: Crew, chance: random.Random, write: Writer
    ):
        self._alias, self._crew, self._chance, self._write = alias, crew, chance, write
        self._later: list[tuple[float, Callable[[], object]]] = []
        acts = {
            "sessions": self._end_session, "pauses": self._pause, "kills": self._kill,
            "wires": self._spoil_wire, "expire_soon": self._expire_soon,
            "operators": self._operate, "clocks": self._shift_clock,
        }  # fmt: skip
        self._acts = [act for name, act in acts.items() if name in faults]

    def act(self) -> None:
        """Do one thing, and end what has lasted for long enough."""
        self.settle(monotonic())
        if self._acts:
            self._chance.choice(self._acts)()

    def settle(self, now: float = math.inf) -> None:
        """End what was to last until `now`; by default, all of it."""
        due = [each for each in self._later if each[0] <= now]
        self._later = [each for each in self._later if each[0] > now]
        for _at, end in due:
            end()

    def _tell(self, what: str, **facts: Any) -> None:
        self._write("fault", form=what, **facts)

    def _lasts(
        self, what: str, seconds: float, member: Member, *ends: Callable[[], object]
    ) -> None:
        self._tell(what, to=member.name, seconds=seconds)
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
        what = self._chance.choice(("cut", "delay", "hold", "hold and cut"))
        if what == "cut":
            wire.cut()
            self._lasts("wire: cut", 0, member)
        elif what == "delay":
            wire.valve.delay = self._chance.uniform(0.02, 0.3)
            self._lasts("wire: delay", seconds, member, lambda: setattr(wire.valve, "delay", 0))
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
            using = BACKENDS[self._alias].using
            if using:
                with connections[using].cursor() as cursor:
                    cursor.execute(_END[connections[using].vendor], [int(number)])
            else:
                _redis(self._alias)("CLIENT", "KILL", "ID", number)
            self._tell("ended session", session=number)

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
        key = self._chance.choice(self._crew.keys)
        with suppress(LockError, DatabaseError, InterfaceError):
            outcome = operation(key, *arguments, backend=self._alias, **ACTOR)
            held = outcome.held.fence if outcome.held else outcome.fence_before
            self._write(
                "operator", form=operation.__name__, key=key, arguments=arguments,
                result=outcome.result.name, before=held, after=outcome.fence_after,
            )  # fmt: skip


def sessions(alias: str, ports: set[int]) -> list[str]:
    """Return the server's numbers of the sessions of workers, by the ports they come from."""
    using = BACKENDS[alias].using
    if using:
        with connections[using].cursor() as cursor:
            cursor.execute(_SESSIONS[connections[using].vendor], [])
            return [str(number) for number, port in cursor.fetchall() if int(port) in ports]
    lines = str(_redis(alias)("CLIENT", "LIST"), "utf-8").splitlines()
    facts = [dict(fact.split("=", 1) for fact in line.split()) for line in lines]
    return [each["id"] for each in facts if int(each["addr"].rpartition(":")[2]) in ports]


def _redis(alias: str) -> Callable[..., Any]:
    store: Any = lock_backends[alias]
    ask: Callable[..., Any] = store.store.command
    return ask
