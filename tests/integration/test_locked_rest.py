"""`locked_view` on methods: of Django REST framework's views and viewsets, and of Django's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, update_wrapper
from typing import Any

import pytest
import rest_framework.viewsets
from asgiref.sync import async_to_sync
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.decorators import action, api_view
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView

from django_distlock import LockError, LockUsageError, current_lease, distlock
from django_distlock.models import FenceCounter
from django_distlock.testing import lose_connection
from django_distlock.views import LockedViewMixin, locked_view
from tests.contract.helpers import PATIENCE, Later
from tests.contract.locking import held_elsewhere
from tests.processes import spawn


def said() -> dict[str, Any]:
    """Say what a method works under."""
    lease = current_lease()
    return {
        "held": lease is not None and lease.held,
        "blocks": len(connections["default"].atomic_blocks),
    }


class HasName(BasePermission):  # type: ignore[misc] # it has no types
    """Lets those in who say their name."""

    def has_permission(self, request: Any, view: Any) -> bool:
        """Look at a header."""
        return "X-Name" in request.headers


class Invoices(rest_framework.viewsets.ViewSet):  # type: ignore[misc] # it has no types
    """Has actions in the place of methods."""

    permission_classes = (HasName,)
    lookup_field = "key"

    @locked_view("view:{key}", wait=0)
    def update(self, request: Any, key: str) -> Any:
        """Answer under the lock."""
        return Response(said())

    @locked_view("view:{kwargs[key]}", wait=0)
    def destroy(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Name the key by what the URL captures."""
        return Response(said())

    @action(detail=True, methods=["post"])
    @locked_view("view:{key}", wait=0, status=423, retry_after=7)
    def pay(self, request: Any, key: str) -> Any:
        """Be an action above the lock."""
        return Response(said())

    @locked_view(lambda self, request, key: f"view:{key}", wait=0, on_unavailable="skip")
    @action(detail=True, methods=["post"])
    def send(self, request: Any, key: str) -> Any:
        """Be one below it."""
        return Response(said())


class Locked(LockedViewMixin, rest_framework.viewsets.ViewSet):  # type: ignore[misc] # as above
    """Is locked as a whole."""

    lock_key = "view:{key}"
    lock_options = {"wait": 0}
    lookup_field = "key"

    def update(self, request: Any, key: str) -> Any:
        """Answer."""
        return Response(said())


class Api(APIView):  # type: ignore[misc] # it has no types
    """Has a locked method, and one that calls it."""

    @locked_view("view:{key}", wait=0)
    def put(self, request: Any, key: str) -> Any:
        """Answer under the lock."""
        return Response(said())

    def post(self, request: Any, key: str) -> Any:
        """Look at the key behind the call, before the transaction is over."""
        answer = self.put(request, key)
        answer.data["behind"] = Later(distlock(f"view:{key}").locked).result()
        return answer

    @locked_view("view:{key}", wait=0)
    def patch(self, request: Any, key: str) -> Any:
        """Answer when the test has looked."""
        print("patching", flush=True)
        input()
        return Response(said())


@api_view(["PUT"])
@locked_view("view:{key}", wait=0)
def below(request: Any, key: str) -> Any:
    """Have the lock below what makes a view."""
    return Response(said())


@locked_view("view:{kwargs[key]}", wait=0)
@api_view(["PUT"])
def above(request: Any, key: str) -> Any:
    """Have it above."""
    return Response(said())


class Plain(View):
    """A view of Django."""

    @locked_view("view:{key}", wait=0)
    def put(self, request: HttpRequest, key: str) -> HttpResponse:
        """Answer under the lock."""
        return HttpResponse(f"{said()['held']}")


class AsyncPlain(View):
    """The same, asynchronous."""

    @locked_view("view:{key}", wait=0)
    async def put(self, request: HttpRequest, key: str) -> HttpResponse:
        """Answer under the lock."""
        return HttpResponse(f"{(lease := current_lease()) is not None and lease.held}")


router = SimpleRouter()
router.register("invoices", Invoices, basename="invoice")
router.register("locked", Locked, basename="locked")
urlpatterns = [
    path("", include(router.urls)),
    path("api/<key>/", Api.as_view()),
    path("below/<key>/", below),
    path("above/<key>/", above),
    path("plain/<key>/", Plain.as_view()),
    path("async/<key>/", AsyncPlain.as_view()),
]

#: A method, and the address of a key.
REQUESTS = [
    ("put", "/invoices/{}/"),
    ("delete", "/invoices/{}/"),
    ("post", "/invoices/{}/pay/"),
    ("post", "/invoices/{}/send/"),
    ("put", "/locked/{}/"),
    ("put", "/api/{}/"),
    ("put", "/below/{}/"),
    ("put", "/above/{}/"),
]


