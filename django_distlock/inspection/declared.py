"""Every key that the code of the project declares, whether it is held or not."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.management import BaseCommand, get_commands, load_command_class
from django.utils.module_loading import module_has_submodule

from ..conf import backend_config
from ..core.declarations import Declaration, Kind, declarations, finders, head_of
from ..core.documents import Document
from ..core.errors import InvalidArgument, shown
from ..core.keys import stored_key
from ..locks.taking import UNSET
from ..scheduling import RunScope

#: Files that do not count as the origin of an error: this package, and the import system.
_PASSED_OVER: Final = ("<", str(Path(__file__).parents[1]), str(Path(importlib.__file__).parent))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredKey(Document):
    """A key that a decorator, a class or a command declares. Fields are in the order of its JSON.

    Attributes:
        key: The template; or, if code of the project makes the key, the name of that code.
        is_template: Whether `key` is a template.
        mode: What the lock does, in the words of `distlock()`.
        ttl: Seconds, the backend's if none is declared; None: no expiry, or not known.
        wait: Seconds, the backend's if none is declared; None: for ever, or not known.
        on_conflict: What happens if the key is held, in the words of the decorator.
        is_configured: Whether the backend exists. If not, its `TTL` and `WAIT` are not known.
        file: As Python knows it, most often an absolute path; "": not known.
        line: Of the first decorator, or of `def` and `class` themselves; None: not known.
        name: The dotted name of the function or class.
    """

    key: str
    is_template: bool
    kind: Kind
    mode: tuple[str, ...]
    ttl: float | None
    wait: float | None
    min_hold: float
    max_lifetime: float | None
    on_conflict: str
    backend: str
    is_configured: bool
    file: str
    line: int | None
    name: str

    @classmethod
    def of(cls, made: object, declaration: Declaration) -> DeclaredKey:
        """Return what may be shown of a declaration."""
        lock, config = declaration.lock, None
        with suppress(ImproperlyConfigured):
            config = backend_config(lock.backend)
        file, line, name = _place(made)
        return cls(
            key=declaration.key,
            is_template=declaration.is_template,
            kind=declaration.kind,
            mode=_mode(declaration),
            ttl=config.ttl if config and lock.ttl is None and not lock.basic else lock.ttl,
            wait=(config.wait if config else None) if lock.wait is UNSET else lock.wait,
            min_hold=lock.min_hold,
            max_lifetime=lock.max_lifetime,
            on_conflict=declaration.on_conflict,
            backend=lock.backend,
            is_configured=config is not None,
            file=file,
            line=line,
            name=name,
        )

    def may_make(self, prefix: str) -> bool:
        """Whether this declaration may make keys that start with a text."""
        if not self.is_template:
            return True
        head, is_all = head_of(self.key)
        return head.startswith(prefix) or (not is_all and prefix.startswith(head))


def list_declared(
    *, prefix: str = "", backends: Collection[str] | None = None
) -> tuple[list[DeclaredKey], dict[str, str]]:
    """Return every declared key, after importing the modules that workers import.

    This runs code of the project: all that its modules do when they are imported.

    Args:
        prefix: Only declarations that may make keys that start with this. Code of the project may
            make any key.
        backends: Aliases, configured or declared; None: all of them.

    Returns:
        The sorted keys; and errors, each with what could not be imported and may declare more.

    Raises:
        InvalidArgument: `backends` is a single text.
        InvalidLockBackend: There is no such alias, and nothing is declared on it.
    """
    if isinstance(backends, str):
        raise InvalidArgument(f"backends must be several aliases, not {shown(backends)}.")
    missing = import_all()
    # Declarations of a module whose import failed go away with it.
    gc.collect()
    found = {DeclaredKey.of(made, each) for made, each in declarations()}
    for alias in set(backends or ()).difference(each.backend for each in found):
        backend_config(alias)
    wanted = stored_key(prefix) if prefix else ""
    chosen = (
        each
        for each in found
        if (backends is None or each.backend in backends) and each.may_make(wanted)
    )
    return sorted(chosen, key=lambda each: (each.key, repr(each))), missing


def import_all() -> dict[str, str]:
    """Import the tasks, views and commands that declare; return each error, and what raised it."""
    missing: dict[str, str] = {}

    def attempt(what: str, step: Callable[[], object]) -> None:
        try:
            step()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - code of the project
            # A broken module may be imported in several ways.
            missing.setdefault(_told(error), what)

    for app in apps.get_app_configs():
        # Workers of most queues import these modules.
        if app.module is not None and module_has_submodule(app.module, "tasks"):
            attempt(f"{app.name}.tasks", partial(import_module, f"{app.name}.tasks"))
    if root := getattr(settings, "ROOT_URLCONF", None):
        # `include()` imports, too.
        attempt(root, partial(import_module, root))
    for name, app_name in get_commands().items():
        # Django's own commands declare no locks, and are many.
        if isinstance(app_name, BaseCommand) or not app_name.startswith("django."):
            attempt(f"the command {name}", partial(_declare_command, name, app_name))
    # Last, because the imports before may register finders.
    for name, find in list(finders.items()):
        attempt(f"the finder {name!r}", partial(find, attempt))
    return missing


def _declare_command(name: str, app: str | BaseCommand) -> None:
    command = app if isinstance(app, BaseCommand) else load_command_class(app, name)
    # A method of `LockedCommand`, which is in a layer above this module.
    if declare := getattr(command, "declare_lock", None):
        declare()


def _told(error: BaseException) -> str:
    """Return an error, and where in the project it was raised."""
    message = f"{type(error).__name__}: {error}"
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_PASSED_OVER)
    ]
    return message + " ({}:{})".format(*frames[-1]) if frames else message


def _mode(declaration: Declaration) -> tuple[str, ...]:
    lock, scope = declaration.lock, declaration.scope
    if scope == RunScope.NODE_LOCAL.value:
        return ("no lock", scope)
    first = "heartbeat" if lock.heartbeat else "no heartbeat"
    words = ["basic" if lock.basic else first]
    flags = ("hold", "min_hold", "max_lifetime", "reentrant", "steal_if_dead")
    words += [name for name in flags if getattr(lock, name)]
    return (*words, scope) if scope else tuple(words)


def _place(made: Any) -> tuple[str, int | None, str]:
    """Return file, line and name of what a decorator decorates."""
    # The function that `as_view()` returns is Django's.
    subject = _innermost(getattr(made, "view_class", made))
    code = getattr(subject, "__code__", None)
    if code is None and not isinstance(subject, type):
        subject = type(subject)
    name = f"{subject.__module__}.{subject.__qualname__}"
    if code is not None:
        return code.co_filename, code.co_firstlineno, name
    file = getattr(sys.modules.get(subject.__module__), "__file__", None) or ""
    try:
        return file, inspect.getsourcelines(subject)[1], name
    except (OSError, TypeError):
        return file, None, name


def _innermost(made: Any) -> Any:
    """Return the innermost function that others wrap."""
    while not isinstance(made, type):
        inner = getattr(made, "__wrapped__", None) or getattr(made, "__func__", None)
        # A partial has it in `func`.
        inner = inner or (None if inspect.isfunction(made) else getattr(made, "func", None))
        if inner is None:
            break
        made = inner
    return made
