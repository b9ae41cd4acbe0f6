"""What people do to keys in the admin: with a permission, on a second page, and not unnoticed."""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any, NoReturn
from urllib.parse import parse_qs, quote

import pytest
from django.contrib.admin.utils import quote as admin_quote
from django.contrib.auth.models import User
from django.test import Client, override_settings

from django_distlock import BackendUnavailable, lock_backends
from django_distlock.core.wording import printable
from django_distlock.inspection import Operation
from django_distlock.models import FenceCounter, LockEvent
from tests.contract.helpers import held, there

from .admin_settings import LOCKS
from .admin_site import browser_of, user_who_may
from .operating import DEAD, event_of, no_event_of, other_guard
from .test_dashboard import HOSTILE, take

OPERATE = f"{LOCKS}operate/"
ACTS = [
    Operation.REQUEST_STOP,
    Operation.EXPIRE_SOON,
    Operation.FORCE_RELEASE,
    Operation.PAUSE,
    Operation.RESUME,
]


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


def test_first_page_says_what_will_happen_and_does_nothing(browser: Client, key: str) -> None:
    """With the fence before and after."""
    fence = take("postgres", key, host="h-1")
    text = browser.post(OPERATE, form(Operation.FORCE_RELEASE, key)).content.decode()
    assert "The fence moves first" in text
    assert str(fence) in text
    assert f"≥ {fence + 1}" in text
    assert "h-1" in text
    assert lock_backends["postgres"].read(key) is not None
    assert no_event_of(key)


def test_key_is_taken_with_a_reason(browser: Client, operator: User, log: Any, key: str) -> None:
    """The fence moves, and the event and the admin's log say who did it, and why."""
    fence = take("postgres", key)
    answer = browser.post(
        OPERATE, confirmed(Operation.FORCE_RELEASE, key, reason="stuck"), follow=True
    )
    assert answer.redirect_chain == [(LOCKS, 302)]
    assert "1 lock force-released." in answer.content.decode()
    assert lock_backends["postgres"].read(key) is None
    counter = there(lock_backends["postgres"].counter(key))
    assert counter.fence > fence
    event = event_of(key)
    assert (event.kind, event.actor, event.reason, event.fence) == (
        LockEvent.Kind.FORCED, operator.username, "stuck", fence
    )  # fmt: skip
    entry = log.objects.get(object_repr=key)
    assert entry.user_id == operator.pk
    assert "stuck" in entry.change_message
    assert browser.get(f"/admin/{entry.get_admin_url().removeprefix('/admin/')}").status_code == 302


def test_several_keys_at_once(browser: Client, key: str) -> None:
    """Each is dealt with by itself, and what was not there is told."""
    for each in "ab":
        take("postgres", f"{key}-{each}")
    answer = browser.post(
        OPERATE,
        confirmed(Operation.FORCE_RELEASE, f"{key}-a", f"{key}-gone", f"{key}-b"),
        follow=True,
    )
    text = answer.content.decode()
    assert "2 locks force-released." in text
    assert f"there was nothing to do for {key}-gone." in text
    assert all(lock_backends["postgres"].read(f"{key}-{each}") is None for each in "ab")


def readable(text: str) -> str:
    """Give a page as it is read."""
    for wrong in ("<script>alert", "<b>host"):
        assert wrong not in text
    return unescape(text)


@pytest.mark.parametrize("operation", ACTS)
def test_hostile_keys_are_text_on_the_second_page(browser: Client, operation: Operation) -> None:
    """Of each operation, also where it is shown again; what it sends on are the same keys."""
    keys, reason = [*HOSTILE.values()], HOSTILE["script"] * 20
    targets = [quote(each) for each in keys]
    for each in keys:
        take("postgres", each, host="<b>host</b>")
    try:
        for each, target in zip(keys, targets, strict=True):
            text = browser.post(OPERATE, form(operation, target, back="key")).content.decode()
            back = quote(each, safe="").replace("%20", "+")
            assert f"key/?backend=postgres&amp;key={back}" in text
        asked = browser.post(OPERATE, form(operation, *targets)).content.decode()
        sent = confirmed(operation, *targets, reason=reason)
        again = browser.post(OPERATE, sent).content.decode()
    finally:
        for each in keys:
            lock_backends["postgres"].force_release(each)
    for text in (asked, again):
        named = re.findall(r'class="key"><bdi>([^<]*)</bdi>', text)
        assert [unescape(each) for each in named] == [printable(each) for each in keys]
        values = re.findall(r'name="target" value="([^"]*)"', text)
        assert [parse_qs(unescape(each))["key"] for each in values] == [[each] for each in keys]
        assert readable(text).count("<b>host</b>") == len(keys)
    assert "Nothing was changed." in again
    assert f'value="{escape(reason)}"' in again


