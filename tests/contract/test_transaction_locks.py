"""`transaction_lock()`: keys that are locked until the caller's transaction ends."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from psycopg import IsolationLevel

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    LockNotAcquired,
    LockUsageError,
    atransaction_lock,
    lock_backends,
    transaction_lock,
    transaction_locked,
)
from django_distlock.backends.transactions import TransactionLocks
from django_distlock.core.keys import place_name
from django_distlock.core.records import Record
from django_distlock.locks.attempts import BUSY_SECONDS
from tests.backends import Registered
from tests.salted import SALT
from tests.shop.models import Row

from .aliases import alias_like
from .helpers import Later, prompt, take
from .locking import eventually, grantable, held_elsewhere, lock_of, using_of
from .stores import DatabaseStore, Stranger

#: Where others may go on beside a transaction that writes.
SIDE_BY_SIDE = pytest.mark.stores("postgresql", "mysql", why="one writer per file")

pytestmark = [
    pytest.mark.requires("supports_transactions"),
    pytest.mark.stores("sqlite", "postgresql", "mysql", why="it has no part in transactions"),
]


def locks(registered: Registered, *keys: str, **how: Any) -> bool:
    """Say whether a transaction of another thread gets these keys at once."""

    def attempt() -> bool:
        with transaction.atomic(using=using_of(registered)):
            try:
                transaction_lock(*keys, backend=registered.alias, **{"wait": 0, **how})
            except LockNotAcquired:
                return False
            return True

    return Later(attempt).result()


@contextmanager
def locked_elsewhere(registered: Registered, *keys: str, **how: Any) -> Iterator[None]:
    """Hold keys by a transaction of another thread."""
    locked, over = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction.atomic(using=using_of(registered)):
            transaction_lock(*keys, backend=registered.alias, **how)
            locked.set()
            over.wait(20)

    holder = Later(hold)
    try:
        assert locked.wait(10)
        yield
    finally:
        over.set()
        holder.result()


@SIDE_BY_SIDE
def test_key_is_locked_until_the_transaction_ends(registered: Registered, key: str) -> None:
    """Nobody else gets it before the commit, by a transaction or by a lease."""
    lease = lock_of(registered, key, wait=0)
    for rolls_back in (False, True):
        with transaction.atomic(using=using_of(registered)):
            transaction_lock(key, backend=registered.alias)
            assert not locks(registered, key)
            assert not locks(registered, key, shared=True)
            assert not grantable(lease)
            assert locks(registered, f"{key}-2")
            transaction.set_rollback(rolls_back, using=using_of(registered))
        assert locks(registered, key)
        assert grantable(lease)


@SIDE_BY_SIDE
def test_shared_key_is_shared(registered: Registered, key: str) -> None:
    """By transactions, and on PostgreSQL by leases as well; who wants it alone is kept out."""
    reader, alone = lock_of(registered, key, shared=True, wait=0), lock_of(registered, key, wait=0)
    with transaction.atomic(using=using_of(registered)):
        transaction_lock(key, shared=True, backend=registered.alias)
        assert locks(registered, key, shared=True)
        assert not locks(registered, key)
        assert grantable(reader) is (registered.store == "postgresql")
        assert not grantable(alone)
    with locked_elsewhere(registered, key):
        assert not grantable(reader)
    assert grantable(reader)
    assert locks(registered, key)


def test_lease_keeps_transactions_out(registered: Registered, key: str) -> None:
    """A transaction waits for the end of a lease, and is told who holds it."""
    with held_elsewhere(lock_of(registered, key)) as lease:
        with (
            pytest.raises(LockNotAcquired, match="has held it for") as caught,
            transaction.atomic(using=using_of(registered)),
        ):
            transaction_lock(f"{key}-1", key, wait=0, backend=registered.alias)
        assert (caught.value.key, caught.value.code) == (key, "acquisition_timeout")
        assert caught.value.holder is not None
        timer = threading.Timer(0.3, lambda: Later(lease.release).result())
        timer.start()
        with transaction.atomic(using=using_of(registered)), prompt(0.3):
            transaction_lock(f"{key}-1", key, wait=5, backend=registered.alias)
        timer.join()


@SIDE_BY_SIDE
def test_lease_waits_for_the_transaction(registered: Registered, key: str) -> None:
    """Refused, it says what keeps the key, and is no trouble; waiting, it comes behind the end."""
    store = lock_backends[registered.alias]
    with locked_elsewhere(registered, key):
        with pytest.raises(LockNotAcquired, match="a transaction has locked it"):
            lock_of(registered, key, wait=0).acquire()
        waiter = Later(lock_of(registered, key, wait=30).acquire)
        assert eventually(lambda: store.queues.name_of(key) in store.queues, 20)
    Later(waiter.result().release).result()


@pytest.mark.aliases("postgres")
def test_acquire_under_way_is_no_transaction(
    registered: Registered, stranger: Stranger, key: str
) -> None:
    """Whoever has the number of a key, and has no lease yet, is nobody who is known to hold it."""
    stranger.queue(key)
    with pytest.raises(BackendUnavailable, match="A transaction blocks it"):
        lock_of(registered, key, wait=0).acquire()
    with (
        pytest.raises(BackendUnavailable, match="A transaction blocks it"),
        transaction.atomic(using=using_of(registered)),
    ):
        transaction_lock(key, wait=0, backend=registered.alias)
    stranger.rollback()
    assert locks(registered, key)


@pytest.mark.aliases("postgres", "mariadb")
@pytest.mark.parametrize("permits", [1, None])
def test_extend_in_flight_is_waited_for(
    registered: Registered, store: DatabaseStore, stranger: Stranger, key: str, permits: int | None
) -> None:
    """What looks over may last: an extend that began in time, and has yet to be committed."""
    grant = take(store.backend, key, 5, permits=permits)
    name = store.name(key)
    store.elapse(6.1)
    later = int((store.now().timestamp() + 60) * 1_000_000)
    stranger.execute(
        f"UPDATE {store.locks} SET expires_at = %s, free_at = %s WHERE storage_key = %s",
        *(later, later, place_name(name, grant.token) if grant.shared else name),
    )
    waiter = Later(locks, registered, key, wait=1)
    stranger.wait_until_blocked()
    stranger.commit()
    assert waiter.result() is False


@SIDE_BY_SIDE
def test_operators_reach_a_key_that_a_transaction_waits_for(
    registered: Registered, store: DatabaseStore, key: str
) -> None:
    """The lease in its way is taken from its holder, and the transaction goes on."""
    take(store.backend, key, 600)
    waiter = Later(locks, registered, key, wait=20)
    if registered.store == "postgresql":
        # Elsewhere nothing is kept meanwhile.
        assert eventually(lambda: bool(store.backend.guards.sessions(key)), 10)
    assert eventually(lambda: isinstance(store.backend.force_release(key), Record), 10)
    assert waiter.result() is True


@pytest.mark.aliases("postgres")
@pytest.mark.parametrize("table", ["locks", "fences", "salt"])
def test_locked_table_is_bounded(
    registered: Registered, store: DatabaseStore, stranger: Stranger, key: str, table: str
) -> None:
    """A table that somebody has locked is trouble, in time, and not contention."""
    named = {"locks": store.locks, "fences": store.fences, "salt": SALT}[table]
    stranger.execute(f"LOCK TABLE {named} IN ACCESS EXCLUSIVE MODE")
    with prompt(BUSY_SECONDS), pytest.raises(BackendUnavailable):
        Later(locks, registered, key, wait=0.3).result()
    stranger.rollback()
    assert locks(registered, key)


def test_any_wait_is_possible(registered: Registered, key: str) -> None:
    """Longer than the server could wait by one statement."""
    wait: Any
    for wait in (timedelta.max, 1e15, None):
        with held_elsewhere(lock_of(registered, key)) as lease:
            waiter = Later(locks, registered, key, wait=wait)
            Later(lease.release).result()
        assert waiter.result() is True, wait


@pytest.mark.aliases("postgres")
@pytest.mark.parametrize(
    ("mode", "refused"),
    [("ISOLATION LEVEL REPEATABLE READ", "snapshot"), ("READ ONLY", "read-only transaction")],
)
def test_mode_that_was_asked_for_in_sql_is_refused(
    registered: Registered, key: str, mode: str, refused: str
) -> None:
    """Django does not know of it. The key may have been held before, or not."""
    take_and_release(registered, f"{key}-2")
    for each in (key, f"{key}-2"):
        with transaction.atomic(), connections["default"].cursor() as cursor:
            cursor.execute(f"SET TRANSACTION {mode}")
            with pytest.raises(LockUsageError, match=refused):
                transaction_lock(each, backend=registered.alias)
            if refused == "snapshot":
                # The transaction goes on.
                cursor.execute("SELECT 1")


@pytest.mark.aliases("mariadb")
def test_snapshot_of_mariadb_hides_no_lease(registered: Registered, key: str) -> None:
    """Set for the session behind Django's back, it began before the lease was granted."""
    with (
        alias_like("mariadb") as alias,
        held_elsewhere(lock_of(registered, f"{key}-2")),
        connections[alias].cursor() as cursor,
    ):
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with transaction.atomic(using=alias):
            cursor.execute("SELECT COUNT(*) FROM django_distlock_heldlock")
            with held_elsewhere(lock_of(registered, key)), pytest.raises(LockNotAcquired):
                transaction_lock(key, wait=0, using=alias, backend=registered.alias)


