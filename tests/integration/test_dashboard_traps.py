"""What has once gone wrong on the dashboard, or nearly."""

from __future__ import annotations

import re
import subprocess
import threading
import unicodedata
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any, ClassVar
from unittest.mock import patch
from urllib.parse import urlencode, urljoin
from zoneinfo import ZoneInfo

import pytest
from django.conf import settings
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connections, models
from django.test import Client, override_settings
from django.utils import timezone

from django_distlock import lock_backends
from django_distlock.backends.memory import MemoryBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant, Holder, Record
from django_distlock.inspection import Operation, asking, pause, summary
from django_distlock.inspection.diagnosis import accept_loss, diagnose
from django_distlock.inspection.history import _counted, history
from django_distlock.models import FenceCounter, HeldLock, LockEvent
from django_distlock.process import event_log
from tests.contract.aliases import alias_like
from tests.contract.helpers import there
from tests.contract.locking import eventually
from tests.redis_servers import private_redis

from .admin_settings import LOCKS
from .admin_site import browser_of, user_who_may
from .databases import APP, Routed, here
from .operating import DEAD, PATIENCE, no_event_of
from .test_dashboard import key_page, page, take
from .test_dashboard_operations import OPERATE, confirmed, form

BROKEN = {
    "unset": {"BACKEND": settings.DISTLOCK["default"]["BACKEND"], "TTL": -1},
    "nowhere": {
        "BACKEND": settings.DISTLOCK["default"]["BACKEND"],
        "OPTIONS": {"using": "no such database"},
    },
}


#: Operations on a holder.
ON_HOLDERS = [Operation.FORCE_RELEASE, Operation.EXPIRE_SOON, Operation.REQUEST_STOP]


