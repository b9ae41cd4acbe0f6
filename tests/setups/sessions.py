"""Whose sessions the server has."""

from __future__ import annotations

from typing import Any

from django_distlock.handler import lock_backends
from tests.integration.databases import ask


def named(application: str) -> dict[str, Any]:
    """Give what makes an alias call its sessions so, for `sessions` to tell them from others."""
    return {"OPTIONS": {"application_name": application}}


def sessions(application: str) -> set[int]:
    """Return the server's process ids of the sessions with this name, idle ones included."""
    rows = ask(
        "default", "SELECT pid FROM pg_stat_activity WHERE application_name = %s", application
    )
    return {pid for (pid,) in rows}


def close_ours(backend: str) -> None:
    """Close the connections of a lock backend now, instead of when they have been idle."""
    store: Any = lock_backends[backend]
    store._connections.close_all()
