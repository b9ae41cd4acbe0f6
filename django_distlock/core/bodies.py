"""What decorators take: functions whose bodies run when they are called."""

from __future__ import annotations

import inspect
from typing import Any

from .errors import InvalidArgument, LockUsageError, shown


def require_function(function: object, decorator: str) -> None:
    """Check that a decorator was given a function.

    Args:
        decorator: What it is called.

    Raises:
        InvalidArgument: It was given something else, such as what another decorator has made.
        LockUsageError: A generator function.
    """
    if not inspect.isfunction(function):
        raise InvalidArgument(
            f"{decorator} decorates a function, not {shown(function)}: it is written with its"
            " arguments, directly above the function, below what makes a task of it."
        )
    refuse_generator(function)


def refuse_generator(function: Any) -> None:
    """Refuse a function whose body runs after the call has returned.

    Raises:
        LockUsageError: It is one.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise LockUsageError(
            f"{function.__qualname__} is a generator: its body runs when the call is over and"
            " the lock released. Use a with block inside of it.",
            code="unsupported",
        )
