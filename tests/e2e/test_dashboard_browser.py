"""The dashboard as people use it: in a browser, live, under a strict policy for its content."""

from __future__ import annotations

import json
import os
from functools import partial
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from .browsers import Browser
from .dashboards import LOCKS, PASSWORD, TOKEN, Dashboard, held, leashed, pause, row, show

HOSTILE = "<script>document.title = 'taken'</script>"
#: Where a letter of an element is seen.
WHERE = """(() => {
    const range = document.createRange(), text = document.querySelector(arguments[0]).firstChild;
    range.setStart(text, arguments[1]);
    range.setEnd(text, arguments[1] + 1);
    return range.getBoundingClientRect().left;
}).apply(null, arguments)
"""


def refreshes(browser: Browser) -> int:
    """Give how often the page has asked for what is new."""
    found: int = browser.ask(
        "performance.getEntriesByType('resource').filter(e => e.name.includes('live=1')).length"
    )
    return found


def test_countdown_moves_by_itself(shop: Dashboard, browser: Browser) -> None:
    """Without an answer of the server; and stands still where the page does."""
    with held(shop, "counted", ttl=600):
        show(browser, "counted")
        browser.driver.execute_script("window.fetch = () => new Promise(() => {})")
        bar = browser.one(f"{row('counted')} progress")

        def left() -> float:
            return float(str(bar.get_property("value")))

        before, text = left(), browser.text(f"{row('counted')} .age")
        browser.until(lambda: left() < before - 1500)
        assert browser.text(f"{row('counted')} .age") != text
        pause(browser)
        before = left()
        browser.ask("new Promise(done => setTimeout(done, 2000))")
        assert left() == before


def test_refresh_patches_rows(shop: Dashboard, browser: Browser) -> None:
    """What comes and goes is seen; what was chosen, and what has the focus, stays so."""
    with held(shop, "stays"):
        show(browser, "stays")
        browser.driver.execute_script("window.same = true")
        browser.one(f"{row('stays')} input").click()
        with held(shop, "arrives"):
            link = browser.one(f"{row('stays')} a")
            browser.driver.execute_script("arguments[0].focus()", link)
            browser.one(row("arrives"))
            assert browser.one(f"{row('stays')} input").is_selected()
            assert browser.driver.switch_to.active_element == link
        browser.until(lambda: not browser.every(row("arrives")))
        assert browser.one(f"{row('stays')} input").is_selected()
        assert browser.ask("window.same") is True
    assert browser.complaints() == []


def test_hidden_page_asks_nothing(shop: Dashboard, browser: Browser) -> None:
    """And catches up once it is seen again."""
    show(browser)
    browser.until(lambda: refreshes(browser) >= 1)
    with browser.hidden():
        # One that was under way may still come.
        browser.until(lambda: browser.ask("performance.now()") > 0)
        asked = refreshes(browser)
        browser.ask("new Promise(done => setTimeout(done, 11000))")
        assert refreshes(browser) <= asked + 1
        asked = refreshes(browser)
    browser.until(lambda: refreshes(browser) > asked)


def test_key_is_taken_with_a_reason_and_audited(shop: Dashboard, browser: Browser) -> None:
    """By the pages alone: the second one asks why, and the events keep it."""
    with leashed(shop, "stuck") as (holder,):
        show(browser, "stuck")
        fence = browser.text(f"{row('stuck')} td[data-label=Fence]")
        browser.one(f"{row('stuck')} a").click()
        browser.until(lambda: browser.every(".distlock-facts"))
        browser.one("button[value=force_release]").click()
        assert browser.text(".distlock-table").split()[-5:] == [
            fence, "→", "becomes", "≥", str(int(fence) + 1)
        ]  # fmt: skip
        browser.one("[name=reason]").send_keys("its host burnt down")
        browser.one("input[type=submit].grave").click()
        browser.until(lambda: "1 lock force-released" in browser.text(".messagelist"))
        browser.until(lambda: "its host burnt down" in _again(browser, ".distlock-timeline"))
        assert "not held" in browser.text(".distlock-facts")
        browser.open("/admin/django_distlock/lockevent/")
        assert "its host burnt down" in browser.text("#result_list")
        # The program that held it lost it, and is ended by its leash.
        assert holder.popen.wait(60) != 0


def _again(browser: Browser, selector: str) -> str:
    # Events are written by a thread of their own.
    browser.driver.refresh()
    return browser.text(selector)


