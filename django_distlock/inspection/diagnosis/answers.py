"""How a store answers: whether, how fast, by which clock, and whether it wakes its waiters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, NamedTuple

from ...backends.base import BaseLockBackend
from ...backends.listening import Listener, NoWakeUps
from ...core.errors import LockError
from ...core.keys import new_token
from ...core.records import Contended
from ...host import current_holder
from .connected import Used, used_connections
from .findings import Level, Notes
from .kinds import redis_servers

#: The key that is taken and given back: always the same, because its fence counter stays.
KEY: Final = "distlock-doctor"
#: Seconds after which it is free where this process died meanwhile.
TTL: Final = 10.0
#: Round trips that are measured.
TRIPS: Final = 5
#: Seconds that a round trip takes at most where nothing is wrong.
SLOW: Final = 0.1
#: Seconds by which two clocks may differ.
APART: Final = 1.0
#: The part of a server's connections that may be used.
NEARLY: Final = 0.8

_REMEDY: Final = "Look at what its server says, and whether the migrations are applied there."
_DOWN: Final = (
    "Look whether its server runs, can be reached from this host, and is the one that is written"
    " to."
)
_SLOW: Final = f"{_DOWN} If it runs, look whether somebody has the tables of locks locked."
#: By the code of the error.
_REMEDIES: Final = {
    "auth_failed": "Look at the user's name, its password, and what it may do there.",
    "network_timeout": _SLOW,
    "rate_limited": "Look at the server's limits of connections and of memory.",
    "service_unavailable": _DOWN,
}


class Offset(NamedTuple):
    """How far a store's clock is ahead of this host's, in seconds, and how sure that is."""

    seconds: float
    uncertainty: float

    def __str__(self) -> str:
        return f"{self.seconds:+.3f} s ± {self.uncertainty:.3f} s"


def ask(store: BaseLockBackend, notes: Notes, *, writes: bool) -> bool:
    """Note how a store answers; return whether locks can be taken, as far as that was tried.

    Raises:
        LockError: It does not answer.
    """
    store.clock()  # It connects, which would count for a round trip.
    trips = [_timed(store.clock) for _ in range(TRIPS)]
    _note_speed(notes, statistics.median(seconds for seconds, _answer in trips))
    _note_clocks(store, notes)
    works = _note_writing(store, notes, writes=writes)
    _note_wake_ups(store, notes)
    _note_connections(notes, used_connections(store))
    return works


def remedy(error: LockError) -> str:
    """Return what to do about a store that gave this error."""
    return _REMEDIES.get(error.code, _REMEDY)


def host_clock() -> datetime:
    """Return the time by this host's clock."""
    return datetime.now(UTC)


def _timed(question: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    answer = question()
    return time.monotonic() - began, answer


def _note_speed(notes: Notes, median: float) -> None:
    text = f"a round trip takes {median * 1000:.1f} ms (median of {TRIPS})"
    if median <= SLOW:
        notes.look("store", f"answers; {text}")
        return
    notes.find(
        "D009",
        "store",
        f"{text}, more than {SLOW * 1000:g} ms",
        "Every lock takes two or more of them. Look at the way to the server, and at its load.",
    )


# Clocks


def _note_clocks(store: BaseLockBackend, notes: Notes) -> None:
    if store.time_authority == "client":
        notes.look("clock", "leases end by this host's own", skipped=True)
        return
    best: dict[str, Offset] = {}
    for _ in range(TRIPS):
        for server, offset in _offsets(store).items():
            # The fastest answer tells most.
            if server not in best or offset.uncertainty < best[server].uncertainty:
                best[server] = offset
    # Named where there are several.
    shown = {f"{server}: " if len(best) > 1 else "": offset for server, offset in best.items()}
    wrong = {
        server: offset
        for server, offset in shown.items()
        if abs(offset.seconds) - offset.uncertainty > APART
    }
    if not wrong:
        notes.look("clock", _listed(shown) + " against this host")
        return
    notes.find(
        "D001",
        "clock",
        f"the store's clock is off against this host's by {_listed(wrong)}",
        "Find out which of the two is wrong (chronyc tracking, timedatectl), and let it be slewed,"
        " not stepped: a store's clock that steps forward ends leases that are held.",
    )


def _offsets(store: BaseLockBackend) -> Mapping[str, Offset]:
    servers = redis_servers(store)
    before = host_clock()
    seconds, told = _timed(store.clock if servers is None else partial(servers, "TIME"))
    clocks = {"": told} if servers is None else {name: _read(each) for name, each in told.items()}
    # They were read at some time in between.
    middle = before + timedelta(seconds=seconds / 2)
    return {
        name: Offset((clock - middle).total_seconds(), seconds / 2)
        for name, clock in clocks.items()
    }


def _read(answer: Sequence[Any]) -> datetime:
    seconds, microseconds = map(int, answer)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=microseconds)


def _listed(offsets: Mapping[str, Offset]) -> str:
    return ", ".join(f"{server}{offset}" for server, offset in offsets.items())


# Writing


def _note_writing(store: BaseLockBackend, notes: Notes, *, writes: bool) -> bool:
    """Take a lock and give it back; return whether that worked, or was not tried."""
    if not writes:
        notes.look("locking", "not tried", skipped=True)
        return True
    try:
        seconds, text = _timed(lambda: _locked(store))
    except LockError as error:
        # It has told its clock, so it is there: a replica, or a user who may only read.
        text = f"answers, and no lock can be taken: {error}"
        notes.find("D011", "locking", text, remedy(error), level=Level.ERROR)
        return False
    notes.look("locking", text or f"a lock was taken and given back in {seconds * 1000:.1f} ms")
    return True


def _locked(store: BaseLockBackend) -> str:
    answer = store.acquire(KEY, new_token(), TTL, current_holder())
    if isinstance(answer, Contended):
        return f"answers; the key {KEY!r} is not free right now, and that is all that was tried"
    store.release(answer)
    return ""


# Wake-ups and connections


def _note_wake_ups(store: BaseLockBackend, notes: Notes) -> None:
    if not store.supports_wakeups:
        notes.look("wake-ups", "this store has none: waiters ask again and again", skipped=True)
        return
    listener = getattr(store, "_listener", None)
    if not isinstance(listener, Listener):
        notes.look("wake-ups", "this store does not tell how they are heard", skipped=True)
        return
    try:
        listener._subscribe().close()
    except NoWakeUps as error:
        text, hint = str(error), "Until then waiters ask again and again, which takes longer."
        notes.find("D008", "wake-ups", text, hint)
    except Exception as error:  # noqa: BLE001 - a driver may raise anything
        notes.find(
            "D008",
            "wake-ups",
            f"the connection on which wake-ups are heard cannot be opened: {error}",
            "Look at the alias in OPTIONS['listen_using'], and at the server's limits.",
        )
    else:
        notes.look("wake-ups", "a connection that hears them was opened")


def _note_connections(notes: Notes, found: list[Used]) -> None:
    many = [each for each in found if each.number >= each.most * NEARLY]
    if many:
        notes.find(
            "D010",
            "connections",
            f"nearly all connections are used: {', '.join(map(str, many))}",
            "Find out who holds them, put a pooler in between, or raise the limit. A process that"
            " gets none takes no lock, and renews none.",
        )
    elif found:
        notes.look("connections", ", ".join(map(str, found)))
