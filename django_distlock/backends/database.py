"""Locks in the project's own database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from typing import Any, ClassVar

from django.db import connections

from ..conf import BackendConfig
from ..core.errors import LockError
from ..core.records import (
    UNKNOWN,
    Attempt,
    Contended,
    Freed,
    Grant,
    Holder,
    InTheWay,
    Page,
    Record,
    Unknown,
    Unreadable,
    Waiting,
    Waits,
)
from ..database.connections import close_before_drop, in_test_case
from ..database.server_functions import ServerFunctions
from ..database.sql import side_table
from ..database.vendors import VENDORS
from ..exceptions import InvalidLockBackend
from ..managers.compact import CompactLockManager
from ..managers.compound import CompoundLockManager
from ..managers.lock import HeldLockManager
from ..managers.waiter import WaiterManager
from ..models import HeldLock, Waiter
from .base import BaseLockBackend
from .counting import count_rows, count_states
from .counts import Counts, States, Strain
from .listening import Listener
from .transactions import TransactionLocks


class DatabaseBackend(TransactionLocks, BaseLockBackend):
    """Keeps locks in one table, and fences in another.

    Args:
        using: The alias of the database; None: `default`, which no router may contradict.
        server_functions: Use the quick way of the database: on PostgreSQL the functions that the
            migration installs, on MariaDB a block of SQL per operation, on SQLite a few statements.
            False: run the same transactions as ORM code, as on MySQL, also where functions may not
            be created.
        cleanup_on_read: Remove an expired record when it is read.
        listen_using: On PostgreSQL, the alias to listen for wake-ups on, if `using` goes through a
            connection pooler; None: `using`.
    """

    distributed: ClassVar[bool] = True

    def __init__(
        self,
        config: BackendConfig,
        *,
        using: str | None = None,
        server_functions: bool = True,
        cleanup_on_read: bool = False,
        listen_using: str | None = None,
        **unknown: Any,
    ):
        super().__init__(config, **unknown)
        for name, value in (
            ("server_functions", server_functions),
            ("cleanup_on_read", cleanup_on_read),
        ):
            if not isinstance(value, bool):
                raise InvalidLockBackend(
                    f"DISTLOCK[{self.alias!r}]: {name} must be True or False, not {value!r}."
                )
        vendor = self._use_database(using)
        # Whether each frequent operation is one statement that commits by itself.
        self._single = server_functions and vendor == "postgresql"
        #: The storage key where the last cleanup stopped.
        self._cleaned_to: str | None = None
        self.time_authority = VENDORS[vendor].time_authority
        self.cleanup_on_read = cleanup_on_read
        self._listener = self._listener_for(vendor, listen_using)
        self._waiting: WaiterManager = Waiter.objects.db_manager(self.using)
        self._locks: HeldLockManager = HeldLock.objects.db_manager(self.using)
        self._locks.follows_clock = config.fence_floor == "clock"
        # On PostgreSQL, only the function can do it.
        self.supports_transactions = self._single or vendor != "postgresql"
        self._hot: HeldLockManager | ServerFunctions = self._locks
        self.acquires_together = self._single
        if self._single:
            self._hot = ServerFunctions(
                self.using, self._connections.named, follows_clock=self._locks.follows_clock
            )
        elif server_functions and vendor == "sqlite":
            self._hot = CompactLockManager.of(self._locks)
        elif server_functions and vendor == "mysql":
            self._hot = CompoundLockManager.of(self._locks)
        renamed: Callable[[str], HeldLockManager | ServerFunctions] = self._hot.db_manager
        #: The manager or the functions, by the alias of the connection.
        self._hot_on = cache(renamed)

    @property
    def supports_wakeups(self) -> bool:  # type: ignore[override]
        """On PostgreSQL, with psycopg 3."""
        return self._listener is not None

    @property
    def is_listening(self) -> bool:
        """See `BaseLockBackend`. False in a `TestCase`, whose transaction sends nothing."""
        return super().is_listening and not self._in_test_case()

    def listen(self, bound: float = 0.0) -> bool:
        return not self._in_test_case() and super().listen(bound)

    def _acquire(self, attempt: Attempt) -> Grant | Contended:
        def acquire(on: str) -> Grant | Contended | None:
            return self._hot_on(on).acquire(attempt)

        def share(on: str) -> Grant | Contended:
            return self._hot_on(on).share(attempt)

        busy = partial(self._busy, attempt.name)
        if attempt.permits == 1:
            answer: Grant | Contended | None = self._connections.ask(
                acquire, bound=attempt.bound, busy=busy, single=self._single, key=attempt.key
            )
            if answer is not None:
                return answer
        return self._connections.ask(
            share, bound=attempt.bound, busy=busy, single=self._single, key=attempt.key
        )

    def _acquire_many(self, attempts: Sequence[Attempt]) -> Sequence[Grant] | InTheWay:
        functions, first = self._hot, attempts[0]
        if not isinstance(functions, ServerFunctions):
            return super()._acquire_many(attempts)
        busy = InTheWay(first.key, Contended(busy=True))
        return self._connections.ask(
            lambda on: functions.db_manager(on).acquire_many(attempts),
            bound=first.bound,
            busy=lambda: busy,
            single=True,
        )

    def _extend(
        self, name: str, grant: Grant, ttl: float | None, *, bound: float
    ) -> Grant | Unknown | None:
        def extend(on: str) -> Grant | Unknown | None:
            return self._hot_on(on).extend(name, grant, ttl, bound=bound)

        return self._connections.ask(
            extend, bound=bound, busy=_unknown, single=self._single, key=grant.key
        )

    def _extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        none_known: list[Grant | Unknown | None] = [UNKNOWN] * len(named)
        return self._connections.ask(
            lambda on: self._hot_on(on).extend_many(named),
            busy=lambda: none_known,
            single=self._single,
        )

    def _release(
        self, name: str, grant: Grant, held: float | None, *, bound: float
    ) -> bool | Unknown:
        def release(on: str) -> Freed | Unknown:
            return self._hot_on(on).release(name, grant, held=held, bound=bound)

        freed = self._connections.ask(
            release, bound=bound, busy=_unknown, single=self._single, key=grant.key
        )
        if freed == "wanted":
            self.queues.note_wanted(name)
        return freed if isinstance(freed, Unknown) else freed != "gone"

    def _read(self, name: str) -> Record | None:
        return self._find(lambda locks: locks.read_key(name), pk=name)

    def _sharing(self, name: str) -> Sequence[Record]:
        return self._connections.ask(lambda on: self._locks_on(on).sharing(name), writes=False)

    def _read_many(self, names: Sequence[str]) -> Sequence[Record | None]:
        found = self._connections.ask(
            lambda on: self._locks_on(on).read_many(names), writes=False, long=True
        )
        return [found.get(name) for name in names]

    def _read_token(self, token: str) -> Record | None:
        record = self._find(lambda locks: locks.read(token=token), token=token)
        return None if record is None or record.is_settled else record

    def _find(
        self, read: Callable[[HeldLockManager], Record | None], **lookup: Any
    ) -> Record | None:
        record = self._connections.ask(lambda on: read(self._locks_on(on)), writes=False)
        if record is None and self.cleanup_on_read:
            # The answer is known already, even if the cleanup fails.
            with suppress(LockError):
                self._connections.ask(
                    lambda on: self._locks_on(on).remove_expired(**lookup), busy=lambda: 0
                )
        return record

    def _list(
        self, prefix: str, cursor: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> Page:
        start = self._namespace(prefix)

        def page(on: str) -> list[tuple[str, Record | Unreadable]]:
            return self._locks_on(on).live_records(
                start, cursor, host=host, task_id=task_id, limit=limit + 1
            )

        found = self._connections.ask(page, writes=False, long=True)
        shown = [each for _name, each in found[:limit]]
        return Page(
            tuple(each for each in shown if isinstance(each, Record)),
            found[limit - 1][0] if len(found) > limit else None,
            tuple(each for each in shown if isinstance(each, Unreadable)),
        )

    def _expired(self, name: str | None, limit: int) -> Sequence[Record]:
        def look(on: str) -> list[Record]:
            return self._locks_on(on).expired(self._namespace(), name, limit)

        return self._connections.ask(look, writes=False, long=True)

    def _force_release(
        self, name: str, key: str, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        def force(on: str) -> Record | Contended | None:
            return self._locks_on(on).force_release(name, key, fence, bound=bound)

        return self._connections.ask(force, bound=bound, busy=partial(self._busy, name), key=key)

    def _request_stop(
        self, name: str, within: float | None, token: str | None, fence: int | None, *, bound: float
    ) -> Record | Contended | None:
        def request(on: str) -> Record | Contended | None:
            return self._locks_on(on).request_stop(name, within, token, fence, bound=bound)

        return self._connections.ask(request, bound=bound, busy=partial(self._busy, name))

    def _cleanup(self, before: datetime, limit: int) -> int:
        def clean(on: str) -> tuple[int, str | None] | None:
            return self._locks_on(on).cleanup(before, limit, self._cleaned_to)

        cleaned = self._connections.ask(clean, busy=lambda: None, long=True)
        if cleaned is None:
            return 0
        gone, self._cleaned_to = cleaned
        # The answer is known already, and waiters are only shown to people.
        with suppress(LockError):
            self._connections.ask(
                lambda on: self._waiters_on(on).cleanup(limit), busy=lambda: None, long=True
            )
        return gone + (self._remove_notes(before, limit - gone) if gone < limit else 0)

    def _counts(self) -> Counts:
        return count_rows(self, locks=True)

    def _states(self, soon: float) -> tuple[States, Strain]:
        return count_states(self, soon)

    def _note_waiter(
        self, name: str, holder: Holder, seconds: float, note: str | None
    ) -> str | None:
        earlier = None if note is None else int(note)
        # Not the name of the channel, which is a secret.
        channel = "LISTEN" if self.is_listening else ""

        def note_it(on: str) -> int | None:
            return self._waiters_on(on).note(name, holder, seconds, earlier, channel=channel)

        noted = self._connections.ask(note_it, busy=lambda: earlier)
        return None if noted is None else str(noted)

    def _open_door(self, name: str) -> None:
        # If its row is locked, it opens by itself.
        self._connections.ask(lambda on: self._locks_on(on).open_door(name), busy=lambda: None)

    def _drop_waiter(self, name: str, note: str) -> None:
        # If its row is locked, the note expires.
        self._connections.ask(
            lambda on: self._waiters_on(on).drop(name, int(note)), busy=lambda: None
        )

    def _waiters(self, name: str) -> Sequence[Waiting]:
        return self._connections.ask(lambda on: self._waiters_on(on).waiting(name), writes=False)

    def _count_waiters(self, names: Sequence[str]) -> Sequence[Waits]:
        if not names:
            return []
        found = self._connections.ask(
            lambda on: self._waiters_on(on).numbers(names), writes=False, long=True
        )
        return [found.get(name, Waits()) for name in names]

    @property
    def can_renew(self) -> bool:  # type: ignore[override]
        """False in a `TestCase`, because no other connection sees its uncommitted rows."""
        return not self._in_test_case()

    def _in_test_case(self) -> bool:
        connection = connections[self.using]
        return connection.in_atomic_block and in_test_case(connection)

    def _listener_for(self, vendor: str, listen_using: str | None) -> Listener | None:
        if listen_using is not None:
            heard = self._vendor_of(listen_using, "listen_using")
            for using, kind in ((self.using, vendor), (listen_using, heard)):
                if kind != "postgresql":
                    raise InvalidLockBackend(
                        f"DISTLOCK[{self.alias!r}]: listen_using: {using!r} is a {kind} database."
                        " Only PostgreSQL has wake-ups."
                    )
        driver = connections[self.using].Database  # type: ignore[attr-defined]
        # psycopg2 receives notifications only during queries.
        if vendor != "postgresql" or driver.__name__ != "psycopg":
            return None
        from .notify import NotifyLine

        salt = partial(self._connections.named, side_table("salt"))
        subscribe = partial(NotifyLine, listen_using or self.using, salt, self.alias, self.queues)
        listener = Listener(f"distlock-wake-ups-{self.alias}", subscribe, self.queues)
        close_before_drop(listener)
        return listener

    def _locks_on(self, on: str) -> HeldLockManager:
        return self._locks.db_manager(on)

    def _waiters_on(self, on: str) -> WaiterManager:
        return self._waiting.db_manager(on)

    def _look_at_once(self, name: str, on: str) -> Record | None:
        return self._locks_on(on).read_key(name, bound=0)


def _unknown() -> Unknown:
    return UNKNOWN
