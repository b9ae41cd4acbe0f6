"""Every key that the code of the project declares, whether it is held or not."""

from __future__ import annotations

import gc
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ..conf import BackendConfig, backend_config
from ..core.errors import InvalidArgument, shown
from ..core.keys import stored_key
from ..declarations import Declaration, Kind, Missing, declarations, head_of
from ..locks import UNSET
from ..scheduling import RunScope
from .importing import import_all
from .places import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredKey:
    """A key that a decorator, a class or a command declares.

    Attributes:
        key: The template; or, where code of the project makes the key, what that is called.
        is_template: Whether it is one.
        kind: What is locked.
        mode: What the lock does, in the words of `distlock()`.
        ttl: Seconds, the backend's where none is declared; None: no expiry, or not known.
        wait: Seconds, the backend's where none is declared; None: for ever, or not known.
        min_hold: Seconds since the grant for which the key stays taken at least.
        max_lifetime: Seconds since the grant until which the lease is renewed; None: no such end.
        on_conflict: What is done if somebody else has the key, in the words of the decorator.
        backend: The alias of the lock backend.
        is_configured: Whether there is such a backend. Where there is none, its `TTL` and `WAIT`
            are not known.
        place: Where it is declared.
    """

    key: str
    is_template: bool
    kind: Kind
    mode: tuple[str, ...]
    ttl: float | None
    wait: float | None
    min_hold: float
    max_lifetime: float | None
    on_conflict: str
    backend: str
    is_configured: bool
    place: Place

    @classmethod
    def of(cls, made: object, declaration: Declaration) -> DeclaredKey:
        """Return what may be shown of a declaration."""
        lock = declaration.lock
        config = _config_of(lock.backend)
        return cls(
            key=declaration.key,
            is_template=declaration.is_template,
            kind=declaration.kind,
            mode=_mode(declaration),
            ttl=config.ttl if config and lock.ttl is None and not lock.basic else lock.ttl,
            wait=(config.wait if config else None) if lock.wait is UNSET else lock.wait,
            min_hold=lock.min_hold,
            max_lifetime=lock.max_lifetime,
            on_conflict=declaration.on_conflict,
            backend=lock.backend,
            is_configured=config is not None,
            place=Place.of(made),
        )

    def may_make(self, prefix: str) -> bool:
        """Whether keys that start with a text may come from here."""
        if not self.is_template:
            return True
        head, is_all = head_of(self.key)
        return head.startswith(prefix) or (not is_all and prefix.startswith(head))

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry: durations in seconds."""
        return {
            "key": self.key,
            "is_template": self.is_template,
            "kind": self.kind.value,
            "mode": list(self.mode),
            "ttl": self.ttl,
            "wait": self.wait,
            "min_hold": self.min_hold,
            "max_lifetime": self.max_lifetime,
            "on_conflict": self.on_conflict,
            "backend": self.backend,
            "is_configured": self.is_configured,
            "file": self.place.file,
            "line": self.place.line,
            "name": self.place.name,
        }


@dataclass(frozen=True, slots=True)
class DeclaredKeys:
    """What is declared, by key, and what could not be imported and may declare more."""

    keys: tuple[DeclaredKey, ...]
    missing: tuple[Missing, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            "declared": [each.as_json() for each in self.keys],
            "failures": [each._asdict() for each in self.missing],
        }


def list_declared(*, prefix: str = "", backends: Collection[str] | None = None) -> DeclaredKeys:
    """Return every key that is declared, once what workers import has been imported.

    Runs code of the project: whatever its modules do when they are imported.

    Args:
        prefix: Only what may make keys that start with this. Where code of the project makes the
            key, that may be any.
        backends: Aliases, configured or declared; None: all of them.

    Raises:
        InvalidArgument: `backends` is one text.
        InvalidLockBackend: There is no such alias, and nothing is declared on it.
    """
    if isinstance(backends, str):
        raise InvalidArgument(f"backends must be several aliases, not {shown(backends)}.")
    missing = import_all()
    # What a module has declared that failed to be imported in the end is gone with it.
    gc.collect()
    found = {DeclaredKey.of(made, each) for made, each in declarations()}
    declared = {each.backend for each in found}
    for alias in backends or ():
        if alias not in declared:
            backend_config(alias)
    wanted = stored_key(prefix) if prefix else ""
    chosen = [
        each
        for each in found
        if (backends is None or each.backend in backends) and each.may_make(wanted)
    ]
    return DeclaredKeys(tuple(sorted(chosen, key=_order)), missing)


def _order(each: DeclaredKey) -> tuple[Any, ...]:
    place = each.place
    return (each.key, each.kind, place.name, place.file, place.line or 0, str(each))


def _config_of(alias: str) -> BackendConfig | None:
    try:
        return backend_config(alias)
    except ImproperlyConfigured:
        return None


def _mode(declaration: Declaration) -> tuple[str, ...]:
    lock, scope = declaration.lock, declaration.scope
    if scope == RunScope.NODE_LOCAL.value:
        return ("no lock", scope)
    first = "heartbeat" if lock.heartbeat else "no heartbeat"
    words = ["basic" if lock.basic else first]
    flags = ("hold", "min_hold", "max_lifetime", "reentrant", "steal_if_dead")
    words += [name for name in flags if getattr(lock, name)]
    return (*words, scope) if scope else tuple(words)
