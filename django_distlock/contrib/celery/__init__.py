"""Tasks of Celery under locks."""

from __future__ import annotations

from . import checks, declaring, endings, runs
from .tasks import LockedTask, locked_task

__all__ = ["LockedTask", "locked_task"]

runs.connect()
endings.connect()
checks.connect()
declaring.connect()
