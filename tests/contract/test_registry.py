"""The suite runs on every backend there is."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module

from django.conf import settings

from django_distlock import backends
from django_distlock.backends.base import BaseLockBackend
from tests.backends import BACKENDS


def test_every_backend_class_is_in_the_registry() -> None:
    """A backend that nobody registered here is not tested."""
    found = {
        f"{member.__module__}.{member.__qualname__}"
        for module in pkgutil.iter_modules(backends.__path__, f"{backends.__name__}.")
        for _, member in inspect.getmembers(import_module(module.name), inspect.isclass)
        if issubclass(member, BaseLockBackend) and member.__module__ == module.name
    }
    found.remove(f"{BaseLockBackend.__module__}.BaseLockBackend")
    assert found == {each.path for each in BACKENDS.values()}


def test_every_configured_backend_is_in_the_registry() -> None:
    """The registry and the settings of the tests name the same backends, where a server is."""
    configured = {
        alias: options["BACKEND"]
        for alias, options in settings.DISTLOCK.items()
        if alias != "default"
    }
    assert configured == {
        each.alias: each.path
        for each in BACKENDS.values()
        if not each.using or each.using in settings.DATABASES
    }
