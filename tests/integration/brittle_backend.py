"""A lock backend that breaks a promise, for tests of what notices it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.records import Contended, Grant, Page


class ForgetfulBackend(DatabaseBackend):
    """A database whose fences do not grow."""

    def _acquire(self, *args: Any, **kwargs: Any) -> Grant | Contended:
        answer = super()._acquire(*args, **kwargs)
        return replace(answer, fence=1) if isinstance(answer, Grant) else answer


class SlowListBackend(MemoryBackend):
    """A store that takes its time for a list."""

    def list(self, *args: Any, **kwargs: Any) -> Page:
        """Return a page 50 ms later."""
        time.sleep(0.05)
        return super().list(*args, **kwargs)
