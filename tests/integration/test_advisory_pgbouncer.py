"""Locks that last for a session, and a pooler that gives sessions to whoever comes."""

from __future__ import annotations

import psycopg
import pytest
from django.db import connections

from django_distlock import LockUsageError, distlock
from tests.contract.aliases import alias_like
from tests.poolers import pgbouncer
from tests.salted import SESSIONS

from .databases import ask
from .test_advisory_sessions import advisory


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_pooler_in_between_is_refused(key: str, mode: str) -> None:
    """Every lock is refused, with what to do instead; nothing is left on the pooler's session.

    Also where a client keeps its session: nothing tells that mode from the other one.
    """
    with (
        pgbouncer(pool_mode=mode, default_pool_size=1) as address,
        alias_like("default", **address) as using,
        advisory(using) as backend,
    ):
        for _ in range(2):
            with pytest.raises(LockUsageError, match="connects to PostgreSQL directly") as caught:
                distlock(key, backend=backend.alias, wait=0).acquire()
            assert (caught.value.code, caught.value.key) == ("unsupported", key)
        connections[using].close()
        with psycopg.connect(
            host=address["HOST"],
            port=address["PORT"],
            user=connections[using].settings_dict["USER"],
            dbname=connections[using].settings_dict["NAME"],
            autocommit=True,
        ) as client:
            assert client.execute("SHOW lock_timeout").fetchone() == ("0",)
            assert client.execute("SELECT * FROM pg_listening_channels()").fetchall() == []
            assert client.execute("SELECT * FROM pg_prepared_statements").fetchall() == []
        # Around the pooler nobody holds anything.
        held = f"SELECT count(*) FROM {SESSIONS} WHERE strpos(storage_key, %s) > 0"
        assert ask("default", held, key) == [(0,)]
