"""`manage.py distlock_release` and `distlock_cleanup`."""

from __future__ import annotations

import getpass
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections
from django.test import override_settings

from django_distlock import lock_backends
from django_distlock.core.records import FENCE_MAX, Grant, Holder
from django_distlock.management import operating
from django_distlock.management.commands import distlock_release
from django_distlock.models import HeldLock, LockEvent
from django_distlock.process import event_log
from django_distlock.signals import lock_forced
from django_distlock.testing import lose_connection
from tests.contract.aliases import locks_on
from tests.contract.helpers import PATIENCE, Later, take
from tests.contract.locking import eventually

from .databases import Routed, migrate, server
from .operating import DEAD, event_of, no_event_of, raising, run, written
from .test_events import somebody_waits, table_locked

OF = "--backend=postgres"
FORCED = ("--force", "--reason", "it hangs")
STORE = ["postgres", "redis", "sqlite"]


@pytest.fixture
def grants(key: str) -> Iterator[list[Grant]]:
    """Hold three keys, on two hosts, for two tasks."""
    yield [hold("postgres", f"{key}:{n}", f"{key}-host-{n % 2}", f"{key}-{n}") for n in range(3)]
    for number in range(3):
        lock_backends["postgres"].force_release(f"{key}:{number}")


def hold(alias: str, key: str, host: str = "web-1", task: str | None = None) -> Grant:
    """Hold a key as somebody else does."""
    holder = Holder(host=host, process="worker", pid=77, task_id=task)
    return take(lock_backends[alias], key, 60, holder=holder)


def still_held(grants: list[Grant]) -> list[bool]:
    """Say of each grant whether it stands."""
    return [lock_backends["postgres"].extend(grant) is not None for grant in grants]


# What is released


@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_key_is_taken_from_its_holder(key: str, alias: str) -> None:
    """The fence moves, the key is free, and who did it is kept."""
    grant = hold(alias, key)
    ran = run("distlock_release", key, f"--backend={alias}", *FORCED)
    assert ran.status == 0
    assert f"Released {key} (fence {grant.fence} -> " in ran.out
    assert lock_backends[alias].read(key) is None
    event = event_of(key)
    assert (event.kind, event.reason) == (LockEvent.Kind.FORCED, "it hangs")
    assert event.actor.startswith(f"{getpass.getuser()}@")
    assert grant.token not in ran.out + ran.err


