"""Marks in the lock store that say when each entry of a beat schedule was sent last."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from ...backends.base import BaseLockBackend
from ...core.clock import monotonic
from ...core.errors import BackendUnavailable, InvalidArgument
from ...core.keys import OWN_MARKER, new_token, own_key
from ...core.logs import log_fields
from ...core.records import Grant, Holder, Record
from ...process.host import current_holder

logger = logging.getLogger("django_distlock")

#: Seconds at most between two renewals of the marks, which also restore lost ones.
RENEW_EVERY: Final = 60.0
#: If the clocks of a beat and of the store differ by more, a warning is logged.
APART: Final = timedelta(seconds=2)


class Moved(Exception):
    """Another beat has moved the mark of an entry: check again whether it is due."""


class NotNow(Exception):
    """The mark cannot be moved now: an operator has paused it, or its record is locked."""


@dataclass(frozen=True, slots=True)
class Mark:
    """When an entry was sent last, by any beat.

    Attributes:
        grant: The grant of the mark's key. Its token is needed to move the mark.
        sent_at: When the entry was sent last, by the clock of the beat that sent it; if it never
            was, the time from which it counts. Aware.
        made_at: When the mark was made, by the clock of this process, and never in the future. A
            later `sent_at` comes from a clock that was ahead.
    """

    grant: Grant
    sent_at: datetime
    runs: int
    made_at: datetime


@dataclass(frozen=True, slots=True)
class _Doubt:
    """The mark before moves without an answer: after those, nothing was sent."""

    sent_at: datetime
    runs: int
    tokens: set[str]


class Marks:
    """The marks of all entries: a lease for each, which the leader renews and never releases.

    Moving a mark is a compare-and-swap: it needs the token that the mark had when its time was
    read. So of all beats that find an entry due, one moves its mark and sends it.

    Methods raise `BackendUnavailable`. After that, learn the entry again and try again.

    Args:
        store: The store of the marks. A mark ends `MAX_TTL` after the last leader with its entry.
        key: The key of the leadership, with which the keys of the marks begin.
    """

    def __init__(self, store: BaseLockBackend, key: str):
        self._store = store
        self._key = key
        self._ttl = store.config.max_ttl
        self._known: dict[str, Mark] = {}
        self._doubts: dict[str, _Doubt] = {}
        self._renew_at = 0.0
        self._ahead: timedelta | None = None
        self._told = False

    def get(self, name: str) -> Mark | None:
        """Return the mark of an entry, if this process knows it."""
        return self._known.get(name)

    def forget(self) -> None:
        """Forget all marks, because others may have led meanwhile."""
        self._known.clear()
        self._renew_at = 0.0
        self._ahead, self._told = None, False

    def learn(self, name: str, since: datetime, runs: int) -> None:
        """Read the mark of an entry from the store, or make it, unless that is impossible now.

        Args:
            since: From when the entry counts, if the store has no mark yet. It gets one.
            runs: How often the entry was sent by then.
        """
        key = mark_key(self._key, name)
        self._own_lead()  # Warns of a wrong clock before the leader sends anything.
        while name not in self._known:
            record = self._store.read(key)
            if record is not None:
                self._known[name] = self._read(name, record, since, runs)
                return
            holder = _nobody(since, runs)
            answer = self._store.acquire(key, new_token(), self._ttl, holder)
            if isinstance(answer, Grant):
                self._known[name] = Mark(answer, since, runs, _now())
            elif answer.busy or answer.paused:
                return

    def move(self, name: str, sent_at: datetime) -> None:
        """Mark an entry as sent now. Only the caller for which this returns sends the entry.

        Raises:
            Moved: Another beat has moved the mark.
            NotNow: The mark cannot be moved now.
        """
        mark = self._known.pop(name, None)
        if mark is None:
            raise NotNow
        token, runs = new_token(), mark.runs + 1
        holder = _nobody(sent_at, runs)
        try:
            answer = self._store.acquire(
                mark.grant.key, token, self._ttl, holder, replace=mark.grant.token
            )
        except BackendUnavailable:
            before = self._doubts.get(name)
            tokens = {token, *(before.tokens if before else ())}
            self._doubts[name] = _Doubt(mark.sent_at, mark.runs, tokens)
            raise
        if not isinstance(answer, Grant):
            if answer.busy or answer.paused:
                self._known[name] = mark
                raise NotNow
            raise Moved
        self._doubts.pop(name, None)
        self._known[name] = Mark(answer, sent_at, runs, sent_at)

    def renew(self) -> None:
        """Renew the marks of entries that are sent rarely, if it is time for that."""
        if monotonic() < self._renew_at:
            return
        known = list(self._known.items())
        answers = self._store.extend_many([mark.grant for _, mark in known])
        for (name, mark), answer in zip(known, answers, strict=True):
            if answer is None:
                # The store has lost it, or another beat has moved it.
                del self._known[name]
                self.learn(name, mark.sent_at, mark.runs)
        self._renew_at = monotonic() + min(RENEW_EVERY, self._ttl / 8)

    def _read(self, name: str, record: Record, since: datetime, runs: int) -> Mark:
        grant = replace(record.grant, ttl=self._ttl)
        now = _now()
        doubt = self._doubts.get(name)
        if doubt is not None and record.token in doubt.tokens:
            # This process moved the mark without an answer, so it did not send the task.
            return Mark(grant, doubt.sent_at, doubt.runs, now)
        told = record.holder.metadata
        if "sent_at" not in told:
            return Mark(grant, since, runs, now)
        sent_at = datetime.fromisoformat(told["sent_at"])
        # `acquired_at` comes from the store's clock, which may have been ahead if a host's is used.
        made_at = min(record.acquired_at + self._own_lead(), now)
        if sent_at - made_at > APART and not self._told:
            self._told = True
            logger.warning(
                "The clocks of beats differ: the beat on %s sent %r at %s by its own clock, which"
                " was %s. Entries that it sent early are not delayed",
                record.holder.host,
                name,
                sent_at.isoformat(" ", "seconds"),
                made_at.isoformat(" ", "seconds"),
                extra=log_fields("clock_differs", backend=self._store.alias, key=record.key),
            )
        return Mark(grant, sent_at, int(told.get("runs", runs)), made_at)

    def _own_lead(self) -> timedelta:
        """Return by how much this host's clock is ahead of the store's; found once per leadership.

        The value is never too small, because an entry whose mark looks too old would be sent twice.
        """
        if self._ahead is None:
            before, store, after = _now(), self._store.clock(), _now()
            self._ahead = after - store
            if before - store > APART or store - after > APART:
                logger.warning(
                    "The clock of this host differs from the store's by %+.1f s, and this beat"
                    " sends its entries by it",
                    self._ahead.total_seconds(),
                    extra=log_fields("clock_differs", backend=self._store.alias),
                )
        return self._ahead


def mark_key(key: str, name: object) -> str:
    """Return the key of an entry's mark; a name that cannot be in a key is hashed."""
    key = OWN_MARKER + key.removeprefix(OWN_MARKER)
    text = f"{key}:sent:{str(name).replace('%', '%25').replace(':', '%3A')}"
    with suppress(InvalidArgument):
        # Keys are in NFC, but names need not be.
        if own_key(text) == text:
            return text
    hashed = hashlib.sha256(str(name).encode(errors="surrogatepass")).hexdigest()
    return own_key(f"{key}:sent:sha256%{hashed}")


def _now() -> datetime:
    return datetime.now(UTC)


def _nobody(sent_at: datetime, runs: int) -> Holder:
    """Return the holder of a mark. It is no process, because the mark outlives its beat."""
    told = {"sent_at": sent_at.astimezone(UTC).isoformat(), "runs": runs}
    return replace(current_holder(told), pid=0, started_at=None, thread="")
