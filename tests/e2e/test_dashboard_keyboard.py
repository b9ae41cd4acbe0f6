"""The dashboard by the keyboard alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from .browsers import Browser
from .dashboards import Dashboard, held, leashed, row, show

#: More stops than any of the pages has, those of the admin around it included.
MOST = 200
#: Keeps what can be used, in the order of the page, and how it looks without the focus.
REMEMBER = """
window.look = element => {
    const {outlineStyle, outlineWidth, outlineColor, boxShadow} = getComputedStyle(element);
    return {outlineStyle, outlineWidth, outlineColor, boxShadow};
};
const focusable = '[tabindex]:not([tabindex="-1"])';
const all = `:is(a[href], button, input, select, textarea, summary, ${focusable})`;
window.stops = [...document.querySelectorAll(`#distlock ${all}`)]
    .filter(each => each.type !== 'hidden' && !each.disabled && each.checkVisibility());
window.looks = window.stops.map(window.look);
window.named = each => `${each.cloneNode(false).outerHTML} ${each.textContent.trim().slice(0, 40)}`;
return window.stops.map(window.named);
"""
#: Tells of what has the focus; nothing where that is around the dashboard.
FOCUSED = """
const element = document.activeElement;
if (!element.closest('#distlock')) return null;
const place = window.stops.indexOf(element), box = element.getBoundingClientRect();
let around = element.parentElement, behind = 'rgba(0, 0, 0, 0)';
while (around && behind === 'rgba(0, 0, 0, 0)') {
    behind = getComputedStyle(around).backgroundColor;
    around = around.parentElement;
}
return {
    place, behind, name: window.named(element),
    now: window.look(element), before: window.looks[place],
    top: box.top + scrollY, bottom: box.bottom + scrollY,
    seen: box.bottom > 0 && box.top < innerHeight,
};
"""


def luminance(colour: str) -> float:
    """Give how bright a colour is, from 0 to 1.

    Source: WCAG 2.2, relative luminance.
    """
    parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [
        each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Give the contrast of two colours, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def is_drawn(look: dict[str, str]) -> bool:
    """Whether there is a line around it."""
    return look["outlineStyle"] != "none" and float(look["outlineWidth"].removesuffix("px")) > 0


def has_ring(stop: dict[str, Any]) -> bool:
    """Whether a line is around it that stands out, and that it had not before.

    Source: WCAG 2.2, 1.4.11: a contrast of 3 at least.
    """
    ring = stop["now"]
    is_new = is_drawn(ring) and not is_drawn(stop["before"])
    return is_new and contrast(ring["outlineColor"], stop["behind"]) >= 3


def focused(browser: Browser) -> Any:
    """Tell of what has the focus; None: nothing of the dashboard has."""
    return browser.driver.execute_script(FOCUSED)


def tab_until(browser: Browser, condition: Callable[[], object], *, back: bool = False) -> None:
    """Press the tabulator until a condition holds."""
    for _ in range(MOST):
        if condition():
            return
        browser.tab(back=back)
    pytest.fail("the tabulator does not get there")


def go_to(browser: Browser, selector: str, *, back: bool = False) -> None:
    """Move the focus to an element by the tabulator."""
    browser.one(selector)
    has_it = "document.activeElement.matches(arguments[0])"
    tab_until(browser, lambda: browser.ask(has_it, selector), back=back)


def walk(browser: Browser, *, back: bool = False) -> list[dict[str, Any]]:
    """Go through the dashboard from outside until the focus is outside again; tell of each stop."""
    tab_until(browser, lambda: focused(browser) is not None, back=back)
    stops: list[dict[str, Any]] = []

    def is_out() -> bool:
        stop = focused(browser)
        stops.extend([stop] if stop else [])
        return stop is None

    tab_until(browser, is_out, back=back)
    return stops


def open_dashboard(browser: Browser) -> None:
    """Open the list, choose a row, and let nothing refresh it: by a key, too."""
    show(browser, "typed")
    go_to(browser, "[data-pause]")
    browser.press("SPACE")
    browser.until(lambda: "Paused" in browser.text(".distlock-live"))
    go_to(browser, f"{row('typed')} input")
    browser.press("SPACE")


def open_key(browser: Browser) -> None:
    """Open the page of a key from the list."""
    show(browser, "typed")
    go_to(browser, f"{row('typed')} a")
    browser.press("ENTER")
    browser.until(lambda: browser.every(".distlock-facts"))


def open_operation(browser: Browser) -> None:
    """Open the page that asks why, from that of the key."""
    open_key(browser)
    go_to(browser, "button[value=force_release]")
    browser.press("ENTER")
    browser.until(lambda: browser.every("[name=reason]"))


@pytest.mark.parametrize(
    ("opened", "among"),
    [
        (
            open_dashboard,
            ["data-pause", "filter-host", "distlock-operation", "typed", "All events"],
        ),
        (open_key, ["request_stop", "force_release", "Hashes", "data-copy"]),
        (open_operation, ["reason", "grave", "take me back"]),
    ],
)
def test_tab_goes_through_the_page(
    shop: Dashboard, browser: Browser, opened: Callable[[Browser], None], among: list[str]
) -> None:
    """In its order, forth and back, in and out; what has the focus is seen, also in the dark."""
    with held(shop, "typed", ttl=600):
        opened(browser)
        inside = "document.activeElement.closest('#distlock')"
        tab_until(browser, lambda: not browser.ask(inside), back=True)
        names = browser.driver.execute_script(REMEMBER)
        forth = walk(browser)
        with browser.dark():
            back = walk(browser, back=True)
        unnamed = browser.ask(
            "[...document.querySelectorAll('#distlock :is(input, select, progress)')]"
            ".filter(e => !['hidden', 'submit'].includes(e.type))"
            ".filter(e => !e.ariaHidden && !e.labels.length && !e.ariaLabel)"
            ".map(e => e.outerHTML)"
        )
    places = [each["place"] for each in forth]
    assert places == list(range(len(names))), names
    assert [each["place"] for each in back] == places[::-1]
    assert [each["name"] for each in (*forth, *back) if not has_ring(each)] == []
    assert [each["name"] for each in (*forth, *back) if not each["seen"]] == []
    # Nor does the focus jump up the page: each stop reaches below the top of the one before.
    assert all(after["bottom"] > before["top"] for before, after in pairwise(forth))
    assert [each for each in among if not any(each in name for name in names)] == []
    assert unnamed == []


def test_key_is_taken_by_the_keyboard_alone(shop: Dashboard, browser: Browser) -> None:
    """Chosen by Space, begun and confirmed by Enter; and no other key is."""
    with leashed(shop, "typed", "untouched") as (holder, other):
        show(browser, "typed", "untouched")
        go_to(browser, f"{row('typed')} input")
        browser.press("SPACE")
        assert browser.one(f"{row('typed')} input").is_selected()
        go_to(browser, "#distlock-operation")
        browser.press("Force")
        assert browser.one("#distlock-operation").get_property("value") == "force_release"
        go_to(browser, ".distlock-acts button")
        browser.press("ENTER")
        browser.until(lambda: browser.every("[name=reason]"))
        go_to(browser, "[name=reason]")
        browser.press("its host burnt down")
        go_to(browser, "input[type=submit].grave")
        browser.press("ENTER")
        browser.until(lambda: "1 lock force-released" in browser.text(".messagelist"))
        show(browser, "untouched")
        assert not browser.every(row("typed"))
        # The program that held it lost it, and is ended by its leash.
        assert holder.popen.wait(60) != 0
        assert other.popen.poll() is None
    assert browser.complaints() == []
