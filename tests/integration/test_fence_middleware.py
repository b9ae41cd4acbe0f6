"""Requests with a stale fence are refused before the view, in synchronous and asynchronous code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.signing import Signer
from django.db import connection, connections
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import path
from django.views import View

from django_distlock import InvalidArgument, LockUsageError
from django_distlock.core.errors import FenceRejected
from django_distlock.fencing.http import HEADER, fence_header, fence_required
from django_distlock.fencing.rejecting import Fence
from django_distlock.fencing.seen import see
from django_distlock.models import SeenFence
from tests.contract.helpers import Later
from tests.contract.locking import eventually
from tests.shop.models import Account

from .databases import Routed
from .histories import Attempt, attempted, rising, wrong

MIDDLEWARE = "django_distlock.fencing.http.FenceMiddleware"

#: What ran, by the path of the request.
RAN: list[str] = []


def below(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Be a middleware below."""

    def middleware(request: HttpRequest) -> Any:
        RAN.append("below")
        return get_response(request)

    return middleware


def told(request: HttpRequest) -> JsonResponse:
    """Tell the fence that the view got."""
    RAN.append(request.path)
    fence = request.fence  # type: ignore[attr-defined]
    return JsonResponse({"fence": None if fence is None else [fence.key, fence.fence]})


async def atold(request: HttpRequest) -> JsonResponse:
    """Tell it, awaited."""
    return told(request)


def named(request: HttpRequest, name: str) -> JsonResponse:
    """Tell the fence, at the address of what is written."""
    return told(request)


async def anamed(request: HttpRequest, name: str) -> JsonResponse:
    """Tell it, awaited."""
    return told(request)


def queried(request: HttpRequest, name: str) -> str:
    """Make a key of what a database has, as one of `request.user` is."""
    return str(SeenFence.objects.get(pk=name).key)


def makes(request: HttpRequest) -> HttpResponse:
    """Make a row, and that a moment after somebody with a higher fence has come by."""
    RAN.append(request.path)
    fence = request.fence  # type: ignore[attr-defined]
    rows = Account.objects.fenced(fence)
    rows.create(name=fence.key)
    Later(Caller(is_async=False).come, "/told", fence.key, fence.fence + 1).result()
    try:
        rows.create(name=f"{fence.key} too late")
    except FenceRejected as error:
        return JsonResponse({"current": error.current}, status=409)
    return HttpResponse()


def failing(request: HttpRequest) -> HttpResponse:
    """Fail in the transaction of the request."""
    RAN.append(request.path)
    assert connection.in_atomic_block
    raise ValueError("broken")


class Methods(View):
    """A class whose method is decorated where it is defined."""

    @fence_required(key="{name}")
    def get(self, request: HttpRequest, name: str) -> JsonResponse:
        """Tell the fence."""
        return told(request)


urlpatterns = [
    path("told", told),
    path("atold", atold),
    path("required", fence_required(told)),
    path("arequired", fence_required(atold)),
    path("keyed/<str:name>", fence_required(key="{name}")(named)),
    path("akeyed/<str:name>", fence_required(key=lambda request, name: name)(anamed)),
    path("aqueried/<str:name>", fence_required(key=queried)(anamed)),
    path("method/<str:name>", Methods.as_view()),
    path("failing", failing),
    path("makes", makes),
]


@pytest.fixture(autouse=True)
def _project() -> Iterator[None]:
    RAN.clear()
    below_path = f"{__name__}.below"
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[MIDDLEWARE, below_path]):
        yield


class Caller:
    """Calls the project as a server of either kind does.

    Args:
        is_async: Whether an event loop serves.
    """

    def __init__(self, *, is_async: bool):
        self.is_async = is_async

    def get(self, url: str, header: str | None = None) -> Any:
        """Ask, with what stands in the header."""
        headers = {} if header is None else {HEADER: header}
        if not self.is_async:
            return Client(raise_request_exception=False).get(url, headers=headers)

        async def ask() -> Any:
            client = AsyncClient(raise_request_exception=False)
            try:
                return await client.get(url, headers=headers)
            finally:
                # A server does so at the end of a request; the client of the tests does not.
                await sync_to_async(connections.close_all)()

        return asyncio.run(ask())

    def come(self, url: str, key: str, fence: int) -> Any:
        """Ask with a fence."""
        return self.get(url, fence_header(Fence(key, fence))[HEADER])


