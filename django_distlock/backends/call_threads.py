"""The threads in which a backend serves async code."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from ..core.threads import begun
from ..database.connections import close_here

P = ParamSpec("P")
T = TypeVar("T")

#: How many calls run at once. Many, because calls may wait for a connection, and must not keep
#: others from running.
THREADS = 32


class CallThreads:
    """The threads of one backend, so that no other work delays its calls.

    Args:
        name: The prefix of the threads' names.
        prepare: Called first in each thread.
    """

    def __init__(self, name: str, prepare: Callable[[], None]):
        self._name = name
        self._prepare = prepare
        self._executor: tuple[int, ThreadPoolExecutor] | None = None

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start a call."""
        if self._executor is None or self._executor[0] != os.getpid():
            # A fork copies the pool but none of its threads.
            pool = ThreadPoolExecutor(
                THREADS, thread_name_prefix=self._name, initializer=self._prepare
            )
            self._executor = (os.getpid(), pool)
        work = partial(_run, call, *args, **kwargs)
        try:
            return self._executor[1].submit(work)
        except RuntimeError as error:
            if "cannot schedule" not in str(error):
                raise  # No thread could be started: another one does it all the same.
            # The main thread has ended, and pools take nothing more. Other threads go on.
            return begun(lambda: (self._prepare(), work())[1], self._name)

    def end(self) -> None:
        """End the threads after their current calls; the next call starts new ones."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor[1].shutdown(wait=False)

    async def run(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Await a call. Cancelling the await does not cancel the call."""
        running = asyncio.wrap_future(self.submit(call, *args, **kwargs))
        # After a cancellation nobody retrieves the error, which the event loop would log.
        running.add_done_callback(_hear)
        await asyncio.wait((running,))
        return running.result()


def _run(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return call(*args, **kwargs)
    finally:
        # No end of a request closes the connections that a receiver opens in this thread.
        close_here()


def _hear(call: asyncio.Future[Any]) -> None:
    if not call.cancelled():
        call.exception()
