"""Run Celery tasks under locks."""

from __future__ import annotations

from ...core.declarations import finders
from ...core.extras import required

with required():
    from celery import signals

from . import checks, declaring, endings, queueing, runs
from .tasks import LockedTask, locked_task

__all__ = ["LockedTask", "locked_task"]

for signal, receive in (
    (signals.before_task_publish, checks.tell_sent),
    (signals.before_task_publish, queueing.hand_down),
    (signals.task_postrun, runs.ended),
    (signals.worker_init, checks.tell_all),
    (signals.worker_init, endings.watch),
    (signals.worker_process_shutdown, endings.leaving),
):
    signal.connect(receive, dispatch_uid=f"{receive.__module__}.{receive.__name__}", weak=False)
finders["celery"] = declaring.find
