"""The endpoints for machines and dashboards: who may ask, and what is answered."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.core.handlers.base import BaseHandler
from django.db import connections
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import include, path, resolve, reverse
from django.utils.crypto import constant_time_compare
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from django_distlock import InvalidLockBackend, distlock, lock_backends
from django_distlock.checks.settings import check_settings
from django_distlock.conf import monitor_tokens
from django_distlock.contrib import prometheus
from django_distlock.contrib.monitoring import views
from django_distlock.contrib.monitoring.views import metrics_view

TOKEN = "a-token-of-the-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
NAMES = ["health", "stats", "metrics"]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
]

urlpatterns = [path("locks/", include("django_distlock.contrib.monitoring.urls"))]


@pytest.fixture(autouse=True)
def _site() -> Iterator[None]:
    only = {each: settings.DISTLOCK[each] for each in ("memory", "sqlite", "redis")}
    with override_settings(
        ROOT_URLCONF=__name__,
        MIDDLEWARE=MIDDLEWARE,
        SESSION_ENGINE="django.contrib.sessions.backends.signed_cookies",
        DISTLOCK=only,
        DISTLOCK_MONITOR_TOKEN=TOKEN,
    ):
        yield


@pytest.fixture
def user(key: str) -> Iterator[User]:
    """Give somebody of the staff, who may do nothing yet."""
    made = User.objects.create_user(key, password="x", is_staff=True)
    yield made
    made.delete()


def get(name: str, headers: dict[str, str] | None = None, client: Client | None = None) -> Any:
    """Ask an endpoint."""
    address = reverse(f"distlock_monitoring:{name}")
    return (client or Client()).get(address, headers=headers or {})


# Who may ask


@override_settings(DISTLOCK_MONITOR_TOKEN=None)
def test_nothing_is_open_by_default() -> None:
    """Neither without a token, nor with any, while none is set; nobody is sent to a login page."""
    for name in NAMES:
        for headers in ({}, BEARER, {"Authorization": "Bearer "}, {"Authorization": "Bearer None"}):
            refused(get(name, headers), 401)


def refused(response: Any, status: int) -> None:
    """Check that a refusal says nothing."""
    assert (response.status_code, response.content) == (status, b"")
    assert response.headers["Cache-Control"] == "no-store"
    assert "Location" not in response.headers


def test_other_token_does_not() -> None:
    """Whatever is wrong with it."""
    for shown in (
        "Bearer wrong", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", TOKEN,
        "Bearer", "Bearer t\u00f6ken", "",
    ):  # fmt: skip
        refused(get("health", {"Authorization": shown}), 401)


def test_tokens_are_compared_in_constant_time() -> None:
    """Each of them, by what Django has for that: the time of an answer tells nothing."""
    with (
        override_settings(DISTLOCK_MONITOR_TOKEN=[TOKEN, TOKEN[::-1]]),
        patch.object(views, "constant_time_compare", wraps=constant_time_compare) as compare,
    ):
        assert get("health", BEARER).status_code == 200
        assert [call.args for call in compare.call_args_list] == [
            (TOKEN, TOKEN),
            (TOKEN, TOKEN[::-1]),
        ]


def test_weak_token_is_refused() -> None:
    """The error does not show it."""
    weak: list[Any] = ["short", "", b"bytes-are-no-tokens", "with space in the middle", 7]
    for token in weak:
        for value in (token, [TOKEN, token]):
            with override_settings(DISTLOCK_MONITOR_TOKEN=value):
                with pytest.raises(InvalidLockBackend) as caught:
                    monitor_tokens()
                (finding,) = [each for each in check_settings(None) if "MONITOR" in each.msg]
            assert not token or str(token) not in str(caught.value)
            assert finding.id == "distlock.E001"


def test_staff_with_the_permission_may_ask(user: User) -> None:
    """By the session; without the permission, or without being staff, it is forbidden."""
    client = Client()
    client.force_login(user)
    for name in NAMES:
        refused(get(name, client=client), 403)
    user.user_permissions.add(Permission.objects.get(codename="view_heldlock"))
    for name in NAMES:
        assert get(name, client=client).status_code == 200
        # Whoever shows a token is judged by it.
        refused(get(name, {"Authorization": "Bearer wrong"}, client), 401)
    User.objects.filter(pk=user.pk).update(is_staff=False)
    for name in NAMES:
        refused(get(name, client=client), 403)


def test_user_of_a_project_without_staff_is_refused() -> None:
    """Such as one whose users have what `AbstractBaseUser` gives them, and no more."""
    request = RequestFactory().get("/locks/health")
    request.user = SimpleNamespace(is_authenticated=True, is_active=True)  # type: ignore[assignment]
    refused(views.health_view(request), 403)


def test_token_opens_for_reading() -> None:
    """The right one, in the way that machines show it; a project may have no sessions."""
    for name in NAMES:
        address = reverse(f"distlock_monitoring:{name}")
        assert Client().post(address, headers=BEARER).status_code == 405
        assert Client().head(address, headers=BEARER).status_code == 200
        with override_settings(MIDDLEWARE=[]):
            response = get(name, BEARER)
            assert response.status_code == 200
            assert response.headers["Cache-Control"] == "no-store"
            refused(get(name), 401)


# What is answered


def test_store_that_is_away_is_503() -> None:
    """The code is told, and nothing of where the store is."""
    secret = {"BACKEND": settings.REDIS_BACKEND, "OPTIONS": {"url": "redis://:hush@127.0.0.1:1/0"}}
    with override_settings(DISTLOCK={"memory": settings.DISTLOCK["memory"], "away": secret}):
        response = get("health", BEARER)
        stats = get("stats", BEARER)
    assert response.status_code == 503
    said = response.json()
    assert said["status"] == "unavailable"
    assert said["backends"]["memory"]["status"] == "ok"
    assert said["backends"]["away"] == {"status": "service_unavailable", "seconds": None}
    assert {"backend": "away", "code": "service_unavailable"} in stats.json()["failures"]
    for each in (response, stats):
        assert b"hush" not in each.content
        assert b"127.0.0.1" not in each.content


def test_no_transaction_is_opened_on_the_way() -> None:
    """Each database may have `ATOMIC_REQUESTS`, and be the one that is down."""
    with ExitStack() as stack:
        for each in connections:
            stack.enter_context(patch.dict(connections.settings[each], ATOMIC_REQUESTS=True))
        for name in NAMES:
            view = resolve(reverse(f"distlock_monitoring:{name}")).func
            assert BaseHandler().make_view_atomic(view) is view, name


def test_health_recovers_where_no_thread_could_be_started() -> None:
    """The next probe asks again, and says of each store how long a round trip took."""
    with patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
        assert get("health", BEARER).status_code == 503
    response = get("health", BEARER)
    assert response.status_code == 200
    said = response.json()
    assert said["status"] == "ok"
    assert set(said["backends"]) == {"memory", "sqlite", "redis"}
    for each in said["backends"].values():
        assert each["status"] == "ok"
        assert 0 <= each["seconds"] < 2


def test_store_that_hangs_is_503_in_time() -> None:
    """The probe has its answer after two seconds, and so has the next one."""
    store = lock_backends["memory"]
    with patch.object(store, "_time", side_effect=lambda: time.sleep(8)):
        started_at = time.monotonic()
        for _ in range(2):
            response = get("health", BEARER)
            assert response.status_code == 503
            assert response.json()["backends"]["memory"]["status"] == "timeout"
        assert time.monotonic() - started_at < 7


def test_stats_are_those_of_the_command(key: str) -> None:
    """Counts by backend; what is in memory is no number of many processes."""
    with distlock(key, backend="redis"):
        said = get("stats", BEARER).json()
    found = {each["backend"]: each for each in said["backends"]}
    assert set(found) == {"sqlite", "redis"}
    assert found["redis"]["held"] >= 1
    assert said["failures"] == [{"backend": "memory", "code": "unsupported"}]
    assert key not in json.dumps(said)


def test_metrics_can_be_scraped(key: str) -> None:
    """Of the registry that projects use, in the format that is asked for."""
    prometheus.install(named=[key])
    try:
        with distlock(f"{key}:1", backend="memory"):
            pass
        plain = get("metrics", BEARER)
        opened = get("metrics", {**BEARER, "Accept": "application/openmetrics-text; version=1.0.0"})
    finally:
        prometheus.uninstall(REGISTRY)
    line = f'distlock_acquire_total{{backend="memory",outcome="acquired",prefix="{key}"}} 1.0'
    assert line in plain.content.decode()
    assert plain.headers["Content-Type"].startswith("text/plain")
    assert opened.headers["Content-Type"].startswith("application/openmetrics-text")
    assert opened.content.endswith(b"# EOF\n")


def test_file_that_a_worker_has_just_made_costs_no_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is empty for a moment; it is read once it is not."""
    unfinished = tmp_path / "counter_1.db"
    unfinished.touch()
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
    monkeypatch.setattr(prometheus, "scrape_registry", lambda: registry)
    asked: list[float] = []

    def wait(seconds: float) -> None:
        asked.append(seconds)
        unfinished.unlink()

    monkeypatch.setattr(views, "time", SimpleNamespace(sleep=wait))
    assert get("metrics", BEARER).status_code == 200
    assert len(asked) == 1


def test_project_without_prometheus_has_no_metrics() -> None:
    """The address is not found, for whoever may ask."""
    request = RequestFactory().get("/", headers=BEARER)
    with patch.dict("sys.modules", {"prometheus_client": None}):
        response = metrics_view(request)
    assert isinstance(response, HttpResponse)
    assert response.status_code == 404
