"""System checks, one module for each subject. docs/reference/checks.md explains their numbers."""

from __future__ import annotations

from . import advisory, databases, fencing, redis_servers, routers, settings

__all__ = ["advisory", "databases", "fencing", "redis_servers", "routers", "settings"]
