"""`distlock_list --all`, and listings of which only a part is wanted."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from django_distlock import lock_backends
from django_distlock.core.records import Holder
from django_distlock.inspection import HeldKey, list_locks
from django_distlock.management import operating as tables
from django_distlock.models import HeldLock
from tests.contract.helpers import take
from tests.redis_servers import private_redis
from tests.settings import REDIS_BACKEND

from .operating import DEAD, run

MANY = 25


@pytest.fixture(params=["postgres", "redis"])
def alias(request: pytest.FixtureRequest, key: str) -> Iterator[str]:
    """Hold many keys on a backend."""
    name: str = request.param
    with ExitStack() as stack:
        if name == "redis":
            # Of its own: where others come and go meanwhile, a walk may tell of a key twice.
            url = stack.enter_context(private_redis()).url
            config = {"BACKEND": REDIS_BACKEND, "OPTIONS": {"url": url}}
            stack.enter_context(override_settings(DISTLOCK={**settings.DISTLOCK, name: config}))
        store = lock_backends[name]
        grants = [take(store, f"{key}:{number:03}", 600) for number in range(MANY)]
        yield name
        for each in grants:
            store.release(each)


def test_all_pages_are_one_listing(alias: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with its headings once; a document that one page would be, without a cursor."""
    monkeypatch.setattr(tables, "PAGE", 4)
    asked = ("distlock_list", f"--backend={alias}", "--prefix", key)
    ran = run(*asked, "--all")
    assert (ran.status, ran.err) == (0, "")
    head, *lines = ran.out.splitlines()
    assert head.split()[:3] == ["BACKEND", "KEY", "STATE"]
    assert sorted(line.split()[1] for line in lines) == [f"{key}:{each:03}" for each in range(MANY)]
    assert {line.index(key) for line in lines} == {head.index("KEY")}
    streamed, page = run(*asked, "--json", "--all").json, run(*asked, "--json", "--limit=1000").json
    for document in (streamed, page):
        document["locks"].sort(key=lambda each: each["key"])
        for each in document["locks"]:
            for moving in ("observed_at", "held_for", "expires_in"):
                del each[moving]
    assert streamed == page
    assert len(streamed["locks"]) == MANY


def test_silent_backend_is_told_behind_the_others(key: str) -> None:
    """In the document, and by the status; an error is no half of a document."""
    both = {"dead": DEAD, "postgres": settings.DISTLOCK["postgres"]}
    with override_settings(DISTLOCK=both):
        grant = take(lock_backends["postgres"], key, 600)
        ran = run("distlock_list", "--all", "--prefix", key, "--json")
        text = run("distlock_list", "--all", "--prefix", key)
        lock_backends["postgres"].release(grant)
    assert (ran.status, text.status) == (69, 69)
    assert [each["key"] for each in ran.json["locks"]] == [key]
    assert [each["backend"] for each in ran.json["failures"]] == ["dead"]
    assert "dead: " in text.err
    asked = ("distlock_list", "--all", "--backend=postgres", "--prefix", key)
    assert run(*asked, "--json").json == {"locks": [], "cursor": None, "failures": []}
    assert run(*asked).out == "No lock matches.\n"
    for more in (["--json"], []):
        ran = run("distlock_list", "--all", "--cursor=nonsense", *more)
        assert (ran.status, ran.out) == (2, "")


def test_pages_are_printed_while_they_are_read(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ten times as many take no more memory."""
    grant = take(lock_backends["memory"], key, 600)
    (lock,) = list_locks(backends=["memory"], prefix=key).locks
    few, many = (_peak(lock, pages) for pages in (5, 50))
    lock_backends["memory"].release(grant)
    assert many < 2 * few


class _Nowhere(StringIO):
    """Keeps nothing."""

    def write(self, text: str = "", style: Any = None, ending: str | None = None) -> int:
        """Forget it."""
        return len(text)


def _peak(lock: HeldKey, pages: int) -> int:
    from django_distlock.inspection import LockPage

    def read() -> Iterator[LockPage]:
        for _ in range(pages):
            yield LockPage(tuple(lock for _ in range(200)))

    tracemalloc.start()
    try:
        tables.stream_json(_Nowhere(), read(), ())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_few_of_many_fill_their_pages(key: str) -> None:
    """What was granted long ago comes page by page, each once, between those that were not."""
    store = lock_backends["postgres"]
    grants = [take(store, f"{key}:{number:03}", 600) for number in range(MANY)]
    old = [f"{key}:{number:03}" for number in range(0, MANY, 3)]
    long_ago = store.clock() - timedelta(hours=2)
    assert HeldLock.objects.filter(key__in=old).update(acquired_at=long_ago) == len(old)
    asked: dict[str, Any] = {"backends": ["postgres"], "prefix": key, "held_longer_than": 3600}
    pages, cursor = [], None
    while True:
        page = list_locks(cursor=cursor, limit=2, **asked)
        pages.append([each.key for each in page.locks])
        if (cursor := page.cursor) is None:
            break
    for each in grants:
        store.release(each)
    assert [key for page in pages for key in page] == old
    assert all(len(page) <= 2 for page in pages)
    assert len(pages) <= len(old) // 2 + 2


def test_holders_are_told_apart_in_redis(key: str) -> None:
    """By host and task, also where their names are no ASCII."""
    store = lock_backends["redis"]
    host = f"wéb-{key}"
    grants = [
        take(store, f"{key}:{name}", 600, holder=Holder(host=host, task_id=name))
        for name in ("ä", "b")
    ]
    grants.append(take(store, f"{key}:other", 600))
    asked: list[dict[str, Any]] = [
        {"host": host}, {"task_id": "ä", "prefix": key}, {"host": f"{host}!"},
    ]  # fmt: skip
    found = [[held.key for held in list_locks(backends=["redis"], **each).locks] for each in asked]
    for each in grants:
        store.release(each)
    assert [sorted(each) for each in found] == [[f"{key}:b", f"{key}:ä"], [f"{key}:ä"], []]
    assert json.dumps(host) != f'"{host}"'
