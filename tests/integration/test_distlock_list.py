"""`manage.py distlock_list` and `distlock_show`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from io import BytesIO, StringIO, TextIOWrapper

import pytest
from django.conf import settings
from django.core.management import CommandError, ManagementUtility, call_command
from django.test import override_settings

from django_distlock import Lease, distlock, lock_backends
from django_distlock.core.keys import new_token
from django_distlock.core.records import Holder
from django_distlock.inspection import force_release, pause
from django_distlock.models import HeldLock
from tests.backends import DATABASE
from tests.contract.locking import held_elsewhere

from .databases import migrate
from .operating import DEAD, event_of, run
from .projects import Project

OF = "--backend=postgres"


@pytest.fixture
def leases(key: str) -> Iterator[list[Lease]]:
    """Hold a few keys on two backends."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(distlock(f"{key}:{name}", backend=alias, ttl=60))
            for alias, name in (("postgres", "a"), ("postgres", "b"), ("redis", "c"))
        ]


# Listing


def test_table_shows_who_holds_what(leases: list[Lease], key: str) -> None:
    """A line for each lock, in columns, below their headings."""
    ran = run("distlock_list", "--prefix", key, OF, "--backend=redis")
    assert ran.status == 0
    head, *lines = ran.out.splitlines()
    assert head.split()[:4] == ["BACKEND", "KEY", "STATE", "HOLDER"]
    assert len(lines) == 3
    for lease, line in zip(leases, lines, strict=True):
        assert line.startswith(lease.backend)
        assert lease.key in line
        assert line.index(lease.key) == head.index("KEY")
        assert line.endswith(str(lease.fence))
    assert ran.err == ""


def test_code_may_name_one_backend(leases: list[Lease], key: str) -> None:
    """By its alias alone, or by several; what is no choice is refused as on a command line."""
    out = StringIO()
    for named in ("redis", ("redis",)):
        call_command("distlock_list", backend=named, prefix=key, limit="5", stdout=out)
    assert out.getvalue().count(leases[-1].key) == 2
    with pytest.raises(CommandError, match="invalid choice: 'warning'"):
        call_command("distlock_doctor", fail_level="warning")


