"""The admin: a dashboard of all backends, and lists of the tables in a database.

All pages use `inspection`, so that pages, commands and JSON agree.
"""

from __future__ import annotations

from .dashboard import LockDashboard
from .read_only import FenceCounterAdmin, LockEventAdmin

__all__ = ["FenceCounterAdmin", "LockDashboard", "LockEventAdmin"]
