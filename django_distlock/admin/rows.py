"""A held key as a row of the dashboard."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from ..core.wording import span
from ..inspection import HeldKey, State
from .targets import Pages, Target

#: What stands beside the word for a state, so that colour alone says nothing.
ICONS: Final = {
    State.HELD: "●",
    State.QUEUED: "○",
    State.SETTLED: "◐",
    State.PAST_EXPIRY: "▲",
    State.NO_EXPIRY: "∞",
    State.STOP_REQUESTED: "■",
    State.SHARED: "◉",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A held key, and how many wait for it.

    Attributes:
        href: The page of the key.
    """

    lock: HeldKey
    href: str

    @property
    def target(self) -> Target:
        """The key that it is about."""
        return Target(self.lock.backend, self.lock.key)

    @property
    def identity(self) -> str:
        """What stays the same while one holder has the key."""
        return f"{self.lock.backend}-{self.lock.key_hash}"

    @property
    def icon(self) -> str:
        """A sign for the state."""
        return ICONS[self.lock.state]

    @property
    def request(self) -> str:
        """The request that the holder works for, where it said so."""
        return str(self.lock.holder.metadata.get("request", ""))

    @property
    def now(self) -> int:
        """The store's clock when it was looked at, in milliseconds since 1970."""
        return milliseconds(self.lock.observed_at)

    @property
    def since(self) -> int:
        """When it was granted, in milliseconds since 1970."""
        return milliseconds(self.lock.acquired_at)

    @property
    def end(self) -> int | None:
        """When the lease ends, in milliseconds since 1970."""
        return None if self.lock.expires_at is None else milliseconds(self.lock.expires_at)

    @property
    def span(self) -> int | None:
        """Milliseconds that the last renewal gave; None: no expiry."""
        lock = self.lock
        if lock.expires_at is None:
            return None
        return max(1, milliseconds(lock.expires_at) - milliseconds(lock.renewed_at))

    @property
    def left(self) -> int:
        """Milliseconds that are left; 0: none, or without an end."""
        return max(0, (self.end or 0) - self.now)

    @property
    def left_text(self) -> str:
        """How long the lease lasts, unless it is renewed; "": without an end."""
        return "" if self.end is None else span(self.left / 1000, 0)

    @property
    def age_text(self) -> str:
        """For how long it has been held."""
        return span(self.lock.held_for, 0)

    def facts(self) -> tuple[object, ...]:
        """Return what a refresh has to show again when it has changed."""
        lock = self.lock
        return (
            lock.backend, lock.key, lock.token_hash, lock.fence, lock.state.value, self.end,
            lock.waits,
        )  # fmt: skip


def row_of(lock: HeldKey, pages: Pages) -> Row:
    """Return the row of a lock."""
    return Row(lock, pages.key(Target(lock.backend, lock.key)))


def milliseconds(instant: datetime) -> int:
    """Return an instant as browsers count: since 1970."""
    return round(instant.timestamp() * 1000)
