"""`docs/runbooks/lost-lease.md`."""

from __future__ import annotations

import signal

from tests.contract.locking import eventually
from tests.processes import Process

from .incidents import PATIENCE, event_kinds, grantable
from .walks import Walk, incident

KEY = "invoice:42"


def end_of(walk: Walk, process: Process) -> None:
    """Confirm and act on a process that goes on without its lease."""
    walk.stands_for("4711", process.popen.pid)
    answers = walk.confirm()
    if walk.site.store != "redis":
        (found,) = [each.rows for each in answers if each.rows]
        assert [row[1] for row in found] == [KEY]
    walk.step()
    # It is dead before somebody looks.
    assert process.popen.wait(PATIENCE) == -signal.SIGTERM
    walk.act()
    assert grantable(walk.site, KEY)


@incident("lost-lease", "Its process stood still", "postgresql", "mysql", "sqlite", "redis")
def test_a_process_that_stood_still_is_ended(walk: Walk) -> None:
    """The page shows whose lease was lost, and ends the one that goes on."""
    with walk.site.start("tests.runbooks.workers:hold_and_go_on", KEY, 2) as process:
        process.wait_for("held", PATIENCE)
        process.stop()
        assert eventually(lambda: grantable(walk.site, KEY), PATIENCE)
        process.go_on()
        process.send("go on")
        process.wait_for("lost", PATIENCE)
        assert eventually(lambda: event_kinds(walk.site) == ["lost"], PATIENCE)
        end_of(walk, process)


@incident("lost-lease", "An operator force-released it", "postgresql", "redis")
def test_a_holder_whose_key_was_taken_is_ended(walk: Walk) -> None:
    """The page shows who took the key, and why."""
    with walk.site.start("tests.runbooks.workers:hold_and_go_on", KEY, 9) as process:
        process.wait_for("held", PATIENCE)
        line = f"python manage.py distlock_release {KEY} --force --reason 'deploy at noon'"
        assert walk.site.command(line).status == 0
        assert eventually(lambda: "lost" in event_kinds(walk.site), PATIENCE)
        process.send("go on")
        process.wait_for("lost", PATIENCE)
        end_of(walk, process)
