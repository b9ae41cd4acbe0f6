"""What the tables become while locks come and go: `python -m tests.benchmarks churn`.

The clients share the keys among them. All keys are held at first. Then each client goes to one of
its keys at random: it takes it if it is free; else it extends the lease or gives it back.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from django.db import connections

from django_distlock import lock_backends
from django_distlock.conf import table
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from django_distlock.process.host import current_holder

from .clients import Team, Work, hire
from .databases import LIVE, LONG_TTL, ask, create, drop, fill, filled_grant, hold
from .report import Result, Sheet
from .sizes import relations

TABLES = {"locks": "lock", "fences": "counter"}
#: For the clients' sessions to end, and with it to hand in what they counted.
SETTLE_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the lock table is set up.

    Attributes:
        fillfactor: Percent of a page that inserts fill; None: as the migration says.
        index: A column to index besides; None: none.
        autovacuum: Whether the migration's own settings stand ("ours") or go ("default").
    """

    fillfactor: int | None = None
    index: str | None = None
    autovacuum: str = "ours"

    @property
    def name(self) -> str:
        """Return what people call it."""
        parts = [
            f"fillfactor {self.fillfactor}" if self.fillfactor else "",
            f"index on {self.index}" if self.index else "",
            "PostgreSQL's autovacuum" if self.autovacuum == "default" else "",
        ]
        return ", ".join(filter(None, parts)) or "as migrated"


