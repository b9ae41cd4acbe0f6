"""The attempts of one caller: one token, and what became of it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from django.dispatch import Signal

from ..backends.base import BaseLockBackend
from ..backends.queues import Turn
from ..core import budgets
from ..core.acquiring import Attempt, Steps, acquiring
from ..core.durations import MAX_BOUND
from ..core.errors import BackendUnavailable, LockError, LockNotAcquired, LockUsageError
from ..core.holders import Holder
from ..core.keys import new_token
from ..core.logs import log_fields
from ..core.pacing import SAFETY_SECONDS, Outcome, Pacing
from ..core.records import UNKNOWN, Contended, Grant, Record
from ..core.retry import Retry
from ..process import deferred_release
from ..process.deadlocks import Name, Wait, waits
from ..process.host import is_gone
from ..signals import lock_acquired, lock_not_acquired, lock_taken_over, tell

logger = logging.getLogger("django_distlock")

#: Seconds at most that a process leaves a key to others who waited for it.
MOST_REST = 1.0
#: Seconds without a question of the waiter in front, after which those behind it ask as well.
PATIENCE = SAFETY_SECONDS + 1.0

#: Seconds in which a key is asked for again where others are in the way in the store and nobody is
#: known to hold it: behind that it is trouble.
BUSY_SECONDS = 1.0

#: Seconds from which on an answer is a slow one, which whoever waited in vain is told.
SLOW = 1.0

#: Seconds of waiting before people can see who waits: shorter waits are not worth a row.
NOTE_AFTER = 1.0
#: Seconds that a note lives unless it is renewed, and when that is done.
NOTE_LIVES, NOTE_RENEWED_AT = 60.0, 30.0
#: Seconds to the next try where the store was too busy to take a note.
NOTE_TRIED_AGAIN = 5.0
#: How many attempts may take as long as a note does: it opens a connection, and a transaction.
NOTE_COSTS = 10

#: Called when a caller begins to wait, also in the thread of an event loop: nothing here may block.
when_waiting: list[Callable[[], None]] = []


class KeptHere(LockError):
    """The transactions that the caller works in keep the key: its lease is gone on with."""


@dataclass(slots=True)
class Answered:
    """What a store answered, asked at `sent_at` by its `monotonic`, about one of several keys."""

    token: str
    sent_at: float
    outcome: Outcome


@dataclass(slots=True, kw_only=True)
class Request:
    """What a caller asks for: a key, for how long, and how long to keep trying.

    Attributes:
        since: When the call began, by the store's `monotonic`; what came before the first attempt
            is a part of `wait`.
        home: Whose transactions the caller works in.
        inside: Tells what is held by the blocks that it cannot leave before, if it has to wait.
        passed: A release behind those transactions that nobody can go on with.
        permits: How many may hold the key at the same time; None: any number.
        answered: Gives what the store has answered already, once: it counts as the first attempt.
    """

    key: str
    ttl: float | None
    wait: float | None
    holder: Holder
    retry: Retry
    steal_if_dead: bool = False
    since: float | None = None
    home: int = 0
    inside: Callable[[], tuple[Name, ...]] = tuple
    passed: deferred_release.Deferred | None = None
    permits: int | None = 1
    answered: Callable[[], Answered | None] | None = None

    @property
    def shared(self) -> bool:
        """Whether others may hold the key at the same time."""
        return self.permits != 1


@dataclass(slots=True)
class Granted:
    """A grant, and by when its holder must have stopped.

    Attributes:
        deadline: By the store's `monotonic`. It counts from before the request was sent: the store
            cannot have granted earlier than that.
        unheard: Seconds of the shortest question with this token that got no answer: the store may
            hear it behind others.
        waited: Seconds from the first question to the grant.
    """

    grant: Grant
    deadline: float
    unheard: float = math.inf
    waited: float = 0.0


class Attempts:
    """What one caller does in the store until it is granted a key or gives up."""

    def __init__(self, backend: BaseLockBackend, request: Request):
        self.backend = backend
        self.request = request
        self._name: Name = backend.alias, request.key
        self.concluded = False
        now = self.backend.monotonic()
        self._started = now if request.since is None else request.since
        wait = math.inf if request.wait is None else request.wait
        # Of all that is asked of the store, by `time.monotonic`.
        self._end = time.monotonic() + self._started - now + wait + budgets.PATIENCE
        self._took = 0.0
        self._answered = None if request.answered is None else request.answered()
        self._token = new_token() if self._answered is None else self._answered.token
        self._sent_at = self._started
        # Whether an attempt got no answer: it may have been granted.
        self._unanswered = False
        self._granted: Grant | None = None
        self._in_the_way: Holder | None = None
        self._taken_from: Holder | None = None
        # Who limits retries counts on their pauses to pass.
        safety = SAFETY_SECONDS if request.retry.max_retries is None else None
        self._pacing = Pacing(request.retry.pauses(), safety)
        self._abandoned = False
        # Held by an attempt in flight, so that whoever gives up waits for it and undoes it.
        self._mutex = threading.Lock()
        self._turn: Turn | None = None
        self._wait: Wait | None = None
        self._note: str | None = None
        self._noted_at = -math.inf

    def steps(self) -> Steps:
        """Return the algorithm that drives these attempts."""
        request, queues = self.request, self.backend.queues
        # Nearly always nobody waits for any key.
        name = queues.name_of(request.key) if queues or queues.released_wanted else ""
        # What is granted already is not left to others.
        is_new = self._answered is None
        return acquiring(
            now=self._started,
            wait=request.wait,
            pacing=self._pacing,
            rest=self._rest(name) if is_new and name in queues.released_wanted else 0.0,
            others_wait=partial(queues.__contains__, name) if is_new else bool,
            is_gone=is_gone if request.steal_if_dead else None,
            margin=BUSY_SECONDS,
        )

    def attempt(self, step: Attempt) -> Outcome:
        """Ask the store once."""
        request = self.request
        if self._answered is None and (instead := self.instead) is not None:
            return instead
        with self._mutex:
            if self._abandoned:
                return Contended(busy=True)
            if self._answered is not None:
                return self._hear(self._answered)
            self._sent_at = self.backend.monotonic()
            if self._turn is not None:
                self._turn.asked_at = time.monotonic()
            # Until an answer has come: a signal's handler may raise before it is kept.
            unanswered, self._unanswered = self._unanswered, True
            try:
                outcome: Outcome = budgets.spend(
                    self._end,
                    self.backend.acquire,
                    request.key,
                    self._token,
                    request.ttl,
                    request.holder,
                    wanted=step.wanted,
                    # A grant whose reply was lost is in our own way: it is ours to take over.
                    replace=step.replace or (self._token if unanswered else None),
                    permits=request.permits,
                    bound=step.bound,
                )
            except BackendUnavailable as error:
                return error
            except LockError:
                self._unanswered = unanswered
                raise
            finally:
                self._took = self.backend.queues.took = self.backend.monotonic() - self._sent_at
            if isinstance(outcome, Grant):
                self._granted = outcome
                self._taken_from = self._in_the_way if step.replace else None
            elif isinstance(outcome, Contended):
                self._in_the_way = outcome.holder
            self._unanswered = unanswered
            return outcome

    def _hear(self, answered: Answered) -> Outcome:
        """Take the answer of a question that was asked before."""
        outcome = answered.outcome
        self._answered, self._sent_at = None, answered.sent_at
        self._unanswered = isinstance(outcome, BackendUnavailable)
        if isinstance(outcome, Grant):
            self._granted = outcome
        elif isinstance(outcome, Contended):
            self._in_the_way = outcome.holder
        return outcome

    def read(self) -> Record | None:
        """Return the record of the key; None: nobody holds it, or the store does not answer."""
        try:
            return budgets.spend(self._end, self.backend.read, self.request.key)
        except BackendUnavailable:
            return None

    # Waiting in this process

    def join(self, ring: Callable[[], bool]) -> bool:
        """Queue up; return whether somebody was in front."""
        # Kept first: interrupted behind this, it can leave whatever it has joined.
        self._turn = Turn(self.backend.queues.name_of(self.request.key), ring)
        self.backend.queues.join(self._turn)
        request = self.request
        self._wait = Wait(
            name=self._name,
            home=request.home,
            inside=request.inside(),
            until=math.inf if request.wait is None else self._started + request.wait,
            ring=ring,
            # Of some permits, one that is kept is not in the way: others end.
            is_for_one=request.permits in (1, None),
        )
        waits.begin(self._wait)
        for call in when_waiting:
            call()
        return not self.is_first

    @property
    def instead(self) -> LockError | None:
        """Return why there is nothing to wait for; None: there may be.

        All of it comes of the transactions that the caller works in, which keep keys until they
        end: this one, or others that somebody waits for.
        """
        request = self.request
        kept = deferred_release.waiting_release(self._name, request.home)
        if kept is not None and kept is not request.passed:
            return KeptHere(f"The transaction has locked {request.key!r}.", key=request.key)
        window = kept if kept is not None and kept.has_window and not kept.is_over else None
        # Of several permits, this may be granted another one.
        if window is not None and not window.owner.grant.shared:
            return self._once(window.owner.terms.holder)
        if self._wait is not None and self._wait.in_vain_for is not None:
            return self._in_vain(self._wait.in_vain_for)
        if request.wait is None:
            own = [] if window is not None else [self._name]
            other = deferred_release.kept_beside(own, request.home)
            return None if other is None else endless(request.key, other)
        return None

    @property
    def is_first(self) -> bool:
        """Whether it is this caller's turn to ask the store."""
        return self._turn is not None and self.backend.queues.is_first(self._turn)

    @property
    def queues(self) -> bool:
        """Whether to leave the questions to others in front."""
        return not self.is_first and self.instead is None

    @property
    def patience(self) -> float:
        """Seconds until the waiter in front has been silent for too long: it may be stuck."""
        front = self.backend.queues.front(self.backend.queues.name_of(self.request.key))
        return PATIENCE if front is None else PATIENCE - (time.monotonic() - front.asked_at)

    @property
    def may_be_noted(self) -> bool:
        """Whether to let people see by now, or still, that this caller waits."""
        now = self.backend.monotonic()
        due = now - self._started >= NOTE_AFTER and now - self._noted_at >= NOTE_RENEWED_AT
        return due and self._has_time_for_notes

    @property
    def _has_time_for_notes(self) -> bool:
        """Whether a note takes little of the time in which nobody else would be heard.

        By the last attempt of anybody here: who waits behind another one asks no more, and the
        first answer of all is a slow one.
        """
        left = self._end - budgets.PATIENCE - time.monotonic()
        return self.backend.queues.took * NOTE_COSTS <= min(left, SAFETY_SECONDS)

    def note(self) -> None:
        """Let people see that this caller waits."""
        self._noted_at = self.backend.monotonic()
        request = self.request
        # No decision rests on it, and it takes nothing of the time of the last attempt.
        with suppress(LockError):
            self._note = budgets.spend(
                self._end - budgets.PATIENCE,
                self.backend.waiters.note,
                *(request.key, request.holder, self._note_lives(), self._note),
            )
        if self._note is None:
            self._noted_at += NOTE_TRIED_AGAIN - NOTE_RENEWED_AT

    def leave(self) -> Callable[[], None] | None:
        """Wait no more; return what is left to do in the store, if anything."""
        if self._wait is not None:
            waits.end(self._wait)
        if self._turn is not None:
            self.backend.queues.leave(self._turn)
            self._turn = None
        return None if self._note is None else partial(self._drop, self._note)

    def _drop(self, note: str) -> None:
        drop = partial(self.backend.waiters.drop, self.request.key, note)
        self._note = None
        # In somebody's way, or on a slow store, it ends by itself.
        if self.backend.queues.took * NOTE_COSTS <= SAFETY_SECONDS:
            with suppress(LockError):
                budgets.spend(self._end, drop)

    # The end

    def give_back(self, grant: Grant) -> None:
        """Release a grant that nobody will use."""
        answered = not self._unanswered
        try:
            released = budgets.spend(self._end, self.backend.release, grant)
            answered = released is not UNKNOWN and answered
        except BackendUnavailable:
            answered = False
            logger.warning(
                "%r was granted but not used, and could not be released",
                grant.key,
                extra=log_fields(
                    "unused_grant", backend=self.backend.alias, key=grant.key, fence=grant.fence
                ),
            )
        if not answered:
            self._release_later()
        # A release that is still on its way must not end the next grant.
        self._token, self._unanswered = new_token(), False
        # Behind it: interrupted before, whoever cleans up gives it back.
        self._granted = None

    def conclude(self, outcome: Outcome) -> Granted:
        """Return the grant, or raise why there is none."""
        self.concluded = True
        request = self.request
        if isinstance(outcome, Grant):
            waited = self.backend.monotonic() - self._started
            self._tell(lock_acquired, fence=outcome.fence, holder=request.holder)
            if self._taken_from is not None:
                self._tell_takeover(outcome, self._taken_from)
            ttl = math.inf if outcome.ttl is None else outcome.ttl
            unheard = ttl if self._unanswered else math.inf
            return Granted(outcome, self._sent_at + ttl, unheard, waited)
        if self._unanswered:
            self._release_later()
        if isinstance(outcome, KeptHere):
            raise outcome
        if isinstance(outcome, BackendUnavailable) and time.monotonic() >= self._end:
            error: LockError = self._too_slow(outcome)
        elif isinstance(outcome, LockError):
            error = outcome
        elif outcome.is_unclear and outcome.holder is None:
            took = self.backend.monotonic() - self._started
            error = unclear(self.backend, request.key, took)
        else:
            error = refusal(request.key, request.wait, outcome, self._took)
        self._tell_refusal(error)
        raise error

    def fail(self, error: BaseException) -> None:
        """Leave nothing held, and tell."""
        turn, rest = self._turn, self.leave()
        if turn is not None:
            # Where it was interrupted, it may have left without waking the next.
            self.backend.queues.ring(turn.name)
        with self._mutex:
            self._abandoned = True
            if self._granted is not None:
                self.give_back(self._granted)
        if rest is not None:
            rest()
        if self._unanswered:
            self._release_later()
        if not self.concluded:
            self.concluded = True
            self._tell_refusal(error)

    def has_listeners(self) -> bool:
        """Whether somebody is told of the end."""
        sender = type(self.backend)
        told = [lock_acquired, lock_not_acquired]
        if self._taken_from is not None:
            told.append(lock_taken_over)
        return any(each.has_listeners(sender) for each in told)

    def _in_vain(self, kept: str) -> LockNotAcquired:
        key = self.request.key
        return LockNotAcquired(
            f"The key {key!r} was not granted: its holder waits for {kept!r}, which this context"
            " holds until a block or transaction ends. Acquire the keys in the same order"
            " everywhere, or outside atomic().",
            key=key,
            holder=self._in_the_way,
        )

    def _once(self, holder: Holder) -> LockNotAcquired:
        key = self.request.key
        return LockNotAcquired(
            f"The key {key!r} was not granted: this transaction keeps it until it ends, for a lock"
            " with hold or min_hold, which is granted at most once within its seconds.",
            key=key,
            holder=holder,
            settled=True,
        )

    def _too_slow(self, cause: BackendUnavailable) -> BackendUnavailable:
        key, took = self.request.key, self.backend.monotonic() - self._started
        error = BackendUnavailable(
            f"The lock store {self.backend.alias!r} answers too slowly. It did not report within"
            f" {took:.1f} s whether {key!r} is free.",
            key=key,
            code="network_timeout",
        )
        error.__cause__ = cause
        return error

    def _rest(self, name: str) -> float:
        """Return the seconds to leave a key to others, who waited when this process gave it up.

        Who released it would win each time: the others have yet to hear of it.
        """
        most = min(MOST_REST, next(self.request.retry.pauses(), 0.0))
        return self.backend.queues.rest(name, most)

    def _note_lives(self) -> float:
        if self.request.wait is None:
            return NOTE_LIVES
        left = self._started + self.request.wait - self.backend.monotonic()
        return min(NOTE_LIVES, max(1.0, left))

    def _release_later(self) -> None:
        request, now = self.request, datetime.now(UTC)
        grant = Grant(request.key, self._token, 1, request.ttl, now, None, shared=request.shared)
        release_unanswered(self.backend, grant)

    def _tell_takeover(self, grant: Grant, previous: Holder) -> None:
        key, alias, fence = grant.key, self.backend.alias, grant.fence
        logger.warning(
            "%r was taken over from %s, whose process has ended",
            key,
            previous.who,
            extra=log_fields("taken_over", backend=alias, key=key, fence=fence, holder=previous),
        )
        tell(
            lock_taken_over,
            type(self.backend),
            alias=alias,
            key=key,
            fence=fence,
            holder=self.request.holder,
            previous=previous,
            cause="its holder has died",
        )

    def _tell_refusal(self, error: BaseException) -> None:
        holder, wait = getattr(error, "holder", None), self.request.wait
        self._tell(lock_not_acquired, fence=None, holder=holder, cause=error, wait=wait)

    def _tell(self, signal: Signal, **facts: object) -> None:
        if signal.receivers:
            tell(
                signal,
                type(self.backend),
                alias=self.backend.alias,
                key=self.request.key,
                waited=self.backend.monotonic() - self._started,
                **facts,
            )


