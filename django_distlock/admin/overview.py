"""The content of the dashboard, gathered from all backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from ..backends.base import BaseLockBackend
from ..checks.configured import configured
from ..core.errors import InvalidArgument, LockError
from ..handler import lock_backends
from ..inspection import (
    Failure,
    LockPage,
    Summary,
    TransactionLock,
    asking,
    list_locks,
    list_transactions,
    summary,
)
from ..inspection.diagnosis import has_lost
from ..inspection.history import History, history
from ..inspection.showing import expired_locks
from .addresses import Pages, Target
from .charts import Chart, of_minutes
from .dashboard_rows import COLUMNS, Column, Row, ordered, row_of
from .filters import LATE, FilterForm

#: Locks on a page.
LIMIT = 50
#: Locks that are read at most to be sorted, because no store has an index for it.
SORTED = 1000
#: Contended keys that are shown at most, and expired leases of each backend.
MOST = 8


@dataclass(frozen=True, slots=True)
class Card:
    """A number above the list, with a link to what it counts.

    Attributes:
        name: The name for programs and style sheets.
        number: None: unknown.
        href: "": the user may not open the linked list.
        is_exact: Whether the number is exact, and no estimate.
        is_grave: Whether the number needs attention.
        is_least: Whether the number is a minimum, because a backend did not answer.
    """

    name: str
    label: Promise
    number: float | None
    href: str
    is_exact: bool = True
    is_grave: bool = False
    is_least: bool = False

    def facts(self) -> tuple[object, ...]:
        """Return the values whose change makes a refresh show the number again.

        The latest heartbeat changes all the time, so only the change to or from late counts.
        """
        number = None if self.name == "overdue" else self.number
        return self.name, number, self.is_exact, self.is_grave, self.is_least


@dataclass(frozen=True, slots=True)
class Wanted:
    """A contended key, with its waiters and the width of their bar in percent of the longest."""

    key: str
    number: int
    href: str
    width: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The held locks, numbers of everything, and what happened.

    Attributes:
        order: What the rows are sorted by: see `Column.orders`; "": by backend, each in its own
            order.
        looked_at: How many locks were read and sorted, if the rows are only a part of all locks;
            0: the rows are all of them, or not sorted.
        following: The cursor of the next page; None: there is none.
        expired: Leases that expired without a release, the latest ones of each backend.
        outages: Backends that did not answer.
        lost: Redis backends that have lost their data.
        unlisted: Backends that cannot list their locks.
        unreadable: Keys whose records another program has written to, each with its page.
        transactions: Keys that transactions have locked or wait for, the longest one first.
    """

    rows: tuple[Row, ...]
    order: str
    looked_at: int
    following: str | None
    cards: tuple[Card, ...]
    chart: Chart | None
    contended: tuple[Wanted, ...]
    expired: tuple[Row, ...]
    outages: tuple[Failure, ...]
    lost: tuple[str, ...]
    unlisted: tuple[Failure, ...]
    unreadable: tuple[tuple[Failure, str], ...]
    alone: tuple[str, ...]
    transactions: tuple[TransactionLock, ...]

    @classmethod
    def of(cls, form: FilterForm, cursor: str | None, pages: Pages) -> Overview:
        """Read a page of all backends, from a cursor on; the first page if it is illegal."""
        arguments, failures = form.arguments(), asking.silent()
        answering = [each for each in lock_backends if each not in failures]
        wanted = arguments["backends"] or answering
        arguments["backends"] = [each for each in answering if each in wanted]
        order = form.cleaned_data.get("order", "")
        if order:
            page = _most(arguments)
        else:
            try:
                page = list_locks(cursor=cursor or None, limit=LIMIT, waits=True, **arguments)
            except InvalidArgument:
                page = list_locks(limit=LIMIT, waits=True, **arguments)
        rows = [row_of(lock, pages) for lock in page.locks]
        failures |= {each.backend: each for each in page.failures if not each.is_of_key}
        summaries = list(_asked(summary, failures))
        past = history()
        outages = tuple(each for each in failures.values() if each.code != "unsupported")
        return cls(
            rows=tuple(ordered(rows, order)[:LIMIT] if order else rows),
            order=order,
            looked_at=len(rows) if order and (page.cursor or len(rows) > LIMIT) else 0,
            following=None if order else page.cursor,
            cards=tuple(_cards(summaries, past, pages, is_least=bool(outages))),
            chart=None if past is None else of_minutes(past),
            contended=tuple(_contended(summaries, pages)),
            expired=tuple(_expired(summaries, pages)),
            outages=outages,
            lost=tuple(_lost(failures)),
            unlisted=tuple(each for each in failures.values() if each not in outages),
            unreadable=tuple(
                (each, pages.key(Target(each.backend, each.key)))
                for each in page.failures
                if each.is_of_key
            ),
            alone=tuple(each.alias for each in configured(BaseLockBackend) if not each.distributed),
            transactions=list_transactions(backends=answering).transactions[:LIMIT],
        )

    @property
    def columns(self) -> list[tuple[Column, str, str]]:
        """The columns, each with the order that a click asks for, and its `aria-sort`."""
        order = self.order
        return [(each, each.next_order(order), each.aria_sort(order)) for each in COLUMNS]

    def facts(self) -> tuple[object, ...]:
        """Return the values whose change makes a refresh show the page again."""
        return (
            [each.facts() for each in self.rows],
            self.looked_at,
            self.following,
            [each.facts() for each in self.cards],
            self.chart and [each.title for each in self.chart.bars],
            self.contended,
            [each.facts() for each in self.expired],
            self.outages,
            self.lost,
            self.unlisted,
            self.unreadable,
            [(each.name, each.waits, each.since, each.session) for each in self.transactions],
        )


