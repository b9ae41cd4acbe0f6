"""Short words for tests of what operators do."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any, NamedTuple
from unittest.mock import patch

import psycopg
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connections

from django_distlock import lock_backends
from django_distlock.conf import table
from django_distlock.models import LockEvent
from django_distlock.process import event_log
from tests.backends import REDIS
from tests.contract.locking import eventually

from .databases import server

PATIENCE = 60
WHO: dict[str, Any] = {"actor": "Ada", "reason": "it hangs"}
#: One backend of each kind that there is here.
ALIASES: list[str] = [
    each
    for each in ("memory", "sqlite", "postgres", "mariadb", "redis", "redis_cluster", "advisory")
    if each in settings.DISTLOCK
]
#: A backend of which the store is not there.
DEAD = {"BACKEND": REDIS, "OPTIONS": {"url": "redis://127.0.0.1:1/0"}}


class Ran(NamedTuple):
    """What came of a command."""

    out: str
    err: str
    status: int

    @property
    def json(self) -> Any:
        """What it printed, which is one JSON document and nothing else."""
        return json.loads(self.out)


def run(command: str, *arguments: str, answers: str | None = "") -> Ran:
    """Run a command of this process, with what a person would type; None: input is closed."""
    out, err, status = StringIO(), StringIO(), 0
    with patch.object(sys, "stdin", None if answers is None else StringIO(answers)):
        try:
            call_command(command, *arguments, stdout=out, stderr=err, no_color=True)
        except CommandError as error:
            err.write(f"{error}\n")
            status = error.returncode
    return Ran(out.getvalue(), err.getvalue(), status)


@contextmanager
def raising(signum: int) -> Iterator[None]:
    """Let a signal that no command holds back raise `KeyboardInterrupt`, and end no test run."""
    usual = signal.signal(signum, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signum) is signal.default_int_handler
    finally:
        signal.signal(signum, usual)


def written(key: str) -> int:
    """Count the events about a key."""
    return LockEvent.objects.filter(key=key).count()


def event_of(key: str) -> LockEvent:
    """Give the one event about a key, when it is written."""
    assert eventually(lambda: written(key) > 0, PATIENCE)
    return LockEvent.objects.get(key=key)


def no_event_of(key: str) -> bool:
    """Say whether nothing was told about a key, once all is written."""
    event_log.finish()
    return written(key) == 0


@contextmanager
def other_guard(alias: str, key: str, application: str) -> Iterator[int]:
    """Let another session of PostgreSQL guard a key; give the server's number for it."""
    name = lock_backends[alias].queues.name_of(key)
    database = str(connections["default"].settings_dict["NAME"])
    with server(database, application_name=application) as raw, raw.transaction():
        share(raw, name)
        yield raw.info.backend_pid


def share(raw: psycopg.Connection, name: str) -> None:
    """Lock a fence counter as a guard does."""
    statement = f"SELECT 1 FROM {table('fences')} WHERE storage_key = %s FOR SHARE"
    assert raw.execute(statement.encode(), [name]).fetchall()
