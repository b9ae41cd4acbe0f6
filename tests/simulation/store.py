"""A store behind a network: what is asked arrives late, twice never, or not at all.

The store itself is the package's memory backend, on the store's own clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.backends.queues import Turn
from django_distlock.backends.shelf import Shelf
from django_distlock.conf import BackendConfig
from django_distlock.core import durations
from django_distlock.core.errors import BackendUnavailable
from django_distlock.core.records import UNKNOWN, Attempt, Contended, Grant, Record, Unknown
from django_distlock.locks.attempts import PATIENCE, Attempts

from .scheduler import Process, Thread, Violation, World, current_thread

if TYPE_CHECKING:
    from .plans import Plan

PREFIX = "sim"
#: What the tokens of those begin with who take over what is handed to them.
TAKING = "t"
#: Seconds beyond its bound for which a client waits for an answer.
SILENCE = 2.0


@dataclass
class Network:
    """How likely what becomes of a question, each from 0 to 1.

    Attributes:
        slow: It takes up to a second, and not some milliseconds.
        lost: It never arrives.
        mute: Its answer never arrives.
        late: It arrives when its sender has given up, whose connection was cut at once.
        busy: The store says that somebody else's transaction is in the way.
        deaf: A wake-up does not arrive.
    """

    slow: float = 0.0
    lost: float = 0.0
    mute: float = 0.0
    late: float = 0.0
    busy: float = 0.0
    deaf: float = 0.0


class _Calls:
    """Stands for the queues of the store's own process: calls out what became free."""

    def __init__(self, store: Store):
        self._store = store
        self.was_wanted = False

    def ring(self, name: str) -> None:
        self._store.call_out(name)

    def note_wanted(self, name: str) -> None:
        self.was_wanted = True


class Store:
    """The one store of a history.

    Attributes:
        is_down: Whether it answers nobody.
        ahead: By how much its clock was put ahead, in seconds.
    """

    def __init__(self, world: World, plan: Plan):
        self.world, self.plan, self.network, self.wakes = world, plan, plan.network, plan.wakes
        self.is_down, self.ahead = False, 0.0
        #: The highest fence of each key, and of whose grant.
        self.fences: dict[str, tuple[int, str]] = {}
        #: The keys of all tokens that were ever granted one.
        self.granted: dict[str, str] = {}
        #: Until when each key is kept behind a clean run.
        self.windows: dict[str, datetime] = {}
        config = BackendConfig(
            alias="server", key_prefix=PREFIX, fence_floor="clock" if plan.floor else None
        )
        self.server = MemoryBackend(config, clock=lambda: world.now + self.ahead)
        self.server._epoch = datetime(2026, 1, 1, tzinfo=UTC)
        self.calls = _Calls(self)
        self.server.queues = self.calls  # type: ignore[assignment]
        self._kept = self._copy()

    # Its data

    def _copy(self) -> tuple[dict[str, Record], dict[str, int]]:
        server = self.server
        return dict(server._shelf.records), dict(server._fences)

    def keep(self) -> None:
        """Write everything to the disk."""
        self._kept = self._copy()

    def crash(self, *, loses: bool) -> None:
        """Stop, and forget what is not on the disk."""
        self.is_down = True
        if loses:
            server = self.server
            records, fences = self._kept
            server._shelf, server._fences = Shelf(), {**fences}
            for name, record in records.items():
                server._shelf.put(name, record)
            self.windows.clear()

    def come_back(self) -> None:
        """Answer again. Whoever listened begins anew, and looks."""
        self.is_down = False
        for process in self.world.processes:
            self.world.at(self.world.now + 0.01, process.backend.queues.ring_all, process)

    def kept_until(self, name: str, token: str) -> float:
        """Return until when, in the time of the world, a holder may count on its lease; 0: not."""
        record = self.server._shelf.records.get(name)
        if record is None or record.token != token or record.is_settled:
            return 0.0
        # Shortened by an operator, it is kept for as long as its holder was promised.
        ends = record.free_at if record.renewed_until else record.expires_at
        if ends is None:
            return math.inf
        return (ends - self.server._epoch).total_seconds() - self.ahead

    def is_free(self, name: str) -> bool:
        """Whether the next one who asks is granted a key."""
        now = self.server._now()
        return not self.is_down and not (
            self.server._shelf.live(name, now) or self.server._pause_of(name, now)
        )

    def _see_end(self, name: str) -> None:
        """See that a key is free from the end of its record on, and not before."""
        record = self.server._shelf.records.get(name)
        if record is not None and record.free_at is not None:
            is_taken = self.server._read(name) is not None
            if is_taken is not (self.server._now() < record.free_at):
                raise Violation("a record ends at another time than its own")

    # What is asked

    def acquire(self, attempt: Attempt) -> Grant | Contended:
        """Carry out an acquire; its fence must grow, and no window is broken into."""
        answer = self.server._acquire(attempt)
        if isinstance(answer, Grant):
            if self.windows.get(attempt.key, answer.acquired_at) > answer.acquired_at:
                raise Violation(f"{attempt.key} is granted in its window")
            last, token = self.fences.get(attempt.key, (0, ""))
            if answer.fence < last or (answer.fence == last and token != attempt.token):
                raise Violation(f"fence {answer.fence} of {attempt.key} behind {last}")
            self.fences[attempt.key] = answer.fence, str(attempt.token)
            self.granted[str(attempt.token)] = attempt.key
            free_at = self.server._shelf.records[attempt.name].free_at
            assert free_at is not None
            ends = (free_at - self.server._epoch).total_seconds() - self.ahead
            self.world.at(ends, lambda: self._see_end(attempt.name))
        return answer

    def extend(self, name: str, grant: Grant, ttl: float | None) -> Grant | None:
        """Carry out an extend: of a live lease that nobody has given up."""
        before = self.server._shelf.live(name, self.server._now())
        answer = self.server._extend(name, grant, ttl, bound=0)
        if answer is not None and (before is None or before.is_settled):
            raise Violation(f"{grant.key} is extended though its lease is over")
        return answer

    def release(self, name: str, grant: Grant, held: float | None) -> tuple[bool, bool]:
        """Carry out a release; say also whether somebody wants the key."""
        self.calls.was_wanted = False
        return self.server._release(name, grant, held, bound=0), self.calls.was_wanted

    def call_out(self, name: str) -> None:
        """Wake whoever waits for a key, in each process."""
        if not self.wakes or self.is_down:
            return
        random = self.world.random
        for process in self.world.processes:
            if random.random() >= self.network.deaf:
                after = self.world.now + random.uniform(0.0005, 0.02)
                self.world.at(after, _ringing(process, name), process)


