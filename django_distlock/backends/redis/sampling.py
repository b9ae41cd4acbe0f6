"""Count the locks in Redis: in one walk through its keys, or from a sample."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ...core.errors import LockError
from ...core.records import Record, Unreadable
from ..counts import Count, Counts, States, Strain, overdue, tally
from .answers import key_of
from .lines import ThreadLines
from .store import text

if TYPE_CHECKING:
    from . import RedisBackend

#: The size of a sample, of the listing or of a cluster's keys.
LOOKED_AT: Final = 10_000

_OURS = re.compile(r"(lock|fence|waiters):(\{.{22}\}:.*)", re.DOTALL)


def count_keys(store: RedisBackend) -> Counts:
    """Count what a backend keeps, in steps between which the server does other work.

    All numbers are estimates: keys that come or go meanwhile may be counted or not, and some keys
    twice if the server resizes its hash table.
    """
    found: Counter[str] = Counter()
    highest = waiters = 0
    for line, page in store.store.walk(store._prefix, "*"):
        names = _by_role(name for name, _place in page)
        found.update({role: len(each) for role, each in names.items()})
        told = store.store.values(line, [store._at("fence", each) for each in names["fence"]])
        # A spoiled counter has no number here, but is counted.
        highest = max([highest, *(int(each) for each in told if each.isdecimal())])
        waiters += sum(_waiting(store, line, names["waiters"]))
    return Counts(
        held=Count(found["lock"], is_exact=False),
        # The server removes expired records by itself.
        expired=Count(0),
        waiters=Count(waiters, is_exact=False),
        counters=Count(found["fence"], is_exact=False),
        highest=Count(highest, is_exact=False) if highest else None,
        memory=_used_memory(store),
    )


def sampled_states(store: RedisBackend, soon: float) -> tuple[States, Strain]:
    """Estimate the number of held keys by state, from a sample."""
    now = store.clock()
    found: Counter[str] = Counter()
    is_whole = True
    late: list[float | None] = []
    waited: list[tuple[str, int]] = []
    for line, names, each_for in store.store.sample(LOOKED_AT, store._listing):
        ours = _by_role(names, store._prefix)
        found_here = store.records_on(line, ours["lock"])
        records = [each for each in found_here if isinstance(each, Record)]
        part = Counter(state for each in records for state in tally(each, now, soon))
        part["held"] += sum(isinstance(each, Unreadable) for each in found_here)
        late += [overdue(each, now) for each in records]
        numbers = _waiting(store, line, ours["waiters"])
        part["waiting"] = sum(numbers)
        waited += zip(map(key_of, ours["waiters"]), numbers, strict=True)
        found.update({state: round(number * each_for) for state, number in part.items()})
        is_whole = is_whole and each_for == 1
    states = {name: Count(found[name], is_whole) for name in States.__dataclass_fields__}
    return States(**states), Strain.of(late, waited)


def _by_role(names: Iterable[str], prefix: str = "") -> dict[str, list[str]]:
    """Return the names of this backend's keys, without the role, by role."""
    found: dict[str, list[str]] = {"lock": [], "fence": [], "waiters": []}
    for name in names:
        if name.startswith(prefix) and (match := _OURS.fullmatch(name, len(prefix))):
            found[match[1]].append(match[2])
    return found


def _waiting(store: RedisBackend, line: ThreadLines, names: list[str]) -> list[int]:
    return store.store.waiting(line, [store._at("waiters", each) for each in names])


def _used_memory(store: RedisBackend) -> int | None:
    """Return the bytes that the servers use for all of their data; None: unknown."""
    with suppress(LockError):
        told = map(text, store.store.of_each_server("INFO", "memory").values())
        found = (re.search(r"^used_memory:(\d+)", each, re.MULTILINE) for each in told)
        return sum(int(each[1]) for each in found if each)
    return None
