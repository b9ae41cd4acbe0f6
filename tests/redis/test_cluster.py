"""A Redis Cluster: each key on its server, and every server asked about all of them."""

from __future__ import annotations

from typing import Any

import pytest

from django_distlock.core.records import Grant
from tests.contract.helpers import listed, take
from tests.contract.stores_redis import RedisStore

from .asking import tell_story


def test_everything_works_on_a_cluster(alone_on_cluster: Any, key: str) -> None:
    """Every operation, but for finding a lock by its token."""
    tell_story(alone_on_cluster, key)


def test_listing_goes_through_all_servers(on_cluster: RedisStore, key: str) -> None:
    """In pages, each lock is listed once."""
    names = [f"{key}-{number}" for number in range(30)]
    grants = [take(on_cluster.backend, name) for name in names]
    for limit in (1, 7, 100):
        assert sorted(listed(on_cluster.backend, key, limit=limit)) == sorted(names)
    assert all(isinstance(each, Grant) for each in on_cluster.backend.extend_many(grants))


def test_listing_goes_on_when_another_server_has_left(
    alone_on_cluster: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or has taken another address: with the server where the page ended, in the middle of it."""
    names = [f"{key}-{number}" for number in range(30)]
    for name in names:
        take(alone_on_cluster, name)
    page = alone_on_cluster.list(limit=29)
    lines = alone_on_cluster.store._lines
    first, *others = lines.servers()
    monkeypatch.setattr(lines, "servers", lambda: others)
    rest = alone_on_cluster.list(cursor=page.cursor)
    assert sorted(each.key for each in (*page.records, *rest.records)) == sorted(names)
    monkeypatch.setattr(lines, "servers", lambda: [first])
    again = alone_on_cluster.list(cursor=page.cursor)
    # What the one that is gone had may be anywhere.
    assert {each.key for each in again.records} <= {each.key for each in page.records}
    assert again.records


def test_fences_of_all_servers_are_raised(alone_on_cluster: Any, key: str) -> None:
    """In pages, each counter of each server; those of held keys are named."""
    names = [f"{key}-{number}" for number in range(30)]
    grants = {name: take(alone_on_cluster, name) for name in names}
    kept = names[:4]
    for name in names[4:]:
        assert alone_on_cluster.release(grants[name]) is True
    to, cursor, raised = 300_000_000_000_000, None, 0
    left: list[str] = []
    while True:
        page = alone_on_cluster.raise_fences(to, cursor=cursor, limit=7)
        raised, left, cursor = raised + page.raised, [*left, *page.left], page.cursor
        if cursor is None:
            break
    assert (raised, sorted(left)) == (26, kept)
    assert {take(alone_on_cluster, name).fence for name in names[4:]} == {to + 1}
