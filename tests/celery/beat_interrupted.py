"""A scheduler to which things happen. Celery imports it when Django is set up, by its name."""

from __future__ import annotations

import os
import signal
from typing import Any

from django_distlock.contrib.celery.scheduler import DistlockScheduler

from .beat_project import HOME


def told_to(do: str) -> bool:
    """Say whether the test wants this to happen to the next process that comes here."""
    try:
        (HOME / do).unlink()
    except FileNotFoundError:
        return False
    return True


class Interrupted(DistlockScheduler):
    """A scheduler to which things happen at the worst of times."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Stand still before it begins, if told so."""
        if told_to("stop before it begins"):
            os.kill(os.getpid(), signal.SIGSTOP)
        super().__init__(*arguments, **named)

    def is_due(self, entry: Any) -> Any:
        """Stand still behind the decision to send, if told so."""
        state = super().is_due(entry)
        if state.is_due and told_to("stop when due"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return state

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """End between the mark and the message, if told so."""
        if told_to("die before sending"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().apply_entry(entry, producer)
