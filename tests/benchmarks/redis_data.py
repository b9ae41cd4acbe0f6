"""Many locks and counters in Redis: what they take, and what operations cost among them.

Each number of keys has a server of its own, and all servers are asked in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice

from redis import Redis

from django_distlock.backends.redis import RedisBackend
from django_distlock.conf import backend_config
from django_distlock.core.records import Grant
from tests.services import private_redis

from .databases import FREE, LIVE, filled_grant, parts, take
from .options import Options
from .redis_peers import EXPIRE, KINDS
from .report import Result, Sheet
from .scale import among, compared, free_beside, name_of
from .timing import Subject, measure

#: Locks that one call of the script makes.
BATCH = 500
#: Of each kind of key, how many are asked for their size.
SAMPLE = 1000
LISTED = 100

#: Copies of what the package wrote, but for what tells keys apart. KEYS: the template's record and
#: counter, and what lists records, and of each lock the record, the counter and the token's. ARGV:
#: of each, key, token and holder; "": the template's.
COPY = """
local template, fence, listing = unpack(KEYS, 1, 3)
local left = redis.call('PTTL', template)
for each = 1, #ARGV / 3 do
    local lock, counter, index = unpack(KEYS, 3 * each + 1, 3 * each + 3)
    local holder = ARGV[3 * each]
    redis.call('COPY', template, lock)
    redis.call('HSET', lock, 'key', ARGV[3 * each - 2], 'token', ARGV[3 * each - 1])
    if holder ~= '' then
        redis.call('HSET', lock, 'holder', holder)
    end
    redis.call('COPY', fence, counter)
    redis.call('SET', index, lock, 'PX', left)
    redis.call('ZADD', listing, redis.call('ZSCORE', listing, template), lock)
end
"""


def at(url: str) -> RedisBackend:
    """Return a backend on a server."""
    return RedisBackend(replace(backend_config("redis"), options={}), url=url)


def copy(
    backend: RedisBackend,
    client: Redis,
    grant: Grant,
    numbers: Iterable[int],
    holder: Callable[[int], str] = lambda _number: "",
) -> None:
    """Hold the live keys with these numbers, like the one that was granted."""
    run = client.register_script(COPY)
    template = [*_names(backend, grant.key, grant.token)[:2], backend._listing]
    for batch in parts(numbers, BATCH):
        names, told = [*template], []
        for number in batch:
            each = filled_grant(grant, number)
            names += _names(backend, each.key, each.token)
            told += [each.key, each.token, holder(number)]
        run(names, told)


def _names(backend: RedisBackend, key: str, token: str) -> list[str]:
    name = backend._name(key)
    return [backend._at("lock", name), backend._at("fence", name), backend._token(token)]


@dataclass
class Store:
    """A server of its own, and its locks."""

    url: str
    client: Redis
    backend: RedisBackend

    def fill(self, *, locks: int, free: int = 0) -> None:
        """Hold `locks` keys, and have counters of `free` more that nobody holds."""
        grant = take(self.backend, f"{LIVE}:0")
        copy(self.backend, self.client, grant, range(1, locks + 1))
        names = (_names(self.backend, f"{FREE}:{each}", "")[1] for each in range(1, free + 1))
        for batch in parts(names, BATCH):
            self.client.mset(dict.fromkeys(batch, grant.fence))
        self.backend.release(grant)


@contextmanager
def store() -> Iterator[Store]:
    """Run an empty server for the block."""
    with private_redis() as server, Redis.from_url(server.url, decode_responses=True) as client:
        yield Store(server.url, client, at(server.url))


# Sizes


def sizes(options: Options) -> Result:
    """Hold many keys, and ask the server what single ones take."""
    with store() as made:
        empty = made.client.info("memory")["used_memory"]
        made.fill(locks=options.rows)
        filled = made.client.info("memory")["used_memory"]
        figures = {
            "lock/record": _mean(made, "distlock:lock:*"),
            "lock/token": _mean(made, "distlock:token:*"),
            "lock/listing": _mean(made, "distlock:listing:*") / options.rows,
            "counter/total": _mean(made, "distlock:fence:*"),
        }
        parts_of_it = ("record", "token", "listing")
        figures["lock/total"] = sum(figures[f"lock/{each}"] for each in parts_of_it)
        # With the server's tables, which grow by doubling.
        figures["lock and counter/in all"] = (filled - empty) / options.rows
        lock = KINDS["redis-py"](made.client).make(f"{LIVE}:1", EXPIRE)
        lock.acquire(blocking=False)
        figures["redis-py/total"] = float(made.client.memory_usage(lock.name, samples=0) or 0)
        lock.release()
    rows = [[name, f"{taken:,.1f}"] for name, taken in figures.items()]
    title = f"Redis, sizes: bytes, of {options.rows:,} live locks"
    return Result({"figures": figures, "rows": options.rows}, [Sheet(title, ["", "bytes"], rows)])


def _mean(made: Store, pattern: str) -> float:
    names = list(islice(made.client.scan_iter(pattern, count=SAMPLE), SAMPLE))
    asked = made.client.pipeline(transaction=False)
    for name in names:
        asked.memory_usage(name, samples=0)
    taken: list[int] = asked.execute()
    return sum(taken) / len(taken)


# Scale


def scale(options: Options) -> Result:
    """Fill the servers, then measure on all of them turn by turn."""
    subjects: list[Subject] = []
    filling: dict[str, float] = {}
    with ExitStack() as stack:
        for keys in options.keys:
            made, began = stack.enter_context(store()), time.monotonic()
            free = free_beside(keys)
            made.fill(locks=keys, free=free)
            filling[name_of(keys)] = round(time.monotonic() - began, 1)
            subjects += among(name_of(keys), made.backend, keys, free)
            subjects.append(Subject(name_of(keys), {"list": _listing(made.backend, keys)}))
        samples = measure(subjects, rounds=options.rounds, slice_ms=options.slice_ms)
    result = compared("Redis, scale", samples, options.keys)
    result.data["seconds_to_fill"] = filling
    return result


def _listing(backend: RedisBackend, keys: int) -> Callable[[], None]:
    def page() -> None:
        found = backend.list(limit=LISTED).records
        if len(found) < min(LISTED, keys):
            raise RuntimeError(f"{len(found)} locks were listed, of {keys}")

    return page
