"""The nightly report: made once, however many machines start it."""

import datetime as dt
import time

from django_distlock import LockInfo, current_lease, distlock, inspection
from shop.models import Payment, Product, Report

#: How long it takes to count one product, which the example makes up.
COUNTING_SECONDS = 0.2


@distlock("nightly-report:{day}", ttl=10, wait=0)
def make_report(day: dt.date) -> Report | None:
    """Make the report of a day; None: it was made before.

    Raises:
        LockNotAcquired: Somebody else is making it now.
        LockLost: The lease ended before the report was finished. Nothing was written.
    """
    lease = current_lease()
    assert lease is not None  # noqa: S101 - the decorator holds it
    if Report.objects.filter(day=day).exists():
        return None
    pieces = 0
    for product in Product.objects.order_by("pk"):
        # The lease lives for 10 seconds, the report may take longer.
        lease.extend()
        time.sleep(COUNTING_SECONDS)
        pieces += product.stock
    captured = Payment.objects.filter(status=Payment.Status.CAPTURED).count()
    lease.check()
    return Report.objects.create(
        day=day, pieces_in_stock=pieces, payments_captured=captured, fence=lease.fence
    )


def report_in_progress(day: dt.date) -> LockInfo | None:
    """Return what is known about the run that makes the report now."""
    return inspection.get_by_key(f"nightly-report:{day}")
