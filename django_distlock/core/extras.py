"""The extras of the package: what to install where an import of theirs fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

#: By the module that an extra brings.
_EXTRAS: Final[Mapping[str, str]] = {
    "celery": "celery",
    "opentelemetry": "opentelemetry",
    "prometheus_client": "prometheus",
    "psycopg": "postgres",
    "redis": "redis",
}


def remedy(error: BaseException) -> str:
    """Return how to install what a failed import lacks; "": no extra has it."""
    extra = _EXTRAS.get((getattr(error, "name", None) or "").partition(".")[0])
    return f'. Run pip install "django-distlock[{extra}]"' if extra else ""


@contextmanager
def required() -> Iterator[None]:
    """Import what an extra brings, or say which one.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}{remedy(error)}", name=error.name) from error
