"""The dashboard in the admin: what it shows."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import unescape
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
from django.conf import settings
from django.contrib.admin.utils import quote
from django.core import checks
from django.test import Client, override_settings

from django_distlock import lock_backends
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant, Holder
from django_distlock.core.wording import printable
from django_distlock.inspection import request_stop
from django_distlock.models import FenceCounter, LockEvent
from tests.backends import REDIS

from .admin_settings import LOCKS
from .databases import here
from .operating import DEAD

HOSTILE = {
    "script": '<script>alert("1")</script>',
    "rtl": "\u202eright to left",
    "line": "line\nbreak & 'quote'",
    "emoji": "\U0001f512" * 128,
    "long": "x" * 512,
}


def take(alias: str, key: str, ttl: float | None = 60, **holder: Any) -> int:
    """Let somebody hold a key; give the fence."""
    granted = lock_backends[alias].acquire(key, new_token(), ttl, Holder(**holder))
    assert isinstance(granted, Grant)
    return granted.fence


def page(browser: Client, **query: str) -> str:
    """Give the text of a page of the dashboard."""
    answer = browser.get(f"{LOCKS}?{urlencode(query)}")
    assert answer.status_code == 200
    return answer.content.decode()


def key_page(browser: Client, alias: str, key: str) -> str:
    """Give the text of the page of a key."""
    answer = browser.get(f"{LOCKS}key/?{urlencode({'backend': alias, 'key': key})}")
    assert answer.status_code == 200
    return answer.content.decode()


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("alias", ["sqlite", "postgres", "mariadb", "redis", "redis_cluster"])
def test_lock_is_in_the_list(browser: Client, alias: str, key: str) -> None:
    """Of each store, with its holder, task, request, fence, and who waits."""
    here(alias)
    fence = take(
        alias, key, host="h-1", process="web", pid=7, task_id="t-1",
        metadata={"request": "POST /pay"},
    )  # fmt: skip
    for host in ("a", "b"):
        assert lock_backends[alias].waiters.note(key, Holder(host=host), 60)
    text = page(browser, backend=alias, begins=key)
    for told in (key, "h-1 web[7]", "t-1", "POST /pay", str(fence), ">2</a></td>", "<progress"):
        assert told in text
    assert "No locks match these filters." not in text


@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_page_of_a_key_tells_all(browser: Client, alias: str, key: str) -> None:
    """The lock, who waits, and lines for a shell; its token is on no page. Free, it says so."""
    store, token = lock_backends[alias], new_token()
    assert "has no record of this key" in key_page(browser, alias, key)
    holder = Holder(host="h-1", thread="MainThread", metadata={"user": "ann"})
    fence = store.acquire(key, token, 60, holder).fence
    store.waiters.note(key, Holder(host="h-2", process="w", pid=3), 60)
    text = key_page(browser, alias, key)
    for told in (
        key, str(fence), "h-1", "MainThread", "ann", "h-2 w[3]", "acquired",
        f"distlock_show --backend {alias} {key}",
    ):  # fmt: skip
        assert told in text
    listed = page(browser, backend=alias, begins=key)
    assert key in listed
    assert token not in text + listed
    store.force_release(key)
    assert "not held" in key_page(browser, alias, key)


def readable(text: str) -> str:
    """Give a page as it is read, with no tags around a key but those of the pages themselves."""
    for wrong in ("<script>alert", "<b>host", "<i>", "</dd></dd>"):
        assert wrong not in text
    return unescape(re.sub(r"</?(?:a|bdi)\b[^>]*>", "", text))


def test_hostile_texts_are_text(browser: Client, reader: Client) -> None:
    """In lists, on pages of keys, counters and events, and where they are searched for."""
    store = lock_backends["postgres"]
    for hostile in HOSTILE.values():
        take("postgres", hostile, host="<b>host</b>", metadata={"<i>": "</dd>"})
        event = LockEvent.objects.create(
            backend="postgres", key=hostile, kind=LockEvent.Kind.FORCED, actor=hostile[:50],
            reason=hostile, holder={"metadata": {hostile: "<b>host"}}, details={"why": hostile},
        )  # fmt: skip
        counter, rows = quote(store.queues.name_of(hostile)), "/admin/django_distlock/"
        try:
            assert FenceCounter.objects.get(key=hostile).pk == store.queues.name_of(hostile)
            pages = [page(browser, backend="postgres", begins=hostile)]
            pages += [key_page(browser, "postgres", hostile)]
            pages += [
                reader.get(f"{rows}{path}").content.decode()
                for path in (
                    f"fencecounter/?{urlencode({'q': hostile})}", f"fencecounter/{counter}/change/",
                    f"lockevent/?{urlencode({'q': hostile})}", f"lockevent/{event.pk}/change/",
                )
            ]  # fmt: skip
        finally:
            event.delete()
            store.force_release(hostile)
        shown = printable(hostile)
        texts = [*map(readable, pages)]
        assert all(shown in each for each in texts)
        for listed in (texts[2], texts[4]):
            assert re.search(
                rf'class="field-(plain_key|key_page)[^>]*>{re.escape(shown)}</t', listed
            )
        assert all(f'<div class="readonly">{shown}</div>' in each for each in (texts[3], texts[5]))
        # The holder and the details are JSON.
        in_json = printable(json.dumps(hostile, ensure_ascii=False))
        assert texts[5].count(in_json) >= 2


@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_filters(browser: Client, alias: str, key: str) -> None:
    """Each narrows the list; one that is wrong is told, and narrows nothing."""
    take(alias, f"{key}-one", host="h-1")
    take(alias, f"{key}-two", None, host="h-2", task_id="t-2")
    # Too many bytes for a key are a slip in a form, and no error of the server.
    assert "errorlist" in page(browser, begins="ü" * 300)
    assert "errorlist" not in page(browser, begins="ü" * 300, live="1")
    for query, shown in (
        ({"host": "h-1"}, ["one"]),
        ({"task": "t-2"}, ["two"]),
        ({"state": "no_expiry"}, ["two"]),
        ({"state": "held"}, ["one"]),
        ({"age": "60"}, []),
        ({"age": "nonsense"}, ["one", "two"]),
    ):
        text = page(browser, backend=alias, begins=key, **query)
        assert [each for each in ("one", "two") if f"{key}-{each}</bdi>" in text] == shown
        assert ("errorlist" in text) == (query.get("age") == "nonsense")


def test_state_is_a_word_and_a_sign(browser: Client, key: str) -> None:
    """Not a colour alone."""
    take("postgres", f"{key}-held")
    take("postgres", f"{key}-basic", None)
    take("postgres", f"{key}-asked")
    request_stop(f"{key}-asked", backend="postgres", actor="ann")
    text = page(browser, backend="postgres", begins=key)
    for sign, word in (("●", "held"), ("∞", "no expiry"), ("■", "stop requested")):
        assert f'<span aria-hidden="true">{sign}</span> {word}' in text


def test_cards_lead_to_what_they_count(browser: Client, key: str) -> None:
    """Each number is a link to the list of what it counts."""
    take("postgres", f"{key}-lasting", 600)
    soon = lock_backends["postgres"].acquire(f"{key}-soon", new_token(), 9.5)
    assert isinstance(soon, Grant)
    cards = {each.name: each.href for each in browser.get(LOCKS).context["overview"].cards}
    assert cards["waiting"].endswith("#distlock-wanted")
    for name, shown in (("held", ["lasting", "soon"]), ("ending_soon", ["soon"]), ("overdue", [])):
        query = {"backend": "postgres", "begins": key}
        query |= dict(parse_qsl(urlsplit(cards[name]).query))
        # It ends as soon, however long the page before took.
        assert lock_backends["postgres"].extend(soon)
        text = page(browser, **query)
        assert "errorlist" not in text
        assert [each for each in ("lasting", "soon") if f"{key}-{each}</bdi>" in text] == shown


def test_pages_follow_each_other(
    browser: Client, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a cursor; one that is none gives the first page again."""
    monkeypatch.setattr("django_distlock.admin.overview.LIMIT", 2)
    for each in "abc":
        take("postgres", f"{key}-{each}")
    query = {"backend": "postgres", "begins": key}
    first = browser.get(LOCKS, query)
    assert [each.lock.key[-1] for each in first.context["overview"].rows] == ["a", "b"]
    cursor = first.context["overview"].following
    assert f"cursor={cursor}" in first.content.decode()
    second = browser.get(LOCKS, {**query, "cursor": cursor})
    assert [each.lock.key[-1] for each in second.context["overview"].rows] == ["c"]
    assert "First page" in second.content.decode()
    # However it is nested.
    for wrong in ("none", *(base64.urlsafe_b64encode(b"[" * n).decode() for n in (1, 200_000))):
        again = browser.get(LOCKS, {**query, "cursor": wrong})
        assert [each.lock.key[-1] for each in again.context["overview"].rows] == ["a", "b"]
    # The links to other pages need nothing that a project may have left out.
    engine: dict[str, Any] = {**settings.TEMPLATES[0]}
    engine["OPTIONS"] = {"context_processors": engine["OPTIONS"]["context_processors"][1:]}
    with override_settings(TEMPLATES=[engine]):
        assert "cursor=" in page(browser, **query)


