"""Tasks of Celery under locks."""

from __future__ import annotations

from ...core.declarations import finders
from . import checks, declaring, endings, runs
from .tasks import LockedTask, locked_task

__all__ = ["LockedTask", "locked_task"]

runs.connect()
endings.connect()
checks.connect()
finders["celery"] = declaring.find
