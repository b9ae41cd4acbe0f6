"""A held key as people see it."""

from __future__ import annotations

import enum
import hashlib
import hmac
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.utils.encoding import force_bytes
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from ..backends.base import BaseLockBackend
from ..core.documents import by_name
from ..core.records import Holder, Record, Waits


class State(enum.StrEnum):
    """The state of a held key. The value is for programs, the label for people."""

    HELD = "held"
    QUEUED = "queued"
    SETTLED = "settled"
    PAST_EXPIRY = "past_expiry"
    NO_EXPIRY = "no_expiry"
    STOP_REQUESTED = "stop_requested"
    SHARED = "shared"

    @property
    def label(self) -> Promise:
        """The label that people read, in their language."""
        return _LABELS[self]


_LABELS = {
    State.HELD: _("held"),
    State.QUEUED: _("queued"),
    State.SETTLED: _("kept after its run"),
    State.PAST_EXPIRY: _("expired, in grace period"),
    State.NO_EXPIRY: _("no expiry"),
    State.STOP_REQUESTED: _("stop requested"),
    State.SHARED: _("shared"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldKey:
    """A held key, as the store reported it at one moment.

    Attributes:
        key_hash: The hash of the key, which logs have instead of it: see `LockInfo`.
        token_hash: The same of the holder's token; "": the store does not report it.
        ttl: Seconds that the last grant or extend gave; None: no expiry, or not known.
        acquired_at: When the key was granted, by the store's clock.
        renewed_at: When the lease was last extended, or granted.
        expires_at: When the lease expires; None: no expiry.
        free_at: When the key may be granted to somebody else; None: no expiry.
        holder: The holder, as far as the store reports it.
        stop_requested_at: When an operator requested a stop.
        observed_at: The store's clock at the time of the reading.
        by_session: Whether the lease ends with a session of the server, instead of at a time.
        waits: The numbers of waiters; None: not queried, or not reported by the store.
        shared: Whether others may hold the key at the same time.
    """

    backend: str
    key: str
    key_hash: str
    token_hash: str
    fence: int
    ttl: float | None
    acquired_at: datetime
    renewed_at: datetime
    expires_at: datetime | None
    free_at: datetime | None
    holder: Holder
    stop_requested_at: datetime | None
    observed_at: datetime
    by_session: bool = False
    waits: Waits | None = None
    shared: bool = False

    @classmethod
    def of(cls, store: BaseLockBackend, record: Record, now: datetime) -> HeldKey:
        """Return what may be shown of a backend's record."""
        return cls(
            backend=store.alias,
            key=record.key,
            key_hash=hashed(record.key),
            token_hash=token_hash(record.token),
            fence=record.fence,
            ttl=record.ttl,
            acquired_at=record.acquired_at,
            renewed_at=record.renewed_at,
            expires_at=record.expires_at,
            free_at=record.free_at,
            holder=record.holder,
            stop_requested_at=record.stop_requested_at,
            observed_at=now,
            by_session=not store.supports_ttl,
            shared=record.shared,
        )

    @property
    def state(self) -> State:
        """The most important state that applies: an expiry comes before a requested stop."""
        if self.free_at is not None and self.free_at == self.expires_at:
            return State.SETTLED
        if self.expires_at is not None and self.expires_at <= self.observed_at:
            return State.PAST_EXPIRY
        if self.stop_requested_at is not None:
            return State.STOP_REQUESTED
        if self.expires_at is None and not self.by_session:
            return State.NO_EXPIRY
        if self.holder.is_queued:
            return State.QUEUED
        return State.SHARED if self.shared else State.HELD

    @property
    def held_for(self) -> float:
        """Seconds since the grant, by the store's clock."""
        return max(0.0, (self.observed_at - self.acquired_at).total_seconds())

    @property
    def expires_in(self) -> float | None:
        """Seconds until the lease expires, by the store's clock; 0: expired; None: no expiry."""
        if self.expires_at is None:
            return None
        return max(0.0, (self.expires_at - self.observed_at).total_seconds())

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry: times as ISO 8601 in UTC, durations in seconds."""
        names = (
            "backend", "key", "key_hash", "token_hash", "fence", "state", "ttl", "acquired_at",
            "renewed_at", "expires_at", "free_at", "held_for", "expires_in", "holder",
            "stop_requested_at", "observed_at", "shared",
        )  # fmt: skip
        waits = self.waits
        return {
            **by_name(self, *names),
            "waiting": None if waits is None else waits.waiting,
            "retrying": None if waits is None else waits.retrying,
        }


def hashed(value: str) -> str:
    """Return 24 lower-case hex digits: HMAC-SHA256 with the project's secret.

    `salted_hmac("django_distlock", value, algorithm="sha256")` returns the same, but derives its
    key each time: that would take most of the time of a long listing.
    """
    key = _key(force_bytes(settings.SECRET_KEY))
    return hmac.digest(key, value.encode(), "sha256").hex()[:24]


def token_hash(token: str) -> str:
    """Return the hash of a token; "": the store reports no token."""
    return hashed(token) if token else ""


@lru_cache(maxsize=4)
def _key(secret: bytes) -> bytes:
    return hashlib.sha256(b"django_distlock" + secret).digest()
