"""The validated arguments of `locked_task`, and the keys and locks they make for one call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from django.db.models import Model

from ...core.bodies import signature_of
from ...core.durations import MIN_TTL, Duration, seconds
from ...core.errors import InvalidArgument, shown
from ...core.keys import (
    BACKLOG_PREFIX,
    MAX_KEY_BYTES,
    RUNS_PREFIX,
    UNIQUE_PREFIX,
    KeyTemplate,
    normalize_key,
    own_key,
)
from ...core.retry import Retry
from ...core.sharing import Permits, validate_permits
from ...locks.policy import choice
from ..jobs import RETRY, JobLock, Limit, OnConflict, OnUnavailable, Rules, limits_of

#: What is done if the store is unavailable.
Unavailable: TypeAlias = OnUnavailable | Literal["retry"]
#: Makes a key: a template, a function of the call's arguments, or True for all of them.
KeyOf = str | Callable[..., str] | bool
#: Until when a unique task keeps others like it from being queued.
Until: TypeAlias = Literal["done", "start"]

#: What is done with a call if the backlog is full.
Full: TypeAlias = Literal["raise", "drop", "replace"]

#: Seconds to wait for the death of a process that was told to end.
GRACE: Final = 10.0
#: Seconds that a queued task keeps its unique key before it starts.
QUEUED_FOR: Final = 3600.0
#: The shortest debounce, in seconds.
SHORTEST: Final = 1.0
#: Seconds for which a finished delivery is remembered.
REDELIVERY_WINDOW: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call as the body gets them: with the task first, if it is bound."""

    task: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_bound: bool

    @property
    def own_args(self) -> tuple[Any, ...]:
        """The arguments that the caller gave."""
        return self.args[1:] if self.is_bound else self.args


