"""`distlock.E0xx` and `W0xx`: the settings, and the process that they are read in."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from .. import conf
from ..core.logs import log_fields
from ..handler import lock_backends
from .configured import DOCS

logger = logging.getLogger("django_distlock")


@checks.register("distlock")
def check_settings(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """E001: each alias of `DISTLOCK` makes a backend; the other settings keep their rules."""
    found: list[checks.CheckMessage] = []
    backends = [partial(lock_backends.__getitem__, alias) for alias in _aliases(found)]
    readers: list[Callable[[], object]] = [
        conf.holder_config, conf.fence_secrets, conf.fence_audiences, conf.fence_jump,
        conf.monitor_tokens, *backends
    ]  # fmt: skip
    for read in readers:
        try:
            read()
        except ImproperlyConfigured as error:
            found.append(checks.Error(str(error), hint=DOCS, id="distlock.E001"))
    return found


def _aliases(found: list[checks.CheckMessage]) -> list[str]:
    try:
        return conf.aliases()
    except ImproperlyConfigured as error:
        found.append(checks.Error(str(error), hint=DOCS, id="distlock.E001"))
        return []


@checks.register("distlock")
def check_threads(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W001: uWSGI runs Python without threads, as releases before 2.0.27 do by themselves."""
    # What it was started with does not tell: the options are absent where they are the default.
    if getattr(sys.modules.get("uwsgi"), "has_threads", True):
        return []
    return [
        checks.Warning(
            "uWSGI runs this process without threads: between requests ours stand still. What a"
            " rollback gave up stays taken until the next one, and no heartbeat renews a lease"
            " that outlives its request.",
            hint="Set enable-threads = true: see docs/howto/production.md.",
            id="distlock.W001",
        )
    ]


def warn_of_missing_threads() -> None:
    """Log what `check_threads` finds: commands that run checks do not run inside uWSGI."""
    for message in check_threads(None):
        logger.warning("%s %s", message.msg, message.hint, extra=log_fields("misused"))
