"""What operators may do, each with a permission of its own."""

from __future__ import annotations

import enum
from typing import Any


class Operation(enum.StrEnum):
    """What `inspection` can do, by the name that events, signals and JSON have for it."""

    VIEW = "view"
    FORCE_RELEASE = "force_release"
    EXPIRE_SOON = "expire_soon"
    REQUEST_STOP = "request_stop"
    CLEANUP = "cleanup"
    PAUSE = "pause"
    RESUME = "resume"

    @property
    def codename(self) -> str:
        """The codename of its permission, as the migrations make it."""
        about_counter = self in (Operation.PAUSE, Operation.RESUME)
        return f"{self.value}_{'fencecounter' if about_counter else 'heldlock'}"

    @property
    def permission(self) -> str:
        """What `user.has_perm()` takes."""
        return f"django_distlock.{self.codename}"


def may(user: Any, operation: Operation | str) -> bool:
    """Return whether a user has the permission for an operation.

    Args:
        user: One of `django.contrib.auth`, or what its backends take for one.
        operation: Such as `"force_release"`; `"view"` is to list and to show.

    Raises:
        ValueError: There is no such operation.
    """
    return bool(user.has_perm(Operation(operation).permission))
