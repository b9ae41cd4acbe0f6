"""In which states the locks in Redis are; on a cluster, by a sample of its keys."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from ...core.records import Record, Unreadable
from ..counts import Count, States, Strain, overdue, tally

if TYPE_CHECKING:
    from . import RedisBackend

#: What is looked at, of a listing or of a cluster's keys: all, where there is no more.
LOOKED_AT: Final = 10_000

_OURS = re.compile(r"(lock|waiters):(\{.{22}\}:.*)", re.DOTALL)


def sampled_states(store: RedisBackend, soon: float) -> tuple[States, Strain]:
    """Count what is held by its state, in a sample, and say what that is of the whole.

    Args:
        soon: Seconds within which a lease ends soon.
    """
    prefix = f"{store.key_prefix}:" if store.key_prefix else ""
    now = store.clock()
    found: Counter[str] = Counter()
    is_whole = True
    late: list[float | None] = []
    waited: list[tuple[str, int]] = []
    for line, names, each_for in store.store.sample(LOOKED_AT, store._listing):
        ours: dict[str, list[str]] = {"lock": [], "waiters": []}
        for name in names:
            if name.startswith(prefix) and (match := _OURS.fullmatch(name, len(prefix))):
                ours[match[1]].append(match[2])
        found_here = store.records_on(line, ours["lock"])
        records = [each for each in found_here if isinstance(each, Record)]
        part = Counter(state for each in records for state in tally(each, now, soon))
        part["held"] += sum(isinstance(each, Unreadable) for each in found_here)
        late += [overdue(each, now) for each in records]
        numbers = store.store.waiting(line, [f"{prefix}waiters:{name}" for name in ours["waiters"]])
        part["waiting"] = sum(numbers)
        # Behind the tag of a cluster.
        keys = [name.partition("}:")[2] for name in ours["waiters"]]
        waited += zip(keys, numbers, strict=True)
        found.update({state: round(number * each_for) for state, number in part.items()})
        is_whole = is_whole and each_for == 1
    states = {name: Count(found[name], is_whole) for name in States.__dataclass_fields__}
    return States(**states), Strain.of(late, waited)
