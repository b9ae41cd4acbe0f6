"""Processes that stand still or die under a lease, and what they write when it is over."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.db import connections
from django.db.models import Count, Q, Sum

from django_distlock.handler import lock_backends
from django_distlock.models import LockEvent
from tests.backends import BACKENDS, Registered
from tests.processes import Process, spawn
from tests.shop.models import Account, Row

from .fencing_workers import SHORT_TTL
from .helpers import Later
from .locking import eventually, grantable, lock_of, using_of

WORKERS = "tests.contract.fencing_workers"
#: Rounds of the drill, for each configuration. By hand: `DISTLOCK_TEST_ROUNDS=500`.
ROUNDS = int(os.environ.get("DISTLOCK_TEST_ROUNDS", "16"))
#: Those of a drill that has to lose something, if it does not before.
MOST_ROUNDS = max(ROUNDS, 160)
#: Workers of the drill, and the rows that they write.
CREW, SHELVES = 4, 2
#: Seconds of a pause in the drill: longer than a lease and the grace behind it.
PAUSES = (SHORT_TTL + 1.6, SHORT_TTL + 2.4)
#: What a statement raises whose session the server has ended.
SESSION_ENDED = {"InternalError", "OperationalError", "InterfaceError"}
#: What a round of the drill may come to, other than to be committed.
EXPECTED = {"refused", "lost", "acquisition_timeout", "BackendUnavailable", *SESSION_ENDED}


on = pytest.mark.aliases


def is_over(registered: Registered, key: str) -> bool:
    """Say whether the lease on a key is over, and the grace behind it."""
    return Later(lock_backends[registered.alias].read, key).result() is None


def working_since(key: str) -> datetime | None:
    """Return since when PostgreSQL works on the statement of a worker."""
    with connections["default"].cursor() as cursor:
        query = "SELECT query_start FROM pg_stat_activity WHERE state = 'active' AND query LIKE %s"
        cursor.execute(query, [f"SELECT pg_sleep(%)%{key}%"])
        found: tuple[datetime] | None = cursor.fetchone()
    return None if found is None else found[0]


@on("postgres", "mariadb", "sqlite", "redis")
def test_who_stood_still_writes_no_fenced_row(registered: Registered, key: str) -> None:
    """All of its writes are refused and told, where the same lease alone would lose an update."""
    alias, using = registered.alias, using_of(registered)
    rows = {
        "fenced": Account.objects.using(using).create(name=key).pk,
        "plain": Row.objects.using(using).create(name=key).pk,
    }
    arguments = alias, using, key, rows
    with spawn(f"{WORKERS}:write_too_late", *arguments, SHORT_TTL) as first:
        first.wait_for("read")
        first.stop()
        with spawn(f"{WORKERS}:take_over", *arguments) as second:
            second.send("take over")
            successor = second.result(60)
        first.send("write")
        first.go_on()
        said = first.result()
    ways, fences = said["ways"], (said["fence"], successor["fence"])
    assert fences[0] < fences[1], "a fence came again"
    late = {way: answer for way, answer in ways.items() if answer != f"rejected by {fences[1]}"}
    assert not late, "a late write was not refused"
    row = Account.objects.using(using).get(pk=rows["fenced"])
    assert (row.value, row.fence) == (10, fences[1]), "an update was lost"
    assert not Row.objects.using(using).filter(name=f"{key} beside").exists(), (
        "a late write is there"
    )
    assert said["lost"] is True
    # Each of them by the signal, and in the table; no rollback took that back.
    assert said["facts"] == [[alias, key, *fences]] * len(ways)
    assert said["pks"] == [str(row.pk)] * len(ways)
    events = LockEvent.objects.filter(backend=alias, key=key, kind=LockEvent.Kind.REJECTED)
    assert eventually(lambda: events.count() == len(ways), timeout=10)
    assert {(each.fence, each.details["current"]) for each in events} == {fences}
    # Two updates, and one of them is lost.
    assert Row.objects.using(using).get(pk=rows["plain"]).value == 1


@on("mariadb")
def test_stopped_transaction_holds_the_takeover_off(registered: Registered, key: str) -> None:
    """Nobody has the key, although the lease is over, before the guarded transaction has ended."""
    using = registered.using
    row = Row.objects.using(using).create(name=key)
    worker = f"{WORKERS}:stop_in_a_transaction"
    # Long enough for a busy machine to come to its first read.
    with spawn(worker, registered.alias, using, key, row.pk, 3.0, 0) as first:
        first.wait_for("read")
        first.stop()
        assert eventually(lambda: is_over(registered, key), timeout=20)
        assert not grantable(lock_of(registered, key)), "a guarded key was granted"
        with spawn(worker, registered.alias, using, key, row.pk, 30, 0) as second:
            # It does not get as far while it is tried, over and over.
            came = eventually(lambda: "read" in second._output, timeout=2)
            assert not came, "two wrote under a guard at once"
            first.send("write")
            first.go_on()
            assert first.result() == {"transaction": "committed", "lease": "lost"}
            second.wait_for("read")
            second.send("write")
            assert second.result() == {"transaction": "committed", "lease": "held"}
    row.refresh_from_db()
    assert row.value == 2, "an update was lost"


@on("postgres")
def test_server_ends_a_transaction_that_is_stopped(registered: Registered, key: str) -> None:
    """The takeover waits for that: for the statement, and for the silence behind it."""
    alias, using, at_work = registered.alias, registered.using, 3.0
    row = Row.objects.using(using).create(name=key)
    rows = {"fenced": Account.objects.using(using).create(name=key).pk, "plain": row.pk}
    arguments = alias, using, key, row.pk, SHORT_TTL, at_work
    with spawn(f"{WORKERS}:take_over", alias, using, key, rows) as second:
        # Before the first one begins: it comes too soon, where nothing holds it off.
        second.wait_for("ready")
        with spawn(f"{WORKERS}:stop_in_a_transaction", *arguments) as first:
            assert eventually(lambda: working_since(key) is not None, timeout=20)
            began = working_since(key)
            first.stop()
            second.send("take over")
            granted = datetime.fromisoformat(second.result(60)["granted"])
            first.send("write")
            first.go_on()
            said = first.result()
    assert began is not None
    soonest = began + timedelta(seconds=at_work + SHORT_TTL)
    assert granted >= soonest, "a guarded key was granted"
    row.refresh_from_db()
    assert row.value == 10, "an update was lost"
    assert said["transaction"] in SESSION_ENDED
    assert said["lease"] == "lost"


@on("postgres", "mariadb")
def test_who_stood_still_before_its_transaction_is_told(registered: Registered, key: str) -> None:
    """By its own clock, or by the fence in the store where it stood still behind that look."""
    row = Row.objects.using(registered.using).create(name=key)
    arguments = registered.alias, registered.using, key, row.pk, SHORT_TTL
    with spawn(f"{WORKERS}:stop_before_a_transaction", *arguments) as first:
        first.wait_for("read")
        first.stop()
        keys = [f"{key}:before", f"{key}:amid"]
        with spawn(f"{WORKERS}:hold", registered.alias, keys) as second:
            second.wait_for("held", timeout=60)
            first.send("write")
            first.go_on()
            said = first.result()
            row.refresh_from_db()
            assert row.value == 0, "a late write was not refused"
            assert said == {"guarded": "False", "amid": "lost", "before": "lost"}
            # What the first one did at the end of its blocks took nothing from its successor.
            second.send("enough")
            assert second.result() is True


class Worker:
    """A worker of the drill: started anew, when it was killed, until its rounds are done."""

    def __init__(self, spec: dict[str, Any], name: str, chance: random.Random, rounds: int):
        self.said: list[str] = []
        self._spec, self._name, self._chance = spec, name, chance
        self._left, self._lives = rounds, 0
        self._process: Process | None = None
        self._asleep_until: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether its rounds are done."""
        return self._process is None and self._left <= 0

    @property
    def is_asleep(self) -> bool:
        """Whether it stands still."""
        return self._asleep_until is not None

    @property
    def done(self) -> int:
        """How many rounds have an end, and were told."""
        running = [] if self._process is None else self._process._output
        return len(self.said) + sum(line.startswith("done: ") for line in running)

    def is_at(self, *lines: str) -> bool:
        """Whether it goes on, and has said one of these last; none given: anything."""
        if self.is_asleep or self._process is None or not self._process._output:
            return False
        return not lines or self._process._output[-1] in lines

    def look_after(self) -> None:
        """Start it, let it go on, or take what it has said, where it is time for that."""
        if self._process is None:
            if self._left > 0:
                self._lives += 1
                name, seed = f"{self._name}.{self._lives}", self._chance.getrandbits(32)
                rounds = min(self._left, ROUNDS // CREW)
                self._process = spawn(f"{WORKERS}:work", self._spec, name, seed, rounds)
        elif self._asleep_until is not None:
            if time.monotonic() >= self._asleep_until:
                self._asleep_until = None
                self._process.go_on()
        elif self._process.popen.poll() is not None:
            self._process.result()
            self.kill(rounds=0)

    def start_no_more(self) -> None:
        """Let it finish the rounds that its process has."""
        self._left = 0

    def pause(self) -> None:
        """Let it stand still for longer than a lease and the grace behind it."""
        assert self._process is not None
        self._process.stop()
        self._asleep_until = time.monotonic() + self._chance.uniform(*PAUSES)

    def kill(self, rounds: int = 1) -> None:
        """Kill it, if it runs, and with it the round that it is in."""
        if self._process is None:
            return
        self._process.kill()
        done = [line for line in self._process._output if line.startswith("done: ")]
        self.said += [line.removeprefix("done: ") for line in done]
        self._left -= len(done) + rounds
        self._process = self._asleep_until = None


def haunt(crew: list[Worker], chance: random.Random, is_enough: Callable[[], bool]) -> Counter[str]:
    """Kill workers and let them stand still until the rounds are done; count what was done."""
    did: Counter[str] = Counter()
    give_up, next_at = time.monotonic() + 60 + MOST_ROUNDS, 0
    while not all(each.is_finished for each in crew):
        assert time.monotonic() < give_up, f"not done in time: {did}"
        time.sleep(0.01)
        for each in crew:
            each.look_after()
            if is_enough():
                each.start_no_more()
        # Most of the time amid a round, and always at first: a kill, and a pause behind it.
        lines = ("thinks",) if len(did) < 2 or chance.random() < 0.7 else ()
        at_work = [each for each in crew if each.is_at(*lines)]
        done = sum(each.done for each in crew)
        if not at_work or done < next_at:
            continue
        next_at = done + (chance.randint(3, 10) if did else 1)
        if not did or ("pauses" in did and chance.random() < 0.3):
            did["kills"] += 1
            chance.choice(at_work).kill()
        else:
            did["pauses"] += 1
            chance.choice(at_work).pause()
    return did


@dataclass(frozen=True, kw_only=True)
class Drilled:
    """What became of the rounds of a drill.

    Attributes:
        committed: The rounds that the log has.
        acknowledged: Those of which somebody was told that they were committed.
        lost: How many of the log are in no row.
        answers: What the others came to.
        did: How often somebody was killed or stood still.
    """

    committed: set[str]
    acknowledged: set[str]
    lost: int
    answers: Counter[str]
    did: Counter[str]


def drill(
    registered: Registered, key: str, how: str, rounds: int = ROUNDS, *, until_lost: bool = False
) -> Drilled:
    """Let workers write rows in one of the ways, while they are killed and stand still."""
    using, seed = registered.using, int(os.environ.get("DISTLOCK_TEST_SEED", time.time_ns()))
    model: Any = Account if how == "fenced" else Row
    rows = [model.objects.using(using).create(name=key).pk for _ in range(SHELVES)]
    spec = {"alias": registered.alias, "using": using, "key": key, "rows": rows, "how": how}
    chance = random.Random(seed)
    crew = [Worker(spec, str(number), chance, rounds // CREW) for number in range(CREW)]
    print(f"DISTLOCK_TEST_SEED={seed}")
    try:
        did = haunt(crew, chance, lambda: until_lost and is_lost(using, key, rows))
    finally:
        for each in crew:
            each.kill()
    told = [said for each in crew for said in each.said]
    answers = Counter(said for said in told if not said.startswith("committed"))
    acknowledged = {said.removeprefix("committed ") for said in told} - answers.keys()
    log = {row: logged(using, f"{key}:{row} ") for row in rows}
    values = {each.pk: each.value for each in model.objects.using(using).filter(pk__in=rows)}
    committed = set().union(*log.values())
    lost = sum(len(names) - values[row] for row, names in log.items())
    print(f"{registered.alias} {how}: {len(told) + did['kills']} rounds, {dict(did)},")
    print(f"{len(committed)} committed, {dict(answers)}, {lost} lost")
    # A row is never ahead of its log: both are of one transaction.
    assert not [row for row in rows if values[row] > len(log[row])], "a row was written twice"
    assert not acknowledged - committed, "what was committed is gone"
    return Drilled(
        committed=committed, acknowledged=acknowledged, lost=lost, answers=answers, did=did
    )


@pytest.mark.parametrize(
    ("registered", "how"),
    [
        *((BACKENDS[alias], "fenced") for alias in ("postgres", "mariadb", "sqlite")),
        *((BACKENDS[alias], "guarded") for alias in ("postgres", "mariadb")),
    ],
    indirect=["registered"],
    ids=lambda each: each if isinstance(each, str) else each.alias,
)
def test_no_update_is_lost(registered: Registered, key: str, how: str) -> None:
    """Rows that paused and killed workers read and write count what was committed, exactly."""
    drilled = drill(registered, key, how)
    assert not drilled.lost, "updates were lost"
    assert drilled.answers.keys() <= EXPECTED
    assert drilled.did["kills"] > 0
    assert drilled.did["pauses"] > 0


@on("postgres", "mariadb", "sqlite")
def test_without_fences_the_same_drill_loses_updates(registered: Registered, key: str) -> None:
    """The drill can fail: whoever wakes up behind its lease writes over what others wrote."""
    drilled = drill(registered, key, "plain", MOST_ROUNDS, until_lost=True)
    assert drilled.lost > 0
    assert drilled.did["pauses"] > 0


def is_lost(using: str, key: str, rows: list[int]) -> bool:
    """Say whether more was committed than the rows count, by one statement."""
    totals = Row.objects.using(using).aggregate(
        counted=Sum("value", filter=Q(pk__in=rows)),
        committed=Count("pk", filter=Q(name__startswith=f"{key}:")),
    )
    return bool(totals["committed"] > totals["counted"])


def logged(using: str, prefix: str) -> set[str]:
    """Return the rounds that were committed."""
    names = Row.objects.using(using).filter(name__startswith=prefix)
    return {name.removeprefix(prefix) for name in names.values_list("name", flat=True)}
