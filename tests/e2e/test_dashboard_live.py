"""What the dashboard does while nobody touches it, and when it cannot go on."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from .browsers import Browser
from .dashboards import LOCKS, Dashboard, held, pause, row, show

# What a page of another program looks like, such as that of a single sign-on.
ANOTHER = "<!DOCTYPE html><title>Log in</title><p>Who are you?"

UNREADABLE = (
    "<table><tbody data-part=rows><tr data-row=spoiled><td><td><th><td colspan=5>spoiled</table>"
)


def answer_with(browser: Browser, body: str) -> None:
    """Let the next refreshes get another page, as of something in front of the site."""
    browser.driver.execute_script(
        "window.fetch = async () => new Response(arguments[0], {status: 200})", body
    )


def test_focus_stays_when_rows_above_go(shop: Dashboard, browser: Browser) -> None:
    """On a link and on a checkbox; and where its own row goes, it stays in the table."""
    with held(shop, "focus:3"):
        with held(shop, "focus:2"):
            with held(shop, "focus:1"):
                show(browser, "focus:1", "focus:2", "focus:3")
                box = browser.one(f"{row('focus:3')} input")
                browser.driver.execute_script("arguments[0].focus()", box)
            browser.until(lambda: not browser.every(row("focus:1")))
            assert browser.driver.switch_to.active_element == box
            link = browser.one(f"{row('focus:2')} a")
            browser.driver.execute_script("arguments[0].focus()", link)
        browser.until(lambda: not browser.every(row("focus:2")))
        assert browser.ask("document.activeElement.matches('.distlock-table')") is True
        assert browser.every(row("focus:3"))


def test_another_page_is_no_refresh(shop: Dashboard, browser: Browser) -> None:
    """What is shown is not called live any more, and nothing of it counts down."""
    with held(shop, "shown"):
        show(browser, "shown")
        answer_with(browser, ANOTHER)
        browser.until(lambda: "No connection" in browser.text(".distlock-live"))
        before = browser.text(f"{row('shown')} .left .text")
        browser.ask("new Promise(done => setTimeout(done, 2500))")
        assert browser.text(f"{row('shown')} .left .text") == before


@pytest.mark.parametrize("answer", ["new Response(null, {status: 304})", "Promise.reject()"])
def test_pause_outlasts_a_refresh_on_its_way(
    shop: Dashboard, browser: Browser, answer: str
) -> None:
    """Whatever comes of it, the page goes on to say that it is paused."""
    show(browser)
    browser.driver.execute_script("window.fetch = () => new Promise(go => { window.answer = go })")
    browser.until(lambda: browser.ask("window.answer !== undefined"))
    pause(browser)
    browser.driver.execute_script(f"window.answer({answer})")
    browser.ask("new Promise(done => setTimeout(done))")
    assert browser.text(".distlock-live [role=status]") == "Paused"


def test_unreadable_record_does_not_reload_the_page(shop: Dashboard, browser: Browser) -> None:
    """Its row has as many columns as all others, in fewer cells."""
    with held(shop, "readable"):
        show(browser, "readable")
        answer_with(browser, UNREADABLE)
        browser.until(lambda: browser.every("[data-row=spoiled]"))
        # Else the next refresh would be of the page that was loaded again.
        browser.driver.execute_script("document.querySelector('[data-row=spoiled]').remove()")
        browser.until(lambda: browser.every("[data-row=spoiled]"))


def test_end_of_the_session_is_told_once(shop: Dashboard, browser: Browser) -> None:
    """The page asks no more, and says what to do."""
    show(browser)
    browser.driver.delete_all_cookies()
    browser.until(lambda: "logged out" in browser.text(".distlock-live"))
    asked = "performance.getEntriesByType('resource').length"
    before = browser.ask(asked)
    browser.ask("new Promise(done => setTimeout(done, 7000))")
    assert browser.ask(asked) == before


def test_all_of_a_page_are_chosen_at_once(shop: Dashboard, browser: Browser) -> None:
    """By one box, which is there where scripts are."""
    with held(shop, "all:1", "all:2"):
        show(browser, "all:1", "all:2")
        browser.one("[data-all]").click()
        for key in ("all:1", "all:2"):
            assert browser.one(f"{row(key)} input").is_selected()


def test_what_to_do_is_offered_where_one_looks(shop: Dashboard, browser: Browser) -> None:
    """Once a row is chosen, without a scroll; no row moves, and no room is kept for it before."""
    with held(shop, *(f"look:{number:02}" for number in range(30))), browser.phone():
        show(browser, "look:00")
        pause(browser)
        table = "document.querySelector('.distlock-locks').getBoundingClientRect()"
        form = "document.querySelectorAll('[role=search] .field')"
        gap = f"{table}.top - [...{form}].at(-1).getBoundingClientRect().bottom"
        assert browser.ask(gap) < 40
        box = browser.one(f"{row('look:00')} input")
        browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
        top = browser.ask(f"{table}.top")
        box.click()
        bar = "document.querySelector('[data-acts]').getBoundingClientRect()"
        assert browser.ask(f"{bar}.height > 0 && {bar}.bottom <= innerHeight + 1")
        assert browser.ask(f"{table}.top") == top


def test_way_back_chooses_no_other_lock(shop: Dashboard, browser: Browser) -> None:
    """Browsers restore boxes by their place, and another lock may have come before it."""
    with held(shop, "way:2"):
        show(browser, "way:2")
        browser.one(f"{row('way:2')} input").click()
        browser.one(f"{row('way:2')} a").click()
        browser.one(".distlock-facts")
        with held(shop, "way:1"):
            browser.driver.back()
            browser.one(row("way:1"))
            browser.until(lambda: browser.ask("document.readyState") == "complete")
            assert browser.every("input[name=target]:checked") == []


def test_key_page_does_not_cry_wolf(shop: Dashboard, browser: Browser) -> None:
    """It is not fed: at the end of a lease that is renewed, it says that it does not know."""
    with held(shop, "renewed", ttl=10):
        show(browser, "renewed")
        browser.one(f"{row('renewed')} a").click()
        browser.until(lambda: "reload the page" in browser.text(".left"))


def says(browser: Browser, text: str) -> Callable[[], bool]:
    """Give what is true once a message has a text."""
    return lambda: text in browser.text(".messagelist")


def test_any_key_can_be_opened(shop: Dashboard, browser: Browser) -> None:
    """Also one that nobody holds: its pause begins and ends there. Unknown, it offers nothing."""
    for key in ("unknown here", "nobody holds:it"):
        browser.open(LOCKS)
        with held(shop, "nobody holds:it"):
            browser.one("#open-key").send_keys(key)
        browser.one("form:has(#open-key) [type=submit]").click()
        assert key in browser.text("h1")
        is_known = "a record of this key" not in browser.text("#distlock")
        assert bool(browser.every("[name=operation]")) == is_known == (key != "unknown here")
    for operation in ("pause", "resume"):
        browser.one(f"button[value={operation}]").click()
        browser.one("#id_reason").send_keys(json.dumps(operation))
        browser.one(".submit-row [type=submit]").click()
        browser.until(says(browser, f"1 key {operation}d"))
        assert "nobody holds:it" in browser.text("h1")
