"""`leader()`: one leads, the others stand by, and a next one leads in time."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from django.db import connections

from django_distlock import (
    BackendUnavailable,
    FenceRejected,
    InvalidArgument,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    current_lease,
    distlock,
    leader,
    leader_of,
    leading,
    signals,
)
from django_distlock.core.keys import own_key
from django_distlock.inspection import get_by_key, pause, request_stop
from django_distlock.leading import Leader, Leadership, Term
from django_distlock.testing import lose_connection, memory_locks
from tests.backends import Registered
from tests.processes import Process, spawn

from .helpers import ELSEWHERE, HAS_TTL, PATIENCE, Later, prompt
from .locking import Heard, eventually, held_elsewhere, take_away, taken

RUN = "tests.contract.leader_workers:run"
#: Seconds of a lease, and until a successor leads at the latest: its end, the grace of a second,
#: and what a machine takes that has much else to do.
TTL, WITHIN = 1.0, 2.0
SLACK = 1.5


@pytest.fixture
def candidate(registered: Registered, key: str) -> Leader:
    """Give a candidate on the backend under test."""
    return leader(key, backend=registered.alias)


def said(process: Process, pattern: str) -> list[Any]:
    """Return what a process has said that looks like this."""
    lines = [re.fullmatch(pattern, line) for line in list(process._output)]
    return [line for line in lines if line]


def leads(process: Process, terms: int = 1) -> bool:
    """Whether a process was elected so often."""
    return len(said(process, r"leads \d+")) >= terms


@contextmanager
def candidates(registered: Registered, key: str, *ways: str, ttl: float = TTL) -> Iterator[Any]:
    """Start processes that campaign; give the one that leads, and the others."""
    with ExitStack() as stack:
        those = [stack.enter_context(spawn(RUN, registered.alias, key, ttl, ways[0]))]
        assert eventually(lambda: leads(those[0]), PATIENCE)
        others = (spawn(RUN, registered.alias, key, ttl, way) for way in ways[1:])
        those += map(stack.enter_context, others)
        for each in those:
            each.wait_for("stands by", PATIENCE)
        yield those


# Terms


def test_block_leads(registered: Registered, candidate: Leader, key: str) -> None:
    """Its term has a fence, and everybody can see who it is; behind it nobody leads."""
    assert leader_of(key, backend=registered.alias) is None
    with candidate as term:
        assert term
        lease = current_lease()
        assert lease is term.lease
        assert term.fence == lease.fence > 0
        term.check()
        holder = Later(leader_of, key, backend=registered.alias).result()
        assert holder is not None
        assert (holder.pid, holder.leads) == (os.getpid(), True)
        fence = term.fence
    assert not term
    assert leader_of(key, backend=registered.alias) is None
    with candidate as term:
        assert term.fence > fence


def test_second_candidate_leads_when_the_first_steps_down(
    registered: Registered, candidate: Leader, key: str
) -> None:
    """It stands by until then, which is no timeout."""
    begun = threading.Event()

    def second() -> int:
        with leader(key, backend=registered.alias) as term:
            begun.set()
            return term.fence

    with candidate as term:
        waiting = Later(second)
        assert not begun.wait(0.3)
        fence = term.fence
    with prompt(1.5):
        assert waiting.result() > fence


def test_work_runs_until_it_is_done(candidate: Leader, registered: Registered, key: str) -> None:
    """Then somebody else may lead. What it raises reaches the caller."""
    fences: list[int] = []
    candidate.run(lambda term: fences.append(term.fence))
    assert len(fences) == 1
    with pytest.raises(ZeroDivisionError):
        candidate.run(lambda _: 1 // 0)
    assert leader_of(key, backend=registered.alias) is None


def test_work_that_ends_behind_its_term_goes_on(candidate: Leader) -> None:
    """Also where only the store knows that the lease is gone."""
    fences: list[int] = []

    def work(term: Term) -> None:
        fences.append(term.fence)
        if len(fences) == 1:
            take_away(term.lease)

    candidate.run(work)
    assert len(fences) == 2


def test_work_goes_on_in_another_term(
    candidate: Leader, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first one was lost, however it got to know."""
    monkeypatch.setattr(leading, "AGAIN", 0.01)
    caplog.set_level(logging.INFO, "django_distlock")
    fences: list[int] = []

    def work(term: Term) -> None:
        fences.append(term.fence)
        if len(fences) == 6:
            return
        if len(fences) in (1, 5):
            take_away(term.lease)
        if len(fences) == 1:
            term.lease.extend()
        if len(fences) == 5:
            # A row knows of the next leader before the heartbeat does.
            raise FenceRejected("A row has seen a higher one.", key=term.lease.key)
        lose(term)
        if len(fences) == 2:
            term.check()
        elif len(fences) == 3:
            raise FenceRejected("A row has seen a higher one.")
        else:
            assert not term.wait(20)

    candidate.run(work)
    assert fences == sorted(set(fences))
    assert len(fences) == 6
    told = [each.__dict__["distlock_event"] for each in caplog.records]
    assert told.count("leader_leads") == 6
    assert told.count("leader_lost") == 5


