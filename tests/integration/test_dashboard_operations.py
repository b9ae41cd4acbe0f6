"""What people do to keys in the admin: with a permission, on a second page, and not unnoticed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape, unescape
from typing import Any
from urllib.parse import parse_qs, quote

import pytest
from django.contrib.auth.models import User
from django.test import Client, override_settings

from django_distlock import lock_backends
from django_distlock.core.wording import printable
from django_distlock.inspection import Operation
from django_distlock.models import FenceCounter, LockEvent
from tests.backends import REDIS
from tests.contract.helpers import held

from .admin_settings import LOCKS
from .admin_site import admin_project, browser_of, user_who_may
from .operating import event_of, no_event_of, other_guard
from .test_dashboard import HOSTILE, each_hostile, take

OPERATE = f"{LOCKS}operate/"
ACTS = [
    Operation.REQUEST_STOP,
    Operation.EXPIRE_SOON,
    Operation.FORCE_RELEASE,
    Operation.PAUSE,
    Operation.RESUME,
]


@pytest.fixture
def log() -> Iterator[type[Any]]:
    """Serve the admin."""
    with admin_project() as log:
        yield log


@pytest.fixture
def operator(log: type[Any]) -> Iterator[User]:
    """Give somebody who may do everything."""
    with user_who_may(Operation.VIEW, *ACTS) as user:
        yield user


@pytest.fixture
def client(operator: User) -> Client:
    """Give their browser."""
    return browser_of(operator)


def form(operation: Operation, *targets: str, **more: Any) -> dict[str, Any]:
    """Give what a form sends."""
    return {
        "operation": operation.value,
        "target": [f"backend=postgres&key={each}" for each in targets],
        **more,
    }


def confirmed(operation: Operation, *targets: str, **more: Any) -> dict[str, Any]:
    """Give what the second page sends."""
    filled = {"reason": "why not", "within": "5", "minutes": "10", "confirmed": "yes"}
    return form(operation, *targets, **{**filled, **more})


def test_first_page_says_what_will_happen_and_does_nothing(client: Client, key: str) -> None:
    """With the fence before and after."""
    fence = take("postgres", key, host="h-1")
    text = client.post(OPERATE, form(Operation.FORCE_RELEASE, key)).content.decode()
    assert "The fence moves first" in text
    assert str(fence) in text
    assert f"≥ {fence + 1}" in text
    assert "h-1" in text
    assert lock_backends["postgres"].read(key) is not None
    assert no_event_of(key)


def test_key_is_taken_with_a_reason(client: Client, operator: User, log: Any, key: str) -> None:
    """The fence moves, and the event and the admin's log say who did it, and why."""
    fence = take("postgres", key)
    answer = client.post(
        OPERATE, confirmed(Operation.FORCE_RELEASE, key, reason="stuck"), follow=True
    )
    assert answer.redirect_chain == [(LOCKS, 302)]
    assert "Take the key from its holder: 1 key." in answer.content.decode()
    assert lock_backends["postgres"].read(key) is None
    counter = lock_backends["postgres"].counter(key)
    assert counter is not None
    assert counter.fence > fence
    event = event_of(key)
    assert (event.kind, event.actor, event.reason, event.fence) == (
        LockEvent.Kind.FORCED, operator.username, "stuck", fence
    )  # fmt: skip
    entry = log.objects.get(object_repr=key)
    assert entry.user_id == operator.pk
    assert "stuck" in entry.change_message
    assert client.get(f"/admin/{entry.get_admin_url().removeprefix('/admin/')}").status_code == 302


def test_several_keys_at_once(client: Client, key: str) -> None:
    """Each is dealt with by itself, and what was not there is told."""
    for each in "ab":
        take("postgres", f"{key}-{each}")
    answer = client.post(
        OPERATE,
        confirmed(Operation.FORCE_RELEASE, f"{key}-a", f"{key}-gone", f"{key}-b"),
        follow=True,
    )
    text = answer.content.decode()
    assert "2 keys." in text
    assert f"nothing to do: {key}-gone." in text
    assert all(lock_backends["postgres"].read(f"{key}-{each}") is None for each in "ab")


def written_out(text: str) -> list[str]:
    """Give the keys that a second page names, as they are read; one with a tag is not whole."""
    for wrong in ("<script>alert", "<b>host"):
        assert wrong not in text
    return [unescape(each) for each in re.findall(r'class="key"><bdi>([^<]*)</bdi>', text)]


