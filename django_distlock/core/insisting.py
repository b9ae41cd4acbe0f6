"""The algorithm of repeating a request about one's own lease, without a clock or a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from .errors import BackendUnavailable
from .records import UNKNOWN, Grant, Unknown

#: Seconds that one request waits inside the store. Short, because it occupies a connection that
#: other leases need as well.
PATIENCE = 0.25

#: The answer to an extend or a release.
Answer = Grant | bool | Unknown | None
A = TypeVar("A", bound=Answer)


def insisting(
    question: Callable[[float], A],
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    deadline: float,
    pauses: Iterator[float],
) -> A:
    """Repeat a request until the store answers it; return the last answer.

    `UNKNOWN` means that a transaction has locked the record, which will end: the request is
    repeated until the lease is over by the holder's own clock. If there is no answer, the request
    is repeated once, on a new connection. That does no harm: if a release was carried out the first
    time, the second answer is "gone".

    Args:
        question: Makes the request; its argument is how many seconds that may wait in the store.
        clock: The holder's monotonic clock, in seconds.
        sleep: Sleeps between two requests.
        deadline: When the lease is over, by that clock.
        pauses: Seconds between two requests.

    Raises:
        BackendUnavailable: Two requests had no answer.
    """
    failed = False
    while True:
        try:
            answer = question(PATIENCE)
        except BackendUnavailable:
            if failed:
                raise
            failed = True
            continue
        now = clock()
        if answer is False and failed and now < deadline:
            # Gone before it could expire: the request without an answer was carried out.
            return True  # type: ignore[return-value]
        if answer is not UNKNOWN or now >= deadline:
            return answer
        sleep(min(next(pauses, 1.0), deadline - now))