def test_key_is_escaped_where_the_terminal_lacks_its_letters(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not keep the listing from whoever has a terminal of another encoding."""
    terminal = TextIOWrapper(BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    with distlock(f"{key}:ключ"):
        ManagementUtility(["manage.py", "distlock_list", "--prefix", key, OF]).execute()
    terminal.flush()
    assert f"{key}:\\u043a\\u043b\\u044e\\u0447 ".encode() in terminal.buffer.getvalue()


def test_no_output_shows_a_token(leases: list[Lease], key: str) -> None:
    """Neither tables nor JSON, which is one document, of either command."""
    document = run("distlock_list", "--prefix", key, OF, "--backend=redis", "--json").json
    assert [each["key"] for each in document["locks"]] == [each.key for each in leases]
    assert [each["fence"] for each in document["locks"]] == [each.fence for each in leases]
    assert document["locks"][0]["state"] == "held"
    assert document["locks"][0]["holder"]["pid"] > 0
    assert (document["cursor"], document["failures"]) == (None, [])
    shown = [run("distlock_list", "--prefix", key, *more) for more in ((), ("--json",))]
    for lease in leases:
        of = f"--backend={lease.backend}"
        shown += [run("distlock_show", lease.key, of, *more) for more in ((), ("--json",))]
    text = " ".join(f"{each.out}{each.err}" for each in shown)
    for lease in leases:
        assert lease.key in text
        assert lease.token not in text


@pytest.mark.usefixtures("leases")
def test_cursor_leads_to_the_next_page(key: str) -> None:
    """In JSON, and in the text for people."""
    listing = ("distlock_list", "--prefix", key, OF, "--limit=1")
    first = run(*listing, "--json").json
    assert [each["key"] for each in first["locks"]] == [f"{key}:a"]
    second = run(*listing, "--json", "--cursor", first["cursor"]).json
    assert [each["key"] for each in second["locks"]] == [f"{key}:b"]
    assert f"--cursor {first['cursor']}" in run(*listing).out


def test_filters_narrow_the_list(key: str) -> None:
    """Host, task, and age, as they are typed."""
    for number in range(3):
        holder = Holder(host=f"{key}-host-{number}", task_id=f"{key}-task-{number % 2}")
        lock_backends["postgres"].acquire(f"{key}:{number}", new_token(), 60, holder)
    earlier = lock_backends["postgres"].clock() - timedelta(hours=1)
    HeldLock.objects.filter(key=f"{key}:1").update(acquired_at=earlier)
    for arguments, found in (
        (["--host", f"{key}-host-2"], [2]),
        (["--task", f"{key}-task-0"], [0, 2]),
        (["--held-longer-than", "1800"], [1]),
        (["--held-longer-than", "7200"], []),
    ):
        document = run("distlock_list", OF, "--json", "--prefix", key, *arguments).json
        assert [each["key"] for each in document["locks"]] == [f"{key}:{each}" for each in found]


def test_what_cannot_be_seen_is_said(leases: list[Lease], key: str) -> None:
    """Status 69 behind what can be shown; nobody says of what he does not know that it is none."""
    assert leases
    with override_settings(DISTLOCK={"dead": DEAD, "postgres": settings.DISTLOCK["postgres"]}):
        ran = run("distlock_list", "--prefix", key)
        assert f"{key}:a" in ran.out
        assert ran.status == 69
        assert "dead: " in ran.err
        ran = run("distlock_list", "--prefix", key, "--json")
        assert ran.status == 69
        assert len(ran.json["locks"]) == 2
        (failure,) = ran.json["failures"]
        assert (failure["backend"], failure["code"]) == ("dead", "service_unavailable")
        assert run("distlock_show", key, "--backend=dead").status == 69
        ran = run("distlock_list", "--backend=dead")
        assert (ran.status, ran.out) == (69, "")
    with override_settings(DISTLOCK={}):
        assert run("distlock_list").out == "No lock backend is configured.\n"
    # What is in the memory of other processes, which is an error where nothing else is asked.
    document = run("distlock_list", "--prefix", key, "--json").json
    assert [each["backend"] for each in document["failures"]] == ["memory"]
    ran = run("distlock_list", "--backend=memory", "--json")
    assert (ran.status, ran.json["locks"]) == (1, [])
    assert "in process memory" in run("distlock_show", key, "--backend=memory").err
    assert run("distlock_list", OF, "--prefix", f"{key}-none").out == "No lock matches.\n"


def test_settings_that_are_wrong_are_no_store_that_is_silent() -> None:
    """Status 1, and the message says which rule they break; 69 where a store is silent, too."""
    wrong = {"wrong": {"BACKEND": DATABASE, "TTL": 0}}
    for command in ("list", "list --transactions", "stats", "cleanup"):
        arguments = f"distlock_{command}".split()
        with override_settings(DISTLOCK={**wrong, "postgres": settings.DISTLOCK["postgres"]}):
            ran = run(*arguments)
        assert ran.status == 1, command
        assert "DISTLOCK['wrong']" in ran.err
        with override_settings(DISTLOCK={**wrong, "dead": DEAD}):
            assert run(*arguments).status == (1 if "--transactions" in arguments else 69)


def test_backend_without_transactions_is_an_error_where_nothing_else_is_asked() -> None:
    """Beside others it is only said."""
    for backend in ("memory", "redis"):
        ran = run("distlock_list", "--transactions", f"--backend={backend}")
        assert (ran.status, ran.out) == (1, "")
        assert "cannot list transaction locks" in ran.err
        assert run("distlock_list", "--transactions", f"--backend={backend}", OF).status == 0


def test_odd_keys_leave_the_terminal_alone(key: str) -> None:
    """Nothing in a key moves the cursor, or makes a second line."""
    odd = f"{key}:\x1b[2J\n\u202eünicode"
    with distlock(odd, backend="postgres"):
        ran = run("distlock_list", OF, "--prefix", key)
        assert len(ran.out.splitlines()) == 2
        assert "\x1b" not in ran.out
        assert "\\x1b[2J\\n\\u202eünicode" in ran.out
        assert run("distlock_list", OF, "--prefix", key, "--json").json["locks"][0]["key"] == odd
        assert "\x1b" not in run("distlock_show", odd, OF).out


def test_slips_are_named() -> None:
    """An error says which rule was broken."""
    for argument, status, rule in (
        ("--limit=0", 2, "limit must be an int"),
        ("--cursor=nonsense", 2, "cursor must be"),
        ("--prefix=a\0", 2, "NUL"),
        ("--backend=nowhere", 1, "'nowhere' is not configured"),
        ("--held-longer-than=-5", 1, "--held-longer-than"),
        ("--held-longer-than=long", 1, "--held-longer-than"),
        ("--held-longer-than=inf", 1, "not a number of seconds from 0 to 3.2e+09"),
    ):
        ran = run("distlock_list", argument)
        assert rule in ran.err
        assert (ran.status, ran.out) == (status, "")


# Showing


def test_key_is_shown_with_all_that_is_known(key: str) -> None:
    """Its holder, since when, its fence, a pause, and what happened to it; or that it is free."""
    ran = run("distlock_show", key, OF)
    assert ran.status == 0
    assert "not held" in ran.out
    assert "never granted" in ran.out
    document = run("distlock_show", key, OF, "--json").json
    assert (document["held"], document["fence"]) == (None, 0)
    lock = distlock(key, backend="postgres", ttl=600, metadata={"user": "Bob"})
    lock_backends["postgres"].acquire(key, new_token(), 60)
    force_release(key, backend="postgres", actor="Ada", reason="it hangs")
    event_of(key)
    with lock as lease:
        pause(key, 600, backend="postgres", actor="Grace")
        ran = run("distlock_show", key, OF)
        facts = dict(line.split(maxsplit=1) for line in ran.out.splitlines()[:12] if " " in line)
        document = run("distlock_show", key, OF, "--json").json
    assert facts["key"].strip() == key
    assert facts["state"] == "held"
    assert f"[{document['held']['holder']['pid']}]" in facts["holder"]
    assert facts["metadata"] == '{"user": "Bob"}'
    assert facts["fence"] == str(lease.fence) == str(document["fence"])
    assert facts["paused"].endswith("by Grace")
    assert document["paused_by"] == "Grace"
    assert "it hangs" in ran.out
    assert [each["kind"] for each in document["events"]][-1] == "forced"
    assert document["guards"] == []


def test_waiters_are_shown(key: str) -> None:
    """Who waits, since when, and whether it is woken."""
    store = lock_backends["postgres"]
    with held_elsewhere(distlock(key, backend="postgres", ttl=60)):
        store.waiters.note(key, Holder(host="web-7", process="mailer", pid=77), 60)
        queued = Holder(host="web-8", process="worker", pid=8, task_id="5f6d").as_queued()
        store.waiters.note(key, queued, 60)
        out = run("distlock_show", key, OF).out
        assert "web-7 mailer[77]" in out
        assert re.search(r"web-8 worker +5f6d .* queue retry", out)
        waiting, retrying = run("distlock_show", key, OF, "--json").json["waiters"]
        assert (waiting["holder"]["pid"], waiting["is_retrying"]) == (77, False)
        assert retrying["is_retrying"] is True
        (listed,) = run("distlock_list", OF, f"--prefix={key}", "--json").json["locks"]
        assert (listed["waiting"], listed["retrying"]) == (1, 1)
        heading, row = run("distlock_list", OF, f"--prefix={key}").out.splitlines()[:2]
        assert heading.split()[-3:] == ["WAITING", "RETRYING", "FENCE"]
        assert row.split()[-3:-1] == ["1", "1"]


def test_commands_run_in_a_project(postgresql: str, key: str) -> None:
    """From the command line, in a process of their own, with the exit status of the shell."""
    migrate(postgresql)
    project = Project(postgresql)
    assert json.loads(project.manage("distlock_list", "--json"))["locks"] == []
    forced = ("distlock_release", key, "--force", "--reason=it hangs")
    assert "No locks match." in project.manage(*forced, status=1)
