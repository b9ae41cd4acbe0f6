"""Which transactions keep keys, and which wait for them, over all backends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from django.core.exceptions import ImproperlyConfigured

from ..core.documents import Document
from ..core.errors import LockError
from ..core.holders import Session
from ..handler import lock_backends
from .listing import Failure, chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionLock(Document):
    """A key that a transaction has locked, or waits for.

    Attributes:
        backend: The alias of the backend that was asked.
        key: "": the store knows its number alone, because no lease of it was ever granted.
        number: What the server calls it.
        shared: Whether others may share it.
        waits: Whether the transaction waits for it; False: it has it.
        since: When it began to wait, or when the transaction began.
        seconds: How long ago that was, by the store's clock.
        session: Whose transaction it is.
        kind: `"transaction"`.
    """

    backend: str
    key: str
    number: int
    shared: bool
    waits: bool
    since: datetime | None
    seconds: float | None
    session: Session
    kind: str = "transaction"

    @property
    def name(self) -> str:
        """The key, or its number, as people see it."""
        return self.key or f"number {self.number}"


@dataclass(frozen=True, slots=True)
class TransactionLocks(Document):
    """What transactions keep.

    Attributes:
        transactions: By backend in the order of the settings, the longest one first.
        failures: Backends that could not be asked, or cannot tell.
    """

    transactions: tuple[TransactionLock, ...]
    failures: tuple[Failure, ...] = ()


def list_transactions(*, backends: Collection[str] | None = None) -> TransactionLocks:
    """Return which keys transactions have locked by `transaction_lock()`, or wait for.

    What several aliases of one database tell is there once, by the one that knows the key.

    Args:
        backends: Aliases in `DISTLOCK`; None: all of them that can tell.

    Raises:
        InvalidLockBackend: There is no such alias.
    """
    # Numbers are hashes of the secret of a database.
    found: dict[tuple[int, int], TransactionLock] = {}
    failures: list[Failure] = []
    for alias in chosen(backends):
        try:
            kept = lock_backends[alias].transactions.kept()
            now = lock_backends[alias].clock() if kept else None
        except (LockError, ImproperlyConfigured) as error:
            failures.append(Failure.of(alias, error))
            continue
        if kept is None and backends is not None:
            message = f"The lock backend {alias!r} cannot list transaction locks."
            failures.append(Failure(backend=alias, code="unsupported", message=message))
        for each in kept or ():
            before = found.get((each.number, each.session.pid))
            if before is None or not before.key:
                found[each.number, each.session.pid] = TransactionLock(
                    backend=alias,
                    key=each.key,
                    number=each.number,
                    shared=each.shared,
                    waits=each.waits,
                    since=each.since,
                    seconds=(now - each.since).total_seconds() if now and each.since else None,
                    session=each.session,
                )
    return TransactionLocks(tuple(found.values()), tuple(failures))