def test_hostile_keys_are_text_in_messages(browser: Client) -> None:
    """Where there was nothing to do, and where the backend is down."""
    shown, targets = [*map(printable, HOSTILE.values())], [*map(quote, HOSTILE.values())]
    answer = browser.post(OPERATE, confirmed(Operation.RESUME, *targets), follow=True)
    nothing = readable(answer.content.decode())
    with override_settings(DISTLOCK={"postgres": DEAD}):
        answer = browser.post(OPERATE, form(Operation.PAUSE, *targets))
        asked = readable(answer.content.decode())
        answer = browser.post(OPERATE, confirmed(Operation.PAUSE, *targets), follow=True)
        done = readable(answer.content.decode())
    for each in shown:
        assert f"there was nothing to do for {each}." in nothing
        assert f'class="errornote">{each}: ' in asked
        assert f" for {each}: " in done
    assert "Failed for " in done
    assert "Not tried for " in done


def test_silent_backend_is_asked_once(
    browser: Client, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each page, however many of its keys are chosen; the keys of others are dealt with."""
    asked: list[str] = []

    def silent(*_: Any) -> NoReturn:
        asked.append(key)
        raise BackendUnavailable("no answer")

    for each in ("read", "clock"):
        monkeypatch.setattr(lock_backends["postgres"], each, silent)
    targets = [f"backend=postgres&key={key}-{each}" for each in "abc"]
    targets.append(f"backend=sqlite&key={key}")
    text = browser.post(OPERATE, form(Operation.PAUSE, target=targets)).content.decode()
    assert (text.count("no answer"), len(asked)) == (3, 1)
    sent = confirmed(Operation.PAUSE, target=targets)
    text = browser.post(OPERATE, sent, follow=True).content.decode()
    assert "1 key paused." in text
    assert f"Failed for {key}-a: no answer" in text
    assert text.count("Not tried for ") == 2


def test_key_is_shortened_asked_paused_and_resumed(
    browser: Client, operator: User, key: str
) -> None:
    """From the page of the key, where the browser comes back to."""
    store = lock_backends["postgres"]
    take("postgres", key, 3600)
    browser.post(OPERATE, confirmed(Operation.EXPIRE_SOON, key, within="5"))
    browser.post(OPERATE, confirmed(Operation.REQUEST_STOP, key, reason=""))
    record = held(store, key)
    assert (there(record.expires_at) - store.clock()).total_seconds() <= 5
    assert record.stop_requested_at is not None
    answer = browser.post(OPERATE, confirmed(Operation.PAUSE, key, back="key"))
    assert answer["Location"] == f"{LOCKS}key/?backend=postgres&key={key}"
    counter = there(store.counter(key))
    assert counter.paused_until is not None
    assert operator.username in browser.get(answer["Location"]).content.decode()
    browser.post(OPERATE, confirmed(Operation.RESUME, key))
    counter = there(store.counter(key))
    assert counter.paused_until is None


def test_page_of_a_key_offers_what_can_be_done(browser: Client, key: str) -> None:
    """To a key that is unknown, held, held without an end, paused, and free."""
    address = f"{LOCKS}key/?backend=postgres&key={key}"

    def offered() -> list[str]:
        return [each.operation.value for each in browser.get(address).context["acts"]]

    assert offered() == []
    assert "has no record of this key" in browser.get(address).content.decode()
    take("postgres", key)
    assert offered() == ["request_stop", "expire_soon", "force_release", "pause"]
    browser.post(OPERATE, confirmed(Operation.FORCE_RELEASE, key))
    take("postgres", key, None)
    assert offered() == ["request_stop", "force_release", "pause"]
    browser.post(OPERATE, confirmed(Operation.PAUSE, key))
    browser.post(OPERATE, confirmed(Operation.FORCE_RELEASE, key))
    assert offered() == ["resume"]
    browser.post(OPERATE, confirmed(Operation.RESUME, key))
    assert offered() == ["pause"]
    assert "has no record of this key" not in browser.get(address).content.decode()


def test_guarded_key_is_busy(browser: Client, key: str) -> None:
    """The session is named, and nothing is changed."""
    take("postgres", key)
    with other_guard("postgres", key, "elsewhere") as pid:
        answer = browser.post(OPERATE, confirmed(Operation.FORCE_RELEASE, key), follow=True)
    assert f"a transaction guards {key} (session {pid})" in answer.content.decode()
    assert lock_backends["postgres"].read(key) is not None


def test_each_needs_its_own_permission(log: type[Any], key: str) -> None:
    """All others do not help; and nobody is offered what they may not do."""
    fence, store = take("postgres", key, 600), lock_backends["postgres"]
    pages = (LOCKS, f"{LOCKS}?live=1", f"{LOCKS}key/?backend=postgres&key={key}")
    for operation in (*ACTS, Operation.CLEANUP, Operation.VIEW):
        others = [each for each in Operation if each is not operation]
        with user_who_may(*others) as user:
            browser, address = browser_of(user), OPERATE
            sent = [form(operation, key), confirmed(operation, key)]
            if operation is Operation.VIEW:
                # The page that asks shows who holds the key.
                sent = [form(Operation.PAUSE, key), confirmed(Operation.PAUSE, key)]
                assert {browser.get(each).status_code for each in pages} == {403}
            else:
                text = browser.get(LOCKS).content.decode()
                assert f'value="{operation.value}"' not in text
                assert all(f'value="{each.value}"' in text for each in ACTS if each in others)
                assert ("heldlock/cleanup/" in text) == (operation is not Operation.CLEANUP)
            if operation is Operation.CLEANUP:
                address = f"{LOCKS}cleanup/"
                assert browser.get(address).status_code == 403
            assert [browser.post(address, each).status_code for each in sent] == [403, 403]
    record, counter = store.read(key), store.counter(key)
    assert record is not None
    assert (record.fence, record.stop_requested_at) == (fence, None)
    assert there(counter).paused_until is None
    assert no_event_of(key)


def test_viewer_is_offered_nothing(log: type[Any], key: str) -> None:
    """No checkbox, no button; who is not logged in is asked to."""
    take("postgres", key)
    with user_who_may(Operation.VIEW) as user:
        browser = browser_of(user)
        for address in (LOCKS, f"{LOCKS}key/?backend=postgres&key={key}"):
            text = browser.get(address).content.decode()
            assert 'name="target"' not in text
            assert 'name="operation"' not in text
    assert "login" in Client().get(LOCKS)["Location"]


def test_form_of_another_site_is_refused(operator: User, key: str) -> None:
    """Without the token of this one."""
    take("postgres", key)
    browser = browser_of(operator, enforce_csrf_checks=True)
    answer = browser.post(OPERATE, confirmed(Operation.FORCE_RELEASE, key))
    assert answer.status_code == 403
    assert lock_backends["postgres"].read(key) is not None


def test_what_is_no_order_does_nothing(browser: Client, key: str) -> None:
    """An address, a form without a reason or a key, and one that makes no sense."""
    take("postgres", key)
    answer = browser.get(OPERATE, confirmed(Operation.FORCE_RELEASE, key))
    assert answer["Location"] == LOCKS
    answer = browser.post(OPERATE, confirmed(Operation.FORCE_RELEASE, key, reason="  "))
    assert "Nothing was changed." in answer.content.decode()
    answer = browser.post(OPERATE, form(Operation.FORCE_RELEASE), follow=True)
    assert "No key selected." in answer.content.decode()
    for wrong in (
        {"operation": "cleanup"},
        {"operation": ""},
        {"target": ["backend=nobody&key=a"]},
    ):
        sent = {**confirmed(Operation.FORCE_RELEASE, key), **wrong}
        assert browser.post(OPERATE, sent).status_code == 404
    assert lock_backends["postgres"].read(key) is not None
    assert no_event_of(key)


def test_counters_and_events_are_to_read(reader: Client, key: str) -> None:
    """Not even an owner of everything adds, changes or deletes one."""
    fence = take("postgres", key)
    LockEvent.objects.create(backend="postgres", key=key, kind=LockEvent.Kind.LOST)
    counter = FenceCounter.objects.get(key=key)
    for model, pk in (("fencecounter", counter.pk), ("lockevent", event_of(key).pk)):
        base = f"/admin/django_distlock/{model}/"
        listed = reader.get(base, {"q": key}).content.decode()
        assert key in listed
        assert "action-checkbox" not in listed
        one = f"{base}{admin_quote(pk)}/"
        shown = reader.get(f"{one}change/")
        assert shown.status_code == 200
        assert 'name="_save"' not in shown.content.decode()
        assert reader.get(f"{base}add/").status_code == 403
        assert reader.post(f"{one}delete/", {"post": "yes"}).status_code == 403
        assert reader.post(f"{one}change/", {"fence": 1}).status_code == 403
    assert FenceCounter.objects.get(key=key).fence == fence
