"""PostgreSQL by psycopg2: what works, what falls back, and what is refused."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys

import pytest
from django.db import connections

#: What the file is about is in the process that it starts.
pytestmark = pytest.mark.django_db(databases=["default"], transaction=True)


def test_project_on_psycopg2() -> None:
    """Leases work by functions and by the ORM, waiters ask again, and sessions are refused."""
    mine = connections["default"].settings_dict
    names = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
    database = json.dumps({name: mine[name] for name in names})
    program = [sys.executable, "-m", "tests.integration.psycopg2_program", database]
    run = subprocess.run(
        [*program, f"t{secrets.token_hex(6)}"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    worked = dict.fromkeys(("refused", "kept", "released", "awaited", "renewed"), True)
    assert said["driver"] == "psycopg2"
    assert said["functions"] == said["orm"] == {**worked, "wakes": False}
    assert said["transaction"] is True
    assert "AdvisoryBackend" in said["session"]
    assert "psycopg" in said["session"]