@pytest.fixture(params=["wsgi", "asgi"])
def caller(request: pytest.FixtureRequest) -> Caller:
    """Give servers of both kinds."""
    return Caller(is_async=request.param == "asgi")


@pytest.mark.parametrize("view", ["told", "atold", "required", "arequired"])
def test_fence_reaches_the_view_and_lower_ones_do_not(caller: Caller, view: str, key: str) -> None:
    """412 tells the key and both fences; neither the view nor a middleware below runs."""
    # The first one, the same again, and a higher one.
    for fence in (5, 5, 7):
        answer = caller.come(f"/{view}", key, fence)
        assert (answer.status_code, answer.json()) == (200, {"fence": [key, fence]})
    RAN.clear()
    answer = caller.come(f"/{view}", key, 6)
    assert answer.status_code == 412
    assert answer.json() == {"error": "fence_rejected", "key": key, "fence": 6, "seen": 7}
    assert answer["X-Lock-Fence-Seen"] == "7"
    assert HEADER not in answer.headers  # Signed, it would let the stale one pass.
    assert RAN == []
    assert SeenFence.objects.get(pk=key).fence == 7


def test_view_that_was_overtaken_makes_no_row(caller: Caller, key: str) -> None:
    """A row that is made has no fence yet; the highest one that was seen refuses it."""
    answer = caller.come("/makes", key, 6)
    assert (answer.status_code, answer.json()) == (409, {"current": 7})
    made = Account.objects.filter(name__startswith=key)
    assert [(row.name, row.fence) for row in made] == [(key, 6)]
    made.delete()