def chosen_again(text: str) -> list[str]:
    """Give the keys that a second page sends on."""
    values = re.findall(r'name="target" value="([^"]*)"', text)
    return [key for each in values for key in parse_qs(unescape(each))["key"]]


@each_hostile
@pytest.mark.parametrize("operation", ACTS)
def test_hostile_key_is_text_on_the_second_page(
    client: Client, operation: Operation, hostile: str
) -> None:
    """Of each operation, also where it is shown again; what it sends on is the same key."""
    take("postgres", hostile, host="<b>host</b>")
    target, reason = quote(hostile), HOSTILE["script"] * 20
    try:
        asked = client.post(OPERATE, form(operation, target, back="key")).content.decode()
        again = client.post(OPERATE, confirmed(operation, target, reason=reason)).content.decode()
    finally:
        lock_backends["postgres"].force_release(hostile)
    for text in (asked, again):
        assert written_out(text) == [printable(hostile)]
        assert chosen_again(text) == [hostile]
        assert escape("<b>host</b>") in text
    assert "Nothing was changed." in again
    assert f'value="{escape(reason)}"' in again
    assert f"key/?backend=postgres&amp;key={quote(hostile, safe='')}".replace("%20", "+") in asked


@each_hostile
@pytest.mark.parametrize("operation", ACTS)
def test_hostile_key_is_text_in_messages(
    client: Client, operation: Operation, hostile: str
) -> None:
    """Where there was nothing to do, and where the backend is down."""
    answer = client.post(OPERATE, confirmed(Operation.RESUME, quote(hostile)), follow=True)
    assert f"there was nothing to do: {escape(printable(hostile))}." in answer.content.decode()
    down = {"BACKEND": REDIS, "OPTIONS": {"url": "redis://127.0.0.1:1"}}
    with override_settings(DISTLOCK={"postgres": down}):
        asked = client.post(OPERATE, form(operation, quote(hostile))).content.decode()
        done = client.post(OPERATE, confirmed(operation, quote(hostile)), follow=True)
    assert f'class="errornote">{escape(printable(hostile))}: ' in asked
    assert f"Not done to {escape(printable(hostile))}: " in done.content.decode()
    assert "<script>alert" not in asked + done.content.decode() + answer.content.decode()


def test_key_is_shortened_asked_paused_and_resumed(
    client: Client, operator: User, key: str
) -> None:
    """From the page of the key, where the browser comes back to."""
    store = lock_backends["postgres"]
    take("postgres", key, 3600)
    client.post(OPERATE, confirmed(Operation.EXPIRE_SOON, key, within="5"))
    client.post(OPERATE, confirmed(Operation.REQUEST_STOP, key, reason=""))
    record = held(store, key)
    assert record.expires_at is not None
    assert (record.expires_at - store.clock()).total_seconds() <= 5
    assert record.stop_requested_at is not None
    answer = client.post(OPERATE, confirmed(Operation.PAUSE, key, back="key"))
    assert answer["Location"] == f"{LOCKS}key/?backend=postgres&key={key}"
    counter = store.counter(key)
    assert counter is not None
    assert counter.paused_until is not None
    assert operator.username in client.get(answer["Location"]).content.decode()
    client.post(OPERATE, confirmed(Operation.RESUME, key))
    counter = store.counter(key)
    assert counter is not None
    assert counter.paused_until is None


def test_page_of_a_key_offers_what_can_be_done(client: Client, key: str) -> None:
    """To a key that is held, to one that is free, and to one that is paused."""
    address = f"{LOCKS}key/?backend=postgres&key={key}"

    def offered() -> list[str]:
        return [each.operation.value for each in client.get(address).context["acts"]]

    assert offered() == ["pause"]
    take("postgres", key)
    assert offered() == ["request_stop", "expire_soon", "force_release", "pause"]
    client.post(OPERATE, confirmed(Operation.PAUSE, key))
    client.post(OPERATE, confirmed(Operation.FORCE_RELEASE, key))
    assert offered() == ["resume"]


