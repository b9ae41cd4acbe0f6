"""What has once gone wrong on the dashboard, or nearly."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import models
from django.test import Client, override_settings

from django_distlock import lock_backends
from django_distlock.core.holders import Holder
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant, Record
from django_distlock.inspection import Operation, pause, summary
from django_distlock.inspection.diagnosis import accept_loss, diagnose
from django_distlock.models import FenceCounter, HeldLock, LockEvent
from tests.contract.locking import eventually
from tests.redis_servers import private_redis

from .admin_settings import LOCKS
from .admin_site import admin_project, browser_of, user_who_may
from .operating import PATIENCE, no_event_of
from .test_dashboard import key_page, page, take
from .test_dashboard_operations import OPERATE, confirmed, form

BROKEN = {
    "unset": {"BACKEND": settings.DISTLOCK["default"]["BACKEND"], "TTL": -1},
    "nowhere": {
        "BACKEND": settings.DISTLOCK["default"]["BACKEND"],
        "OPTIONS": {"using": "no such database"},
    },
}


@pytest.fixture
def log() -> Iterator[type[Any]]:
    """Serve the admin."""
    with admin_project() as log:
        yield log


@pytest.fixture
def operator(log: type[Any]) -> Iterator[User]:
    """Give somebody who may do everything that is done to keys."""
    with user_who_may(*Operation) as user:
        yield user


@pytest.fixture
def client(operator: User) -> Client:
    """Give their browser."""
    return browser_of(operator)


@pytest.mark.parametrize(
    "operation", [Operation.FORCE_RELEASE, Operation.EXPIRE_SOON, Operation.REQUEST_STOP]
)
def test_next_holder_is_not_the_one_that_was_seen(
    client: Client, key: str, operation: Operation
) -> None:
    """What was confirmed is about the holder of the page before, and not about a later one."""
    store = lock_backends["postgres"]
    first = store.acquire(key, new_token(), 60)
    assert isinstance(first, Grant)
    seen = client.post(OPERATE, form(operation, key)).context["keys"][0].seen
    store.release(first)
    take("postgres", key)
    before = store.read(key)
    sent = confirmed(operation, key, target=[seen])
    text = client.post(OPERATE, sent, follow=True).content.decode()
    assert f"somebody else holds {key} by now" in text
    assert store.read(key) == before
    assert no_event_of(key)
    again = client.post(OPERATE, form(operation, key)).context["keys"][0].seen
    client.post(OPERATE, confirmed(operation, key, target=[again]))
    assert store.read(key) != before


@pytest.mark.parametrize(
    ("operation", "alias"),
    [
        (operation, alias)
        for operation in (Operation.FORCE_RELEASE, Operation.EXPIRE_SOON, Operation.REQUEST_STOP)
        for alias in ("postgres", "redis", "mariadb", "memory", "advisory")
        # The leases of sessions do not end at a time.
        if (operation, alias) != (Operation.EXPIRE_SOON, "advisory")
    ],
)
def test_next_holder_of_the_last_moment_is_spared(
    client: Client, key: str, operation: Operation, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key changes hands behind all that the page looks at: the store itself compares."""
    store = lock_backends[alias]
    first = store.acquire(key, new_token(), 60)
    assert isinstance(first, Grant)
    target = [urlencode({"backend": alias, "key": key, "fence": first.fence})]
    name = "_shorten" if operation is Operation.EXPIRE_SOON else f"_{operation.value}"
    asked = getattr(store, name)
    after: list[Record | None] = []

    def hand_on(*args: Any, **more: Any) -> Any:
        store.release(first)
        take(alias, key)
        after.append(store.read(key))
        return asked(*args, **more)

    monkeypatch.setattr(store, name, hand_on)
    sent = confirmed(operation, key, target=target)
    text = client.post(OPERATE, sent, follow=True).content.decode()
    assert [store.read(key)] == after != [None]
    assert f"somebody else holds {key} by now" in text
    assert no_event_of(key)


def assert_past_expiry_is_counted(alias: str) -> None:
    """Check the number against the list. What other tests have left ends in the meantime."""
    store = lock_backends[alias]
    least = len(store.expired(limit=10_000))
    counted = summary(alias).past_expiry.number
    assert least <= counted <= len(store.expired(limit=10_000))


