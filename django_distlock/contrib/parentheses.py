"""`@locked_task` that is written without its parentheses: the function is taken for the key."""

from __future__ import annotations

import inspect
import sys
from typing import Any, Final

from ..core.errors import InvalidArgument

_HINT: Final = "Is it written without parentheses? Write @locked_task(…)."


def refuse_function(key: object) -> None:
    """Refuse the function of a task where a key is expected, if the two can be told apart.

    A function of a module that makes keys has its name there by now, and one that is being
    decorated has not. Of functions inside of others, and of classes, nobody knows: `only_function`
    says so when the task runs.

    Raises:
        InvalidArgument: It is no key.
    """
    if not inspect.isfunction(key) or not key.__qualname__.isidentifier():
        return
    module = sys.modules.get(key.__module__)
    if module is not None and key.__qualname__ not in vars(module):
        raise InvalidArgument(f"locked_task has got {key.__qualname__} for a key. {_HINT}")


def only_function(key: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a decorator is called with, unless a task is being run.

    Args:
        key: What the decorator was given.
        args: What it is called with.
        kwargs: The same.

    Raises:
        InvalidArgument: These are the arguments of a task.
    """
    if len(args) == 1 and not kwargs and (callable(args[0]) or not callable(key)):
        return args[0]
    raise InvalidArgument(f"locked_task wraps a function, not the arguments of a call. {_HINT}")
