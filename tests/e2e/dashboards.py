"""The dashboard of the example, with keys that programs hold."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlencode

from .browsers import Browser
from .shops import Shop

LOCKS = "/admin/django_distlock/heldlock/"
PASSWORD = "only for the tests"
TOKEN = "only-for-the-tests"
USERS = """
import django
django.setup()
from django.contrib.auth.models import Permission, User
User.objects.create_superuser("ada", password="only for the tests")
viewer = User.objects.create_user("vic", password="only for the tests", is_staff=True)
viewer.user_permissions.set(Permission.objects.filter(codename="view_heldlock"))
"""
#: Holds keys for tests, one after the other: a key and a ttl in each line; 0: give it back.
HOLDER = """
import json, sys, django
django.setup()
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

    holder: subprocess.Popen[str]

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Run that process."""
        with self.start("-c", HOLDER) as self.holder:
            yield
            self.holder.communicate(timeout=60)

    def hold(self, key: str, ttl: int) -> None:
        """Let it hold a key; 0: give it back."""
        assert self.holder.stdin
        assert self.holder.stdout
        self.holder.stdin.write(f"{json.dumps([key, ttl])}\n")
        self.holder.stdin.flush()
        said: list[str] = []
        # Beside what is logged, such as a lease that was lost.
        while not said or said[-1] != "done\n":
            said.append(self.holder.stdout.readline())
            assert said[-1], said


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
def leashed(shop: Shop, *keys: str, ttl: int = 60) -> Iterator[list[subprocess.Popen[str]]]:
    """Let programs run under keys."""
    started = []
    try:
        for key in keys:
            program = ["sh", "-c", "echo held; exec sleep 300"]
            started.append(
                shop.start("manage.py", "distlock_run", key, f"--ttl={ttl}", "--", *program)
            )
        for each in started:
            assert each.stdout
            assert each.stdout.readline() == "held\n", each.communicate()[0]
        yield started
    finally:
        for each in started:
            each.terminate()
            each.communicate(timeout=60)


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
