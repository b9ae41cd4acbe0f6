"""`distlock.E3xx` and `W3xx`: what session locks need of the server and of the way to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from django.core import checks
from django.db import connections

from ..core.errors import LockError, LockUsageError
from .configured import DOCS, configured_by_path, where

if TYPE_CHECKING:
    from ..backends.advisory import AdvisoryBackend

_DIRECT = (
    "Set OPTIONS['using'] to an alias that goes to PostgreSQL itself: see"
    " docs/howto/use-session-locks.md."
)


@checks.register("distlock")
def check_session_alias(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W301: the alias is not set up for a pooler."""
    return [
        checks.Warning(
            f"{where(backend)} holds locks by sessions of {backend.using!r}, which is set up for a"
            " pooler of transactions (DISABLE_SERVER_SIDE_CURSORS). Behind one, it refuses.",
            hint=_DIRECT,
            id="distlock.W301",
        )
        for backend in _backends()
        if connections[backend.using].settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
    ]


@checks.register("distlock", deploy=True)
def check_session_servers(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """E301, W302 and W303: ask the servers, which `check --deploy` alone does."""
    found: list[checks.CheckMessage] = []
    for backend in _backends():
        try:
            most = backend.most_sessions()
        except LockUsageError as error:
            found.append(
                checks.Error(f"{where(backend)}: {error}", hint=_DIRECT, id="distlock.E301")
            )
        except LockError as error:
            message = f"{where(backend)} cannot be asked: {error}"
            found.append(checks.Warning(message, hint=DOCS, id="distlock.W302"))
        else:
            if backend.max_connections >= most:
                found.append(
                    checks.Warning(
                        f"{where(backend)} may open {backend.max_connections} sessions in each"
                        f" process, and the server takes {most} in all.",
                        hint=f"Lower OPTIONS['max_connections'], or raise the server's. {DOCS}",
                        id="distlock.W303",
                    )
                )
    return found


def _backends() -> Iterator[AdvisoryBackend]:
    found = configured_by_path("django_distlock.backends.advisory.AdvisoryBackend")
    return cast("Iterator[AdvisoryBackend]", found)
