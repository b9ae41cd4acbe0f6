"""The dashboard in the admin: what it shows, on every backend."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import escape, unescape
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
from django.conf import settings
from django.contrib.admin.utils import quote
from django.contrib.auth.models import User
from django.core import checks
from django.test import Client, override_settings

from django_distlock import lock_backends
from django_distlock.core.holders import Holder
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from django_distlock.core.wording import printable
from django_distlock.inspection import Operation, request_stop
from django_distlock.models import FenceCounter, LockEvent
from tests.backends import BACKENDS, REDIS

from .admin_settings import LOCKS
from .admin_site import admin_project, browser_of, user_who_may
from .databases import here

SEEN = [each for each in BACKENDS.values() if each.store not in ("memory", "session")]

HOSTILE = {
    "script": '<script>alert("1")</script>',
    "rtl": "\u202eright to left",
    "line": "line\nbreak & 'quote'",
    "emoji": "\U0001f512" * 128,
    "long": "x" * 512,
}
each_hostile = pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)


@pytest.fixture
def log() -> Iterator[type[Any]]:
    """Serve the admin."""
    with admin_project() as log:
        yield log


@pytest.fixture
def viewer(log: type[Any]) -> Iterator[User]:
    """Give somebody who may look, and nothing else."""
    with user_who_may(Operation.VIEW) as user:
        yield user


@pytest.fixture
def client(viewer: User) -> Client:
    """Give their browser."""
    return browser_of(viewer)


@pytest.fixture
def reader(log: type[Any], key: str) -> Iterator[Client]:
    """Give the browser of somebody who sees every page."""
    root = User.objects.create_superuser(f"{key}-root")
    yield browser_of(root)
    root.delete()


@pytest.fixture(params=SEEN, ids=lambda each: each.alias)
def alias(request: pytest.FixtureRequest) -> str:
    """Give each backend whose locks another process sees."""
    return here(request.param.alias)


def take(alias: str, key: str, ttl: float | None = 60, **holder: Any) -> int:
    """Let somebody hold a key; give the fence."""
    granted = lock_backends[alias].acquire(key, new_token(), ttl, Holder(**holder))
    assert isinstance(granted, Grant)
    return granted.fence


def page(client: Client, **query: str) -> str:
    """Give the text of a page of the dashboard."""
    answer = client.get(f"{LOCKS}?{urlencode(query)}")
    assert answer.status_code == 200
    return answer.content.decode()


def key_page(client: Client, alias: str, key: str) -> str:
    """Give the text of the page of a key."""
    answer = client.get(f"{LOCKS}key/?{urlencode({'backend': alias, 'key': key})}")
    assert answer.status_code == 200
    return answer.content.decode()


def test_lock_is_in_the_list(client: Client, alias: str, key: str) -> None:
    """On every backend, with its holder, task, request, fence, and who waits."""
    fence = take(
        alias, key, host="h-1", process="web", pid=7, task_id="t-1",
        metadata={"request": "POST /pay"},
    )  # fmt: skip
    for host in ("a", "b"):
        assert lock_backends[alias].note_waiter(key, Holder(host=host), 60)
    text = page(client, backend=alias, begins=key)
    for told in (key, "h-1 web[7]", "t-1", "POST /pay", str(fence), ">2</td>", "<progress"):
        assert told in text
    assert "No lock is held that fits." not in text


def test_page_of_a_key_tells_all(client: Client, alias: str, key: str) -> None:
    """The lock, who waits, and lines for a shell; its token is on no page."""
    token = new_token()
    holder = Holder(host="h-1", thread="MainThread", metadata={"user": "ann"})
    fence = lock_backends[alias].acquire(key, token, 60, holder).fence
    lock_backends[alias].note_waiter(key, Holder(host="h-2", process="w", pid=3), 60)
    text = key_page(client, alias, key)
    for told in (
        key, str(fence), "h-1", "MainThread", "ann", "h-2 w[3]", "granted",
        f"distlock_show --backend {alias} {key}",
    ):  # fmt: skip
        assert told in text
    listed = page(client, backend=alias, begins=key)
    assert key in listed
    assert token not in text + listed


def test_page_of_a_free_key(client: Client, alias: str, key: str) -> None:
    """It says so, with the last fence."""
    store = lock_backends[alias]
    fence = take(alias, key)
    store.force_release(key)
    text = key_page(client, alias, key)
    assert "nobody holds it" in text
    assert str(fence) not in text or store.counter(key) is not None
    assert "Nothing that is kept." in text


@each_hostile
@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_hostile_key_is_text(client: Client, alias: str, hostile: str, key: str) -> None:
    """In the list, on its page, and in the values of the form."""
    take(alias, hostile, host="<b>host</b>", metadata={"<i>": "</dd>"})
    try:
        pages = (page(client, backend=alias, begins=hostile), key_page(client, alias, hostile))
    finally:
        lock_backends[alias].force_release(hostile)
    for text in pages:
        assert escape(printable(hostile)) in text
        for wrong in ("<script>alert", "<b>host", "<i>", "</dd></dd>"):
            assert wrong not in text


def unlinked(text: str) -> str:
    """Give a page without the tags that the pages themselves put around a key."""
    assert "<script>alert" not in text
    return re.sub(r"</?(?:a|bdi)\b[^>]*>", "", text)


def in_list(client: Client, model: str, **query: Any) -> list[str]:
    """Give the keys of a list of the admin, as they are read; one with a tag is not whole."""
    text = client.get(f"/admin/django_distlock/{model}/", query).content.decode()
    cells = re.findall(r'class="field-(?:plain_key|key_page)[^"]*">([^<]*)</t', unlinked(text))
    return [unescape(each) for each in cells]


def row_page(client: Client, model: str, pk: Any) -> str:
    """Give the text of the page of a row."""
    answer = client.get(f"/admin/django_distlock/{model}/{quote(pk)}/change/")
    assert answer.status_code == 200
    return unlinked(answer.content.decode())


def as_field(value: str) -> str:
    """Give what the admin makes of a text."""
    return f'<div class="readonly">{escape(printable(value))}</div>'


@each_hostile
def test_hostile_key_of_a_counter_is_text(reader: Client, hostile: str) -> None:
    """In the list, on its page, and where it is searched for."""
    take("postgres", hostile)
    lock_backends["postgres"].force_release(hostile)
    storage_key = lock_backends["postgres"].storage_name(hostile)
    assert in_list(reader, "fencecounter", storage_key=storage_key) == [printable(hostile)]
    assert in_list(reader, "fencecounter", q=hostile) == [printable(hostile)]
    assert as_field(hostile) in row_page(reader, "fencecounter", storage_key)
    assert FenceCounter.objects.get(pk=storage_key).key == hostile


@each_hostile
def test_hostile_event_is_text(reader: Client, hostile: str) -> None:
    """In the list, on its page, and where it is searched for: the key, and what stands beside."""
    event = LockEvent.objects.create(
        backend="postgres", key=hostile, kind=LockEvent.Kind.FORCED, actor=hostile[:50],
        reason=hostile, holder={"metadata": {hostile: "<b>host"}}, details={"why": hostile},
    )  # fmt: skip
    try:
        assert in_list(reader, "lockevent", id=event.pk) == [printable(hostile)]
        assert printable(hostile) in in_list(reader, "lockevent", q=hostile)
        text = row_page(reader, "lockevent", event.pk)
    finally:
        event.delete()
    assert text.count(as_field(hostile)) >= 2
    assert as_field(hostile[:50]) in text
    shown = printable(json.dumps(hostile, ensure_ascii=False))
    assert text.count(escape(shown)) >= 2
    assert "<b>host" not in text


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ({"host": "h-1"}, ["one"]),
        ({"task": "t-2"}, ["two"]),
        ({"state": "no_expiry"}, ["two"]),
        ({"state": "held"}, ["one"]),
        ({"age": "60"}, []),
        ({"age": "nonsense"}, ["one", "two"]),
    ],
)
@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_filters(
    client: Client, alias: str, key: str, query: dict[str, str], shown: list[str]
) -> None:
    """Each narrows the list; one that is wrong is told, and narrows nothing."""
    take(alias, f"{key}-one", host="h-1")
    take(alias, f"{key}-two", None, host="h-2", task_id="t-2")
    text = page(client, backend=alias, begins=key, **query)
    assert [each for each in ("one", "two") if f"{key}-{each}</bdi>" in text] == shown
    assert ("errorlist" in text) == (query.get("age") == "nonsense")


def test_state_is_a_word_and_a_sign(client: Client, key: str) -> None:
    """Not a colour alone."""
    take("postgres", f"{key}-held")
    take("postgres", f"{key}-basic", None)
    take("postgres", f"{key}-asked")
    request_stop(f"{key}-asked", backend="postgres", actor="ann")
    text = page(client, backend="postgres", begins=key)
    for sign, word in (("●", "held"), ("∞", "held without expiry"), ("■", "asked to finish")):
        assert f'<span aria-hidden="true">{sign}</span> {word}' in text


def test_cards_lead_to_what_they_count(client: Client, key: str) -> None:
    """Each number is a link to the list of what it counts."""
    take("postgres", f"{key}-lasting", 600)
    take("postgres", f"{key}-soon", 5)
    cards = {each.name: each.href for each in client.get(LOCKS).context["overview"].cards}
    assert cards["waiting"].endswith("#distlock-wanted")
    for name, shown in (("held", ["lasting", "soon"]), ("ending_soon", ["soon"]), ("overdue", [])):
        query = {"backend": "postgres", "begins": key}
        query |= dict(parse_qsl(urlsplit(cards[name]).query))
        text = page(client, **query)
        assert "errorlist" not in text
        assert [each for each in ("lasting", "soon") if f"{key}-{each}</bdi>" in text] == shown


def test_pages_follow_each_other(client: Client, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a cursor; one that is none gives the first page again."""
    monkeypatch.setattr("django_distlock.admin.overview.LIMIT", 2)
    for each in "abc":
        take("postgres", f"{key}-{each}")
    query = {"backend": "postgres", "begins": key}
    first = client.get(LOCKS, query)
    assert [each.lock.key[-1] for each in first.context["overview"].rows] == ["a", "b"]
    cursor = first.context["overview"].following
    assert f"cursor={cursor}" in first.content.decode()
    second = client.get(LOCKS, {**query, "cursor": cursor})
    assert [each.lock.key[-1] for each in second.context["overview"].rows] == ["c"]
    assert "First page" in second.content.decode()
    wrong = client.get(LOCKS, {**query, "cursor": "none"})
    assert [each.lock.key[-1] for each in wrong.context["overview"].rows] == ["a", "b"]