def test_request_without_a_fence_passes(caller: Caller) -> None:
    """`request.fence` is None, no database is asked; where one is required, 428 names it."""
    asked: list[str] = []

    def note(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        asked.append(sql)
        return execute(sql, *rest)

    with connection.execute_wrapper(note):
        answer = caller.get("/told")
    assert (answer.status_code, answer.json()) == (200, {"fence": None})
    assert asked == []
    assert RAN == ["below", "/told"]
    for view, required in (("required", told), ("arequired", atold)):
        answer = caller.get(f"/{view}")
        assert answer.status_code == 428
        assert HEADER in answer.json()["detail"]
        made = fence_required(required)
        assert (made.__name__, iscoroutinefunction(made)) == (required.__name__, required is atold)
    assert RAN == ["below", "/told", "below", "below"]


def test_method_may_require_a_fence(caller: Caller, key: str) -> None:
    """It has its object before the request."""
    assert caller.come(f"/method/{key}", key, 7).json() == {"fence": [key, 7]}
    assert caller.come(f"/method/{key}-other", key, 7).status_code == 403
    assert caller.get(f"/method/{key}").status_code == 428


def test_malformed_fence_is_a_bad_request(caller: Caller) -> None:
    """400, and nothing runs."""
    for text in ("", "nonsense", "invoice;7", "invoice;0;abc", "a b;7;abc"):
        answer = caller.get("/told", text)
        assert (answer.status_code, answer.json()["error"]) == (400, "invalid_argument")
    assert RAN == []


def test_forged_fence_is_forbidden(caller: Caller, key: str) -> None:
    """403, nothing runs, and no mark is raised: nobody can lock out the others."""
    good = fence_header(Fence(key, 5))[HEADER]
    forged = [good.replace(";5;", ";6;"), Signer(key="another", sep=";").sign(f"{key};6")]
    for text in forged:
        answer = caller.get("/told", text)
        assert (answer.status_code, answer.json()["error"]) == (403, "bad_fence")
    assert RAN == []
    assert not SeenFence.objects.filter(pk=key).exists()


@pytest.mark.parametrize("view", ["keyed", "akeyed"])
def test_view_may_require_the_fence_of_its_key(caller: Caller, view: str, key: str) -> None:
    """A sender that has another key is refused, with its fence and however high that is."""
    assert caller.come(f"/{view}/{key}", key, 5).json() == {"fence": [key, 5]}
    RAN.clear()
    answer = caller.come(f"/{view}/{key}-2", key, 6)
    assert (answer.status_code, answer.json()) == (
        403,
        {"error": "other_key", "key": key, "wanted": f"{key}-2"},
    )
    assert caller.get(f"/{view}/{key}").status_code == 428
    assert caller.come(f"/{view}/{'k' * 600}", key, 6).status_code == 400
    assert RAN == ["below"] * 3


def test_key_may_be_made_of_what_is_queried(caller: Caller, key: str) -> None:
    """An asynchronous view's as well, such as of `request.user`."""
    see(Fence(f"{key}-2", 1))
    assert caller.come(f"/aqueried/{key}", key, 5).json() == {"fence": [key, 5]}
    assert caller.come(f"/aqueried/{key}-2", key, 6).status_code == 403


def test_key_that_the_view_cannot_make_is_refused_at_once() -> None:
    """A template is read where the view is decorated."""
    with pytest.raises(InvalidArgument, match="'nothing', which is not a parameter"):
        fence_required(key="payment:{nothing}")(named)
    with pytest.raises(
        InvalidArgument, match="key must be a template or a function that returns one, not 5"
    ):
        fence_required(key=5)  # type: ignore[call-overload]


def test_signed_jump_shuts_nobody_out(caller: Caller, key: str, caplog: Any) -> None:
    """The highest fence there is would refuse every later request: 400, logged, no mark."""
    caller.come("/told", key, 5)
    RAN.clear()
    answer = caller.come("/told", key, 900_000_000_000_000)
    assert (answer.status_code, answer.json()["error"]) == (400, "fence_jump")
    assert RAN == []
    (record,) = [each for each in caplog.records if each.name == "django_distlock"]
    assert (record.levelname, record.distlock_key) == ("WARNING", key)
    assert record.distlock_fence == 900_000_000_000_000
    assert caller.come("/told", key, 6).status_code == 200


def test_project_without_the_middleware_is_told() -> None:
    """A view that requires a fence never runs unguarded: the mistake is named."""
    for view in ("required", "arequired"):
        with override_settings(MIDDLEWARE=[]), pytest.raises(LockUsageError, match="FenceMiddle"):
            Client().get(f"/{view}")
    assert RAN == []


def test_rollback_of_the_request_leaves_the_mark(caller: Caller, key: str) -> None:
    """With `ATOMIC_REQUESTS` a view that fails takes back what it wrote, and not the fence."""
    settings = connections["default"].settings_dict
    settings["ATOMIC_REQUESTS"] = True
    try:
        assert caller.come("/failing", key, 7).status_code == 500
        assert RAN[-1] == "/failing"
        assert caller.come("/told", key, 6).status_code == 412
    finally:
        settings["ATOMIC_REQUESTS"] = False


def test_database_that_does_not_answer_lets_nothing_pass(caller: Caller, key: str) -> None:
    """Nobody knows whether the fence is the highest: 500, and nothing runs."""
    with override_settings(DATABASE_ROUTERS=[Routed("nowhere", SeenFence)]):
        answer = caller.come("/told", key, 7)
    assert answer.status_code == 500
    assert RAN == []


# Many at once


def test_no_request_passes_behind_a_higher_fence(caller: Caller, key: str) -> None:
    """Four clients come with fences that mostly rise; the order is right throughout."""

    def pass_or_raise(fence: int) -> None:
        status = caller.come("/told", key, fence).status_code
        assert status in (200, 412)
        if status == 412:
            raise FenceRejected(key=key)

    def come(seed: int) -> list[Attempt]:
        return [attempted(fence, pass_or_raise) for fence in rising(40, seed)]

    clients = [Later(come, seed) for seed in range(4)]
    together = [each for client in clients for each in client.result(60)]
    assert wrong(together) == []
    assert {each.passed for each in together} == {True, False}


def test_view_that_is_slow_closes_the_gap_at_the_write(key: str) -> None:
    """The middleware alone lets a late write through, as documented; the row refuses it."""
    entered, go, wrote = threading.Event(), threading.Event(), []
    account = Account.objects.create(name=key)

    def slow(request: HttpRequest) -> HttpResponse:
        fence = request.fence  # type: ignore[attr-defined]
        if fence.fence == 5:
            entered.set()
            assert go.wait(20)
        wrote.append(fence.fence)
        Account.objects.fenced(fence).filter(pk=account.pk).update(value=fence.fence)
        return HttpResponse()

    urlpatterns.append(path("slow", slow))
    try:
        caller = Caller(is_async=False)
        late = Later(caller.come, "/slow", key, 5)
        assert eventually(entered.is_set, 20)
        assert caller.come("/slow", key, 6).status_code == 200
        go.set()
        refused = late.result()
    finally:
        urlpatterns.pop()
    assert wrote == [6, 5]
    assert refused.status_code == 500
    assert isinstance(refused.exc_info[1], FenceRejected)
    account.refresh_from_db()
    assert account.value == 6
    account.delete()
