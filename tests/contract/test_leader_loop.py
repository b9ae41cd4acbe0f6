"""A loop of `leader()`: who is killed or stands still is replaced, and loses no write."""

from __future__ import annotations

import os
import signal

import pytest

from django_distlock import leader
from django_distlock.leading import Term
from tests.processes import Process, spawn
from tests.shop.models import Account

from .locking import eventually

#: Seconds between two writes, of the lease, and until a successor has written at the latest: its
#: ttl, the grace of a second, and what a machine takes that has much else to do.
EVERY, TTL, WITHIN = (
    (5.0, 10.0, 15.0)
    if os.environ.get("DISTLOCK_TEST_LEADER") == "full"
    # The grace is a second whatever the ttl is.
    else (0.8, 1.5, 6.0)
)

pytestmark = pytest.mark.parametrize("alias", ["postgres", "redis"])


def lead(alias: str, key: str, pk: int, every: float, ttl: float) -> None:
    """Write again and again while leading, and stand by while another one leads."""

    def work(term: Term) -> None:
        print("leads")
        while term:
            account = Account.objects.fenced(term.lease).get(pk=pk)
            account.value += 1
            account.save()
            print("wrote")
            term.wait(every)

    print("stands by")
    leader(key, ttl=ttl, backend=alias).run(work)


def candidate(alias: str, key: str, pk: int) -> Process:
    """Start one of many that would lead."""
    return spawn("tests.contract.test_leader_loop:lead", alias, key, pk, EVERY, TTL)


def test_leader_that_stands_still_loses_nothing(alias: str, key: str) -> None:
    """It wakes up behind the writes of its successor, overwrites none of them, and stands by."""
    pk = Account.objects.create(name=key).pk
    with candidate(alias, key, pk) as leader, candidate(alias, key, pk) as successor:
        leader.wait_for("stands by")
        successor.wait_for("stands by")
        assert eventually(lambda: "wrote" in _said(leader) + _said(successor), timeout=20)
        first, second = _sorted(leader, successor)
        first.stop()
        second.wait_for("wrote", timeout=WITHIN + 10)
        first.go_on()
        second.wait_for("wrote")
        second.wait_for("wrote")
        second.popen.send_signal(signal.SIGKILL)
        second.popen.wait()
        first.wait_for("leads", timeout=WITHIN + 10)
        first.wait_for("wrote")
        first.popen.send_signal(signal.SIGKILL)
        first.popen.wait()
        written = sum(line == "wrote" for each in (first, second) for line in _said(each))
        value = Account.objects.get(pk=pk).value
        assert value >= written, "an update was lost"
        assert value in (written, written + 1)


def _sorted(one: Process, other: Process) -> tuple[Process, Process]:
    """Return who leads, and who stands by."""
    if "leads" in _said(one):
        one.wait_for("leads")
        return one, other
    other.wait_for("leads")
    return other, one


def _said(process: Process) -> list[str]:
    return list(process._output)
