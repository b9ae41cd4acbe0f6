"""gunicorn with gevent: requests, heartbeat and listener are greenlets of one thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import pytest

from django_distlock import distlock
from django_distlock.handler import lock_backends
from tests.contract.helpers import Later
from tests.contract.locking import eventually, grantable, taken
from tests.poolers import without
from tests.shop.models import Row

from .counting import PATIENCE
from .servers import Site, served

#: Renewed every third of it: a machine that stands still for less than the rest loses nothing.
TTL = 2.4
#: A waiter that nobody wakes asks again after five seconds.
WOKEN_WITHIN = 3.0

BACKENDS = ["default", "redis"]
on_each = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(scope="module")
def site(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Serve the project by one worker, which loads it behind the patches of gevent."""
    with gunicorn(tmp_path_factory.mktemp("gevent")) as made:
        yield made


def gunicorn(home: Path) -> AbstractContextManager[Site]:
    """Serve the project by one worker."""
    if find_spec("gevent") is None:
        without("gevent", "no wheel of gevent for this Python")
    return served(
        home, "gunicorn", "tests.setups.web.wsgi:application", "--no-control-socket",
        "--bind", "127.0.0.1:{port}", "--workers", "1", "--worker-class", "gevent",
    )  # fmt: skip


@on_each
def test_heartbeat_beats_while_a_view_sleeps(site: Site, key: str, backend: str) -> None:
    """A lease outlives its ttl, nobody else is granted it, and others are answered."""
    lock = distlock(key, backend=backend)
    keeping = Later(site.get, "keep", key=key, backend=backend, ttl=TTL)
    assert eventually(lambda: taken(lock), PATIENCE)
    fence = _fence(backend, key)
    until = time.monotonic() + 1.3 * TTL
    answered = 0
    while time.monotonic() < until:
        site.get("ready")
        answered += 1
        # It is never granted to us; nor was it to somebody else meanwhile.
        assert not grantable(lock)
        assert _fence(backend, key) == fence
        time.sleep(0.05)
    assert answered > 1
    assert keeping.result(PATIENCE) == {"outcome": "held", "patched": True}
    assert eventually(lambda: not taken(lock))


@on_each
def test_waiter_in_a_greenlet_is_woken_by_the_release(site: Site, key: str, backend: str) -> None:
    """Holder and waiter are requests of the same worker, in which the wake-up arrives."""
    holding = Later(site.get, "hold", key=key, backend=backend)
    assert eventually(lambda: taken(distlock(key, backend=backend)), PATIENCE)
    waiting = Later(site.get, "take", key=key, backend=backend)
    assert eventually(lambda: _is_wanted(backend, key), PATIENCE)
    # While one of them sleeps and the other one waits.
    site.get("ready")
    let_go_at = time.monotonic()
    Row.objects.create(name=f"{key}:let go")
    said = waiting.result(PATIENCE)
    assert said["fence"] > holding.result(PATIENCE)["fence"]
    took = said["at"] - let_go_at
    assert took < WOKEN_WITHIN, f"took {took:.3f} s instead of 0 s"


@on_each
@pytest.mark.parametrize("late_beat", ["", "1"], ids=["no beat", "late beat"])
def test_holder_that_starves_the_heartbeat_learns_of_its_loss(
    site: Site, key: str, backend: str, late_beat: str
) -> None:
    """No greenlet ran that could have noticed: the deadline alone says so, in `check()`.

    A heartbeat that comes too late, while the store would still renew, changes nothing.
    """
    said = site.get("starve", key=key, backend=backend, ttl=TTL, late_beat=late_beat)
    assert said == {"outcomes": ["lost", False, "lost"]}
    assert eventually(lambda: grantable(distlock(key, backend=backend)), timeout=10)


def test_end_of_the_worker_gives_back_what_was_left(
    django_db_setup: None, tmp_path: Path, key: str
) -> None:
    """Also what a greenlet took that has ended."""
    left = [distlock(key, backend=backend) for backend in BACKENDS]
    with gunicorn(tmp_path) as ending:
        for backend in BACKENDS:
            ending.get("leave", key=key, backend=backend)
        assert all(map(taken, left))
        ending.stop()
        assert not any(map(taken, left))


def _fence(backend: str, key: str) -> int | None:
    record = lock_backends[backend].read(key)
    return None if record is None else record.fence


def _is_wanted(backend: str, key: str) -> bool:
    record = lock_backends[backend].read(key)
    return record is not None and record.wanted
