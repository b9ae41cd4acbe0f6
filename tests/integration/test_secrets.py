"""What reports of errors and messages of checks show of tokens and passwords: nothing."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import pytest
from django.core import checks
from django.test import override_settings
from django.views.debug import ExceptionReporter

from django_distlock import LockError, distlock, lock_backends
from django_distlock.core.keys import new_token
from tests.backends import REDIS
from tests.contract.aliases import locks_on

PASSWORD = "pass-word-of-the-tests"
DEAD = {"BACKEND": REDIS, "OPTIONS": {"url": "redis://127.0.0.1:1/0", "password": PASSWORD}}


def report() -> str:
    """Return the page of the error that is handled, with what all frames had."""
    reporter = ExceptionReporter(None, *sys.exc_info())
    return reporter.get_traceback_html() + reporter.get_traceback_text()


@pytest.mark.parametrize("alias", ["memory", "sqlite", "postgres", "redis"])
def test_report_of_a_block_shows_no_token(key: str, alias: str) -> None:
    """Lease, grant and record stand in its frames."""

    def work(*_: Any) -> None:
        raise ValueError("broken")

    with distlock(key, backend=alias) as lease:
        grant, record = lease._holding.grant, lock_backends[alias].read(key)
        known = {lease.token: [grant, record]}
        try:
            work(known, grant.token)
        except ValueError:
            page = report()
    assert str(lease.token) not in page
    assert "&lt;token&gt;" in page


@pytest.mark.parametrize("kind", ["postgresql", "sqlite", "mysql", "redis"])
def test_report_of_a_failing_store_shows_no_token(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """Nor a password: statements and names of keys stand in the frames of Django and drivers."""
    token = new_token()
    with ExitStack() as stack:
        if kind == "redis":
            stack.enter_context(override_settings(DISTLOCK={"dead": DEAD}))
        else:
            stack.enter_context(locks_on(request.getfixturevalue(kind)))
        (backend,) = lock_backends.all()
        try:
            backend.acquire("key", token, 5)
        except LockError:
            page = report()
    assert "&lt;token&gt;" in page
    assert str(token) not in page
    assert PASSWORD not in page


WITH_URL = "redis://ada:hidden@127.0.0.1:6379/1"


def test_checks_echo_no_password() -> None:
    """Wherever an address was put by mistake: the message is in the log of each deployment."""
    mistakes: list[Any] = [
        WITH_URL,
        {"BACKEND": WITH_URL},
        {"BACKEND": REDIS, "OPTIONS": WITH_URL},
        {"BACKEND": REDIS, "OPTIONS": [WITH_URL, "hidden"]},
        {"BACKEND": REDIS, "OPTIONS": {"cache": WITH_URL}},
        {"BACKEND": REDIS, "OPTIONS": {"client_factory": WITH_URL}},
        {"BACKEND": REDIS, "OPTIONS": {"url": WITH_URL, "cleanup_on_read": WITH_URL}},
        {"BACKEND": REDIS, "OPTIONS": {"url": "redis://ada:hidden/x@127.0.0.1:6379/1"}},
        {"BACKEND": REDIS, "OPTIONS": {"url": WITH_URL, "password": "hidden"}},
        {"BACKEND": REDIS, "OPTIONS": {"cache": "default", "password": "hidden"}},
        {"BACKEND": REDIS, "OPTIONS": {WITH_URL: 1}},
        {"BACKEND": REDIS, "TTL": WITH_URL},
        {"BACKEND": REDIS, WITH_URL: 1},
    ]
    for wrong in mistakes:
        with override_settings(DISTLOCK={"default": wrong}):
            found = [
                each for each in checks.run_checks(tags=["distlock"]) if each.id == "distlock.E001"
            ]
        assert found, wrong
        assert all("hidden" not in str(each) for each in found)
