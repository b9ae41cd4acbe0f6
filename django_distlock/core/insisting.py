"""The algorithm of asking again about a lease of one's own, without clock, store or sleep."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from .acquiring import Attempt, Pause
from .errors import BackendUnavailable
from .records import UNKNOWN, Grant, Unknown

#: Seconds that one question waits inside the store: short, because it keeps a connection that
#: leases without such trouble need too.
PATIENCE = 0.25

#: What an extend or a release led to.
Answer = Grant | bool | Unknown | BackendUnavailable | None


def insisting(
    *, now: float, deadline: float, pauses: Iterator[float]
) -> Generator[Attempt | Pause, tuple[float, Answer], Answer]:
    """Ask until the store knows; return the last answer.

    `UNKNOWN` is asked again until the lease is over by the holder's own clock: whoever holds the
    row will let it go. A store that does not answer is asked once more, on a new connection. The
    same question twice does no harm: a release that did work is answered by "gone".

    Args:
        now: The holder's monotonic clock, in seconds.
        deadline: When the lease is over, by that clock.
        pauses: Seconds between two questions.
    """
    failed = False
    while True:
        now, answer = yield Attempt(bound=PATIENCE)
        if isinstance(answer, BackendUnavailable) and not failed:
            failed = True
            continue
        if answer is False and failed and now < deadline:
            # Gone before it could end by itself: the question that got no answer was heard.
            return True
        if answer is not UNKNOWN or now >= deadline:
            return answer
        yield Pause(min(next(pauses, 1.0), deadline - now))
