"""What stands in the place of a result where the work was left to others: JSON."""

from __future__ import annotations

from typing import Any

from .errors import LockError


def skipped(error: LockError, key: str | None = None) -> dict[str, Any]:
    """Return the result of work that was skipped.

    Args:
        error: Why.
        key: The key, should the error not know it.
    """
    holder = getattr(error, "holder", None)
    known = ("host", "pid", "task_id")
    return {
        "distlock": "skipped",
        "key": error.key or key,
        "why": error.code,
        "holder": None if holder is None else {name: getattr(holder, name) for name in known},
    }
