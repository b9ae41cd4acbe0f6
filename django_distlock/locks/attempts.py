"""The attempts of one caller to acquire a key, with one token, and the outcome."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from django.dispatch import Signal

from ..backends.base import BaseLockBackend
from ..backends.queues import Turn
from ..core import durations
from ..core.acquiring import Attempt, Steps, acquiring
from ..core.durations import MAX_BOUND
from ..core.errors import BackendUnavailable, LockError, LockNotAcquired, LockUsageError
from ..core.keys import new_token
from ..core.logs import log_fields
from ..core.pacing import SAFETY_SECONDS, Outcome, Pacing
from ..core.records import UNKNOWN, Contended, Grant, Holder, Record
from ..core.retry import Retry
from ..process import deferred_release
from ..process.deadlocks import Name, Wait, waits
from ..process.host import is_gone
from ..signals import lock_acquired, lock_not_acquired, lock_taken_over, tell

logger = logging.getLogger("django_distlock")

#: The longest time, in seconds, for which a process leaves a released key to others who waited.
MOST_REST = 1.0
#: Seconds between two looks whether the holder is gone, by a caller that may take its key over.
STEAL_SECONDS = 1.0
#: Seconds without an attempt by the first waiter of a queue, after which the others ask as well.
PATIENCE = SAFETY_SECONDS + 1.0

#: Seconds of further attempts if the record is locked in the store but nobody is known to hold the
#: key. After that, the store counts as unavailable.
BUSY_SECONDS = 1.0

#: Seconds from which on an answer counts as slow; the error of a wait in vain mentions it.
SLOW = 1.0

#: Seconds of waiting after which a waiter is noted in the store, where people can see it.
NOTE_AFTER = 1.0
#: Seconds until a note expires, and until it is renewed.
NOTE_LIVES, NOTE_RENEWED_AT = 60.0, 30.0
#: Seconds until the next try if the store was too busy for a note.
NOTE_TRIED_AGAIN = 5.0
#: A note takes as long as so many attempts: it opens a connection and a transaction.
NOTE_COSTS = 10

#: If more calls wait for the thread of a backend, what may be granted without an answer is left to
#: expire: a silent store takes seconds for each call.
MOST_UNHEARD = 1000

#: Called when a caller begins to wait, also in the thread of an event loop: these must not block.
when_waiting: list[Callable[[], None]] = []


class KeptHere(LockError):
    """The caller's own transaction keeps the key: its lease can be taken over."""


@dataclass(slots=True)
class Answered:
    """The answer about one of several keys; `sent_at`: when it was asked for (`monotonic`)."""

    token: str
    sent_at: float
    outcome: Outcome


@dataclass(slots=True, kw_only=True)
class Request:
    """What a caller asks for: a key, for how long, and how long to keep trying.

    Attributes:
        since: When the call began, by the store's `monotonic`; `wait` counts from here.
        home: The thread whose transactions the caller works in.
        inside: Returns the keys that the caller's outer blocks hold while it waits, and whether
            they share them.
        passed: A deferred release on this key that was looked at already.
        permits: How many may hold the key at the same time; None: any number.
        answered: Returns the answer to an earlier request, once: it replaces the first attempt.
    """

    key: str
    ttl: float | None
    wait: float | None
    holder: Holder
    retry: Retry
    steal_if_dead: bool = False
    since: float | None = None
    home: int = 0
    inside: Callable[[], Mapping[Name, bool]] = dict
    passed: deferred_release.Deferred | None = None
    permits: int | None = 1
    answered: Callable[[], Answered | None] | None = None

    @property
    def shared(self) -> bool:
        """Whether others may hold the key at the same time."""
        return self.permits != 1


@dataclass(slots=True)
class Granted:
    """A grant, and the deadline by which its holder must stop.

    Attributes:
        deadline: By the store's `monotonic`. It counts from before the request was sent, because
            the store cannot have granted the key earlier than that.
        unheard: The shortest ttl of a request with this token that got no answer. The store may
            still carry that request out, after later ones.
        waited: Seconds from the first request to the grant.
    """

    grant: Grant
    deadline: float
    unheard: float = math.inf
    waited: float = 0.0


