"""`manage.py distlock_doctor`: what it says, to whom, and what it ends with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_distlock import InvalidArgument, lock_backends
from django_distlock.core.pages import DOCS_URL, page
from django_distlock.inspection import diagnosis
from django_distlock.inspection.diagnosis import ADDRESSES, diagnose
from django_distlock.inspection.diagnosis.findings import address
from django_distlock.inspection.diagnosis.responses import KEY
from tests.backends import MEMORY
from tests.contract.aliases import DATABASE, alias_like
from tests.contract.helpers import take
from tests.redis_servers import private_redis
from tests.settings import REDIS_BACKEND

from .databases import migrate
from .operating import DEAD, run
from .projects import Project
from .test_distlock_doctor_stores import wait_for_doctors
from .wires import wire

pytestmark = pytest.mark.usefixtures("unknown_redis")

ROOT = Path(__file__).parents[2]


@contextmanager
def on_redis(*, durable: bool = True, **more: Any) -> Iterator[None]:
    """Configure a Redis with which nothing is wrong, or that keeps nothing; and other backends."""
    with private_redis(durable=durable) as running:
        locks = {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": running.url}}
        with override_settings(DISTLOCK={"locks": locks, **more}):
            yield


def test_sound_project_ends_with_0() -> None:
    """All that was looked at is listed, each with what came of it."""
    with on_redis():
        ran = run("distlock_doctor", "--fail-level=WARNING")
    assert (ran.status, ran.err) == (0, "")
    assert "No findings." in ran.out
    project, locks = ran.out.split("DISTLOCK['locks']")
    assert "ok       settings" in project
    for what in (
        "store", "clock", "locking", "wake-ups", "connections", "locks", "orphan waiters",
        "pauses", "replica", "eviction", "persistence",
    ):  # fmt: skip
        assert re.search(rf"^  ok       {what}( |$)", locks, re.MULTILINE), what


def test_fail_level_decides_about_the_status() -> None:
    """A warning is told, and fails only where that is asked for."""
    with on_redis(durable=False):
        ran = run("distlock_doctor")
        assert ran.status == 0
        assert "WARNING distlock.W203 [locks]" in ran.out
        assert "do:   Set appendonly to yes." in ran.out
        assert f"read: {page('runbooks/failover')}\n" in ran.out
        assert "1 finding." in ran.out
        assert run("distlock_doctor", "--fail-level=WARNING").status == 1
        assert run("distlock_doctor", "--fail-level=WARNING", "--json").status == 1


def test_json_is_one_document() -> None:
    """Findings, the worst first, and looks, each with its backend; nothing beside it."""
    with on_redis(durable=False, memory={"BACKEND": MEMORY}, wrong={"BACKEND": DATABASE, "TTL": 0}):
        ran = run("distlock_doctor", "--json")
    assert ran.status == 1
    assert set(ran.json) == {"findings", "silenced", "looked_at", "silent"}
    found = {each["id"]: each for each in ran.json["findings"]}
    assert next(iter(found)) == "distlock.E001"
    w203 = found["distlock.W203"]
    assert set(w203) == {"id", "level", "backend", "message", "hint", "address", "keys"}
    assert (w203["level"], w203["backend"]) == ("warning", "locks")
    assert {
        "backend": "memory",
        "what": "store",
        "mark": "skipped",
        "text": "in process memory",
    } in ran.json["looked_at"]
    assert any(each["backend"] is None for each in ran.json["looked_at"])


def test_silenced_findings_are_listed_apart() -> None:
    """`SILENCED_SYSTEM_CHECKS` holds here too, also for what only a diagnosis finds."""
    ours = {"distlock.W203", "distlock.D007"}
    # Those of the settings are about what other tests declare in this process.
    silenced = [*settings.SILENCED_SYSTEM_CHECKS, *ours]
    with on_redis(durable=False), override_settings(SILENCED_SYSTEM_CHECKS=silenced):
        store = lock_backends["locks"]
        store.pause("report", store.clock().replace(year=2099))
        ran = run("distlock_doctor", "--fail-level=WARNING")
        assert ran.status == 0
        told = re.search(r"Silenced by SILENCED_SYSTEM_CHECKS: (.*)\.\n", ran.out)
        assert told
        assert set(told[1].split(", ")) >= ours
        document = run("distlock_doctor", "--json").json
    assert document["findings"] == []
    assert {each["id"] for each in document["silenced"]} >= ours


def test_nothing_stays_but_a_counter() -> None:
    """The key of the lock that is taken is the same each time; `--no-write` leaves nothing."""
    with on_redis():
        store = lock_backends["locks"]
        ran = run("distlock_doctor", "--no-write")
        assert ran.status == 0
        assert re.search(r"^  -        locking +not tried$", ran.out, re.MULTILINE)
        assert store.counter(KEY) is None
        run("distlock_doctor")
        first = store.counter(KEY)
        run("distlock_doctor")
        second = store.counter(KEY)
        assert store.list().records == ()
        assert first is not None
        assert second is not None
        assert second.fence > first.fence


def test_two_doctors_at_once() -> None:
    """The key of the other one is no finding."""
    with on_redis():
        take(lock_backends["locks"], KEY, 60)
        ran = run("distlock_doctor", "--fail-level=WARNING")
    assert ran.status == 0
    assert "is held, so no lock was acquired" in ran.out


def test_only_what_was_asked_for() -> None:
    """`--backend` tells nothing of the others, and looks at none of them."""
    with on_redis(dead=DEAD, wrong={"BACKEND": DATABASE, "TTL": 0}, memory={"BACKEND": MEMORY}):
        ran = run("distlock_doctor", "--backend=locks", "--fail-level=WARNING")
        assert (ran.status, ran.err) == (0, "")
        assert "dead" not in ran.out
        both = run("distlock_doctor", "--backend=locks", "--backend=wrong", "--json")
        none = run("distlock_doctor", "--backend=nowhere", "--json")
    assert {each["backend"] for each in both.json["looked_at"]} == {None, "locks", "wrong"}
    assert [each["backend"] for each in both.json["findings"]] == ["wrong"]
    assert (none.status, none.json["failures"][0]["code"]) == (1, "misconfigured")
    assert "nowhere" in none.err


def test_stores_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that hang would else take it one after the other, however many there are."""
    deadlines: list[float] = []
    heard = diagnosis._heard

    def note(own: Any, done: Any, until: float) -> Any:
        deadlines.append(until)
        return heard(own, done, until)

    monkeypatch.setattr(diagnosis, "_heard", note)
    run("distlock_doctor", "--backend=redis", "--backend=sqlite")
    assert len(deadlines) == 2
    assert len({*deadlines}) == 1