def test_refresh_sends_what_has_changed(browser: Client, key: str) -> None:
    """The parts alone; nothing at all where nothing has, whatever the time is."""
    query = {"backend": "postgres", "begins": key, "live": "1"}
    store = lock_backends["postgres"]
    grant = store.acquire(f"{key}-a", new_token(), 60)
    assert isinstance(grant, Grant)
    # The latest heartbeat is a card: it begins with the first renewal.
    store.extend(grant, 80)
    first = browser.get(LOCKS, query)
    assert "<html" not in first.content.decode()
    assert f"{key}-a" in first.content.decode()
    tag = first["ETag"]
    again = browser.get(LOCKS, query, headers={"If-None-Match": tag})
    # The cards count what other tests do meanwhile.
    assert again.status_code == 304 or again["ETag"] != tag
    # A renewal changes no card, and moves the end of a row.
    store.extend(grant, 90)
    renewed = browser.get(LOCKS, query, headers={"If-None-Match": tag})
    assert renewed.status_code == 200
    take("postgres", f"{key}-b")
    changed = browser.get(LOCKS, query, headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert f"{key}-b" in changed.content.decode()


def test_refresh_is_told_apart_alike_by_all_workers(
    browser: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By nothing of one process, such as an address in its memory."""
    told: list[bytes] = []
    sha256 = hashlib.sha256

    def listen(data: bytes = b"", **more: Any) -> Any:
        told.append(data)
        return sha256(data, **more)

    monkeypatch.setattr(hashlib, "sha256", listen)
    assert page(browser, live="1")
    (seen,) = (each for each in told if each.startswith(b"('en"))
    assert b" at 0x" not in seen
    assert b"force_release" in seen


def test_backend_that_is_down_is_told(browser: Client, key: str) -> None:
    """Its error is on the page, beside what the others hold, and which nobody sees all of."""
    take("postgres", key)
    down = {"down": DEAD, "wrong": {"BACKEND": REDIS, "OPTIONS": {"unheard_of": 1}}}
    seen = {each: settings.DISTLOCK[each] for each in ("postgres", "memory")}
    with override_settings(DISTLOCK={**seen, **down}):
        text = page(browser, begins=key)
        answer = browser.get(f"{LOCKS}key/?{urlencode({'backend': 'down', 'key': key})}")
    assert f"{key}</bdi>" in text
    for told in ("<strong>down:</strong>", "<strong>wrong:</strong>", "unheard_of"):
        assert told in text
    assert "memory keeps its locks in process memory" in text
    assert answer.status_code == 503


def test_none_held_is_a_number_only_where_all_have_answered(browser: Client, key: str) -> None:
    """Beside an outage it is a dash: whoever did not answer may have some."""
    empty = {"empty": {**settings.DISTLOCK["postgres"], "KEY_PREFIX": key}}
    for more, shown in (({}, "0"), ({"down": DEAD}, "\N{EN DASH}")):
        with override_settings(DISTLOCK={**empty, **more}):
            text = page(browser)
        for card in ("Held", "Waiting", "Expired, not released"):
            assert f"<strong>{shown}</strong> <span>{card}</span>" in text


def test_findings_of_the_checks_are_shown(browser: Client) -> None:
    """Those of errors and warnings that were not silenced."""
    wrong = {"default": {"BACKEND": "django_distlock.backends.memory.MemoryBackend", "TTL": -1}}
    with override_settings(DISTLOCK=wrong):
        assert "distlock.E001" in page(browser)
        with override_settings(SILENCED_SYSTEM_CHECKS=["distlock.E001"]):
            assert "<strong>distlock.E001" not in page(browser)
    shown = browser.get(LOCKS).context["problems"]
    assert all(each.level >= checks.WARNING for each in shown)


def test_events_are_counted(browser: Client, key: str) -> None:
    """By the minute, and in the cards."""
    kinds: list[str] = [LockEvent.Kind.LOST, LockEvent.Kind.REJECTED, LockEvent.Kind.PAUSED]
    before = browser.get(LOCKS).context["overview"]
    for kind in kinds:
        LockEvent.objects.create(backend="postgres", key=key, kind=kind)
    after = browser.get(LOCKS).context["overview"]
    numbers = [
        sum(int(bar.title.rpartition(": ")[2]) for bar in each.chart.bars)
        for each in (before, after)
    ]
    assert numbers[1] - numbers[0] >= 3
    cards = {each.name: each for each in after.cards}
    for kind in ("lost", "rejected"):
        assert cards[kind].number >= 1
        assert cards[kind].is_grave
    LockEvent.objects.filter(key=key).delete()


def test_most_contended_keys_are_named(browser: Client, key: str) -> None:
    """With a bar each, the longest first, and a link to the key."""
    for number in range(40):
        lock_backends["postgres"].waiters.note(f"{key}-hot", Holder(host=f"h-{number}"), 60)
    answer = browser.get(LOCKS)
    (hot,) = [
        each for each in answer.context["overview"].contended
        if each.key == f"{key}-hot" and "backend=postgres&" in each.href
    ]  # fmt: skip
    assert hot.number == 40
    assert browser.get(hot.href).status_code == 200
    assert f'<rect class="rest" width="{hot.width}"' in answer.content.decode()


def test_second_site_keeps_to_itself(reader: Client, key: str) -> None:
    """A project's own site leads to its own pages; events and counters need not be there."""
    take("postgres", key)
    for name in ("operators", "alone"):
        site = LOCKS.replace("/admin/", f"/{name}/")
        answer = reader.get(site, {"backend": "postgres", "begins": key})
        hrefs = re.findall(r'(?:href|action)="(/[^"]*)"', answer.content.decode())
        ours = [each for each in hrefs if "/django_distlock/" in each and "static" not in each]
        assert any("heldlock/key/" in each for each in ours)
        assert all(each.startswith(f"/{name}/") for each in ours)
        (row,) = answer.context["overview"].rows
        page_of_key = reader.get(row.href).content.decode()
        assert f'<a href="{site}">Locks</a>' in page_of_key


def test_key_is_found_on_whichever_backend_has_it(browser: Client, key: str) -> None:
    """The only one at once; else each is named, with those that did not answer."""
    take("redis", key)
    answer = browser.get(f"{LOCKS}key/", {"key": key, "backend": ""})
    assert answer["Location"] == f"{LOCKS}key/?{urlencode({'backend': 'redis', 'key': key})}"
    take("postgres", key)
    text = browser.get(f"{LOCKS}key/", {"key": key, "backend": ""}).content.decode()
    for alias in ("postgres", "redis"):
        assert f'"{LOCKS}key/?backend={alias}&amp;key={key}"' in text
    both = {"broken": DEAD, "redis": settings.DISTLOCK["redis"]}
    with override_settings(DISTLOCK=both):
        text = browser.get(f"{LOCKS}key/", {"key": key, "backend": ""}).content.decode()
    assert f'"{LOCKS}key/?backend=redis&amp;key={key}"' in text
    assert "did not answer" in text


def test_key_that_no_backend_has_is_unknown(browser: Client, key: str) -> None:
    """The page says so, and offers nothing."""
    text = browser.get(f"{LOCKS}key/", {"key": key, "backend": ""}).content.decode()
    assert "No backend has a record of this key" in text
    assert 'name="operation"' not in text
    assert browser.get(f"{LOCKS}key/", {"key": "", "backend": ""}).status_code == 404


def test_page_of_no_key_is_not_found(browser: Client) -> None:
    """Whatever is wrong with the address."""
    wrong = ("", "backend=postgres", "backend=nobody&key=a", "backend=postgres&key=", "key=a")
    for query in wrong:
        assert browser.get(f"{LOCKS}key/?{query}").status_code == 404
    assert browser.get(f"{LOCKS}nothing/change/").status_code == 404


def test_history_of_the_admin_leads_to_the_key(browser: Client, key: str) -> None:
    """Of the backend that it was, also where another one has the same names."""
    for alias in ("postgres", "redis"):
        name = quote(urlencode({"backend": alias, "key": f"{key}/a b_%é"}))
        answer = browser.get(f"{LOCKS}{name}/change/")
        target = browser.get(answer["Location"]).context["target"]
        assert (target.backend, target.key) == (alias, f"{key}/a b_%é")