def release_unanswered(backend: BaseLockBackend, grant: Grant) -> None:
    """Release what an attempt without answer may have been granted, now and once more.

    A server that lost its client goes on waiting for its turn, and may grant behind the first
    release: as long as the bound for each of the two rows that it waits for.
    """
    deferred_release.later(partial(_release_unheard, backend, grant))
    release_once_more(backend, grant)


def release_once_more(backend: BaseLockBackend, grant: Grant) -> None:
    """Release what the store may grant to a token that is not used any more: see `Attempts`."""
    deferred_release.later(partial(_release_unheard, backend, grant), 2.5 * MAX_BOUND)


def _release_unheard(backend: BaseLockBackend, grant: Grant) -> None:
    try:
        backend.release(grant)
    except BackendUnavailable:
        logger.debug(
            "%r may stay held for its ttl: the store is unavailable",
            grant.key,
            extra=log_fields("release_failed", backend=backend.alias, key=grant.key),
        )


def endless(key: str, kept: str) -> LockUsageError:
    """Return why a transaction that keeps a key does not wait for another one for ever."""
    return LockUsageError(
        f"Waiting for {key!r} without a limit is refused: this transaction holds {kept!r} until it"
        f" ends, and the holder of {key!r} may be waiting for it. Set wait, or acquire the locks"
        " outside atomic().",
        key=key,
        code="unsupported",
    )


