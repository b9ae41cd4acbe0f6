"""`distlock.W003`: schedules whose lock other nodes do not see."""

from __future__ import annotations

from typing import Any

from django.core import checks

from ..backends.base import BaseLockBackend
from ..declarations import declarations
from ..scheduling import PREFIX, RunScope
from .configured import DOCS, configured, where


@checks.register("distlock")
def check_scopes(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W003: what must run on one node only has a lock that reaches the others."""
    alone = {each.alias: each for each in configured(BaseLockBackend) if not each.distributed}
    return [
        checks.Warning(
            f"The schedule {each.key.removeprefix(PREFIX)!r} is to run on one node"
            f" (RunScope.REQUIRE_GLOBAL), and no other process sees the locks of"
            f" {where(alone[each.lock.backend])}: every process runs it.",
            hint=f"Use a backend that is distributed, or RunScope.PREFER_GLOBAL. {DOCS}",
            id="distlock.W003",
        )
        for each in dict.fromkeys(declaration for _, declaration in declarations())
        if each.scope == RunScope.REQUIRE_GLOBAL.value and each.lock.backend in alone
    ]
