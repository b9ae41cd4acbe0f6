"""A grant that the store has given survives a crash of the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.records import Grant

from .helpers import extend, take
from .stores import DatabaseStore

pytestmark = pytest.mark.stores("postgresql", why="no setting decides when a commit is durable")


@pytest.fixture
def at_commit(store: DatabaseStore, key: str) -> Iterator[Callable[[], list[str]]]:
    """Give a function that returns what `synchronous_commit` was at each commit so far.

    A deferred trigger runs when the transaction commits: what a SET clause of a function has set
    only for its own time is over by then.
    """
    name = f"at_commit_{key}"
    store.ask(f"CREATE TABLE {name} (at serial, setting text)")
    store.ask(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" INSERT INTO {name} (setting) VALUES (current_setting('synchronous_commit'));"
        " RETURN NULL; END $$"
    )
    store.ask(
        f"CREATE CONSTRAINT TRIGGER {name} AFTER INSERT OR UPDATE ON {store.locks}"
        " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
        f" WHEN (NEW.key = '{key}') EXECUTE FUNCTION {name}()"
    )
    yield lambda: [row[0] for row in store.ask(f"SELECT setting FROM {name} ORDER BY at")]
    store.ask_everywhere("RESET synchronous_commit")
    store.ask(f"DROP FUNCTION {name}() CASCADE")
    store.ask(f"DROP TABLE {name}")


#: What a session commits by, and what it has to be for a grant.
SETTINGS = {
    "off": "on",
    "local": "on",
    "remote_write": "on",
    "on": "on",
    "remote_apply": "remote_apply",
}


def test_acquire_and_extend_are_durable(
    backend: BaseLockBackend, store: DatabaseStore, at_commit: Callable[[], list[str]], key: str
) -> None:
    """Whatever the session says, their transactions commit with `on` at least."""
    for session, expected in SETTINGS.items():
        store.ask_everywhere(f"SET synchronous_commit = {session}")
        before = at_commit()
        grant = take(backend, key)
        extend(backend, grant)
        assert isinstance(backend.extend_many([grant])[0], Grant)
        successor = take(backend, key, replace=grant.token)
        assert at_commit() == before + [expected] * 4, session
        assert store.ask("SHOW synchronous_commit") == [(session,)]
        assert backend.release(successor) is True


def test_grant_is_flushed_before_the_answer(
    backend: BaseLockBackend, store: DatabaseStore, key: str
) -> None:
    """When the answer is there, the log has come to the disk as far as it was written."""
    store.ask_everywhere("SET synchronous_commit = off")
    before = store.ask("SELECT pg_current_wal_insert_lsn()")[0][0]
    grant = take(backend, key)
    assert _flushed_since(store, before)
    before = store.ask("SELECT pg_current_wal_insert_lsn()")[0][0]
    assert isinstance(backend.extend(grant), Grant)
    assert _flushed_since(store, before)


def _flushed_since(store: DatabaseStore, before: str) -> bool:
    # The grant was logged behind `before`; more than that, others may have written meanwhile.
    return bool(store.ask("SELECT pg_current_wal_flush_lsn() > %s::pg_lsn", [before])[0][0])