@lru_cache(maxsize=1)
def problems() -> tuple[checks.CheckMessage, ...]:
    """Return what the system checks find without a server; computed once in each process."""
    found = checks.run_checks(tags=["distlock"])
    return tuple(
        each for each in found
        if not each.is_silenced() and each.level >= checks.WARNING
        and str(each.id).startswith("distlock.")
    )  # fmt: skip


def _forget(**_: Any) -> None:
    problems.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_distlock.admin")


def _most(arguments: dict[str, Any]) -> LockPage:
    """Return the locks to sort, from as many pages as it takes: filtered pages may be short."""
    whole = LockPage(())
    cursor: str | None = None
    while len(whole.locks) < SORTED:
        limit = SORTED - len(whole.locks)
        page = list_locks(cursor=cursor, limit=limit, waits=True, **arguments)
        cursor = page.cursor
        whole = LockPage(whole.locks + page.locks, cursor, whole.failures + page.failures)
        if cursor is None:
            break
    return whole


def _asked(ask: Callable[[str], Summary], failures: dict[str, Failure]) -> Iterator[Summary]:
    for alias in lock_backends:
        if alias not in failures:
            try:
                yield ask(alias)
            except (LockError, ImproperlyConfigured) as error:
                failures[alias] = Failure.of(alias, error)


def _lost(failures: dict[str, Failure]) -> Iterator[str]:
    for store in configured(BaseLockBackend):
        with suppress(LockError):
            if store.alias not in failures and has_lost(store):
                yield store.alias


def _cards(
    summaries: list[Summary], past: History | None, pages: Pages, *, is_least: bool
) -> Iterator[Card]:
    locks = pages.locks
    for name, label, href, is_grave in (
        ("held", _("Held"), locks, False),
        ("waiting", _("Waiting"), f"{locks}#distlock-wanted", False),
        ("ending_soon", _("Expiring within 10 s"), f"{locks}?state=ending_soon", False),
        ("past_expiry", _("Expired, not released"), f"{locks}#distlock-expired", True),
    ):
        counts = [getattr(each, name) for each in summaries]
        known = [each for each in counts if each is not None]
        number = sum(each.number for each in known) if known else None
        # Not 0, because the backend that did not answer may have some.
        if is_least and not number:
            number = None
        exact = all(each.is_exact for each in known)
        grave = is_grave and bool(number)
        yield Card(name, label, number, href, exact, grave, is_least=is_least)
    if past is not None and past.rate is not None:
        wait = round((past.median_wait or 0) * 1000)
        yield Card("rate", _("Releases per minute (1 h)"), round(past.rate, 1), locks)
        yield Card("median_wait", _("Median wait in ms (1 h)"), wait, locks)
    parts = [each.overdue for each in summaries if each.overdue is not None]
    worst = round(max(parts) * 100) if parts else None
    # A percent sign, and no placeholder. xgettext:no-python-format
    late = _("Latest heartbeat (% of TTL)")
    grave = worst is not None and worst > LATE * 100
    yield Card("overdue", late, worst, f"{locks}?state=overdue", True, grave)
    for kind, label in (
        ("lost", _("Leases lost in 24 h")),
        ("rejected", _("Writes rejected in 24 h")),
    ):
        number = None if past is None else past.kinds.get(kind, 0)
        href = pages.events and f"{pages.events}?kind={kind}"
        yield Card(kind, label, number, href, True, bool(number))


def _expired(summaries: list[Summary], pages: Pages) -> Iterator[Row]:
    """Yield leases that expired without a release, of backends that find them quickly."""
    for each in summaries:
        if each.past_expiry.number and each.past_expiry.is_exact:
            try:
                found = expired_locks(each.backend, limit=MOST)
            except (LockError, ImproperlyConfigured):
                continue
            yield from (row_of(lock, pages) for lock in found)


def _contended(summaries: list[Summary], pages: Pages) -> Iterator[Wanted]:
    found = [(number, each.backend, key) for each in summaries for key, number in each.most_waited]
    found.sort(key=lambda each: (-each[0], each[1:]))
    for number, backend, key in found[:MOST]:
        width = round(100 * number / found[0][0])
        yield Wanted(key, number, pages.key(Target(backend, key)), width)
