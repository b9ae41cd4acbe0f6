"""Import the modules that a worker imports, and record which keys their tasks declare."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from celery import _state, signals
from celery.fixups.django import DjangoFixup
from celery.loaders.default import Loader

from ...core.declarations import Attempt, Declaration, Kind, declared
from ...core.keys import UNIQUE_PREFIX
from ...core.logs import log_fields
from .terms import Terms, terms_of

logger = logging.getLogger("django_distlock")


def declare(function: Callable[..., Any], terms: Terms, *, acks_late: bool | None = None) -> None:
    """Record the keys of a locked function; `acks_late`: its task's, None: it has no task yet."""
    policy = {None: "skip or retry", True: "retry", False: "skip"}[acks_late]
    chosen = terms.on_conflict or ("retry" if terms.until_start else policy)
    found = [
        Declaration.of(Kind.CELERY_LOCK, keys.given, terms.rules.with_permits(each).lock, chosen)
        for keys, each in terms.locks
    ]
    if terms.unique is not None:
        given = terms.unique.given
        key = UNIQUE_PREFIX + given if isinstance(given, str) else given
        chosen = "skip" if terms.until_start else terms.on_conflict or "skip"
        chosen = "replace" if terms.debounce else chosen
        found.append(Declaration.of(Kind.CELERY_UNIQUE, key, terms.unique_lock, chosen))
    declared[function] = tuple(found)


def find(attempt: Attempt) -> None:
    """Import the modules of a worker, and record the policies that depend on `acks_late`."""
    app = app_of_project()
    if app is not None:
        import_modules(app, attempt)
        # Finalizing the app makes many tasks and their classes.
        attempt("the tasks of Celery", partial(_learn, app))


def app_of_project() -> Any:
    """Return the current app; None: there is none yet.

    Celery's own function would make an app, and make it the default of all threads.
    """
    return _state._tls.current_app or _state.default_app


def _or_log(what: str, step: Callable[[], object]) -> None:
    try:
        step()
    except Exception as error:  # noqa: BLE001 - code of the project
        extra = log_fields("import_failed")
        logger.warning(
            "The checks may not see all locked tasks: an import failed, %r", error, extra=extra
        )


def import_modules(app: Any, attempt: Attempt = _or_log) -> None:
    """Import the modules of a worker, unless the app is the one that Celery makes by default.

    Args:
        attempt: Called with the name and the import of each module. By default, it logs errors.
    """
    if isinstance(app.loader, Loader):
        return
    # In the order of `import_default_modules()`. The second part reads the settings of Celery.
    signal = signals.import_modules
    for receiver in signal._live_receivers(app):
        # The fixup sets Django up once more, and runs all of the checks.
        if not isinstance(getattr(receiver, "__self__", None), DjangoFixup):
            attempt("what Celery discovers", partial(receiver, signal=signal, sender=app))
    for name in app.loader.default_modules:
        attempt(name, partial(app.loader.import_task_module, name))


def _learn(app: Any) -> None:
    for task in list(app.tasks.values()):
        terms = terms_of(task)
        if terms is not None:
            declare(_locked(task), terms, acks_late=bool(task.acks_late))


def _locked(task: Any) -> Any:
    """Return the function that the decorator made, which `autoretry_for` wraps once more."""
    function = task.run
    while True:
        function = getattr(function, "__func__", function)
        if function in declared or not hasattr(function, "__wrapped__"):
            return function
        function = function.__wrapped__
