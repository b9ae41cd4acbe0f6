"""`docs/runbooks/held-past-expiry.md`."""

from __future__ import annotations

import signal

from tests.contract.locking import eventually

from .incidents import PATIENCE, as_json, grantable, holder, record_fence, shown
from .walks import Walk, incident

KEY = "invoice:42"


def is_over(walk: Walk) -> bool:
    """Say whether the lease is over, its grace included."""
    return shown(walk.site, KEY).held is None


def check_rows(walk: Walk, pid: int) -> None:
    """Confirm, up to what is special about the case."""
    walk.stands_for("4711", pid)
    walk.step()
    ((name, _, found, _),) = walk.step().rows
    assert (name, as_json(found)["pid"]) == (f"distlock:{KEY}", pid)


def records(walk: Walk) -> int:
    """Count the rows of locks."""
    return int(walk.site.ask("SELECT count(*) FROM django_distlock_heldlock")[0][0])


@incident("held-past-expiry", "Its process died", "postgresql", "mysql", "sqlite")
def test_traces_of_the_dead_are_removed(walk: Walk) -> None:
    """The page tells whose lease ended by its time, and removes the record."""
    with holder(walk.site, KEY, ttl=1) as process:
        process.kill()
        assert eventually(lambda: is_over(walk), PATIENCE)
        check_rows(walk, process.popen.pid)
        assert walk.step(status=1).text.count("\n") == 1, "the heading alone"
    walk.act()
    assert records(walk) == 0


@incident("held-past-expiry", "Its process is stopped", "postgresql")
def test_a_process_that_stands_still_is_ended(walk: Walk) -> None:
    """The page finds the stopped process, and ends it before it goes on."""
    with holder(walk.site, KEY, ttl=1) as process:
        process.stop()
        assert eventually(lambda: is_over(walk), PATIENCE)
        check_rows(walk, process.popen.pid)
        walk.confirm()
        walk.act()
        assert process.popen.wait(PATIENCE) == -signal.SIGTERM
    assert records(walk) == 0
    assert grantable(walk.site, KEY)


@incident("held-past-expiry", "The application is down", "postgresql", "mysql", "sqlite")
def test_records_are_removed_without_the_application(walk: Walk) -> None:
    """What is pasted removes what is over, and no live lock."""
    with holder(walk.site, KEY, ttl=1) as process, holder(walk.site, "invoice:43", ttl=600):
        process.kill()
        assert eventually(lambda: is_over(walk), PATIENCE)
        walk.skip_to("Act")
        walk.act()
        assert records(walk) == 1
        assert record_fence(walk.site, "invoice:43")
