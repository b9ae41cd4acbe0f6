"""Hand a lease over from one process to another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import NoneType
from typing import Any, Final, TypeVar

from django.core import signing

from ..backends.base import BaseLockBackend
from ..core.errors import (
    BackendUnavailable,
    InvalidArgument,
    LockError,
    LockLost,
    LockNotAcquired,
    LockUsageError,
)
from ..core.insisting import Answer
from ..core.keys import new_token
from ..core.records import Contended, Grant
from ..handler import lock_backends
from ..process.heartbeat import held_here
from ..process.host import current_holder
from .acquire import insist
from .attempts import Granted, release_unanswered
from .state import Holding, Terms, hold_from

A = TypeVar("A", bound=Answer)

_SALT: Final = "django_distlock.lease"
_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "backend": (str,),
    "key": (str,),
    "token": (str,),
    "fence": (int,),
    "ttl": (float, int, NoneType),
    "acquired_at": (str,),
    "hold": (float, int),
    "extend_by": (float, int, NoneType),
    "permits": (int, NoneType),
}
_OTHER_VERSION: Final = "The dumped lease is from another version of django-distlock:"


def dump(holding: Holding) -> str:
    """Stop renewing and releasing a lease; return what another process needs, as a signed text."""
    return holding.alone(partial(_dump, holding))


def _dump(holding: Holding) -> str:
    holding.check(tells=False)
    text = _signed(holding.store, holding.grant, holding.terms)
    holding.end_keeping()
    held_here.discard(holding)
    holding.state = "released"
    return text


def _signed(store: BaseLockBackend, grant: Grant, terms: Terms) -> str:
    if store.distributed and not store.supports_ttl:
        raise LockUsageError(
            f"The lock backend {store.alias!r} ({type(store).__name__}) holds a lease by a"
            " connection of this process. Another process cannot take it over.",
            key=grant.key,
            code="unsupported",
        )
    return signing.dumps(
        {
            "backend": store.alias,
            "key": grant.key,
            "token": str(grant.token),
            "fence": grant.fence,
            "ttl": grant.ttl,
            "acquired_at": grant.acquired_at.isoformat(),
            "hold": terms.hold,
            "extend_by": terms.ttl,
            "permits": terms.permits,
        },
        salt=_SALT,
    )


def load(text: str) -> tuple[BaseLockBackend, Granted, Terms]:
    """Take over what `dump` describes: see `Lease.load`.

    The lease gets a new token and a higher fence, so that its previous holder can no longer write.
    A text works once, however often it is delivered: the old lease is settled first. That spends
    its token, and keeps the key taken until the new lease has replaced it.
    """
    given = _read(text)
    store = lock_backends[given["backend"]]
    acquired_at: datetime = given["acquired_at"]
    permits = given["permits"]
    grant = Grant(
        given["key"], given["token"], given["fence"], given["ttl"], acquired_at, None,
        shared=permits != 1,
    )  # fmt: skip
    taking = _Taking(store, grant, permits)
    granted = taking.take()
    hold = hold_from(granted.grant.acquired_at, given["hold"], acquired_at)
    terms = Terms(
        ttl=given["extend_by"], holder=taking.holder, retry=store.config.retry,
        hold=hold, permits=permits,
    )  # fmt: skip
    return store, granted, terms


class _Taking:
    """Replaces a lease that was handed over by a new one."""

    def __init__(self, store: BaseLockBackend, grant: Grant, permits: int | None):
        self._permits = permits
        self.holder = current_holder()
        self._store = store
        self._grant = grant
        self._token = new_token()
        # Whether a request with the new token got no answer, and so may have been granted.
        self._unanswered = False
        self._retry = store.config.retry
        # A lease without expiry gets one during the transfer.
        self._seconds = grant.ttl or store.config.ttl
        self._until = store.monotonic() + self._seconds

    def take(self) -> Granted:
        """Return the new grant."""
        try:
            return self._take()
        except LockError:
            if self._unanswered:
                self._release_unanswered()
            raise

    def _take(self) -> Granted:
        extended = self._insist(
            lambda bound: self._store.extend(self._grant, self._seconds, bound=bound)
        )
        if not isinstance(extended, Grant) or extended.expires_at is None:
            raise self._over()
        self._look()
        lasts = max(0.0, (extended.expires_at - extended.acquired_at).total_seconds())
        spent = self._insist(lambda bound: self._store.release(self._grant, lasts, bound=bound))
        if spent is not True:
            raise self._over()
        return self._replace()

    def _look(self) -> None:
        """Refuse while the key is paused, before the text is spent."""
        seen = self._acquire(permits=1)
        if isinstance(seen, Grant):
            # An operator has just force-released the old lease.
            self._store.release(seen)
            raise self._over()
        if seen.paused:
            raise LockNotAcquired(
                f"The lease on {self._grant.key!r} cannot be taken over: the key is paused.",
                key=self._grant.key,
                holder=seen.holder,
            )

    def _replace(self) -> Granted:
        # After a lost answer, the record may have our token already.
        ours, theirs = self._token, self._grant.token
        replace, pauses = theirs, self._retry.pauses()
        refused = 0
        while True:
            sent_at = self._store.monotonic()
            try:
                answer = self._acquire(replace=replace, permits=self._permits)
            except BackendUnavailable:
                if sent_at >= self._until:
                    raise
                replace, refused = ours, 0
            else:
                if isinstance(answer, Grant):
                    if self._store.monotonic() >= self._until:
                        # The old lease may have expired before, so this may be a later grant.
                        self._store.release(answer)
                        raise self._over()
                    ttl = math.inf if answer.ttl is None else answer.ttl
                    return Granted(answer, sent_at + ttl, ttl if self._unanswered else math.inf)
                if not (answer.busy or answer.paused):
                    refused += 1
                    replace = theirs if replace == ours else ours
                if refused > self._unanswered or sent_at >= self._until:
                    raise self._over()
            time.sleep(next(pauses, 1.0) if not refused else 0.0)

    def _acquire(self, *, replace: str | None = None, permits: int | None) -> Grant | Contended:
        given, before, self._unanswered = self._grant, self._unanswered, True
        answer = self._store.acquire(
            given.key, self._token, given.ttl, self.holder, replace=replace, permits=permits
        )
        self._unanswered = before
        return answer

    def _release_unanswered(self) -> None:
        # `_look` asks for the key exclusively.
        for shared in {self._grant.shared, False}:
            grant = replace(self._grant, token=self._token, shared=shared)
            release_unanswered(self._store, grant)

    def _insist(self, question: Callable[[float], A]) -> A:
        return insist(self._store, question, self._until, self._retry)

    def _over(self) -> LockLost:
        return LockLost(
            f"The lease on {self._grant.key!r} (fence {self._grant.fence}) has expired or was"
            " already loaded.",
            key=self._grant.key,
        )


def _read(text: str) -> dict[str, Any]:
    try:
        given: dict[str, Any] = signing.loads(text, salt=_SALT)
    except (signing.BadSignature, TypeError, ValueError, AttributeError):
        raise InvalidArgument(
            "This text was not created by Lease.dump() with this project's SECRET_KEY."
        ) from None
    if not isinstance(given, dict):
        raise InvalidArgument(f"A dumped lease must be a dict, not a {type(given).__name__}.")
    # No message shows its values, because one of them is the token.
    if differing := sorted(map(str, given.keys() ^ _FIELDS.keys())):
        raise InvalidArgument(f"{_OTHER_VERSION} {', '.join(differing)} missing or unknown.")
    for name, kinds in _FIELDS.items():
        if type(given[name]) not in kinds:
            found = type(given[name]).__name__
            raise InvalidArgument(f"{_OTHER_VERSION} {name} is a {found}.")
    try:
        given["acquired_at"] = datetime.fromisoformat(given["acquired_at"])
    except ValueError:
        raise InvalidArgument(f"{_OTHER_VERSION} acquired_at is not a time.") from None
    if given["acquired_at"].utcoffset() is None:
        raise InvalidArgument(f"{_OTHER_VERSION} acquired_at has no time zone.")
    return given
