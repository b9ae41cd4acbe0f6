"""Of many beats one schedules, and no tick is run twice."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import DECLARED
from tests.integration.runs import state_of
from tests.keeper import required
from tests.processes import spawn
from tests.redis.servers import restartable

from .beat_processes import GRACE, INTERRUPTED, OURS, PATIENCE, Site, eventually, two_beats

#: How many ticks the drill has; the whole one has 60, 4 s apart.
TICKS = int(os.environ.get("DISTLOCK_TEST_TICKS", "6"))
EVERY = 4.0 if TICKS >= 60 else 3.0
#: A library that lets a process see another time.
FAKETIME = next((str(each) for each in Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), "")
#: What a takeover may take beyond the end of the lease and its grace: a machine that is busy.
SPARE = 2.5
#: Seconds for a takeover on a machine that stands still.
LONG = 20.0

both = pytest.mark.parametrize("store", ["postgres", "redis"])


def in_a_row(ticks: list[int]) -> bool:
    """Say whether each tick is the one behind the last; fail for good if one was run twice.

    A tick that is sent so late that the next one is due has the number of that: its own is missing.
    """
    again = [tick for tick, times in Counter(ticks).items() if times > 1 and tick - 1 in ticks]
    assert not again, "ticks were run twice"
    return ticks == list(range(ticks[0], ticks[0] + len(ticks)))


def another_leads(site: Site, pid: int, within: float) -> float:
    """Wait until somebody else leads; return the seconds that it took."""
    began = time.monotonic()
    eventually(lambda: site.leader() not in (None, pid), "another one leads", within)
    return time.monotonic() - began


@both
def test_each_tick_runs_once_whoever_is_killed(tmp_path: Path, key: str, store: str) -> None:
    """Two beats and two workers; the leader is killed between two ticks, and again.

    Another one leads within ttl and grace each time.
    """
    ttl = 2.0
    site = Site(tmp_path, key, store, every=EVERY, ttl=ttl, lifetime=int(TICKS * EVERY) + 120)
    # Behind the second one, the next tick falls due while nobody leads.
    kills = [(TICKS // 3, 0.2), (2 * TICKS // 3, 0.5)]
    took = []
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(site.worker()).says("ready")
        beats = list(stack.enter_context(two_beats(site)))
        for count, part in kills:
            site.wait_for_ticks(count)
            site.wait_into(part)
            (leader,) = [each for each in beats if each.pid == site.leader()]
            leader.kill()
            took.append(another_leads(site, leader.pid, LONG + ttl))
            beats.append(stack.enter_context(site.beat()))
            beats[-1].says("Beat stands by")
        site.wait_for_ticks(TICKS)
        site.wait_into(0.5)
    ran = site.ran()
    late = [each["sent_at"] - each["tick"] * EVERY for each in ran]
    print(f"{len(ran)} ticks of {TICKS}, {EVERY:g} s apart, {store}: leaders replaced in", end=" ")
    print(", ".join(f"{each:.2f} s" for each in took), f"; sent at most {max(late):.2f} s late")
    assert len(site.ticks()) >= TICKS
    assert in_a_row(site.ticks()), site.ticks()
    # A figure of a machine that has nothing else to do.
    if TICKS >= 60:
        assert max(took) < ttl + GRACE + SPARE


@both
def test_leader_that_stops_or_dies_sends_nothing_twice(
    tmp_path: Path, key: str, store: str
) -> None:
    """It stands still between its decision and the message; the other one sends; it goes on.

    Then the other one dies between its mark and the message, which is lost.
    """
    site = Site(tmp_path, key, store, every=4, ttl=1)
    with site.worker(), two_beats(site, INTERRUPTED) as beats:
        site.wait_for_ticks(1)
        site.tell("stop when due")
        eventually(lambda: "T" in [state_of(each.pid) for each in beats], "the leader stands still")
        (leads,) = (each for each in beats if state_of(each.pid) == "T")
        count = len(site.ran())
        another_leads(site, leads.pid, 20)
        site.wait_for_ticks(count + 1)
        leads.signal(signal.SIGCONT)
        leads.says("Beat stands by")
        site.wait_for_ticks(count + 3)
        assert in_a_row(site.ticks()), site.ticks()
        # At most once: the successor takes what is marked for sent, and goes on behind it.
        site.tell("die before sending")
        eventually(lambda: any(each.has_ended for each in beats), "the leader dies")
        count = len(site.ran())
        site.wait_for_ticks(count + 2)
        ticks = site.ticks()
        assert not (len(set(ticks)) < len(ticks) and ticks), "ticks were run twice"
        lost = set(range(ticks[0], ticks[-1] + 1)) - set(ticks)
        assert lost == {ticks[count - 1] + 1}


def test_tick_of_the_gap_is_sent_by_who_began_behind_it(tmp_path: Path, key: str) -> None:
    """A beat without a file, and which did not run when the tick was due, still sends it."""
    site = Site(tmp_path, key, "postgres", every=6, ttl=0.5)
    with site.worker(), site.beat() as first:
        first.says("Beat leads")
        site.tell("stop before it begins")
        # All that takes a beat its time is behind it when the tick falls due.
        with site.beat(INTERRUPTED) as second:
            eventually(lambda: state_of(second.pid) == "T", "the second one stands still")
            site.wait_for_ticks(1)
            site.wait_into(0.5)
            first.kill()
            count = len(site.ran())
            site.wait_into(0.05)
            second.signal(signal.SIGCONT)
            site.wait_for_ticks(count + 1)
            assert in_a_row(site.ticks()), site.ticks()


def test_store_that_is_away_stops_the_schedule(tmp_path: Path, key: str) -> None:
    """Nothing is sent that nobody can mark, it is said once, and it goes on with the store."""
    with restartable(durable=True) as server:
        backend = {
            "BACKEND": "django_distlock.backends.redis.RedisBackend",
            "OPTIONS": {"url": server.url},
        }
        site = Site(tmp_path, key, "redis", every=2, ttl=1, backend=backend)
        with site.worker(), two_beats(site) as (leads, follows):
            site.wait_for_ticks(2)
            server.kill()
            site.wait_into(0.9)
            before = len(site.ran())
            site.wait_into(0.9)
            site.wait_into(0.9)
            assert len(site.ran()) == before
            for beat in (leads, follows):
                beat.says("Beat schedules nothing")
            server.start()
            site.wait_for_ticks(before + 3)
            for beat in (leads, follows):
                assert beat.said().count("Beat schedules nothing") == 1
            ticks = site.ticks()
            assert not (len(set(ticks)) < len(ticks) and ticks), "ticks were run twice"
            assert in_a_row(ticks[before:]), ticks


@pytest.mark.skipif(not (FAKETIME or required("faketime")), reason=f"{DECLARED}no libfaketime")
@both
def test_leader_whose_clock_was_ahead_leaves_no_silence(
    tmp_path: Path, key: str, store: str
) -> None:
    """Its clock is five minutes ahead, it is killed, and the next one sends at once."""
    site = Site(tmp_path, key, store, every=3, ttl=1)
    with site.worker() as worker:
        worker.says("ready")
        later = {"FAKETIME": "+300s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
        with site.beat(LD_PRELOAD=FAKETIME, **later) as ahead:
            site.wait_for_ticks(2)
            ahead.says("The clock of this host differs from the store's by +30")
            ahead.kill()
        assert all(each["sent_at"] > time.time() + 200 for each in site.ran())
        with site.beat() as follows:
            site.wait_for_ticks(4)
            follows.says("The clocks of beats differ")
    sent = [each["tick"] for each in site.ran() if each["sent_at"] < time.time() + 200]
    assert len(sent) >= 2
    assert in_a_row(sent), sent


@both
def test_clean_end_hands_over_at_once(tmp_path: Path, key: str, store: str) -> None:
    """Of `celery worker -B` and of `celery beat`: the next one does not wait for a lease's end."""
    site = Site(tmp_path, key, store, every=2, ttl=40)
    arguments = ("-B", "--scheduler", OURS, "-s", str(tmp_path / "schedule"))
    with site.worker(*arguments) as worker, site.worker():
        site.wait_for_ticks(2)
        assert site.leader() not in (None, worker.pid)
        with site.beat() as follows:
            follows.says("Beat stands by")
            worker.end()
            eventually(lambda: site.leader() == follows.pid, "the other one leads", 20)
            site.wait_for_ticks(len(site.ran()) + 1)
            with site.beat() as last:
                last.says("Beat stands by")
                follows.end()
                eventually(lambda: site.leader() == last.pid, "the last one leads", 20)
    assert in_a_row(site.ticks()), site.ticks()


def beat_in_a_thread() -> bool:
    """Run an embedded beat until two ticks are sent, and end it."""
    from celery.beat import EmbeddedService

    from .beat_project import HOME, app

    ran = HOME / "ran"
    service = EmbeddedService(
        app, thread=True, schedule_filename=str(HOME / "schedule"), scheduler_cls=OURS
    )
    service.start()
    eventually(lambda: ran.exists() and len(ran.read_text().splitlines()) >= 2, "two ticks")
    service.stop()
    service.join(20)
    return not service.is_alive()


def test_beat_in_a_thread(tmp_path: Path, key: str) -> None:
    """It leads, and gives up when its thread ends, although the process goes on."""
    site = Site(tmp_path, key, "postgres", every=2, ttl=30)
    environment = {**site.environment, **site.project._environment()}
    with site.worker(), spawn("tests.celery.test_beat:beat_in_a_thread", **environment) as process:
        process.wait_for("result: true", PATIENCE)
        assert site.leader() is None
    assert in_a_row(site.ticks()), site.ticks()
