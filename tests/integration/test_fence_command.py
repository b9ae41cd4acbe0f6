"""`manage.py distlock_fence raise`."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings

from django_distlock import distlock
from django_distlock.core.records import FENCE_MAX, FENCE_WARNING
from django_distlock.fencing.rejecting import Fence
from django_distlock.fencing.seen import see
from tests.contract.aliases import alias_like, locks_on

from .databases import migrate
from .operating import DEAD, run
from .projects import Project


def raise_fences(*arguments: str) -> str:
    """Run the command; return what it prints."""
    output = StringIO()
    call_command("distlock_fence", "raise", *arguments, stdout=output, no_color=True)
    return output.getvalue()


def next_fence(key: str, backend: str) -> int:
    """Return the fence of the next grant."""
    with distlock(key, backend=backend, wait=0) as lease:
        return lease.fence


def test_raises_one_key(key: str) -> None:
    """A key's next grant is above the number, or the store's time."""
    assert raise_fences(key, "--to", "500") == "Raised 1 fence counter.\n"
    assert next_fence(key, "default") == 501
    assert raise_fences(key, "--to", "500") == "Raised 0 fence counters.\n"
    raise_fences(key, "--clock")
    assert next_fence(key, "default") > 10**14


def test_raises_all_of_a_backend(empty: str) -> None:
    """In pages; what was left alone, because it is held, is an error that names it."""
    with locks_on(empty) as backend:
        with pytest.raises(CommandError, match=r"manage\.py migrate"):
            raise_fences("key", "--to", "5", "--backend", backend)
        migrate(empty)
        for number in range(3):
            next_fence(f"key:{number}", backend)
        printed = raise_fences("--all", "--to", "500", "--backend", backend)
        assert printed == "Raised 3 fence counters.\n"
        assert [next_fence(f"key:{number}", backend) for number in range(3)] == [501] * 3
        with (
            distlock("held", backend=backend) as lease,
            pytest.raises(CommandError, match=r"Skipped, because .*: 'held'\. Run"),
        ):
            raise_fences("--all", "--to", "900", "--backend", backend)
        assert lease.fence == 1
        assert next_fence("held", backend) == 2
        assert next_fence("key:0", backend) == 901


def test_wrong_arguments_are_named() -> None:
    """A slip is an error that names the value and the rule."""
    wrong: list[tuple[list[str], str]] = [
        ([], "one of the arguments KEY --all is required"),
        (["key"], "one of the arguments --to --clock is required"),
        (["key", "--all", "--clock"], "not allowed with argument"),
        (["key", "--to", "5", "--clock"], "not allowed with argument"),
        (["key", "--to", "0"], f"an int from 1 to {FENCE_WARNING}, not 0"),
        (["key", "--to", str(FENCE_MAX)], f"to {FENCE_WARNING}, not {FENCE_MAX}"),
        (["--all", "--to", str(FENCE_WARNING + 1)], f"not {FENCE_WARNING + 1}"),
        (["key", "--to", "-5"], "not '-5'"),
        (["key", "--to", "many"], "not 'many'"),
        (["key\0", "--to", "5"], "NUL"),
        (["key", "--to", "5", "--backend", "nowhere"], "'nowhere' is not configured"),
        (["key", "--to", "5", "--backend", "memory"], "in process memory"),
    ]
    for arguments, rule in wrong:
        with pytest.raises(CommandError) as caught:
            raise_fences(*arguments)
        assert rule in str(caught.value)


def test_store_that_does_not_answer_is_status_69() -> None:
    """As with every command of operators; slips are told apart from it."""
    with override_settings(DISTLOCK={"default": DEAD}):
        ran = run("distlock_fence", "raise", "key", "--to", "5")
    assert (ran.status, ran.out) == (69, "")
    assert run("distlock_fence", "raise", "key", "--to", "5", "--backend=nowhere").status == 1
    assert run("distlock_fence", "raise", "a\0", "--to", "5").status == 2


def test_json_is_one_document(key: str) -> None:
    """How many were raised, and which were left: also where that is an error."""
    ran = run("distlock_fence", "raise", key, "--to", "500", "--json")
    assert (ran.status, ran.err) == (0, "")
    assert ran.json == {"backend": "default", "raised": 1, "left": []}
    assert run("distlock_fence", "--json", "raise", key, "--to", "500").json["raised"] == 0
    with distlock(key, wait=0):
        ran = run("distlock_fence", "raise", key, "--to", "900", "--json")
    assert (ran.status, ran.json["left"]) == (1, [key])


def test_options_of_django_come_before_and_behind(postgresql: str) -> None:
    """On either side of `raise`, and none undoes what was said on the other side."""
    project = Project(postgresql)
    project.manage("migrate", "--verbosity=0")
    settings = "--settings=tests.integration.project"
    command = ("distlock_fence", "raise", "key", "--to=5")
    assert project.manage(*command, settings, "--no-color") == "Raised 1 fence counter.\n"
    before = ("distlock_fence", settings, "--no-color", *command[1:])
    assert project.manage(*before) == "Raised 0 fence counters.\n"
    # In colour, unless the one that came first still holds.
    forced = project.manage(*command, "--force-color")
    assert "\x1b[" in forced
    assert "\x1b[" in project.manage(command[0], "--force-color", *command[1:])
    broken = project.manage(
        "distlock_fence", "raise", "key", "--to=5", "--traceback", "--backend=nowhere", status=1
    )
    assert "Traceback (most recent call last)" in broken


# Marks of what other services sent


def test_mark_is_shown_and_set(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """One that was raised too far is set back; the log says by whom, for stale requests pass."""
    asked = ("distlock_fence", "seen", key)
    assert run(*asked).out == f"No request has carried a fence of '{key}'.\n"
    assert run(*asked, "--json").json == {"key": key, "before": None, "seen": None}
    see(Fence(key, 500))
    assert run(*asked).out == f"The highest fence seen of '{key}' is 500.\n"
    with caplog.at_level("WARNING", "django_distlock"):
        ran = run(*asked, "--to", "20")
    assert (ran.status, ran.err) == (0, "")
    assert "was 500, and is 20" in ran.out
    assert see(Fence(key, 21)) == 21
    (record,) = [each for each in caplog.records if each.name == "django_distlock"]
    assert record.distlock_key == key  # type: ignore[attr-defined]
    assert record.distlock_fence == 20  # type: ignore[attr-defined]
    assert "from 500 to 20" in record.getMessage()
    assert "@" in record.getMessage()
    assert run(*asked, "--json", "--to=5").json == {"key": key, "before": 21, "seen": 5}


def test_mark_that_cannot_be_asked_is_an_error(empty: str) -> None:
    """A slip, or a database without the tables."""
    assert run("distlock_fence", "seen", "a\0").status == 2
    ran = run("distlock_fence", "seen", "key", "--database=nowhere")
    assert (ran.status, "'nowhere'" in ran.err) == (1, True)
    (failure,) = run("distlock_fence", "seen", "key", "--database=nowhere", "--json").json[
        "failures"
    ]
    assert (failure["code"], "'nowhere'" in failure["message"]) == ("misconfigured", True)
    for more in ((), ("--to=5",)):
        ran = run("distlock_fence", "seen", "key", f"--database={empty}", *more)
        assert (ran.status, ran.out) == (69, "")
        assert "seenfence" in ran.err
    ran = run("distlock_fence", "seen", "key", f"--database={empty}", "--json")
    assert "seenfence" in ran.json["failures"][0]["message"]
    with alias_like("default", HOST="127.0.0.1", PORT="1") as away:
        for more in ((), ("--to=5",)):
            ran = run("distlock_fence", "seen", "key", f"--database={away}", "--json", *more)
            assert ran.status == 69
            assert ran.json["failures"][0]["code"] == "service_unavailable"
