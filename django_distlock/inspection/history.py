"""Counts recent events of all backends, from the table of events."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import TYPE_CHECKING, Final

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, router, transaction
from django.db.models import Count, F
from django.db.models.functions import TruncMinute
from django.utils.connection import ConnectionDoesNotExist

from .. import conf
from ..core.durations import seconds
from ..core.errors import InvalidArgument
from ..core.logs import log_fields

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ..models import LockEvent

#: Minutes that are counted one by one.
MINUTES: Final = 60
#: Hours that are counted together.
HOURS: Final = 24
#: The most releases whose median wait is calculated.
SAMPLE: Final = 1000
#: The kind of event that is not rare.
RELEASED: Final = "released"

logger = logging.getLogger("django_distlock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Minute:
    """The number of events of each kind in a minute."""

    begins: datetime
    kinds: dict[str, int]

    @property
    def number(self) -> int:
        """Events of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The recent events in numbers.

    Attributes:
        minutes: The last hour, the oldest first; the last minute has not ended.
        kinds: The number of events of each kind in the last 24 hours, without releases.
        at: When it was counted, by the clock of this host.
        rate: Releases per minute in the last hour; None: none are kept (`DISTLOCK_HISTORY`).
        median_wait: The median wait of the latest of these releases, in seconds.
    """

    minutes: tuple[Minute, ...]
    kinds: dict[str, int]
    at: datetime
    rate: float | None = None
    median_wait: float | None = None


def history() -> History | None:
    """Count the events of the last hour by minute, and those of the last day; None: unreadable."""
    model: type[LockEvent] = apps.get_model("django_distlock", "LockEvent")
    now = datetime.now(UTC)
    try:
        using = router.db_for_read(model)
        # In a block of its own, so that an error leaves the caller's transaction as it was.
        with transaction.atomic(using=using):
            return _counted(model.objects.using(using), now)
    except (Error, ConnectionDoesNotExist, ImproperlyConfigured) as error:
        logger.warning("Lock events cannot be read: %s", error, extra=log_fields("events_unread"))
        return None


def rare_kinds() -> list[str]:
    """Return the kinds of rare events, which an index finds among the many releases."""
    model: type[LockEvent] = apps.get_model("django_distlock", "LockEvent")
    return [each for each in model.Kind.values if each != RELEASED]


def times_of(event: object) -> tuple[float, float] | None:
    """Return the seconds that a release was held and waited for; None: its details are invalid."""
    if not isinstance(event, Mapping):
        return None
    try:
        held, waited = (seconds(event.get(each), each) for each in ("held_for", "waited"))
    except InvalidArgument:
        return None
    return held, waited


def _counted(events: QuerySet[LockEvent], now: datetime) -> History:
    first = now.replace(second=0, microsecond=0) - timedelta(minutes=MINUTES - 1)
    by_minute: dict[datetime, Counter[str]] = {}
    connection = connections[events.db]
    # MySQL may lack the tables that it needs for other time zones than its own.
    zone = connection.timezone if connection.vendor == "mysql" else UTC
    rows = (
        events.filter(at__gte=first, kind__in=rare_kinds())
        .annotate(minute=TruncMinute("at", tzinfo=zone))
        .values_list("minute", "kind")
        .annotate(number=Count("pk"))
        .order_by(F("minute"))
    )
    for minute, kind, number in rows:
        by_minute.setdefault(minute, Counter())[kind] += number
    begins = [first + timedelta(minutes=each) for each in range(MINUTES)]
    day = events.filter(at__gte=now - timedelta(hours=HOURS), kind__in=rare_kinds()).order_by()
    return History(
        minutes=tuple(
            Minute(begins=each, kinds=dict(by_minute.get(each, Counter()))) for each in begins
        ),
        kinds=dict(day.values_list("kind").annotate(number=Count("pk"))),
        at=now,
        **_of_releases(events.filter(kind=RELEASED, at__gte=now - timedelta(hours=1))),
    )


def _of_releases(events: QuerySet[LockEvent]) -> dict[str, float]:
    try:
        kept = conf.history()
    except ImproperlyConfigured:
        return {}  # Check E001 reports it.
    number = events.count() if kept else 0
    details = events.order_by("-at").values_list("details", flat=True)[:SAMPLE] if number else ()
    waits = [times[1] for times in map(times_of, details) if times is not None]
    return {"rate": number / kept / 60, "median_wait": median(waits)} if waits else {}
