"""The modules that Celery imports when a worker starts, for who looks at tasks before that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from celery import _state, signals
from celery.fixups.django import DjangoFixup
from celery.loaders.default import Loader

from ...core.logs import log_fields

logger = logging.getLogger("django_distlock")


def app_of_project() -> Any:
    """Return the current app; None: there is none yet.

    To ask Celery would make one then, and make it the default of all threads.
    """
    return _state._tls.current_app or _state.default_app


def import_modules(app: Any) -> None:
    """Import what a worker would, unless the app is the one that Celery makes for want of another.

    Never raises: what cannot be imported is a warning in the log.
    """
    for _, error in failing_imports(app):
        logger.warning(
            "The checks of locked tasks may not see all of them: an import fails, %r",
            error,
            extra=log_fields("import_failed"),
        )


def failing_imports(app: Any) -> Iterator[tuple[str, Exception]]:
    """Import the same; yield what cannot be imported, and why."""
    if isinstance(app.loader, Loader):
        return
    for what, step in _steps(app):
        try:
            step()
        except Exception as error:  # noqa: BLE001 - code of the project
            yield what, error


def _steps(app: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    # In the order of `import_default_modules()`: the second part reads the settings of Celery.
    signal = signals.import_modules
    for receiver in signal._live_receivers(app):
        # It sets Django up once more, and runs all of the checks.
        if not isinstance(getattr(receiver, "__self__", None), DjangoFixup):
            found = partial(receiver, signal=signal, sender=app)
            yield "what Celery discovers", found
    for name in app.loader.default_modules:
        yield name, partial(app.loader.import_task_module, name)