@pytest.mark.parametrize("alias", ["postgres", "postgres_orm", "sqlite", "mariadb", "memory"])
def test_lease_that_nobody_gave_back_is_counted_and_named(
    client: Client, key: str, alias: str
) -> None:
    """On its tile, in a list with its dead holder, and on the page of its key."""
    store = lock_backends[alias]
    grant = store.acquire(key, new_token(), 0.1, Holder(host="grave", process="worker", pid=4711))
    assert isinstance(grant, Grant)
    assert eventually(lambda: store.read(key) is None, PATIENCE)
    assert_past_expiry_is_counted(alias)
    [over] = store.expired(key)
    assert (over.key, over.fence, over.holder.pid) == (key, grant.fence, 4711)
    text = page(client, backend=alias)
    assert "Held past expiry" in text
    listed = text[text.index('id="distlock-expired"') :]
    assert key in listed
    assert "grave worker[4711]" in listed
    shown = key_page(client, alias, key)
    assert "past expiry, not released" in shown
    assert "grave worker[4711]" in shown
    assert "nobody holds it" not in shown
    take(alias, key)
    assert list(store.expired(key)) == []
    assert_past_expiry_is_counted(alias)


@pytest.mark.parametrize("live", [{}, {"live": "1"}])
def test_outage_is_the_first_thing(client: Client, live: dict[str, str]) -> None:
    """In front of all else, in red; with none that answers, each number of locks is a dash."""
    down = {
        "BACKEND": settings.DISTLOCK["redis"]["BACKEND"],
        "OPTIONS": {"url": "redis://127.0.0.1:1"},
    }
    with override_settings(DISTLOCK={"broken": down}):
        text = page(client, **live)
    begin = text.index('role="alert"')
    assert begin < text.index('data-part="cards"')
    assert '<li class="error"><strong>broken</strong>' in text
    assert text.count("<strong>\N{EN DASH}</strong>") == 5
    assert "nobody knows what they hold" in text
    assert "No lock is held" not in text
    if not live:
        assert begin < text.index("distlock-live")


@pytest.mark.parametrize("live", [{}, {"live": "1"}])
@pytest.mark.usefixtures("unknown_redis")
def test_lost_data_is_said_above_all_else(client: Client, live: dict[str, str]) -> None:
    """Until an operator accepts it; where nothing was lost, or is remembered, it is silent."""
    with private_redis() as server:
        own = {**settings.DISTLOCK["redis"], "OPTIONS": {"url": server.url}}
        with override_settings(DISTLOCK={"own": own}):
            store: Any = lock_backends["own"]
            assert "has lost its data" not in page(client, **live)
            diagnose(["own"])
            assert "has lost its data" not in page(client, **live)
            store.store.command("FLUSHALL")
            text = page(client, **live)
            accept_loss("own", "ada")
            assert "has lost its data" not in page(client, **live)
    assert text.index("This Redis has lost its data") < text.index('data-part="cards"')


def test_outage_of_one_makes_sums_the_least(client: Client, key: str) -> None:
    """Of the others, as far as is known."""
    take("postgres", key)
    down = {
        "BACKEND": settings.DISTLOCK["redis"]["BACKEND"],
        "OPTIONS": {"url": "redis://127.0.0.1:1"},
    }
    both = {"broken": down, "postgres": settings.DISTLOCK["postgres"]}
    with override_settings(DISTLOCK=both):
        text = page(client, begins=key)
    assert re.search(r"<strong>≥ \d+</strong> <span>Held</span>", text)
    assert key in text
    assert 'role="alert"' not in page(client)


def test_prefix_that_no_key_has_is_told(client: Client) -> None:
    """Too many bytes for a key are a slip in a form, and no error of the server."""
    for live in ({}, {"live": "1"}):
        text = page(client, begins="ü" * 300, **live)
    assert "errorlist" in page(client, begins="ü" * 300)
    assert "errorlist" not in text


@pytest.mark.parametrize("depth", [1, 200_000])
def test_cursor_that_is_no_cursor(client: Client, depth: int) -> None:
    """However it is nested: the first page comes."""
    cursor = base64.urlsafe_b64encode(b"[" * depth).decode()
    context = {"cursor": cursor, "backend": "postgres"}
    assert client.get(LOCKS, context).status_code == 200


@pytest.mark.parametrize("alias", BROKEN)
def test_backend_that_is_set_up_wrongly_is_told(client: Client, key: str, alias: str) -> None:
    """On its own page and before an operation; and nothing else suffers from it."""
    take("postgres", key)
    both = {alias: BROKEN[alias], "postgres": settings.DISTLOCK["postgres"]}
    with override_settings(DISTLOCK=both):
        answer = client.get(f"{LOCKS}key/?{urlencode({'backend': alias, 'key': key})}")
        assert answer.status_code == 503
        assert "errornote" in answer.content.decode()
        target = [urlencode({"backend": alias, "key": key})]
        asked = client.post(OPERATE, {**form(Operation.PAUSE), "target": target})
        assert "errornote" in asked.content.decode()
        client.post(OPERATE, {**confirmed(Operation.PAUSE), "target": target})
        assert client.get("/admin/django_distlock/fencecounter/").status_code == 403
        assert f"{key}</bdi>" in page(client, begins=key)
        assert client.get(f"{LOCKS}cleanup/").status_code == 200