def test_guarded_key_is_busy(client: Client, key: str) -> None:
    """The session is named, and nothing is changed."""
    take("postgres", key)
    with other_guard("postgres", key, "elsewhere") as pid:
        answer = client.post(OPERATE, confirmed(Operation.FORCE_RELEASE, key), follow=True)
    assert f"guarded by a transaction of session {pid}" in answer.content.decode()
    assert lock_backends["postgres"].read(key) is not None


@pytest.mark.parametrize("operation", ACTS)
def test_each_needs_its_own_permission(log: type[Any], key: str, operation: Operation) -> None:
    """All others do not help; and nobody is offered what they may not do."""
    fence = take("postgres", key)
    others = [each for each in ACTS if each is not operation]
    with user_who_may(Operation.VIEW, *others) as user:
        client = browser_of(user)
        assert client.post(OPERATE, form(operation, key)).status_code == 403
        assert client.post(OPERATE, confirmed(operation, key)).status_code == 403
        text = client.get(LOCKS).content.decode()
        assert f'value="{operation.value}"' not in text
        assert all(f'value="{each.value}"' in text for each in others)
    record, counter = lock_backends["postgres"].read(key), lock_backends["postgres"].counter(key)
    assert record is not None
    assert record.fence == fence
    assert record.stop_requested_at is None
    assert counter is not None
    assert counter.paused_until is None
    assert no_event_of(key)


def test_viewer_is_offered_nothing(log: type[Any], key: str) -> None:
    """No checkbox, no button."""
    take("postgres", key)
    with user_who_may(Operation.VIEW) as user:
        client = browser_of(user)
        pages = (client.get(LOCKS), client.get(f"{LOCKS}key/?backend=postgres&key={key}"))
    for answer in pages:
        text = answer.content.decode()
        assert 'name="target"' not in text
        assert 'name="operation"' not in text


def test_form_of_another_site_is_refused(operator: User, key: str) -> None:
    """Without the token of this one."""
    take("postgres", key)
    client = browser_of(operator, enforce_csrf_checks=True)
    answer = client.post(OPERATE, confirmed(Operation.FORCE_RELEASE, key))
    assert answer.status_code == 403
    assert lock_backends["postgres"].read(key) is not None


def test_what_is_no_order_does_nothing(client: Client, key: str) -> None:
    """An address, a form without a reason or a key, and one that makes no sense."""
    take("postgres", key)
    answer = client.get(OPERATE, confirmed(Operation.FORCE_RELEASE, key))
    assert answer["Location"] == LOCKS
    answer = client.post(OPERATE, confirmed(Operation.FORCE_RELEASE, key, reason="  "))
    assert "Nothing was changed." in answer.content.decode()
    answer = client.post(OPERATE, form(Operation.FORCE_RELEASE), follow=True)
    assert "No key was chosen." in answer.content.decode()
    for wrong in (
        {"operation": "cleanup"},
        {"operation": ""},
        {"target": ["backend=nobody&key=a"]},
    ):
        sent = {**confirmed(Operation.FORCE_RELEASE, key), **wrong}
        assert client.post(OPERATE, sent).status_code == 404
    assert lock_backends["postgres"].read(key) is not None
    assert no_event_of(key)


def test_counters_and_events_are_to_read(log: type[Any], key: str) -> None:
    """Not even an owner of everything adds, changes or deletes one."""
    fence = take("postgres", key)
    LockEvent.objects.create(backend="postgres", key=key, kind=LockEvent.Kind.LOST)
    root = User.objects.create_superuser(f"{key}-root")
    try:
        client = browser_of(root)
        counter = FenceCounter.objects.get(key=key)
        for model, pk in (("fencecounter", counter.pk), ("lockevent", event_of(key).pk)):
            base = f"/admin/django_distlock/{model}/"
            listed = client.get(base, {"q": key}).content.decode()
            assert key in listed
            assert "action-checkbox" not in listed
            from django.contrib.admin.utils import quote

            one = f"{base}{quote(pk)}/"
            shown = client.get(f"{one}change/")
            assert shown.status_code == 200
            assert 'name="_save"' not in shown.content.decode()
            assert client.get(f"{base}add/").status_code == 403
            assert client.post(f"{one}delete/", {"post": "yes"}).status_code == 403
            assert client.post(f"{one}change/", {"fence": 1}).status_code == 403
        assert FenceCounter.objects.get(key=key).fence == fence
    finally:
        root.delete()
