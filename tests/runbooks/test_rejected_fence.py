"""`docs/runbooks/rejected-fence.md`."""

from __future__ import annotations

import signal

from django_distlock.fencing import Fence
from tests.contract.locking import eventually
from tests.shop.models import Account

from .incidents import PATIENCE, as_json, counter, event_kinds, grantable
from .walks import Walk, incident

KEY = "invoice:42"
#: What a row has that was written before its counter was set back. Redis follows the clock.
AHEAD = {"redis": 800_000_000_000_000}


def account(walk: Walk, fence: int = 0) -> int:
    """Make a row that a fence has touched."""
    row = Account(name="ledger", value=1)
    row.save(using=walk.site.using, lease=Fence(KEY, fence) if fence else None)
    return row.pk


@incident("rejected-fence", "One stale writer", "postgresql", "mysql", "sqlite", "redis")
def test_a_late_writer_is_ended(walk: Walk) -> None:
    """The page shows that the counter is level with the row; the next run writes it."""
    site, pk = walk.site, account(walk)
    with site.start("tests.runbooks.workers:write_late", KEY, pk, 2) as late:
        late.wait_for("held", PATIENCE)
        late.stop()
        assert eventually(lambda: grantable(site, KEY), PATIENCE)
        done = site.run_worker("write", KEY, pk, 5)
        late.go_on()
        late.send("go on")
        late.wait_for("fence_rejected", PATIENCE)
        assert eventually(lambda: "rejected" in event_kinds(site), PATIENCE)
        walk.stands_for("4711", late.popen.pid)
        answers = walk.confirm()
        if site.store != "redis":
            ((_, came, details, highest),) = next(each.rows for each in answers if each.rows)
            assert came < as_json(details)["current"] <= highest
        walk.act()
        assert late.popen.wait(PATIENCE) == -signal.SIGTERM
    assert site.run_worker("write", KEY, pk, 6)["fence"] > done["fence"]


@incident("rejected-fence", "The counters are behind", "postgresql", "redis")
def test_counters_that_are_behind_are_raised(walk: Walk) -> None:
    """The page shows a row ahead of its counter; then the next holder writes it."""
    site, ahead = walk.site, AHEAD.get(walk.site.store, 90_000)
    pk = account(walk, ahead)
    assert site.run_worker("write", KEY, pk, 5)["refused"] == ahead
    assert eventually(lambda: event_kinds(site) == ["rejected"], PATIENCE)
    walk.stands_for("90000", ahead)
    answers = walk.confirm()
    if site.store != "redis":
        ((_, came, details, highest),) = next(each.rows for each in answers if each.rows)
        assert came <= highest < as_json(details)["current"] == ahead
    walk.act()
    assert site.run_worker("write", KEY, pk, 5) == {"fence": ahead + 1}


@incident("rejected-fence", "The application is down", "postgresql", "mysql", "sqlite")
def test_counters_are_raised_without_the_application(walk: Walk) -> None:
    """What is pasted raises the counter, and never lowers it."""
    site, pk = walk.site, account(walk, 90_000)
    assert "refused" in site.run_worker("write", KEY, pk, 5)
    assert eventually(lambda: event_kinds(site) == ["rejected"], PATIENCE)
    walk.confirm()
    walk.act()
    assert site.run_worker("write", KEY, pk, 5) == {"fence": 90_001}
    walk.again("Act")
    walk.act()
    assert counter(site, KEY) == 90_001
