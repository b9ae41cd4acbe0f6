"""What the shop does when something happens to a lock."""

import logging
from typing import Any

from django.dispatch import receiver

from django_distlock import Holder
from django_distlock.signals import fence_rejected, lock_not_acquired

logger = logging.getLogger("shop")


@receiver(lock_not_acquired)
def log_refusal(*, key: str, holder: Holder | None, waited: float, **_: Any) -> None:
    """Leave a line in the log about everybody who was sent away."""
    who = "somebody" if holder is None else f"process {holder.pid} on {holder.host}"
    logger.info("%s: given up after %.1f s, held by %s", key, waited, who)


@receiver(fence_rejected)
def log_rejection(*, key: str, fence: int, current: int | None, **_: Any) -> None:
    """Leave a line in the log about every write that came too late."""
    logger.info("%s: stale fence %d was refused, the row has %s", key, fence, current)
