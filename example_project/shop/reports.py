"""The nightly report: made once, however many machines start it."""

import datetime as dt
import time
from contextlib import AbstractContextManager

from django.db import transaction

from django_distlock import Lease, LockInfo, current_lease, inspection, lock_backends
from django_distlock.scheduling import scheduled
from shop.models import Payment, Product, Report

#: How long it takes to count one product, which the example makes up.
COUNTING_SECONDS = 0.2


# Who starts late finds the key still taken; who follows one that was killed does not wait.
@scheduled("nightly-report:{day}", expected=6, margin=4, backend="jobs", steal_if_dead=True)
def make_report(day: dt.date) -> Report | None:
    """Make the report of a day; None: it was made before. `Skipped`: somebody else makes it.

    Raises:
        LockLost: The lease ended before the report was finished. Nothing was written.
    """
    lease = current_lease()
    assert lease is not None  # noqa: S101 - the decorator holds it
    if Report.objects.filter(day=day).exists():
        return None
    pieces = 0
    for product in Product.objects.order_by("pk"):
        lease.check()
        time.sleep(COUNTING_SECONDS)
        pieces += product.stock
    with until_commit(lease):
        captured = Payment.objects.filter(status=Payment.Status.CAPTURED).count()
        return Report.objects.create(
            day=day, pieces_in_stock=pieces, payments_captured=captured, fence=lease.fence
        )


def until_commit(lease: Lease) -> AbstractContextManager[None]:
    """Open a transaction and, where the database can, let nobody else have the key before its end.

    PostgreSQL can. On SQLite there is a moment between this look at the lease and the commit.

    Raises:
        LockLost: The lease ended first.
    """
    if lock_backends[lease.backend].supports_guard:
        return lease.atomic()
    lease.check()
    return transaction.atomic()


def report_in_progress(day: dt.date) -> LockInfo | None:
    """Return what is known about the run that makes the report now, or has just made it."""
    return inspection.get_by_key(
        inspection.own_key(f"schedule:nightly-report:{day}"), backend="jobs"
    )
