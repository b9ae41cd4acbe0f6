"""The dashboard of the example, with keys that programs hold."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlencode

from .browsers import Browser
from .shops import Program, Shop, ended

LOCKS = "/admin/django_distlock/heldlock/"
PASSWORD = "only for the tests"
TOKEN = "only-for-the-tests"
USERS = """
from django.contrib.auth.models import Permission, User
User.objects.create_superuser("ada", password="only for the tests")
viewer = User.objects.create_user("vic", password="only for the tests", is_staff=True)
viewer.user_permissions.set(Permission.objects.filter(codename="view_heldlock"))
"""
#: Holds keys for tests, one after the other: a key and a ttl in each line; 0: give it back.
HOLDER = """
import json, sys
from django_distlock import distlock
leases = {}
for line in sys.stdin:
    key, ttl = json.loads(line)
    if ttl:
        leases[key] = distlock(key, ttl=ttl).acquire()
    else:
        leases.pop(key).release()
    print("done", flush=True)
"""


class Dashboard(Shop):
    """The example, and a process that holds keys for the tests."""

    holder: Program

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Run that process."""
        with self.start("shell", "-c", HOLDER) as self.holder:
            yield

    def hold(self, key: str, ttl: int) -> None:
        """Let it hold a key; 0: give it back."""
        self.holder.send(json.dumps([key, ttl]))
        self.holder.wait_for("done")


@contextmanager
def held(shop: Dashboard, *keys: str, ttl: int = 600) -> Iterator[None]:
    """Let somebody hold keys."""
    for key in keys:
        shop.hold(key, ttl)
    try:
        yield
    finally:
        for key in keys:
            shop.hold(key, 0)


@contextmanager
def leashed(shop: Shop, *keys: str) -> Iterator[list[Program]]:
    """Let programs run under keys."""
    with ExitStack() as stack:
        started = []
        for key in keys:
            line = ["distlock_run", key, "--ttl=15", "--", "sh", "-c", "echo held; exec sleep 300"]
            started.append(stack.enter_context(shop.start(*line)))
            stack.callback(ended, started[-1], signal.SIGTERM)
            started[-1].wait_for("held")
        yield started


def row(key: str) -> str:
    """Give the selector of a key's row."""
    query = urlencode({"backend": "default", "key": key})
    return f'tr:has(a[href$="?{query}"])'


def show(browser: Browser, *keys: str) -> None:
    """Open the dashboard, and wait for keys in it."""
    browser.open(LOCKS)
    for key in keys:
        browser.one(row(key))


def pause(browser: Browser) -> None:
    """Let nothing refresh the page."""
    browser.one("[data-pause]").click()
    browser.until(lambda: "Paused" in browser.text(".distlock-live"))
