"""Which transactions keep keys, and which wait for them: the command, the dashboard, JSON."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection, transaction
from django.test import Client

from django_distlock import distlock, transaction_lock
from django_distlock.inspection import TransactionLock, list_transactions
from tests.contract.helpers import Later
from tests.contract.locking import eventually

from .admin_settings import LOCKS
from .operating import run

OF = "--backend=postgres"


@contextmanager
def kept(*keys: str, shared: bool = False) -> Iterator[int]:
    """Let a transaction of another thread keep keys; give its session."""
    locked, over, sessions = threading.Event(), threading.Event(), []

    def hold() -> None:
        with transaction.atomic():
            transaction_lock(*keys, shared=shared, backend="postgres")
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                sessions.append(cursor.fetchone()[0])
            locked.set()
            over.wait(30)

    holder = Later(hold)
    try:
        assert locked.wait(10)
        yield sessions[0]
    finally:
        over.set()
        holder.result()


def seen(session: int | None = None, *, waits: bool = False) -> list[TransactionLock]:
    """Return what is listed of a session, or of those that wait."""
    found = list_transactions(backends=["postgres"]).transactions
    return [each for each in found if session in (None, each.session.pid) and each.waits == waits]


def test_keys_are_named_where_they_were_granted_once(key: str) -> None:
    """Of others the server knows the number alone."""
    with distlock(f"{key}-1", backend="postgres"):
        pass
    with kept(f"{key}-1", f"{key}-2", shared=True) as session:
        named, numbered = sorted(seen(session), key=lambda each: not each.key)
        assert (named.key, numbered.key) == (f"{key}-1", "")
        assert numbered.name == f"number {numbered.number}"
        assert named.shared
        assert numbered.shared
        assert named.seconds is not None
        assert named.seconds >= 0
    assert seen(session) == []


def test_who_waits_is_seen(key: str) -> None:
    """With what it waits for, beside who keeps it."""

    def wait() -> None:
        with transaction.atomic():
            transaction_lock(key, wait=30, backend="postgres")

    with kept(key) as session:
        numbers = {each.number for each in seen(session)}
        waiter = Later(wait)
        assert eventually(lambda: {each.number for each in seen(waits=True)} >= numbers, 10)
    waiter.result()


def test_leases_are_no_transactions(key: str) -> None:
    """Nor what a project locks by numbers of its own."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(42), pg_backend_pid()")
        session = cursor.fetchone()[1]
        with distlock(key, backend="postgres"):
            assert Later(seen, session).result() == []


def test_command_lists_them(key: str) -> None:
    """As a table, and as one document."""
    with distlock(key, backend="postgres"):
        pass
    with kept(key) as session:
        ran = run("distlock_list", "--transactions", OF)
        assert ran.status == 0
        (line,) = [each for each in ran.out.splitlines() if key in each]
        assert line.split()[:4] == ["postgres", key, "alone", "keeps"]
        assert f"session {session}" in line
        document = run("distlock_list", "--transactions", OF, "--json").json
        (found,) = [each for each in document["transactions"] if each["key"] == key]
        assert (found["kind"], found["session"]["pid"]) == ("transaction", session)
    assert run("distlock_list", "--transactions", OF).out.startswith("No visible transaction")


def test_command_refuses_what_is_about_leases() -> None:
    """Nothing is filtered that way; nor is a backend asked that cannot tell."""
    for more in ("--prefix=a", "--host=a", "--all", "--declared"):
        ran = run("distlock_list", "--transactions", more)
        assert ran.status == 2
        assert f"remove {more.partition('=')[0]}" in ran.err or "remove --declared" in ran.err
    ran = run("distlock_list", "--transactions", "--backend=redis")
    assert "cannot list transaction locks" in ran.err


def test_dashboard_lists_them(browser: Client, key: str) -> None:
    """Below the locks."""
    with distlock(key, backend="postgres"):
        pass
    assert "distlock-transactions" not in browser.get(LOCKS).content.decode()
    with kept(key) as session:
        text = browser.get(LOCKS).content.decode()
        assert "Locked by transactions" in text
        assert key in text
        assert f"session {session}" in text