def test_settings_are_judged_beside_stores_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: what is wrong with the settings is told all the same."""
    # In so little time, no store gives up by itself.
    monkeypatch.setattr(diagnosis, "PATIENCE", 3.0)
    monkeypatch.setattr(diagnosis, "FOR_STORES", 1 / 3)
    with ExitStack() as stack:
        way = stack.enter_context(wire())
        given = {}
        for name in ("one", "two", "three", "four"):
            using = stack.enter_context(alias_like("default", **way.address))
            given[name] = {"BACKEND": DATABASE, "OPTIONS": {"using": using}}
        way.hang()
        with override_settings(DISTLOCK={**given, "wrong": {"BACKEND": DATABASE, "TTL": 0}}):
            backends = [f"--backend={each}" for each in (*given, "wrong")]
            ran = run("distlock_doctor", "--json", *backends)
            way.flow()
            wait_for_doctors()
    assert ran.json["silent"] == list(given)
    about = [each["id"] for each in ran.json["findings"] if each["backend"] == "wrong"]
    assert about == ["distlock.E001"]


@pytest.mark.parametrize("setting", [[], {"x": 5}, {5: {}}])
def test_broken_settings_are_a_finding(setting: Any) -> None:
    """They are what a doctor is called for."""
    with override_settings(DISTLOCK=setting):
        ran = run("distlock_doctor", "--json")
    assert ran.status == 1
    assert "distlock.E001" in [each["id"] for each in ran.json["findings"]]


def test_bad_arguments_are_refused() -> None:
    """With the status of arguments."""
    for wrong in ("--scan=0", "--scan=many", "--fail-level=INFO"):
        with pytest.raises(CommandError, match=re.escape(wrong.partition("=")[0])):
            call_command("distlock_doctor", wrong)
    for limit in (0, True, "5"):
        with pytest.raises(InvalidArgument, match="limit"):
            diagnose(limit=limit)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="several aliases"):
        diagnose("default")


def test_keys_cannot_move_the_cursor() -> None:
    """What somebody called a key is shown as text."""
    with on_redis():
        store = lock_backends["locks"]
        store.pause("report\x1b[2J", store.clock().replace(year=2099))
        out = run("distlock_doctor").out
    assert "\x1b" not in out
    assert "report\\x1b[2J" in out


def source(url: str) -> Path:
    """Return the file that the page at an address is made from."""
    return ROOT / "docs" / url.removeprefix(DOCS_URL).replace(".html", ".md")


def test_every_finding_has_a_page_and_a_line() -> None:
    """Also each of the system checks, whatever its hint says; the references name them all."""
    table = (ROOT / "docs/reference/checks.md").read_text()
    known = set(re.findall(r"^- `(distlock\.[EW]\d+)`:", table, re.MULTILINE))
    assert len(known) > 20
    pages = {source(address(each, "")) for each in known | set(ADDRESSES)}
    assert [each for each in pages if not each.is_file()] == []
    named = page("howto/choose-a-database")
    assert address("distlock.W101", f"See {named}.") == named
    text = (ROOT / "docs/reference/commands.md").read_text()
    rows = re.findall(r"^- `(distlock\.D\d+)`: .*?\]\((.*?)\)", text, re.MULTILINE)
    described = {name: (ROOT / "docs/reference" / file).resolve() for name, file in rows}
    ours = {name: source(each) for name, each in ADDRESSES.items() if ".D" in name}
    assert described == ours


def test_works_in_a_project(postgresql: str) -> None:
    """From the command line: the default backend, migrated, and with nothing but a test's fsync."""
    migrate(postgresql)
    project = Project(postgresql, SILENCED_SYSTEM_CHECKS=["distlock.W108"])
    document = json.loads(project.manage("distlock_doctor", "--json", "--fail-level=WARNING"))
    assert document["findings"] == []
    assert {each["id"] for each in document["silenced"]} == {"distlock.W108"}