@pytest.fixture(autouse=True)
def _project(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__


@pytest.fixture
def taken(key: str) -> Iterator[str]:
    """Hold the key of a view."""
    with held_elsewhere(distlock(f"view:{key}", ttl=30)):
        yield key


def ask(method: str, address: str, **headers: str) -> Any:
    """Send a request through all of Django."""
    return getattr(Client(), method)(address, headers={"X-Name": "ada", **headers})


@pytest.mark.parametrize(("method", "address"), REQUESTS)
def test_method_runs_under_its_lock(method: str, address: str, key: str) -> None:
    """It is held while the method runs; a conflict is a problem, whatever type is asked for."""
    address = address.format(key)
    assert ask(method, address).json()["held"] is True
    lock = distlock(f"view:{key}", ttl=30)
    assert Later(lock.locked).result() is False
    with held_elsewhere(lock):
        response = ask(method, address, accept="application/json, text/html;q=0.9")
    status, title = (423, "Locked") if "pay" in address else (409, "Conflict")
    assert response.status_code == status
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["Cache-Control"] == "no-store"
    told = response.json()
    again = int(response.headers["Retry-After"])
    assert again == 7 if "pay" in address else 1 <= again < 20
    assert f"is working on this right now. Try again in {again} second" in told.pop("detail")
    assert told == {
        "type": "about:blank",
        "title": title,
        "status": status,
        "error": "acquisition_timeout",
        "retry_after": again,
    }
    assert key not in response.content.decode()


def test_store_that_is_away_is_a_problem(key: str) -> None:
    """With the status that says so."""
    with lose_connection():
        response = ask("post", f"/invoices/{key}/send/")
    assert response.headers["Content-Type"] == "application/problem+json"
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    told = response.json()
    assert (told["status"], told["title"]) == (503, "Service Unavailable")
    assert told["error"] == "service_unavailable"


def test_key_that_no_lock_can_have() -> None:
    """It is the mistake of the client."""
    for address in ("/invoices/{}/", "/locked/{}/", "/api/{}/", "/below/{}/"):
        assert ask("put", address.format("x" * 600)).status_code == 400


def test_views_of_django_answer_as_ever(taken: str) -> None:
    """Their methods are locked too, and their answers are pages."""
    response = ask("put", f"/plain/{taken}/")
    assert response.status_code == 409
    assert response.headers["Content-Type"].startswith("text/html")


def test_asynchronous_methods(key: str) -> None:
    """They are locked by awaits."""

    def send() -> Any:
        return async_to_sync(AsyncClient().put)(f"/async/{key}/")

    assert send().content == b"True"
    with held_elsewhere(distlock(f"view:{key}", ttl=30)):
        assert send().status_code == 409


def test_permissions_come_first(key: str) -> None:
    """Who may not ask takes no key."""
    for method, address in REQUESTS[:4]:
        assert getattr(Client(), method)(address.format(key)).status_code == 403
    assert not FenceCounter.objects.filter(key=f"view:{key}").exists()


def test_transaction_of_a_request_ends_before_its_lock(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has begun around the class, no other one is begun, and the key is free behind it."""
    assert ask("post", f"/api/{key}/").json() == {"held": True, "blocks": 0, "behind": False}
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    assert ask("post", f"/api/{key}/").json() == {"held": True, "blocks": 1, "behind": True}
    assert Later(distlock(f"view:{key}").locked).result() is False


def test_one_of_two_processes(key: str) -> None:
    """The other one is refused until the first has answered."""
    with spawn(f"{__name__}:patch", key) as process:
        process.wait_for("patching", PATIENCE)
        assert ask("put", f"/api/{key}/").status_code == 409
        process.send("go on")
        assert process.result(PATIENCE) == [200, True]
    assert ask("put", f"/api/{key}/").status_code == 200


def patch(key: str) -> tuple[int, bool]:
    """Be a server that answers when it is told to."""
    with override_settings(ROOT_URLCONF=__name__):
        response = ask("patch", f"/api/{key}/")
    return response.status_code, response.json()["held"]


def test_method_decorator() -> None:
    """It is refused where the class is made, by its name."""
    decorators: list[Any] = [
        locked_view("invoice:{pk}"),
        locked_view(lambda *_, **__: "invoice"),
        distlock("invoice:{pk}"),
        distlock("invoice"),
    ]
    for each in decorators:
        with pytest.raises(LockError, match="without method_decorator"):
            method_decorator(each, name="dispatch")(View)


def test_call_without_a_request(key: str) -> None:
    """A method that another decorator has bound is told so, and takes no key."""

    class Bound(View):
        def get(self, request: HttpRequest) -> Any:
            bound = update_wrapper(partial(Bound.options, self), Bound.options)
            return locked_view(lambda *_, **__: key)(bound)(request)

    with pytest.raises(LockUsageError, match="finds no request"):
        Bound.as_view()(RequestFactory().get("/"))
    assert not FenceCounter.objects.filter(key=key).exists()
