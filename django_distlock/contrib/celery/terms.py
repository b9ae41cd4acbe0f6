"""What a task's decorator was told."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from ...core.durations import MIN_TTL, Duration, seconds
from ...core.errors import InvalidArgument, shown
from ...core.keys import MAX_KEY_BYTES, RUNS_PREFIX, UNIQUE_PREFIX, KeyTemplate, own_key
from ...core.retry import Retry
from ...policy import choice
from ..jobs import RETRY, JobLock, OnConflict, OnUnavailable, Rules

#: What is done if the store does not answer.
Unavailable: TypeAlias = OnUnavailable | Literal["retry"]
#: Makes a key: a template, a function of the call's arguments, or True for all of them.
KeyOf = str | Callable[..., str] | bool
#: Until when a task keeps others like it from being queued.
Until: TypeAlias = Literal["done", "start"]

#: Seconds for which a process is watched that was told to end.
GRACE: Final = 10.0
#: Seconds that a queued task keeps its unique key without being started.
QUEUED_FOR: Final = 3600.0
#: Seconds of the shortest debounce.
SHORTEST: Final = 1.0
#: Seconds for which a delivery is known to be finished.
REDELIVERY_WINDOW: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, as the body gets them.

    Attributes:
        task: The task's name.
        args: With the task itself in front, if it is bound.
    """

    task: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_bound: bool

    @property
    def own_args(self) -> tuple[Any, ...]:
        """What the caller gave."""
        return self.args[1:] if self.is_bound else self.args


