"""Databases that only some tests need, under aliases of their own."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.test import override_settings

DATABASE = "django_distlock.backends.database.DatabaseBackend"


@contextmanager
def alias_like(using: str, **changes: Any) -> Iterator[str]:
    """Add another way to a test database: an alias with some settings changed.

    `OPTIONS` are merged into those of the original. The test closes what its threads opened.
    """
    alias = f"{using}_{secrets.token_hex(3)}"
    settings = copy.deepcopy(connections.settings[using])
    options = {**settings["OPTIONS"], **changes.pop("OPTIONS", {})}
    connections.settings[alias] = {**settings, **changes, "OPTIONS": options}
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


@contextmanager
def locks_on(using: str, **configured: Any) -> Iterator[str]:
    """Configure a lock backend on a database; give its alias."""
    alias = f"locks_{using}"
    configuration = {"BACKEND": DATABASE, "OPTIONS": {"using": using}, **configured}
    with override_settings(DISTLOCK={alias: configuration}):
        yield alias
