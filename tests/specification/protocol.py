"""The protocol: a store, two clients, a network, and a row that they write to.

Time is a whole number that anybody's step may leave as it is: a client that does nothing for a
while is one that stands still. Messages arrive in any order, as late as they like, or never.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

#: What a client's clock may be behind, at most, when it looks for its deadline.
DRIFT = 1

#: Who asked, and in which attempt: every attempt has a token of its own.
Token = tuple[int, int]


@dataclass(frozen=True)
class Rules:
    """What the protocol does. Each safeguard may be left out, to see what it prevents.

    Attributes:
        grace: How long the store keeps a key behind its expiry.
        from_sending: The holder's deadline counts from before the question was sent.
        compares_tokens: A release frees the key only where its token is the record's.
        keeps_counters: The counter of fences is not deleted with the record.
        counts_unheard: An extend without an answer counts: the store may hear it behind others.
        checks_writes: A row refuses a write whose fence is lower than the row's mark.
        marks_reads: The first read raises the row's mark as well.
        locks_guards: Nobody is granted the key while a guarded transaction of its holder is open.
        floors_fences: A fence is never lower than the store's clock.
    """

    grace: int = 1
    from_sending: bool = True
    compares_tokens: bool = True
    keeps_counters: bool = True
    counts_unheard: bool = True
    checks_writes: bool = True
    marks_reads: bool = True
    locks_guards: bool = True
    floors_fences: bool = True


@dataclass(frozen=True)
class Scope:
    """How far a model goes, and which steps it has.

    Attributes:
        horizon: The last moment.
        turns: Attempts of the first client, and of the second.
        asks: Questions in each attempt.
        ttls: For how long a client extends; the longest is that of a grant.
        extends: How often each client extends.
        steps: Beside acquiring: "release", "write", "guard", "failover".
    """

    horizon: int
    turns: tuple[int, int] = (1, 1)
    asks: int = 1
    ttls: tuple[int, ...] = (2,)
    extends: tuple[int, int] = (0, 0)
    steps: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_exclusive(self) -> bool:
        """Whether the holder is promised to be alone: not where the store loses what it said."""
        return "failover" not in self.steps


class Record(NamedTuple):
    """What the store says of a held key."""

    token: Token
    fence: int
    free_at: int


class Message(NamedTuple):
    """A question, or the answer to one.

    Attributes:
        sent_at: When the question was sent.
    """

    kind: str
    token: Token
    sent_at: int = 0
    ttl: int = 0
    fence: int = 0


class Client(NamedTuple):
    """What one process knows.

    Attributes:
        phase: "idle", "asking" or "holding".
        turn: The number of its attempt.
        asked: How often it has asked in that.
        extending: The extend whose answer it waits for: when it was sent, and its ttl.
        unheard: The shortest ttl of its extends that got no answer.
        extends: How many it has sent.
        read: Which version of the row it has read, and has yet to write.
        guards: Whether a guarded transaction is open.
    """

    phase: str = "idle"
    turn: int = 0
    asked: int = 0
    fence: int = 0
    deadline: int = 0
    extending: tuple[int, int] | None = None
    unheard: int = 99
    extends: int = 0
    read: int | None = None
    guards: bool = False

    def ended(self) -> Client:
        """Return it behind the end of its attempt."""
        return Client(turn=self.turn + 1)


class World(NamedTuple):
    """One moment of everything but the network.

    Attributes:
        replica: The record and the counter that a failover goes back to; None: there was one.
        mark: The highest fence that the row has seen.
        version: How often the row was written.
        highest: The highest fence that was ever granted.
    """

    now: int = 0
    record: Record | None = None
    counter: int = 0
    replica: tuple[Record | None, int] | None = (None, 0)
    mark: int = 0
    version: int = 0
    highest: int = 0
    clients: tuple[Client, ...] = (Client(), Client())


class State(NamedTuple):
    """One moment of everything."""

    world: World
    messages: frozenset[Message]


class Step(NamedTuple):
    """What may happen next.

    Attributes:
        world: What is then.
        sent: The messages that are under way since.
        broken: The promise that it breaks.
    """

    said: str
    world: World
    sent: frozenset[Message] = frozenset()
    broken: str = ""


def _without_dead_letters(
    rules: Rules, messages: frozenset[Message], record: Record | None, clients: tuple[Client, ...]
) -> frozenset[Message]:
    """Return messages without those that would change nothing, whenever they arrive."""
    # An attempt that may yet be heard may yet make a record with its token.
    tokens = {each.token for each in messages if each.kind == "acquire"}
    tokens |= set() if record is None else {record.token}

    def matters(message: Message) -> bool:
        number, turn = message.token
        client = clients[number]
        if message.kind == "granted":
            return client.turn == turn and client.phase == "asking"
        if message.kind == "extended":
            return client.turn == turn and client.extending == (message.sent_at, message.ttl)
        return message.token in tokens or (message.kind == "release" and not rules.compares_tokens)

    return frozenset(filter(matters, messages))


START = State(World(), frozenset())
NAMES = "AB"


def broken_promise(world: World) -> str:
    """Say which promise a state breaks: two who think that they hold the key."""
    held = [each.phase == "holding" for each in world.clients]
    if all(held) and all(world.now < each.deadline + DRIFT for each in world.clients):
        return "both hold the key"
    return ""


class Protocol:
    """What may happen next. It remembers each answer: few worlds have many sets of messages."""

    def __init__(self, rules: Rules, scope: Scope):
        self._of_world = cache(lambda world: tuple(_without_messages(world, rules, scope)))
        self._heard = cache(partial(_heard, rules))
        self._left = cache(partial(_without_dead_letters, rules))

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        """Give all that may happen next, and what is then."""
        for step in self._of_world(state.world):
            yield step, self._state(step, state.messages)
        for message in state.messages:
            if heard := self._heard(state.world, message):
                yield heard, self._state(heard, state.messages - {message})

    def _state(self, step: Step, messages: frozenset[Message]) -> State:
        if step.sent:
            messages |= step.sent
        world = step.world
        return State(world, self._left(messages, world.record, world.clients))


def _without_messages(world: World, rules: Rules, scope: Scope) -> Iterator[Step]:
    if world.now < scope.horizon:
        yield Step("time passes", world._replace(now=world.now + 1))
    for number, client in enumerate(world.clients):
        yield from _of_client(_Client(world, rules, scope, number, client))
    if "failover" in scope.steps and world.replica is not None:
        if world.replica != (world.record, world.counter):
            yield Step(
                "the replica hears of all", world._replace(replica=(world.record, world.counter))
            )
        if world.now < scope.horizon:
            record, counter = world.replica
            yield Step(
                "the replica takes over, which takes a moment",
                world._replace(now=world.now + 1, record=record, counter=counter, replica=None),
            )


@dataclass(frozen=True)
class _Client:
    """A client, amid everything."""

    world: World
    rules: Rules
    scope: Scope
    number: int
    client: Client

    @property
    def name(self) -> str:
        return NAMES[self.number]

    @property
    def token(self) -> Token:
        return self.number, self.client.turn

    def step(self, said: str, client: Client, *sent: Message, broken: str = "", **row: int) -> Step:
        """Return the step after which the client is so."""
        clients = tuple(
            client if number == self.number else each
            for number, each in enumerate(self.world.clients)
        )
        world = self.world._replace(clients=clients, **row)  # type: ignore[arg-type]
        return Step(f"{self.name} {said}", world, frozenset(sent), broken)


def _of_client(at: _Client) -> Iterator[Step]:
    client, now, longest = at.client, at.world.now, max(at.scope.ttls)
    if client.phase != "holding":
        if client.turn < at.scope.turns[at.number] and client.asked < at.scope.asks:
            asking = client._replace(phase="asking", asked=client.asked + 1)
            yield at.step("asks for the key", asking, Message("acquire", at.token, now, longest))
        if client.phase == "asking":
            yield at.step("gives up", client.ended())
        return
    if "release" in at.scope.steps:
        yield at.step("releases", client.ended(), Message("release", at.token))
    yield from _extending(at)
    if "write" in at.scope.steps:
        yield from _writing(at)
    if "guard" in at.scope.steps:
        yield from _guarding(at)


def _extending(at: _Client) -> Iterator[Step]:
    client, now = at.client, at.world.now
    if client.extending is not None:
        _sent, ttl = client.extending
        unheard = min(client.unheard, ttl)
        yield at.step(
            "waits no longer for an answer", client._replace(extending=None, unheard=unheard)
        )
    elif client.extends < at.scope.extends[at.number] and now < client.deadline + DRIFT:
        for ttl in at.scope.ttls:
            deadline = client.deadline
            if at.rules.counts_unheard:
                deadline = min(deadline, now + ttl)
            extending = client._replace(
                extending=(now, ttl), deadline=deadline, extends=client.extends + 1
            )
            yield at.step(f"extends to {ttl}", extending, Message("extend", at.token, now, ttl))


def _writing(at: _Client) -> Iterator[Step]:
    """Read, think, write: at any time, for a process may stand still between any two lines."""
    world, client = at.world, at.client
    if client.read is None:
        if at.rules.marks_reads and world.mark > client.fence:
            yield at.step(f"reads with fence {client.fence}, and is refused", client.ended())
        elif world.version < 2:
            mark = max(world.mark, client.fence) if at.rules.marks_reads else world.mark
            yield at.step(
                f"reads version {world.version} with fence {client.fence}",
                client._replace(read=world.version),
                mark=mark,
            )
    elif at.rules.checks_writes and world.mark > client.fence:
        yield at.step(f"writes with fence {client.fence}, and is refused", client.ended())
    else:
        yield at.step(
            f"writes what it made of version {client.read}",
            client._replace(read=None),
            mark=max(world.mark, client.fence),
            version=world.version + 1,
            broken="" if client.read == world.version else "an update is lost",
        )


def _guarding(at: _Client) -> Iterator[Step]:
    world, client = at.world, at.client
    if client.guards:
        stale = "a stale transaction is committed" if world.counter != client.fence else ""
        yield at.step("commits", client._replace(guards=False), broken=stale)
    elif world.counter == client.fence:
        yield at.step("begins a guarded transaction", client._replace(guards=True))
    else:
        yield at.step("begins a guarded transaction, and is refused", client.ended())


def _heard(rules: Rules, world: World, message: Message) -> Step | None:
    """Give what becomes of a message that arrives now; one that never does needs no step."""
    if message.kind in ("granted", "extended"):
        return _answered(world, rules, message)
    who, record, now = NAMES[message.token[0]], world.record, world.now
    is_live = record is not None and now < record.free_at
    is_owned = record is not None and is_live and record.token == message.token
    if message.kind == "acquire":
        guarded = rules.locks_guards and any(each.guards for each in world.clients)
        if guarded or (is_live and not is_owned):
            return Step(f"the store refuses {who}", world)
        return _granted(world, rules, message)
    if message.kind == "extend" and record is not None and is_owned:
        kept = record._replace(free_at=now + message.ttl + rules.grace)
        return Step(
            f"the store extends the lease of {who} to {now + message.ttl}",
            world._replace(record=kept),
            frozenset({message._replace(kind="extended")}),
        )
    if message.kind == "release" and record is not None and (is_owned or not rules.compares_tokens):
        counter = world.counter if rules.keeps_counters else 0
        return Step(f"the store releases for {who}", world._replace(record=None, counter=counter))
    return None


def _granted(world: World, rules: Rules, message: Message) -> Step:
    fence = world.counter + 1
    if rules.floors_fences:
        # More than are granted in a moment.
        fence = max(fence, 10 * world.now)
    expires_at = world.now + message.ttl
    answer = message._replace(kind="granted", fence=fence)
    return Step(
        f"the store grants {NAMES[message.token[0]]} the key until {expires_at}, fence {fence}",
        world._replace(
            record=Record(message.token, fence, expires_at + rules.grace),
            counter=fence,
            highest=max(fence, world.highest),
        ),
        frozenset({answer}),
        "a fence does not grow" if fence <= world.highest else "",
    )


def _answered(world: World, rules: Rules, message: Message) -> Step:
    number, turn = message.token
    client = world.clients[number]
    counted_from = message.sent_at if rules.from_sending else world.now
    said = f"{NAMES[number]} hears an answer that it waits for no more"
    if client.turn == turn:
        if message.kind == "granted" and client.phase == "asking":
            said = f"{NAMES[number]} hears of its grant"
            deadline = counted_from + message.ttl
            client = client._replace(phase="holding", fence=message.fence, deadline=deadline)
        elif message.kind == "extended" and client.extending == (message.sent_at, message.ttl):
            said = f"{NAMES[number]} hears that its lease is extended"
            ttl = min(message.ttl, client.unheard) if rules.counts_unheard else message.ttl
            client = client._replace(extending=None, deadline=counted_from + ttl)
    clients = tuple(client if index == number else each for index, each in enumerate(world.clients))
    return Step(said, world._replace(clients=clients))
