"""A held key as a row of the dashboard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from ..core.wording import span
from ..inspection import HeldKey, State
from .addresses import Pages, Target

#: The sign next to the word for a state, so that more than the colour tells states apart.
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
    """A held key, and the address of its page."""

    lock: HeldKey
    href: str

    @property
    def target(self) -> Target:
        """The key of the row; if the key is shared, of this holder alone."""
        lock = self.lock
        return Target(lock.backend, lock.key, (lock.fence,) if lock.shared else ())

    @property
    def identity(self) -> str:
        """The row's identifier in the page; that of an unshared key stays if its holder changes."""
        lock = self.lock
        return f"{lock.backend}-{lock.key_hash}" + (f"-{lock.fence}" if lock.shared else "")

    @property
    def icon(self) -> str:
        """A sign for the state."""
        return ICONS[self.lock.state]

    @property
    def request(self) -> str:
        """The request that the holder works for, if its metadata contain it."""
        return str(self.lock.holder.metadata.get("request", ""))

    @property
    def now(self) -> int:
        """The store's time when the lock was read, in milliseconds since 1970."""
        return milliseconds(self.lock.observed_at)

    @property
    def since(self) -> int:
        """When the lock was granted, in milliseconds since 1970."""
        return milliseconds(self.lock.acquired_at)

    @property
    def end(self) -> int | None:
        """When the lease ends, in milliseconds since 1970; None: no expiry."""
        return None if self.lock.expires_at is None else milliseconds(self.lock.expires_at)

    @property
    def span(self) -> int | None:
        """Milliseconds from the last renewal to the end of the lease; None: no expiry."""
        lock = self.lock
        if lock.expires_at is None:
            return None
        return max(1, milliseconds(lock.expires_at) - milliseconds(lock.renewed_at))

    @property
    def left(self) -> int:
        """Milliseconds until the lease ends; 0: it has ended, or has no expiry."""
        return max(0, (self.end or 0) - self.now)

    @property
    def left_text(self) -> str:
        """How long the lease still lasts unless it is renewed; "": no expiry."""
        return "" if self.end is None else span(self.left / 1000, 0)

    @property
    def age_text(self) -> str:
        """How long the lock has been held."""
        return span(self.lock.held_for, 0)

    def facts(self) -> tuple[object, ...]:
        """Return the values whose change makes a refresh show the row again."""
        lock = self.lock
        return (
            lock.backend, lock.key, lock.token_hash, lock.fence, lock.state.value, self.end,
            lock.waits,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    """A column by which the list can be sorted.

    Attributes:
        name: The column's name in the address.
        value: Returns what rows are compared by.
        greatest_first: Whether the first click puts the greatest value first.
    """

    name: str
    label: Promise
    value: Callable[[Row], Any]
    greatest_first: bool = False

    def orders(self) -> tuple[str, str]:
        """Return the two orders, the one of the first click first; "-": greatest value first."""
        orders = (self.name, f"-{self.name}")
        return orders[::-1] if self.greatest_first else orders

    def next_order(self, order: str) -> str:
        """Return the order that a click asks for."""
        first, second = self.orders()
        return second if order == first else first

    def aria_sort(self, order: str) -> str:
        """Return the column's value of `aria-sort` in an order of the rows."""
        ways = {self.name: "ascending", f"-{self.name}": "descending"}
        return ways.get(order, "none")


COLUMNS: Final = (
    Column("state", _("State"), lambda row: [*State].index(row.lock.state), greatest_first=True),
    Column("key", _("Key and backend"), lambda row: (row.lock.key, row.lock.backend)),
    Column("left", _("Expires in"), lambda row: math.inf if row.end is None else row.left),
    Column("age", _("Held for"), lambda row: row.lock.held_for, greatest_first=True),
    Column("holder", _("Holder"), lambda row: row.lock.holder.where),
    Column("fence", _("Fence"), lambda row: row.lock.fence, greatest_first=True),
    Column(
        "waiting", _("Waiting"), lambda row: row.lock.waits.total if row.lock.waits else 0,
        greatest_first=True,
    ),
)  # fmt: skip


def ordered(rows: Iterable[Row], order: str) -> list[Row]:
    """Return rows sorted by one of the `Column.orders`."""
    (column,) = (each for each in COLUMNS if each.name == order.removeprefix("-"))
    return sorted(rows, key=column.value, reverse=order.startswith("-"))


def row_of(lock: HeldKey, pages: Pages) -> Row:
    """Return the row of a lock."""
    return Row(lock, pages.key(Target(lock.backend, lock.key)))


def milliseconds(instant: datetime) -> int:
    """Return an instant in milliseconds since 1970, as browsers count."""
    return round(instant.timestamp() * 1000)