class Attempts:
    """Makes the requests of one caller until it is granted a key or gives up."""

    def __init__(self, backend: BaseLockBackend, request: Request):
        self.backend = backend
        self.request = request
        self._name: Name = backend.alias, request.key
        self.concluded = False
        now = self.backend.monotonic()
        self._started = now if request.since is None else request.since
        wait = math.inf if request.wait is None else request.wait
        # The end of the time for all requests, by `time.monotonic`.
        self._end = time.monotonic() + self._started - now + wait + durations.PATIENCE
        self._took = 0.0
        self._answered = None if request.answered is None else request.answered()
        self._token = new_token() if self._answered is None else self._answered.token
        self._sent_at = self._started
        # Whether an attempt got no answer, and so may have been granted.
        self._unanswered = False
        self._granted: Grant | None = None
        self._in_the_way: Holder | None = None
        self._taken_from: Holder | None = None
        # With `max_retries`, no safety attempt shortens the pauses.
        safety = None
        if request.retry.max_retries is None:
            # No wake-up tells of a death.
            safety = STEAL_SECONDS if request.steal_if_dead else SAFETY_SECONDS
        self._pacing = Pacing(request.retry.pauses(), safety)
        self._abandoned = False
        # Held during an attempt, so that `fail` waits for it and releases what it was granted.
        self._mutex = threading.Lock()
        self._turn: Turn | None = None
        self._wait: Wait | None = None
        # Whether nobody is granted the key shared because this caller waits to hold it alone.
        self._has_closed = False
        self._note: str | None = None
        self._noted_at = -math.inf

    def steps(self) -> Steps:
        """Return the algorithm that decides when to make which attempt."""
        request, queues = self.request, self.backend.queues
        # Nearly always nobody waits for any key.
        name = queues.name_of(request.key) if queues or queues.released_wanted else ""
        # A key that may be granted already is not left to others.
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
        """Make one attempt."""
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
            # True until there is an answer: a signal's handler may raise before it is stored.
            unanswered, self._unanswered = self._unanswered, True
            try:
                outcome: Outcome = durations.spend(
                    self._end,
                    self.backend.acquire,
                    request.key,
                    self._token,
                    request.ttl,
                    request.holder,
                    wanted=step.wanted,
                    # An earlier grant whose answer was lost would be in the way: replace it.
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
                if step.wanted and outcome.shared and not request.shared:
                    self._note_closed()
            self._unanswered = unanswered
            return outcome

    def _note_closed(self) -> None:
        """Note that the key is closed to those who want to share it, while this caller waits."""
        self._has_closed = True
        if self._wait is not None and not self._wait.closes:
            waits.closed(self._wait)

    def _hear(self, answered: Answered) -> Outcome:
        """Use the answer to an earlier request as the outcome of this attempt."""
        outcome = answered.outcome
        self._answered, self._sent_at = None, answered.sent_at
        self._unanswered = isinstance(outcome, BackendUnavailable)
        if isinstance(outcome, Grant):
            self._granted = outcome
        elif isinstance(outcome, Contended):
            self._in_the_way = outcome.holder
        return outcome

    def read(self) -> Record | None:
        """Return the record of the key; None: nobody holds it, or the store is unavailable."""
        try:
            return durations.spend(self._end, self.backend.read, self.request.key)
        except BackendUnavailable:
            return None

    # Waiting in this process

    def join(self, ring: Callable[[], bool]) -> bool:
        """Join the queue of the key in this process; return whether somebody was in front."""
        # Stored first, so that an interruption after this can leave the queue.
        self._turn = Turn(self.backend.queues.name_of(self.request.key), ring)
        self.backend.queues.join(self._turn)
        request = self.request
        self._wait = Wait(
            name=self._name,
            home=request.home,
            inside=request.inside(),
            until=math.inf if request.wait is None else self._started + request.wait,
            ring=ring,
            # With several permits, one that a transaction keeps does not block the others.
            is_for_one=request.permits in (1, None),
            shared=request.permits is None,
            closes=self._has_closed,
        )
        waits.begin(self._wait)
        for call in when_waiting:
            call()
        return not self.is_first

    @property
    def instead(self) -> LockError | None:
        """Return why waiting is pointless; None: it is not.

        Each reason is a key that the caller's own transactions keep until they end: this key, or
        one that its holder waits for.
        """
        request = self.request
        kept = deferred_release.waiting_release(self._name, request.home)
        if kept is not None and kept is not request.passed:
            return KeptHere(f"The transaction has locked {request.key!r}.", key=request.key)
        window = kept if kept is not None and kept.has_window and not kept.is_over else None
        # With several permits, another one may be granted.
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
        """Whether this caller is the first in the queue, and so makes attempts."""
        return self._turn is not None and self.backend.queues.is_first(self._turn)

    @property
    def queues(self) -> bool:
        """Whether to leave the attempts to the first in the queue."""
        return not self.is_first and self.instead is None

    @property
    def patience(self) -> float:
        """Seconds until the first waiter has made no attempt for too long: it may be stuck."""
        front = self.backend.queues.front(self.backend.queues.name_of(self.request.key))
        return PATIENCE if front is None else PATIENCE - (time.monotonic() - front.asked_at)

    @property
    def may_be_noted(self) -> bool:
        """Whether it is time to write, or renew, the note that this caller waits."""
        now = self.backend.monotonic()
        due = now - self._started >= NOTE_AFTER and now - self._noted_at >= NOTE_RENEWED_AT
        return due and self._has_time_for_notes

    @property
    def _has_time_for_notes(self) -> bool:
        """Whether a note would take little of the time in which this queue makes no attempt.

        Estimated from the last attempt in this process, because this caller may have made none.
        """
        left = self._end - durations.PATIENCE - time.monotonic()
        return self.backend.queues.took * NOTE_COSTS <= min(left, SAFETY_SECONDS)

    def note(self) -> None:
        """Write or renew the note that this caller waits."""
        self._noted_at = self.backend.monotonic()
        request = self.request
        # No decision depends on the note, and it must not use the time of the last attempt.
        with suppress(LockError):
            self._note = durations.spend(
                self._end - durations.PATIENCE,
                self.backend.waiters.note,
                *(request.key, request.holder, self._note_lives(), self._note),
            )
        if self._note is None:
            self._noted_at += NOTE_TRIED_AGAIN - NOTE_RENEWED_AT

    def leave(self) -> Callable[[], None] | None:
        """Leave the queue; return what is left to do in the store, if anything."""
        if self._wait is not None:
            waits.end(self._wait)
        if self._turn is not None:
            self.backend.queues.leave(self._turn)
            self._turn = None
        if self._granted is not None:
            self._has_closed = False
        return None if self._note is None and not self._has_closed else self._clear_up

    def _clear_up(self) -> None:
        """Take back what this caller has left in the store while it waited."""
        key, waiters, calls = self.request.key, self.backend.waiters, []
        if self._note is not None:
            calls.append(partial(waiters.drop, key, self._note))
        if self._has_closed:
            calls.append(partial(waiters.give_up, key))
        self._note, self._has_closed = None, False
        # On a slow or unavailable store, it is left to expire.
        if self.backend.queues.took * NOTE_COSTS <= SAFETY_SECONDS:
            for call in calls:
                with suppress(LockError):
                    durations.spend(self._end, call)

    # The end

    def give_back(self, grant: Grant) -> None:
        """Release a grant that will not be used."""
        answered = not self._unanswered
        try:
            released = durations.spend(self._end, self.backend.release, grant)
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
        # A new token: a release that is still on its way must not end the next grant.
        self._token, self._unanswered = new_token(), False
        # Last, so that after an interruption `fail` releases the grant again.
        self._granted = None

    def conclude(self, outcome: Outcome) -> Granted:
        """Return the grant, or raise the error that says why there is none."""
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
            error = refusal(request.key, request.wait, outcome, self._took, shared=request.shared)
        self._tell_refusal(error)
        raise error

    def fail(self, error: BaseException) -> None:
        """After an exception: leave the queue, release any grant, and report the refusal."""
        turn, rest = self._turn, self.leave()
        if turn is not None:
            # If `leave` was interrupted, it may not have woken the next waiter.
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
        """Whether a signal that `conclude` may send has receivers."""
        sender = type(self.backend)
        told = [lock_acquired, lock_not_acquired]
        if self._taken_from is not None:
            told.append(lock_taken_over)
        return any(each.has_listeners(sender) for each in told)

    def _in_vain(self, kept: str) -> LockNotAcquired:
        key = self.request.key
        what = f"{kept!r}, which this context holds until a block or transaction ends"
        if kept == key:
            what = "a caller that waits to share it, behind this one"
        return LockNotAcquired(
            f"The key {key!r} was not granted: its holder waits for {what}. Acquire the keys in the"
            " same order everywhere, or outside atomic().",
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
        """Return for how many seconds to leave the key to others who waited at its release.

        The process that released it would win every time, before the others were woken.
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
    """Release what an attempt without an answer may have been granted, now and once more.

    A server that has lost its client may still wait for two rows, for the bound each, and then
    grant the key after the first release.
    """
    _give_back(backend, grant)
    release_once_more(backend, grant)


def release_once_more(backend: BaseLockBackend, grant: Grant) -> None:
    """Release once more, later, what the store may still grant to a token that was given up."""
    _give_back(backend, grant, 2.5 * MAX_BOUND)


def _give_back(backend: BaseLockBackend, grant: Grant, seconds: float = 0.0) -> None:
    def apart() -> None:
        work = partial(_release_unheard, backend, grant)
        # A grant without expiry would stay for ever.
        most = math.inf if grant.ttl is None else MOST_UNHEARD
        if not deferred_release.apart(backend.alias, work, most):
            _log_unheard(backend, grant)

    deferred_release.later(apart, seconds)


def _release_unheard(backend: BaseLockBackend, grant: Grant) -> None:
    try:
        backend.release(grant)
    except BackendUnavailable:
        _log_unheard(backend, grant)


def _log_unheard(backend: BaseLockBackend, grant: Grant) -> None:
    logger.debug(
        "%r may stay held for its ttl: the store is unavailable",
        grant.key,
        extra=log_fields("release_failed", backend=backend.alias, key=grant.key),
    )


def endless(key: str, kept: str) -> LockUsageError:
    """Return the error for waiting without a limit while a transaction keeps another key."""
    return LockUsageError(
        f"Waiting for {key!r} without a limit is refused: this transaction holds {kept!r} until it"
        f" ends, and the holder of {key!r} may be waiting for it. Set wait, or acquire the locks"
        " outside atomic().",
        key=key,
        code="unsupported",
    )


def unclear(backend: BaseLockBackend, key: str, took: float) -> BackendUnavailable:
    """Return the error for a store that could not say in time who holds a key."""
    return BackendUnavailable(
        f"The lock store {backend.alias!r} could not say within {took:.1f} s whether {key!r} is"
        " free. A transaction blocks it, for example by a table lock.",
        key=key,
        code="network_timeout",
    )


def refusal(
    key: str, wait: float | None, outcome: Contended, took: float = 0.0, *, shared: bool = False
) -> LockNotAcquired:
    """Return the error for a wait in vain.

    Args:
        took: The seconds of the last answer.
        shared: Whether the key was asked for beside others.
    """
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
    elif outcome.guarded:
        why = "a transaction has locked it"
    elif shared and not outcome.busy:
        why = "somebody waits to hold it alone"
    else:
        why = "it is held"
    slowly = f" The store answers slowly: this took {took:.1f} s." if took >= SLOW else ""
    return LockNotAcquired(
        f"The key {key!r} was not granted {waited}: {why}.{slowly}",
        key=key,
        holder=holder,
        held_for=outcome.held_for,
        expires_in=outcome.expires_in,
        settled=outcome.settled,
    )
