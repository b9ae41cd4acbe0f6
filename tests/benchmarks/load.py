"""How long a block takes under an open load: calls come at a fixed rate, however long they take.

A call counts from when it was due. So a slow call also counts in those that it delays, which a
loop that waits for each call would omit. The keys follow Zipf's law: a few are wanted often, and
most of them rarely. A proxy delays each answer of the server, as a network does.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from redis import Redis

from django_distlock import LockNotAcquired, distlock
from tests.integration.wires import Wire

from .candidates import TTL
from .clients import Work, hire
from .contention import GAVE_UP, figure, outcomes, sheet
from .options import Options
from .redis_peers import KINDS, Kind
from .report import Result, without

PROCESSES = 8
#: Calls per second of each process.
RATE = 10.0
#: Milliseconds by which an answer of the server comes later.
DELAYS_MS = (0, 1, 5)
KEYS = [f"load:{number}" for number in range(1000)]
#: The key in place n is drawn n times less often than the first.
WEIGHTS = [1 / place for place in range(1, len(KEYS) + 1)]
#: Seconds after which a call gives up.
WAIT_SECONDS = 5.0

#: Holds a key for a block, or raises `LockNotAcquired`.
Hold = Callable[[str], AbstractContextManager[Any]]


def ours(alias: str) -> Hold:
    """Return blocks of this package."""
    locks = {key: distlock(key, wait=WAIT_SECONDS, ttl=TTL, backend=alias) for key in KEYS}
    return locks.__getitem__


def pglock(using: str) -> Hold:
    """Return blocks of django-pglock, which have no ttl and no fence."""
    module: Any = import_module("pglock")

    @contextmanager
    def hold(key: str) -> Iterator[None]:
        with module.advisory(key, using=using, timeout=WAIT_SECONDS) as granted:
            if not granted:
                raise LockNotAcquired("", key=key)
            yield

    return hold


def peer(name: str) -> Hold:
    """Return blocks of a peer on Redis."""
    client = Redis.from_url(os.environ["DISTLOCK_BENCH_WIRED_REDIS"])
    kind: Kind = KINDS[name](client)
    made = {} if kind.once else {key: kind.make(key, int(TTL)) for key in KEYS}

    @contextmanager
    def hold(key: str) -> Iterator[None]:
        lock = made.get(key) or kind.make(key, int(TTL))
        if not _acquired(name, lock):
            raise LockNotAcquired("", key=key)
        try:
            yield
        finally:
            lock.release()

    return hold


def _acquired(name: str, lock: Any) -> bool:
    named = "timeout" if name == "python-redis-lock" else "blocking_timeout"
    return bool(lock.acquire(blocking=True, **{named: int(WAIT_SECONDS)}))


#: The function that makes the blocks, with its argument.
SIDES: Mapping[str, tuple[Callable[[str], Hold], str]] = {
    "PostgreSQL": (ours, "wired"),
    "pglock": (pglock, "wired"),
    "Redis": (ours, "wired-redis"),
    "redis-py": (peer, "redis-py"),
    "python-redis-lock": (peer, "python-redis-lock"),
    "django-redis": (peer, "django-redis"),
}
#: The modules that some sides need, and the packages that have these.
NEEDS = {
    "pglock": ("pglock", "django-pglock"),
    "python-redis-lock": ("redis_lock", "python-redis-lock"),
}


def run(options: Options) -> Result:
    """Put a load on each side, with each delay."""
    missing = {
        name: f"pip install {package}"
        for name, (module, package) in NEEDS.items()
        if not find_spec(module)
    }
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        wires = [stack.enter_context(closing(each)) for each in _wires()]
        postgres, redis = wires
        os.environ["DISTLOCK_BENCH_WIRED"] = postgres.address["PORT"]
        os.environ["DISTLOCK_BENCH_WIRED_REDIS"] = f"redis://127.0.0.1:{redis.address['PORT']}/0"
        team = stack.enter_context(hire(PROCESSES))
        for delay in DELAYS_MS:
            for wire in wires:
                wire.delay = delay / 1000
            names = [each for each in SIDES if each not in missing]
            random.shuffle(names)
            for name in names:
                made = team.turn(PROCESSES, options.load_seconds, caller, name)
                found[f"{name}, {delay} ms"] = figure(outcomes(made))
    names = [f"{name}, {delay} ms" for delay in DELAYS_MS for name in SIDES]
    figures = {name: found[name] for name in names if name in found}
    title = (
        f"Load: ms from when a block was due to its end ({PROCESSES * RATE:g} per second from"
        f" {PROCESSES} processes for {options.load_seconds:g} s, {len(KEYS):,} keys by Zipf's law)"
    )
    table = sheet(title + without(missing), "answers are late by", "blocks", figures, places=1)
    return Result({"figures": figures, "left_out": missing}, [table])


def _wires() -> Iterator[Wire]:
    for variable in ("DISTLOCK_BENCH_URL", "DISTLOCK_BENCH_REDIS_URL"):
        url = urlsplit(os.environ[variable])
        yield Wire(server=(url.hostname or "", url.port or 0))


@contextmanager
def caller(number: int, name: str) -> Iterator[Work]:
    """Make each call when it is due; say how many milliseconds later it ended."""
    make, argument = SIDES[name]
    hold = make(argument)
    drawn = random.Random(number)
    # The processes take turns. The first call is for warming up.
    turns = count()
    began = 0.0

    def call() -> str:
        nonlocal began
        turn = next(turns)
        if turn == 1:
            began = time.monotonic()
        due = began + (turn + number / PROCESSES) / RATE if turn else time.monotonic()
        time.sleep(max(0.0, due - time.monotonic()))
        (key,) = drawn.choices(KEYS, WEIGHTS)
        try:
            with hold(key):
                pass
        except LockNotAcquired:
            return GAVE_UP
        return f"{(time.monotonic() - due) * 1000:.1f}"

    yield call