def test_to_act_one_must_be_allowed_to_look(log: type[Any], key: str) -> None:
    """The page that asks shows who holds the key."""
    take("postgres", key)
    with user_who_may(Operation.PAUSE) as user:
        client = browser_of(user)
        assert client.post(OPERATE, form(Operation.PAUSE, key)).status_code == 403
        assert client.post(OPERATE, confirmed(Operation.PAUSE, key)).status_code == 403


def test_events_are_offered_to_whom_they_are_open(client: Client, operator: User) -> None:
    """The cards of events are numbers alone for the others."""
    events = "/admin/django_distlock/lockevent/"
    assert events not in page(client)
    operator.is_superuser = True
    operator.save()
    assert f'href="{events}?kind=lost"' in page(client)


def test_page_without_the_processor_of_requests(client: Client, key: str) -> None:
    """Its links to other pages need nothing that a project may have left out."""
    for number in range(51):
        take("postgres", f"{key}-{number:02}")
    engine: dict[str, Any] = {**settings.TEMPLATES[0]}
    engine["OPTIONS"] = {"context_processors": engine["OPTIONS"]["context_processors"][1:]}
    with override_settings(TEMPLATES=[engine]):
        assert "cursor=" in page(client, backend="postgres", begins=key)


def test_site_with_the_dashboard_alone(client: Client, key: str) -> None:
    """Events and counters need not be there."""
    take("postgres", key)
    alone = LOCKS.replace("/admin/", "/alone/")
    answer = client.get(alone, {"backend": "postgres", "begins": key})
    (row,) = answer.context["overview"].rows
    assert row.href.startswith("/alone/")
    assert client.get(row.href).status_code == 200


@pytest.mark.parametrize("back", ["?begins=a%20b&state=held", "key", "https://evil.example/", ""])
def test_one_comes_back_to_where_one_was(client: Client, key: str, back: str) -> None:
    """To the filtered list or to the key, and to no other site."""
    take("postgres", key)
    answer = client.post(OPERATE, confirmed(Operation.REQUEST_STOP, key, back=back))
    expected = {
        "key": f"{LOCKS}key/?backend=postgres&key={key}",
        "?begins=a%20b&state=held": f"{LOCKS}?begins=a+b&state=held",
    }
    assert answer["Location"] == expected.get(back, LOCKS)


def test_numbers_of_a_holder_stay_as_they_are(client: Client, key: str) -> None:
    """An order's number has no thousands, and what is nested is JSON."""
    take("postgres", key, metadata={"order": 1234567, "tags": ["é", None]})
    with override_settings(USE_THOUSAND_SEPARATOR=True):
        text = key_page(client, "postgres", key)
    assert "<bdi>1234567</bdi>" in text
    assert "[&quot;é&quot;, null]" in text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain:1", "distlock_show --backend postgres plain:1"),
        ("a b'c", "distlock_show --backend postgres 'a b'\"'\"'c'"),
        ("--help", "distlock_show --backend postgres -- --help"),
        ("\u202eevil\\'", r"distlock_show --backend postgres $'\u202eevil\\\''"),
    ],
)
def test_lines_for_a_shell_are_for_a_shell(client: Client, name: str, shown: str) -> None:
    """Whatever the key is: nothing is an option, and nothing turns the line around."""
    answer = client.get(f"{LOCKS}key/", {"backend": "postgres", "key": name})
    assert answer.context["page"].commands[0][1] == f"python manage.py {shown}"


def test_operators_are_named_to_who_may_view_events(log: type[Any], key: str) -> None:
    """The permission to look at locks shows no operator, and no reason."""
    pause(key, 600, backend="postgres", actor="ann-the-operator", reason="a private matter")
    root = User.objects.create_superuser(f"{key}-root")
    address = f"{LOCKS}key/?{urlencode({'backend': 'postgres', 'key': key})}"
    try:
        with user_who_may(Operation.VIEW) as viewer:
            seen = browser_of(viewer).get(address).content.decode()
            assert "Paused until" in seen
            assert "ann-the-operator" not in seen
            assert "a private matter" not in seen
        seen = browser_of(root).get(address).content.decode()
        assert "ann-the-operator" in seen
        assert "a private matter" in seen
    finally:
        root.delete()


