from __future__ import annotations
import threading, time, warnings, traceback
from contextlib import suppress, contextmanager
import pytest
from django.db import connections, transaction
from datetime import timedelta
from django_distlock import *
from django_distlock import lock_backends, transaction_lock, transaction_locked, distlock_all, atransaction_lock
from django_distlock.inspection.lookups import held_keys
from tests.backends import Registered
from .aliases import alias_like
from .helpers import Later, prompt, take
from .locking import eventually, grantable, held_elsewhere, lock_of
from .test_transaction_locks import using_of, locks, locked_elsewhere

pytestmark = [
    pytest.mark.requires("supports_transactions"),
    pytest.mark.stores("sqlite", "postgresql", "mysql", why="x"),
]
PGM = pytest.mark.aliases("postgres", "mariadb")
PG = pytest.mark.aliases("postgres")
MY = pytest.mark.aliases("mariadb")

def say(registered, *a):
    print("\n##", registered.alias, *a, flush=True)

def attempt(f, *a, **k):
    t = time.monotonic()
    try:
        r = f(*a, **k)
        return ("ok", r, round(time.monotonic()-t, 2))
    except BaseException as e:
        return (type(e).__name__, str(e)[:200], getattr(e, "code", None), round(time.monotonic()-t, 2))

@contextmanager
def waiting_tx(registered, *keys, **how):
    """A transaction of another thread that waits for keys."""
    out = []
    def work():
        with transaction.atomic(using=using_of(registered)):
            out.append(attempt(transaction_lock, *keys, backend=registered.alias, **how))
    later = Later(work)
    time.sleep(0.7)
    yield out
    later.result(60)

@PGM
def test_t1_extend_in_flight(registered: Registered, key: str) -> None:
    """extension that is not committed when free_at passes"""
    store = lock_backends[registered.alias]
    lease = Later(lock_of(registered, key, ttl=1.0).acquire).result()
    grant = lease._holding.grant if hasattr(lease._holding, "grant") else None
    say(registered, "grant", type(grant))
    name = store._name(key)
    ext, done = threading.Event(), threading.Event()
    res = []
    def extend():
        # in a transaction whose commit is slow
        from django_distlock.models import HeldLock
        using = using_of(registered)
        with transaction.atomic(using=using):
            time.sleep(1.7)   # in grace: expires 1.0, free 2.0
            if registered.store == "postgresql":
                with connections[using].cursor() as c:
                    c.execute("select django_distlock_heldlock_extend_v3(%s,%s,%s,%s,%s)", [name, lease.token, 30.0, 1.0, "1000"])
                    res.append(c.fetchone())
            else:
                r = HeldLock.objects.db_manager(using).extend(name, lease._holding.grant, 30.0, bound=1.0)
                res.append(r)
            ext.set()
            time.sleep(1.5)
        done.set()
    l = Later(extend)
    ext.wait(10)
    time.sleep(0.6)
    with transaction.atomic(using=using_of(registered)):
        say(registered, "tx lock:", attempt(transaction_lock, key, wait=0, backend=registered.alias))
        done.wait(10)
        say(registered, "extend answered", res, "still locked by the tx; held record:", Later(held_keys, [key], backend=registered.alias).result().keys())
    l.result()
    with suppress(Exception):
        Later(lease.release).result()

@PGM
def test_t2_operator_while_waiting(registered: Registered, key: str) -> None:
    store = lock_backends[registered.alias]
    lease = Later(lock_of(registered, key, ttl=30).acquire).result()
    with waiting_tx(registered, key, wait=4) as out:
        say(registered, "force_release while a tx waits:", attempt(Later(store.force_release, key).result))
    say(registered, "waiter:", out)
    Later(lease.release).result()
    store.pause(key, store.clock().replace(year=2100))
    with waiting_tx(registered, key, wait=4) as out:
        say(registered, "resume while a tx waits:", attempt(Later(store.pause, key, None).result))
    say(registered, "waiter:", out)
    store.pause(key, None)

