"""System checks of session locks: what they need of the server and of the way to it."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.test import override_settings

from tests.backends import ADVISORY
from tests.contract.aliases import alias_like
from tests.poolers import pgbouncer

from .databases import ask


def found(using: str = "default", *, deploy: bool = True, **options: Any) -> dict[str, str]:
    """Check session locks on an alias; give ids and texts of what is said about them."""
    configured = {"BACKEND": ADVISORY, "OPTIONS": {"using": using, **options}}
    with override_settings(DISTLOCK={"locks": configured}):
        messages = checks.run_checks(include_deployment_checks=deploy)
    ours = [each for each in messages if str(each.id).startswith("distlock.")]
    return {str(each.id): each.msg for each in ours if not each.is_silenced()}


def test_way_to_the_server() -> None:
    """E301 behind a pooler, W301 by its look, W302 without an answer, W115 of a mirror."""
    assert found() == {}
    with pgbouncer(pool_mode="transaction") as address, alias_like("default", **address) as using:
        told = found(using)
        assert list(told) == ["distlock.E301"]
        assert "connects to PostgreSQL directly" in told["distlock.E301"]
    # Without asking anybody, the alias tells.
    with alias_like("default", DISABLE_SERVER_SIDE_CURSORS=True) as using:
        assert list(found(using, deploy=False)) == ["distlock.W301"]
    with alias_like("default", HOST="127.0.0.1", PORT="1") as using:
        assert list(found(using)) == ["distlock.W302"]
    with alias_like("default", TEST={"MIRROR": "default"}) as using:
        assert list(found(using, deploy=False)) == ["distlock.W115"]


def test_more_sessions_than_the_server_takes() -> None:
    """W303: one process could use up what the server has for all."""
    ((most,),) = ask(
        "default",
        "SELECT current_setting('max_connections')::int"
        " - current_setting('superuser_reserved_connections')::int",
    )
    assert str(most) in found(max_connections=most)["distlock.W303"]
    assert found(max_connections=most - 1) == {}