def test_reason_cannot_be_left_out(shop: Dashboard, browser: Browser) -> None:
    """The browser says so, and so does the server."""
    with held(shop, "kept"):
        show(browser, "kept")
        # Nothing is offered before something is chosen.
        assert not browser.one("#distlock-operation").is_displayed()
        browser.one(f"{row('kept')} input").click()
        browser.one("#distlock-operation option[value=force_release]").click()
        browser.one(".distlock-acts button").click()
        browser.one("input[type=submit].grave").click()
        assert browser.every("[name=reason]:invalid")
        browser.driver.execute_script("document.querySelector('[name=reason]').required = false")
        browser.one("input[type=submit].grave").click()
        browser.until(lambda: "Nothing was changed." in browser.text("#content"))
        show(browser, "kept")


def test_viewer_cannot_take_a_key(shop: Dashboard, window: Browser) -> None:
    """No button, and no form that a script makes up is taken."""
    with held(shop, "safe"):
        window.log_in("vic", PASSWORD)
        show(window, "safe")
        assert not window.every("[name=target], [name=operation]")
        status = window.driver.execute_async_script(
            """
            const done = arguments[0], form = new FormData();
            const token = document.querySelector('[name=csrfmiddlewaretoken]').value;
            form.set('operation', 'force_release'); form.set('confirmed', 'yes');
            form.set('reason', 'because'); form.set('target', 'backend=default&key=safe');
            fetch('operate/', {method: 'POST', body: form, headers: {'X-CSRFToken': token}})
                .then(answer => done(answer.status));
            """
        )
        assert status == 403
        show(window, "safe")


def test_everything_but_the_refresh_works_without_script(shop: Dashboard, browser: Browser) -> None:
    """The list, its filter, the page of a key, and what may be done to it."""
    with held(shop, "plain", "other"), browser.no_script():
        show(browser, "plain", "other")
        assert not browser.one(".distlock-live").is_displayed()
        browser.one("[name=begins]").send_keys("pla")
        browser.one("[role=search] button").click()
        browser.until(lambda: not browser.every(row("other")))
        browser.one(f"{row('plain')} a").click()
        browser.one("button[value=request_stop]").click()
        browser.one("input[type=submit].default").click()
        browser.until(lambda: "Stop requested for 1 lock." in browser.text(".messagelist"))
        assert "stop requested" in browser.text(".distlock-facts")


def test_time_left_is_heard_as_it_is_read(shop: Dashboard, browser: Browser) -> None:
    """In words, and not also as the milliseconds of its bar."""
    with held(shop, "heard", ttl=3600):
        show(browser, "heard")
        pause(browser)
        nodes = browser.tell("Accessibility.getFullAXTree")["nodes"]
        heard = [
            (each["role"]["value"], each["name"]["value"].strip())
            for each in nodes
            if "name" in each
        ]
        assert ("cell", browser.text(f"{row('heard')} .left .text")) in heard
        assert "progressbar" not in [role for role, _name in heard]


def test_hostile_key_is_text(shop: Dashboard, browser: Browser) -> None:
    """On every page, also where a refresh has put it there."""
    show(browser)
    with held(shop, HOSTILE):
        browser.one(row(HOSTILE))
        assert HOSTILE in browser.text(".distlock-table")
        browser.one(f"{row(HOSTILE)} a").click()
        assert HOSTILE in browser.text("h1 .distlock-key")
        browser.one("button[value=request_stop]").click()
        assert HOSTILE in browser.text(".distlock-table")
        assert browser.driver.title != "taken"
        browser.one("[name=reason]").send_keys(HOSTILE)
        browser.one("input[type=submit].default").click()
        browser.until(lambda: "Stop requested for 1 lock." in browser.text(".messagelist"))
        browser.until(lambda: HOSTILE in _again(browser, ".distlock-timeline"))
    for model in ("lockevent", "fencecounter"):
        browser.open(f"/admin/django_distlock/{model}/?{urlencode({'q': HOSTILE})}")
        assert HOSTILE in browser.text("#result_list tbody")
        assert browser.driver.title != "taken"
        browser.one("#result_list tbody th a").click()
        browser.until(lambda: browser.every(".readonly"))
        assert HOSTILE in browser.text("#content form, #content-main")
        assert browser.driver.title != "taken"
    assert browser.complaints() == []


def test_dark_mode_is_dark(shop: Dashboard, browser: Browser) -> None:
    """By the colours of the admin: the cards are darker than what is written on them."""
    light = "getComputedStyle(document.querySelector('.distlock-cards a'))"
    colours = f"[{light}.backgroundColor, {light}.color].map(c => c.match(/\\d+/g)[0] * 1)"
    show(browser)
    browser.settle()
    below, on_it = browser.ask(colours)
    assert below > on_it
    with browser.dark():
        show(browser)
        browser.settle()
        below, on_it = browser.ask(colours)
        assert below < on_it


