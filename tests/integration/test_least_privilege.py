"""The grants of the manual are enough for the application and for operators, and no more."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.db import DatabaseError, connections, transaction
from django.test import override_settings
from django.utils import timezone

from django_distlock import BackendUnavailable, LockError, distlock
from django_distlock.backends import tables
from django_distlock.core.records import Holder
from django_distlock.fencing.rejecting import Fence
from django_distlock.fencing.seen import see
from django_distlock.handler import lock_backends
from django_distlock.inspection import prune_events, statistics, summary
from django_distlock.models import FailedTask, LockEvent, StoredResponse
from tests.backends import ADVISORY
from tests.contract.aliases import locks_on
from tests.contract.helpers import take, there
from tests.contract.test_failures import OPERATIONS

from .databases import Routed, ask, lock_and_release, migrate, role
from .projects import Project
from .runs import Run
from .test_advisory_sessions import advisory
from .test_checks_schema import drop_index, found

MANUAL = Path(__file__).parents[2] / "docs/howto/grant-least-privilege.md"
#: For the application on PostgreSQL, for operators there, and for the application on MariaDB.
APP, OPERATORS, MARIADB = re.findall(
    r"^```sql\n(.*?)^```", MANUAL.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)

FORBIDDEN = (
    "DELETE FROM django_distlock_fencecounter",
    "TRUNCATE django_distlock_fencecounter",
    "TRUNCATE django_distlock_heldlock",
    "UPDATE django_distlock_lockevent SET actor = ''",
    "DELETE FROM django_distlock_lockevent",
    "CREATE TABLE another (id integer)",
    "DROP TABLE django_distlock_waiter",
)


def do_all(limited: str, **options: Any) -> None:
    """Do what an application does: every operation of the backend, guards, notes and events."""
    assert lock_and_release(limited, **options) > 0
    with locks_on(limited, OPTIONS={"using": limited, **options}) as alias:
        backend = lock_backends[alias]
        for operation in OPERATIONS.values():
            operation(backend)
        backend.force_release("key")
        if backend.supports_guard:
            with distlock("guarded", backend=alias) as lease, lease.atomic(using=limited):
                ask(limited, "SELECT 1")
        backend.notes.put("done", 7, 60)
        # One note in two hundred removes what is over by itself.
        with patch.object(tables, "_SWEEP", 10**9):
            backend.notes.put("over", 7, 0)
        assert backend.notes.get("done") == 7
        assert backend.cleanup(backend.clock()) >= 1
        grant = take(backend, "waited for")
        note = there(backend.waiters.note("waited for", Holder(host="host"), 30))
        assert len(backend.waiters.of("waited for")) == 1
        backend.waiters.drop("waited for", note)
        assert backend.release(grant) is True
        for question in (summary, statistics):
            question(backend=alias)
    for _ in range(2):
        row = FailedTask(task_id="5f6d", failed_at=timezone.now())
        FailedTask.objects.using(limited).bulk_create([row], ignore_conflicts=True)
    over = StoredResponse(name="5f6d", status=0, made_at=timezone.now(), until=timezone.now())
    over.save(using=limited)
    over.save(using=limited, update_fields=["status"])
    over.delete(using=limited)
    see(Fence("key", 7), limited)
    assert see(Fence("key", 9), limited) == 9
    LockEvent.objects.using(limited).create(
        backend="default", key="key", kind="lost", at=timezone.now() - timedelta(days=500)
    )
    assert LockEvent.objects.using(limited).count() > 0


def refuses(limited: str, statement: str) -> None:
    """See that the role lacks the right to a statement."""
    with (
        pytest.raises(DatabaseError, match="permission denied|must be owner|denied to user"),
        transaction.atomic(using=limited),
    ):
        ask(limited, statement)


@pytest.mark.parametrize("kind", ["functions", "orm", "mysql"])
def test_application(request: pytest.FixtureRequest, kind: str) -> None:
    """It can do all that locks do; it can take no fence back and change no event."""
    on_mysql = kind == "mysql"
    using = request.getfixturevalue("mysql" if on_mysql else "postgresql")
    options = {} if on_mysql else {"server_functions": kind == "functions"}
    migrate(using)
    with role(using, MARIADB if on_mysql else APP) as limited:
        do_all(limited, **options)
        for statement in FORBIDDEN:
            refuses(limited, statement)


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_application_runs_programs(request: pytest.FixtureRequest, kind: str) -> None:
    """`distlock_run` sees that the tables are made, and waits for no right that it lacks."""
    using = request.getfixturevalue(kind)
    migrate(using)
    with role(using, MARIADB if kind == "mysql" else APP) as limited:
        with Run(Project(limited), "nightly", "--", "echo", "done") as run:
            assert run.status() == 0, run.said
        assert run.said == "done\n"
        migrations = connections[limited].ops.quote_name("django_migrations")
        user = connections[limited].settings_dict["USER"]
        ask(using, f"REVOKE SELECT ON {migrations} FROM {user}")
        with Run(Project(limited), "nightly", "--", "echo", "done") as run:
            assert run.status() == 0, run.said
        assert "The migrations of django_distlock cannot be applied to 'default'" in run.said
        assert run.said.endswith("done\n")


def test_session_locks_of_the_application(postgresql: str) -> None:
    """Locks that last for a session need no other rights; one's own sessions may be ended."""
    migrate(postgresql)
    with role(postgresql, APP) as limited, advisory(limited) as backend:
        take(backend, "invoice:42")
        assert backend.read("invoice:42") is not None
        assert backend.force_release("invoice:42") is not None
        assert backend.read("invoice:42") is None


def test_session_lock_of_another_role(postgresql: str) -> None:
    """An operator ends its session as a member of that role, and not without."""
    migrate(postgresql)
    with role(postgresql, APP) as limited, role(postgresql, APP) as operator:
        users = [connections[each].settings_dict["USER"] for each in (limited, operator)]
        with advisory(limited) as holder:
            take(holder, "invoice:42")
            with locks_on(operator, BACKEND=ADVISORY, OPTIONS={"using": operator}) as alias:
                ending = lock_backends[alias]
                with pytest.raises(BackendUnavailable) as caught:
                    ending.force_release("invoice:42")
                assert caught.value.code == "auth_failed"
                assert ending.read("invoice:42") is not None
                ask(postgresql, "GRANT {} TO {}".format(*users))
                assert ending.force_release("invoice:42") is not None
                assert ending.read("invoice:42") is None


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_checks_as_the_application(request: pytest.FixtureRequest, kind: str) -> None:
    """With these rights no check of the database complains, but of an index that is not there."""
    using = request.getfixturevalue(kind)
    migrate(using)
    with role(using, MARIADB if kind == "mysql" else APP) as limited:
        assert found(limited) == {}
        drop_index(using)
        assert [*found(limited)] == ["distlock.W111"]


def test_operators(postgresql: str) -> None:
    """The grants of the application do not let old events go; the one more does."""
    migrate(postgresql)
    with role(postgresql, APP) as limited:
        do_all(limited)
        with (
            override_settings(DATABASE_ROUTERS=[Routed(limited)]),
            pytest.raises(LockError, match="permission denied"),
        ):
            prune_events(actor="test")
    with (
        role(postgresql, APP, OPERATORS) as limited,
        override_settings(DATABASE_ROUTERS=[Routed(limited)]),
    ):
        assert prune_events(actor="test").events == 1
