"""`lease.guard()` and `lease.atomic()`: a transaction that nobody can overtake."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.db import DatabaseError, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_distlock import (
    BackendUnavailable,
    LockLost,
    LockUsageError,
    lock_backends,
    transaction_lock,
)
from tests.backends import Registered
from tests.shop.models import Row

from .aliases import alias_like, locks_on, session_of
from .helpers import Later
from .locking import PAST, SHORT, eventually, grantable, lock_of, rolled_back, take_away, using_of

CAN = pytest.mark.requires("supports_guard")
#: A ttl in which also a busy machine comes to the guard.
BRIEF = 2.0


def setting(using: str, name: str) -> str:
    """Read a setting of the session."""
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT current_setting(%s)", [name])
        return str(cursor.fetchone()[0])


@CAN
@pytest.mark.parametrize("how", ["guard", "atomic"])
def test_nobody_takes_the_key_over_before_the_end(
    registered: Registered, key: str, how: str
) -> None:
    """A lease that ends amid a guarded transaction is given to nobody until that is committed."""
    using = using_of(registered)
    lease = lock_of(registered, key, ttl=BRIEF, basic=registered.store != "session").acquire()
    with lease.atomic() if how == "atomic" else transaction.atomic(using=using):
        if how == "guard":
            lease.guard()
        assert connections[using].in_atomic_block
        row = Row.objects.using(using).create(name=key)
        over(registered, lease)
        assert not grantable(lock_of(registered, key, wait=0))
    assert Row.objects.using(using).filter(pk=row.pk).delete()[0] == 1
    assert grantable(lock_of(registered, key, wait=0))


@CAN
def test_atomic_rolls_back(registered: Registered, key: str) -> None:
    """An error in the block undoes what it wrote."""
    with lock_of(registered, key) as lease:
        with pytest.raises(ZeroDivisionError), lease.atomic():  # noqa: PT012
            Row.objects.using(using_of(registered)).create(name=key)
            raise ZeroDivisionError
        assert not Row.objects.using(using_of(registered)).filter(name=key).exists()
        # It holds nothing off any more.
        assert lock_backends[registered.alias].guards.alias() == using_of(registered)


@CAN
def test_lease_that_was_taken_over_is_refused(registered: Registered, key: str) -> None:
    """Whoever was overtaken does not begin, although its own clock says that it may."""
    lease = lock_of(registered, key).acquire()
    take_away(lease)
    other = Later(lock_of(registered, key).acquire).result()
    try:
        assert other.fence > lease.fence
        with pytest.raises(LockLost), transaction.atomic(using=using_of(registered)):
            lease.guard()
        assert lease.is_lost
        with pytest.raises(LockLost), lease.atomic():
            pytest.fail("the block of a lost lease ran")
    finally:
        Later(other.release).result()


@CAN
def test_lease_that_is_over_is_refused_without_a_question(registered: Registered, key: str) -> None:
    """Past its deadline, or given up, it guards nothing."""
    short = lock_of(registered, key, ttl=SHORT).acquire()
    time.sleep(PAST)
    with pytest.raises(LockLost), transaction.atomic(using=using_of(registered)):
        short.guard()
    short.release()
    lease = lock_of(registered, f"{key}-2").acquire()
    lease.release()
    with pytest.raises(LockUsageError, match="was released"), lease.atomic():
        pytest.fail("the block of a released lease ran")


@CAN
@pytest.mark.stores("postgresql", "mysql", why="its leases have no end, or no transaction beside")
def test_lease_that_ends_before_the_question_is_refused(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction lock may have had the key meanwhile, and counts no fence up."""
    lease = lock_of(registered, key, ttl=SHORT).acquire()
    guards = lock_backends[registered.alias].guards
    hold = guards.hold

    def late(*args: Any, **how: Any) -> bool:
        time.sleep(PAST)
        return hold(*args, **how)

    monkeypatch.setattr(guards, "hold", late)
    with pytest.raises(LockLost), transaction.atomic(using=using_of(registered)):
        lease.guard()
    assert lease.is_lost


@CAN
def test_heartbeat_goes_on(registered: Registered, key: str) -> None:
    """A guarded transaction that is longer than the ttl loses no lease."""
    with lock_of(registered, key, ttl=2.0) as lease:
        before = lease.deadline
        with lease.atomic():
            assert eventually(lambda: ping(registered) and lease.deadline > before + 2.0, 20)
        lease.check()


