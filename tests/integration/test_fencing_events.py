"""A refusal is told, and kept as a row, whatever becomes of the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.db import connections, transaction
from django.test import override_settings

from django_distlock import FenceRejected, distlock
from django_distlock.models import LockEvent
from django_distlock.process import event_log
from django_distlock.signals import fence_rejected
from tests.contract.locking import Heard, eventually, rolled_back
from tests.shop.models import Account

from .databases import Routed
from .fenced_rows import NEW, account, accounts


@pytest.fixture(params=["default", "sqlite"])
def using(request: pytest.FixtureRequest, key: str) -> Iterator[str]:
    """Give the database of the rows and of the events."""
    routers = [Routed("sqlite", LockEvent)] if request.param == "sqlite" else []
    with override_settings(DATABASE_ROUTERS=routers):
        yield request.param
        event_log.finish()
        LockEvent.objects.using(request.param).filter(key=key).delete()
    Account.objects.using(request.param).filter(name=key).delete()


def test_refusal_outlives_the_rollback(using: str, key: str) -> None:
    """The row says what was refused, by which fence, and who came with it."""
    row = account(using, key)
    with distlock(key, backend="redis") as lease:
        pass
    later = accounts(using).fenced(type(NEW)(key, lease.fence + 1)).get(pk=row.pk)
    with Heard(fence_rejected, key) as heard, rolled_back(using):
        # SQLite has one writer, and this is it.
        account(using, f"{key}-other")
        with pytest.raises(FenceRejected), transaction.atomic(using=using):
            row.save(lease=lease)
        assert not connections[using].needs_rollback
    facts = heard.once
    assert (facts["current"], facts["fence"]) == (later.fence, lease.fence)
    assert (facts["model"], facts["pk"], facts["alias"]) == ("shop.Account", row.pk, "redis")
    assert facts["holder"] == lease.holder
    assert isinstance(facts["cause"], FenceRejected)
    rows = LockEvent.objects.using(using).filter(key=key)
    assert eventually(rows.exists, 20)
    event = rows.get()
    assert (event.kind, event.backend, event.fence) == ("rejected", "redis", lease.fence)
    assert event.details == {
        "current": lease.fence + 1, "model": "shop.Account", "pk": str(row.pk)
    }  # fmt: skip
    assert event.holder["pid"] == lease.holder.pid
    assert f"shop.Account {row.pk}" in event.reason


def test_fence_without_its_lease_tells_nobody(using: str, key: str) -> None:
    """What came by another way has no backend to tell of."""
    row = account(using, key, fence=6)
    with Heard(fence_rejected, key) as heard, pytest.raises(FenceRejected):
        row.save(lease=type(NEW)(key, 5))
    assert not heard.facts
