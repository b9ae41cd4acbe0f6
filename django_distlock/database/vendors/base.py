"""What a lock's transaction asks of a database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, ClassVar, Literal, TypeVar

from django.db import models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q
from django.db.models.expressions import RawSQL
from django.db.utils import InterfaceError, OperationalError

from ...core.records import Grant

L = TypeVar("L", bound=models.Model)

_MICROSECONDS = models.BigIntegerField()

#: Seconds at most in which others are waited for who look for guards of the same key.
LOOK_SECONDS = 0.25


class Vendor(ABC):
    """What differs between databases, for one connection and its alias in this thread."""

    # Whose clock decides when a lease ends?
    time_authority: ClassVar[Literal["server", "client"]] = "server"
    # Do the acquirers of a key take turns by locking its fence counter, which must be there then?
    turns_by_counter: ClassVar[bool] = False
    # Does a statement lock also the rows that it only looked at? Then it names one at a time.
    locks_what_it_scans: ClassVar[bool] = False
    # Asks a new session for the schema of `{table}`, and whether the table is there. None: each
    # session finds it in the same place.
    schema_of: ClassVar[str | None] = None
    # Do its drivers write values into the statements that they send?
    writes_values_out: ClassVar[bool] = False
    # The time in microseconds, as an expression; None: the store has no clock.
    clock: ClassVar[str | None] = None
    # Can a row be locked against change while others, who only read it, lock it as well?
    supports_guard: ClassVar[bool] = False
    # The codes of errors, by what is asked about an error below.
    busy: ClassVar[Collection[object]] = ()
    duplicate: ClassVar[Collection[object]] = ()
    missing: ClassVar[Collection[object]] = ()
    overtaken: ClassVar[Collection[object]] = ()
    deadlock: ClassVar[Collection[object]] = ()
    read_only: ClassVar[Collection[object]] = ()
    # The code of a `BackendUnavailable`, by theirs.
    unavailable: ClassVar[Mapping[Any, str]]

    def __init__(self, connection: BaseDatabaseWrapper, using: str):
        self.connection = connection
        self.using = using

    # Statements

    @abstractmethod
    def now(self) -> datetime:
        """Return the store's clock, read now and not when the transaction began."""

    def live(self, rows: models.QuerySet[L]) -> models.QuerySet[L]:
        """Return those of the rows of locks that are live, by the clock of the store."""
        # Read by the statement itself where that can be, in the same round trip.
        if self.clock is None:
            now: Any = self.now()
        else:
            now = RawSQL(self.clock, [], _MICROSECONDS)  # noqa: S611 - a text of our own
        return rows.filter(Q(free_at__isnull=True) | Q(free_at__gt=now))

    @contextmanager
    def short_transaction(self, bound: float, *, writes: bool = True) -> Iterator[None]:
        """Open a transaction that sees what others commit.

        In a `TestCase` it is a savepoint of the test's transaction.

        Args:
            bound: Seconds to wait at most for the locks of others.
            writes: Whether it writes or locks; some databases need no transaction to read.
        """
        with transaction.atomic(using=self.using):
            yield

    def take_turn(self, name: str, *, shared: bool = False) -> bool:
        """Wait for the other acquirers of a key, so that two cannot create it at once.

        Args:
            shared: Not for those who share the key.

        Returns:
            Whether one of them may have been granted the key meanwhile.
        """
        return False

    def delete(self, rows: models.QuerySet[Any], names: Sequence[str | int]) -> int:
        """Delete the rows with these primary keys, which are locked already; return how many."""
        return rows.filter(pk__in=names).delete()[0]

    def make_durable(self) -> None:  # noqa: B027 - not all can
        """Let this transaction's commit survive a crash of the server. A stronger setting stays."""

    def call_out(self, name: str) -> None:  # noqa: B027 - not all can
        """Tell the processes that listen, when this transaction commits, that a key is free.

        Or may be sooner than they know. Only where somebody waits: see `sql/postgresql`.
        """

    def guard(
        self, fences: str, name: str, fence: int, bound: float, lease: Grant | None = None
    ) -> bool:
        """Keep a fence counter as it is until the caller's transaction ends.

        Args:
            fences: The table of the fence counters, quoted and with its schema.
            fence: What it has to be.
            bound: Seconds to wait at most for whoever counts it up right now.
            lease: After its end a transaction lock, which counts up nothing, may have had the
                key. Nobody could have taken over before: for that long the transaction may stand
                still, where the server can end it, and unless it is told to do so sooner.

        Returns:
            Whether it is that fence, and the lease is not over.
        """
        raise NotImplementedError

    def lock_row(self, table: str, name: str, bound: float, *, shared: bool) -> bool:
        """Lock a row until the caller's transaction ends; return whether there is one.

        Args:
            table: Quoted, and with its schema.
            bound: Seconds to wait at most. A vendor may wait for less.
        """
        raise NotImplementedError

    @contextmanager
    def looking(self, name: str) -> Iterator[bool]:
        """Be the only one who looks for guards of a key: two would take each other for one.

        Inside of a transaction.

        Yields:
            Whether nobody else does. Others are waited for as long as the transaction waits for
            locks, or `LOOK_SECONDS`.
        """
        raise NotImplementedError

    # Errors

    @abstractmethod
    def codes(self, error: BaseException) -> Sequence[Any]:
        """Return what the server or the driver calls an error, the most exact code first."""

    def is_busy(self, error: BaseException) -> bool:
        """Whether another transaction was in the way for longer than the bound."""
        return self._is_one(error, self.busy)

    def is_duplicate(self, error: BaseException) -> bool:
        """Whether a row with this value of a unique column exists already."""
        return self._is_one(error, self.duplicate)

    def is_missing(self, error: BaseException) -> bool:
        """Whether the statement names a table, a column or a function that is not there."""
        return self._is_one(error, self.missing)

    def is_overtaken(self, error: BaseException) -> bool:
        """Whether somebody has changed the row since the transaction began to read."""
        return self._is_one(error, self.overtaken)

    def is_deadlock(self, error: BaseException) -> bool:
        """Whether the database found a circle of transactions that wait for each other."""
        return self._is_one(error, self.deadlock)

    def has_rolled_back(self, error: BaseException) -> bool:
        """Whether the database has ended the whole transaction, and not the statement alone."""
        return False

    def is_read_only(self, error: BaseException) -> bool:
        """Whether the transaction is one that may only read."""
        return self._is_one(error, self.read_only)

    def _is_one(self, error: BaseException, these: Collection[object]) -> bool:
        return any(code in these for code in self.codes(error))

    def known_code(self, error: BaseException) -> str | None:
        """Return the code of a `BackendUnavailable`; "": another known error; None: unknown."""
        codes = self.codes(error)
        known = (self.unavailable[code] for code in codes if code in self.unavailable)
        return next(known, "") if codes else None

    def has_answered(self, error: BaseException) -> bool:
        """Whether an error is what the server said, and not what the driver found."""
        return self.known_code(error) is not None

    def unavailable_code(self, error: BaseException) -> str | None:
        """Return the code of a `BackendUnavailable`; None: the store is there, and refused."""
        code = self.known_code(error)
        if code is None and isinstance(error, OperationalError | InterfaceError):
            # A driver that cannot reach its server may have no number to report.
            return "service_unavailable"
        return code or None

    # What the statements share

    def _ask(self, statement: str, arguments: list[Any] | None = None) -> Any:
        """Run a statement and return its first row, if it has rows."""
        with self.connection.cursor() as cursor:
            cursor.execute(statement, arguments)
            return cursor.fetchone() if cursor.description else None