@pytest.mark.aliases("sqlite")
def test_file_is_not_kept_from_who_has_a_lease(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Granted while the transaction got hold of the file, the lease cannot be given back."""
    looks: list[str] = []
    look = TransactionLocks._look

    def overlook(store: TransactionLocks, names: Any, asked: Any, on: str, now: Any) -> Any:
        looks.append(on)
        return None if len(looks) == 1 else look(store, names, asked, on, now)

    monkeypatch.setattr(TransactionLocks, "_look", overlook)
    with held_elsewhere(lock_of(registered, key)) as lease:
        with (
            prompt(),
            pytest.raises(LockNotAcquired) as caught,
            transaction.atomic(using=using_of(registered)),
        ):
            transaction_lock(key, wait=20, backend=registered.alias)
        assert caught.value.code == "deadlock"
        assert Later(lease.release).result() is True


@pytest.mark.aliases("sqlite", "sqlite_orm")
@pytest.mark.parametrize("mode", ["IMMEDIATE", "exclusive"])
def test_transaction_that_has_the_file_waits_for_no_lease(
    registered: Registered, key: str, mode: str
) -> None:
    """Its holder could neither renew the lease nor give it back meanwhile."""
    with (
        alias_like("sqlite", OPTIONS={"transaction_mode": mode}) as using,
        held_elsewhere(lock_of(registered, key)) as lease,
    ):
        with (
            prompt(),
            pytest.raises(LockNotAcquired, match="retry") as caught,
            transaction.atomic(using=using),
        ):
            transaction_lock(key, wait=20, using=using, backend=registered.alias)
        assert caught.value.code == "deadlock"
        lease.check()
        lock_backends[registered.alias].pause(f"{key}-2", datetime(9000, 1, 1, tzinfo=UTC))
        with pytest.raises(LockNotAcquired, match="paused"), transaction.atomic(using=using):
            transaction_lock(f"{key}-2", wait=20, using=using, backend=registered.alias)
        with transaction.atomic(using=using):
            transaction_lock(f"{key}-3", using=using, backend=registered.alias)


@pytest.mark.stores("mysql", why="it gives up what was locked")
@pytest.mark.parametrize("by", ["lease", "transaction", "stranger"])
def test_what_stays_locked_behind_a_refusal_is_known(
    registered: Registered, stranger: Stranger, key: str, by: str
) -> None:
    """A lease of it would wait for the transaction. Of what is refused at the look, nothing is."""
    held: AbstractContextManager[object] = nullcontext()
    if by == "stranger":
        stranger.queue(f"{key}-2")
    elif by == "transaction":
        held = locked_elsewhere(registered, f"{key}-2")
    else:
        held = held_elsewhere(lock_of(registered, f"{key}-2"))
    first = lock_of(registered, f"{key}-1", wait=1)
    with transaction.atomic(using=using_of(registered)):
        with held, pytest.raises(BackendUnavailable if by == "stranger" else LockNotAcquired):
            transaction_lock(f"{key}-1", f"{key}-2", wait=0, backend=registered.alias)
        if by == "lease":
            assert first.acquire().release()
        else:
            with pytest.raises(LockUsageError, match="transaction_lock"):
                first.acquire()


@pytest.mark.stores("mysql", why="it gives up what was locked")
def test_what_stays_locked_behind_a_late_lease_is_known(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is seen when all keys are locked: also those behind it."""
    look = TransactionLocks._look_beside

    def overlook(store: TransactionLocks, names: Any, asked: Any, *, locked: bool) -> Any:
        return look(store, names, asked, locked=locked) if locked else None

    monkeypatch.setattr(TransactionLocks, "_look_beside", overlook)
    with (
        held_elsewhere(lock_of(registered, f"{key}-1")),
        transaction.atomic(using=using_of(registered)),
    ):
        with pytest.raises(LockNotAcquired):
            transaction_lock(f"{key}-1", f"{key}-2", wait=0, backend=registered.alias)
        with pytest.raises(LockUsageError, match="transaction_lock"):
            lock_of(registered, f"{key}-2", wait=1).acquire()


@SIDE_BY_SIDE
@pytest.mark.parametrize("by", ["lease", "transaction"])
@pytest.mark.parametrize("wait", [0, 0.2])
def test_what_was_refused_leaves_nothing_locked(
    registered: Registered, key: str, by: str, wait: float
) -> None:
    """All or none: those that were free are free, and the transaction goes on."""
    held: AbstractContextManager[object] = (
        held_elsewhere(lock_of(registered, f"{key}-2"))
        if by == "lease"
        else locked_elsewhere(registered, f"{key}-2")
    )
    with transaction.atomic(using=using_of(registered)):
        with held, pytest.raises(LockNotAcquired):
            transaction_lock(f"{key}-1", f"{key}-2", wait=wait, backend=registered.alias)
        if registered.store == "postgresql":
            assert locks(registered, f"{key}-1", f"{key}-2")
        row = Row.objects.using(using_of(registered)).create(name=key)
    assert Row.objects.using(using_of(registered)).filter(pk=row.pk).delete()[0] == 1
    assert locks(registered, f"{key}-1", f"{key}-2")


@pytest.mark.stores("postgresql", why="its locks last until the end of the transaction")
def test_savepoint_gives_up_what_was_locked_in_it(registered: Registered, key: str) -> None:
    """A rollback to a savepoint frees the key; a lease of it can be taken then."""
    with transaction.atomic(using=using_of(registered)):
        with transaction.atomic(using=using_of(registered)):
            transaction_lock(key, backend=registered.alias)
            transaction.set_rollback(True, using=using_of(registered))
        assert locks(registered, key)
        with lock_of(registered, key, wait=0) as lease:
            assert lease.held


def test_waiting_ends_in_time(registered: Registered, key: str) -> None:
    """Behind `wait` it is refused, whoever has the key."""
    ways: list[AbstractContextManager[object]] = [held_elsewhere(lock_of(registered, key))]
    if registered.store != "sqlite":  # One writer per file.
        ways.append(locked_elsewhere(registered, key))
    for number, held in enumerate(ways):
        with (
            held,
            # The server counts by itself how long it waits for a transaction.
            prompt(0.3, least=0.2 if number else 0.3),
            pytest.raises(LockNotAcquired),
            transaction.atomic(using=using_of(registered)),
        ):
            transaction_lock(key, wait=0.3, backend=registered.alias)


@pytest.mark.aliases("postgres")
def test_waiting_outlasts_the_time_of_a_statement(registered: Registered, key: str) -> None:
    """Where the project bounds statements, nothing is broken off, and the transaction goes on."""
    options = {"options": "-c statement_timeout=400ms"}
    with alias_like("default", OPTIONS=options) as using, transaction.atomic(using=using):
        with (
            locked_elsewhere(registered, key),
            prompt(0.9, least=0.9),
            pytest.raises(LockNotAcquired),
        ):
            transaction_lock(key, wait=0.9, using=using, backend=registered.alias)
        transaction_lock(key, using=using, backend=registered.alias)


@pytest.mark.aliases("postgres")
def test_waiting_for_several_things_ends_in_time(
    registered: Registered, store: DatabaseStore, stranger: Stranger, key: str
) -> None:
    """What a wait for a transaction has left is for the extend that may be in flight."""
    take(store.backend, f"{key}-1", 5)
    store.elapse(6.1)
    stranger.hold(f"{key}-1")
    with ExitStack() as stack:
        stack.enter_context(locked_elsewhere(registered, f"{key}-2"))
        timer = threading.Timer(1.8, stack.pop_all().close)
        timer.start()
        with prompt(2, least=1.8), pytest.raises(BackendUnavailable):
            Later(locks, registered, f"{key}-1", f"{key}-2", wait=2).result()
        timer.join()


def test_holder_locks_its_own_key(registered: Registered, key: str) -> None:
    """Whoever holds a lease of the key is not in its own way, neither in its block nor behind."""
    with lock_of(registered, key), transaction.atomic(using=using_of(registered)):
        transaction_lock(key, wait=0, backend=registered.alias)


@SIDE_BY_SIDE
def test_guard_keeps_transactions_out(registered: Registered, stranger: Stranger, key: str) -> None:
    """Also behind the end of its lease, until its transaction ends; it shares with none."""
    using = using_of(registered)
    lease = lock_of(registered, key, ttl=30).acquire()
    with alias_like(using) as other, transaction.atomic(using=using):
        with transaction.atomic(using=other):
            lease.guard()
            lease.guard(other)
            stranger.extend(key, -2)
            stranger.commit()
            assert not locks(registered, key)
        for shared in (False, True):
            assert not locks(registered, key, shared=shared)
            assert not locks(registered, f"{key}-1", key, shared=shared, wait=0.2)
    with locked_elsewhere(registered, key, shared=True):
        assert locks(registered, key, shared=True)
    assert locks(registered, key)
    lease.release()


@SIDE_BY_SIDE
def test_guard_of_its_own_lease_is_in_nobodys_way(registered: Registered, key: str) -> None:
    """Neither in the same transaction, before or behind, nor in another one."""
    using = using_of(registered)
    with alias_like(using) as other, lock_of(registered, key) as lease:
        with lease.atomic():
            transaction_lock(key, wait=0, backend=registered.alias)
            lease.guard()
            with lease.atomic(other):
                pass
        with lease.atomic(other), transaction.atomic(using=using):
            transaction_lock(key, wait=0, backend=registered.alias)
        assert not locks(registered, key)


@SIDE_BY_SIDE
def test_leases_left_to_the_transaction_are_not_in_its_way(
    registered: Registered, key: str
) -> None:
    """Their blocks are over: they are the same caller's, who may go on with them."""
    rate = lock_of(registered, f"{key}-rate", permits=3, hold=True, wait=0)
    with transaction.atomic(using=using_of(registered)):
        with lock_of(registered, key) as first:
            pass
        transaction_lock(key, wait=0, backend=registered.alias)
        assert not locks(registered, key)
        with lock_of(registered, key) as second:
            assert second.token == first.token
        for _ in range(2):
            with rate:
                pass
        transaction_lock(f"{key}-rate", wait=0, backend=registered.alias)


@SIDE_BY_SIDE
def test_lease_within_is_refused(registered: Registered, key: str) -> None:
    """It would wait for the transaction that it is taken in."""
    with transaction.atomic(using=using_of(registered)):
        transaction_lock(key, backend=registered.alias)
        with (
            pytest.raises(LockUsageError, match="transaction_lock") as caught,
            lock_of(registered, key, wait=1),
        ):
            pytest.fail("a lease was granted amid the transaction that has locked its key")
        assert caught.value.code == "self_blocked"
        with lock_of(registered, f"{key}-2"):
            pass


@SIDE_BY_SIDE
def test_who_keeps_a_key_waits_for_none_for_ever(registered: Registered, key: str) -> None:
    """Neither for a lease beside a transaction lock, nor the other way round."""
    using = using_of(registered)
    with held_elsewhere(lock_of(registered, f"{key}-2")):
        with transaction.atomic(using=using):
            transaction_lock(f"{key}-1", backend=registered.alias)
            with pytest.raises(LockUsageError, match="without a limit"):
                lock_of(registered, f"{key}-2", wait=None).acquire()
        with transaction.atomic(using=using):
            with lock_of(registered, f"{key}-1"):
                pass
            transaction_lock(f"{key}-1", wait=None, backend=registered.alias)
            with pytest.raises(LockUsageError, match="without a limit"):
                transaction_lock(f"{key}-2", wait=None, backend=registered.alias)


def test_outside_of_a_transaction_it_says_what_to_do(registered: Registered, key: str) -> None:
    """There is nothing that could hold it."""
    atomic = rf"atomic\(using='{using_of(registered)}'\)"
    with pytest.raises(LockUsageError, match=rf"{atomic}, or decorate with @transaction_locked"):
        transaction_lock(key, backend=registered.alias)


def test_paused_key_is_not_locked(registered: Registered, key: str) -> None:
    """An operator's pause is for transactions, too."""
    backend = lock_backends[registered.alias]
    take_and_release(registered, key)
    backend.pause(key, backend.clock().replace(year=2100))
    with (
        pytest.raises(LockNotAcquired, match="paused"),
        transaction.atomic(using=using_of(registered)),
    ):
        transaction_lock(key, wait=0, backend=registered.alias)
    backend.pause(key, None)
    assert locks(registered, key)


def take_and_release(registered: Registered, key: str) -> None:
    """Let a key have been held."""
    backend = lock_backends[registered.alias]
    assert backend.release(take(backend, key)) is True


@pytest.mark.aliases("postgres")
def test_locking_is_one_round_trip(registered: Registered, key: str) -> None:
    """For any number of keys, twice or not; who looks at one sees whose transaction keeps it."""
    keys = [f"{key}-{number % 20}" for number in range(40)]
    using, sessions = using_of(registered), lock_backends[registered.alias].guards.sessions
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        with CaptureQueriesContext(connections[using]) as queries:
            transaction_lock(*keys, backend=registered.alias)
        assert len(queries) == 1
        assert not locks(registered, f"{key}-7")
        cursor.execute("SELECT pg_backend_pid()")
        pid = cursor.fetchone()[0]
        assert [each.pid for each in Later(sessions, f"{key}-7").result() or ()] == [pid]
    assert Later(sessions, f"{key}-7").result() == ()


@SIDE_BY_SIDE
def test_order_of_the_arguments_does_not_matter(registered: Registered, key: str) -> None:
    """Two who name the same keys in opposite orders never deadlock."""
    keys = [f"{key}-{number}" for number in range(8)]
    done = []

    def work(mine: list[str]) -> None:
        for _ in range(20):
            with transaction.atomic(using=using_of(registered)):
                transaction_lock(*mine, wait=20, backend=registered.alias)
                done.append(threading.get_ident())

    for each in [Later(work, keys), Later(work, keys[::-1]), Later(work, keys[3:] + keys[:3])]:
        each.result(60)
    assert len(done) == 60


@SIDE_BY_SIDE
@pytest.mark.parametrize("shared", [False, True])
def test_waiting_keeps_none_of_the_keys_behind(
    registered: Registered, key: str, shared: bool
) -> None:
    """Whoever waits for one key has locked those before it alone: no circle comes of that."""
    keys = [f"{key}-{number}" for number in range(5)]

    def work() -> None:
        with transaction.atomic(using=using_of(registered)):
            transaction_lock(*keys, shared=shared, wait=20, backend=registered.alias)

    with locked_elsewhere(registered, keys[1]):
        with locked_elsewhere(registered, keys[3]):
            waiting = Later(work)
            assert eventually(lambda: not locks(registered, keys[0]))
            assert locks(registered, keys[2])
            assert locks(registered, keys[4])
        assert not locks(registered, keys[0])
        assert locks(registered, *keys[2:])
    waiting.result()
    assert locks(registered, *keys)


@pytest.mark.aliases("postgres", "mariadb")
def test_deadlock_is_told(registered: Registered, key: str) -> None:
    """Two transactions that lock one key after the other, the other way round."""
    barrier, said = threading.Barrier(2), []

    def work(first: str, second: str) -> None:
        with transaction.atomic(using=using_of(registered)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transaction_lock(first, backend=registered.alias)
            barrier.wait(10)
            try:
                transaction_lock(second, wait=10, backend=registered.alias)
            except LockNotAcquired as error:
                said.append(error)
                if registered.store == "mysql":
                    return
            Row.objects.using(using_of(registered)).filter(name=key).exists()

    for each in [Later(work, f"{key}-1", f"{key}-2"), Later(work, f"{key}-2", f"{key}-1")]:
        each.result(30)
    assert [each.code for each in said] == ["deadlock"]
    assert locks(registered, f"{key}-1", f"{key}-2")


@SIDE_BY_SIDE
def test_wrong_order_warns_with_both_places(registered: Registered, key: str) -> None:
    """What is locked later shall come later, or another transaction may deadlock."""
    with transaction.atomic(using=using_of(registered)):
        transaction_lock(f"{key}-2", backend=registered.alias)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            transaction_lock(f"{key}-2", f"{key}-3", backend=registered.alias)
        with pytest.warns(RuntimeWarning, match=rf"{key}-1.*{key}-3") as caught:
            transaction_lock(f"{key}-1", backend=registered.alias)
    assert caught[0].filename == __file__
    assert str(caught[0].message).count(f"{__file__}:") == 2


@SIDE_BY_SIDE
def test_parent_is_locked_alone_above_a_number(registered: Registered, key: str) -> None:
    """Below it, all who name the parent go on side by side; above it, one alone."""
    keys = [f"{key}-{number}" for number in range(5)]
    how: dict[str, Any] = {"parent": f"{key}-p", "escalate_at": 5, "backend": registered.alias}
    with transaction.atomic(using=using_of(registered)):
        transaction_lock(*keys, **how)
        assert not locks(registered, keys[0])
        assert locks(registered, f"{key}-x", parent=f"{key}-p")
        assert not locks(registered, f"{key}-p")
    with transaction.atomic(using=using_of(registered)):
        transaction_lock(*keys, f"{key}-5", **how)
        assert locks(registered, keys[0])
        assert not locks(registered, keys[0], parent=f"{key}-p")


def test_decorator_opens_the_transaction(registered: Registered, key: str) -> None:
    """Its keys are filled from the arguments."""
    using = using_of(registered)

    @transaction_locked(key + ":{pk}", key + ":all", backend=registered.alias)
    def sell(pk: int) -> int:
        assert connections[using].in_atomic_block
        if registered.store != "sqlite":
            assert not locks(registered, f"{key}:7")
            assert not locks(registered, f"{key}:all")
        return pk

    assert sell(7) == 7
    assert locks(registered, f"{key}:7", f"{key}:all")
    with pytest.raises(LockUsageError, match="coroutine"):
        transaction_locked("stock")(coroutine)
    with pytest.raises(InvalidArgument, match="at least one key"):
        transaction_locked()
    with pytest.raises(InvalidArgument, match=r"without parentheses\? Write @transaction_locked\("):
        transaction_locked(sell)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="wait"):
        transaction_locked("stock", wait=-1)
    with pytest.raises(InvalidArgument, match="nothing"):
        transaction_locked("{nothing}")(sell)


async def coroutine() -> None:
    """Do nothing."""


@SIDE_BY_SIDE
def test_asynchronous_code_locks_in_the_thread_that_waits(registered: Registered, key: str) -> None:
    """Under `async_to_sync`, the transaction is that of the calling thread."""
    with transaction.atomic(using=using_of(registered)):
        async_to_sync(atransaction_lock)(key, backend=registered.alias)
        assert not locks(registered, key)
    assert locks(registered, key)


@pytest.mark.aliases("postgres", "sqlite")
def test_wrong_arguments_touch_nothing(registered: Registered, key: str) -> None:
    """They are refused before anything is asked."""
    refused: list[tuple[str, dict[str, Any]]] = [
        ("shared must be True or False", {"shared": 1}),
        ("wait", {"wait": -1}),
        ("requires parent", {"escalate_at": 3}),
        ("at least 1", {"escalate_at": 0, "parent": "p"}),
        ("empty", {"parent": ""}),
        ("an alias in DATABASES, not 'nope'", {"using": "nope"}),
        ("an alias in DATABASES, not 3", {"using": 3}),
    ]
    for message, how in refused:
        with transaction.atomic(using=using_of(registered)):
            with (
                CaptureQueriesContext(connections[using_of(registered)]) as queries,
                pytest.raises(InvalidArgument, match=message),
            ):
                transaction_lock(key, **{"backend": registered.alias, **how})
            assert len(queries) == 0
            transaction_lock(backend=registered.alias)


@pytest.mark.aliases("postgres")
@pytest.mark.parametrize("level", [*IsolationLevel], ids=lambda level: level.name)
def test_snapshot_is_refused(registered: Registered, key: str, level: IsolationLevel) -> None:
    """It would not show a lease that was granted since. Less isolation is READ COMMITTED there."""
    options = {"isolation_level": level}
    with alias_like("default", OPTIONS=options) as using, transaction.atomic(using=using):
        if level in (IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE):
            with pytest.raises(LockUsageError, match="snapshot"):
                transaction_lock(key, using=using, backend=registered.alias)
        else:
            transaction_lock(key, using=using, backend=registered.alias)
            assert not locks(registered, key)


def test_leases_that_share_a_key(registered: Registered, key: str) -> None:
    """They are in the way of a transaction that wants it alone, and of none that shares it."""
    backend = lock_backends[registered.alias]
    grants = [take(backend, key, permits=None) for _ in range(2)]
    for each in grants:
        assert not locks(registered, key)
        assert not locks(registered, f"{key}-other", key)
        assert locks(registered, key, shared=True)
        assert backend.release(each) is True
    assert locks(registered, key)
    over = take(backend, key, permits=None)
    assert backend.release(over, 0.001) is True
    assert locks(registered, key)
