"""Django signals that report what happens to locks.

The sender is the backend's class. Each signal carries `alias`, `key`, `fence` (None: none was
granted) and `holder` (None: unknown). Signals are sent with `send_robust()`: a receiver that raises
is logged and changes nothing. During a receiver, the handler of an operating system's signal (a
time limit) may raise: that error reaches the caller. A token is never sent.

=====================  ============================================================================
signal                 also carries
=====================  ============================================================================
`lock_acquired`        `waited` (seconds)
`lock_not_acquired`    `waited`, `wait` (the longest wait that was allowed; None: for ever), `cause`
                       (`LockNotAcquired`, or another error); `holder` is the holder of the key
`lock_bypassed`        `waited`, `cause` (the error that says why it was not granted)
`work_skipped`         `cause` (the error that says why it did not run: a conflict, or the store)
`work_requeued`        `cause` (the same; the work went back to its queue, for a later retry)
`lock_extended`        `ttl` (seconds), `slack` (seconds left when the answer came; None:
                       no expiry), `cause` (None, or the error that left the outcome unknown)
`lock_released`        `held_for`, `waited` (seconds of the call that acquired it), `released`
                       (whether the store freed the key), `cause`
`lock_lost`            `held_for`, `cause` (a sentence)
`lock_taken_over`      `previous` (holder), `cause`
`lock_forced`          `actor`, `reason`; `fence` and `holder` are those of the lease that was ended
`lock_operated`        `operation` ("expire_soon", "request_stop", "pause", "resume", "cleanup"; for
                       the last one `key` is ""), `actor`, `reason`, `details`
`fence_rejected`       `current` (the row's fence, or its key's), `model`, `pk`, `cause`
=====================  ============================================================================
"""

import logging
from typing import Any

from django.dispatch import Signal

from .core.interruptions import pass_on
from .core.logs import log_fields

__all__ = [
    "fence_rejected",
    "lock_acquired",
    "lock_bypassed",
    "lock_extended",
    "lock_forced",
    "lock_lost",
    "lock_not_acquired",
    "lock_operated",
    "lock_released",
    "lock_taken_over",
    "work_requeued",
    "work_skipped",
]

logger = logging.getLogger("django_distlock")

lock_acquired = Signal()
lock_not_acquired = Signal()
lock_bypassed = Signal()
work_skipped = Signal()
work_requeued = Signal()
lock_extended = Signal()
lock_released = Signal()
lock_lost = Signal()
lock_taken_over = Signal()
lock_forced = Signal()
lock_operated = Signal()
fence_rejected = Signal()


def tell(signal: Signal, sender: type, **facts: Any) -> None:
    """Send a signal whose receivers cannot change what happened."""
    try:
        told = signal.send_robust(sender, **facts)
    except RuntimeError as error:
        pass_on(error)
        # Not a receiver's error, which Django logs: an asynchronous receiver cannot be awaited in
        # the thread of an event loop.
        extra = log_fields("telling_failed", backend=facts.get("alias"), key=facts.get("key"))
        logger.exception("A signal could not be sent", extra=extra)
        return
    for _receiver, response in told:
        if isinstance(response, Exception):
            pass_on(response)
