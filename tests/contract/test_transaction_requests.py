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


def test_key_is_taken_until_the_request_is_over(registered: Registered, key: str) -> None:
    """Behind its block the view holds the key; committed or failed, the next request takes it."""
    client = Client(raise_request_exception=False)
    for query in ("", "?fail", "", "?fail", ""):
        response = client.get(f"/pay/{registered.alias}/{key}/{query}")
        assert response.status_code == 500 if query else response.content == b"True"
    assert grantable(lock_of(registered, key))
    client.get(f"/pay/{registered.alias}/{key}/?fail")
    assert eventually(lambda: grantable(lock_of(registered, key)))
    assert Row.objects.filter(name=key).count() == 3


def test_decorated_view_keeps_its_key_too(key: str) -> None:
    """`ATOMIC_REQUESTS` wraps around every decorator of a view."""
    response = Client().get(f"/decorated/default/{key}/")
    assert response.content == b"True"
    assert grantable(distlock(key))
