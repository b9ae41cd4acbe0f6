"""Capturing a payment: asking a provider for money must happen once."""

import logging
import os
import time
from collections.abc import Callable

from django_distlock import Lease
from shop.models import Payment

logger = logging.getLogger("shop")

#: How long the provider, which the example makes up, takes to answer.
PROVIDER_SECONDS = float(os.environ.get("SHOP_PROVIDER_SECONDS", "2"))


def ask_provider(payment: Payment) -> None:
    """Stand in for a provider, which takes its time.

    A real one is told the number of the payment too, and does not charge twice for the same.
    """
    logger.info("Asking the provider for %s", payment.amount)
    time.sleep(PROVIDER_SECONDS)


def capture(pk: int, lease: Lease, ask: Callable[[Payment], None] = ask_provider) -> bool:
    """Capture a payment under `lease`; return False if it was captured before.

    Reading it raises the fence of its row to that of the lease, and whoever holds an older lease
    can neither read nor write it from then on.

    Raises:
        Payment.DoesNotExist: There is no such payment.
        FenceRejected: The lease ended, and its successor was here. Nothing was written.
        LockLost: The lease ended before the provider was asked.
    """
    payment = Payment.objects.fenced(lease).get(pk=pk)
    if payment.status == Payment.Status.CAPTURED:
        return False
    lease.check()
    ask(payment)
    payment.status = Payment.Status.CAPTURED
    payment.save()
    return True
