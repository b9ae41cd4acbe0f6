"""Questions to stores: each for a bounded time, and not too often, whoever wants to know."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from django.core.signals import setting_changed

from ...core.interruptions import pass_on
from ...core.threads import begun, in_child
from ...database.connections import close_here
from ...handler import lock_backends

T = TypeVar("T")


class Asking(Generic[T]):
    """A question whose answer is kept for a while.

    It is asked in a thread of its own: a store that hangs holds up that thread, and never whoever
    wants to know. Until it has an answer, nobody asks again.
    """

    def __init__(self, question: Callable[[], T]):
        self._question = question
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        self._asked: Future[T] | None = None
        self._asked_at = self._answered_at = 0.0

    def ask(self, max_age: float) -> tuple[Future[T], float]:
        """Return the future of an answer, at most `max_age` s old, and when it was asked for."""
        with self._mutex:
            asked, is_ours = self._asked, self._pid == os.getpid()
            is_new = time.monotonic() - self._answered_at <= max_age
            if asked is not None and is_ours and (is_new or not asked.done()):
                return asked, self._asked_at
            self._asked_at = time.monotonic()
            try:
                asked = begun(self._answer, "distlock-asking")
            except RuntimeError as error:
                # No thread is to be had now. The next question may get one.
                asked = Future()
                asked.set_exception(error)
            else:
                # Only now: nobody asks again while there is a question without an answer.
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
    """Ask every configured store the same at once.

    Args:
        max_age: Seconds since when an answer may be known.
        patience: Seconds to wait for each answer, from when it was asked for: a store that is
            silent is waited for once, whoever wants to know it meanwhile.

    Returns:
        The answers, by alias; None: none in time, or an error.
    """
    found: dict[str, T | None] = {}
    for alias, (each, asked_at) in begin_each(question, max_age=max_age).items():
        try:
            found[alias] = each.result(max(0.0, asked_at + patience - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - what cannot be known is not
            pass_on(error)
            found[alias] = None
    return found


def begin_each(
    question: Callable[[str], T], *, max_age: float
) -> Mapping[str, tuple[Future[T], float]]:
    """Begin to ask, and wait for no answer: see `ask_each` and `Asking.ask`."""
    found: dict[str, tuple[Future[T], float]] = {}
    for alias in lock_backends:
        # Two threads may make one each; one of them is kept.
        asking = _every.get((question, alias)) or _every.setdefault(
            (question, alias), Asking(partial(question, alias))
        )
        found[alias] = asking.ask(max_age)
    return found


def _forget(*, setting: str, **_: Any) -> None:
    if setting in ("DISTLOCK", "DATABASES"):
        _every.clear()


setting_changed.connect(_forget, dispatch_uid="django_distlock.contrib.metrics")
# The threads that ask are the parent's.
in_child(_every.clear)
