"""What workers and operators wrote down, and what of it must never be.

A line is JSON. Its time is of the clock that leases are held by, which all processes of a machine
share. A holder claims its key from the line of the grant on: at each line until the deadline that
it saw then, or the next line, whichever comes first. So no claim gets longer by a slow process.
"""

from __future__ import annotations

import json
import math
import os
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from django_distlock.core.clock import monotonic

Line = dict[str, Any]

#: What a worker may raise: nothing of this is a fault of the locks.
EXPECTED = {
    "Interrupted", "LockLost", "LockNotAcquired", "BackendUnavailable", "TimeoutError",
    "OperationalError", "InterfaceError", "InternalError",
}  # fmt: skip
#: Seconds behind its deadline in which the store may still have a lease.
GRACE = 2.0
#: Excused overlaps are counted as this.
EXCUSED = "excused overlap: the store had lost its data"
#: What an operator ends a lease by: its holder may be told before the deadline that it saw.
ENDING = {"force_release", "expire_soon"}


class Writer:
    """Writes one process's history. A line is one call of the system: no signal divides it."""

    def __init__(self, path: Path, who: str):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._who = who

    def __call__(self, event: str, **facts: Any) -> None:
        """Write a line."""
        line = {"t": monotonic(), "who": self._who, "event": event, **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read(folder: Path) -> list[Line]:
    """Return the lines of all processes, in the order of their times."""
    lines: list[Line] = []
    for path in folder.glob("*.jsonl"):
        # A process that was killed may have left a part of one.
        lines += map(json.loads, path.read_bytes().rpartition(b"\n")[0].splitlines())
    return sorted(lines, key=lambda line: float(line["t"]))


class Claim(NamedTuple):
    """A stretch of time in which a holder believed that it alone had the key."""

    begin: float
    end: float
    held: Held


@dataclass(eq=False)
class Held:
    """One holding, as its holder saw it.

    Attributes:
        asked: When the block, or the call, began.
        granted_since: When the first block of the same grant began.
        permits: How many may have the key at the same time who share it; 0: it is not shared.
    """

    key: str
    fence: float
    token: str
    asked: float
    granted_since: float = math.inf
    lines: list[Line] = field(default_factory=list)
    permits: int = 0

    @classmethod
    def kept(cls, line: Line) -> Held:
        """Return what kept a key from others, without a lease or behind one.

        Transactions that lock keys have no fence; what they meet is older.
        """
        begin, end = {**line, "t": line["begin"]}, {"event": "end", "t": line["until"]}
        asked = line["asked"] if "asked" in line else line["begin"]
        fence, token = line.get("fence", math.inf), line.get("token", f"{line['t']}")
        return cls(line["key"], fence, token, asked, asked, [begin, end], line["permits"])

    def is_same(self, other: Held) -> bool:
        """Whether it is one grant: a block was entered again, or goes on in the transaction."""
        return (self.fence, self.token) == (other.fence, other.token)

    def claims(self) -> Iterator[Claim]:
        """Yield the stretches of time in which it was held by its holder's own clock."""
        for line, following in zip(self.lines, [*self.lines[1:], None], strict=True):
            if line["event"] in ("end", "lost"):
                return
            # Nobody knows when a process was killed: what it did last, it did alive.
            end = line["t"] if following is None else following["t"]
            if min(end, line["until"]) > line["t"]:
                yield Claim(line["t"], min(end, line["until"]), self)

    def is_among(self, taken: set[tuple[str, float]]) -> bool:
        """Whether an operator took its key, who never can while a transaction guards it."""
        is_guard = self.lines[0]["event"] == "kept" and self.lines[0]["form"] == "guarded"
        return not is_guard and (self.key, self.fence) in taken

    def shared_amid(self, order: Line) -> bool:
        """Whether it shared a key that an operator asked for then."""
        until = max(each["until"] if "until" in each else each["t"] for each in self.lines)
        began = order["asked"] if "asked" in order else order["t"]
        is_amid = self.asked <= order["t"] and began <= until + GRACE
        return bool(self.permits and self.key == order["key"] and is_amid)

    def has_expired(self) -> bool:
        """Whether its deadline passed before it ended, or its process died under it."""
        last = next((each for each in self.lines if each["event"] in ("end", "lost")), None)
        until = [each["until"] for each in self.lines if "until" in each]
        return last is None or bool(last["t"] >= until[-1])

    def gone_early(self, grant: list[Line]) -> float:
        """Seconds before its deadline at which the store had lost it, as the holder was told.

        Args:
            grant: What was written of its grant, by all blocks that entered it.
        """
        lost = next((each for each in self.lines if each["event"] == "lost"), None)
        # What could not be renewed three times is given up before its deadline.
        if lost is None or "no answer" in lost["why"]:
            return 0.0
        before = [each for each in grant if "until" in each and each["t"] <= lost["t"]]
        return max(0.0, float(before[-1]["until"]) - float(lost["t"]))


@dataclass
class Findings:
    """What is in a history.

    Attributes:
        broken: What must never be, with the lines that show it.
    """

    counted: Counter[str] = field(default_factory=Counter)
    broken: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def never(self, what: str, *shown: object) -> None:
        """Keep something that must never be."""
        lines = [each if isinstance(each, str) else json.dumps(each) for each in shown]
        self.broken[what].append("\n    ".join(lines))

    def with_more(self, other: Findings) -> Findings:
        """Take in what was found elsewhere."""
        self.counted += other.counted
        for what, shown in other.broken.items():
            self.broken[what] += shown
        return self

    def table(self, title: str) -> str:
        """Return what was counted, and of what must never be the first three."""
        rows = [f"  {name:44} {number:8}" for name, number in sorted(self.counted.items())]
        never = [f"  NEVER: {what:37} {len(shown):8}" for what, shown in self.broken.items()]
        shown = [f"{what}:\n    {each}" for what, all_ in self.broken.items() for each in all_[:3]]
        return "\n".join([title, *rows, *(never or ["  nothing that must never be"]), *shown])


class Losses:
    """When the store lost its data, and how long what was lost may still be held.

    Args:
        lines: Those with `since` and `over`. The data were lost at some time from `since` to the
            line's own; `over` is that plus the longest ttl.
    """

    def __init__(self, lines: Iterable[Line]):
        self._times = [(each["since"], each["t"], each["over"]) for each in lines if _loses(each)]

    def is_near(self, at: float) -> bool:
        """Whether what was lost may still be held then."""
        return any(since <= at <= over for since, _lost, over in self._times)

    def excuse(self, held: Held, begin: float, end: float) -> bool:
        """Whether a grant was asked for before a loss, and what happened to it lies behind that."""
        return any(
            held.granted_since <= lost and since <= begin and end <= over
            for since, lost, over in self._times
        )


def _loses(line: Line) -> bool:
    return line["event"] == "fault" and "over" in line


def examined(lines: Iterable[Line]) -> Findings:
    """Count what happened, and find what must never be."""
    lines = list(lines)
    found, losses = Findings(), Losses(lines)
    holdings: dict[tuple[str, int], Held] = {}
    grants: dict[tuple[str, float, str], list[Line]] = defaultdict(list)
    for line in lines:
        event = line["event"]
        found.counted[f"{event} {line['form']}" if "form" in line else event] += 1
        if event == "grant":
            found.counted["grant"] += 1
            holdings[line["who"], line["lease"]] = Held(
                line["key"], line["fence"], line["token"], line["asked"],
                permits=line.get("permits", 0),
            )  # fmt: skip
        if "lease" in line and (line["who"], line["lease"]) in holdings:
            held = holdings[line["who"], line["lease"]]
            held.lines.append(line)
            grant = grants[held.key, held.fence, held.token]
            grant.append(line)
            held.granted_since = min(each["asked"] for each in grant if "asked" in each)
        if event == "error" and line["form"] not in EXPECTED:
            found.never("unexpected error", line)
    taken, shortened = _ended(lines, holdings.values())
    by_key: dict[str, list[Held]] = defaultdict(list)
    kept = _kept(lines, taken | shortened)
    for held in holdings.values():
        by_key[held.key].append(held)
        found.counted["expired"] += held.has_expired()
        early = held.gone_early(grants[held.key, held.fence, held.token])
        if early > 0:
            _judge_early(found, held, early, taken | shortened, losses)
    for key, all_held in by_key.items():
        _find_overlaps(found, all_held + kept.pop(key, []), taken, losses)
        _find_fences(found, all_held)
    for all_kept in kept.values():
        _find_overlaps(found, all_kept, taken, losses)
    _find_stale_writes(found, lines)
    _find_refused(found, lines, taken, losses)
    return found


def _ended(
    lines: Iterable[Line], holdings: Iterable[Held]
) -> tuple[set[tuple[str, float]], set[tuple[str, float]]]:
    """Return the keys and fences of what operators took, and of what they shortened."""
    taken: set[tuple[str, float]] = set()
    shortened: set[tuple[str, float]] = set()
    for line in lines:
        is_done = line["event"] == "operator" and line.get("result", "DONE") == "DONE"
        if not is_done or line["form"] not in ENDING:
            continue
        is_taken = line["form"] == "force_release" and _moved_on(line)
        ended = taken if is_taken else shortened
        ended.add((line["key"], line["before"]))
        if line.get("seen") is None:
            # All who shared the key: the outcome tells of the last one.
            ended.update((each.key, each.fence) for each in holdings if each.shared_amid(line))
    return taken, shortened


def _kept(lines: Iterable[Line], ended: set[tuple[str, float]]) -> dict[str, list[Held]]:
    """Return by its key what kept a key from others without a lease, or behind one."""
    kept: dict[str, list[Held]] = defaultdict(list)
    for line in lines:
        # What is kept taken behind the work ends with the lease that an operator ended.
        if line["event"] == "kept" and not (
            line["form"] == "hold" and (line["key"], line["fence"]) in ended
        ):
            kept[line["key"]].append(Held.kept(line))
    return kept


def _find_refused(
    found: Findings, lines: Iterable[Line], taken: set[tuple[str, float]], losses: Losses
) -> None:
    """Find holders whose order or write was taken for that of somebody else, and the reverse."""
    for line in lines:
        # What was not done says who holds the key by now.
        is_done = line["event"] == "operator" and line.get("result") == "DONE"
        if is_done and line.get("seen") not in (None, line["before"]):
            found.never("order for another holder", line)
        if line["event"] == "refused" and line.get("held"):
            is_taken = (line["key"], line["fence"]) in taken
            if not is_taken and not losses.is_near(line["t"]):
                found.never("refused holder", line)


def _judge_early(
    found: Findings, held: Held, early: float, ended: set[tuple[str, float]], losses: Losses
) -> None:
    told = next(each["t"] for each in held.lines if each["event"] == "lost")
    if (held.key, held.fence) in ended:
        found.counted["ended by an operator before its deadline"] += 1
    elif losses.excuse(held, told, told):
        found.counted["ended by a loss of data before its deadline"] += 1
    else:
        found.never("gone early", f"by {early:.3f} s", *held.lines)


def _moved_on(order: Line) -> bool:
    """Whether the fence was moved behind that of the holder, as the outcome says."""
    return int(order["after"] or 0) > int(order["before"] or 0)


def _find_overlaps(
    found: Findings, all_held: list[Held], taken: set[tuple[str, float]], losses: Losses
) -> None:
    claims = sorted(
        (claim for held in all_held for claim in held.claims()), key=lambda claim: claim[:2]
    )
    seen: set[frozenset[int]] = set()
    excused: set[frozenset[int]] = set()
    open_claims: list[Claim] = []
    for claim in claims:
        open_claims = [each for each in open_claims if each.end > claim.begin]
        beside = {
            (each.held.fence, each.held.token)
            for each in open_claims
            if each.held.permits and each.held.fence < math.inf
            and not each.held.is_same(claim.held) and not each.held.is_among(taken)
            and not losses.excuse(each.held, claim.begin, min(each.end, claim.end))
        }  # fmt: skip
        for other in open_claims:
            pair = frozenset((id(other.held), id(claim.held)))
            if pair in seen or other.held.is_same(claim.held):
                continue
            if other.held.permits and len(beside) < claim.held.permits:
                continue
            older = min(other.held, claim.held, key=lambda held: held.fence)
            end = min(other.end, claim.end)
            # A later stretch of the same two may have no excuse.
            if losses.excuse(older, claim.begin, end) and not older.is_among(taken):
                excused.add(pair)
                continue
            seen.add(pair)
            if older.is_among(taken):
                found.counted["overlap with what an operator took"] += 1
                continue
            seconds = end - claim.begin
            near = sorted(other.held.lines + claim.held.lines, key=lambda line: float(line["t"]))
            found.never("overlap", f"for at least {seconds:.3f} s", *near)
        open_claims.append(claim)
    found.counted[EXCUSED] += len(excused)


def _find_fences(found: Findings, all_held: list[Held]) -> None:
    by_fence: dict[float, Held] = {}
    granted: list[tuple[float, float, float, Line]] = []
    for held in sorted(all_held, key=lambda each: each.asked):
        first = by_fence.setdefault(held.fence, held)
        if held is not first:
            if first.is_same(held):
                continue  # A block that was entered again, perhaps long behind its grant.
            found.never("repeated fence", first.lines[0], held.lines[0])
        granted.append((held.asked, held.lines[0]["t"], held.fence, held.lines[0]))
    for highest, line in _falling(granted):
        found.never("falling fence", f"granted before: {highest}", line)


def _forgotten(lines: Iterable[Line]) -> list[tuple[float, float]]:
    """Return from when to when rows were written that a restored backup does not have."""
    return [(each["kept"], each["t"]) for each in lines if _loses(each) and "kept" in each]


def saved_rows(lines: Iterable[Line]) -> list[str]:
    """Return the rows that must be there: saved without an error, and not lost with the data."""
    lines = list(lines)
    gone = _forgotten(lines)
    return [
        line["row"]
        for line in lines
        if line["event"] == "saved"
        and not any(kept <= line["t"] and line["asked"] <= at for kept, at in gone)
    ]


def _find_stale_writes(found: Findings, lines: list[Line]) -> None:
    by_key: dict[tuple[str, int], list[tuple[float, float, float, Line]]] = defaultdict(list)
    restored = [at for _kept, at in _forgotten(lines)]
    for line in lines:
        if line["event"] == "wrote":
            # A restored row does not know what was written on it before.
            written = by_key[line["key"], sum(at < line["asked"] for at in restored)]
            written.append((line["asked"], line["t"], line["fence"], line))
    for written in by_key.values():
        for highest, line in _falling(sorted(written, key=lambda each: each[0])):
            found.never("stale write", f"written before: {highest}", line)


def _falling(
    calls: Iterable[tuple[float, float, float, Line]],
) -> Iterator[tuple[float, Line]]:
    """Yield what has a lower fence than a call that had ended before it was asked for.

    Args:
        calls: When each was asked for, when it had ended, its fence and line, in the order asked.
    """
    ended: list[tuple[float, float]] = []
    highest = 0.0
    for asked, at, fence, line in calls:
        while ended and ended[0][0] <= asked:
            highest = max(highest, ended.pop(0)[1])
        if fence < highest:
            yield highest, line
        insort(ended, (at, fence))
