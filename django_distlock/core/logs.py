"""The fields of log records: the same ones on each record, for whoever keeps logs as JSON."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from .wording import printable

if TYPE_CHECKING:
    from .records import Holder

#: What each record of the logger `django_distlock` has; None where it says nothing.
FIELDS: Final = (
    "distlock_event",
    "distlock_backend",
    "distlock_key",
    "distlock_fence",
    "distlock_holder",
    "distlock_task",
    "distlock_code",
)


def log_fields(
    event: str,
    *,
    backend: str | None = None,
    key: str | None = None,
    fence: int | None = None,
    holder: Holder | None = None,
    task: str | None = None,
    error: BaseException | None = None,
) -> dict[str, Any]:
    """Return the `extra` of a log record about an event: a word that programs can look for.

    A key is shown with escapes. An error tells its code, and the key and the holder that it knows.
    """
    holder = holder or getattr(error, "holder", None)
    values = (
        event,
        backend,
        _plain(key or getattr(error, "key", None)),
        fence,
        None if holder is None else holder.as_json(),
        _plain(task),
        getattr(error, "code", None),
    )
    return dict(zip(FIELDS, values, strict=True))


def _plain(text: str | None) -> str | None:
    return None if text is None else printable(text)


def _on_one_line(value: object) -> object:
    return printable(str(value)) if isinstance(value, BaseException) else value


def _complete(record: logging.LogRecord) -> bool:
    """Give a record the fields that it lacks, so that a format may name them all.

    What errors say, which stores word as they like, is put on one line.
    """
    if isinstance(record.args, tuple):
        record.args = tuple(map(_on_one_line, record.args))
    for name in FIELDS:
        record.__dict__.setdefault(name, None)
    return True


logging.getLogger("django_distlock").addFilter(_complete)
