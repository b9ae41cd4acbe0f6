"""Where the example keeps its data, and where its locks."""

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured


def postgres(url: str) -> dict[str, Any]:
    """Return Django's settings for `postgres://user:password@host:port/name?option=value`.

    Raises:
        ImproperlyConfigured: The address is of another kind of database, or names none.
    """
    parts = urlsplit(url)
    name = unquote(parts.path.removeprefix("/"))
    if parts.scheme not in ("postgres", "postgresql") or not name:
        raise ImproperlyConfigured(
            "DATABASE_URL must look like postgres://user:password@host:port/name."
        )
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),
        "PORT": str(parts.port or ""),
        "OPTIONS": dict(parse_qsl(parts.query)),
    }


def sqlite(path: Path) -> dict[str, Any]:
    """Return Django's settings for a SQLite file that several processes write to."""
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "OPTIONS": {
            # Readers do not block the writer, nor the writer readers.
            "init_command": "PRAGMA journal_mode=WAL",
            # A transaction that turns from reading to writing fails at once where another one
            # writes; a transaction that starts as a writer waits for its turn.
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
        },
    }


class LocksRouter:
    """Keep the lock tables in the database `locks`, and nothing else there.

    SQLite has one writer per file: in a file of their own, a lock can be taken while a
    transaction on the shop's data is open.
    """

    def db_for_read(self, model: Any, **_: Any) -> str | None:
        """Return where to read `model`, or None for no opinion."""
        return "locks" if model._meta.app_label == "django_distlock" else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **_: Any) -> bool:
        """Say whether the tables of an app belong into a database."""
        return (db == "locks") == (app_label == "django_distlock")
