"""Who calls a key out on PostgreSQL: whoever frees it, where somebody waits, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from django_distlock.backends.database import DatabaseBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import UNKNOWN, Contended, Grant
from tests.contract.helpers import Later, contend, held, take
from tests.contract.locking import eventually

from .databases import ask, migrate, server
from .projects import Project
from .wakeups import LOCKS, Ear, Rung, database_locks


@pytest.fixture
def backend(server_functions: bool) -> Iterator[DatabaseBackend]:
    """Give a backend of its own to the test, on each path in turn."""
    with database_locks(server_functions=server_functions) as made:
        yield made


@pytest.fixture
def ear(key: str) -> Iterator[Ear]:
    """Give a session that hears what is called out about the keys of this test."""
    with Ear(key) as made:
        yield made


def over(backend: DatabaseBackend, key: str) -> None:
    """Let the lease of a key be over, and its grace."""
    name = backend.queues.name_of(key)
    columns = ("acquired_at", "renewed_at", "expires_at", "free_at")
    changes = ", ".join(f"{column} = {column} - 100000000" for column in columns)
    ask("default", f"UPDATE {LOCKS} SET {changes} WHERE storage_key = %s", name)


def expired_takeover(backend: DatabaseBackend, key: str, grant: Grant) -> Grant:
    """Grant a key whose last lease is over."""
    over(backend, key)
    return take(backend, key)


Event = Callable[[DatabaseBackend, str, Grant], object]

#: What ends a grant, replaces it, or lets its key be free sooner.
EVENTS: dict[str, Event] = {
    "release": lambda backend, key, grant: backend.release(grant),
    "settle": lambda backend, key, grant: backend.release(grant, 20),
    "settle for longer": lambda backend, key, grant: backend.release(grant, 100),
    "settle at once": lambda backend, key, grant: backend.release(grant, 0),
    "extend by less": lambda backend, key, grant: backend.extend(grant, 5),
    "force_release": lambda backend, key, grant: backend.force_release(key),
    "takeover": lambda backend, key, grant: take(backend, key, replace=grant.token),
    "takeover of what is over": expired_takeover,
}

#: What leaves the key taken for as long as it was.
NO_EVENTS: dict[str, Event] = {
    "extend": lambda backend, key, grant: backend.extend(grant),
    "extend for ever": lambda backend, key, grant: backend.extend(
        Grant(key, grant.token, 1, None, grant.acquired_at, None)
    ),
    "extend_many": lambda backend, key, grant: backend.extend_many([grant]),
    "shorten": lambda backend, key, grant: backend.request_stop(key, 5),
    "shorten by token": lambda backend, key, grant: backend.request_stop(key, 5, grant.token),
    "shorten by nothing": lambda backend, key, grant: backend.request_stop(key, 1000),
    "request_stop": lambda backend, key, grant: backend.request_stop(key),
    "pause": lambda backend, key, grant: backend.pause(
        key, grant.acquired_at + timedelta(seconds=60)
    ),
    "losing attempt": lambda backend, key, grant: contend(backend, key),
    "losing attempt that waits": lambda backend, key, grant: contend(backend, key, wanted=True),
    "release by another token": lambda backend, key, grant: backend.release(
        Grant(key, new_token(), 1, 30, grant.acquired_at, None)
    ),
    "settle by another token": lambda backend, key, grant: backend.release(
        Grant(key, new_token(), 1, 30, grant.acquired_at, None), 10
    ),
    "cleanup": lambda backend, key, grant: backend.cleanup(grant.acquired_at),
}


# Who calls a key out


def test_event_calls_out_the_key_that_is_wanted(
    backend: DatabaseBackend, key: str, ear: Ear
) -> None:
    """Each once, by its storage key, whatever text it is; and nothing where nobody waits for it."""
    for event, happens in EVENTS.items():
        for name in (f"{key}{event}", f'{key}{event} "{{é}}" \\ %s 🔒 ' + "x" * 400):
            grant = take(backend, name)
            contend(backend, name)
            assert happens(backend, name, grant), event
            assert ear.heard() == [], event
            backend.force_release(name)
            grant = take(backend, name)
            contend(backend, name, wanted=True)
            assert ear.heard() == [], event
            assert happens(backend, name, grant), event
            assert ear.heard() == [backend.queues.name_of(name)], event


def test_nothing_is_called_out_that_frees_no_key(
    backend: DatabaseBackend, key: str, ear: Ear
) -> None:
    """Also where somebody waits."""
    for event, happens in NO_EVENTS.items():
        grant = take(backend, f"{key}{event}")
        contend(backend, grant.key, wanted=True)
        happens(backend, grant.key, grant)
        assert ear.heard() == [], event
        assert held(backend, grant.key).wanted, event


def test_end_of_a_lease_without_expiry_is_sooner(
    backend: DatabaseBackend, key: str, ear: Ear
) -> None:
    """An extend that gives an expiry to a lease that had none calls its key out."""
    grant = take(backend, key, ttl=None)
    contend(backend, key, wanted=True)
    for ttl in (600, 5):
        assert isinstance(backend.extend(grant, ttl), Grant)
        assert ear.heard() == [backend.queues.name_of(key)]


def test_resume_always_calls_out(backend: DatabaseBackend, key: str, ear: Ear) -> None:
    """Whoever was told of the pause of a free key could leave no mark."""
    now = take(backend, f"{key}-other").acquired_at
    for name, seconds in ((key, None), (f"{key}-paused", 60), (f"{key}-over", -60)):
        if seconds is not None:
            backend.pause(name, now + timedelta(seconds=seconds))
        assert backend.pause(name, None) is (seconds == 60)
        assert ear.heard() == [backend.queues.name_of(name)]


def test_uncontended_use_sends_nothing(backend: DatabaseBackend, key: str, ear: Ear) -> None:
    """Of 20 cycles, none takes the lock that NOTIFY needs at commit."""
    for _ in range(20):
        grant = take(backend, key)
        assert isinstance(backend.extend(grant), Grant)
        assert backend.release(grant) is True
    assert ear.heard() == []


def test_new_grant_is_not_wanted(backend: DatabaseBackend, key: str, ear: Ear) -> None:
    """The mark goes with the grant that it was on, however that ended."""
    for end in ("release", "takeover", "takeover of what is over", "force_release"):
        grant = take(backend, key)
        contend(backend, key, wanted=True)
        EVENTS[end](backend, key, grant)
        ear.heard()
        record = backend.read(key)
        if record is None:
            continue
        assert not record.wanted
        assert backend.force_release(key) is not None
        assert ear.heard() == []


def test_settled_key_can_still_be_called_out(backend: DatabaseBackend, key: str, ear: Ear) -> None:
    """The mark outlives the settling: an operator who frees the key sooner wakes as well."""
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    assert backend.release(grant, 20) is True
    assert ear.heard() == [backend.queues.name_of(key)]
    assert backend.request_stop(key, 5)
    assert ear.heard() == [backend.queues.name_of(key)]


def test_settling_of_what_was_over_is_silent(backend: DatabaseBackend, key: str, ear: Ear) -> None:
    """It changes nothing."""
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    over(backend, key)
    assert backend.release(grant, 20) is False
    assert ear.heard() == []


def test_release_of_what_was_over_calls_out(key: str, ear: Ear) -> None:
    """The record goes, and the mark with it: it answers no, and calls all the same."""
    with database_locks() as backend:
        grant = take(backend, key)
        contend(backend, key, wanted=True)
        over(backend, key)
        assert backend.release(grant) is False
        assert ear.heard() == [backend.queues.name_of(key)]
        assert backend.queues.name_of(key) not in backend.queues.released_wanted


def test_busy_answers_call_nothing_out(backend: DatabaseBackend, key: str, ear: Ear) -> None:
    """Where the record is locked by somebody else, nothing is changed and nothing is said."""
    grant = take(backend, key)
    contend(backend, key, wanted=True)
    with server(str(connections["default"].settings_dict["NAME"])) as raw, raw.transaction():
        raw.execute(
            f"SELECT 1 FROM {LOCKS} WHERE storage_key = %s FOR UPDATE",
            [backend.queues.name_of(key)],
        )
        assert backend.release(grant, bound=0.05) is UNKNOWN
        assert backend.extend(grant, 5, bound=0.05) is UNKNOWN
        answer = backend.acquire(key, new_token(), 30, replace=grant.token, bound=0.05)
        assert isinstance(answer, Contended)
        assert answer.busy
    assert ear.heard() == []
    assert backend.release(grant) is True
    assert ear.heard() == [backend.queues.name_of(key)]


def test_waiter_is_told_the_end_as_of_its_mark(backend: DatabaseBackend, key: str) -> None:
    """What shortened the lease between the look and the mark called nobody, and so is told."""
    take(backend, key)
    name = backend.queues.name_of(key)
    with server(str(connections["default"].settings_dict["NAME"])) as raw, raw.transaction():
        raw.execute(
            f"UPDATE {LOCKS} SET expires_at = acquired_at + 5000000,"
            " free_at = acquired_at + 6000000 WHERE storage_key = %s",
            [name],
        )
        waiting = Later(contend, backend, key, wanted=True)
        blocked = "SELECT 1 FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"
        assert eventually(lambda: bool(ask("default", blocked, raw.info.backend_pid)))
    contended = waiting.result()
    assert contended.acquired_at is not None
    assert contended.expires_at == contended.acquired_at + timedelta(seconds=5)
    assert contended.free_at == contended.acquired_at + timedelta(seconds=6)


def test_keys_are_called_out_under_other_names(postgresql: str, key: str) -> None:
    """Where the tables have other names, the secret is found by them."""
    project = Project(postgresql, DISTLOCK_TABLES={"locks": "AcmeLocks"})
    assert project.run("tests.integration.test_wakeups_postgresql:release_wanted", key)["heard"]


def release_wanted(key: str) -> dict[str, Any]:
    """Be a project: release what somebody waits for, by both paths."""
    migrate("default")
    heard = True
    for server_functions in (True, False):
        with database_locks(server_functions=server_functions) as backend:
            name = f"{key}-{server_functions}"
            grant = take(backend, name)
            with Rung(backend, name) as rung:
                assert backend.listen(10)
                contend(backend, name, wanted=True)
                rung.forget()
                backend.release(grant)
                heard = heard and rung.comes()
    return {"heard": heard}