def _ringing(process: Process, name: str) -> Callable[[], None]:
    return lambda: process.backend.queues.ring(name)


class Client(BaseLockBackend):
    """The backend of one process."""

    supports_wakeups = True

    def __init__(self, config: BackendConfig, process: Process, store: Store):
        super().__init__(config)
        self.process, self.remote = process, store
        self.monotonic = process.world.clock
        #: Looks at what is asked with a token, before it is sent.
        self.before_asking: Callable[[str, str], None] = lambda _token, _what: None
        #: Who is first in the queue of a key, and since when, or when it has asked last.
        self._fronts: dict[str, tuple[Turn, float]] = {}
        #: Who has asked because the one in front was silent, and goes on asking.
        self._impatient: set[Turn] = set()
        #: Of each token, how many renewals in a row had no answer.
        self._failures: Counter[str] = Counter()
        #: When it asked last for an acquire that had no answer, and for a release; and whose
        #: release was answered.
        self._unheard: dict[str, float] = {}
        self._let_go: dict[str, float] = {}
        self._gone: set[str] = set()
        #: When somebody in front heard that a key was held, and for how long it had been.
        self._heard: dict[str, tuple[float, float]] = {}
        #: When a key was given up that others wait for, and by whom.
        self._left: dict[str, tuple[float, Thread]] = {}
        #: Who asked the last acquire, where its answer took long.
        self._slow: Thread | None = None
        #: For which keys a question is on its way.
        self._asked: Counter[str] = Counter()

    def sleeps_for(self, name: str) -> bool:
        """Whether somebody waits for a key, and nobody asks for it now."""
        return name in self.queues and not self._asked[name]

    def see_fronts(self) -> None:
        """Look at who is first in each queue."""
        for name in self.queues:
            front = self.queues.front(name)
            if front is not None and self._fronts.get(name, (None,))[0] is not front:
                self._fronts[name] = front, self.process.world.now

    def _see_turn(self, name: str, token: str) -> None:
        """See that nobody asks who has another one in front that is not silent."""
        now, queue = self.process.world.now, self.queues.get(name, ())
        asks = next((each for each in queue if _attempts_of(each)._token == token), None)
        if asks is None or _is_last(_attempts_of(asks), self.process.clock()):
            return
        front, since = self._fronts.get(name, (asks, now))
        if asks is front:
            self._fronts[name] = front, now
        elif front not in queue or now - since >= PATIENCE - 0.1:
            self._impatient.add(asks)
        elif asks not in self._impatient:
            # Who stood still itself may have looked at another one in front; and while somebody
            # stands still who leaves the queue, nobody knows yet since when the next is in front.
            leaves = self.queues._mutex._owner  # type: ignore[attr-defined]
            if current_thread().stalled_at < since and leaves is None:
                raise Violation(f"the front of the queue of {name} is overtaken")
            self._impatient.add(asks)

    def _see_pace(self, attempt: Attempt) -> None:
        """See that nobody asks too soon for what others wait for, or too late for what is quick."""
        now, token = self.process.world.now, attempt.token
        me = current_thread()
        left, by = self._left.get(attempt.name, (-1.0, me))
        is_behind = left <= me.began if by is me else left < me.began
        if attempt.bound and is_behind and now < left + 0.029:
            raise Violation(f"{attempt.key} is asked for again at once, although others wait")
        heard, held_for = self._heard.pop(token, (now, 0.0))
        is_calm = self.remote.plan.calm and not self.remote.wakes
        if is_calm and now - heard > held_for + 0.1:
            raise Violation(f"{attempt.key} was held for moments, and is not asked for in moments")

    def check_end(self) -> None:
        """See that what was not heard before its release may take nothing behind that."""
        for token in self._gone & self._unheard.keys():
            if self._let_go[token] < self._unheard[token] + 2.0:
                raise Violation("what is granted behind the last release is never given back")

    @property
    def is_listening(self) -> bool:
        """Whether the store calls out, and can."""
        return self.remote.wakes and not self.remote.is_down

    def _ask(self, what: str, bound: float, question: Callable[[], Any], busy: Any = None) -> Any:
        """Send a question, and wait for its answer."""
        world, network = self.process.world, self.remote.network
        me = current_thread()
        chance, delay = world.random.random, _delays(world, network)
        answers: list[Any] = []
        has_left = False

        def hear() -> None:
            if self.remote.is_down:
                return
            world.say(f"store   {what}{' (late)' * has_left}")
            answer = question()
            if chance() >= network.mute:
                world.at(world.now + delay(), lambda: tell(answer), self.process)

        def tell(answer: Any) -> None:
            if not has_left:
                answers.append(answer)
                me.was_woken = True
                me.resume(ticket)

        world.say(f"{me.name} asks {what}")
        is_cut = chance() < network.late
        is_cut_off = is_cut or self.remote.is_down
        silence = self.remote.plan.silence if what.startswith("acquire") else SILENCE
        patience = 0.002 if is_cut_off else min(bound + silence, durations.left())
        # From here on nobody else runs until this thread waits for its answer.
        ticket = me.ticket + 1
        if is_cut:
            world.at(world.now + 10 ** world.random.uniform(-2.5, 0.8), hear)
        elif busy is not None and chance() < network.busy:
            world.at(world.now + min(bound, delay()), lambda: tell(busy), self.process)
        elif chance() >= network.lost:
            world.at(world.now + delay(), hear)
        world.wait(patience)
        has_left = True
        if answers:
            return answers[0]
        world.say(f"{me.name} gives up {what}")
        raise BackendUnavailable("no answer", code="network_timeout")

    def _acquire(self, attempt: Attempt) -> Grant | Contended:
        by = "" if attempt.replace is None else " for its own" * (attempt.replace == attempt.token)
        what = f"acquire {attempt.key} {attempt.token[:4]} {attempt.ttl}{by}"
        self._see_turn(attempt.name, attempt.token)
        self._see_pace(attempt)
        began, token = self.process.world.now, attempt.token
        before, self._unheard[token] = self._unheard.get(token, -math.inf), began
        self._asked[attempt.name] += 1
        try:
            answer = self._ask(
                what, attempt.bound, lambda: self.remote.acquire(attempt), Contended(busy=True)
            )
        finally:
            self._asked[attempt.name] -= 1
            # Who takes a handed-over lease does not wait, and measures nothing.
            if not token.startswith(TAKING):
                self._slow = current_thread() if self.process.world.now - began > 0.5 else None
        self._unheard[token] = before
        front = self.queues.front(attempt.name)
        if answer.acquired_at and front is not None and _attempts_of(front)._token == token:
            held_for = self.remote.server._now() - answer.acquired_at
            self._heard[token] = self.process.world.now, held_for.total_seconds()
        is_own = self.remote.fences.get(attempt.key) == (answer.fence, str(attempt.token))
        # Who takes a lease over asks for the place of the one before, and of its own, in turn.
        is_own = is_own and attempt.replace in (None, attempt.token)
        if isinstance(answer, Contended) and is_own and not (answer.settled or answer.paused):
            raise Violation(f"an acquire of {attempt.key} is in its own way")
        said = f"granted {answer.fence}" if isinstance(answer, Grant) else "contended"
        self.process.world.say(f"{current_thread().name} {said} {attempt.key}")
        return answer  # type: ignore[no-any-return]

    def _extend(
        self, name: str, grant: Grant, ttl: float | None, *, bound: float
    ) -> Grant | Unknown | None:
        self.before_asking(grant.token, f"extend {grant.key}")
        return self._extend_asked(name, grant, ttl, bound)

    def _extend_asked(
        self, name: str, grant: Grant, ttl: float | None, bound: float
    ) -> Grant | Unknown | None:
        what = f"extend {grant.key} {grant.token[:4]} {ttl}"
        answer = self._ask(what, bound, lambda: self.remote.extend(name, grant, ttl), UNKNOWN)
        if answer is not UNKNOWN:
            self._failures[grant.token] = 0
        return answer  # type: ignore[no-any-return]

    def _extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        for _name, grant in named:
            self.before_asking(grant.token, "renewal")
            if self._failures[grant.token] == 3:
                raise Violation(f"{grant.key} is renewed behind three failures")
            self._failures[grant.token] += 1
        said = [f"{grant.key} {grant.token[:4]} {grant.ttl}" for _name, grant in named]
        # The parts of a store may answer on their own, as the nodes of a cluster do.
        if len(named) > 1 and self.process.world.random.random() < 0.5:
            return [*self._parts(named)]
        answer: Any = self._ask(
            f"renew {', '.join(said)}",
            1.0,
            lambda: [self.remote.extend(name, grant, grant.ttl) for name, grant in named],
        )
        for _name, grant in named:
            self._failures[grant.token] = 0
        return answer  # type: ignore[no-any-return]

    def _parts(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        found: list[Grant | Unknown | None] = []
        for name, grant in named:
            try:
                found.append(self._extend_asked(name, grant, grant.ttl, 0.0))
            except BackendUnavailable:
                found.append(UNKNOWN)
        return found

    def _release(
        self, name: str, grant: Grant, held: float | None, *, bound: float
    ) -> bool | Unknown:
        what = f"release {grant.key} {grant.token[:4]}{'' if held is None else f' held {held:g}'}"
        self._let_go[grant.token] = self.process.world.now
        answer = self._ask(
            what, bound, lambda: self.remote.release(name, grant, held), (UNKNOWN, False)
        )
        if answer[0] is not UNKNOWN:
            self._gone.add(grant.token)
        if answer[1]:
            if name not in self.queues:
                self._left[name] = self.process.world.now, current_thread()
            self.queues.note_wanted(name)
        return answer[0]  # type: ignore[no-any-return]

    def _note_waiter(self, name: str, *_: Any) -> str:
        if self._slow is current_thread() and not self.process.stood:
            raise Violation("a waiter is noted on a slow store, and asks nothing else meanwhile")
        return self._ask(f"note {name}", 0.0, lambda: "note")  # type: ignore[no-any-return]

    def _read(self, name: str) -> Record | None:
        return self._ask(f"read {name}", 0.0, lambda: self.remote.server._read(name))  # type: ignore[no-any-return]


def _attempts_of(turn: Turn) -> Attempts:
    """Return whose place in a queue it is."""
    return turn.ring.__self__._attempts  # type: ignore[attr-defined,no-any-return]


def _is_last(attempts: Attempts, now: float) -> bool:
    """Whether an attempt is the last one, which everybody makes."""
    wait = attempts.request.wait
    return wait is not None and now >= attempts._started + wait - 1e-6


def _delays(world: World, network: Network) -> Callable[[], float]:
    uniform = world.random.uniform

    def delay() -> float:
        if network.slow and world.random.random() < network.slow:
            return uniform(0.02, 1.0)
        return uniform(0.0005, 0.02)

    return delay
