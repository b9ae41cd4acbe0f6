"""`distlock.E3xx` and `W3xx`: what session locks need of the server and of the connection to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from django.core import checks
from django.db import connections

from ..core.errors import LockError, LockUsageError
from ..core.pages import page
from .configured import ADVISORY, DOCS, check_each, where

if TYPE_CHECKING:
    from ..backends.advisory import AdvisoryBackend

_DIRECT = (
    "Set OPTIONS['using'] to an alias that connects to PostgreSQL directly: see"
    f" {page('howto/use-session-locks')}."
)


@check_each(ADVISORY)
def check_session_alias(backend: AdvisoryBackend) -> Iterator[checks.CheckMessage]:
    """W301: the alias is not set up for a pooler."""
    if connections[backend.using].settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
        yield checks.Warning(
            f"{where(backend)} holds session locks on {backend.using!r}, which is configured for a"
            " transaction pooler (DISABLE_SERVER_SIDE_CURSORS). Behind such a pooler, it refuses"
            " to acquire.",
            hint=_DIRECT,
            id="distlock.W301",
        )


@check_each(ADVISORY, deploy=True)
def check_session_servers(backend: AdvisoryBackend) -> Iterator[checks.CheckMessage]:
    """E301, W302 and W303: query the servers, which only `check --deploy` does."""
    try:
        most = backend.most_sessions()
    except LockUsageError as error:
        yield checks.Error(f"{where(backend)}: {error}", hint=_DIRECT, id="distlock.E301")
        return
    except LockError as error:
        said = f"{where(backend)} cannot be checked: {error}"
        yield checks.Warning(said, hint=DOCS, id="distlock.W302")
        return
    if backend.max_connections >= most:
        yield checks.Warning(
            f"{where(backend)} may open {backend.max_connections} sessions in each process, but"
            f" the server allows {most} in total.",
            hint=f"Lower OPTIONS['max_connections'], or raise the server's. {DOCS}",
            id="distlock.W303",
        )
