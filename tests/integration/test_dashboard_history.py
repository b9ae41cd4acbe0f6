"""How keys were held before, how lists are sorted and searched, and where pages lead on to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client, override_settings
from django.utils import translation

from django_distlock import distlock, lock_backends
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant, Holder
from django_distlock.inspection import list_locks, show
from django_distlock.inspection.history import history
from django_distlock.models import LockEvent
from django_distlock.process import event_log
from tests.contract.helpers import Later
from tests.contract.locking import eventually

from .admin_settings import LOCKS


def take(key: str, ttl: float | None = 60, alias: str = "postgres", **holder: Any) -> None:
    """Let somebody hold a key."""
    assert isinstance(lock_backends[alias].acquire(key, new_token(), ttl, Holder(**holder)), Grant)


def ends(answer: Any) -> list[str]:
    """Give the ends of the keys that a page lists."""
    return [each.lock.key.rpartition("-")[2] for each in answer.context["overview"].rows]


def keys_shown(browser: Client, **query: str) -> list[str]:
    """Give the ends of the keys that are listed."""
    return ends(browser.get(LOCKS, {"backend": "postgres", **query}))


@pytest.fixture
def kept(key: str) -> Any:
    """Keep each release."""
    with override_settings(DISTLOCK_HISTORY=1):
        yield
    event_log.finish()
    LockEvent.objects.filter(key__startswith=key).delete()


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_page_of_a_key_shows_past_holders(
    browser: Client, reader: Client, alias: str, key: str
) -> None:
    """How long they held it and waited for it, as a table and a chart, for who may see events."""
    with distlock(key, backend=alias):
        inner = Later(_hold, key, alias)
        assert eventually(lambda: bool(lock_backends[alias].waiters.of(key)), 30)
    inner.result()
    assert event_log.finish()
    first, second = sorted(show(key, alias).releases or (), key=lambda each: each.fence or 0)
    assert (first.fence or 0) < (second.fence or 0)
    assert first.details["waited"] < 1 < second.details["waited"]
    assert show(key, alias).events == ()
    page = reader.get(f"{LOCKS}key/", {"backend": alias, "key": key}).context["page"]
    assert {each.fence for each in page.releases} == {second.fence, first.fence}
    assert len(page.chart.bars) == 2
    text = reader.get(f"{LOCKS}key/", {"backend": alias, "key": key}).content.decode()
    assert "Past holders" in text
    assert f"<bdi>{page.releases[0].holder.where}</bdi>" in text
    assert re.search(r"<bdi>\d\.\d{3} s</bdi>", text)
    # Else a German would read thousands of seconds.
    with translation.override("de"):
        german = reader.get(f"{LOCKS}key/", {"backend": alias, "key": key}).content.decode()
    assert re.search(r"<bdi>\d,\d{3} s</bdi>", german)
    assert not re.search(r"\d\.\d{3} s", german)
    # Events may name people.
    hidden = browser.get(f"{LOCKS}key/", {"backend": alias, "key": key}).content.decode()
    assert "Past holders" not in hidden


def _hold(key: str, alias: str) -> None:
    with distlock(key, backend=alias, wait=30):
        pass


def test_without_the_setting_no_release_is_kept(key: str) -> None:
    """Nor where the setting is 0."""
    for setting in ({}, {"DISTLOCK_HISTORY": 0}):
        with override_settings(**setting), distlock(key, backend="postgres"):
            pass
    assert event_log.finish()
    assert show(key, "postgres").releases == ()


@pytest.mark.usefixtures("kept")
def test_rate_and_median_wait_are_told(browser: Client, key: str) -> None:
    """Of the last hour, as if all releases were kept; the other events are counted apart."""
    LockEvent.objects.filter(kind=LockEvent.Kind.RELEASED).delete()
    before = history()
    for waited in (0.0, 0.25, 30.0):
        LockEvent.objects.create(
            backend="postgres", key=key, kind=LockEvent.Kind.RELEASED, fence=1,
            details={"held_for": 1.0, "waited": waited},
        )  # fmt: skip
    with override_settings(DISTLOCK_HISTORY=0.01):
        past = history()
        cards = {each.name: each.number for each in browser.get(LOCKS).context["overview"].cards}
    assert before is not None
    assert past is not None
    assert (before.rate, before.median_wait) == (None, None)
    assert (past.rate, past.median_wait) == (5.0, 0.25)
    assert (cards["rate"], cards["median_wait"]) == (5, 250)
    assert "released" not in past.kinds
    assert not any("released" in each.kinds for each in past.minutes)


def test_flood_of_releases_leaves_room_for_other_events(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases are dropped first: what an operator has to see is written."""
    writer = event_log._Writer()
    monkeypatch.setattr(writer, "_start", lambda: None)
    for _ in range(event_log.MAX_WAITING):
        writer.put("default", LockEvent(key=key, kind=LockEvent.Kind.RELEASED))
    writer.put("default", LockEvent(key=key, kind=LockEvent.Kind.LOST))
    kinds = [each.event.kind for each in writer._take()]
    assert len(kinds) == event_log.MAX_WAITING // 2 + 1
    assert kinds[-1] == LockEvent.Kind.LOST