def test_events_are_not_read_before_a_key_is_taken(
    key: str, sqlite: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Their database may be down, and who waits for it does not get the key."""
    hold("redis", key)
    with override_settings(DATABASE_ROUTERS=[Routed(sqlite, LockEvent)]):
        ran = run("distlock_release", key, "--backend=redis", *FORCED)
    assert f"Released {key} " in ran.out
    assert "events cannot be read" not in caplog.text


def test_reader_that_leaves_stops_no_release(
    key: str, grants: list[Grant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind `| head`: what was shown first is released, and the status is that of the work."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        call_command("distlock_release", "--prefix", key, OF, *FORCED)
    assert still_held(grants) == [False] * 3


def test_output_that_cannot_be_written_stops_no_release(
    key: str, grants: list[Grant], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was closed is missed by nobody; behind a full disk, the end tells of it."""
    monkeypatch.setattr(sys, "stdout", None)
    call_command("distlock_release", grants[0].key, OF, *FORCED)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(CommandError, match=r"^Done, but .*: \[Errno 28\]"):
            call_command("distlock_release", "--prefix", key, OF, *FORCED)
        assert [written(each.key) for each in grants] == [1] * 3
    assert still_held(grants) == [False] * 3


@pytest.mark.parametrize("alias", STORE)
def test_all_who_share_a_key_are_shown_and_lose_it(key: str, alias: str) -> None:
    """Each by its own lease, whether the key is named or the beginning of it."""
    store = lock_backends[alias]
    for what in ((key,), ("--prefix", key)):
        grants = [take(store, key, 60, permits=3) for _ in range(3)]
        document = run("distlock_release", *what, f"--backend={alias}", *FORCED, "--json").json
        assert {each["fence"] for each in document["found"]} == {each.fence for each in grants}
        assert [each["result"] for each in document["outcomes"]] == ["done"] * 3
        assert store.read(key) is None
        assert not any(map(store.extend, grants))


def test_user_whose_name_is_no_text_is_told(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it is one."""
    monkeypatch.setenv("LOGNAME", os.fsdecode(b"ad\xffa"))
    hold("postgres", key)
    ran = run("distlock_release", key, OF, *FORCED)
    assert (ran.status, ran.err) == (0, "")
    assert event_of(key).actor.startswith("ad?a@")


def test_command_ends_when_its_event_is_written(key: str) -> None:
    """However long that takes the database: who took the key, and why, is never lost."""
    hold("postgres", key)
    with table_locked():
        releasing = Later(run, "distlock_release", key, OF, *FORCED)
        assert eventually(somebody_waits, PATIENCE)
        assert eventually(lambda: lock_backends["postgres"].read(key) is None)
        # Longer than what happens in other processes gets at their end.
        time.sleep(1.5)
        assert not releasing.is_done
    assert releasing.result().status == 0
    assert written(key) == 1


def test_command_says_that_its_event_is_lost(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that hangs holds the command up for a bounded time."""
    monkeypatch.setattr(operating, "AUDIT_SECONDS", 0.1)
    hold("postgres", key)
    with table_locked():
        ran = run("distlock_release", key, OF, *FORCED)
        assert ran.status == 0
        assert "were not written within 0.1 s" in ran.err
    assert event_of(key).kind == LockEvent.Kind.FORCED


def test_each_of_many_locks_leaves_an_event(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their database is slow, the command waits before events would be dropped."""
    monkeypatch.setattr(event_log, "MAX_WAITING", 4)
    for number in range(20):
        hold("postgres", f"{key}:{number}")
    finish = event_log.finish
    with ExitStack() as lock:
        lock.enter_context(table_locked())

        def unlock(seconds: float) -> bool:
            lock.close()
            return finish(seconds)

        monkeypatch.setattr(event_log, "finish", unlock)
        ran = run("distlock_release", "--prefix", key, OF, *FORCED)
    assert (ran.status, ran.err) == (0, "")
    assert LockEvent.objects.filter(key__startswith=f"{key}:").count() == 20


def test_command_says_how_many_events_were_dropped(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for a database that hangs before each of many keys."""
    monkeypatch.setattr(operating, "AUDIT_SECONDS", 0.1)
    monkeypatch.setattr(event_log, "MAX_WAITING", 4)
    for number in range(20):
        hold("postgres", f"{key}:{number}")
    with table_locked():
        ran = run("distlock_release", "--prefix", key, OF, *FORCED)
    event_log.finish()
    lost = 20 - LockEvent.objects.filter(key__startswith=f"{key}:").count()
    assert lost > 0
    assert f"{lost} lock events of this command were dropped" in ran.err


def test_command_says_that_its_event_was_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database of the events is down, and that of the locks is not."""
    hold("postgres", key)
    away = OperationalError("It is away.")
    monkeypatch.setattr(event_log, "_refused", Mock(side_effect=away))
    ran = run("distlock_release", key, OF, *FORCED)
    assert ran.status == 0
    assert "1 lock events of this command were dropped" in ran.err


def test_json_tells_what_became_of_each(grants: list[Grant], key: str) -> None:
    """What was found, and an outcome for it; one document, without tokens."""
    ran = run("distlock_release", "--prefix", key, OF, *FORCED, "--json")
    document = ran.json
    assert ran.status == 0
    assert [each["key"] for each in document["found"]] == [each.key for each in grants]
    assert [each["result"] for each in document["outcomes"]] == ["done"] * 3
    for grant, outcome in zip(grants, document["outcomes"], strict=True):
        assert outcome["fence_before"] == grant.fence < outcome["fence_after"]
        assert grant.token not in ran.out
    assert still_held(grants) == [False] * 3


def test_filters_choose_what_goes(grants: list[Grant], key: str) -> None:
    """Together, they narrow; one after the other, each takes its own."""
    every, first = ("--prefix", key), ("--host", f"{key}-host-0")
    for arguments, held in (
        ((*every, *first, "--task", f"{key}-0"), [False, True, True]),
        ((*every, *first, "--task", f"{key}-1"), [False, True, True]),
        (("--task", f"{key}-1"), [False, False, True]),
    ):
        run("distlock_release", *arguments, OF, *FORCED)
        assert still_held(grants) == held
    again = [hold("postgres", f"{key}:{number}", f"{key}-host-{number}") for number in range(2)]
    grants[:2] = again
    assert run("distlock_release", *first, OF, *FORCED).status == 0
    assert still_held(grants) == [False, True, False]
    assert run("distlock_release", "--prefix", f"{key}:1", OF, *FORCED).status == 0
    assert still_held(grants) == [False, False, False]


def test_key_that_fails_takes_nothing_from_the_others(key: str, sqlite: str) -> None:
    """What was released is said, and so is what failed: the store has answered."""
    migrate(sqlite)
    keys = [f"{key}:{each}" for each in "abc"]
    with locks_on(sqlite) as alias:
        store = lock_backends[alias]
        store.raise_fences(FENCE_MAX - 1, key=keys[1])
        for form in ([], ["--json"]):
            for each in keys:
                if store.read(each) is None:
                    hold(alias, each)
            ran = run("distlock_release", "--prefix", key, f"--backend={alias}", *FORCED, *form)
            assert ran.status == 1
            assert [each for each in keys if store.read(each)] == [keys[1]]
            if not form:
                assert all(f"Released {each}" in ran.out for each in (keys[0], keys[2]))
                assert f"Not released: {keys[1]}. The key '{keys[1]}' has used" in ran.out
    assert [each["key"] for each in ran.json["outcomes"]] == [keys[0], keys[2]]
    assert [each["key"] for each in ran.json["failures"]] == [keys[1]]


def test_what_was_done_before_the_store_went_away_is_said(grants: list[Grant], key: str) -> None:
    """And the other keys are not tried."""
    with ExitStack() as outage:

        def cut(**_: Any) -> None:
            outage.enter_context(lose_connection("postgres"))

        lock_forced.connect(cut)
        try:
            ran = run("distlock_release", "--prefix", key, OF, *FORCED, "--json")
        finally:
            lock_forced.disconnect(cut)
    assert ran.status == 69
    assert [each["key"] for each in ran.json["outcomes"]] == [grants[0].key]
    assert [each["key"] for each in ran.json["failures"]] == [grants[1].key]
    assert still_held(grants) == [False, True, True]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_what_was_done_before_a_signal_is_said(grants: list[Grant], key: str, signum: int) -> None:
    """Amid a release, it loses no event; the other keys are not tried."""
    force_release = lock_backends["postgres"].force_release

    def interrupted(*named: Any, **more: Any) -> Any:
        answer = force_release(*named, **more)
        signal.raise_signal(signum)
        return answer

    with raising(signum), patch.object(lock_backends["postgres"], "force_release", interrupted):
        ran = run("distlock_release", "--prefix", key, OF, *FORCED, "--json")
    assert ran.status == 128 + signum
    assert [each["key"] for each in ran.json["outcomes"]] == [grants[0].key]
    assert "Interrupted. Not tried: 2 locks." in ran.err
    assert [written(each.key) for each in grants] == [1, 0, 0]
    assert still_held(grants) == [False, True, True]


@pytest.mark.parametrize(("number", "finished"), [(1, [True]), (2, [])])
def test_signal_behind_the_last_key_waits_for_the_events(
    key: str, monkeypatch: pytest.MonkeyPatch, number: int, finished: list[bool]
) -> None:
    """Then it has its usual effect, for all was said. The second one has it at once."""
    finish, done = event_log.finish, []

    def interrupted(seconds: float) -> bool:
        for _ in range(number):
            signal.raise_signal(signal.SIGINT)
        done.append(finish(seconds))
        return True

    hold("postgres", key)
    monkeypatch.setattr(event_log, "finish", interrupted)
    # A program in the background may ignore the signal.
    with raising(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        run("distlock_release", key, OF, *FORCED)
    assert done == finished


def test_dry_run_changes_nothing(grants: list[Grant], key: str) -> None:
    """It shows what would go, in text and JSON, and needs no reason."""
    counters = [lock_backends["postgres"].counter(each.key) for each in grants]
    ran = run("distlock_release", "--prefix", key, OF, "--dry-run")
    assert (ran.status, ran.err) == (0, "")
    assert all(each.key in ran.out for each in grants)
    document = run("distlock_release", "--prefix", key, OF, "--dry-run", "--json").json
    assert (document["dry_run"], document["outcomes"]) == (True, [])
    assert len(document["found"]) == 3
    assert still_held(grants) == [True] * 3
    assert [lock_backends["postgres"].counter(each.key) for each in grants] == counters
    assert no_event_of(grants[0].key)


def test_question_is_asked_first(grants: list[Grant], key: str) -> None:
    """Only "yes" releases; it shows the locks before, and asks for the reason."""
    for answers in (None, "", "no\n", "y\n", "\n"):
        ran = run("distlock_release", "--prefix", key, OF, answers=answers)
        assert ran.status == 1
        assert "Force-release these 3 locks?" in ran.out
        assert "Nothing was released." in ran.err
    assert run("distlock_release", "--prefix", key, OF, answers="yes\n\n").status == 2
    assert still_held(grants) == [True] * 3
    ran = run("distlock_release", grants[0].key, OF, answers="yes\nit hangs\n")
    assert ran.status == 0
    assert ran.out.index("worker[77]") < ran.out.index("Force-release this lock?")
    assert still_held(grants) == [False, True, True]
    assert event_of(grants[0].key).reason == "it hangs"
    ran = run("distlock_release", grants[1].key, OF, "--reason=known", answers="yes\n")
    assert ran.status == 0
    assert event_of(grants[1].key).reason == "known"


def test_ctrl_c_at_a_question_is_a_no(
    grants: list[Grant], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of the two; the status names the signal."""
    stdin = Mock()
    stdin.readline.side_effect = [KeyboardInterrupt, "yes\n", KeyboardInterrupt]
    monkeypatch.setattr(sys, "stdin", stdin)
    for _ in range(2):
        with pytest.raises(CommandError, match=r"^Nothing was released\.$") as raised:
            call_command("distlock_release", "--prefix", key, OF, stdout=StringIO())
        assert raised.value.returncode == 128 + signal.SIGINT
    assert still_held(grants) == [True] * 3


def test_question_counts_all_who_share_a_key(key: str) -> None:
    """Each is shown, and whoever says no takes the key from none of them."""
    store = lock_backends["sqlite"]
    holders = [Holder(host=f"web-{number}", pid=77) for number in range(3)]
    grants = [take(store, key, 60, permits=3, holder=each) for each in holders]
    ran = run("distlock_release", "--prefix", key, "--backend=sqlite", answers="no\n")
    assert ran.status == 1
    assert "Force-release these 3 locks?" in ran.out
    assert [each.host for each in holders if each.host not in ran.out] == []
    assert all(map(store.release, grants))


def test_reason_that_cannot_be_kept_is_refused_before_anything_is_asked(
    grants: list[Grant],
) -> None:
    """Whoever would have read a long list, and confirmed it, would have done so in vain."""
    for reason, rule in (("x" * 201, "at most 200 characters"), (" ", "requires a reason")):
        ran = run("distlock_release", grants[0].key, OF, f"--reason={reason}", answers="yes\n")
        assert (ran.status, ran.out) == (2, "")
        assert rule in ran.err
    assert still_held(grants) == [True] * 3


def test_next_holder_of_the_last_moment_is_spared(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the key by the time that the store is asked was shown to nobody.

    That each store compares the fences, `tests/contract/test_operators.py` sees.
    """
    store, first = lock_backends["postgres"], hold("postgres", key)
    take, later = store._force_release, []

    def hand_on(*args: Any, **more: Any) -> Any:
        store.release(first)
        later.append(hold("postgres", key))
        return take(*args, **more)

    monkeypatch.setattr(store, "_force_release", hand_on)
    ran = run("distlock_release", key, OF, *FORCED, "--json")
    assert ran.status == 1
    [outcome] = ran.json["outcomes"]
    assert (outcome["result"], outcome["held"]["fence"]) == ("nothing", later[0].fence)
    assert store.extend(later[0]) is not None
    assert no_event_of(key)


def test_transaction_without_a_guard_is_not_said_to_have_ended(key: str) -> None:
    """Such as that of a person who has forgotten to commit: trying again does not help."""
    take(lock_backends["default"], key, 60)
    name = str(connections["default"].settings_dict["NAME"])
    with server(name) as raw, raw.transaction():
        raw.execute("SELECT 1 FROM django_distlock_heldlock WHERE key = %s FOR UPDATE", [key])
        ran = run("distlock_release", key, "--force", "--reason=stuck")
    assert ran.status == 75
    assert "has ended" not in ran.out + ran.err
    assert "another session has locked the key's rows" in ran.out + ran.err


def test_nothing_to_release_is_status_1(key: str) -> None:
    """Something was to be released, and was not."""
    for chosen in ((key,), ("--prefix", key), ("--host", key)):
        ran = run("distlock_release", *chosen, OF, *FORCED)
        assert ran.status == 1
        assert "No locks match." in ran.out
        ran = run("distlock_release", *chosen, OF, *FORCED, "--json")
        assert (ran.status, ran.json["found"], ran.json["outcomes"]) == (1, [], [])
        assert run("distlock_release", *chosen, OF, "--dry-run").status == 0


def test_successor_is_spared(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever got the key after it was shown was not meant."""
    first = hold("postgres", key)
    second: list[Grant] = []
    asked = distlock_release.Command._answer

    def answer(command: distlock_release.Command, question: str) -> str:
        if not second:
            lock_backends["postgres"].release(first)
            second.append(hold("postgres", key))
        return asked(command, question)

    monkeypatch.setattr(distlock_release.Command, "_answer", answer)
    ran = run("distlock_release", key, OF, "--reason=old", answers="yes\n")
    assert ran.status == 1
    assert "Not released" in ran.out
    assert still_held(second) == [True]
    assert no_event_of(key)


def test_slips_release_nothing(grants: list[Grant]) -> None:
    """An error says which rule was broken, or that the store is away."""
    key = grants[0].key
    with override_settings(DISTLOCK={**settings.DISTLOCK, "dead": DEAD}):
        for arguments, status, rule in (
            ([], 2, "Give either a KEY"),
            ([key, "--prefix=k"], 2, "Give either a KEY"),
            (["--prefix="], 2, "must not be empty"),
            ([key, "--force"], 2, "--force requires --reason"),
            ([key, "--force", "--reason= "], 2, "--force requires --reason"),
            ([key, "--force", f"--reason={'x' * 201}"], 2, "at most 200 characters"),
            ([key, "--json"], 2, "--json cannot ask for confirmation"),
            ([f"{key}\0", *FORCED], 2, "NUL"),
            ([key, *FORCED, "--backend=nowhere"], 1, "'nowhere' is not configured"),
            ([key, *FORCED, "--backend=memory"], 1, "in process memory"),
            # Nothing is known about the key.
            ([key, *FORCED, "--backend=dead"], 69, "dead"),
            (["--prefix=key", *FORCED, "--backend=dead"], 69, "dead"),
        ):
            ran = run("distlock_release", *arguments)
            assert rule in ran.err
            assert (ran.status, rule) == (status, rule)
            assert still_held(grants) == [True] * 3, rule


def test_json_tells_which_backend_was_refused() -> None:
    """One document, also where nothing was done."""
    with override_settings(DISTLOCK={**settings.DISTLOCK, "dead": DEAD}):
        for arguments, alias, code in (
            (["distlock_release", "--prefix=key", *FORCED], "dead", "service_unavailable"),
            (["distlock_release", "key", *FORCED], "memory", "unsupported"),
            (["distlock_cleanup"], "memory", "unsupported"),
            (["distlock_show", "key"], "memory", "unsupported"),
            (["distlock_fence", "raise", "key", "--to=5"], "memory", "unsupported"),
        ):
            [failure] = run(*arguments, f"--backend={alias}", "--json").json["failures"]
            assert (failure["backend"], failure["code"]) == (alias, code)


# Cleanup


def test_cleanup_removes_what_is_over(key: str) -> None:
    """Live locks stay; JSON says how many went, by backend. Counters: `inspection` sees to them."""
    grants = [hold("postgres", f"{key}:{number}") for number in range(3)]
    over = HeldLock.objects.filter(key__in=[each.key for each in grants[:2]])
    ended = lock_backends["postgres"].clock() - timedelta(hours=2)
    over.update(expires_at=ended, free_at=ended)
    run("distlock_cleanup", OF, "--older-than=10800", "--json")
    assert over.count() == 2
    ran = run("distlock_cleanup", OF, "--older-than=3600", "--batch=1", "--json")
    assert (ran.status, ran.json["failures"]) == (0, [])
    assert ran.json["removed"]["postgres"] >= 2
    assert [row.key for row in HeldLock.objects.filter(key__startswith=key)] == [grants[2].key]
    assert run("distlock_cleanup", OF, "--older-than=3600").out.endswith("records removed.\n")


def test_cleanup_goes_on_behind_a_silent_backend() -> None:
    """The others are cleaned, and the status is 69; those that share with nobody are left out."""
    # Redis removes its records itself, and only needs to be asked for the time.
    with override_settings(DISTLOCK={"dead": DEAD, **settings.DISTLOCK}):
        ran = run("distlock_cleanup", "--older-than=3600", "--json")
    assert ran.status == 69
    assert set(ran.json["removed"]) == set(settings.DISTLOCK) - {"memory"}
    assert [each["backend"] for each in ran.json["failures"]] == ["dead"]


def test_cleanup_shows_its_progress_on_a_terminal(key: str) -> None:
    """A line that is written anew behind each batch, and none where nobody watches."""
    for number in range(3):
        hold("postgres", f"{key}:{number}")
    long_ago = lock_backends["postgres"].clock() - timedelta(hours=2)
    rows = HeldLock.objects.filter(key__startswith=key)
    assert rows.update(expires_at=long_ago, free_at=long_ago) == 3
    terminal = Terminal()
    call_command(
        "distlock_cleanup", OF, "--older-than=3600", "--batch=1", stdout=terminal, no_color=True
    )
    printed = terminal.getvalue()
    assert printed.count("\rpostgres: ") >= 3
    assert "postgres: 1 removed …" in printed
    assert printed.endswith("records removed.\n")
    assert "\r" not in run("distlock_cleanup", OF, "--older-than=3600").out


class Terminal(StringIO):
    """A text that somebody watches."""

    def isatty(self) -> bool:
        """Say so."""
        return True


def test_slips_clean_nothing() -> None:
    """An error says which rule was broken, and is no backend's that did not answer."""
    for argument, rule in (
        ("--batch=0", "'0' is not a number from 1 to 100000"),
        ("--older-than=-1", "--older-than"),
        ("--older-than=1e10", "not a number of seconds from 0 to 3.2e+09"),
        ("--backend=nowhere", "'nowhere' is not configured"),
        ("--backend=memory", "in process memory"),
    ):
        ran = run("distlock_cleanup", argument)
        assert rule in ran.err
        assert (ran.status, ran.out) == (1, "")