def test_candidate_pauses_between_campaigns(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a term that was lost, and where each campaign ends at once."""
    monkeypatch.setattr(leading, "AGAIN", 60.0)
    campaigns: list[float] = []
    gain = Leadership.gain

    def counted(leadership: Leadership, patience: float, block: ExitStack) -> Any:
        campaigns.append(patience)
        return gain(leadership, patience, block)

    def work(term: Term) -> None:
        lose(term)
        assert eventually(lambda: loser._bell.is_rung)

    monkeypatch.setattr(Leadership, "gain", counted)
    with memory_locks(RETRY={"max_retries": 0}):
        loser, follower = leader(key), leader(key)
        with loser:
            refused = Later(follower.run, lambda _: None)
            assert not eventually(lambda: len(campaigns) > 2, 0.2)
            follower.stop()
            refused.result()
        campaigns.clear()
        losing = Later(loser.run, work)
        assert not eventually(lambda: len(campaigns) > 1, 0.2)
        loser.stop()
        losing.result()


def test_candidate_says_why_nobody_leads(
    key: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an operator has paused the key, no other leads."""
    monkeypatch.setattr(leading, "PATIENCE", 0.05)
    caplog.set_level(logging.INFO, "django_distlock")
    with memory_locks():
        pause(own_key(f"leader:{key}"), 0.5, actor="Ada")
        leader(key).run(lambda _: None)
    said = [each.getMessage() for each in caplog.records if "stands by" in each.getMessage()]
    assert len(said) == 1
    assert "paused" in said[0]
    assert "leads" not in said[0]


def test_outage_is_logged_once(key: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also if the lease is lost in it: between two errors, no other line says the same."""
    caplog.set_level(logging.INFO, "django_distlock")
    outage, block = BackendUnavailable("The store did not answer."), ExitStack()
    with memory_locks():
        leadership = Leadership(distlock(key, ttl=60), "Beat", does="schedules")
        lease = leadership.gain(0, block)
        assert lease
        leadership.trouble(outage)
        take_away(lease)
        with pytest.raises(LockLost):
            lease.extend()
        leadership.give_up(block)
        leadership.trouble(outage)
        leadership.succeeded()
    told = [each.__dict__["distlock_event"] for each in caplog.records]
    assert [each for each in told if each.startswith("leader_")] == [
        "leader_leads",
        "leader_trouble",
        "leader_leads",
    ]


@pytest.mark.parametrize("error", [LockLost("of another lock"), FenceRejected("of another row")])
def test_loss_of_something_else_is_an_error(candidate: Leader, error: Exception) -> None:
    """Who still leads would fail so for ever."""

    def work(term: Term) -> None:
        raise error

    with prompt(), pytest.raises(type(error)):
        candidate.run(work)


@pytest.fixture
def _looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let who sleeps be woken, and not look."""
    monkeypatch.setattr(leading, "LOOK", 60.0)


@HAS_TTL
@pytest.mark.usefixtures("_looks_at_nothing")
def test_term_ends_with_its_lease(registered: Registered, candidate: Leader) -> None:
    """Who sleeps is woken then, and told once: the end of the block says nothing more."""
    with candidate as term:
        with prompt(0.05, least=0.05):
            assert term.wait(0.05)
        asleep = Later(term.wait, 20)
        time.sleep(0.1)
        lose(term)
        with prompt():
            assert not asleep.result()
        with prompt():
            assert not term.wait(20)
        with pytest.raises(LockLost):
            term.check()


def lose(term: Term) -> None:
    """Lose the lease, and find it out without the term."""
    take_away(term.lease)
    with pytest.raises(LockLost):
        term.lease.extend()


def test_leader_who_looks_at_nothing_is_told_at_the_end(candidate: Leader) -> None:
    """As by any lock: somebody else has led meanwhile. An error of its own is not hidden."""

    def work(error: Exception | None) -> None:
        with candidate as term:
            lose(term)
            if error is not None:
                raise error

    with pytest.raises(LockLost):
        work(None)
    with pytest.raises(ZeroDivisionError):
        work(ZeroDivisionError())
    assert not candidate._is_used


def test_loss_that_the_release_finds_is_told(candidate: Leader) -> None:
    """No heartbeat has seen it, and somebody else may lead already."""
    with pytest.raises(LockLost), candidate as term:
        take_away(term.lease)


def test_operator_asks_a_leader_to_finish(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its term is over at its next renewal, and another one may lead before it does so again."""
    monkeypatch.setattr(leading, "AGAIN", 0.01)
    terms: list[int] = []

    def work(term: Term) -> None:
        terms.append(term.fence)
        if len(terms) == 1:
            name = own_key(f"leader:{key}")
            Later(request_stop, name, actor="Ada", backend=registered.alias).result()
            assert not term.wait(20)

    leader(key, ttl=1.5, backend=registered.alias).run(work)
    assert len(terms) == 2


# Stopping


@pytest.mark.usefixtures("_looks_at_nothing")
@pytest.mark.parametrize("leads_first", [True, False])
def test_stop_ends_it(
    registered: Registered, candidate: Leader, key: str, *, leads_first: bool
) -> None:
    """From another thread: a leader at once, a candidate at its next look."""
    ended: list[bool] = []
    lock = distlock(own_key(f"leader:{key}"), backend=registered.alias)

    def work(term: Term) -> None:
        ended.append(term.wait(20))

    with ExitStack() as stack:
        if not leads_first:
            stack.enter_context(held_elsewhere(lock))
        running = Later(candidate.run, work)
        assert eventually(lambda: taken(lock) and candidate._is_used)
        candidate.stop()
        with prompt(1 if leads_first else leading.PATIENCE):
            running.result()
    assert ended == ([False] if leads_first else [])
    assert not taken(lock)


def test_stopped_candidate_leads_no_more(candidate: Leader) -> None:
    """A block cannot begin; what is called is over."""
    candidate.stop()
    with prompt(), pytest.raises(LockNotAcquired) as caught, candidate:
        raise AssertionError
    assert caught.value.code == "aborted"
    candidate.run(lambda _: 1 // 0)


def test_candidate_is_used_by_one(candidate: Leader) -> None:
    """Another block or call of the same one would end the first one's lease."""
    with candidate as term:
        for use in (candidate.__enter__, partial(candidate.run, lambda _: None)):
            for ask in (use, use, lambda use=use: Later(use).result()):
                with pytest.raises(LockUsageError):
                    ask()
        assert term
    term = candidate.__enter__()
    for _ in range(2):
        with pytest.raises(LockUsageError):
            candidate.__enter__()
    assert term
    candidate.__exit__(None, None, None)
    assert not term


def test_names_have_rules() -> None:
    """Those of keys, before anything is asked. No key of a project is one of a leader."""
    for bad in ("", "a\0", "x" * 600):
        with pytest.raises(InvalidArgument):
            leader(bad)
        with pytest.raises(InvalidArgument):
            leader_of(bad)
    with pytest.raises(InvalidArgument):
        leader("x", ttl=0)
    told = leader("x", metadata={"role": "follower", "reason": "why"})._lock.metadata
    assert told == {"role": "leader", "reason": "why"}


def test_store_that_is_away_is_waited_for(
    candidate: Leader,
    registered: Registered,
    key: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is said once, and a question about the leader is an error."""
    monkeypatch.setattr(leading, "PATIENCE", 0.05)
    monkeypatch.setattr(leading, "AGAIN", 0.05)
    caplog.set_level(logging.INFO, "django_distlock")
    with lose_connection(registered.alias):
        waiting = Later(candidate.run, lambda _: None)
        assert eventually(lambda: candidate._leadership._state == "trouble")
        with pytest.raises(BackendUnavailable):
            leader_of(key, backend=registered.alias)
        time.sleep(0.3)
    waiting.result()
    told = [each.__dict__["distlock_event"] for each in caplog.records]
    assert told.count("leader_trouble") == 1
    assert told.count("leader_leads") == 1


# Processes


@ELSEWHERE
@pytest.mark.parametrize("way", ["run", "with"])
def test_killed_leader_is_replaced_in_time(registered: Registered, key: str, way: str) -> None:
    """Within its ttl and a second; and not before."""
    with candidates(registered, key, way, way) as (first, second):
        first.popen.send_signal(signal.SIGKILL)
        with prompt(WITHIN + SLACK):
            assert eventually(lambda: leads(second), PATIENCE)
        assert leader_of(key, backend=registered.alias).pid == second.popen.pid  # type: ignore[union-attr]


@ELSEWHERE
def test_no_two_lead_within_their_deadlines(registered: Registered, key: str) -> None:
    """Leaders are killed and stand still: terms do not overlap, and their fences rise."""
    with ExitStack() as stack:
        those = [stack.enter_context(spawn(RUN, registered.alias, key, TTL)) for _ in range(3)]
        everybody = [*those]
        for turn in range(6):
            assert eventually(lambda: any(map(is_leading, those)), PATIENCE)
            (now, *_) = [each for each in those if is_leading(each)]
            if turn % 3 == 2:
                now.popen.send_signal(signal.SIGKILL)
                now.popen.wait()
                those.remove(now)
                those.append(stack.enter_context(spawn(RUN, registered.alias, key, TTL)))
                everybody.append(those[-1])
                continue
            stand_still(now, [each for each in those if each is not now], registered)
        for each in those:
            each.popen.send_signal(signal.SIGTERM)
            each.popen.wait()
            each._reader.join()
        told = [line for each in everybody for line in said(each, r"term (\d+) (\S+) (\S+)")]
    every = sorted((int(line[1]), float(line[2]), float(line[3])) for line in told)
    assert len({fence for fence, _began, _sure in every}) == len(every) >= 4
    for (_, _, sure), (_, began, _) in pairwise(every):
        assert sure <= began, every


def stand_still(leader: Process, others: list[Process], registered: Registered) -> None:
    """Let a leader stand still until another one leads, and see its own term end."""
    leader.stop()
    while registered.store == "sqlite" and not has_writer_place(registered):
        # It stopped amid a transaction, and keeps the file from everybody.
        leader.go_on()
        assert eventually(lambda: has_writer_place(registered))
        leader.stop()
    with prompt(WITHIN + SLACK):
        assert eventually(lambda: any(map(is_leading, others)), PATIENCE)
    leader.go_on()
    terms = len(said(leader, r"leads \d+"))
    assert eventually(lambda: len(said(leader, r"term .*")) >= terms)


def has_writer_place(registered: Registered) -> bool:
    """Whether the place of the one who writes an SQLite file becomes free."""
    name = connections[registered.using].settings_dict["NAME"]
    with closing(sqlite3.connect(name, timeout=2, isolation_level=None)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        return True


def is_leading(process: Process) -> bool:
    """Whether a process is in a term of its own, as far as it has said."""
    return len(said(process, r"leads \d+")) > len(said(process, r"term .*"))


@ELSEWHERE
@pytest.mark.parametrize("way", ["run", "with", "handled"])
def test_leader_that_is_told_to_end_steps_down(registered: Registered, key: str, way: str) -> None:
    """By SIGTERM: it ends its work, and the next one leads at once."""
    with candidates(registered, key, way, "run", ttl=30) as (first, second):
        first.popen.send_signal(signal.SIGTERM)
        with prompt(1):
            assert eventually(lambda: leads(second))
        first.wait_for("ended")
        assert first.popen.wait() == 0
        assert len(said(first, "handled")) == (way == "handled")


@ELSEWHERE
@pytest.mark.parametrize("way", ["run", "with", "handled", "exits"])
def test_candidate_that_is_told_to_end_ends_at_once(
    registered: Registered, key: str, way: str
) -> None:
    """As it would have done without us: it holds nothing, and waits for nothing."""
    with candidates(registered, key, "run", way, ttl=30) as (first, second):
        assert eventually(lambda: waiters(registered, key) > 0)
        second.popen.send_signal(signal.SIGTERM)
        # An interpreter takes its time to end. To wait for the leader would take thirty seconds.
        with prompt(5):
            status = second.popen.wait()
        assert status == {"run": 0, "with": -signal.SIGTERM, "handled": 0, "exits": 7}[way]
        assert is_leading(first)


def waiters(registered: Registered, key: str) -> int:
    """Say how many stand by, as people see it."""
    info = get_by_key(own_key(f"leader:{key}"), backend=registered.alias)
    return 0 if info is None else len(info.waiters)


@ELSEWHERE
@pytest.mark.parametrize(("way", "signals_sent"), [("deaf", 2), ("exits", 1)])
def test_leader_that_hears_nothing_ends_by_the_second_signal(
    registered: Registered, key: str, way: str, signals_sent: int
) -> None:
    """Or by the first, where that has a handler which ends the process: then it steps down."""
    with candidates(registered, key, way, "run", ttl=1.0 if way == "deaf" else 30) as (
        first,
        second,
    ):
        for _ in range(signals_sent - 1):
            first.popen.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert first.popen.poll() is None
        first.popen.send_signal(signal.SIGTERM)
        assert first.popen.wait() == (-signal.SIGTERM if way == "deaf" else 7)
        with prompt(WITHIN + SLACK if way == "deaf" else 1):
            assert eventually(lambda: leads(second))


@pytest.mark.aliases("memory", "redis", why="an interrupted driver of a database tells of it")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_amid_a_campaign_leaves_nothing_held(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it comes: the key is free at once, and not when a ttl is over.

    An exception in a weak reference's callback is swallowed by Python: then the next look helps.
    """
    monkeypatch.setattr(leading, "PATIENCE", 0.2)
    lock = distlock(own_key(f"leader:{key}"), backend=registered.alias)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    led: list[int] = []

    def work(term: Term) -> None:
        led.append(term.fence)
        term.wait(5)

    try:
        for number in range(40):
            candidate = leader(key, backend=registered.alias)
            late = threading.Timer(number * 0.0002, os.kill, (os.getpid(), signal.SIGTERM))
            late.start()
            candidate.run(work)
            late.join()
            assert eventually(lambda: not taken(lock), 5), number
    finally:
        signal.signal(signal.SIGTERM, before)
    assert led == sorted(set(led))


def test_signal_is_handled_as_before_behind_the_block(registered: Registered, key: str) -> None:
    """And the handlers of two, one in the other, leave nothing behind either."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _: seen.append(signum))
    ours = signal.getsignal(signal.SIGTERM)
    try:
        with leader(key, backend=registered.alias):
            assert signal.getsignal(signal.SIGTERM) is not ours
        assert signal.getsignal(signal.SIGTERM) is ours
        with (
            leader(key, backend=registered.alias) as outer,
            leader(f"{key}:2", backend=registered.alias) as inner,
        ):
            signal.raise_signal(signal.SIGTERM)
            assert (bool(inner), bool(outer)) == (False, False)
            assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is ours
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with leader(key, backend=registered.alias) as term:
            signal.raise_signal(signal.SIGTERM)
            assert term
        Later(leader(key, backend=registered.alias).run, lambda _: None).result()
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.aliases("memory", why="no store is asked")
def test_leaders_leave_in_any_order(registered: Registered, key: str) -> None:
    """What handled the signal before handles it again behind the last one, and once amid them."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, _: seen.append(signum))
    ours = signal.getsignal(signal.SIGTERM)
    first, second = (leader(f"{key}{n}", backend=registered.alias) for n in "12")
    try:
        for told in ([], [signal.SIGTERM]):
            with ExitStack() as later:
                with first:
                    term = later.enter_context(second)
                if told:
                    signal.raise_signal(signal.SIGTERM)
                assert bool(term) is not bool(told)
            assert seen == told
            assert signal.getsignal(signal.SIGTERM) is ours
        assert not first._is_stopped
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.aliases("memory", why="no store is asked")
@pytest.mark.parametrize(("leads_too", "status"), [(False, -signal.SIGTERM), (True, 7)])
def test_forked_child_of_a_leader_has_its_own_signal(
    candidate: Leader, key: str, *, leads_too: bool, status: int
) -> None:
    """It ends as it would have done without us: `multiprocessing.Pool` waits for that."""
    forks = multiprocessing.get_context("fork")
    begun = forks.Event()

    def child() -> None:
        # Python drops a signal that arrives before a fork has come here.
        begun.set()
        if leads_too:
            leader(f"{key}:2", backend="memory").run(end)
            sys.exit(7)
        while True:
            # A handler of Python's is not called in a `pause()` that begins behind its signal.
            time.sleep(0.05)

    def end(term: Term) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert not term

    with candidate as term:
        process = forks.Process(target=child)
        process.start()
        try:
            assert begun.wait(10)
            if not leads_too:
                process.terminate()
            process.join(10)
            assert process.exitcode == status
        finally:
            process.kill()
        assert term


def test_standing_by_is_no_timeout(
    registered: Registered, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gets the signal sees by the holder that it is a leader."""
    monkeypatch.setattr(leading, "PATIENCE", 0.05)
    with (
        leader(key, backend=registered.alias),
        Heard(signals.lock_not_acquired, own_key(f"leader:{key}")) as heard,
    ):
        other = leader(key, backend=registered.alias)
        waiting = Later(other.run, lambda _: None)
        assert eventually(lambda: bool(heard.facts))
        other.stop()
        waiting.result()
    holder = heard.facts[0]["holder"]
    # Not every store tells who holds a key.
    assert holder is None or holder.leads
