"""Removes events and responses that are no longer needed, the oldest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.db import DatabaseError, connections, models, router, transaction

from ..core.documents import Document
from ..core.durations import MAX_BOUND, Duration, seconds, whole_number
from ..core.errors import LockUsageError
from ..database import vendors
from .journal import Operation, Order
from .operations import MAX_SPAN

if TYPE_CHECKING:
    from ..models import LockEvent

#: Seconds that events are kept by default: 90 days.
EVENTS_KEPT = 90 * 86_400.0
#: The fewest seconds that operations are kept: 400 days, so that a yearly audit finds all of them.
AUDIT_KEPT = 400 * 86_400.0
_EVENTS, _RESPONSES = "LockEvent", "StoredResponse"
#: The most rows to remove in one transaction. Their keys are arguments of one statement.
MAX_BATCH = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned(Document):
    """How many events were removed, or would be.

    Attributes:
        events: Those of what happened by itself.
        audit: Those of what operators did.
        before: The removed `events` are older than this.
        audit_before: The removed `audit` is older than this.
    """

    events: int
    audit: int
    before: datetime
    audit_before: datetime

    @property
    def removed(self) -> int:
        """The number of all these events."""
        return self.events + self.audit


def prune_events(
    *,
    older_than: Duration = EVENTS_KEPT,
    batch: int = 1000,
    actor: Any,
    reason: str = "",
    progress: Callable[[int], object] = lambda removed: None,
) -> Pruned:
    """Remove old events of all backends, batch by batch, the oldest first.

    Operators' acts on keys are kept for 400 days, or for `older_than` if that is longer, because
    they are looked up late. A cleanup counts as what happens by itself.

    Args:
        older_than: Only events that are older, by the clock of this host, as hosts date events.
        batch: Events per transaction, from 1 to 10 000.
        actor: See `force_release`; so for `reason`, which may be "".
        progress: Called after each batch with the number of events removed so far.

    Raises:
        InvalidArgument: An argument breaks a rule.
        LockUsageError: No database keeps events here.
        BackendUnavailable: The database of the events is unavailable.
    """
    order = Order(Operation.CLEANUP, actor, reason)
    whole_number(batch, "batch", MAX_BATCH)
    age = seconds(older_than, "older_than", maximum=MAX_SPAN)
    now = datetime.now(UTC)
    before, audit_before = (now - timedelta(seconds=each) for each in (age, max(age, AUDIT_KEPT)))
    using = _using()
    events = audit = 0
    try:
        for events in _remove(using, _events(using, before, audit=False), batch):
            progress(events)
        for audit in _remove(using, _events(using, audit_before, audit=True), batch):
            progress(events + audit)
    finally:
        # Also after an error: some batches may have been removed before it.
        pruned = Pruned(events=events, audit=audit, before=before, audit_before=audit_before)
        if pruned.removed:
            _tell(using, order, pruned)
    return pruned


def prune_responses(
    *, batch: int = 1000, progress: Callable[[int], object] = lambda removed: None
) -> int:
    """Remove the expired responses of `idempotent`; return how many.

    Args:
        batch: See `prune_events`; so for `progress`.

    Raises:
        InvalidArgument: `batch` breaks a rule.
        LockUsageError: No database keeps responses here.
        BackendUnavailable: The database of the responses is unavailable.
    """
    whole_number(batch, "batch", MAX_BATCH)
    using = _using(_RESPONSES)
    over = _model(_RESPONSES).objects.using(using).filter(until__lte=datetime.now(UTC))
    gone = 0
    for gone in _remove(using, over.order_by("until"), batch, by="until"):
        progress(gone)
    return gone


def _model(name: str = _EVENTS) -> type[Any]:
    return apps.get_model("django_distlock", name)


def _using(name: str = _EVENTS) -> str:
    """Return the database that keeps the rows of a model."""
    using: str = router.db_for_write(_model(name))
    if connections[using].vendor not in vendors.VENDORS:
        raise LockUsageError(f"No database stores the table {name}.", code="unsupported")
    return using


def _events(using: str, before: datetime, *, audit: bool) -> models.QuerySet[LockEvent]:
    """Return older events. `at` has an index, and few events are kept longer."""
    kinds = _model().Kind
    by_operators = [
        kinds.FORCED, kinds.SHORTENED, kinds.STOP_REQUESTED, kinds.PAUSED, kinds.RESUMED,
    ]  # fmt: skip
    older: models.QuerySet[LockEvent] = (
        _model().objects.using(using).filter(at__lt=before).order_by("at")
    )
    return older.filter(kind__in=by_operators) if audit else older.exclude(kind__in=by_operators)


def _remove(using: str, rows: models.QuerySet[Any], batch: int, *, by: str = "at") -> Iterator[int]:
    """Remove rows, ordered by a column, a batch in a transaction; yield how many so far."""
    vendor, gone, left = vendors.of(using), 0, rows
    while True:
        with _translated(using):
            found = list(left.values_list("pk", by)[:batch])
            if not found:
                return
            try:
                with vendor.short_transaction(MAX_BOUND):
                    # A row that was replaced meanwhile is no longer one of `rows`.
                    gone += rows.order_by().filter(pk__in=[pk for pk, _at in found]).delete()[0]
            except DatabaseError as error:
                if not vendor.is_busy(error):
                    raise
                return  # Another process has locked the rows. The next run removes the rest.
        yield gone
        # Do not pass again over rows in between that are kept longer.
        left = rows.filter(**{f"{by}__gte": found[-1][1]})


def _tell(using: str, order: Order, pruned: Pruned) -> None:
    """Record who has removed what, in the same database."""
    with _translated(using), transaction.atomic(using=using):
        _model().objects.using(using).create(
            kind=_model().Kind.CLEANED,
            actor=order.by,
            reason=order.reason,
            details={"removed": pruned.removed, **pruned.as_json()},
        )
    order.keep(f"the events in {using!r}")


@contextmanager
def _translated(using: str) -> Iterator[None]:
    with vendors.translated(using):
        try:
            yield
        except DatabaseError as error:
            if not vendors.of(using).is_missing(error):
                raise
            message = f"The database {using!r} lacks a table: {error}"
            raise LockUsageError(message, code="unsupported") from error
