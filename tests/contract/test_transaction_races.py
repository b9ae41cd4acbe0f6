"""Transactions and leases of many processes never have one key at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from django_distlock import lock_backends
from tests.backends import Registered
from tests.shop.models import Row

from .helpers import crew, race
from .transaction_workers import SEVERAL

SIZES = [pytest.param(1, id="quick"), pytest.param(25, id="full", marks=pytest.mark.nightly)]
KEYS = 50
WORKERS = "tests.contract.transaction_workers"


@pytest.mark.aliases("postgres", "mariadb")
@pytest.mark.parametrize("size", SIZES)
def test_no_update_is_lost_and_nobody_deadlocks(
    registered: Registered, key: str, size: int
) -> None:
    """Eight processes lock keys in random order, some of them shared, and add to rows."""
    rows = Row.objects.using(lock_backends[registered.alias].using)
    rows.bulk_create([Row(name=f"{key}-{number}") for number in range(KEYS)])
    with crew(8, f"{WORKERS}:sell", registered.alias, key, KEYS, 50 * size) as workers:
        added = sum(race(workers, 900))
    there = rows.filter(name__startswith=f"{key}-")
    assert sum(there.values_list("value", flat=True)) == added, "updates were lost"
    assert there.delete()[0] == KEYS


@pytest.mark.aliases("postgres", "mariadb", "sqlite")
@pytest.mark.parametrize("size", SIZES)
def test_leases_and_transactions_take_turns(
    registered: Registered, key: str, size: int, tmp_path: Path
) -> None:
    """Two processes with leases and two with transactions add to a counter in a file."""
    path, turns = tmp_path / "counter", 20 * size
    path.touch()
    count = f"{WORKERS}:count"
    with (
        crew(2, count, registered.alias, key, str(path), "lease", turns) as leases,
        crew(2, count, registered.alias, key, str(path), "transaction", turns) as transactions,
    ):
        race([*leases, *transactions], 900)
    assert int(path.read_text()) == 4 * turns, "two held a key at once"


@pytest.mark.aliases("postgres", "mariadb")
@pytest.mark.parametrize("size", SIZES)
def test_several_leases_and_transactions_take_turns(
    registered: Registered, key: str, size: int, tmp_path: Path
) -> None:
    """Each turn has some of several keys, in random order; nobody waits in a circle."""
    for number in range(SEVERAL):
        (tmp_path / str(number)).touch()
    turns, count = 20 * size, f"{WORKERS}:count_several"
    with (
        crew(2, count, registered.alias, key, str(tmp_path), "lease", turns) as leases,
        crew(2, count, registered.alias, key, str(tmp_path), "transaction", turns) as transactions,
    ):
        added = sum(race([*leases, *transactions], 900))
    counted = sum(int((tmp_path / str(number)).read_text()) for number in range(SEVERAL))
    assert counted == added, "two held a key at once"