@CAN
def test_several_guards_of_one_transaction(registered: Registered, key: str) -> None:
    """A lease guards as often as it likes, and beside others; without a transaction, nothing."""
    with lock_of(registered, key) as first, lock_of(registered, f"{key}-2") as second:
        with pytest.raises(LockUsageError, match="atomic"):
            first.guard()
        with first.atomic():
            first.guard()
            second.guard()
            assert not grantable(lock_of(registered, f"{key}-2", wait=0))
        first.check()


@CAN
def test_guard_costs_one_round_trip(registered: Registered, key: str) -> None:
    """`lease.atomic()` sends one statement more than `atomic()`."""
    with lock_of(registered, key) as lease:
        connections[using_of(registered)].ensure_connection()
        counts = []
        for block in (transaction.atomic(using=using_of(registered)), lease.atomic()):
            with CaptureQueriesContext(connections[using_of(registered)]) as queries, block:
                ping(registered)
            counts.append(len(queries))
        assert counts[1] == counts[0] + bool(registered.using)


@CAN
@pytest.mark.stores("postgresql", "mysql", "session", why="its fences are in no database")
def test_guard_is_about_the_database_of_the_locks(registered: Registered, key: str) -> None:
    """A transaction elsewhere would hold nothing off; another alias of the same does."""
    with lock_of(registered, key) as lease:
        with pytest.raises(LockUsageError, match="'sqlite'") as caught, lease.atomic("sqlite"):
            pytest.fail("a transaction on another database was guarded")
        assert caught.value.code == "foreign_context"
        with alias_like(using_of(registered)) as same, lease.atomic(same):
            assert connections[same].in_atomic_block
            assert not connections[using_of(registered)].in_atomic_block


@pytest.mark.aliases("postgres")
@pytest.mark.parametrize("option", ["service", "read_default_file"])
def test_options_tell_databases_apart(registered: Registered, key: str, option: str) -> None:
    """Where a file tells the address, an alias with another file is another database."""
    nowhere = {"HOST": "", "PORT": "", "NAME": ""}
    with (
        alias_like(using_of(registered), **nowhere, OPTIONS={option: "one"}) as one,
        alias_like(one, OPTIONS={option: "two"}) as two,
        locks_on(one) as locks,
        pytest.raises(LockUsageError, match=one) as caught,
    ):
        transaction_lock(key, using=two, backend=locks)
    assert caught.value.code == "foreign_context"


@CAN
@pytest.mark.stores("postgresql", "session", why="has no such settings")
def test_callers_settings_stay(registered: Registered, key: str) -> None:
    """Bounds of the caller's own stay; who ends silent transactions sooner goes on doing so."""
    using, silence = using_of(registered), "idle_in_transaction_session_timeout"
    for before, after in (("DEFAULT", "21s"), ("'5s'", "5s"), ("'1min'", "21s")):
        with lock_of(registered, key, ttl=20) as lease, transaction.atomic(using=using):
            with connections[using].cursor() as cursor:
                cursor.execute("SET LOCAL lock_timeout = '1234ms'")
                cursor.execute(f"SET LOCAL {silence} = {before}")
            lease.guard()
            assert setting(using, "lock_timeout") == "1234ms"
            assert setting(using, silence) == after


@CAN
@pytest.mark.stores("postgresql", "mysql", "session", why="its fences are in no database")
def test_wait_for_whoever_counts_is_bounded(registered: Registered, key: str) -> None:
    """Somebody who holds the counter holds a guard up for a second, and is no loss."""
    with lock_of(registered, key) as lease, alias_like(using_of(registered)) as other:
        name = lock_backends[registered.alias].queues.name_of(key)
        with transaction.atomic(using=other):
            table = lock_backends[registered.alias]._counters.using(other)  # type: ignore[attr-defined]
            assert table.select_for_update().filter(pk=name).first() is not None
            began = time.monotonic()
            with pytest.raises(BackendUnavailable) as caught, lease.atomic():
                pytest.fail("guarded although somebody counts")
            assert time.monotonic() - began < 10
            assert caught.value.code == "network_timeout"
        with lease.atomic():
            lease.check()