COMPARED = (
    Variant(),
    Variant(index="free_at"),
    Variant(index="expires_at"),
    Variant(fillfactor=100),
    Variant(fillfactor=75),
    Variant(autovacuum="default"),
    Variant(fillfactor=100, autovacuum="default"),
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the clients do.

    Attributes:
        minutes: For how long.
        keys: How many keys there are.
        clients: How many processes.
        extends: How often a lease is extended, on average, before it is given back.
        sample_seconds: Between two looks at the tables.
    """

    minutes: float = 10
    keys: int = 10_000
    clients: int = 4
    extends: float = 2
    sample_seconds: float = 10


QUICK = Load(minutes=0.02, keys=200, clients=2, sample_seconds=0.4)


def database(number: int) -> str:
    """Return the database of the variant with this number."""
    return f"churn_{number}"


def run(load: Load, variants: Sequence[Variant]) -> Result:
    """Run the variants one after another; say what became of the tables."""
    found = []
    with hire(load.clients) as team:
        for number, variant in enumerate(variants):
            create(database(number))
            try:
                found.append(_try(team, database(number), load, variant))
            finally:
                drop(database(number))
    sheets = [_history(each) for each in found] if len(found) == 1 else []
    return Result({"load": asdict(load), "variants": found}, [*sheets, _comparison(found)])


def _try(team: Team, alias: str, load: Load, variant: Variant) -> dict[str, Any]:
    set_up(alias, variant)
    fill(alias, locks=load.keys)
    ask(alias, "CHECKPOINT")
    seconds = load.minutes * 60
    team.begin(load.clients, seconds, churning, alias, load)
    watch = Watch(alias)
    watch.until(time.monotonic() + seconds, load.sample_seconds)
    tallies = team.finish(load.clients, seconds)
    wait_until_alone(alias)
    watch.look()
    done: Counter[str] = sum((each.outcomes for each in tallies), Counter())
    return {
        "name": variant.name,
        "variant": asdict(variant),
        "settings": watch.settings,
        "operations": dict(done),
        "summary": summary(watch.samples, done, max(each.seconds for each in tallies)),
        "samples": watch.samples,
    }


def set_up(alias: str, variant: Variant) -> None:
    """Make the tables what the variant says."""
    if variant.fillfactor is not None:
        ask(alias, f"ALTER TABLE {table('locks')} SET (fillfactor = {variant.fillfactor})")
    if variant.index is not None:
        ask(alias, f"CREATE INDEX distlock_churn ON {table('locks')} ({variant.index})")
    if variant.autovacuum == "default":
        for name in TABLES:
            options = [each.partition("=")[0] for each in _options(alias, name)]
            if ours := ", ".join(each for each in options if each.startswith("autovacuum")):
                ask(alias, f"ALTER TABLE {table(name)} RESET ({ours})")


def _options(alias: str, name: str) -> list[str]:
    query = "SELECT coalesce(reloptions, '{}') FROM pg_class WHERE oid = %s::regclass"
    return list(ask(alias, query, table(name))[0][0])


def wait_until_alone(alias: str) -> None:
    """Wait until nobody else has a session on the database."""
    give_up = time.monotonic() + SETTLE_SECONDS
    others = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    while ask(alias, others)[0][0]:
        if time.monotonic() > give_up:
            raise RuntimeError(f"{alias}: the clients' sessions have not ended")
        time.sleep(0.02)


class Watch:
    """Looks at the tables of a database now and then."""

    def __init__(self, alias: str):
        self._alias = alias
        self.settings = {name: _options(alias, name) for name in TABLES}
        self._wal = ask(alias, "SELECT pg_current_wal_insert_lsn()::text")[0][0]
        self._began = time.monotonic()
        self.samples: list[dict[str, Any]] = []
        self.look()

    def until(self, end: float, every: float) -> None:
        """Look each so many seconds, until it is time to look for the last time."""
        while (left := end - time.monotonic()) > every / 2:
            time.sleep(min(left, every))
            self.look()

    def look(self) -> None:
        """Take a sample."""
        wal = ask(
            self._alias, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", self._wal
        )[0][0]
        sample: dict[str, Any] = {"seconds": time.monotonic() - self._began, "wal": int(wal)}
        for name, what in TABLES.items():
            sample[what] = {"sizes": relations(self._alias, name), **self._statistics(name)}
        self.samples.append(sample)

    def _statistics(self, name: str) -> dict[str, int]:
        columns = (
            "n_tup_ins", "n_tup_upd", "n_tup_hot_upd", "n_tup_del", "n_live_tup", "n_dead_tup",
            "autovacuum_count",
        )  # fmt: skip
        row = ask(
            self._alias,
            f"SELECT {', '.join(columns)} FROM pg_stat_user_tables WHERE relid = %s::regclass",
            table(name),
        )[0]
        return dict(zip(columns, row, strict=True))


def summary(
    samples: Sequence[dict[str, Any]], done: Counter[str], seconds: float
) -> dict[str, Any]:
    """Say in a few numbers what became of the tables."""
    first, last = samples[0], samples[-1]
    operations = done.total()
    before, after = first["lock"]["sizes"], last["lock"]["sizes"]
    return {
        "operations_per_second": operations / seconds,
        "wal_bytes_per_operation": (last["wal"] - first["wal"]) / operations,
        "lock_hot_percent": _hot(first["lock"], last["lock"]),
        "counter_hot_percent": _hot(first["counter"], last["counter"]),
        "lock_heap_bytes": after["heap"],
        "lock_heap_growth_bytes": after["heap"] - before["heap"],
        "lock_index_bytes": _indexes(after),
        "lock_index_growth_bytes": _indexes(after) - _indexes(before),
        "counter_growth_bytes": last["counter"]["sizes"]["total"]
        - first["counter"]["sizes"]["total"],
        "dead_tuples": last["lock"]["n_dead_tup"] + last["counter"]["n_dead_tup"],
        "autovacuums": last["lock"]["autovacuum_count"] + last["counter"]["autovacuum_count"],
    }


def _hot(first: dict[str, Any], last: dict[str, Any]) -> float | None:
    updates = last["n_tup_upd"] - first["n_tup_upd"]
    return 100 * (last["n_tup_hot_upd"] - first["n_tup_hot_upd"]) / updates if updates else None


def _indexes(sizes: dict[str, int]) -> int:
    return sum(size for part, size in sizes.items() if part not in ("heap", "total"))


def _history(found: dict[str, Any]) -> Sheet:
    first, rows = found["samples"][0], []
    parts = [part for part in first["lock"]["sizes"] if part != "total"]
    for sample in found["samples"]:
        lock, counter = sample["lock"], sample["counter"]
        rows.append(
            [
                f"{sample['seconds']:.0f} s",
                *(_kilobytes(lock["sizes"][part]) for part in parts),
                _kilobytes(counter["sizes"]["total"]),
                f"{lock['n_dead_tup']:,}",
                _percent(_hot(first["lock"], lock)),
                str(lock["autovacuum_count"]),
                f"{sample['wal'] / 1e6:,.1f}",
            ]
        )
    header = ["in kB", *parts, "counters", "dead", "HOT %", "autovacuums", "WAL MB"]
    return Sheet(f"Churn: the lock table, {found['name']}", header, rows)


def _comparison(found: Sequence[dict[str, Any]]) -> Sheet:
    header = [
        "variant", "ops/s", "WAL bytes/op", "HOT %", "counters' HOT %", "heap growth kB",
        "index growth kB", "counters' growth kB", "dead tuples", "autovacuums",
    ]  # fmt: skip
    rows = []
    for each in found:
        said = each["summary"]
        rows.append(
            [
                each["name"],
                f"{said['operations_per_second']:,.0f}",
                f"{said['wal_bytes_per_operation']:,.0f}",
                _percent(said["lock_hot_percent"]),
                _percent(said["counter_hot_percent"]),
                _kilobytes(said["lock_heap_growth_bytes"]),
                _kilobytes(said["lock_index_growth_bytes"]),
                _kilobytes(said["counter_growth_bytes"]),
                f"{said['dead_tuples']:,}",
                str(said["autovacuums"]),
            ]
        )
    return Sheet("Churn: what became of the tables", header, rows)


def _kilobytes(size: int) -> str:
    return f"{size / 1024:,.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


@contextmanager
def churning(number: int, alias: str, load: Load) -> Iterator[Work]:
    """Be a client: take, extend and give back keys of its own."""
    backend, holder = lock_backends[alias], current_holder()
    common = hold(alias, f"client:{number}")
    mine = range(1 + number, load.keys + 1, load.clients)
    held: dict[int, Grant | None] = {each: filled_grant(common, each) for each in mine}
    extended = load.extends / (load.extends + 1)

    def work() -> str:
        key = random.choice(mine)
        grant = held[key]
        answer: object
        if grant is None:
            answer = backend.acquire(f"{LIVE}:{key}", new_token(), LONG_TTL, holder)
            outcome, held[key] = "acquire", answer if isinstance(answer, Grant) else None
        elif random.random() < extended:
            answer = backend.extend(grant)
            outcome, held[key] = "extend", answer if isinstance(answer, Grant) else None
        else:
            answer = backend.release(grant)
            outcome, held[key] = "release", None
        if answer is not True and not isinstance(answer, Grant):
            raise RuntimeError(f"{outcome} of {LIVE}:{key}: {answer}")
        return outcome

    try:
        yield work
    finally:
        # Its statistics come with the end of the session.
        connections[alias].close()
