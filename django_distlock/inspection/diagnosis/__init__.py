"""Finds what is wrong with the locks of a project: in settings, in stores, and in their data.

Functions that query a store raise `LockError` if it is unavailable, which becomes a finding.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from ...backends.base import BaseLockBackend
from ...core.durations import whole_number
from ...core.errors import BackendUnavailable, LockError
from ...handler import lock_backends
from ..listing import chosen
from .checked import begun, run
from .data_loss import accept_loss, has_lost, look_for_loss
from .findings import ADDRESSES, Look, Mark, Notes, told
from .kept import scan
from .responses import ask, remedy

__all__ = [
    "ADDRESSES",
    "Diagnosis",
    "Look",
    "Mark",
    "accept_loss",
    "diagnose",
    "has_lost",
    "look_for_loss",
    "told",
]

#: The most locks, and the most waiters, of a backend that are looked at.
SCANNED: Final = 100_000
#: The most of them that a caller can ask for.
MOST_SCANNED: Final = 10**9
#: Seconds of a diagnosis at most, so that a server that hangs does not delay the others' results.
PATIENCE: Final = 45.0
#: The part of `PATIENCE` for stores, which are queried in parallel. System checks get the rest.
FOR_STORES: Final = 2 / 3

#: What each store is examined for, in this order.
_QUESTIONS: Final = (
    "store", "clock", "locking", "wake-ups", "connections", "locks", "orphan waiters", "pauses",
)  # fmt: skip

_MISTAKE: Final = "This is a bug in the backend or in distlock_doctor. Please report it."


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was looked at, and what was found.

    Attributes:
        findings: Messages as of system checks, whose `obj` is a `Subject`; the worst first.
        silenced: Findings that the project has silenced (`SILENCED_SYSTEM_CHECKS`).
        looked_at: All that was looked at, by backend in the order of the settings; first what is
            about the project.
        silent: The backends whose stores did not answer.
    """

    findings: tuple[checks.CheckMessage, ...]
    silenced: tuple[checks.CheckMessage, ...]
    looked_at: tuple[Look, ...]
    silent: tuple[str, ...]

    def has(self, level: int) -> bool:
        """Whether something was found that is as bad as this, or worse."""
        return any(each.level >= level for each in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            "findings": [told(each) for each in self.findings],
            "silenced": [told(each) for each in self.silenced],
            "looked_at": [asdict(each) for each in self.looked_at],
            "silent": list(self.silent),
        }


def diagnose(
    backends: Collection[str] | None = None, *, writes: bool = True, limit: int = SCANNED
) -> Diagnosis:
    """Look for what is wrong, or soon will be. A store that is down is a finding.

    With `writes`, a lock is acquired and immediately released: always of the same key, whose fence
    counter stays. A Redis also gets a mark then, to be recognised again. Nothing else is changed.
    The diagnosis opens connections, and takes a while.

    Args:
        backends: Aliases in `DISTLOCK`; None: all of them.
        writes: Whether to acquire that lock, and to set that mark.
        limit: The most locks, and the most waiters, of a backend to look at, from 1 to 10**9.

    Raises:
        InvalidArgument: An argument breaks a rule.
        InvalidLockBackend: There is no such alias.
    """
    whole_number(limit, "limit", MOST_SCANNED)
    notes = {alias: Notes(alias) for alias in _chosen(backends)}
    began = time.monotonic()
    stores: list[BaseLockBackend] = []
    asked: dict[str, Future[None]] = {}
    for alias, each in notes.items():
        try:
            store = lock_backends[alias]
        except ImproperlyConfigured as error:
            each.look("settings", str(error), Mark.ERROR)  # A system check finds it as well.
            continue
        stores.append(store)
        if store.distributed:
            work = partial(_ask_and_scan, store, each, writes=writes, limit=limit)
            asked[alias] = begun(work, alias)
        else:
            each.skip("store", "in process memory")
    for alias, done in asked.items():
        notes[alias] = _heard(notes[alias], done, began + PATIENCE * FOR_STORES)
    project, left = Notes(), began + PATIENCE - time.monotonic()
    run(project, notes, stores, everything=backends is None, patience=left)
    return _concluded([project, *notes.values()])


def _chosen(backends: Collection[str] | None) -> tuple[str, ...]:
    try:
        return chosen(backends)
    except ImproperlyConfigured:
        if backends is not None:
            raise
        return ()  # A system check reports it.


def _heard(own: Notes, done: Future[None], until: float) -> Notes:
    """Return the notes about a store when they are complete, or at `until` (`time.monotonic`)."""
    trouble: Exception | None = None
    is_late = False
    try:
        done.result(max(0.0, until - time.monotonic()))
    except TimeoutError:
        is_late, late = True, f"{PATIENCE * FOR_STORES:g} s have passed."
        trouble = BackendUnavailable(late, code="network_timeout")
    except Exception as error:  # noqa: BLE001 - one backend's trouble stops no other's
        trouble = error
    # A copy, so that notes that come too late do not change it.
    notes = Notes(own.backend, list(own.looks), list(own.findings))
    if trouble is None:
        return notes
    known = {each.what for each in notes.looks}
    if isinstance(trouble, LockError):
        notes.is_silent = isinstance(trouble, BackendUnavailable)
        silent = f"did not answer{' all' if known else ''}"
        text = f"{silent if is_late else 'cannot be used'}: {trouble}"
        notes.find("D011", "store", text, remedy(trouble), level=checks.ERROR)
    else:
        text = f"cannot be examined: {type(trouble).__name__}: {trouble}"
        notes.find("D013", "store", text, _MISTAKE)
    notes.skip("not asked", ", ".join(what for what in _QUESTIONS if what not in known))
    return notes


def _ask_and_scan(store: BaseLockBackend, notes: Notes, *, writes: bool, limit: int) -> None:
    if ask(store, notes, writes=writes):
        look_for_loss(store, notes, writes=writes)
        scan(store, notes, limit)
        return
    # The data may still be readable, for example from a replica.
    with suppress(LockError):
        scan(store, notes, limit)


def _concluded(notes: list[Notes]) -> Diagnosis:
    found = sorted((each for about in notes for each in about.findings), key=lambda e: -e.level)
    return Diagnosis(
        findings=tuple(each for each in found if not each.is_silenced()),
        silenced=tuple(each for each in found if each.is_silenced()),
        looked_at=tuple(look for each in notes for look in each.looks),
        silent=tuple(each.backend for each in notes if each.is_silent and each.backend),
    )
