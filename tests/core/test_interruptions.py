"""What the handler of a signal raises is told from the errors of the code that it breaks off."""

from __future__ import annotations

import ctypes
import signal
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from django_distlock.core.interruptions import pass_on


class TimeIsUp(Exception):
    """What a time limit raises."""


class TimeLimitExceeded(BaseException):
    """What dramatiq raises in the thread of a task."""


@pytest.fixture(params=[signal.SIGUSR1, signal.SIGINT, None], ids=["handler", "ctrl-c", "thread"])
def strike(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Give a call that is broken off: by a handler in Python, by Python's own, by a thread."""
    if request.param is None:
        yield _as_another_thread_raises
        return

    def handler(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp

    # Whoever runs the tests in the background has Ctrl-C ignored.
    handlers = {signal.SIGUSR1: handler, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, each) for number, each in handlers.items()}
    yield lambda: signal.raise_signal(request.param)
    for number, each in before.items():
        signal.signal(number, each)


def _as_another_thread_raises() -> None:
    here, what = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(TimeLimitExceeded)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(here, what)


STRUCK = (TimeIsUp, KeyboardInterrupt, TimeLimitExceeded)


def call(work: Callable[[], object]) -> None:
    """Call the code of others."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - what it is, is the question
        pass_on(error)


def test_interruption_is_raised_again(strike: Callable[[], None]) -> None:
    """It says nothing about the code that it has met."""
    with pytest.raises(STRUCK):
        call(strike)


def test_interruption_is_found_behind_an_error(strike: Callable[[], None]) -> None:
    """A driver that is broken off raises its own error, and so may who cleans up behind it."""

    def broken_off() -> None:
        try:
            strike()
        finally:
            try:
                raise OSError
            except OSError:
                raise ValueError from None

    with pytest.raises(STRUCK):
        call(broken_off)


def test_interruption_is_found_behind_errors_of_several(strike: Callable[[], None]) -> None:
    """A receiver translates the error of a driver that was broken off."""

    def driver() -> None:
        try:
            strike()
        finally:
            raise OSError

    def receiver() -> None:
        try:
            driver()
        except OSError:
            raise ValueError from None

    with pytest.raises(STRUCK):
        call(receiver)


def test_interruption_that_was_handled_before_is_left_alone(strike: Callable[[], None]) -> None:
    """The error is one of the code's own."""
    try:
        strike()
    except STRUCK:
        call(lambda: int("x"))


@pytest.mark.parametrize("kind", [TimeIsUp, SystemExit, GeneratorExit, CancelledError])
def test_error_of_the_code_is_no_interruption(kind: type[BaseException]) -> None:
    """Nor is what code raises to end itself, or a coroutine."""

    def fail() -> None:
        raise kind

    call(fail)