@dataclass(frozen=True, slots=True)
class Keys:
    """How the keys of a task are made.

    Attributes:
        is_plain: Whether they are made without code of the project.
        is_sent: Whether a run makes them from the arguments in the message, as its sender does.
    """

    given: KeyOf
    make: Callable[[Call], str]
    is_plain: bool
    is_sent: bool = False

    @classmethod
    def of(cls, name: str, given: object, function: Callable[..., Any]) -> Keys:
        """Return the keys that an argument describes."""
        if given is True:
            return cls(True, _Canonical(function), is_plain=True)
        if isinstance(given, str):
            template = KeyTemplate.for_function(given, function)
            return cls(given, lambda call: template.render(call.args, dict(call.kwargs)), True)
        if callable(given):
            return cls(
                given, lambda call: normalize_key(given(*call.own_args, **call.kwargs)), False
            )
        raise InvalidArgument(
            f"{name} must be a template, a function that returns the key, True for all arguments,"
            f" or None, not {shown(given)}."
        )

    def of_runs(self) -> Keys:
        """Return the keys of the runs of tasks whose own keys are these."""
        given = RUNS_PREFIX + self.given if isinstance(self.given, str) else self.given
        return Keys(
            given, lambda call: own_key(RUNS_PREFIX + self.make(call)), self.is_plain, is_sent=True
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Which keys are held around a task's body, and what is done if they are not granted.

    Attributes:
        locks: The keys that a run holds, all or none, each with its permits (None: those of the
            rules). Empty: the run holds no lock.
        unique: The keys for which one task at a time is queued or running; None: not unique.
        until_start: Whether a task releases its unique key before its body begins.
        debounce: Seconds after the last call at which a task runs; 0: it is not debounced.
        max_queued: How many calls may wait for a key; 0: any number.
        rules: The lock and the other rules of jobs, except those for refusals.
        on_conflict: The given value; None: it depends on `acks_late`.
        on_unavailable: The same for an unavailable store.
        redelivery_window: See `REDELIVERY_WINDOW`; 0: none.
    """

    locks: tuple[tuple[Keys, Permits | None], ...]
    unique: Keys | None
    until_start: bool
    debounce: float
    max_queued: int
    on_full: Full
    rules: Rules
    on_conflict: OnConflict | None
    on_unavailable: Unavailable | None
    inherit: bool
    grace: float
    queued_for: float
    redelivery_window: float

    @classmethod
    def of(  # noqa: PLR0913 - each says one thing, by name
        cls,
        function: Callable[..., Any],
        *,
        lock: KeyOf | None,
        locks: Sequence[Limit] | None = None,
        unique: KeyOf | None = None,
        unique_until: Until | None = None,
        debounce: Duration | None = None,
        max_queued: int | None = None,
        on_full: Full | None = None,
        on_conflict: OnConflict | None = None,
        on_unavailable: Unavailable | None = None,
        max_wait: Duration = 3600,
        inherit: bool = False,
        grace: Duration = GRACE,
        unique_ttl: Duration = QUEUED_FOR,
        redelivery_window: Duration = REDELIVERY_WINDOW,
        retry: Retry | None = None,
        **options: Any,
    ) -> Terms:
        """Validate the arguments of `locked_task`, and return them as terms."""
        if not isinstance(inherit, bool):
            raise InvalidArgument(f"inherit must be True or False, not {shown(inherit)}.")
        if options.get("wait", 0) is None:
            raise InvalidArgument("wait must be limited, because a waiting task occupies a worker.")
        if lock is None and locks is None and unique is None:
            lock = True
        limits = [] if lock is None and locks is None else limits_of(lock, locks, options)
        if inherit and locks is not None:
            raise InvalidArgument("inherit works with one lock. Use lock= in place of locks=.")
        _check_until(unique, unique_until, debounce, on_conflict)
        _check_backlog(max_queued, on_full, bool(limits), debounce)
        until_start = unique_until == "start" or debounce is not None
        if on_unavailable is not None:
            choice("on_unavailable", on_unavailable, ("raise", "skip", "run", "retry"))
        rules = Rules.of(
            on_conflict="retry" if on_conflict is None else on_conflict,
            on_unavailable="raise",
            max_wait=max_wait,
            retry=RETRY if retry is None else retry,
            **options,
        )
        unique_keys = None if unique is None else Keys.of("unique", unique, function)
        keys = [(Keys.of("lock", each, function), permits) for each, permits in limits]
        if keys and (inherit or max_queued):
            keys[0] = replace(keys[0][0], is_sent=True), keys[0][1]
        if until_start and unique_keys is not None and not keys:
            keys = [(unique_keys.of_runs(), None)]
        for _, permits in keys:
            rules.with_permits(permits)  # This validates them.
        if not keys and (given := sorted({"permits", "shared"} & options.keys())):
            raise InvalidArgument(
                f"A unique key has one holder. {given[0]} applies to the lock of a run: name its"
                " key with lock= or locks=."
            )
        return cls(
            locks=tuple(keys),
            unique=unique_keys,
            until_start=until_start,
            debounce=0.0 if debounce is None else seconds(debounce, "debounce", minimum=SHORTEST),
            max_queued=max_queued or 0,
            on_full=on_full or "raise",
            rules=rules,
            on_conflict=on_conflict,
            on_unavailable=on_unavailable,
            inherit=inherit,
            grace=seconds(grace, "grace", minimum=MIN_TTL),
            queued_for=seconds(unique_ttl, "unique_ttl", minimum=MIN_TTL),
            redelivery_window=seconds(redelivery_window, "redelivery_window"),
        )

    @property
    def backend(self) -> str:
        """The alias of the lock backend."""
        return self.rules.lock.backend

    @property
    def lock(self) -> Keys | None:
        """The keys of the first lock; None: there is none."""
        return self.locks[0][0] if self.locks else None

    def locks_of(self, call: Call, sent: Call, task_id: str | None) -> list[JobLock]:
        """Return the locks of one run; `sent`: the call as its sender made it."""
        return [
            self.rules.with_permits(permits).lock_of(
                keys.make(sent if keys.is_sent else call), task_id, call.own_args, call.kwargs
            )
            for keys, permits in self.locks
        ]

    def unique_of(self, call: Call, task_id: str | None) -> JobLock | None:
        """Return the lock on the unique key of a call; None: the task is not unique."""
        if self.unique is None:
            return None
        key = own_key(UNIQUE_PREFIX + self.unique.make(call))
        return replace(self.unique_lock, key=key, task_id=task_id)

    def place_of(self, call: Call, task_id: str | None) -> JobLock:
        """Return the lock for the place of one call in the backlog of its first key."""
        key = own_key(BACKLOG_PREFIX + self.locks[0][0].make(call))
        return replace(self.unique_lock, key=key, task_id=task_id, permits=self.max_queued)

    @property
    def unique_lock(self) -> JobLock:
        """The lock for unique keys and places, without key and task id."""
        lock = replace(
            self.rules.lock, wait=0.0, steal_if_dead=False, permits=1, shared=False, _filled=True
        )
        # `hold` and `min_hold` apply to the lock of the run.
        return lock if self.lock is None else replace(lock, hold=False, min_hold=0.0)


def _check_until(unique: object, until: object, debounce: object, on_conflict: object) -> None:
    if until is not None:
        choice("unique_until", until, ("done", "start"))
    if unique is None and (until is not None or debounce is not None):
        name = "unique_until" if debounce is None else "debounce"
        raise InvalidArgument(f"{name} requires unique=, which names the key of the task.")
    if debounce is not None and until == "done":
        raise InvalidArgument(
            'debounce requires unique_until="start", so that a call during a run becomes the last'
            " one."
        )
    refused = [] if until != "start" and debounce is None else ["skip"]
    refused += [] if debounce is None else ["run"]
    if on_conflict in refused:
        name = 'unique_until="start"' if debounce is None else "debounce"
        raise InvalidArgument(
            f"{name} cannot be combined with on_conflict={on_conflict!r}: a call during a run must"
            ' run after it. Use "retry", the default.'
        )


def _check_backlog(most: object, on_full: object, is_locked: bool, debounce: object) -> None:
    if on_full is not None:
        choice("on_full", on_full, ("raise", "drop", "replace"))
    if most is None:
        if on_full is not None:
            raise InvalidArgument("on_full requires max_queued=, the size of a full backlog.")
        return
    validate_permits(most, "max_queued")
    if not is_locked:
        raise InvalidArgument("max_queued requires lock= or locks=, the key that calls wait for.")
    if debounce is not None:
        raise InvalidArgument(
            "max_queued cannot be combined with debounce: of debounced calls one waits."
        )


def terms_of(task: Any) -> Terms | None:
    """Return the terms of a task; None: it is not locked."""
    found = getattr(getattr(task, "run", None), "distlock_terms", None)
    return found if isinstance(found, Terms) else None


class _Canonical:
    """Makes a key from a task's name and all of its arguments."""

    def __init__(self, function: Callable[..., Any]):
        self._signature = signature_of(function)

    def __call__(self, call: Call) -> str:
        bound = self._signature.bind(*call.args, **call.kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        if call.is_bound:
            first = next(iter(arguments))
            task = arguments.pop(first)
            if isinstance(task, tuple):  # The task is the first of `*args`.
                arguments[first] = task[1:]
        try:
            # As in the message, JSON turns all names into texts, which sort in one order.
            plain = json.loads(json.dumps(arguments, default=_plain))
            text = json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
            key = f"{call.task}:{text}"
            encoded = key.encode()
        except InvalidArgument:
            raise
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"The arguments of {call.task} have no canonical text ({error}): make the key by a"
                " template or a function."
            ) from error
        if len(encoded) + len(UNIQUE_PREFIX.encode()) <= MAX_KEY_BYTES:
            return normalize_key(key)
        return f"{call.task[:200]}:{hashlib.sha256(encoded).hexdigest()}"


def _plain(value: object) -> str:
    # Two rows may have the same text.
    if isinstance(value, (set, frozenset, bytes, Model)) or type(value).__str__ is object.__str__:
        raise InvalidArgument(
            f"{shown(value)} has no canonical text: make the key by a template or a function."
        )
    return str(value)
