"""Locks in Redis, beside its clients' own locks and the least that a server can be asked.

The server is private, on this machine, and writes nothing to a disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

from redis import Redis

from . import redis_awaited, redis_data, redis_peers
from .candidates import HOT, locks_on, waist
from .clients import Prepare, Work
from .databases import take
from .options import Options
from .proxy import Proxy, RedisReader
from .race import Candidate, Unavailable, race
from .redis_peers import KINDS, of_kind
from .report import Result, target
from .roundtrips import count, sheet
from .throughput import DONE, OWN, clients_of, compete, in_turn, keys_of, lock
from .throughput import HOT as HOT_KEY
from .timing import Comparison

LATENCIES = (
    # One pair with a fence, beside pairs without.
    Comparison(
        what="pair: backend / redis-py's Lock", of="redis/backend/pair", to="redis-py/lock/pair",
        at_most=1.15,
    ),
    Comparison(
        what="pair: backend / django-redis's cache.lock", of="redis/backend/pair",
        to="django-redis/lock/pair", at_most=1.0,
    ),
    Comparison(
        what="pair: backend / python-redis-lock", of="redis/backend/pair",
        to="python-redis-lock/lock/pair", at_most=1.0,
    ),
    *(
        Comparison(
            what=f"pair, block: ours / {peer}", of="redis/block/pair", to=f"{peer}/block/pair",
        )
        for peer in KINDS
    ),
    Comparison(
        what="pair: lock / redis-py's Lock", of="redis/lock/pair", to="redis-py/lock/pair",
    ),
    *(
        Comparison(
            what=f"pair: backend / two round trips, {way}", of="redis/backend/pair",
            to=f"redis-floor/{way}/pair",
        )
        for way in ("connection", "client")
    ),
    *(
        Comparison(
            what=f"{step}: backend / redis-py's Lock", of=f"redis/backend/{step}",
            to=f"redis-py/lock/{step}",
        )
        for step in ("acquire", "release", "extend", "lose")
    ),
    Comparison(
        what="lose: backend / one round trip, connection", of="redis/backend/lose",
        to="redis-floor/connection/trip",
    ),
    *(
        Comparison(
            what=f"{step}, awaited: backend / redis.asyncio's Lock",
            of=f"redis-async/backend/{step}", to=f"redis.asyncio/lock/{step}",
        )
        for step in ("pair", "lose", "extend")
    ),
    Comparison(
        what="pair: backend, awaited / backend", of="redis-async/backend/pair",
        to="redis/backend/pair",
    ),
)  # fmt: skip


def run(options: Options) -> Result:
    """Measure one part after another."""
    parts: Mapping[str, Callable[[Options], Result]] = {
        "latency": latency,
        "roundtrips": roundtrips,
        "sizes": redis_data.sizes,
        "scale": redis_data.scale,
        "throughput": throughput,
    }
    made = Result({})
    for name, part in parts.items():
        began = time.monotonic()
        result = part(options)
        made.data[name] = {**result.data, "seconds": round(time.monotonic() - began, 1)}
        made.sheets += result.sheets
    return made


def latency(options: Options) -> Result:
    """Measure one client, on an idle server."""
    url = _url()
    candidates: dict[str, Candidate] = {
        "redis": lambda: locks_on("redis", "redis"),
        **{name: partial(redis_peers.peer, url, name) for name in KINDS},
        "redis-floor": partial(redis_peers.floor, url),
        "redis-async": lambda: redis_awaited.ours("redis-async"),
        "redis.asyncio": partial(redis_awaited.redis_py, url),
    }
    done = race(candidates, options)
    return done.result("Redis, latency", options, done.samples.ratios(LATENCIES))


def roundtrips(options: Options) -> Result:
    """Count what operations send: this package's, and the peers'."""
    where = urlsplit(_url())
    counted: dict[str, dict[str, int]] = {}
    with Proxy(where.hostname or "", where.port or 0, RedisReader).running() as proxy:
        url = where._replace(netloc=f"127.0.0.1:{proxy.port}").geturl()
        backend = redis_data.at(url)
        hot = take(backend, HOT)
        counted |= count(proxy, "redis/backend", waist(backend, ["invoice:1"]))
        backend.release(hot)
        for name in KINDS:
            # A cache has an address of its own; its locks are redis-py's.
            if name != "django-redis":
                counted |= _peer_counted(proxy, url, name)
    lost = counted["redis/backend/lose"]["round_trips"]
    return Result(
        {
            "figures": counted,
            "target": target("round trips of a losing attempt", lost, at_most=1),
        },
        [sheet(counted, "Redis, round trips (of a losing attempt, 1 is aimed at)")],
    )


def _peer_counted(proxy: Proxy, url: str, name: str) -> dict[str, dict[str, int]]:
    with Redis.from_url(url) as client:
        try:
            kind = KINDS[name](client)
        except Unavailable:
            return {}
        with redis_peers.hot_of(kind):
            return count(proxy, f"{name}/lock", of_kind(kind, ["invoice:1"]))


# Many clients


def throughput(options: Options) -> Result:
    """Let many clients take locks at the same time."""
    candidates: dict[str, Prepare] = {"redis-floor": trips, "redis": lock, "redis-py": peer}
    return compete("Redis, throughput", options, candidates, _throughputs)


def _throughputs(clients: int) -> Iterator[Comparison]:
    for mode, other in ((OWN, "redis-py"), (HOT_KEY, "redis-py"), (OWN, "redis-floor")):
        yield Comparison(
            what=f"{clients_of(clients)}, {mode}: ours / {other}", of=f"redis/{mode}/{clients}",
            to=f"{other}/{mode}/{clients}",
        )  # fmt: skip


@contextmanager
def peer(number: int, name: str, mode: str) -> Iterator[Work]:
    """Take and give back through a peer."""
    with Redis.from_url(_url()) as client:
        yield in_turn(of_kind(KINDS[name](client), keys_of(number, mode)))


@contextmanager
def trips(_number: int, _name: str, _mode: str) -> Iterator[Work]:
    """Go to the server twice."""
    with Redis.from_url(_url()) as client:

        def work() -> str:
            client.ping()
            client.ping()
            return DONE

        yield work


def _url() -> str:
    return os.environ["DISTLOCK_BENCH_REDIS_URL"]