def test_phone_shows_all_of_it(shop: Dashboard, browser: Browser) -> None:
    """Nothing is wider than the screen, and each number says what it is."""
    with held(shop, "k" * 512), browser.phone():
        show(browser, "k" * 512)
        assert browser.ask("document.documentElement.scrollWidth") <= 390
        table = ".distlock-table"
        assert browser.ask(f"document.querySelector('{table}').scrollWidth") <= 390
        label = "getComputedStyle(document.querySelector('td[data-label=Waiting]'), '::before')"
        assert "Waiting" in browser.ask(f"{label}.content")
        # A lock has two lines, however long its key is.
        line = float(browser.ask("getComputedStyle(document.body).fontSize").removesuffix("px")) * 2
        assert browser.one(row("k" * 512)).size["height"] < 3 * line


def test_phone_gives_a_lock_two_lines(shop: Dashboard, browser: Browser) -> None:
    """Also where its holder and its state have long names, as in German."""
    with held(shop, "lines", ttl=3000), browser.phone():
        show(browser, "lines")
        pause(browser)
        for place, text in (
            (".holder bdi", "batch-7.internal.example.com celery-worker[4711]"),
            ("td.state", "abgelaufen, in der Schonfrist"),
            (".left .text", "49 min 59 s"),
        ):
            browser.driver.execute_script(
                "document.querySelector(arguments[0]).textContent = arguments[1]",
                f"{row('lines')} {place}", text,
            )  # fmt: skip
        line = float(browser.ask("getComputedStyle(document.body).fontSize").removesuffix("px")) * 2
        assert browser.one(row("lines")).size["height"] < 3 * line
        assert browser.ask("document.documentElement.scrollWidth") <= 390


def test_order_is_seen_and_chosen(shop: Dashboard, browser: Browser) -> None:
    """By the headings, also on a phone: an arrow says how the list is sorted."""
    heading = "th[aria-sort]:nth-of-type(3) a"
    with held(shop, "sorted:1", "sorted:2"), browser.phone():
        show(browser, "sorted:1", "sorted:2")
        arrow = f"getComputedStyle(document.querySelector('{heading}'), '::after').content"
        for sign, ends in ("\N{BLACK UP-POINTING TRIANGLE}", "12"), (
            "\N{BLACK DOWN-POINTING TRIANGLE}", "21",
        ):  # fmt: skip
            browser.one(heading).click()
            browser.until(partial(_is_in, browser, arrow, sign))
            keys = [each.text for each in browser.every("th.key a") if "sorted:" in each.text]
            assert keys == [f"sorted:{each}" for each in ends]


def _is_in(browser: Browser, script: str, text: str) -> bool:
    return text in browser.ask(script)


def test_past_holders_are_short_on_a_phone(shop: Dashboard, browser: Browser) -> None:
    """Six facts of each take three lines at most."""
    shop.hold("past", 60)
    shop.hold("past", 0)
    browser.open(f"{LOCKS}key/?backend=default&key=past")
    browser.until(lambda: _again(browser, "#distlock") and browser.every(".distlock-chart"))
    # Nor does a bar become wide where there are few.
    bars = len(browser.every(".distlock-bars g"))
    assert browser.one(".distlock-bars svg").size["width"] < 50 * bars
    with browser.phone():
        line = float(browser.ask("getComputedStyle(document.body).fontSize").removesuffix("px")) * 2
        past = browser.one(".distlock-short:has([data-label='Held for']) tbody tr")
        assert past.size["height"] < 3.5 * line


def test_long_key_leaves_room_for_others(shop: Dashboard, browser: Browser) -> None:
    """Its row is no screen high; pointed at, it is the whole."""
    with held(shop, "k" * 512, "short"):
        show(browser, "k" * 512, "short")
        link = browser.one(f"{row('k' * 512)} a")
        assert link.size["height"] < 5 * browser.one(f"{row('short')} a").size["height"]
        assert link.get_attribute("title") == "k" * 512
        cell = browser.one(f"{row('short')} .key")
        parts = sum(each.size["height"] for each in browser.every(f"{row('short')} .key > *"))
        assert cell.size["height"] < parts * 1.7  # Nothing but the key and its backend.


def test_long_words_stay_in_their_cards(shop: Dashboard, browser: Browser) -> None:
    """On a phone, as in German."""
    with browser.phone():
        show(browser)
        pause(browser)
        browser.driver.execute_script(
            "for (const each of document.querySelectorAll('.distlock-cards span'))"
            " each.textContent = 'Schreibzugriffsverweigerungen'"
        )
        cards = "[...document.querySelectorAll('.distlock-cards a')]"
        leaves = "each => each.scrollWidth > each.clientWidth"
        assert browser.ask(f"{cards}.some({leaves})") is False


