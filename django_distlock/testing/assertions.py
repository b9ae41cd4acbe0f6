"""Whether a key is held, as assertions."""

from __future__ import annotations

from ..core.records import Record
from ..handler import lock_backends
from ..process import deferred_release


def assert_locked(key: str, *, backend: str = "default") -> None:
    """Fail unless somebody holds the key now.

    Raises:
        AssertionError: Nobody does.
    """
    if _record(key, backend) is None:
        raise AssertionError(f"{key!r} is not locked on {backend!r}: nobody holds it.")


def assert_not_locked(key: str, *, backend: str = "default") -> None:
    """Fail if somebody holds the key now, or if it is kept behind its holder.

    Raises:
        AssertionError: Somebody does; the message says who, and since when.
    """
    record = _record(key, backend)
    if record is not None:
        raise AssertionError(f"{key!r} is locked on {backend!r}: {_told(record)}.")


def _record(key: str, backend: str) -> Record | None:
    # What this process has given up in a rollback is not held any more.
    deferred_release.flush((backend, key))
    return lock_backends[backend].read(key)


def _told(record: Record) -> str:
    holder, since = record.holder, record.acquired_at.isoformat(" ", "milliseconds")
    verb = "has kept it" if record.is_settled else "has held it"
    return f"{holder.who} {verb} since {since} (fence {record.fence})"
