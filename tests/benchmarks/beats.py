"""What it costs to renew many leases: a beat of the heartbeat, beside one extend for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from django_distlock import Lease, Retry, lock_backends
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.clock import monotonic
from django_distlock.core.records import Grant
from django_distlock.locks.attempts import Granted
from django_distlock.locks.state import Terms
from django_distlock.process.heartbeat import Heartbeat, held_here
from django_distlock.process.host import current_holder

from .candidates import waist
from .databases import LONG_TTL, create, drop, fill, filled_grant, take
from .options import Options
from .proxy import PostgresReader, Proxy, RedisReader
from .redis_data import store
from .report import Result, Sheet, ratios
from .timing import Comparison, Samples, Subject, measure
from .wire import led, redis_led

DATABASE = "beats"
DUE, BEAT = "due", "beat"


def databases(_options: Options) -> list[str]:
    """Return the database that this takes for itself."""
    return [DATABASE]


@dataclass(frozen=True)
class Place:
    """A store, and what is held in it.

    Attributes:
        led: Gives the same store through a proxy that counts.
    """

    name: str
    backend: BaseLockBackend
    grants: Sequence[Grant]
    led: Callable[[], AbstractContextManager[tuple[BaseLockBackend, Proxy]]]


def run(options: Options) -> Result:
    """Hold the most leases in one store after the other, and renew the first of them, up to all."""
    figures: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    sent: dict[str, dict[str, int]] = {}
    for opened in (functions, redis):
        with opened(max(options.leases)) as place:
            samples = _measure(place, options)
            for leases in options.leases:
                sent[_name(place, leases)] = _sent(place, leases)
            found += samples.ratios(_comparison(place, leases) for leases in options.leases)
        figures |= {
            name: figure
            for name, figure in samples.figures().items()
            if not name.endswith(f"/{DUE}")
        }
    return Result(
        {"figures": figures, "ratios": found, "sent": sent},
        [_sheet(figures, sent), ratios("Heartbeat: medians of the rounds' ratios", found)],
    )


def _measure(place: Place, options: Options) -> Samples:
    held = waist(place.backend, ["held"])
    held.acquire()
    subjects = [Subject(place.name, {"extend": held.extend})]
    with leases_of(place.backend, place.grants) as every:
        for leases in options.leases:
            beats = Beats(place.backend, every[:leases])
            steps = {DUE: beats.fall_due, BEAT: beats.beat}
            subjects.append(Subject(_name(place, leases), steps))
        rounds = max(2, options.rounds // 3)
        return measure(subjects, rounds=rounds, slice_ms=options.slice_ms)


class Beats:
    """A heartbeat without its thread, of leases that fall due when they are told.

    Args:
        leases: What it renews.
    """

    def __init__(self, backend: BaseLockBackend, leases: Sequence[Lease]):
        self._leases = leases
        self._heartbeat = Heartbeat(backend)
        for lease in leases:
            lease._holding.renewing.due_at = 1.0
        # Not by `add`, which starts the thread.
        self._heartbeat._leases.update(dict.fromkeys(lease._holding for lease in leases))

    def fall_due(self) -> None:
        """Let all leases be due; what fell due before must have been renewed."""
        for lease in self._leases:
            renewing = lease._holding.renewing
            # Not at all, if it counts as ended.
            if renewing.failures or not 0 < renewing.due_at < math.inf:
                raise RuntimeError(f"{lease.key!r} was not renewed")
            renewing.due_at = 0.0

    def beat(self) -> None:
        """Renew them."""
        self._heartbeat.beat()


@contextmanager
def leases_of(backend: BaseLockBackend, grants: Sequence[Grant]) -> Iterator[list[Lease]]:
    """Make leases of grants, which are not given back."""
    terms = Terms(ttl=LONG_TTL, holder=current_holder(), retry=Retry())
    deadline = monotonic() + LONG_TTL
    leases = [Lease(backend, Granted(grant, deadline), terms) for grant in grants]
    try:
        yield leases
    finally:
        for lease in leases:
            # Or the end of this process would look for their server.
            held_here.discard(lease._holding)


@contextmanager
def functions(most: int) -> Iterator[Place]:
    """Hold so many leases in a database of their own."""
    create(DATABASE)
    try:
        fill(DATABASE, locks=most)
        backend = lock_backends[DATABASE]

        @contextmanager
        def through() -> Iterator[tuple[BaseLockBackend, Proxy]]:
            with led(DATABASE, PostgresReader) as proxy:
                yield backend, proxy

        yield Place("functions", backend, _grants(backend, most), through)
    finally:
        drop(DATABASE)


@contextmanager
def redis(most: int) -> Iterator[Place]:
    """Hold so many leases in a server of their own."""
    with store() as made:
        made.fill(locks=most)
        through = partial(redis_led, made.url, RedisReader)
        yield Place("redis", made.backend, _grants(made.backend, most), through)


def _grants(backend: BaseLockBackend, number: int) -> list[Grant]:
    template = take(backend, "template")
    return [filled_grant(template, each) for each in range(1, number + 1)]


def _sent(place: Place, number: int) -> dict[str, int]:
    """Count what one beat sends, on a connection that is open.

    Its `round_trips` are more than there are where a server begins to answer before it has all.
    """
    with place.led() as (backend, proxy), leases_of(backend, place.grants[:number]) as leases:
        beats = Beats(backend, leases)
        for _ in range(2):
            beats.fall_due()
            proxy.take()
            beats.beat()
        sent = proxy.take().as_json()
        beats.fall_due()
        return sent


def _name(place: Place, leases: int) -> str:
    return f"{place.name}/{leases}"


# What people see


def _comparison(place: Place, leases: int) -> Comparison:
    return Comparison(
        what=f"{place.name}: a beat of {leases:,} / one extend",
        of=f"{_name(place, leases)}/{BEAT}", to=f"{place.name}/extend",
    )  # fmt: skip


def _sheet(figures: Mapping[str, Any], sent: Mapping[str, Mapping[str, int]]) -> Sheet:
    rows = []
    for name, each in sent.items():
        place, leases = name.rsplit("/", 1)
        beat = figures[f"{name}/{BEAT}"]["median_us"]
        rows.append(
            [f"{place}, {int(leases):,}", f"{each['statements']:,}",
             f"{beat / 1000:,.2f}", f"{beat / int(leases):,.1f}",
             f"{figures[f'{place}/extend']['median_us']:,.1f}"]
        )  # fmt: skip
    header = ["leases", "statements", "ms", "µs of a lease", "µs of one extend"]
    return Sheet("Heartbeat: a beat, medians", header, rows)
