"""What those send who wait for a key, and what those send who hand one to nobody."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

from django.db import connections
from redis import Redis

from django_distlock import LockNotAcquired, distlock, lock_backends
from django_distlock.backends.lua import script
from django_distlock.conf import table
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended
from django_distlock.locks.acquire import acquire
from django_distlock.locks.attempts import Request
from django_distlock.locks.blocks import Block
from django_distlock.process.host import current_holder

from .candidates import HOT, KEYS, TTL
from .databases import take
from .options import Options
from .proxy import PostgresReader, RedisReader
from .report import Result, Sheet, target
from .wire import led, redis_led

#: What is sent for one wait of `Options.held_seconds`, but for the note that people see.
MOST_STATEMENTS = 5
#: What is sent: attempts; to be heard; to see whether the listener's server is there; the note that
#: lets people see who waits; anything else.
KINDS = ("attempt", "listen", "ping", "note", "other")

#: Says of what kind everything is that was sent.
Sort = Callable[[], Sequence[str]]
END = "the end"


def run(options: Options) -> Result:
    """Wait twice on each store: the first time somebody has to begin to listen."""
    counted: dict[str, dict[str, int]] = {}
    for name, opened in (("functions", functions), ("redis", redis)):
        with opened() as waiter:
            for which in ("first", "next"):
                counted[f"{name}/{which}"] = waiter.wait(options.held_seconds)
    called = {"functions": _notifications(options.pairs), "redis": _publications(options.pairs)}
    targets = [
        *(
            target(
                f"{name}: sent for one wait, without the note", _aside(each),
                at_most=MOST_STATEMENTS,
            )
            for name, each in counted.items()
        ),
        *(
            target(f"{name}: called out in {options.pairs} pairs", each["called_out"], at_most=0)
            for name, each in called.items()
        ),
    ]  # fmt: skip
    return Result(
        {"sent": counted, "called_out": called, "targets": targets},
        [_sent(counted, options.held_seconds), _aims(targets)],
    )


# One wait


@dataclass
class Waiter:
    """Who waits through a proxy for what somebody else holds.

    Args:
        sent: What the proxy has read.
        sort: Says of what kind each of it is.
    """

    backend: Any
    sent: list[Any]
    sort: Sort

    def wait(self, seconds: float) -> dict[str, int]:
        """Wait for so long, in vain; return how much was sent, by kind."""
        grant = take(self.backend, HOT, TTL)
        self.sent.clear()
        request = Request(
            key=HOT, ttl=TTL, wait=seconds, holder=current_holder(),
            retry=self.backend.config.retry,
        )  # fmt: skip
        try:
            acquire(self.backend, request, Block(self))
        except LockNotAcquired:
            counts = Counter(self.sort())
        else:
            raise RuntimeError(f"{HOT!r} was granted twice")
        self.backend.release(grant)
        # At once, to mark the grant, and at the end; and people see who waits for a second.
        if counts["attempt"] < 3 or not counts["note"]:
            raise RuntimeError(f"not all that was sent was seen: {counts}")
        return {kind: counts[kind] for kind in KINDS}


@contextmanager
def functions() -> Iterator[Waiter]:
    """Give one that waits in PostgreSQL."""
    sent: list[str] = []
    backend: Any = lock_backends["proxied_functions"]
    with led("proxied", partial(PostgresReader, sent)):
        try:
            yield Waiter(backend, sent, lambda: statement_kinds(sent))
        finally:
            backend._listener.close_all()


@contextmanager
def redis() -> Iterator[Waiter]:
    """Give one that waits in Redis."""
    sent: list[list[bytes]] = []
    with redis_led(_redis_url(), partial(RedisReader, sent)) as (backend, _proxy):
        yield Waiter(backend, sent, lambda: [command_kind(each) for each in sent])


def statement_kinds(statements: Sequence[str]) -> list[str]:
    """Say of what kind statements are; of a transaction, what is done in it decides."""
    kinds: list[str] = []
    begun: int | None = None
    for number, statement in enumerate(statements):
        kinds.append(_statement_kind(statement))
        if statement == "BEGIN":
            begun = number
        elif kinds[-1] == "note" and begun is not None:
            kinds[begun:] = ["note" if kind == "other" else kind for kind in kinds[begun:]]
        elif kinds[-1] == "other" and begun is not None and "note" in kinds[begun:]:
            kinds[-1] = "note"
        if statement == "COMMIT":
            begun = None
    return kinds


def _statement_kind(statement: str) -> str:
    if "_acquire_v" in statement:
        return "attempt"
    if statement.startswith("LISTEN") or "pg_backend_pid" in statement:
        return "listen"
    if statement == "SELECT 1":
        return "ping"
    return "note" if table("waiters") in statement else "other"


def command_kind(words: Sequence[bytes]) -> str:
    """Say of what kind a command is."""
    for name, kind in (("acquire", "attempt"), ("note_waiter", "note")):
        made = script(name)
        if made.digest.encode() in words or made.text.encode() in words:
            return kind
    kinds = {b"SUBSCRIBE": "listen", b"PING": "ping", b"ZREM": "note"}
    return kinds.get(words[0].upper(), "other")


# Who is called though nobody waits


def _notifications(pairs: int) -> dict[str, int]:
    # It reads the settings while it is imported, which are made later than this module is.
    from tests.salted import channel_of

    ear = connections["default"].copy()
    ear.ensure_connection()
    raw, channel = ear.connection, channel_of("default")
    raw.execute(f'LISTEN "{channel}"')

    def heard() -> int:
        raw.execute("SELECT pg_notify(%s, %s)", [channel, END])
        for number, notice in enumerate(raw.notifies(timeout=20)):
            if notice.payload == END:
                return number
        raise RuntimeError("the last notification did not come")

    try:
        return _called_out("functions", pairs, heard)
    finally:
        ear.close()


def _publications(pairs: int) -> dict[str, int]:
    with Redis.from_url(_redis_url()) as client:
        so_far = 0

        def heard() -> int:
            nonlocal so_far
            told: Any = client.info("commandstats")
            before, so_far = so_far, int(told.get("cmdstat_publish", {}).get("calls", 0))
            return so_far - before

        heard()
        return _called_out("redis", pairs, heard)


def _called_out(alias: str, pairs: int, heard: Callable[[], int]) -> dict[str, int]:
    """Count what is called out by so many pairs alone, and by one for which somebody waits."""
    backend, keys = lock_backends[alias], cycle(KEYS)
    for _ in range(pairs):
        with distlock(next(keys), wait=0, backend=alias):
            pass
    called_out = heard()
    grant = take(backend, HOT, TTL)
    answer = backend.acquire(HOT, new_token(), TTL, wanted=True)
    if not isinstance(answer, Contended):
        raise RuntimeError(f"{HOT!r} was granted twice")
    backend.release(grant)
    if heard() != 1:
        raise RuntimeError("what is called out was not heard")
    return {"pairs": pairs, "called_out": called_out}


def _redis_url() -> str:
    return os.environ["DISTLOCK_BENCH_REDIS_URL"]


# What people see


def _aside(counts: dict[str, int]) -> int:
    return sum(number for kind, number in counts.items() if kind != "note")


def _sent(counted: dict[str, dict[str, int]], seconds: float) -> Sheet:
    rows = [[name, *(str(each[kind]) for kind in KINDS)] for name, each in counted.items()]
    title = f"Waiting: what is sent to the store for one wait of {seconds:g} s, in vain"
    return Sheet(title, ["statements or commands", *KINDS], rows)


def _aims(targets: Sequence[dict[str, Any]]) -> Sheet:
    rows = [
        [
            each["what"],
            str(each["measured"]),
            f"<= {each['at_most']}",
            "yes" if each["met"] else "no",
        ]
        for each in targets
    ]
    return Sheet("Waiting: what is aimed at", ["", "measured", "target", "met"], rows)
