"""What call sites do before and after their locks are replaced, in two processes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from django.contrib.auth.models import Group

from tests.processes import Process, spawn

from .call_sites import SITES, SKIPPING, WRONG

WORKERS = "tests.integration.call_sites"
TURNS = 12

pytestmark = pytest.mark.servers("PostgreSQL", "Redis")


@pytest.mark.parametrize("site", SITES)
def test_call_site_excludes_before_and_after(site: str, key: str, tmp_path: Path) -> None:
    """One process at a time is inside, in each of both forms, and both come to work."""
    place, names = str(tmp_path / "inside"), [f"{key}-before", f"{key}-after"]
    with ExitStack() as stack:
        two = [
            stack.enter_context(spawn(f"{WORKERS}:race", site, names, place, TURNS))
            for _ in range(2)
        ]
        for _ in names:
            for each in two:
                each.wait_for("ready", timeout=90)
            for each in two:
                each.send("go")
        for form in zip(*(each.result(timeout=90) for each in two), strict=True):
            assert [said["overlaps"] for said in form] == [0, 0]
            runs = [said["runs"] for said in form]
            assert sum(runs) > 0 if site in SKIPPING else runs == [TURNS, TURNS]
    Group.objects.filter(name__startswith=key).delete()


@pytest.mark.parametrize("site", WRONG)
@pytest.mark.parametrize("form", ["before", "after"])
def test_wrong_call_site_lets_two_in_and_its_replacement_does_not(
    site: str, form: str, key: str
) -> None:
    """Two are inside at the same time before, and the second one is refused after."""

    def visit() -> Process:
        return spawn(f"{WORKERS}:visit", site, form == "after", key)

    with ExitStack() as stack:
        first = stack.enter_context(visit())
        if looks := site == "get, then set":
            # Both look before any of them sets.
            second = stack.enter_context(visit())
            first.wait_for("looked", timeout=90)
            second.wait_for("looked", timeout=90)
            first.send("go on")
        first.wait_for("inside", timeout=90)
        if looks:
            second.send("go on")
        else:
            second = stack.enter_context(visit())
        if form == "before":
            second.wait_for("inside", timeout=90)
            second.send("leave")
            assert second.result(timeout=90) == "worked"
        else:
            assert second.result(timeout=90) == "refused"
        first.send("leave")
        assert first.result(timeout=90) == "worked"
    made, _ = Group.objects.filter(name__startswith=key).delete()
    if site == "free before the commit":
        assert made == (2 if form == "before" else 1)
