"""A lock backend that breaks a promise, for tests of what notices it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django_distlock.backends.database import DatabaseBackend
from django_distlock.core.records import Contended, Grant


class ForgetfulBackend(DatabaseBackend):
    """A database whose fences do not grow."""

    def _acquire(self, *args: Any, **kwargs: Any) -> Grant | Contended:
        answer = super()._acquire(*args, **kwargs)
        return replace(answer, fence=1) if isinstance(answer, Grant) else answer
