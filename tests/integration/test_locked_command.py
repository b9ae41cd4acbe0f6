"""`LockedCommand`: management commands that run under a lock."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import BaseCommand, CommandError, call_command
from django.core.management.base import LabelCommand

from django_distlock import LockLost, LockUsageError, current_lease, distlock, lock_backends
from django_distlock.management.locked import LockedCommand
from tests.contract.aliases import alias_like, locks_on
from tests.contract.helpers import Later, held, prompt
from tests.contract.locking import held_elsewhere

from .runs import eventually

#: What a command without a key is locked by: the name of its module.
NAME = "test_locked_command"


class Report(LockedCommand, BaseCommand):
    """Tells what it is run with."""

    requires_system_checks: Any = ()

    def work(self) -> None:
        """Do nothing."""

    def add_arguments(self, parser: Any) -> None:
        """Take a day and a shop."""
        parser.add_argument("--day", default="today")
        parser.add_argument("--shop", type=int, default=1)

    def handle(self, *, day: str, **options: Any) -> str:
        """Work, and return what is to be printed."""
        self.work()
        return f"report of {day}"


def command(key: str, work: Callable[[], object] = lambda: None, **attributes: Any) -> Report:
    """Return a command with attributes of its class, which does some work."""
    made: Report = type(
        "Command", (Report,), {"lock_key": key, "work": lambda _: work(), **attributes}
    )()
    return made


def run(made: BaseCommand, **options: Any) -> tuple[str, str]:
    """Run a command; return what it prints, and what it says on its standard error."""
    out, err = StringIO(), StringIO()
    call_command(made, stdout=out, stderr=err, no_color=True, **options)
    return out.getvalue(), err.getvalue()


def is_held(key: str) -> bool:
    """Whether anybody holds a key."""
    return distlock(key).locked()


# The lock


def test_handle_runs_under_the_lock(key: str) -> None:
    """The lease is that of the block around it, each time anew, and the key is free behind it."""
    seen: list[object] = []
    made = command(key, lambda: seen.append((made.lease.held, current_lease() is made.lease)))
    assert run(made) == ("report of today\n", "")
    first = made.lease
    assert (first.key, first.is_released) == (key, True)
    run(made)
    assert made.lease.fence == first.fence + 1
    assert seen == [(True, True)] * 2
    with pytest.raises(ZeroDivisionError):
        run(command(key, lambda: 1 // 0))
    assert not is_held(key)


def test_key_is_a_template_of_the_options(key: str) -> None:
    """Converted as the command gets them; without one, it is the name of the command."""
    for lock_key, expected in ((f"{key}:{{day}}:{{shop:03d}}", f"{key}:monday:001"), ("", NAME)):
        made = command(lock_key)
        run(made, day="monday")
        assert made.lease.key == expected


def test_lock_is_what_the_attributes_say(key: str) -> None:
    """Its ttl, its backend, and whether it is held behind the run."""
    made = command(key, lock_ttl=77, lock_hold=True, lock_backend="memory")
    run(made)
    record = held(lock_backends["memory"], key)
    assert record.expires_at is not None
    assert made.lease.backend == "memory"
    assert (record.expires_at - record.acquired_at).total_seconds() == pytest.approx(77)
    lock_backends["memory"].force_release(key)


def test_as_many_run_as_there_are_permits(key: str) -> None:
    """One beside another, and no more than that; a wrong number is named."""
    made = command(key, lock_permits=2)
    with held_elsewhere(distlock(key, permits=2)):
        run(made)
        assert not made.skipped
        with held_elsewhere(distlock(key, permits=2)):
            run(made)
            assert made.skipped
    with pytest.raises(CommandError, match="permits must be an int"):
        run(command(key, lock_permits=0))


def test_runs_within_a_run_of_its_own(key: str) -> None:
    """One instance, under another key; and again behind it."""
    ran: list[str] = []

    def work() -> None:
        ran.append(made.lease.key)
        if len(ran) == 1:
            run(made, day="b")

    made = command(f"{key}:{{day}}", work)
    for _ in range(2):
        run(made, day="a")
        assert ran == [f"{key}:a", f"{key}:b"]
        ran.clear()


def test_call_inside_a_block_of_its_key_is_refused(key: str) -> None:
    """A command has no `reentrant` to set, so none is advised."""
    with distlock(key), pytest.raises(CommandError, match="outside of that block") as refused:
        run(command(key))
    assert "reentrant" not in str(refused.value)
    assert not is_held(key)


def test_mixes_with_other_commands(key: str) -> None:
    """Also with those that have a `handle()` of their own, and call the next one's."""

    class Base(LockedCommand, LabelCommand):
        requires_system_checks = ()
        lock_key = key

        def handle_label(self, label: str, **options: Any) -> str:
            return f"{label} {self.lease.held}"

    class Derived(Base):
        def handle(self, *labels: str, **options: Any) -> str:
            return f"all: {super().handle(*labels, **options)}"

    out = StringIO()
    call_command(Derived(), "one", "two", stdout=out)
    assert out.getvalue() == "all: one True\ntwo True\n"