def test_narrower_permission_of_a_project_holds(
    browser: Client, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every page of the dashboard."""
    take("postgres", key)
    asked = "django_distlock.admin.LockDashboard.has_view_permission"
    monkeypatch.setattr(asked, lambda *_: False)
    pages = [LOCKS, f"{LOCKS}key/?backend=postgres&key={key}", f"{LOCKS}cleanup/"]
    assert {browser.get(each).status_code for each in pages} == {403}
    assert browser.post(OPERATE, confirmed(Operation.FORCE_RELEASE, key)).status_code == 403
    assert lock_backends["postgres"].read(key) is not None


def test_project_without_backends_has_no_keys(browser: Client) -> None:
    """A search finds nothing there."""
    with override_settings(DISTLOCK={}):
        assert browser.get(LOCKS).status_code == 200
        assert browser.get(f"{LOCKS}key/?backend=&key=x").status_code == 404


def test_next_holder_is_not_the_one_that_was_seen(browser: Client, key: str) -> None:
    """What was confirmed is about the holder of the page before, and not about a later one."""
    store = lock_backends["postgres"]
    for operation in ON_HOLDERS:
        first = store.acquire(key, new_token(), 60)
        assert isinstance(first, Grant)
        seen = browser.post(OPERATE, form(operation, key)).context["keys"][0].seen
        store.release(first)
        take("postgres", key)
        before = store.read(key)
        sent = confirmed(operation, key, target=[seen])
        text = browser.post(OPERATE, sent, follow=True).content.decode()
        assert f"{key} has a new holder" in text
        assert store.read(key) == before
        assert no_event_of(key)
        again = browser.post(OPERATE, form(operation, key)).context["keys"][0].seen
        browser.post(OPERATE, confirmed(operation, key, target=[again]))
        assert store.read(key) != before
        store.force_release(key)
        event_log.finish()
        LockEvent.objects.filter(key=key).delete()


@pytest.mark.parametrize("alias", ["postgres", "redis"])
def test_row_of_a_shared_key_is_one_holder(browser: Client, key: str, alias: str) -> None:
    """It alone is shown and asked or taken; the page of the key means all who are seen with it."""
    store = lock_backends[alias]
    granted = [
        store.acquire(key, new_token(), 60, Holder(host=f"h-{each}"), permits=None)
        for each in range(4)
    ]
    fences = [each.fence for each in granted]
    rows = [urlencode({"backend": alias, "key": key, "fence": each}) for each in fences]

    def targets(text: str) -> list[str]:
        return [*map(unescape, re.findall(r'name="target" value="([^"]*)"', text))]

    def sent(operation: Operation, *chosen: str) -> tuple[str, list[str], str]:
        asked = browser.post(OPERATE, form(operation, target=chosen)).content.decode()
        order = confirmed(operation, target=targets(asked))
        done = browser.post(OPERATE, order, follow=True).content.decode()
        return asked, sorted(re.findall(r"<bdi>(h-\d)</bdi>", asked)), done

    assert sorted(targets(page(browser, backend=alias, begins=key))) == sorted(rows)
    asked, shown, done = sent(Operation.FORCE_RELEASE, rows[1])
    assert "3 others share the key, and keep it" in asked
    assert shown == ["h-1"]
    assert "1 lock force-released." in done
    assert f"Still held: 3 others share {key}." in done
    asked, shown, done = sent(Operation.REQUEST_STOP, rows[0], rows[2])
    assert shown == ["h-0", "h-2"]
    assert "Stop requested for 2 locks." in done
    stopped = {each.fence for each in store.records.sharing(key) if each.stop_requested_at}
    assert stopped == {fences[0], fences[2]}
    # A pause is of the key, whatever the rows are.
    assert "1 key paused." in sent(Operation.PAUSE, rows[0], rows[2])[2]
    assert f"{key} has a new holder" in sent(Operation.FORCE_RELEASE, rows[1])[0]
    asked, shown, done = sent(Operation.FORCE_RELEASE, *targets(key_page(browser, alias, key)))
    assert shown == ["h-0", "h-2", "h-3"]
    assert "3 locks force-released." in done
    assert "Still held" not in done
    assert store.read(key) is None


def test_holder_that_cannot_be_shortened_is_in_no_others_way(browser: Client, key: str) -> None:
    """Each who shares a key is asked; what failed for some of them is told once."""
    store = lock_backends["postgres"]
    for ttl in (None, 60, None, 60):
        store.acquire(key, new_token(), ttl, permits=None)
    seen = [("fence", each) for each in (1, 2, 3, 4)]
    target = urlencode([("backend", "postgres"), ("key", key), *seen])
    order = confirmed(Operation.EXPIRE_SOON, target=[target])
    done = unescape(browser.post(OPERATE, order, follow=True).content.decode())
    assert done.count("has no expiry, so it cannot be shortened") == 1
    assert "2 leases shortened." in done


def test_rows_of_a_shared_key_are_told_apart(browser: Client, key: str) -> None:
    """A refresh finds each again by its name."""
    for _ in range(3):
        lock_backends["postgres"].acquire(key, new_token(), 60, permits=None)
    rows = re.findall(r'data-row="([^"]*)"', page(browser, backend="postgres", begins=key))
    assert len(rows) == len(set(rows)) == 3


@pytest.mark.parametrize("operation", ON_HOLDERS)
def test_next_holder_of_the_last_moment_is_spared(
    browser: Client, key: str, operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key changes hands behind all that the page looks at: the store itself compares.

    That each store does, `tests/contract/test_operators.py` sees.
    """
    store = lock_backends["postgres"]
    first = store.acquire(key, new_token(), 60)
    assert isinstance(first, Grant)
    target = [urlencode({"backend": "postgres", "key": key, "fence": first.fence})]
    is_asked = operation in (Operation.EXPIRE_SOON, Operation.REQUEST_STOP)
    name = "_request_stop" if is_asked else f"_{operation.value}"
    asked = getattr(store, name)
    after: list[Record | None] = []

    def hand_on(*args: Any, **more: Any) -> Any:
        store.release(first)
        take("postgres", key)
        after.append(store.read(key))
        return asked(*args, **more)

    monkeypatch.setattr(store, name, hand_on)
    sent = confirmed(operation, key, target=target)
    text = browser.post(OPERATE, sent, follow=True).content.decode()
    assert [store.read(key)] == after != [None]
    assert f"{key} has a new holder" in text
    assert no_event_of(key)


def test_operations_are_in_no_transaction_of_the_request(
    browser: Client, operator: User, log: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite has one writer for a file; elsewhere an error of the answer would undo the log."""
    for alias in ("default", "sqlite"):
        monkeypatch.setitem(connections[alias].settings_dict, "ATOMIC_REQUESTS", True)
    take("sqlite", key)
    over = HeldLock.objects.using("sqlite").filter(key=key)
    target = [urlencode({"backend": "sqlite", "key": key})]
    sent = confirmed(Operation.PAUSE, target=target)
    assert "1 key paused." in browser.post(OPERATE, sent, follow=True).content.decode()
    over.update(free_at=lock_backends["sqlite"].clock() - timedelta(hours=2))
    browser.post(f"{LOCKS}cleanup/", {"backend": "sqlite", "hours": "1"})
    assert not over.exists()
    assert log.objects.filter(user=operator).count() == 2


def assert_past_expiry_is_counted(alias: str) -> None:
    """Check the number against the list. What other tests have left ends in the meantime."""
    store = lock_backends[alias]
    least = len(store.expired(limit=10_000))
    counted = summary(alias).past_expiry.number
    assert least <= counted <= len(store.expired(limit=10_000))


@pytest.mark.usefixtures("every_backend")
@pytest.mark.parametrize("alias", ["postgres", "sqlite", "mariadb", "memory"])
def test_lease_that_nobody_gave_back_is_counted_and_named(
    browser: Client, key: str, alias: str
) -> None:
    """On its tile, in a list with its dead holder, and on the page of its key."""
    store = lock_backends[alias]
    grant = store.acquire(key, new_token(), 0.1, Holder(host="grave", process="worker", pid=4711))
    assert isinstance(grant, Grant)
    assert eventually(lambda: store.read(key) is None, PATIENCE)
    assert_past_expiry_is_counted(alias)
    [over] = store.expired(key)
    assert (over.key, over.fence, over.holder.pid) == (key, grant.fence, 4711)
    text = page(browser, backend=alias)
    assert "Expired, not released" in text
    listed = text[text.index('id="distlock-expired"') :]
    assert "Their places are free; others may still hold a shared key." in listed
    assert key in listed
    assert "grave worker[4711]" in listed
    shown = key_page(browser, alias, key)
    assert "expired, not released" in shown
    assert "grave worker[4711]" in shown
    assert "not held" not in shown
    take(alias, key)
    assert list(store.expired(key)) == []
    assert_past_expiry_is_counted(alias)


def test_outage_is_the_first_thing(browser: Client) -> None:
    """In front of all else, in red; with none that answers, each number of locks is a dash."""
    for live in ({}, {"live": "1"}):
        with override_settings(DISTLOCK={"broken": DEAD}):
            text = page(browser, **live)
        begin = text.index('role="alert"')
        assert begin < text.index('data-part="cards"')
        assert '<li class="error"><strong>broken:</strong>' in text
        assert text.count("<strong>\N{EN DASH}</strong>") == 5
        assert "At least one backend is unavailable" in text
        assert "No locks match" not in text
        assert live or begin < text.index("distlock-live")


class Hung(MemoryBackend):
    """Answers when it is told to."""

    asked: ClassVar[list[str]] = []
    goes_on = threading.Event()

    def _time(self) -> datetime:
        self.asked.append("the time")
        assert self.goes_on.wait(20)
        return super()._time()

    def _list(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("asked although it is silent")

    _counts: Any = _list
    _states: Any = _list
    _expired: Any = _list


def test_store_that_hangs_is_asked_once(
    browser: Client, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page tells of it, and shows what the others answer."""
    take("postgres", key)
    monkeypatch.setattr(asking, "PATIENCE", 0.1)
    path = f"{__name__}.{Hung.__qualname__}"
    both = {"hung": {"BACKEND": path}, "postgres": settings.DISTLOCK["postgres"]}
    with override_settings(DISTLOCK=both):
        text = page(browser, begins=key)
        others = [f"{LOCKS}cleanup/", f"{LOCKS}key/?backend=&key={key}-other"]
        said = [browser.get(each).content.decode() for each in others]
    Hung.goes_on.set()
    assert "<strong>hung:</strong> The lock store &#x27;hung&#x27; did not answer" in text
    assert key in text
    assert all("&#x27;hung&#x27; did not answer" in each for each in said)
    assert Hung.asked == ["the time"]


def test_stores_that_no_thread_can_ask_are_outages(browser: Client) -> None:
    """The page shows them, for it may be wanted then."""
    with patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
        text = page(browser)
    for alias in settings.DISTLOCK:
        assert f"<strong>{alias}:</strong> The lock store &#x27;{alias}&#x27; could not be" in text


def test_stores_are_asked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answers only when the others have been asked as well."""
    all_asked, time = threading.Barrier(3), MemoryBackend._time
    monkeypatch.setattr(MemoryBackend, "_time", lambda each: (all_asked.wait(20), time(each))[1])
    monkeypatch.setattr(asking, "PATIENCE", 20)
    with override_settings(DISTLOCK=dict.fromkeys("abc", settings.DISTLOCK["memory"])):
        assert asking.silent() == {}


@pytest.mark.usefixtures("unknown_redis")
def test_lost_data_is_said_above_all_else(browser: Client) -> None:
    """Until an operator accepts it; where nothing was lost, or is remembered, it is silent."""
    with private_redis() as server:
        own = {**settings.DISTLOCK["redis"], "OPTIONS": {"url": server.url}}
        with override_settings(DISTLOCK={"own": own}):
            store: Any = lock_backends["own"]
            assert "has lost its data" not in page(browser)
            diagnose(["own"])
            assert "has lost its data" not in page(browser)
            store.store.command("FLUSHALL")
            texts = [page(browser), page(browser, live="1")]
            accept_loss("own", "ada")
            assert "has lost its data" not in page(browser)
    for text in texts:
        assert text.index("This Redis has lost its data") < text.index('data-part="cards"')


def test_outage_of_one_makes_sums_the_least(browser: Client, key: str) -> None:
    """Of the others, as far as is known."""
    take("postgres", key)
    both = {"broken": DEAD, "postgres": settings.DISTLOCK["postgres"]}
    with override_settings(DISTLOCK=both):
        text = page(browser, begins=key)
    assert re.search(r"<strong>≥ \d+</strong> <span>Held</span>", text)
    assert key in text
    assert 'role="alert"' not in page(browser)


def test_backend_that_is_set_up_wrongly_is_told(browser: Client, key: str) -> None:
    """On its own page and before an operation; and nothing else suffers from it."""
    take("postgres", key)
    for alias, wrong in BROKEN.items():
        target = urlencode({"backend": alias, "key": key})
        both = {alias: wrong, "postgres": settings.DISTLOCK["postgres"]}
        with override_settings(DISTLOCK=both):
            answer = browser.get(f"{LOCKS}key/?{target}")
            assert answer.status_code == 503
            assert "errornote" in answer.content.decode()
            asked = browser.post(OPERATE, {**form(Operation.PAUSE), "target": [target]})
            assert "errornote" in asked.content.decode()
            browser.post(OPERATE, {**confirmed(Operation.PAUSE), "target": [target]})
            assert browser.get("/admin/django_distlock/fencecounter/").status_code == 403
            assert f"{key}</bdi>" in page(browser, begins=key)
            assert browser.get(f"{LOCKS}cleanup/").status_code == 200


def test_events_are_offered_to_whom_they_are_open(browser: Client, operator: User) -> None:
    """The cards of events are numbers alone for the others."""
    address = "/admin/django_distlock/lockevent/"
    assert address not in page(browser)
    operator.is_superuser = True
    operator.save()
    assert f'href="{address}?kind=lost"' in page(browser)


def test_one_comes_back_to_where_one_was(browser: Client, key: str) -> None:
    """To the filtered list or to the key, and to no other site."""
    take("postgres", key)
    for back, expected in (
        ("?begins=a%20b&state=held", f"{LOCKS}?begins=a+b&state=held"),
        ("key", f"{LOCKS}key/?backend=postgres&key={key}"),
        ("https://evil.example/", LOCKS),
        ("", LOCKS),
    ):
        sent = confirmed(Operation.REQUEST_STOP, key, back=back)
        assert browser.post(OPERATE, sent)["Location"] == expected


def test_numbers_of_a_holder_stay_as_they_are(browser: Client, key: str) -> None:
    """An order's number has no thousands, and what is nested is JSON."""
    take("postgres", key, metadata={"order": 1234567, "tags": ["é", None]})
    with override_settings(USE_THOUSAND_SEPARATOR=True):
        text = key_page(browser, "postgres", key)
    assert "<bdi>1234567</bdi>" in text
    assert "[&quot;é&quot;, null]" in text


def test_lines_for_a_shell_are_for_a_shell(browser: Client) -> None:
    """Whatever the key is: nothing is an option, and nothing turns the line around."""
    for name, shown in (
        ("plain:1", "plain:1"),
        ("a b'c", "'a b'\"'\"'c'"),
        ("--help", "-- --help"),
        ("\u202eevil\\'", r"$'\u202eevil\\\''"),
        ("a\u00a0b\u00ad\U000e0001", r"$'a\u00a0b\u00ad\U000e0001'"),
    ):
        answer = browser.get(f"{LOCKS}key/", {"backend": "postgres", "key": name})
        line = f"python manage.py distlock_show --backend postgres {shown}"
        assert answer.context["page"].commands[0][1] == line
        echo = ["bash", "-c", f"printf %s {shown.removeprefix('-- ')}"]
        assert subprocess.check_output(echo, env={"LC_ALL": "C.UTF-8"}).decode() == name


def test_operators_are_named_to_who_may_view_events(
    reader: Client, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The permission to look at locks shows no operator and no reason; a project may hide more."""
    pause(key, 600, backend="postgres", actor="ann-the-operator", reason="a private matter")
    rows, name = "/admin/django_distlock/fencecounter/", lock_backends["postgres"].queues.name_of
    guess = {"q": key, "paused_by__startswith": "ann"}

    def pages(browser: Client) -> tuple[int, list[str]]:
        return browser.get(rows, guess).status_code, [
            key_page(browser, "postgres", key),
            browser.get(rows, {"q": key}).content.decode(),
            browser.get(f"{rows}{quote(name(key))}/change/").content.decode(),
        ]

    with user_who_may(Operation.VIEW) as viewer:
        viewer.user_permissions.add(Permission.objects.get(codename="view_fencecounter"))
        refused = [pages(browser_of(viewer))]
    status, told = pages(reader)
    asked = "django_distlock.admin.LockEventAdmin.has_view_permission"
    monkeypatch.setattr(asked, lambda *_: False)
    refused.append(pages(reader))
    assert status == 200
    assert [each for each in told if "ann-the-operator" not in each] == []
    assert "a private matter" in told[0]
    for status, seen in refused:
        assert status == 400
        assert "Paused until" in seen[0]
        assert "a private matter" not in seen[0]
        assert [each for each in seen if key not in each or "ann-the-operator" in each] == []


def test_what_cannot_be_seen_is_shown_as_an_escape(reader: Client, key: str) -> None:
    """No key, holder, actor or reason forges a line, hides a character or turns a text around."""
    bad = "\u202e\u200b\x1b\u2028\u3164\ufe0f\u2800\U000e0100"
    escapes = r"\u202e\u200b\x1b\u2028\u3164\ufe0f\u2800\U000e0100"
    name = f"{key}{bad}end"
    take("postgres", name, host=f"host{bad}", process=bad, pid=1, metadata={f"of{bad}": bad})
    pause(name, 600, backend="postgres", actor=f"ann{bad}", reason=f"why{bad}")
    event = LockEvent.objects.create(
        backend="postgres", key=name, kind="forced", actor=bad, reason=bad, holder={"host": bad}
    )
    for address in (
        f"heldlock/?{urlencode({'begins': key})}",
        f"heldlock/key/?{urlencode({'backend': 'postgres', 'key': name})}",
        f"fencecounter/?{urlencode({'q': key})}",
        f"lockevent/?{urlencode({'q': key})}",
        f"lockevent/{event.pk}/change/",
    ):
        text = reader.get(f"/admin/django_distlock/{address}").content.decode()
        assert not set(bad) & set(text), address
        assert f"{key}{escapes}end" in text, address
    asked = reader.post(OPERATE, form(Operation.RESUME, name)).content.decode()
    assert not set(bad) & set(asked)
    event.delete()


def test_counters_and_events_are_readable(reader: Client, key: str) -> None:
    """Fences as one types them, times of this zone to the second, and a search for any key."""
    odd, rows = f"{key} a b é", "/admin/django_distlock"
    pause(odd, 600, backend="postgres", actor="ann")
    # Past the manager, which changes none.
    models.QuerySet.update(FenceCounter.objects.filter(key=odd), fence=12_345_678)
    event = LockEvent.objects.create(backend="postgres", key=odd, kind="lost", fence=12_345_678)
    with override_settings(USE_THOUSAND_SEPARATOR=True, TIME_ZONE="Europe/Berlin"):
        for model in ("fencecounter", "lockevent"):
            text = reader.get(f"{rows}/{model}/", {"q": odd}).content.decode()
            assert odd in text
            assert "12345678" in text
            # It is the beginning of a key, and not any word of it.
            assert odd not in reader.get(f"{rows}/{model}/", {"q": "a b"}).content.decode()
            # Spelt otherwise, or too long for a key.
            spelt = unicodedata.normalize("NFD", odd)
            assert odd in reader.get(f"{rows}/{model}/", {"q": spelt}).content.decode()
            assert odd not in reader.get(f"{rows}/{model}/", {"q": "ü" * 300}).content.decode()
    paused = there(FenceCounter.objects.get(key=odd).paused_until)
    text = reader.get(f"{rows}/fencecounter/", {"q": odd}).content.decode()
    assert f"{paused:%M:%S}" in text
    event.delete()


def test_address_that_names_no_row_is_no_error(reader: Client) -> None:
    """Django asks the database, and psycopg refuses NUL by an error that Django does not know."""
    for address in ("%00/history/", "../fencecounter/%00/change/"):
        assert reader.get(urljoin(LOCKS, address)).status_code in (302, 404)


def test_times_are_local_without_time_zones_in_django(reader: Client, key: str) -> None:
    """All of them: those of leases, which are aware, as those of events. Their zone is told."""
    take("postgres", key)
    with timezone.override("Asia/Kolkata"):
        for each in (page(reader), key_page(reader, "postgres", key)):
            assert "Times are in Asia/Kolkata." in each
    LockEvent.objects.create(backend="postgres", key=key, kind=LockEvent.Kind.LOST)
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Kathmandu"):
        text = key_page(reader, "postgres", key)
    LockEvent.objects.filter(key=key).delete()
    shown = re.findall(r'<time datetime="([^"]*)">([^<]*)</time>', text)
    assert len(shown) == 3
    for exact, told in shown:
        local = datetime.fromisoformat(exact).astimezone(ZoneInfo("Asia/Kathmandu"))
        assert told == f"{local:%m/%d/%Y %H:%M:%S}"


@pytest.mark.usefixtures("every_backend")
def test_events_are_listed_without_tables_of_time_zones(reader: Client, key: str) -> None:
    """MariaDB has none unless somebody has loaded them."""
    here("mariadb")
    event = LockEvent.objects.using("mariadb").create(backend="mariadb", key=key, kind="lost")
    with override_settings(DATABASE_ROUTERS=[Routed("mariadb", APP)], TIME_ZONE="Europe/Berlin"):
        query = {"q": key, "at__gte": f"{event.at - timedelta(hours=1):%Y-%m-%d %H:%M:%S}+00:00"}
        text = reader.get("/admin/django_distlock/lockevent/", query).content.decode()
    assert f"<bdi>{key}</bdi>" in text
    event.delete(using="mariadb")


def test_minutes_are_counted_without_tables_of_time_zones(key: str) -> None:
    """Also where the database keeps its times in a zone of its own."""
    here("mariadb")
    with alias_like("mariadb", TIME_ZONE="Asia/Kathmandu") as using:
        event = LockEvent.objects.using(using).create(backend="mariadb", key=key, kind="lost")
        with override_settings(DATABASE_ROUTERS=[Routed(using, APP)]):
            past = history()
        event.delete(using=using)
    assert sum(each.kinds.get("lost", 0) for each in there(past).minutes) >= 1


def test_minutes_of_an_hour_that_a_zone_has_twice_are_apart(key: str) -> None:
    """PostgreSQL keeps an instant, whatever the zone of the session."""
    now = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)
    with alias_like("default", TIME_ZONE="Europe/Berlin") as using:
        LockEvent.objects.using(using).create(backend=using, key=key, kind="lost", at=now)
        past = _counted(LockEvent.objects.using(using).filter(backend=using), now)
    assert past.minutes[-1].kinds == {"lost": 1}


def test_cleanup_removes_what_is_over(browser: Client, operator: User, log: Any, key: str) -> None:
    """Behind a page that says how much that is; the counters stay."""
    store = lock_backends["sqlite"]
    take("sqlite", f"{key}-over")
    over = HeldLock.objects.using("sqlite").filter(key=f"{key}-over")
    over.update(free_at=store.clock() - timedelta(hours=2))
    take("sqlite", f"{key}-live")
    address = f"{LOCKS}cleanup/"
    first = browser.get(address)
    assert {alias for alias, _number, _error in first.context["over"]} == set(lock_backends)
    wrong = browser.post(address, {"backend": "sqlite", "hours": "-1", "reason": ""})
    assert "Nothing was changed" in wrong.content.decode()
    sent = {"backend": "sqlite", "reason": "tidy"}
    browser.post(address, {**sent, "hours": "3"})
    assert over.exists()
    done = browser.post(address, {**sent, "hours": "1"}, follow=True)
    assert "removed." in done.content.decode()
    assert not over.exists()
    assert store.read(f"{key}-live") is not None
    assert store.counter(f"{key}-over") is not None
    assert log.objects.filter(user=operator, change_message__contains="tidy").exists()