@dataclass(frozen=True, slots=True)
class Keys:
    """How the keys of a task are made.

    Attributes:
        given: See `KeyOf`.
        make: Makes the key of a call.
        is_plain: Whether no code of the project runs for that.
    """

    given: KeyOf
    make: Callable[[Call], str]
    is_plain: bool

    @classmethod
    def of(cls, name: str, given: object, function: Callable[..., Any]) -> Keys:
        """Return the keys that an argument describes.

        Raises:
            InvalidArgument: It is none of what it may be, or the template breaks a rule.
        """
        if given is True:
            return cls(True, _Canonical(function), is_plain=True)
        if isinstance(given, str):
            template = KeyTemplate.for_function(given, function)
            return cls(given, lambda call: template.render(call.args, dict(call.kwargs)), True)
        if callable(given):
            return cls(given, lambda call: given(*call.own_args, **call.kwargs), False)
        raise InvalidArgument(
            f"{name} is a template, a function that returns the key, True for all arguments, or"
            f" None, not {shown(given)}."
        )

    def of_runs(self) -> Keys:
        """Return the keys of the runs of tasks whose own keys are these."""
        given = RUNS_PREFIX + self.given if isinstance(self.given, str) else self.given
        return Keys(given, lambda call: own_key(RUNS_PREFIX + self.make(call)), self.is_plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is held around a task's body, and what is done where it cannot be.

    Attributes:
        lock: The keys of which one run at a time has each; None: none.
        unique: The keys of which one task at a time is queued or running; None: none.
        until_start: Whether a task gives its unique key back before its body begins.
        debounce: Seconds behind its last call in which a task is run; 0: it is not debounced.
        rules: The lock, and what jobs have in common; what it says of refusals is not asked.
        on_conflict: What was asked for; None: what `acks_late` suggests.
        on_unavailable: The same where the store does not answer.
        inherit: Whether a task runs under the lease of the one that sent it.
        grace: See `GRACE`.
        queued_for: See `QUEUED_FOR`.
        redelivery_window: See `REDELIVERY_WINDOW`; 0: none.
    """

    lock: Keys | None
    unique: Keys | None
    until_start: bool
    debounce: float
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
        unique: KeyOf | None = None,
        unique_until: Until | None = None,
        debounce: Duration | None = None,
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
        """Return terms that were checked; the arguments are those of `locked_task`."""
        if not isinstance(inherit, bool):
            raise InvalidArgument(f"inherit is True or False, not {shown(inherit)}.")
        if options.get("wait", 0) is None:
            raise InvalidArgument("wait has an end: a task that waits takes a worker's place.")
        if lock is None and unique is None:
            lock = True
        _check_until(unique, unique_until, debounce, on_conflict)
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
        keys = None if lock is None else Keys.of("lock", lock, function)
        if until_start and unique_keys is not None and keys is None:
            keys = unique_keys.of_runs()
        return cls(
            lock=keys,
            unique=unique_keys,
            until_start=until_start,
            debounce=0.0 if debounce is None else seconds(debounce, "debounce", minimum=SHORTEST),
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

    def lock_of(self, call: Call, task_id: str | None) -> JobLock | None:
        """Return the lock of one run."""
        if self.lock is None:
            return None
        return self.rules.lock_of(self.lock.make(call), task_id)

    def unique_of(self, call: Call, task_id: str | None) -> JobLock | None:
        """Return what one run holds so that no other one like it is queued."""
        if self.unique is None:
            return None
        key = own_key(UNIQUE_PREFIX + self.unique.make(call))
        return replace(self.unique_lock, key=key, task_id=task_id)

    @property
    def unique_lock(self) -> JobLock:
        """What keeps others from being queued, but for key and job."""
        # Between two runs its holder is no process that could be dead. What a dead run leaves is
        # ended by its parent, or taken over by the next delivery of its task.
        lock = replace(self.rules.lock, wait=0.0, steal_if_dead=False)
        # To keep the key taken behind the run is asked of the lock.
        return lock if self.lock is None else replace(lock, hold=False, min_hold=0.0)


def _check_until(unique: object, until: object, debounce: object, on_conflict: object) -> None:
    if until is not None:
        choice("unique_until", until, ("done", "start"))
    if unique is None and (until is not None or debounce is not None):
        name = "unique_until" if debounce is None else "debounce"
        raise InvalidArgument(f"{name} is about tasks with one key: say which, by unique=.")
    if debounce is not None and until == "done":
        raise InvalidArgument(
            'debounce goes with unique_until="start": a call that comes while the task runs is the'
            " last one."
        )
    refused = [] if until != "start" and debounce is None else ["skip"]
    refused += [] if debounce is None else ["run"]
    if on_conflict in refused:
        name = 'unique_until="start"' if debounce is None else "debounce"
        raise InvalidArgument(
            f"{name} does not go with on_conflict={on_conflict!r}: what was called while the task"
            ' runs is to run behind it. Use "retry", which it does by itself.'
        )


def terms_of(task: Any) -> Terms | None:
    """Return the terms of a task; None: it is not locked."""
    found = getattr(getattr(task, "run", None), "distlock_terms", None)
    return found if isinstance(found, Terms) else None


class _Canonical:
    """Makes a key of a task's name and of all of its arguments."""

    def __init__(self, function: Callable[..., Any]):
        self._signature = inspect.signature(function)

    def __call__(self, call: Call) -> str:
        bound = self._signature.bind(*call.args, **call.kwargs)
        bound.apply_defaults()
        names = list(bound.arguments)[1 if call.is_bound else 0 :]
        arguments = {name: bound.arguments[name] for name in names}
        text = json.dumps(
            arguments, sort_keys=True, default=_plain, ensure_ascii=False, separators=(",", ":")
        )
        key = f"{call.task}:{text}"
        if len(key.encode()) + len(UNIQUE_PREFIX.encode()) <= MAX_KEY_BYTES:
            return key
        return f"{call.task[:200]}:{hashlib.sha256(key.encode()).hexdigest()}"


def _plain(value: object) -> str:
    if isinstance(value, (set, frozenset, bytes)) or type(value).__str__ is object.__str__:
        raise InvalidArgument(
            f"{shown(value)} has no canonical text: make the key by a template or a function."
        )
    return str(value)
