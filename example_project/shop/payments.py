"""Capturing a payment: asking a provider for money must happen once."""

import logging
import os
import time

from django_distlock import Lease
from shop.models import Payment

logger = logging.getLogger("shop")

#: How long the provider, which the example makes up, takes to answer.
PROVIDER_SECONDS = float(os.environ.get("SHOP_PROVIDER_SECONDS", "2"))


class TooLate(Exception):
    """Somebody with a later grant has touched the payment."""


def capture(pk: int, lease: Lease) -> bool:
    """Capture a payment under `lease`; return False if it was captured before.

    The lease's fence is written at the first touch: from then on, whoever holds an older one
    finds no row to write to.

    Raises:
        Payment.DoesNotExist: There is no such payment.
        TooLate: The lease ended, and its successor was here.
        LockLost: The lease ended while the provider was asked.
    """
    payments = Payment.objects.filter(pk=pk)
    touched = payments.filter(captured_fence__lte=lease.fence).update(captured_fence=lease.fence)
    payment = payments.get()
    if not touched:
        raise TooLate
    if payment.status == Payment.Status.CAPTURED:
        return False
    ask_provider(payment)
    lease.check()
    written = payments.filter(captured_fence=lease.fence).update(status=Payment.Status.CAPTURED)
    if not written:
        raise TooLate
    return True


def ask_provider(payment: Payment) -> None:
    """Stand in for a provider, which takes its time."""
    logger.info("Asking the provider for %s", payment.amount)
    time.sleep(PROVIDER_SECONDS)
