"""A checker that visits every state, the nearest first: what it finds is as short as can be."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from .protocol import (
    START,
    Protocol,
    Rules,
    Scope,
    State,
    broken_promise,
)

#: A model each for what the safeguards are about.
SCOPES = {
    "leases": Scope(horizon=4, turns=(2, 1), steps=frozenset({"release"})),
    "lost answers": Scope(horizon=4, asks=2, steps=frozenset({"release"})),
    "extends": Scope(horizon=5, ttls=(1, 3), extends=(2, 0)),
    "writes": Scope(horizon=5, steps=frozenset({"write"})),
    "guards": Scope(horizon=5, steps=frozenset({"guard", "release"})),
    "failover": Scope(horizon=4, steps=frozenset({"write", "failover"})),
}


@dataclass(frozen=True)
class Safeguard:
    """A rule of the protocol, and the model in which it is left out."""

    says: str
    scope: str
    without: dict[str, object]

    @property
    def rules(self) -> Rules:
        """The protocol without it."""
        return replace(Rules(), **self.without)  # type: ignore[arg-type]


SAFEGUARDS = [
    Safeguard("The store keeps a key for a moment behind its expiry", "leases", {"grace": 0}),
    Safeguard("A deadline counts from before the question", "leases", {"from_sending": False}),
    Safeguard("A release compares the token", "leases", {"compares_tokens": False}),
    Safeguard(
        "The counter of a key is never deleted",
        "leases",
        {"keeps_counters": False, "floors_fences": False},
    ),
    Safeguard("An extend without an answer counts", "extends", {"counts_unheard": False}),
    Safeguard(
        "A row refuses a write with a lower fence",
        "writes",
        {"checks_writes": False, "marks_reads": False},
    ),
    Safeguard("The first read raises the row's mark", "writes", {"marks_reads": False}),
    Safeguard("No grant beside a guarded transaction", "guards", {"locks_guards": False}),
    Safeguard("Fences do not fall below the clock", "failover", {"floors_fences": False}),
]


@dataclass(frozen=True)
class Checked:
    """What a check has found.

    Attributes:
        states: How many were visited.
        broken: The promise that does not hold; empty: all of them hold.
        trace: The steps that lead there, each with its moment.
    """

    states: int
    broken: str = ""
    trace: tuple[str, ...] = ()


def check(rules: Rules, scope: Scope) -> Checked:
    """Visit every state that can be reached, until one breaks a promise."""
    came: dict[State, tuple[State, str] | None] = {START: None}
    protocol, waiting = Protocol(rules, scope), deque([START])
    while waiting:
        state = waiting.popleft()
        # In an order of their own: that of a set of messages is not the same in each process.
        for step, reached in sorted(protocol.steps(state), key=lambda each: each[0].said):
            is_new = reached not in came
            broken = step.broken
            if is_new and scope.is_exclusive:
                broken = broken or broken_promise(step.world)
            if broken:
                trace = [*_way(came, state), (step.world.now, step.said)]
                return Checked(len(came), broken, tuple(f"{at}  {said}" for at, said in trace))
            if is_new:
                came[reached] = state, step.said
                waiting.append(reached)
    return Checked(len(came))


def _way(came: dict[State, tuple[State, str] | None], state: State) -> list[tuple[int, str]]:
    steps_back = []
    while (before := came[state]) is not None:
        steps_back.append((state.world.now, before[1]))
        state = before[0]
    return steps_back[::-1]


def report() -> str:
    """Say what was visited, and what each safeguard prevents."""
    scopes = [told_of_scope(name, check(Rules(), scope)) for name, scope in SCOPES.items()]
    prevented = [
        told_of_safeguard(each, check(each.rules, SCOPES[each.scope])) for each in SAFEGUARDS
    ]
    return "\n".join([*scopes, *prevented])


def told_of_scope(name: str, found: Checked) -> str:
    """Say what was visited in one model of the whole protocol."""
    return f"{name}: {found.states:,} states, {found.broken or 'every promise holds'}"


def told_of_safeguard(left_out: Safeguard, found: Checked) -> str:
    """Say what a safeguard prevents, behind an empty line."""
    title = f"\nWithout «{left_out.says}» ({left_out.scope}): {found.broken}"
    return "\n".join([title, *(f"  {step}" for step in found.trace)])
