"""What a seed makes of itself: who does what, and which faults come when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from .store import SILENCE, Network

#: What a thread does, one after the other: a word, and what belongs to it.
Step = tuple[Any, ...]


#: What may happen to a process, to the store, and by an operator; stops come most often.
KINDS = ("stop", "stop", "kill", "crash", "lossy", "clock", "pause", "shorten", "force")


@dataclass(frozen=True)
class Actor:
    """A thread of a process, and what it does."""

    process: int
    begins_at: float
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Fault:
    """Something that happens to a process, or to the store.

    Attributes:
        kind: "stop" and "kill" a process; "crash" and "lossy" end the store; "clock" steps its
            clock; "pause", "shorten" and "force" are what operators do.
        number: Of the process, or of the key.
        seconds: For how long, or by how much.
    """

    kind: str
    at: float
    number: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """All that is decided before a history begins.

    Attributes:
        calm: Nothing goes wrong: then waiters must be quick.
        wakes: Whether the store calls out what became free.
        floor: Whether fences follow the store's clock.
        silence: The same as `SILENCE` for who waits for a key, whose call has an end.
        part: The part of a ttl between two renewals.
        ends: Whether a process ends with the last of its threads.
        stalls: How likely a thread stands still where it looks at a clock.
    """

    seed: int
    actors: tuple[Actor, ...]
    faults: tuple[Fault, ...] = ()
    network: Network = field(default_factory=Network)
    calm: bool = False
    wakes: bool = True
    floor: bool = False
    silence: float = SILENCE
    part: float = 1 / 3
    ends: bool = False
    stalls: float = 0.0

    @property
    def processes(self) -> int:
        """How many there are."""
        return 1 + max((each.process for each in self.actors), default=0)

    def smaller(self) -> Iterator[Plan]:
        """Yield plans with a part left out."""
        for index in range(len(self.actors)):
            yield replace(self, actors=self.actors[:index] + self.actors[index + 1 :])
        for index in range(len(self.faults)):
            yield replace(self, faults=self.faults[:index] + self.faults[index + 1 :])
        for name in ("slow", "lost", "mute", "late", "busy", "deaf"):
            if getattr(self.network, name):
                yield replace(self, network=replace(self.network, **{name: 0.0}))
        if self.stalls:
            yield replace(self, stalls=0.0)
        for number, actor in enumerate(self.actors):
            for fewer in _fewer(actor.steps):
                shorter = replace(actor, steps=fewer)
                yield replace(
                    self, actors=(*self.actors[:number], shorter, *self.actors[number + 1 :])
                )


def _fewer(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    for index, step in enumerate(steps):
        rest = steps[:index], steps[index + 1 :]
        yield rest[0] + rest[1]
        if step[0] in ("block", "lease"):
            for inside in _fewer(step[3]):
                yield (*rest[0], (*step[:3], inside), *rest[1])


def plan_of(seed: int) -> Plan:
    """Return the plan of a seed."""
    random = Random(seed)
    # Few of them: there is little else to find in these.
    if seed % 25 == 24:
        return _crowd(random, seed)
    calm = random.random() < 0.25
    processes = random.randint(1, 3)
    keys = random.choice(("a", "a", "ab"))
    actors = tuple(
        Actor(number % processes, random.uniform(0, 2), _steps(random, keys, calm=calm))
        for number in range(random.randint(2, 5))
    )
    plan = Plan(seed, actors, calm=calm, wakes=random.random() < 0.75)
    if calm:
        return plan
    likely = {
        name: random.choice((0.0, 0.0, most / 4, most))
        for name, most in {
            "slow": 0.5, "lost": 0.2, "mute": 0.2, "late": 0.3, "busy": 0.3, "deaf": 0.5,
        }.items()
    }  # fmt: skip
    many = random.choice((0, 0, 1, 1, 2, 3))
    faults = tuple(_fault(random, processes, keys) for _ in range(many))
    if any(each.kind == "lossy" for each in faults):
        # Fences outlive the loss of data as long as the clock does not go back.
        faults = tuple(each for each in faults if each.kind != "clock" or each.seconds > 0)
    return replace(
        plan,
        faults=faults,
        network=Network(**likely),
        floor=random.random() < 0.3 or any(each.kind == "lossy" for each in faults),
        silence=random.choice((SILENCE, SILENCE, 12.0)),
        part=random.choice((1 / 3, 1 / 3, 1 / 10)),
        ends=random.random() < 0.4,
        stalls=random.choice((0.0, 0.0, 0.003)),
    )


def _crowd(random: Random, seed: int) -> Plan:
    """Return a plan of many who queue for long, and stand still now and then."""
    actors = tuple(
        Actor(
            0, random.uniform(0, 1),
            (("block", "a", {"ttl": 3.0, "wait": 30.0}, (("sleep", random.uniform(2, 4)),)),) * 2,
        )
        for _ in range(5)
    )  # fmt: skip
    return Plan(seed, actors, wakes=random.random() < 0.75, stalls=0.05)


def _steps(random: Random, keys: str, *, calm: bool) -> tuple[Step, ...]:
    kinds = ["block", "block", "block", "lease", "try", "sleep", "hand", "drop"]
    steps: list[Step] = []
    for _ in range(random.randint(1, 4)):
        kind, key = random.choice(kinds), random.choice(keys)
        ttl = random.choice((0.5, 1.0, 3.0))
        if kind == "sleep":
            steps.append(("sleep", random.uniform(0, 2)))
        elif kind == "block":
            how: dict[str, Any] = {"ttl": ttl, "wait": random.choice((0.5, 4.0, 15.0))}
            how |= random.choice(
                ({}, {}, {}, {"hold": True}, {"min_hold": 1.5}, {"max_lifetime": ttl * 1.5})
            )
            how["steal_if_dead"] = random.random() < 0.5
            work = _work(random, ttl, calm=calm)
            if "max_lifetime" in how and not calm:
                # Through the last renewals, which are cut short, and beyond by an extend.
                work = (
                    ("sleep", random.uniform(0.4, 1.4) * ttl),
                    ("extend", 6.0),
                    ("sleep", random.uniform(0, 5)),
                )
            steps.append(("block", key, how, work))
        elif kind == "lease":
            how = {"ttl": ttl, "wait": random.choice((0.5, 4.0, 15.0))}
            how |= random.choice(({}, {}, {"hold": True}))
            steps.append(("lease", key, how, _work(random, ttl, calm=calm)))
        elif kind == "drop":
            steps.append((kind, key, {"ttl": ttl, "wait": 4.0}, ()))
        else:
            lasts = 6.0 if kind == "hand" else ttl
            steps.append((kind, key, {"ttl": lasts, "wait": 0}, ()))
    return tuple(steps)


def _work(random: Random, ttl: float, *, calm: bool) -> tuple[Step, ...]:
    work: list[Step] = []
    for _ in range(random.randint(1, 4)):
        if random.random() < 0.3:
            work.append(("extend", random.choice((None, 0.3, 1.0, 6.0))))
        elif random.random() < 0.1:
            # As long as an extend may have given.
            work.append(("sleep", random.uniform(0, 0.3 if calm else 5.0)))
        else:
            work.append(("sleep", random.uniform(0, ttl * (0.3 if calm else 1.2))))
    return tuple(work)


def _fault(random: Random, processes: int, keys: str) -> Fault:
    kind = random.choice(KINDS)
    at = random.uniform(0.2, 8)
    number = random.randrange(processes if kind in ("stop", "kill") else len(keys))
    seconds = random.choice((0.3, 1.0, 2.5, 6.0))
    if kind == "clock":
        seconds = random.choice((-2.0, -0.5, 0.4, 3.0))
    return Fault(kind, at, number, seconds)
