"""System checks of settings that are legal and cost something, and of routers."""

from __future__ import annotations

from typing import Any

import pytest
from django.core import checks
from django.test import override_settings

from django_distlock import RunScope, distlock
from django_distlock.checks.settings import check_templates
from django_distlock.scheduling import scheduled
from tests.backends import MEMORY, REDIS
from tests.contract.aliases import DATABASE, alias_like

from .databases import APP, Routed

EVERY = {DATABASE: {"using": "default"}, MEMORY: {}, REDIS: {"url": "redis://127.0.0.1:1/0"}}


def found(distlock: dict[str, Any], *, deploy: bool = False) -> dict[str, str]:
    """Check these backends, without looking into a store; give ids and texts of what is said."""
    with override_settings(DISTLOCK=distlock):
        # Those of other tags may ask servers, where they are to run on deployment.
        messages = checks.run_checks(tags=["distlock"], include_deployment_checks=deploy)
    return {str(each.id): each.msg for each in messages if not each.is_silenced()}


def backend(path: str, **configured: Any) -> dict[str, Any]:
    """Return the settings of one backend."""
    return {"locks": {"BACKEND": path, "OPTIONS": EVERY[path], **configured}}


# Heartbeat


def test_heartbeat_that_is_slow_is_a_warning() -> None:
    """W004 above a third, with what is left of a ttl behind the second beat."""
    told = found(backend(DATABASE, HEARTBEAT=0.4))
    assert list(told) == ["distlock.W004"]
    assert "DISTLOCK['locks']" in told["distlock.W004"]
    assert "20%" in told["distlock.W004"]
    for part in (0.1, 1 / 3):
        assert found(backend(DATABASE, HEARTBEAT=part)) == {}


# Memory


def test_memory_is_a_warning_on_deployment() -> None:
    """W005 names the setting, and what is locked; in development nothing is said."""
    told = found(backend(MEMORY), deploy=True)
    assert list(told) == ["distlock.W005"]
    assert "DISTLOCK['locks']" in told["distlock.W005"]
    assert found(backend(MEMORY)) == {}
    assert found(backend(DATABASE), deploy=True) == {}

    @distlock("invoice:{number}", backend="locks")
    def pay(number: int) -> None:
        """Pay."""

    assert "'invoice:{number}'" in found(backend(MEMORY), deploy=True)["distlock.W005"]
    del pay


@pytest.mark.parametrize(
    ("scope", "warns"),
    [
        (RunScope.PREFER_GLOBAL, False),
        (RunScope.NODE_LOCAL, False),
        (RunScope.REQUIRE_GLOBAL, True),
    ],
)
def test_schedules_that_each_node_may_run_are_quiet(scope: RunScope, warns: bool) -> None:
    """A schedule that says so itself is no mistake, until something else is locked there."""

    @scheduled("report", scope=scope, expected=10, backend="locks")
    def report() -> None:
        """Report."""

    assert ("distlock.W005" in found(backend(MEMORY), deploy=True)) is warns

    @distlock("other", backend="locks")
    def other() -> None:
        """Do something else."""

    assert "distlock.W005" in found(backend(MEMORY), deploy=True)
    del report, other


# Prefixes


def test_long_prefix_is_a_warning() -> None:
    """W006 above 64 bytes of UTF-8, whatever the number of characters."""
    for path in EVERY:
        told = found(backend(path, KEY_PREFIX="é" * 33))
        assert list(told) == ["distlock.W006"]
        assert "66 bytes" in told["distlock.W006"]
        # Colons at the end are not kept, and so not counted.
        for prefix in ("", "p" * 64, "p" * 64 + ":::"):
            assert found(backend(path, KEY_PREFIX=prefix)) == {}


# Routers


def told_with(router: Routed | None, *usings: str) -> list[str]:
    """Check database backends with a router; give the texts of W110."""
    configured = {
        f"locks{number}": {"BACKEND": DATABASE, "OPTIONS": {"using": using}}
        for number, using in enumerate(usings)
    }
    routers = [] if router is None else [router]
    with override_settings(DATABASE_ROUTERS=routers, DISTLOCK=configured):
        messages = checks.run_checks(tags=["distlock"])
    return [each.msg for each in messages if each.id == "distlock.W110"]


def test_missing_or_wrong_router_is_a_warning(sqlite: str) -> None:
    """W110: the models are looked for where no lock is, or their tables are made nowhere."""
    (said,) = told_with(None, sqlite)
    assert repr(sqlite) in said
    assert "to 'default'" in said
    (said,) = told_with(Routed("default", APP, made=(sqlite,)), sqlite)
    assert "to 'default'" in said
    # `migrate --database` would record its migrations, and make nothing.
    (said,) = told_with(Routed(sqlite, APP, made=("default",)), sqlite)
    assert repr(sqlite) in said
    assert "do not allow the migrations" in said


def test_router_that_is_right_or_not_needed_is_quiet(sqlite: str) -> None:
    """It can name one database only; an alias around a pooler leads to the same; Redis to none."""
    assert told_with(Routed(sqlite, APP, made=(sqlite,)), sqlite) == []
    assert told_with(None, "default") == []
    assert told_with(None) == []
    assert told_with(None, "default", sqlite) == []
    with alias_like("default", PORT="1") as direct:
        assert told_with(None, direct) == []
        assert told_with(Routed("default", APP, made=("default",)), direct) == []
    with override_settings(DATABASE_ROUTERS=[Routed("sqlite", APP, made=())]):
        assert found(backend(REDIS)) == {}


# Keys


def test_template_that_begins_with_a_field_is_a_warning() -> None:
    """W007 names the function; a text in front, ours of a schedule too, is enough."""

    @distlock("{name}")
    def reached(name: str) -> None: ...

    @distlock("file:{name}")
    def kept(name: str) -> None: ...

    @scheduled("{name}", expected=10)
    def ticked(name: str) -> None: ...

    made = {each.__qualname__ for each in (reached, kept, ticked)}
    told = [each.msg for each in check_templates(None) if any(name in each.msg for name in made)]
    assert len(told) == 1
    assert reached.__qualname__ in told[0]
