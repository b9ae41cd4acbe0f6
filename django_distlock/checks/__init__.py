"""System checks, by what they look at. What their numbers say: docs/reference/checks.md."""

from __future__ import annotations

from . import (
    advisory,
    backends,
    databases,
    fencing,
    keys,
    redis,
    routers,
    scheduling,
    settings,
    views,
)

__all__ = [
    "advisory",
    "backends",
    "databases",
    "fencing",
    "keys",
    "redis",
    "routers",
    "scheduling",
    "settings",
    "views",
]
