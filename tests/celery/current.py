"""The Celery app that a thread uses where none is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery import Celery, _state


@contextmanager
def current(app: Celery) -> Iterator[None]:
    """Let this thread use an app, and behind that the one that it used before."""
    before = _state._tls.current_app
    app.set_current()
    try:
        yield
    finally:
        _state._tls.current_app = before
