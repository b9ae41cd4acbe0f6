"""`distlock.E0xx`: the settings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from .. import conf
from ..handler import lock_backends
from .configured import DOCS


@checks.register("distlock")
def check_settings(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """E001: each alias of `DISTLOCK` makes a backend, and the holder's name is legal."""
    found: list[checks.CheckMessage] = []
    backends = [partial(lock_backends.__getitem__, alias) for alias in _aliases(found)]
    readers: list[Callable[[], object]] = [conf.holder_config, *backends]
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
