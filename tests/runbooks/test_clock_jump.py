"""`docs/runbooks/clock-jump.md`.

No clock of a server is moved here. What a jump leaves behind is staged: records that were granted
by a clock which was ahead, and records whose end has come too early.
"""

from __future__ import annotations

import signal

from tests.contract.locking import eventually

from .incidents import PATIENCE, event_kinds, grantable, holder, record_fence, shift
from .walks import Walk, incident

KEY = "invoice:42"
HOURS = 7200


@incident("clock-jump", "It went back", "postgresql", "mysql", "sqlite", "redis")
def test_a_dead_holder_from_the_future_is_released(walk: Walk) -> None:
    """The page finds the grant that lies ahead of the clock, and takes its key."""
    with holder(walk.site, KEY, ttl=30) as process:
        process.kill()
    shift(walk.site, KEY, HOURS)
    fence = record_fence(walk.site, KEY)
    answers = walk.confirm()
    if walk.site.store != "redis":
        assert answers[-1].rows[0][:2] == (f"distlock:{KEY}", fence)
        assert len(answers[-1].rows) == 1
    walk.act()
    assert grantable(walk.site, KEY)


@incident("clock-jump", "It went forward", "postgresql", "redis")
def test_a_holder_whose_lease_ended_early_is_ended(walk: Walk) -> None:
    """The page finds the lost lease, and its process is ended while the next one works."""
    with walk.site.start("tests.runbooks.workers:hold_and_go_on", KEY, 6) as early:
        early.wait_for("held", PATIENCE)
        # As a clock makes it that goes an hour forward.
        shift(walk.site, KEY, -3600)
        with holder(walk.site, KEY, ttl=60):
            assert eventually(lambda: "lost" in event_kinds(walk.site), PATIENCE)
            early.send("go on")
            early.wait_for("lost", PATIENCE)
            walk.stands_for("4711", early.popen.pid)
            fence = record_fence(walk.site, KEY)
            walk.confirm()
            walk.act()
            assert early.popen.wait(PATIENCE) == -signal.SIGTERM
            assert record_fence(walk.site, KEY) == fence
