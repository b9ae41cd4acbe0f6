"""System checks, by what they look at. What their numbers say: docs/reference/checks.md."""

from __future__ import annotations

from . import advisory, databases, fencing, redis_servers, routers, settings

__all__ = ["advisory", "databases", "fencing", "redis_servers", "routers", "settings"]
