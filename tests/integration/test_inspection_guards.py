"""While a guard is open, operators are told at once who holds it, and change nothing."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings
from django.db import connections, transaction

from django_distlock import Lease, distlock, lock_backends
from django_distlock.inspection import Outcome, Result, force_release, pause, show
from tests.contract.aliases import session_of
from tests.contract.helpers import Later, prompt, there

from .databases import ask
from .operating import WHO, no_event_of, other_guard, run

GUARDING = [
    each
    for each in ("memory", "postgres", "postgres_orm", "mariadb", "advisory")
    if each in settings.DISTLOCK
]
POSTGRES = ["postgres", "postgres_orm", "advisory"]


def using_of(alias: str) -> str:
    """Return the database whose transactions guard the locks of a backend."""
    return lock_backends[alias].guards.alias()


def hold(alias: str, key: str) -> Lease:
    """Take a lock."""
    return distlock(key, backend=alias, ttl=60).acquire()


@pytest.mark.parametrize("alias", GUARDING)
def test_guarded_key_is_busy_at_once_and_nothing_is_changed(key: str, alias: str) -> None:
    """Neither record nor counter, and nothing is told; behind the guard the key can be taken."""
    lease = hold(alias, key)
    with lease.atomic():
        record, counter = Later(both, alias, key).result()
        with prompt():
            outcome = Later(force_release, key, backend=alias, **WHO).result()
        assert outcome.result is Result.BUSY
        assert outcome.is_busy
        assert outcome.fence_before == outcome.fence_after == lease.fence
        assert Later(both, alias, key).result() == (record, counter)
        assert json.loads(json.dumps(outcome.as_json()))["result"] == "busy"
        assert lease.token not in repr(outcome)
    lease.check()
    assert no_event_of(key)
    assert force_release(key, backend=alias, **WHO).is_done
    assert lease.release() is False


def both(alias: str, key: str) -> tuple[Any, Any]:
    """Read record and counter."""
    store = lock_backends[alias]
    return store.read(key), store.counter(key)


@pytest.mark.parametrize("alias", POSTGRES)
def test_session_of_the_guard_is_named(key: str, alias: str) -> None:
    """By its number, its user, and since when its transaction goes on; a pause is busy too."""
    lease = hold(alias, key)
    before = datetime.now(UTC)
    # A savepoint locks under a number of its own.
    with transaction.atomic(using=using_of(alias)), lease.atomic():
        outcome = Later(force_release, key, backend=alias, **WHO).result()
        assert outcome.sessions is not None
        (session,) = outcome.sessions
        assert session.pid == session_of(using_of(alias))
        assert session.user == ask("default", "SELECT current_user")[0][0]
        assert abs(there(session.since) - before) < timedelta(minutes=1)
        view = Later(show, key, alias).result()
        assert view.guards == (session,)
        assert json.loads(json.dumps(view.as_json()))["guards"][0]["pid"] == session.pid
        # It would have to change the counter that the guard stands on.
        paused = Later(pause, key, 60, backend=alias, **WHO).result()
        assert (paused.result, paused.sessions) == (Result.BUSY, (session,))
    view = show(key, alias)
    assert (view.guards, view.paused_until) == ((), None)
    assert no_event_of(key)
    lease.release()


@pytest.mark.parametrize("alias", POSTGRES)
def test_all_sessions_that_guard_are_named(key: str, alias: str) -> None:
    """Where several share the guard, the row carries the number of a list of them."""
    lease = hold(alias, key)
    with (
        other_guard(alias, key, "billing") as first,
        other_guard(alias, key, "mail") as second,
        lease.atomic(),
    ):
        sessions = there(Later(lock_backends[alias].guards.sessions, key).result())
        mine = session_of(using_of(alias))
        assert {each.pid for each in sessions} == {first, second, mine}
        assert {each.application for each in sessions} >= {"billing", "mail"}
        starts = [each.since for each in sessions if each.since is not None]
        assert starts == sorted(starts)
    assert lock_backends[alias].guards.sessions(key) == ()
    lease.release()


def test_transaction_that_guards_another_key_is_not_named(key: str) -> None:
    """A session in a transaction is no reason by itself."""
    lease, other = hold("postgres", key), hold("postgres", f"{key}-other")
    with other.atomic():
        assert Later(lock_backends["postgres"].guards.sessions, key).result() == ()
        assert Later(force_release, key, backend="postgres", **WHO).result().is_done
    assert lease.release() is False
    other.release()


@pytest.mark.skipif("mariadb" not in settings.DISTLOCK, reason="declared: no MariaDB here")
def test_mariadb_says_that_it_cannot_tell(key: str) -> None:
    """None, which is not the same as nobody."""
    lease = hold("mariadb", key)
    with lease.atomic():
        outcome = Later(force_release, key, backend="mariadb", **WHO).result()
        assert (outcome.result, outcome.sessions) == (Result.BUSY, None)
        ran = Later(run, "distlock_release", key, "--backend=mariadb", *FORCED).result()
        assert "cannot tell by whom" in ran.out
        assert ran.status == 75
    lease.release()


FORCED = ("--force", "--reason", "it hangs")


def test_command_ends_with_busy_and_names_the_session(key: str) -> None:
    """Status 75, the session's number, and the key stays with its holder."""
    alias = "postgres"
    lease = hold(alias, key)
    with other_guard(alias, key, "billing run") as pid:
        ran = run("distlock_release", key, f"--backend={alias}", *FORCED)
        assert ran.status == 75
        assert f"session {pid}" in ran.out
        assert "billing run" in ran.out
        ran = run("distlock_release", key, f"--backend={alias}", *FORCED, "--json")
        assert ran.status == 75
        (outcome,) = ran.json["outcomes"]
        assert outcome["result"] == "busy"
        assert outcome["sessions"][0]["pid"] == pid
        shown = run("distlock_show", key, f"--backend={alias}")
        assert f"session {pid}" in shown.out
    lease.check()
    lease.extend()
    assert lease.release() is True


def test_looking_for_sessions_waits_for_nobody(key: str) -> None:
    """Also while somebody has the whole counter locked for an update."""
    lease = hold("postgres", key)
    name = lock_backends["postgres"].queues.name_of(key)
    with transaction.atomic():
        statement = "SELECT 1 FROM django_distlock_fencecounter WHERE storage_key = %s FOR UPDATE"
        ask("default", statement, name)
        mine = session_of("default")
        with prompt():
            sessions = Later(lock_backends["postgres"].guards.sessions, key).result()
        assert [each.pid for each in sessions or ()] == [mine]
    lease.release()


def test_looking_leaves_the_callers_transaction_as_it_was(key: str) -> None:
    """The number of a single transaction is no number of a list: that error harms nobody."""
    lease = hold("postgres", key)
    with other_guard("postgres", key, "billing"), transaction.atomic():
        assert connections["default"].in_atomic_block
        outcome: Outcome = force_release(key, backend="postgres", **WHO)
        assert outcome.is_busy
        assert ask("default", "SELECT 1") == [(1,)]
    lease.release()
