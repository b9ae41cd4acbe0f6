"""Tasks of Celery under locks."""

from __future__ import annotations

from . import checks as checks
from . import declaring, endings, runs, unseen
from .tasks import LockedTask, locked_task

__all__ = ["LockedTask", "locked_task"]

runs.connect()
endings.connect()
unseen.connect()
declaring.connect()