def test_what_cannot_be_seen_is_shown_as_an_escape(log: type[Any], key: str) -> None:
    """No key, holder, actor or reason forges a line, hides a character or turns a text around."""
    bad = "\u202e\u200b\x1b\u2028"
    name = f"{key}{bad}end"
    root = User.objects.create_superuser(f"{key}-root")
    holder = Holder(host=f"host{bad}", process=bad, pid=1, metadata={f"of{bad}": bad})
    store = lock_backends["postgres"]
    grant = store.acquire(name, new_token(), 60, holder)
    assert isinstance(grant, Grant)
    pause(name, 600, backend="postgres", actor=f"ann{bad}", reason=f"why{bad}")
    event = LockEvent.objects.create(
        backend="postgres", key=name, kind="forced", actor=bad, reason=bad, holder={"host": bad}
    )
    try:
        client = browser_of(root)
        addresses = [
            f"{LOCKS}?{urlencode({'begins': key})}",
            f"{LOCKS}key/?{urlencode({'backend': 'postgres', 'key': name})}",
            f"/admin/django_distlock/fencecounter/?{urlencode({'q': key})}",
            f"/admin/django_distlock/lockevent/?{urlencode({'q': key})}",
            f"/admin/django_distlock/lockevent/{event.pk}/change/",
        ]
        for address in addresses:
            text = client.get(address).content.decode()
            assert not set(bad) & set(text), address
            assert f"{key}\\u202e\\u200b\\x1b\\u2028end" in text, address
        asked = client.post(OPERATE, form(Operation.RESUME, name)).content.decode()
        assert not set(bad) & set(asked)
    finally:
        store.release(grant)
        event.delete()
        root.delete()


def test_counters_and_events_are_readable(log: type[Any], key: str) -> None:
    """Fences as one types them, times of this zone to the second, and spaces in a search."""
    odd = f"{key} a b"
    fence = take("postgres", odd)
    pause(odd, 600, backend="postgres", actor="ann")
    # Past the manager, which changes none.
    models.QuerySet.update(FenceCounter.objects.filter(key=odd), fence=12_345_678)
    event = LockEvent.objects.create(backend="postgres", key=odd, kind="lost", fence=12_345_678)
    root = User.objects.create_superuser(f"{key}-root")
    try:
        client = browser_of(root)
        with override_settings(USE_THOUSAND_SEPARATOR=True, TIME_ZONE="Europe/Berlin"):
            for model in ("fencecounter", "lockevent"):
                text = client.get(f"/admin/django_distlock/{model}/", {"q": odd}).content.decode()
                assert odd in text
                assert "12345678" in text
                # It is the beginning of a key, and not any word of it.
                text = client.get(f"/admin/django_distlock/{model}/", {"q": "a b"}).content.decode()
                assert odd not in text
        paused = FenceCounter.objects.get(key=odd).paused_until
        assert paused is not None
        assert (
            f"{paused:%M:%S}"
            in client.get("/admin/django_distlock/fencecounter/", {"q": odd}).content.decode()
        )
        assert fence
    finally:
        event.delete()
        root.delete()


def test_cleanup_removes_what_is_over(client: Client, operator: User, log: Any, key: str) -> None:
    """Behind a page that says how much that is; the counters stay."""
    store = lock_backends["sqlite"]
    take("sqlite", f"{key}-over")
    over = HeldLock.objects.using("sqlite").filter(key=f"{key}-over")
    over.update(free_at=store.clock() - timedelta(hours=2))
    take("sqlite", f"{key}-live")
    address = f"{LOCKS}cleanup/"
    first = client.get(address)
    assert {alias for alias, _number, _error in first.context["over"]} == set(lock_backends)
    wrong = client.post(address, {"backend": "sqlite", "hours": "-1", "reason": ""})
    assert "Nothing was changed" in wrong.content.decode()
    sent = {"backend": "sqlite", "reason": "tidy"}
    client.post(address, {**sent, "hours": "3"})
    assert over.exists()
    done = client.post(address, {**sent, "hours": "1"}, follow=True)
    assert "removed." in done.content.decode()
    assert not over.exists()
    assert store.read(f"{key}-live") is not None
    assert store.counter(f"{key}-over") is not None
    assert log.objects.filter(user=operator, change_message__contains="tidy").exists()


def test_cleanup_needs_its_permission(log: type[Any]) -> None:
    """Nobody else is offered it."""
    with user_who_may(*[each for each in Operation if each is not Operation.CLEANUP]) as user:
        client = browser_of(user)
        assert "heldlock/cleanup/" not in page(client)
        for answer in (client.get(f"{LOCKS}cleanup/"), client.post(f"{LOCKS}cleanup/")):
            assert answer.status_code == 403
