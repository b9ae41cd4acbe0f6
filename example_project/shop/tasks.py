"""The shop's jobs, for Celery."""

from celery import shared_task
from django.utils import timezone

from django_distlock import current_lease
from django_distlock.contrib.celery import locked_task
from shop import payments
from shop.reports import make_report


# A worker that is killed loses no payment: the message comes again (acks_late), and waits in the
# queue until the lease of the dead one has ended.
@shared_task(acks_late=True)
@locked_task("payment:{pk}", ttl=30)
def capture_payment(pk: int) -> bool:
    """Capture a payment; return False if it was captured before."""
    lease = current_lease()
    assert lease is not None  # noqa: S101 - the decorator holds it
    return payments.capture(pk, lease)


@shared_task
def nightly_report() -> str:
    """Make today's report, on one worker: a beat on each node may ask for it."""
    report = make_report(timezone.localdate())
    return str(report) if report else "nothing to do"
