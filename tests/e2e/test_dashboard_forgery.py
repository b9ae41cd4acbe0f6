"""Forms of the dashboard that somebody else made up: what the browser sends of them is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from .browsers import Browser
from .dashboards import LOCKS, Dashboard, held, row, show

#: Posts a form from the page that is open.
POST = """
const form = document.createElement('form');
form.method = 'post';
form.action = arguments[0];
for (const [name, value] of Object.entries(arguments[1])) {
    const field = document.createElement('input');
    [field.type, field.name, field.value] = ['hidden', name, value];
    form.append(field);
}
document.body.append(form);
form.submit();
"""
CHANGE_TOKEN = """
const field = document.querySelector('#distlock [name=csrfmiddlewaretoken]');
field.value = [...field.value].reverse().join('');
"""


class Stranger(BaseHTTPRequestHandler):
    """A site of somebody else, with one page."""

    def do_GET(self) -> None:
        """Send the page."""
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>stranger</title><body>")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def stranger() -> Iterator[int]:
    """Serve that site; give the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def is_unharmed(browser: Browser, key: str, fence: str) -> None:
    """See that a key is still held under the same fence, and that nobody is said to have acted."""
    show(browser, key)
    assert browser.text(f"{row(key)} td[data-label=Fence]") == fence
    browser.open(f"/admin/django_distlock/lockevent/?q={key}")
    assert "0 lock events" in browser.text("#changelist")


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [("token", "CSRF token from POST incorrect."), ("cookie", "CSRF cookie not set.")],
)
def test_form_without_its_token_is_refused(
    shop: Dashboard, browser: Browser, spoilt: str, why: str
) -> None:
    """Where another one is in the form, and where the cookie is gone: nothing is changed."""
    key = f"spoilt-{spoilt}"
    with held(shop, key):
        show(browser, key)
        fence = browser.text(f"{row(key)} td[data-label=Fence]")
        browser.one(f"{row(key)} a").click()
        browser.one("button[value=force_release]").click()
        browser.one("[name=reason]").send_keys("a stranger wants it")
        if spoilt == "token":
            browser.driver.execute_script(CHANGE_TOKEN)
        else:
            browser.driver.delete_cookie("csrftoken")
        browser.one("input[type=submit].grave").click()
        browser.until(lambda: browser.status() == 403)
        assert why in browser.text()
        is_unharmed(browser, key, fence)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_form_of_another_origin_is_refused(shop: Dashboard, browser: Browser, host: str) -> None:
    """Even with the right token; the same form of a page of ours is taken.

    The browser takes another port for the same site, and sends the cookies; not so another name.
    """
    key = f"wanted-from-{host}"
    with stranger() as port, held(shop, key):
        show(browser, key)
        fence = browser.text(f"{row(key)} td[data-label=Fence]")
        form = {
            "csrfmiddlewaretoken": browser.one("[name=csrfmiddlewaretoken]").get_property("value"),
            "operation": "force_release",
            "target": f"backend=default&key={key}",
            "reason": "a stranger wants it",
            "confirmed": "yes",
        }
        browser.driver.get(f"http://{host}:{port}/")
        browser.driver.execute_script(POST, f"{browser.address}{LOCKS}operate/", form)
        browser.until(lambda: browser.status() == 403)
        assert f"http://{host}:{port} does not match any trusted origins" in browser.text()
        is_unharmed(browser, key, fence)
        show(browser, key)
        browser.driver.execute_script(POST, f"{browser.address}{LOCKS}operate/", form)
        browser.until(lambda: "1 lock force-released" in browser.text(".messagelist"))