# Conflicts


def test_skips_when_another_run_is_at_it(key: str) -> None:
    """It names the holder, runs nothing and raises nothing; the status of a process is 75."""
    ran: list[int] = []
    made = command(key, lambda: ran.append(1))
    with held_elsewhere(distlock(key)) as lease:
        out, err = run(made)
        assert (out, made.skipped) == ("", True)
        assert err.startswith(f"Skipped: The key '{key}' was not granted at once: ")
        assert " (since " in err
        with pytest.raises(SystemExit) as ended:
            made.run_from_argv(["manage.py", "report"])
        assert ended.value.code == 75
        # As the class says, it is an error, or goes on without.
        with pytest.raises(CommandError, match="was not granted at once") as caught:
            run(command(key, on_conflict="raise"))
        assert caught.value.returncode == 1
        going_on = command(key, on_conflict="run")
        assert run(going_on) == ("report of today\n", "")
        assert not going_on.lease.held
        lease.check()
    assert not ran
    made.run_from_argv(["manage.py", "report"])
    assert (ran, made.skipped) == ([1], False)


def test_waits_as_long_as_it_is_told(key: str) -> None:
    """`--lock-wait` overrides the class, and is no option of the command itself."""
    made = command(f"{key}{{verbosity}}", lock_wait=60)
    with held_elsewhere(distlock(f"{key}1")):
        with prompt(0.2):
            run(made, lock_wait=0.2)
        assert made.skipped
        with pytest.raises(SystemExit), prompt():
            made.run_from_argv(["manage.py", "report", "--lock-wait=0"])
        waiting = Later(made.run_from_argv, ["manage.py", "report", "--lock-wait", "none"])
        eventually(lambda: bool(lock_backends["default"].waiters.of(f"{key}1")), "it waits")
    waiting.result()
    assert not made.skipped


# Trouble


def test_lost_lease_is_an_error(key: str) -> None:
    """A run that succeeded, but not under the lock, does not end as one that did."""
    made = command(key, lambda: lock_backends["default"].force_release(key))
    out = StringIO()
    with pytest.raises(CommandError, match=r"The lease on .* is lost") as caught:
        call_command(made, stdout=out)
    assert out.getvalue() == ""
    assert isinstance(caught.value.__cause__, LockLost)


def test_conflict_inside_is_no_conflict_of_the_command(key: str) -> None:
    """A lock that `handle()` does not get is not taken for the command's own."""
    made = command(key, lambda: distlock(f"{key}:inner", wait=0).acquire())
    with (
        held_elsewhere(distlock(f"{key}:inner")),
        pytest.raises(Exception, match=":inner") as caught,
    ):
        run(made)
    assert not isinstance(caught.value, CommandError)
    assert not made.skipped


def test_checks_come_before_the_lock(key: str) -> None:
    """A project that is not in order does not keep the key from others."""
    seen: list[bool] = []

    class Checked(Report):
        requires_system_checks = "__all__"
        lock_key = key

        def check(self, *_: Any, **__: Any) -> None:
            seen.append(is_held(key))

    run(Checked(), skip_checks=False)
    assert seen == [False]


def test_wait_that_is_none_is_named(key: str) -> None:
    """Also from `call_command()`, which does not parse it."""
    with pytest.raises(CommandError, match="lock_wait: 'abc' is not a number"):
        run(command(key), lock_wait="abc")


def test_handle_that_runs_later_is_refused(key: str) -> None:
    """A coroutine is awaited by nobody, and a generator would work behind the lock."""

    async def handle(_: object, **options: Any) -> None:
        """Be awaited."""

    with pytest.raises(LockUsageError, match="handle returns a coroutine"):
        call_command(command(key, handle=handle))


def test_store_that_does_not_answer_is_an_error(key: str) -> None:
    """It is no conflict: nothing is skipped, and the status is 69."""
    with (
        alias_like("default", HOST="127.0.0.1", PORT="1") as using,
        locks_on(using) as backend,
        pytest.raises(CommandError, match="did not answer") as caught,
    ):
        run(command(key, lock_backend=backend))
    assert caught.value.returncode == 69


def test_wrong_attribute_is_named() -> None:
    """A slip is an error that names the value and the rule."""
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"lock_key": "report:{month}"},
            "'month', which is not an option of this command: declare it in",
        ),
        ({"lock_key": "report:{"}, "The key template"),
        ({"lock_ttl": 0}, "at least 0.1"),
        ({"lock_backend": "nowhere"}, "'nowhere' is not configured"),
        ({"on_conflict": "wait"}, '"skip", "raise" or "run", not \'wait\''),
    ]
    for attributes, rule in wrong:
        with pytest.raises(CommandError) as caught:
            run(command("report", **attributes))
        assert rule in str(caught.value)
    for wait in ("-1", "long", "nan"):
        with pytest.raises(CommandError, match="lock-wait"):
            call_command(command("report"), "--lock-wait", wait)