@PG
def test_t3_table_locked(registered: Registered, key: str) -> None:
    for table in ("django_distlock_heldlock", "django_distlock_heldlock_salt"):
        over = threading.Event(); got = threading.Event()
        def hold():
            with transaction.atomic():
                connections["default"].cursor().execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
                got.set(); over.wait(6)
        l = Later(hold); got.wait(5)
        with transaction.atomic():
            say(registered, table, attempt(transaction_lock, key, wait=0.3, backend=registered.alias))
        over.set(); l.result()

def test_t4_huge_wait(registered: Registered, key: str) -> None:
    using = using_of(registered)
    for wait in (1e6, 1e7, 1e10, timedelta.max, 1e15):
        def work():
            with transaction.atomic(using=using):
                transaction_lock(key, wait=wait, backend=registered.alias)
        say(registered, wait, "free:", attempt(work))
        if registered.store != "sqlite":
            def work2():
                l = Later(work)
                time.sleep(.3)
                return l
            with locked_elsewhere(registered, key):
                l = work2()
            say(registered, wait, "contended:", attempt(l.result, 20))

@PGM
def test_t5_first_use_race(registered: Registered, key: str) -> None:
    using = using_of(registered)
    for rounds in range(6):
        k = f"{key}-{rounds}"
        n = 6
        barrier = threading.Barrier(n)
        out = []
        def work():
            with transaction.atomic(using=using):
                connections[using].cursor().execute("select 1")
                barrier.wait(10)
                r = attempt(transaction_lock, k, wait=20, backend=registered.alias)
                out.append(r)
                if r[0] == "ok":
                    time.sleep(1.5 if len(out) == 1 else 0.01)
        ls = [Later(work) for _ in range(n)]
        for l in ls:
            attempt(l.result, 60)
        bad = [o for o in out if o[0] != "ok"]
        say(registered, rounds, "bad", bad, "max", max(o[-1] for o in out))

@PGM
def test_t6_self_block(registered: Registered, key: str) -> None:
    using = using_of(registered)
    with transaction.atomic(using=using):
        with suppress(ZeroDivisionError), transaction.atomic(using=using):
            transaction_lock(key, backend=registered.alias)
            1/0
        def lease():
            with lock_of(registered, key, wait=2): pass
        say(registered, "lease behind savepoint rollback:", attempt(lease))
    with locked_elsewhere(registered, key + "-2"), transaction.atomic(using=using):
        say(registered, attempt(transaction_lock, key + "-1", key + "-2", wait=0, backend=registered.alias))
        def lease():
            with lock_of(registered, key + "-1", wait=2): pass
        say(registered, "lease behind refusal:", attempt(lease))

@PG
def test_t7_settings(registered: Registered, key: str) -> None:
    def lt():
        with connections["default"].cursor() as c:
            c.execute("show lock_timeout"); return c.fetchone()[0]
    for setting in ("SET lock_timeout='7s'", "SET LOCAL lock_timeout='7s'"):
        with transaction.atomic():
            connections["default"].cursor().execute(setting)
            with locked_elsewhere(registered, key):
                say(registered, attempt(transaction_lock, key, wait=0.2, backend=registered.alias), lt())
                l = None
            with held_elsewhere(lock_of(registered, key)):
                say(registered, attempt(transaction_lock, key, wait=0.2, backend=registered.alias), lt())
            t = threading.Event()
            def hold():
                with transaction.atomic():
                    transaction_lock(key, backend=registered.alias); t.set(); time.sleep(.5)
            l = Later(hold); t.wait()
            say(registered, attempt(transaction_lock, key, wait=3, backend=registered.alias), lt())
            l.result()
            say(registered, "statement_timeout")
            with locked_elsewhere(registered, key+"x"):
                with suppress(ZeroDivisionError), transaction.atomic():
                    connections["default"].cursor().execute("set local statement_timeout='200ms'")
                    say(registered, attempt(transaction_lock, key+"x", wait=3, backend=registered.alias))
                    1/0
            say(registered, lt())
        say(registered, "behind:", lt())
        connections["default"].cursor().execute("RESET lock_timeout")

