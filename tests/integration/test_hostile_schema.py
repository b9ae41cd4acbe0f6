"""A role that may create in the schema of the tables does not get its code run by the locks'."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import IntegrityError, connections

from django_distlock.backends.database import DatabaseBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from django_distlock.database.sql import FIXED_PATH
from django_distlock.fencing.operations import EnforceFence
from django_distlock.fencing.triggers import FUNCTION
from django_distlock.handler import lock_backends
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import contend, take

from .databases import ask, migrate, server
from .enforcing import Bank, payment
from .test_advisory_sessions import advisory

#: Arguments that fit a call better than those of the function that is meant, and what it answers.
PLANTED = {
    "json_build_array(a text, b bigint, c bigint, d bigint, e bigint)": "json",
    "json_build_array(a text, b bigint)": "json",
    "json_build_array(a text, b bigint, c bigint, d bigint, e boolean)": "json",
    "to_jsonb(a bank_payment)": "jsonb",
    "json_agg(a json)": "json",
    "pg_advisory_xact_lock(a integer)": "void",
    "pg_backend_pid()": "integer",
    "pg_notify(a text, b varchar)": "void",
    "set_config(a text, b integer, c boolean)": "text",
}


class Stranger:
    """A role of its own, which plants functions and operators into `public`."""

    def __init__(self, database: str, name: str):
        self.database = database
        self.name = name

    def plant(self) -> None:
        """Make functions and operators that note who runs them, and then fail."""
        with server(self.database) as raw:
            raw.execute(f"SET SESSION AUTHORIZATION {self.name}")
            # A sequence counts what the failing statement takes back in a table.
            raw.execute("CREATE SEQUENCE public.caught")
            raw.execute("GRANT ALL ON SEQUENCE public.caught TO PUBLIC")
            for signature, answer in PLANTED.items():
                self._make(raw, signature, answer)
            self._make(raw, "hostile(a varchar, b text)", "boolean")
            self._make(raw, "hostile(a bigint, b bigint)", "boolean")
            for operator in ("=", "<>"):
                raw.execute(
                    f"CREATE OPERATOR public.{operator}"
                    " (LEFTARG = varchar, RIGHTARG = text, FUNCTION = public.hostile)"
                )
            for operator in ("<", ">="):
                raw.execute(
                    f"CREATE OPERATOR public.{operator}"
                    " (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = public.hostile)"
                )

    def _make(self, raw: object, signature: str, answer: str) -> None:
        raw.execute(  # type: ignore[attr-defined]
            f"CREATE FUNCTION public.{signature} RETURNS {answer} LANGUAGE plpgsql AS $$ BEGIN"
            " PERFORM nextval('public.caught');"
            f" RAISE EXCEPTION 'hostile code ran as %', current_user; END $$"
        )

    def caught(self) -> bool:
        """Return whether anything of it was called."""
        with server(self.database) as raw:
            (called,) = raw.execute("SELECT is_called FROM public.caught").fetchone() or (None,)
        return bool(called)


@contextmanager
def stranger_in(database: str) -> Iterator[Stranger]:
    """Give a role that may create in `public`, and no more."""
    name = f"stranger_{secrets.token_hex(4)}"
    with server(database) as raw:
        raw.execute(f"CREATE ROLE {name}")
        raw.execute(f"GRANT CREATE, USAGE ON SCHEMA public TO {name}")
    try:
        yield Stranger(database, name)
    finally:
        with server(database) as raw:
            raw.execute(f"DROP OWNED BY {name} CASCADE")
            raw.execute(f"DROP ROLE {name}")


@pytest.fixture
def stranger(postgresql: str) -> Iterator[Stranger]:
    """Give such a role in a database that has the tables, and a table with an enforced fence."""
    migrate(postgresql)
    with stranger_in(connections[postgresql].settings_dict["NAME"]) as found:
        yield found


#: The second one lets what is planted win even where PostgreSQL's own fits as well.
PATHS = ["public", "public, pg_catalog"]


@pytest.mark.parametrize("path", PATHS)
def test_functions_call_postgresql_alone(postgresql: str, stranger: Stranger, path: str) -> None:
    """Acquire, contend, extend, renew and release, by whatever path the caller has."""
    Bank(postgresql).migrate(payment())
    with locks_on(postgresql, OPTIONS={"using": postgresql}) as alias:
        backend = lock_backends[alias]
        assert isinstance(backend, DatabaseBackend)
        # Asks for the schema, by queries of which the path is the caller's.
        assert backend.read("invoice:42") is None
        stranger.plant()
        ask(postgresql, f"SET search_path = {path}")
        for fence in (1, 2):
            grant = take(backend, "invoice:42")
            assert grant.fence == fence
            assert isinstance(
                backend.acquire("invoice:42", new_token(), 30, wanted=True), Contended
            )
            assert isinstance(backend.extend(grant, 30), Grant)
            assert [type(each) for each in backend.extend_many([grant])] == [Grant]
            assert backend.release(grant) is True
    assert not stranger.caught()


@pytest.mark.parametrize("path", PATHS)
def test_sessions_call_postgresql_alone(postgresql: str, stranger: Stranger, path: str) -> None:
    """Locks that last for a session, whatever path their database begins with."""
    database = connections[postgresql].settings_dict["NAME"]
    Bank(postgresql).migrate(payment())
    with alias_like("default", NAME=database) as using, advisory(using) as backend:
        grant = take(backend, "invoice:42")
        assert backend.release(grant) is True
        backend._sessions.close_all()
        stranger.plant()
        with server(database) as raw:
            raw.execute(f"ALTER DATABASE {database} SET search_path = {path}")
        with advisory(using) as other:
            again = take(other, "invoice:42")
            answer = contend(backend, "invoice:42")
            assert answer.fence == again.fence > grant.fence
            assert other.release(again) is True
        grant = take(backend, "invoice:43")
        assert isinstance(backend.extend(grant, 30), Grant)
        assert backend.release(grant) is True
    assert not stranger.caught()


@pytest.mark.parametrize("path", PATHS)
def test_trigger_calls_postgresql_alone(postgresql: str, stranger: Stranger, path: str) -> None:
    """What `EnforceFence` has made refuses, and tells of it, by functions of PostgreSQL."""
    Bank(postgresql).migrate(payment(), EnforceFence("Payment")).add(5)
    stranger.plant()
    ask(postgresql, f"SET search_path = {path}")
    with pytest.raises(IntegrityError, match="a fence never goes back"):
        ask(postgresql, "UPDATE bank_payment SET fence = 3")
    assert not stranger.caught()


def test_migrate_mends_the_trigger_of_before(postgresql: str, stranger: Stranger) -> None:
    """A function that was made without a path of its own gets one, in any schema."""
    Bank(postgresql).migrate(payment(), EnforceFence("Payment")).add(5)
    ask(postgresql, f'ALTER FUNCTION "{FUNCTION}"() RESET search_path')
    ask(postgresql, 'CREATE SCHEMA "50% off"')
    ask(postgresql, f'ALTER FUNCTION "{FUNCTION}"() SET SCHEMA "50% off"')
    migrate(postgresql)
    stranger.plant()
    ask(postgresql, "SET search_path = public, pg_catalog")
    with pytest.raises(IntegrityError, match="a fence never goes back"):
        ask(postgresql, "UPDATE bank_payment SET fence = 3")
    paths = ask(postgresql, "SELECT proconfig FROM pg_proc WHERE proname = %s", FUNCTION)
    assert paths == [([FIXED_PATH],)]
    assert not stranger.caught()
