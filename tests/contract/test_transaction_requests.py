"""With `ATOMIC_REQUESTS` the key is taken until the response's transaction is over."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path

from django_distlock import distlock
from tests.backends import Registered
from tests.shop.models import Row

from .locking import eventually, grantable, lock_of, taken


def pay(request: HttpRequest, alias: str, key: str) -> HttpResponse:
    """Change a row under a lock, and look around before the transaction ends."""
    lock = distlock(key, backend=alias)
    assert connections["default"].in_atomic_block
    with lock:
        Row.objects.create(name=key)
    if "fail" in request.GET:
        raise ZeroDivisionError
    return HttpResponse(f"{taken(lock)}")


@distlock("{key}")
def decorated(request: HttpRequest, alias: str, key: str) -> HttpResponse:
    """The same with a decorator on the view, on the default backend."""
    Row.objects.create(name=key)
    return HttpResponse(f"{taken(distlock(key))}")


urlpatterns = [path("pay/<alias>/<key>/", pay), path("decorated/<alias>/<key>/", decorated)]


@pytest.fixture(autouse=True)
def _atomic_requests(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    settings.ROOT_URLCONF = __name__
    settings.ALLOWED_HOSTS = ["*"]


def test_key_is_taken_until_the_request_is_committed(registered: Registered, key: str) -> None:
    """Behind the block the view still holds the key, behind the response it is free."""
    response = Client().get(f"/pay/{registered.alias}/{key}/")
    assert response.content == b"True"
    assert Row.objects.filter(name=key).exists()
    assert grantable(lock_of(registered, key))


def test_request_that_fails_frees_the_key(registered: Registered, key: str) -> None:
    """A view that raises is rolled back, and its key is free."""
    client = Client(raise_request_exception=False)
    assert client.get(f"/pay/{registered.alias}/{key}/?fail").status_code == 500
    assert not Row.objects.filter(name=key).exists()
    assert eventually(lambda: grantable(lock_of(registered, key)))


def test_requests_follow_each_other(registered: Registered, key: str) -> None:
    """One request after the other takes the key of the one before, failed or not."""
    client = Client(raise_request_exception=False)
    for query in ("", "?fail", "", "?fail", ""):
        response = client.get(f"/pay/{registered.alias}/{key}/{query}")
        assert response.status_code == (500 if query else 200)
    assert Row.objects.filter(name=key).count() == 3


def test_decorated_view_keeps_its_key_too(key: str) -> None:
    """`ATOMIC_REQUESTS` wraps around every decorator of a view."""
    response = Client().get(f"/decorated/default/{key}/")
    assert response.content == b"True"
    assert grantable(distlock(key))
