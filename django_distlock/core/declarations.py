"""What is declared to be locked: notes about decorated functions, which live as long as those."""

from __future__ import annotations

import enum
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakKeyDictionary


class Kind(enum.StrEnum):
    """What is locked."""

    FUNCTION = "function"
    VIEW = "view"
    CELERY_LOCK = "celery_lock"
    CELERY_UNIQUE = "celery_unique"
    DJANGO_TASK = "django_task"
    SCHEDULE = "schedule"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a decorator was told.

    It refers to nothing that could lead back to what is decorated, which would then never die.

    Attributes:
        key: The template; or, where code of the project makes the key, what that is called.
        lock: The `Lock`, but for its key, and for `permits` where that is a function.
        on_conflict: What is done if somebody else has the key, in the words of the decorator.
        is_template: Whether `key` is one.
        scope: The value of a schedule's `RunScope`; None: it is no schedule.
        every: Seconds between two ticks of a schedule; None: it does not say.
    """

    kind: Kind
    key: str
    lock: Any
    on_conflict: str
    is_template: bool = True
    scope: str | None = None
    every: float | None = None

    def __post_init__(self) -> None:
        if callable(getattr(self.lock, "permits", None)):
            object.__setattr__(self, "lock", replace(self.lock, permits=1))

    @classmethod
    def of(
        cls, kind: Kind, key: str | bool | Callable[..., str], lock: Any, on_conflict: str
    ) -> Declaration:
        """Return a declaration whose key is a template, a function's, or True: of all arguments."""
        if isinstance(key, str):
            return cls(kind, key, lock, on_conflict)
        if isinstance(key, bool):
            return cls(kind, "all arguments", lock, on_conflict, is_template=False)
        return cls(kind, f"callable {_named(key)}", lock, on_conflict, is_template=False)


def head_of(template: str) -> tuple[str, bool]:
    """Return what a template begins with, before its first field, and whether that is all of it."""
    head = ""
    for literal, name, _, _ in string.Formatter().parse(template):
        head += literal
        if name is not None:
            return head, False
    return head, True


class _Declared(WeakKeyDictionary[object, tuple[Declaration, ...]]):
    """Knows when it was last added to."""

    #: Another object behind each addition.
    version: object = None

    def __setitem__(self, made: object, found: tuple[Declaration, ...]) -> None:
        super().__setitem__(made, found)
        self.version = object()


#: What is decorated, for as long as anybody can call it, and the keys that are declared for it.
declared: Final = _Declared()

#: Runs a step, named by a text, that may raise whatever code of the project raises.
Attempt = Callable[[str, Callable[[], object]], object]

#: Who imports what a worker would import, by a name: each attempts its steps.
finders: Final[dict[str, Callable[[Attempt], None]]] = {}


def declarations() -> Iterator[tuple[object, Declaration]]:
    """Yield all that is declared at the moment, with what is decorated."""
    # Other threads may decorate meanwhile: only a list of references can be walked through then.
    for reference in declared.keyrefs():
        made = reference()
        for each in declared.get(made, ()) if made is not None else ():
            yield made, each


def _named(key: Callable[..., str]) -> str:
    # A partial has no name of its own.
    function = getattr(key, "func", key)
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return f"{function.__module__}.{function.__qualname__}"
