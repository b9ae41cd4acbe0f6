"""What a test can do to locks that last for a session, behind the backend's back."""

# ruff: noqa: D102 - the base classes describe the methods

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django_distlock import conf
from django_distlock.backends.advisory import AdvisoryBackend
from django_distlock.handler import lock_backends
from tests.backends import Registered

from .stores import DatabaseStore, Postgres, Store, Stranger

#: What tests have made beside the configured backends.
_made: list[AdvisoryBackend] = []


def end_sessions() -> None:
    """Close what a test has left open, and free what it has left held."""
    used = [each for each in lock_backends._backends.values() if isinstance(each, AdvisoryBackend)]
    for backend in [*used, *_made]:
        backend._sessions.close_all()
    _made.clear()


class SessionStore(DatabaseStore):
    """The sessions of a database, and its fence counters."""

    def __init__(self, registered: Registered, mark: str):
        Store.__init__(self, registered, mark)
        backend = lock_backends[registered.alias]
        assert isinstance(backend, AdvisoryBackend)
        self.backend = self.advisory = backend
        self.locks, self.fences = conf.table("locks"), conf.table("fences")
        self._strangers = []

    def elapse(self, seconds: float) -> None:
        # Only pauses end by themselves.
        self.ask(
            f"UPDATE {self.fences} SET paused_until = paused_until - %s WHERE strpos(key, %s) > 0",
            [int(seconds * 1_000_000), self.mark],
        )

    def has_record(self, key: str) -> bool:
        name = self.name(key)
        return self.ask(self.advisory._statements.taken(), [[name]]) == [(name,)]

    def with_prefix(self, prefix: str) -> AdvisoryBackend:
        return another(self.advisory, key_prefix=prefix)

    def stranger(self) -> Stranger:
        made = Postgres(self)
        self._strangers.append(made)
        return made


def another(backend: AdvisoryBackend, **config: Any) -> AdvisoryBackend:
    """Make another backend, which this process knows as little about as another one would."""
    changed = replace(backend.config, **config)
    made = AdvisoryBackend(changed, **changed.options)
    _made.append(made)
    return made