def test_outage_leaves_room_for_what_operators_do(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else waits to be written, it is known afterwards who took a key, and why."""
    writer = event_log._Writer()
    monkeypatch.setattr(writer, "_start", lambda: None)
    for _ in range(event_log.MAX_WAITING + 1):
        writer.put("default", LockEvent(key=key, kind=LockEvent.Kind.LOST))
    writer.put("default", LockEvent(key=key, kind=LockEvent.Kind.FORCED, actor="Ada"))
    assert writer.dropped == 1
    assert writer._take()[-1].event.actor == "Ada"


def test_part_of_a_key_is_found(browser: Client, key: str, capsys: Any) -> None:
    """In the dashboard, by the function and by the command, on every page of the store."""
    for each in ("red", "green", "redder"):
        take(f"{key}-{each}")
    assert keys_shown(browser, begins=key, contains="-red") == ["red", "redder"]
    page = list_locks(backends=["postgres"], prefix=key, contains="een", limit=1)
    assert [each.key for each in page.locks] == [f"{key}-green"]
    call_command("distlock_list", backend=["postgres"], prefix=key, contains="-redder")
    out = capsys.readouterr().out
    assert f"{key}-redder" in out
    assert f"{key}-green" not in out


def test_list_is_sorted_by_a_column(browser: Client, key: str) -> None:
    """Up and down; the heading says how, and leads to the other order."""
    for each, ttl in (("b", 600), ("a", None), ("c", 6000)):
        take(f"{key}-{each}", ttl, host=f"host-{each}")
    for _ in range(2):
        lock_backends["postgres"].force_release(f"{key}-c")
        take(f"{key}-c", 6000, host="host-c")
    lock_backends["postgres"].waiters.note(f"{key}-b", Holder(host="w"), 600)
    columns = browser.get(LOCKS).context["overview"].columns
    # Where the first ones are alike, the last.
    up = {
        "key": "abc", "left": "bca", "age": "cab", "holder": "abc",
        "fence": "c", "state": "a", "waiting": "b",
    }  # fmt: skip
    for column, last in up.items():
        assert column in [each.name for each, _order, _sort in columns]
        shown = []
        for order, other, said in ((column, f"-{column}", "asc"), (f"-{column}", column, "desc")):
            answer = browser.get(LOCKS, {"backend": "postgres", "begins": key, "order": order})
            text = answer.content.decode()
            assert text.count(f'aria-sort="{said}ending"') == 1
            assert f'href="?backend=postgres&amp;begins={key}&amp;order={other}"' in text
            shown.append("".join(ends(answer)))
        assert shown[0].endswith(last)
        assert shown[1].startswith(last[::-1])


def test_whole_store_is_searched_and_sorted(
    browser: Client, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the store lists it page by page, and a page has few that fit."""
    # As many as it sorts, it reads at once: of the first three, one fits.
    monkeypatch.setattr("django_distlock.inspection.listing._LOOKED_AT", 3)
    monkeypatch.setattr("django_distlock.admin.overview.SORTED", 3)
    for number in range(12):
        take(f"{key}-{number:02}{'-red' if number % 4 == 0 else ''}")
    query = {"backend": "postgres", "begins": key, "contains": "-red"}
    for order, numbers in (("key", "00 04 08"), ("-key", "08 04 00")):
        rows = browser.get(LOCKS, {**query, "order": order}).context["overview"].rows
        assert " ".join(each.lock.key.split("-")[1] for each in rows) == numbers


def test_sorted_list_says_what_it_leaves_out(
    browser: Client, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of all that were looked at are shown; an order that is none sorts nothing."""
    monkeypatch.setattr("django_distlock.admin.overview.LIMIT", 2)
    for each in "bac":
        take(f"{key}-{each}")
    answer = browser.get(LOCKS, {"backend": "postgres", "begins": key, "order": "-key"})
    assert [each.lock.key[-1] for each in answer.context["overview"].rows] == ["c", "b"]
    assert "2 of 3 sorted locks are shown" in answer.content.decode()
    assert "Next page" not in answer.content.decode()
    assert keys_shown(browser, begins=key, order="nonsense") == ["a", "b"]


@pytest.fixture
def crowd() -> Iterator[Callable[[str, str, Holder], None]]:
    """Give what lets many wait for a key, and somebody among them."""
    noted: list[tuple[str, str, str]] = []

    def wait(alias: str, name: str, holder: Holder) -> None:
        for each in (holder, *(Holder(host=f"h-{number}") for number in range(40))):
            note = lock_backends[alias].waiters.note(name, each, 60)
            assert note
            noted.append((alias, name, note))

    yield wait
    for alias, name, note in noted:
        lock_backends[alias].waiters.drop(name, note)


@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_chain_of_waiting_is_shown(
    browser: Client, alias: str, key: str, capsys: Any, crowd: Callable[[str, str, Holder], None]
) -> None:
    """What its holder waits for, and who holds that: to the end, or once around."""
    names = [f"{key}-{each}" for each in "abc"]
    holders = [Holder(host="h", process="w", pid=each, thread="main") for each in (1, 2, 3)]
    store = lock_backends[alias]
    for name, holder in zip(names, holders, strict=True):
        assert isinstance(store.acquire(name, new_token(), 60, holder), Grant)
    # Among the keys that most wait for.
    for name, waiting in (names[1], holders[0]), (names[2], holders[1]):
        crowd(alias, name, waiting)
    view = show(names[0], alias)
    assert [(each.key, each.holder) for each in view.chain()] == [
        (names[1], holders[1]),
        (names[2], holders[2]),
    ]
    text = browser.get(f"{LOCKS}key/", {"backend": alias, "key": names[0]}).content.decode()
    assert text.index(f"<bdi>{names[1]}</bdi>") < text.index(f"<bdi>{names[2]}</bdi>")
    # In a circle, it ends.
    crowd(alias, names[0], holders[2])
    assert len(show(names[0], alias).chain()) == 2
    call_command("distlock_show", names[0], backend=alias)
    lines = capsys.readouterr().out.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("ITS HOLDER WAITS FOR"))
    told = [each.split(maxsplit=1) for each in lines[at + 1 :]]
    assert told == [[names[1], "h w[2]"], [names[2], "h w[3]"]]


def test_task_leads_to_another_tool(browser: Client, key: str) -> None:
    """Where a setting says how; its id is quoted."""
    take(key, task_id="a/b<c>")
    query = {"backend": "postgres", "begins": key}
    assert "a/b&lt;c&gt;</bdi>" in browser.get(LOCKS, query).content.decode()
    with override_settings(DISTLOCK_TASK_URL="https://flower.example/task/{task_id}"):
        text = browser.get(LOCKS, query).content.decode()
    assert 'href="https://flower.example/task/a%2Fb%3Cc%3E"' in text


def test_key_that_names_an_object_leads_to_it(browser: Client, reader: Client) -> None:
    """Where the site has its model, and whoever looks may see it."""
    pk = User.objects.latest("pk").pk
    for text, leads in (
        (f"user:{pk}", True),
        (f"auth.User:{pk}:mail", True),
        (f"users:{pk}", False),
        (f"shop.user:{pk}", False),
        ("user", False),
        ("user:", False),
    ):
        query = {"backend": "postgres", "key": text}
        shown = reader.get(f"{LOCKS}key/", query).content.decode()
        assert (f'href="/admin/auth/user/{pk}/change/">user {pk}</a>' in shown) == leads
        assert "/admin/auth/user/" not in browser.get(f"{LOCKS}key/", query).content.decode()


@pytest.mark.usefixtures("kept")
def test_spoiled_release_is_left_out(reader: Client, key: str) -> None:
    """The pages show the rest."""
    spoiled: list[tuple[Any, Any]] = [
        ({}, {}),
        ({"held_for": "x", "waited": None}, {"host": 5}),
        ([], {}),
        ({"held_for": -1, "waited": 0}, {}),
        ({"held_for": 1, "waited": 1e308}, {}),
    ]
    for details, holder in spoiled:
        LockEvent.objects.create(
            backend="postgres", key=key, kind="released", details=details, holder=holder
        )
    LockEvent.objects.create(
        backend="postgres", key=key, kind="released", details={"held_for": 1, "waited": 0},
        holder={"host": 5},
    )  # fmt: skip
    answer = reader.get(f"{LOCKS}key/", {"backend": "postgres", "key": key})
    (release,) = answer.context["page"].releases
    assert (release.held, release.fence, release.holder) == ("1.000 s", None, Holder())
    assert reader.get(LOCKS).status_code == 200


def test_wrong_settings_break_no_page(browser: Client, key: str) -> None:
    """The page says which: it is the one that shows the findings of the checks."""
    take(key, task_id="t-1")
    query = {"backend": "postgres", "begins": key}
    with override_settings(DISTLOCK_TASK_URL="nonsense", DISTLOCK_HISTORY="nonsense"):
        text = browser.get(LOCKS, query).content.decode()
    assert "t-1</bdi>" in text
    for name in ("DISTLOCK_TASK_URL", "DISTLOCK_HISTORY"):
        assert f"{name} must be" in text


@pytest.mark.usefixtures("kept")
def test_releases_are_written_together(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each would open a connection."""
    batches: list[int] = []
    write = event_log._writer._write

    def count(using: str, events: list[event_log._Waiting], bound: float | None) -> None:
        batches.append(len(events))
        write(using, events, bound)

    monkeypatch.setattr(event_log._writer, "_write", count)
    monkeypatch.setattr(event_log, "GATHER", 60)
    for _ in range(5):
        with distlock(key, backend="postgres"):
            pass
    assert event_log.finish()
    assert batches == [5]


@pytest.mark.usefixtures("kept")
def test_part_of_the_releases_is_kept(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As dice say."""
    dice = iter((0.6, 0.4, 0.5))
    monkeypatch.setattr("django_distlock.process.event_log.random.random", lambda: next(dice))
    with override_settings(DISTLOCK_HISTORY=0.5):
        for each in "abc":
            with distlock(f"{key}-{each}", backend="postgres"):
                pass
        assert event_log.finish()
    kept = LockEvent.objects.filter(key__startswith=key).values_list("key", flat=True)
    assert [*kept] == [f"{key}-b"]


def test_callers_are_told_apart() -> None:
    """By their task, else by their thread; who is not known is nobody's caller."""
    known = Holder(host="h", pid=1, thread="t")
    assert known.is_caller(Holder(host="h", pid=1, thread="t"))
    assert not known.is_caller(Holder(host="h", pid=1, thread="u"))
    assert Holder(host="h", pid=1, task_id="a").is_caller(Holder(task_id="a"))
    assert not Holder(host="h", pid=1, task_id="a").is_caller(Holder(host="h", pid=1, task_id="b"))
    assert not Holder().is_caller(Holder())
