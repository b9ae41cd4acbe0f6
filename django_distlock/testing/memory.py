"""Locks that are kept in memory for a test, and forgotten after it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from django.conf import settings as django_settings

from ..conf import DEFAULT_BACKENDS, aliases, backend_config
from ..core.bodies import signature_of, whole
from ..core.durations import Duration
from ..core.errors import InvalidArgument
from ..handler import lock_backends
from ..signals import lock_lost, lock_taken_over
from .others import assert_locked, assert_not_locked, expire, hold, steal
from .outages import lose_connection
from .timeline import Timeline, simulate_pause

if TYPE_CHECKING:
    import unittest

D = TypeVar("D", bound=Callable[..., Any])

MEMORY = "django_distlock.backends.memory.MemoryBackend"
_EVENTS = "django_distlock.process.event_log"


class Locks:
    """The functions of the same names, for the locks of a test's `memory_locks`."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline

    def advance(self, seconds: Duration) -> None:
        """Move time forward: see the function `advance`."""
        self._timeline.advance(seconds)

    assert_locked = staticmethod(assert_locked)
    assert_not_locked = staticmethod(assert_not_locked)
    expire = staticmethod(expire)
    hold = staticmethod(hold)
    lose_connection = staticmethod(lose_connection)
    simulate_pause = staticmethod(simulate_pause)
    steal = staticmethod(steal)


def memory_locks(
    *, attr_name: str | None = None, kwarg_name: str | None = None, **settings: Any
) -> MemoryLocks:
    """Keep locks in memory: for a block, a function, or each test of a class.

    Each alias of `DISTLOCK` becomes an empty memory backend, with the alias's settings for keys,
    ttl and waiting. After the block, or the test, its locks are gone, and the previous backends
    are back.

        with memory_locks(WAIT=0) as locks: ...

        @memory_locks()
        class CaptureTests(TestCase): ...

    Args:
        attr_name: On a class: the attribute of each test that is set to the `Locks`.
        kwarg_name: On a function: the argument that is given the `Locks`.
        settings: Settings that replace those of every alias: `TTL`, `WAIT`, …

    Raises:
        InvalidArgument: `BACKEND` or `OPTIONS` is given, which this function sets itself.
    """
    for name in ("BACKEND", "OPTIONS"):
        if name in settings:
            raise InvalidArgument(f"memory_locks() sets {name} itself.")
    return MemoryLocks(settings, attr_name, kwarg_name)


class MemoryLocks:
    """A context manager and decorator, made by `memory_locks()`."""

    def __init__(self, settings: dict[str, Any], attr_name: str | None, kwarg_name: str | None):
        self._settings = settings
        self._attr_name = attr_name
        self._kwarg_name = kwarg_name
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Locks:
        timeline = Timeline()
        with ExitStack() as entered:
            entered.enter_context(_in_memory(timeline, self._settings))
            self._entered.append(entered.pop_all())
        return Locks(timeline)

    def __exit__(self, *_: object) -> None:
        self._entered.pop().close()

    def __call__(self, decorated: D) -> D:
        """Keep locks in memory for each call of a function, or each test of a class.

        Raises:
            TypeError: The class is no `unittest.TestCase`.
            LockUsageError: The function's body would run after its call, as that of a generator.
        """
        import unittest  # Not at the top, as Django's test tools: a plugin of pytest imports us.

        if not isinstance(decorated, type):
            return self._around(decorated)
        if not issubclass(decorated, unittest.TestCase):
            raise TypeError(
                "Only subclasses of unittest.TestCase can be decorated with memory_locks()."
                " With pytest, use the fixture memory_locks."
            )
        self._set_up(decorated)
        return cast("D", decorated)

    def _around(self, function: D) -> D:
        function = cast("D", whole(function))

        def with_locks(kwargs: dict[str, Any], locks: Locks) -> dict[str, Any]:
            return {**kwargs, self._kwarg_name: locks} if self._kwarg_name else kwargs

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                with self as locks:
                    return await function(*args, **with_locks(kwargs, locks))

        else:

            @functools.wraps(function)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with self as locks:
                    return function(*args, **with_locks(kwargs, locks))

        if self._kwarg_name:
            # pytest would take the argument for a fixture.
            shown = signature_of(function)
            others = [each for each in shown.parameters.values() if each.name != self._kwarg_name]
            vars(wrapper)["__signature__"] = shown.replace(parameters=others)
        return cast("D", wrapper)

    def _set_up(self, case: type[unittest.TestCase]) -> None:
        original = case.setUp

        @functools.wraps(original)
        def set_up(test: unittest.TestCase) -> None:
            locks = test.enterContext(self)
            if self._attr_name:
                setattr(test, self._attr_name, locks)
            original(test)

        case.setUp = set_up  # type: ignore[assignment, method-assign]


@contextmanager
def _in_memory(timeline: Timeline, settings: dict[str, Any]) -> Iterator[None]:
    """Configure memory backends, and restore the previous backends afterwards."""
    from django.test.utils import override_settings

    configured = getattr(django_settings, "DISTLOCK", DEFAULT_BACKENDS)
    backend = {"BACKEND": MEMORY, "OPTIONS": {"clock": timeline}}
    said = {alias: configured[alias] for alias in aliases()}
    override = override_settings(
        DISTLOCK={
            # A setting that is no dictionary is refused when it is read, as usual.
            alias: {**each, **settings, **backend} if isinstance(each, Mapping) else each
            for alias, each in said.items()
        }
    )
    before = dict(lock_backends._backends)
    kept_events: list[bool] = []
    try:
        with override:
            for alias in aliases():
                backend_config(alias)
            timeline.begin()
            # Their events are not kept, because a test may not have access to a database.
            signals = (lock_lost, lock_taken_over)
            kept_events += [each.disconnect(dispatch_uid=_EVENTS) for each in signals]
            try:
                yield
            finally:
                timeline.end()
                for store in timeline.stores():
                    store.threads.end()
    finally:
        lock_backends._backends.update(before)
        if any(kept_events):
            from ..process import event_log

            lock_taken_over.connect(event_log.note_takeover, dispatch_uid=_EVENTS)
            lock_lost.connect(event_log.note_loss, dispatch_uid=_EVENTS)
