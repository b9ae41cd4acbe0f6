"""What the secret of a PostgreSQL database makes of names, as who may read it can tell."""

from __future__ import annotations

from typing import Any

from django.db import connections

from django_distlock.database.sql import called, channel, number, side_table

SALT, SESSIONS = side_table("salt"), side_table("session")


def salted(using: str, expression: str, *arguments: Any) -> Any:
    """Return what an expression of `django_distlock.database.sql` gives."""
    with connections[using].cursor() as cursor:
        cursor.execute(f'SELECT {expression} FROM "{SALT}" s', arguments)
        row = cursor.fetchone()
    assert row is not None
    return row[0]


def turn_of(using: str, name: str) -> int:
    """Return the number under which acquirers of a storage key take turns."""
    return int(salted(using, number("turn", "%s"), name))


def number_of(using: str, name: str) -> int:
    """Return the number of the lock that a session holds on a storage key."""
    return int(salted(using, number("session", "%s"), name))


def channel_of(using: str) -> str:
    """Return the channel of wake-ups."""
    return str(salted(using, channel()))


def call_of(using: str, name: str) -> str:
    """Return what is called out of a storage key."""
    return str(salted(using, called("%s"), name))