def unclear(backend: BaseLockBackend, key: str, took: float) -> BackendUnavailable:
    """Return what a caller is told where the store could not say in time who has a key."""
    return BackendUnavailable(
        f"The lock store {backend.alias!r} could not say within {took:.1f} s whether {key!r} is"
        " free. A transaction blocks it, for example by a table lock.",
        key=key,
        code="network_timeout",
    )


def refusal(key: str, wait: float | None, outcome: Contended, took: float = 0.0) -> LockNotAcquired:
    """Return what a caller is told who waited in vain; the last answer took so many seconds."""
    within = f"within {wait:g} s" if wait else "at once"
    waited = "by the last retry" if wait is None else within
    holder = outcome.holder
    if outcome.paused:
        why = "it is paused"
    elif holder is not None and outcome.settled and outcome.expires_in is not None:
        left = f"{outcome.expires_in:.1f} s"
        why = f"{holder.who} has finished, and the key stays held for another {left}"
    elif holder is not None:
        held_for = outcome.held_for or 0.0
        why = f"{holder.who} has held it for {held_for:.1f} s"
    else:
        why = "a transaction has locked it" if outcome.guarded else "it is held"
    slowly = f" The store answers slowly: this took {took:.1f} s." if took >= SLOW else ""
    return LockNotAcquired(
        f"The key {key!r} was not granted {waited}: {why}.{slowly}",
        key=key,
        holder=holder,
        held_for=outcome.held_for,
        expires_in=outcome.expires_in,
        settled=outcome.settled,
    )
