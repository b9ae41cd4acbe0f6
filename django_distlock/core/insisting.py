"""The algorithm of asking again about a lease of one's own, without clock, store or sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from .errors import BackendUnavailable
from .records import UNKNOWN, Grant, Unknown

#: Seconds that one question waits inside the store: short, because it keeps a connection that
#: leases without such trouble need too.
PATIENCE = 0.25

#: What an extend or a release led to.
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
    """Ask until the store knows; return the last answer.

    `UNKNOWN` is asked again until the lease is over by the holder's own clock: whoever holds the
    row will let it go. A store that does not answer is asked once more, on a new connection. The
    same question twice does no harm: a release that did work is answered by "gone".

    Args:
        question: Is given the seconds that it may wait inside the store.
        clock: The holder's monotonic clock, in seconds.
        sleep: Is given the seconds between two questions.
        deadline: When the lease is over, by that clock.

    Raises:
        BackendUnavailable: The store is unavailable, twice.
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
            # Gone before it could end by itself: the question that got no answer was heard.
            return True  # type: ignore[return-value]
        if answer is not UNKNOWN or now >= deadline:
            return answer
        sleep(min(next(pauses, 1.0), deadline - now))
