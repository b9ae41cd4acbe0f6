"""The dashboard of the example, with keys that programs hold."""

from __future__ import annotations

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


@contextmanager
def held(shop: Shop, *keys: str, ttl: int = 60) -> Iterator[list[subprocess.Popen[str]]]:
    """Let programs hold keys."""
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