def test_times_are_read_from_left_to_right(shop: Dashboard, browser: Browser) -> None:
    """Also on a page in Arabic or Hebrew, where "59 min 22 s" was shown as "min 22 s 59"."""
    with held(shop, "read", ttl=3600):
        show(browser, "read")
        pause(browser)
        browser.driver.execute_script("document.documentElement.dir = 'rtl'")
        for place in (".left .text", ".age time"):
            browser.driver.execute_script(
                "document.querySelector(arguments[0]).textContent = '59 min 22 s'",
                f"{row('read')} {place}",
            )
            first, last = (browser.ask(WHERE, f"{row('read')} {place}", at) for at in (0, 10))
            assert first < last


def test_chart_begins_at_the_left(shop: Dashboard, browser: Browser) -> None:
    """As its bars do, also on a page in Arabic or Hebrew."""
    show(browser)
    pause(browser)
    browser.driver.execute_script("document.documentElement.dir = 'rtl'")
    place = "document.querySelector('.distlock-bars {}').getBoundingClientRect().left"
    first, last, bars = (browser.ask(place.format(each)) for each in (".first", ".last", "svg"))
    assert bars <= first < last


def test_programs_ask_with_a_token(shop: Dashboard, window: Browser) -> None:
    """The endpoints of the example: its staff see them in the browser, a stranger sees nothing."""
    address = f"{window.address}/locks/health"
    with pytest.raises(HTTPError, match="401"):
        urlopen(address, timeout=60)
    told = Request(address, headers={"Authorization": f"Bearer {TOKEN}"})
    with urlopen(told, timeout=60) as answer:
        assert json.load(answer)["status"] == "ok"
    window.log_in("vic", PASSWORD)
    window.open("/locks/stats.json")
    assert '"held"' in window.one("body").text


FOLDER = os.environ.get("DISTLOCK_TEST_SCREENSHOTS", "")
#: An ordinary afternoon: what is held where, who waits, and what happened in the last hour.
AFTERNOON = """
from datetime import timedelta
from django.utils import timezone
from django_distlock import lock_backends
from django_distlock.core.records import Holder
from django_distlock.core.keys import new_token
from django_distlock.inspection import request_stop
from django_distlock.models import LockEvent

def request(number):
    return {"request": f"POST /invoices/{number}/"}

web = {"process": "gunicorn", "pid": 311}
worker = {"process": "celery", "pid": 97}
held = {
    ("default", "invoice:41"): (30, Holder(host="web-1", **web, metadata=request(41))),
    ("default", "invoice:42"): (60, Holder(host="web-2", **web, metadata=request(42))),
    ("default", "import:customers"): (None, Holder(host="batch-1", process="import", pid=2201)),
    ("jobs", "report:nightly"): (300, Holder(host="worker-1", **worker, task_id="5b1c9a6e")),
    ("jobs", "payout:2026-11"): (90, Holder(host="worker-2", **worker, task_id="d20f7b31")),
}
for (backend, key), (ttl, holder) in held.items():
    store = lock_backends[backend]
    store.raise_fences(400 if key == "invoice:42" else 17 * len(key), key=key)
    grant = store.acquire(key, new_token(), ttl, holder)
    if ttl:
        store.extend(grant, ttl)
request_stop("report:nightly", backend="jobs", actor="ada")
for key, number in (("invoice:42", 7), ("invoice:41", 3), ("import:customers", 1)):
    for each in range(number):
        lock_backends["default"].waiters.note(key, Holder(host=f"web-{each % 3}", **web), 600)
kinds = ["taken_over", "paused", "resumed", "lost", "rejected"]
for minute in range(58):
    for each in range(minute * 7 % 6 if minute % 3 else 0):
        LockEvent.objects.using("locks").create(
            at=timezone.now() - timedelta(minutes=minute), backend="default", key="invoice:42",
            kind=kinds[(minute + each) % 4 if minute % 10 else 4], actor="",
            fence=400 - minute // 3,
        )
for number in range(18):
    LockEvent.objects.using("locks").create(
        at=timezone.now() - timedelta(minutes=3 * number + 3), backend="default", key="invoice:42",
        kind="released", fence=400 - number,
        holder={"host": "web-%d" % (number % 3 + 1), "process": "gunicorn", "pid": 40 + number % 3},
        details={"held_for": 2 + (number * 7 % 5) * 1.3, "waited": (number * 5 % 4) * 0.9},
    )
"""
if FOLDER:

    def test_screenshots(shop: Dashboard, browser: Browser) -> None:
        """Those of the documentation, made anew."""
        shop.run("shell", "-c", AFTERNOON)
        show(browser, "invoice:42")
        browser.save("dashboard", FOLDER)
        with browser.dark():
            browser.save("dashboard-dark", FOLDER)
        browser.settle()
        with browser.phone():
            browser.save("dashboard-phone", FOLDER)
        browser.one(f"{row('invoice:42')} a").click()
        browser.one(".distlock-facts")
        browser.save("key", FOLDER)
        browser.one("button[value=force_release]").click()
        browser.one("[name=reason]")
        browser.save("force-release", FOLDER)