def test_refresh_sends_what_has_changed(client: Client, key: str) -> None:
    """The parts alone; nothing at all where nothing has, whatever the time is."""
    query = {"backend": "postgres", "begins": key, "live": "1"}
    store = lock_backends["postgres"]
    grant = store.acquire(f"{key}-a", new_token(), 60)
    assert isinstance(grant, Grant)
    # The worst heartbeat is a card: it begins with the first renewal.
    store.extend(grant, 80)
    first = client.get(LOCKS, query)
    assert "<html" not in first.content.decode()
    assert f"{key}-a" in first.content.decode()
    tag = first["ETag"]
    again = client.get(LOCKS, query, headers={"If-None-Match": tag})
    # The cards count what other tests do meanwhile.
    assert again.status_code == 304 or again["ETag"] != tag
    # A renewal changes no card, and moves the end of a row.
    store.extend(grant, 90)
    renewed = client.get(LOCKS, query, headers={"If-None-Match": tag})
    assert renewed.status_code == 200
    take("postgres", f"{key}-b")
    changed = client.get(LOCKS, query, headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert f"{key}-b" in changed.content.decode()


def test_backend_that_is_down_is_told(client: Client, key: str) -> None:
    """Its error is on the page, beside what the others hold, and which nobody sees all of."""
    take("postgres", key)
    down = {
        "down": {"BACKEND": REDIS, "OPTIONS": {"url": "redis://127.0.0.1:1"}},
        "wrong": {"BACKEND": REDIS, "OPTIONS": {"unheard_of": 1}},
    }
    seen = {each: settings.DISTLOCK[each] for each in ("postgres", "memory")}
    with override_settings(DISTLOCK={**seen, **down}):
        text = page(client, begins=key)
        answer = client.get(f"{LOCKS}key/?{urlencode({'backend': 'down', 'key': key})}")
    assert f"{key}</bdi>" in text
    for told in ("<strong>down</strong>", "<strong>wrong</strong>", "unheard_of"):
        assert told in text
    assert "memory keeps its locks in the memory of each process" in text
    assert answer.status_code == 503


def test_findings_of_the_checks_are_shown(client: Client) -> None:
    """Those of errors and warnings that were not silenced."""
    wrong = {"default": {"BACKEND": "django_distlock.backends.memory.MemoryBackend", "TTL": -1}}
    with override_settings(DISTLOCK=wrong):
        assert "distlock.E001" in page(client)
        with override_settings(SILENCED_SYSTEM_CHECKS=["distlock.E001"]):
            assert "<strong>distlock.E001" not in page(client)
    shown = client.get(LOCKS).context["problems"]
    assert all(each.level >= checks.WARNING for each in shown)


def test_events_are_counted(client: Client, key: str) -> None:
    """By the minute, and in the cards."""
    kinds: list[str] = [LockEvent.Kind.LOST, LockEvent.Kind.REJECTED, LockEvent.Kind.PAUSED]
    before = client.get(LOCKS).context["overview"]
    for kind in kinds:
        LockEvent.objects.create(backend="postgres", key=key, kind=kind)
    after = client.get(LOCKS).context["overview"]
    assert after.chart.total - before.chart.total >= 3
    cards = {each.name: each for each in after.cards}
    for kind in ("lost", "rejected"):
        assert cards[kind].number >= 1
        assert cards[kind].is_grave
    LockEvent.objects.filter(key=key).delete()


def test_most_contended_keys_are_named(client: Client, key: str) -> None:
    """With a bar each, the longest first, and a link to the key."""
    for number in range(40):
        lock_backends["postgres"].note_waiter(f"{key}-hot", Holder(host=f"h-{number}"), 60)
    answer = client.get(LOCKS)
    (hot,) = [
        each for each in answer.context["overview"].contended
        if each.key == f"{key}-hot" and "backend=postgres&" in each.href
    ]  # fmt: skip
    assert hot.number == 40
    assert client.get(hot.href).status_code == 200
    assert f'<rect class="rest" width="{hot.width}"' in answer.content.decode()


def test_second_site_keeps_to_itself(reader: Client, key: str) -> None:
    """A project's own site of the admin leads to its own pages, and to no other site's."""
    take("postgres", key)
    second = LOCKS.replace("/admin/", "/operators/")
    answer = reader.get(second, {"backend": "postgres", "begins": key})
    hrefs = re.findall(r'(?:href|action)="(/[^"]*)"', answer.content.decode())
    ours = [each for each in hrefs if "/django_distlock/" in each]
    assert any("heldlock/key/" in each for each in ours)
    assert all(each.startswith("/operators/") for each in ours if "static" not in each)
    (row,) = answer.context["overview"].rows
    page_of_key = reader.get(row.href).content.decode()
    assert f'<a href="{second}">All locks</a>' in page_of_key


def test_nobody_looks_without_the_permission(log: type[Any], key: str) -> None:
    """Not at the list, not at a key; who is not logged in is asked to."""
    with user_who_may(Operation.PAUSE) as user:
        client = browser_of(user)
        for address in (LOCKS, f"{LOCKS}key/?backend=postgres&key={key}", f"{LOCKS}?live=1"):
            assert client.get(address).status_code == 403
    anonymous = Client().get(LOCKS)
    assert anonymous.status_code == 302
    assert "login" in anonymous["Location"]


@pytest.mark.parametrize(
    "query", ["", "backend=postgres", "backend=nobody&key=a", "backend=postgres&key=", "key=a"]
)
def test_page_of_no_key_is_not_found(client: Client, query: str) -> None:
    """Whatever is wrong with the address."""
    assert client.get(f"{LOCKS}key/?{query}").status_code == 404


def test_history_of_the_admin_leads_to_the_key(client: Client, alias: str, key: str) -> None:
    """Of the backend that it was, also where another one has the same names."""
    odd = f"{key}/a b_%é"
    name = quote(urlencode({"backend": alias, "key": odd}))
    answer = client.get(f"{LOCKS}{name}/change/")
    assert answer.status_code == 302
    target = client.get(answer["Location"]).context["target"]
    assert (target.backend, target.key) == (alias, odd)
    assert client.get(f"{LOCKS}nothing/change/").status_code == 404
