"""Unique tasks without their base: who sends one, or starts a worker, is told that by the log."""

from __future__ import annotations

import logging
from typing import Any, Final

from celery import signals

from ...core.errors import LockUsageError
from ...core.logs import log_fields
from .declaring import app_of_project
from .runs import require_base
from .terms import terms_of

logger = logging.getLogger("django_distlock")

_UID: Final = "django_distlock.contrib.celery.unseen"
#: The names of those that this process has told of.
_told: set[str] = set()


def connect() -> None:
    """Hear of workers that start, and of tasks that are sent."""
    signals.worker_init.connect(_worker_starts, dispatch_uid=_UID, weak=False)
    signals.before_task_publish.connect(_is_sent, dispatch_uid=_UID, weak=False)


def _worker_starts(sender: Any = None, **_: Any) -> None:
    for task in list(sender.app.tasks.values()):
        _tell(task)


def _is_sent(sender: Any = None, **_: Any) -> None:
    app = app_of_project()
    # What is sent by name, by an app that knows no tasks yet, is not to finalize it.
    if app is not None and app.finalized:
        _tell(app.tasks.get(sender))


def _tell(task: Any) -> None:
    """Say it once for each task: nothing that a signal raises would get to the sender."""
    terms = terms_of(task)
    if terms is None or terms.unique is None or task.name in _told:
        return
    try:
        require_base(task)
    except LockUsageError as error:
        _told.add(task.name)
        logger.error("%s", error, extra=log_fields("misused", error=error))