@PGM
def test_t8_odd_keys(registered: Registered, key: str) -> None:
    odd = ['a"b', "a\\b", "{x}", "a,b", "NULL", "null", "line\nbreak", "tab\t", " lead", "trail ", "%s %d %%", "'q'", "ü"*256, "x"*512, "日本", "\\\\\"", "\\", '"', "a\rb", "A", "a"]
    odd = [f"{key}{o}"[:100] if len(o) < 100 else o for o in odd] + ["NULL", "null", "\\", '"', " ", "{}", "%"]
    with transaction.atomic(using=using_of(registered)):
        transaction_lock(*odd, backend=registered.alias)
        bad = [o for o in odd if grantable(lock_of(registered, o, wait=0))]
        bad2 = [o for o in odd if locks(registered, o)]
        say(registered, "bad", bad, bad2)
    for o in odd:
        with held_elsewhere(lock_of(registered, o)):
            r = attempt(locks, registered, o)
            if r[:2] != ("ok", False): say(registered, "lease not seen", repr(o), r)
            if list(Later(held_keys, [o], backend=registered.alias).result()) != [o]: say(registered, "held_keys", repr(o))

def test_t9_misuse(registered: Registered, key: str) -> None:
    say(registered, "held_keys(str)", attempt(held_keys, "abc", backend=registered.alias))
    say(registered, "held_keys dict", attempt(held_keys, [], backend=registered.alias))
    def f(x): return "ran"
    say(registered, "bare", attempt(lambda: transaction_locked(f)(5)))
    say(registered, "no templates", attempt(lambda: transaction_locked(backend=registered.alias)(f)(5)))
    say(registered, "list arg", attempt(transaction_lock, ["a","b"], backend=registered.alias))
    say(registered, "using", attempt(transaction_lock, "a", using="nope", backend=registered.alias))
    say(registered, "using3", attempt(transaction_lock, "a", using=3, backend=registered.alias))
    say(registered, "deco wrong wait", attempt(lambda: transaction_locked("k", wait="x", backend=registered.alias)(f)))
    say(registered, "bytes", attempt(transaction_lock, b"a", backend=registered.alias))
    say(registered, "all wrong kw", attempt(distlock_all, "a", nope=3))
    say(registered, "all list", attempt(distlock_all, ["a"]))
    say(registered, "escalate gen", attempt(transaction_lock, "a", parent="p", escalate_at=True, backend=registered.alias))

@PGM
def test_t10_all_acquire_expiry(registered: Registered, key: str) -> None:
    a, b = key + "-a", key + "-b"
    lease = Later(lock_of(registered, b, ttl=60).acquire).result()
    threading.Timer(4, lambda: Later(lease.release).result()).start()
    t = time.monotonic()
    r = attempt(distlock_all(a, b, ttl=1.0, wait=20, backend=registered.alias).acquire)
    say(registered, r)
    if r[0] == "ok":
        ls = r[1]
        say(registered, "held", ls.held, {k: v.held for k, v in ls.items()}, "a can be had:", grantable(lock_of(registered, a, wait=0)))
        say(registered, attempt(ls.release))
    lease = Later(lock_of(registered, b, ttl=60).acquire).result()
    threading.Timer(4, lambda: Later(lease.release).result()).start()
    def block():
        with distlock_all(a, b, ttl=1.0, wait=20, heartbeat=False, backend=registered.alias) as ls:
            say(registered, "in the block: held", ls.held, "a can be had:", grantable(lock_of(registered, a, wait=0)))
    say(registered, attempt(block))

@MY
def test_t11_serializable(registered: Registered, key: str) -> None:
    with alias_like("mariadb", OPTIONS={"isolation_level": "serializable"}) as alias:
        with held_elsewhere(lock_of(registered, key)) as lease:
            def work():
                try:
                    with transaction.atomic(using=alias):
                        return attempt(transaction_lock, key, wait=4, using=alias, backend=registered.alias)
                finally:
                    connections[alias].close()
            l = Later(work)
            time.sleep(1)
            say(registered, "release:", attempt(Later(lease.release).result))
            say(registered, "waiter", l.result())

def test_t12_manual_snapshot(registered: Registered, key: str) -> None:
    using = using_of(registered)
    if registered.store == "sqlite": return
    with transaction.atomic(using=using):
        if registered.store == "postgresql":
            connections[using].cursor().execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        say(registered, "manual:", attempt(transaction_lock, key, backend=registered.alias))
        say(registered, "then:", attempt(connections[using].cursor().execute, "select 1"))
