"""What decorators take: functions whose bodies have run when their calls, or awaits, are over."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from typing import Any, Final, NoReturn, ParamSpec, TypeVar, cast

from asgiref.sync import iscoroutinefunction

from .errors import InvalidArgument, LockUsageError, shown

P = ParamSpec("P")
T = TypeVar("T")

#: What runs a body after the call that returned it, and where the lock belongs instead.
_LATER: Final = {
    "a coroutine": "If it is awaited, decorate the coroutine function itself, or use async with"
    " inside it. If it is not awaited, run it with async_to_sync.",
    "an awaitable": "Decorate a coroutine function that awaits it, or use async with there.",
    "a generator": "Use a with block inside it.",
    "an asynchronous generator": "Use an async with block inside it.",
}


def refuse_function(key: object, decorator: str, arguments: str = "…") -> None:
    """Refuse a function where a decorator takes a key: it is written without parentheses.

    That is one of a module that has not got its name yet. Of functions inside of others, and of
    classes, nobody knows.
    """
    if not inspect.isfunction(key) or not key.__qualname__.isidentifier():
        return
    module = sys.modules.get(key.__module__)
    if module is not None and key.__qualname__ not in vars(module):
        raise InvalidArgument(
            f"{decorator} got the function {key.__qualname__} as its key. Is it written without"
            f" parentheses? Write @{decorator}({arguments})."
        )


def require_function(function: object, decorator: str) -> None:
    """Refuse what a decorator was given and is no function, such as what another one has made."""
    if not inspect.isfunction(function):
        raise InvalidArgument(
            f"{decorator} decorates a function, not {shown(function)}. Call it with its arguments,"
            " and place it directly above the function and below the task decorator."
        )


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, whose annotations may name what only a type checker has.

    Python 3.14 and newer evaluate them when they are asked for.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def whole(function: Callable[P, T], *, awaits: bool = True) -> Callable[P, T]:
    """Return a function like this one that never leaves its body to run behind the call.

    It is a coroutine function where this one is: then the body has run after the await. A call
    that returns what is still to be run, such as a coroutine, closes that and raises.

    Args:
        awaits: Whether a coroutine function is awaited by whoever calls it.

    Raises:
        InvalidArgument: It cannot be called.
        LockUsageError: It is seen that its body would run later; or it is a class.
    """
    if not callable(function):
        raise InvalidArgument(
            f"Only functions can be decorated, not {shown(function)}. Is the decorator written"
            " without parentheses?"
        )
    if inspect.isclass(function):
        raise LockUsageError(
            f"{function.__qualname__} is a class and cannot be decorated. Decorate its methods, or"
            " a function that creates its instances.",
            code="unsupported",
        )
    # By a name: a type checker would narrow the function to what it is asked for.
    is_awaited = iscoroutinefunction(function)
    if is_awaited and awaits:

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return _over(function, await cast("Any", function)(*args, **kwargs))

        return _like(function, awaited)

    for layer in _layers(function):
        for called in (layer, inspect.unwrap(type(layer).__call__)):
            _refuse_later(function, called)

    def plain(*args: P.args, **kwargs: P.kwargs) -> Any:
        return _over(function, function(*args, **kwargs))

    return _like(function, plain)


def _like(function: Callable[P, T], made: Callable[..., Any]) -> Callable[P, T]:
    made = functools.wraps(function)(made)
    made.__qualname__ = _name(function)
    return cast("Callable[P, T]", made)


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _layers(function: Any) -> Iterator[Any]:
    """Yield what is called, and what that wraps, from the outside in."""
    seen: list[object] = []
    while callable(function) and all(function is not each for each in seen):
        seen.append(function)
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        else:
            function = getattr(function, "__wrapped__", function)


def _refuse_later(function: object, called: Any) -> None:
    if iscoroutinefunction(called):
        _refuse(function, "a coroutine")
    if inspect.isgeneratorfunction(called):
        _refuse(function, "a generator")
    if inspect.isasyncgenfunction(called):
        _refuse(function, "an asynchronous generator")


def _over(function: object, result: Any) -> Any:
    """Return a result; or see to it that nothing runs on, and raise."""
    # Asked of the type: a lazy object would be made only to be looked at.
    kind = type(result)
    if issubclass(kind, AsyncGenerator):
        _refuse(function, "an asynchronous generator")
    # A coroutine that was never begun is closed without a warning.
    if issubclass(kind, Coroutine):
        result.close()
        _refuse(function, "a coroutine")
    if issubclass(kind, Generator):
        result.close()
        _refuse(function, "a generator")
    if hasattr(kind, "__await__"):
        if asyncio.isfuture(result):
            result.cancel()
        _refuse(function, "an awaitable")
    return result


def _refuse(function: object, what: str) -> NoReturn:
    raise LockUsageError(
        f"{_name(function)} returns {what}: its body would run after the call has returned and the"
        f" lock was released. {_LATER[what]}",
        code="unsupported",
    )
