"""Queries of all stores at the same time: a store that hangs holds up no caller for long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Any, Final, Generic, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from ..core.errors import LockError
from ..core.interruptions import pass_on
from ..core.threads import begun, in_child
from ..database.connections import close_here
from ..handler import lock_backends
from .listing import Failure

#: Seconds that a query may take before it counts as unanswered.
PATIENCE: Final = 2.0

T = TypeVar("T")


class Asking(Generic[T]):
    """A query whose answer is kept for a while.

    It runs in a thread of its own, so a store that hangs blocks that thread and no caller. It is
    not repeated until it is answered.
    """

    def __init__(self, question: Callable[[], T]):
        self._question = question
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        self._asked: Future[T] | None = None
        self._asked_at = self._answered_at = 0.0

    def ask(self, max_age: float) -> tuple[Future[T], float]:
        """Return the future of an answer, at most `max_age` s old, and when its query began."""
        with self._mutex:
            asked, is_ours = self._asked, self._pid == os.getpid()
            is_new = time.monotonic() - self._answered_at <= max_age
            if asked is not None and is_ours and (is_new or not asked.done()):
                return asked, self._asked_at
            self._asked_at = time.monotonic()
            try:
                asked = begun(self._answer, "distlock-asking")
            except RuntimeError as error:
                # No thread can be started now. The next query may get one.
                asked = Future()
                asked.set_exception(error)
            else:
                # Set only for a query that runs: callers do not repeat it until it is answered.
                self._asked, self._pid = asked, os.getpid()
        return asked, self._asked_at

    def _answer(self) -> T:
        try:
            return self._question()
        finally:
            self._answered_at = time.monotonic()
            close_here()


_every: dict[tuple[object, str], Asking[Any]] = {}


def ask_each(
    question: Callable[[str], T], *, max_age: float, patience: float
) -> dict[str, T | None]:
    """Send the same query to every configured store at the same time.

    Args:
        max_age: Seconds for which an answer is kept.
        patience: Seconds to wait for each answer. They begin with the query, so further callers do
            not wait for a silent store once more.

    Returns:
        The answers, by alias; None: no answer in time, or an error.
    """
    found: dict[str, T | None] = {}
    for alias, (each, asked_at) in begin_each(question, max_age=max_age).items():
        try:
            found[alias] = each.result(max(0.0, asked_at + patience - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - the answer is unknown then
            pass_on(error)
            found[alias] = None
    return found


def begin_each(
    question: Callable[[str], T], *, max_age: float
) -> Mapping[str, tuple[Future[T], float]]:
    """Begin the queries of `ask_each` without waiting for answers; see `Asking.ask`."""
    found: dict[str, tuple[Future[T], float]] = {}
    for alias in lock_backends:
        # If two threads make one at the same time, one of the two is kept.
        asking = _every.get((question, alias)) or _every.setdefault(
            (question, alias), Asking(partial(question, alias))
        )
        found[alias] = asking.ask(max_age)
    return found


def silent() -> dict[str, Failure]:
    """Return the stores that do not tell the time within `PATIENCE` seconds for all of them.

    Whoever then asks the others one after another waits for none that is down.
    """
    found: dict[str, Failure] = {}
    for alias, (each, asked_at) in begin_each(_time, max_age=0.0).items():
        try:
            each.result(max(0.0, asked_at + PATIENCE - time.monotonic()))
        except TimeoutError:
            message = f"The lock store {alias!r} did not answer within {PATIENCE:g} s."
            found[alias] = Failure(backend=alias, code="network_timeout", message=message)
        except (LockError, ImproperlyConfigured) as error:
            found[alias] = Failure.of(alias, error)
        except Exception as error:  # noqa: BLE001 - it was not asked, or has a bug
            pass_on(error)
            message = f"The lock store {alias!r} could not be asked: {error}"
            found[alias] = Failure(backend=alias, code="internal", message=message)
    return found


def _time(alias: str) -> datetime:
    return lock_backends[alias].clock()


def _forget(*, setting: str, **_: Any) -> None:
    if setting in ("DISTLOCK", "DATABASES"):
        _every.clear()


setting_changed.connect(_forget, dispatch_uid="django_distlock.inspection.asking")
# A child process does not have the threads of its parent's queries.
in_child(_every.clear)