@CAN
@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_stricter_isolation(registered: Registered, key: str, level: str) -> None:
    """A transaction that began to read before the takeover gets to know of it."""
    if connections[using_of(registered)].vendor == "postgresql":
        from psycopg import IsolationLevel

        options: dict[str, Any] = {"isolation_level": IsolationLevel[level]}
    else:
        options = {"isolation_level": level.lower().replace("_", " ")}
    with alias_like(using_of(registered), OPTIONS=options) as using:
        with lock_of(registered, key) as lease, lease.atomic(using):
            assert not grantable(lock_of(registered, key, wait=0))
        lease = lock_of(registered, f"{key}-2").acquire()
        with pytest.raises(LockLost), transaction.atomic(using=using):  # noqa: PT012
            list(Row.objects.using(using).filter(name=key))
            take_away(lease)
            lease.guard(using)


@CAN
@pytest.mark.stores("postgresql", "session", why="only PostgreSQL refuses to lock there")
def test_transaction_that_may_only_read(registered: Registered, key: str) -> None:
    """It writes nothing that a guard could be for, and PostgreSQL locks no row in it."""
    with lock_of(registered, key) as lease:
        only_read(using_of(registered))
        try:
            with pytest.raises(LockUsageError, match="read-only"), lease.atomic():
                pytest.fail("a transaction that may only read was guarded")
        finally:
            connections[using_of(registered)].close()
        lease.check()


@CAN
@pytest.mark.stores("postgresql", "session", why="only PostgreSQL ends a silent transaction")
def test_silent_holder_is_cut_off(registered: Registered, key: str) -> None:
    """Who sleeps amid a guarded transaction keeps the others off for the ttl, and not for ever."""
    with alias_like(using_of(registered)) as using:
        lease = lock_of(registered, key, ttl=1.0, basic=registered.store != "session").acquire()
        with pytest.raises(DatabaseError), lease.atomic(using):  # noqa: PT012
            session = session_of(using)
            assert eventually(lambda: Later(is_gone, session).result(), 20)
            Row.objects.using(using).create(name=key)
        if registered.store != "session":
            assert eventually(lambda: grantable(lock_of(registered, key, wait=0)))
        lease.release()


def only_read(using: str) -> None:
    """Let the transactions of this thread's connection read alone."""
    with connections[using].cursor() as cursor:
        cursor.execute("SET default_transaction_read_only = on")


def is_gone(session: int) -> bool:
    """Say whether the server has ended a session."""
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE pid = %s", [session])
        return bool(cursor.fetchone()[0] == 0)


@CAN
def test_force_release_waits_for_a_guard(registered: Registered, key: str) -> None:
    """An operator is told that it is busy, and changes nothing under the holder's hands."""
    with lock_of(registered, key) as lease:
        with lease.atomic():
            answer = Later(lock_backends[registered.alias].force_release, key).result()
            assert getattr(answer, "busy", False)
        lease.check()


@pytest.mark.requires(supports_guard=False)
def test_without_guards_the_remedy_is_named(registered: Registered, key: str) -> None:
    """A backend that cannot hold a takeover off says so before a transaction is opened."""
    with lock_of(registered, key) as lease:
        for use in (lease.guard, lease.atomic().__enter__):
            with pytest.raises(LockUsageError, match="FencedModel") as caught:
                use()
            assert caught.value.code == "unsupported"


def test_empty_lease_guards_nothing(registered: Registered, key: str) -> None:
    """A block that runs without its lock has nothing to guard by."""
    held = Later(lock_of(registered, key).acquire).result()
    try:
        with lock_of(registered, key, wait=0, on_conflict="run") as lease:
            with pytest.raises(LockUsageError, match="held"), rolled_back():
                lease.guard()
            with pytest.raises(LockUsageError, match="held"), lease.atomic():
                pytest.fail("a block without a lease was guarded")
    finally:
        Later(held.release).result()


def over(registered: Registered, lease: Any) -> None:
    """Let a lease end, as far as its store ends leases: also by an end of its session."""
    if registered.store == "session":
        take_away_session(lease)
    else:
        since = time.monotonic()
        assert eventually(
            lambda: ping(registered) and time.monotonic() - since > lease.ttl + 1.2, 10
        )


def ping(registered: Registered) -> bool:
    """Send a statement: the server ends a transaction that is silent."""
    return Row.objects.using(using_of(registered)).filter(name="nothing").count() == 0


def take_away_session(lease: Any) -> None:
    """Cut the session that holds a lock."""
    backend: Any = lock_backends[lease.backend]
    holding = backend._holdings.of_token(lease.token)
    Later(cut_session, holding.session.pid).result()


def cut_session(pid: int) -> None:
    """Let the server end a session."""
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
