"""Import what workers, servers and schedules import, so that what it declares is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module

from django.apps import apps
from django.conf import settings
from django.core.management import BaseCommand, get_commands, load_command_class
from django.utils.module_loading import module_has_submodule

from ..declarations import Missing, attempt, finders


def import_all() -> tuple[Missing, ...]:
    """Import tasks, views and commands; return what could not be, each error once."""
    found: dict[str, Missing] = {}
    for each in _missing():
        # Several ways may lead to one module that is broken.
        found.setdefault(each.message, each)
    return tuple(found.values())


def _missing() -> Iterator[Missing]:
    for what, step in _steps():
        yield from attempt(what, step)
    # By now, whatever the project uses has been imported.
    for name, find in list(finders.items()):
        missing: list[Missing] = []
        yield from attempt(f"the finder {name!r}", partial(_extend, missing, find))
        yield from missing


def _extend(missing: list[Missing], find: Callable[[], Iterator[Missing]]) -> None:
    missing.extend(find())


def _steps() -> Iterator[tuple[str, Callable[[], object]]]:
    for app in apps.get_app_configs():
        # As workers of most queues do it.
        if app.module is not None and module_has_submodule(app.module, "tasks"):
            yield f"{app.name}.tasks", partial(import_module, f"{app.name}.tasks")
    root = getattr(settings, "ROOT_URLCONF", None)
    if root:
        # `include()` imports, too.
        yield root, partial(import_module, root)
    for name, app_name in get_commands().items():
        # Django's own are not locked, and there are many.
        if isinstance(app_name, BaseCommand) or not app_name.startswith("django."):
            yield f"the command {name}", partial(_load, name, app_name)


def _load(name: str, app: str | BaseCommand) -> None:
    command = app if isinstance(app, BaseCommand) else load_command_class(app, name)
    # Of `LockedCommand`, which is above this module.
    declare = getattr(command, "declare_lock", None)
    if declare is not None:
        declare()
