"""The threads on which a backend serves asynchronous code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from ..database.connections import close_here

P = ParamSpec("P")
T = TypeVar("T")

#: Calls that run at once. Many, because the store is bounded by connections: a call that waits for
#: one must not keep another from being made.
THREADS = 32


class CallThreads:
    """Threads of a backend's own, where no other work delays a call; `prepare` begins each."""

    def __init__(self, name: str, prepare: Callable[[], None]):
        self._name = name
        self._prepare = prepare
        self._executor: tuple[int, ThreadPoolExecutor] | None = None

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call."""
        if self._executor is None or self._executor[0] != os.getpid():
            # A fork copies the pool's object and none of its threads.
            pool = ThreadPoolExecutor(
                THREADS, thread_name_prefix=self._name, initializer=self._prepare
            )
            self._executor = (os.getpid(), pool)
        return self._executor[1].submit(_run, call, *args, **kwargs)

    def end(self) -> None:
        """End the threads when they have done what was asked; another call starts new ones."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor[1].shutdown(wait=False)

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a call. Cancelling the await does not cancel the call."""
        running = asyncio.wrap_future(self.submit(call, *args, **kwargs))
        # Who is cancelled does not ask for its error, of which the event loop would complain.
        running.add_done_callback(_hear)
        await asyncio.wait((running,))
        return running.result()


def _run(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return call(*args, **kwargs)
    finally:
        # What a signal's receiver opened here, no end of a request would ever close.
        close_here()


def _hear(call: asyncio.Future[Any]) -> None:
    if not call.cancelled():
        call.exception()
