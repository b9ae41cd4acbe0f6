"""`docs/runbooks/too-many-waiters.md`."""

from __future__ import annotations

from itertools import pairwise

from .incidents import PATIENCE, grantable, holder, let_notes_end, notes, shown, waiter
from .walks import Walk, incident

KEY = "invoice:42"
MANY = 50
STORES = ("postgresql", "mysql", "sqlite", "redis")


@incident("too-many-waiters", "They wait for a holder", *STORES)
def test_fifty_waiters_have_their_turn(walk: Walk) -> None:
    """The page counts them, and each is granted the key once the dead holder has lost it."""
    with holder(walk.site, KEY, ttl=3600) as process:
        process.kill()
        walk.stands_for("4711", process.popen.pid)
        with waiter(walk.site, KEY, MANY) as waiting:
            answers = walk.confirm()
            if walk.site.store != "redis":
                ((name, number, *_),) = answers[0].rows
                assert (name, number) == (f"distlock:{KEY}", MANY)
            walk.step()
            fences = waiting.result(PATIENCE)
    assert len(fences) == MANY
    assert all(before < after for before, after in pairwise(fences))
    walk.act()
    assert grantable(walk.site, KEY)
    assert not shown(walk.site, KEY).waiters


def leave_notes(walk: Walk) -> None:
    """Let waiters die, and their notes be over."""
    with holder(walk.site, KEY, ttl=3600), waiter(walk.site, KEY, 3) as waiting:
        waiting.kill()
        let_notes_end(walk.site)


@incident("too-many-waiters", "Their processes are gone", "postgresql")
def test_notes_of_the_dead_are_removed(walk: Walk) -> None:
    """The page finds notes that nobody is behind, and removes them."""
    leave_notes(walk)
    answers = walk.confirm()
    ((name, number, *_),) = answers[0].rows
    assert (name, number) == (f"distlock:{KEY}", 3)
    walk.act()
    assert notes(walk.site) == 0


@incident("too-many-waiters", "The application is down", "postgresql", "mysql", "sqlite")
def test_notes_are_removed_without_the_application(walk: Walk) -> None:
    """What is pasted removes notes that are over, and spares who waits."""
    leave_notes(walk)
    walk.skip_to("Act")
    with holder(walk.site, "invoice:43", ttl=3600), waiter(walk.site, "invoice:43"):
        walk.act()
        assert notes(walk.site) == 1
