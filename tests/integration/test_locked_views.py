"""`locked_view` and `LockedViewMixin`: one request at a time, and a good answer for the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.mixins import LoginRequiredMixin
from django.contrib.auth.models import AnonymousUser, User
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path
from django.utils.functional import SimpleLazyObject
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    LockNotAcquired,
    LockUsageError,
    current_lease,
    distlock,
    lock_backends,
)
from django_distlock.core.declarations import declared
from django_distlock.core.metadata import MAX_METADATA_BYTES
from django_distlock.locks import taking
from django_distlock.models import FenceCounter
from django_distlock.signals import lock_bypassed
from django_distlock.testing import lose_connection
from django_distlock.views import LockedViewMixin, locked_view
from tests.contract.helpers import Later, held, there
from tests.contract.locking import Heard, eventually, held_elsewhere
from tests.shop.models import Row

from .projects import importable

TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]


def said() -> HttpResponse:
    """Say what the view works under."""
    lease = current_lease()
    blocks = len(connections["default"].atomic_blocks)
    return HttpResponse(f"held={bool(lease and lease.held)} blocks={blocks}")


def body(request: HttpRequest, key: str) -> HttpResponse:
    """Be a view."""
    return said()


async def abody(request: HttpRequest, key: str) -> HttpResponse:
    """Be an asynchronous one."""
    return said()


def locked(view: Callable[..., Any] = body, **options: Any) -> Any:
    """Lock a view by what its URL captures."""
    return locked_view("view:{key}", **{"wait": 0, **options})(view)


plain, asynchronous = locked(), locked(abody)


def teapot(request: HttpRequest, error: Exception) -> HttpResponseBase:
    """Make an answer of one's own."""
    return HttpResponse(f"{type(error).__name__}", headers={"Retry-After": "99"})


def writing(request: HttpRequest, key: str) -> HttpResponse:
    """Write, and look whether others see it."""
    Row.objects.create(name=key)
    if "fail" in request.GET:
        raise ZeroDivisionError
    seen = Later(lambda: Row.objects.filter(name=key).exists()).result()
    return HttpResponse(f"seen={seen}")


@transaction.non_atomic_requests
@csrf_exempt
def unwrapped(request: HttpRequest, key: str) -> HttpResponse:
    """Be a view that wants no transaction."""
    return said()


def plainly(view: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a view as decorators did that know no asynchronous ones."""

    @wraps(view)
    def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return view(request, *args, **kwargs)

    return wrapper


def inner(request: HttpRequest, key: str) -> HttpResponse:
    """Meet a conflict of one's own."""
    distlock(f"{key}:inner", wait=0).acquire()
    return said()


class Class(LockedViewMixin, View):
    """A view that is a class."""

    lock_key = "view:{key}"
    lock_options = {"wait": 0}

    def get(self, request: HttpRequest, key: str) -> HttpResponse:
        """Answer."""
        return said()


class AsyncClass(Class):
    """The same, asynchronous."""

    async def get(self, request: HttpRequest, key: str) -> HttpResponse:  # type: ignore[override]
        """Answer."""
        return said()


def metadata(request: HttpRequest, key: str, rest: str = "") -> HttpResponse:
    """Say what the store keeps beside the holder."""
    record = Later(held, lock_backends["default"], f"view:{key}").result()
    return JsonResponse(record.holder.metadata)


async def ametadata(request: HttpRequest, key: str) -> HttpResponse:
    """Say so, asynchronously."""
    return metadata(request, key)


class Kept(LockedViewMixin, View):
    """The same as a class."""

    lock_key = "view:{key}"
    lock_options = {"metadata": {"reason": "test"}}

    def get(self, request: HttpRequest, key: str) -> HttpResponse:
        """Answer."""
        return metadata(request, key)

    post = get


class AsyncKept(Kept):
    """The same, asynchronous."""

    async def get(self, request: HttpRequest, key: str) -> HttpResponse:  # type: ignore[override]
        """Answer."""
        return metadata(request, key)

    post = get  # type: ignore[assignment]


#: What is kept beside the holder, by the view itself.
REASON = {"metadata": {"reason": "test"}}
VIEWS: dict[str, Any] = {
    "plain": plain,
    "async": asynchronous,
    "class": Class.as_view(),
    "async-class": AsyncClass.as_view(),
    "locked": locked(status=423),
    "limited": locked(permits=lambda request, key: 2),
    "raising": locked(on_conflict="raise"),
    "running": locked(on_conflict="run", on_unavailable="run"),
    "going-on": locked(abody, on_unavailable="run"),
    "away": locked(on_unavailable="skip"),
    "own": locked_view(lambda request, key: f"view:{key}", wait=0, refusal=teapot)(body),
    "writing": locked(writing),
    "inner": locked(inner),
    "unwrapped": locked(unwrapped),
    "marked-above": transaction.non_atomic_requests(locked()),
    "keyless": locked_view(lambda request, key: None, wait=0)(body),  # type: ignore[arg-type, return-value]
    "misspelt": type("Misspelt", (Class,), {"lock_key": "view:{kay}"}).as_view(),  # type: ignore[attr-defined]
    "kept": locked(metadata, **REASON),
    "async-kept": locked(ametadata, **REASON),
    "kept-class": Kept.as_view(),
    "async-kept-class": AsyncKept.as_view(),
    "quiet": locked(metadata, metadata={"request": "password reset"}),
}
urlpatterns = [
    *(path(f"{name}/<key>/", view) for name, view in VIEWS.items()),
    path("kept/<key>/<rest>/", VIEWS["kept"]),
]

SYNC = ("plain", "class")
ASYNC = ("async", "async-class")


@pytest.fixture(autouse=True)
def _project(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    settings.ALLOWED_HOSTS = ["*"]
    settings.TEMPLATES = TEMPLATES


@pytest.fixture
def taken(key: str) -> Iterator[str]:
    """Hold the key of a view."""
    with held_elsewhere(distlock(f"view:{key}", ttl=30)):
        yield key


def get(address: str, **headers: str) -> Any:
    """Send a request, as a server of its kind does."""
    return send("get", address, **headers)


def send(method: str, address: str, **headers: str) -> Any:
    """Send one of another method."""
    if address.startswith("/async"):
        return async_to_sync(getattr(AsyncClient(), method))(address, headers=headers)
    return getattr(Client(), method)(address, headers=headers)


@pytest.mark.parametrize("view", [*SYNC, *ASYNC])
def test_view_runs_under_its_lock(view: str, key: str) -> None:
    """It is held while the view runs, and free behind it."""
    response = get(f"/{view}/{key}/")
    assert (response.status_code, response.content[:9]) == (200, b"held=True")
    assert Later(distlock(f"view:{key}").locked).result() is False


def test_parameter_may_have_any_name(key: str) -> None:
    """Also one that the package's own functions have."""

    class Page(LockedViewMixin, View):
        lock_key = "view:{view}"

        def get(self, request: HttpRequest, view: str) -> HttpResponse:
            return said()

    @locked_view("view:{view}")
    def page(request: HttpRequest, view: str) -> HttpResponse:
        return said()

    @locked_view("view:{view}")
    async def awaited(request: HttpRequest, view: str) -> HttpResponse:
        return said()

    request = RequestFactory().get("/")
    calls: list[Any] = [page, Page.as_view(), async_to_sync(awaited)]
    for call in calls:
        assert call(request, view=key).content[:9] == b"held=True"


@pytest.mark.parametrize("view", ["kept", "async-kept", "kept-class", "async-kept-class"])
def test_request_is_kept_beside_the_holder(view: str, key: str) -> None:
    """Method and path, for operators: without the query, and beside what the view adds itself."""
    for method in ("get", "post"):
        told = send(method, f"/{view}/{key}/?token=secret").json()
        assert told == {"request": f"{method.upper()} /{view}/{key}/", "reason": "test"}


def test_view_says_itself_what_is_kept_of_its_request(key: str) -> None:
    """Where a path is a secret, for one."""
    assert get(f"/quiet/{key}/").json() == {"request": "password reset"}


def test_path_of_any_text_is_kept(key: str) -> None:
    """It is escaped, as in the request, so every store takes it."""
    for rest, shown in {
        "a%00b": "a%00b",
        "a%0A%22b%5C": "a%0A%22b%5C",
        "ż🔒": "%C5%BC%F0%9F%94%92",
        "%E2%80%AE": "%E2%80%AE",  # From right to left.
        "a%20b": "a%20b",
        "a:b,(c)=@": "a:b,(c)=@",
    }.items():
        assert get(f"/kept/{key}/{rest}/").json()["request"] == f"GET /kept/{key}/{shown}/"


def test_request_is_cut_to_the_room_that_is_left(key: str) -> None:
    """A long path is cut, sooner where other metadata are large, and never refuses a request."""
    address = "/" + "p" * 600
    frame = len(json.dumps({"request": "", "note": ""}))
    for left, shown in ((600, 255), (254, 254), (5, 5), (1, 1), (0, None)):
        size = MAX_METADATA_BYTES - frame - left
        note = "ż" * (size // 2) + "x" * (size % 2)
        view = locked_view(key, metadata={"note": note})(holders_metadata)
        told = json.loads(view(RequestFactory().get(address)).content)
        assert told["note"] == note
        assert told.get("request") == (None if shown is None else f"GET {address}"[:shown])


def holders_metadata(request: HttpRequest) -> HttpResponse:
    """Tell what a lease keeps beside its holder."""
    return JsonResponse(there(current_lease()).holder.metadata)


@pytest.mark.parametrize("view", [*SYNC, *ASYNC])
def test_conflict_is_answered(view: str, taken: str) -> None:
    """The view is not called, and the answer says when to come back."""
    response = get(f"/{view}/{taken}/")
    assert response.status_code == 409
    assert response.headers["Content-Type"].startswith("text/html")
    # The holder has had it for a moment: it may be done in another one, long before its ttl.
    assert 1 <= int(response.headers["Retry-After"]) < 20
    assert response.headers["Cache-Control"] == "no-store"
    assert b"Someone else" in response.content
    assert f"in {response.headers['Retry-After']} second" in response.content.decode()

    # Programs are answered in JSON, and learn neither the key nor its holder.
    response = get(f"/{view}/{taken}/", accept="application/json")
    assert response.status_code == 409
    answer = response.json()
    assert answer["error"] == "acquisition_timeout"
    assert answer["retry_after"] == int(response.headers["Retry-After"])
    assert taken not in response.content.decode()


def test_when_to_come_back() -> None:
    """As long as the holder has had it, and when its lease ends at the latest; or as is set."""

    def answer(refused: Exception, **options: Any) -> str:
        with patch.object(taking, "_take", side_effect=refused):
            refusal = locked_view("key", **options)(plain)(RequestFactory().get("/"), key="k")
            return str(refusal.headers["Retry-After"])

    for held_for, expires_in, again in (
        (0.2, 30, "1"), (7.5, 30, "8"), (90, 3.2, "5"), (None, 3.2, "5"), (7.5, None, "1"),
    ):  # fmt: skip
        error = LockNotAcquired("", key="k", held_for=held_for, expires_in=expires_in)
        assert answer(error) == again
        assert answer(error, retry_after=2.5) == "3"


def test_too_many_requests(key: str) -> None:
    """Where as many run as `permits` lets, with `Retry-After`; below that they run."""
    lock = distlock(f"view:{key}", ttl=30, permits=2)
    with held_elsewhere(lock):
        assert get(f"/limited/{key}/").content[:9] == b"held=True"
        with held_elsewhere(lock):
            response = get(f"/limited/{key}/")
    assert response.status_code == 429
    assert 1 <= int(response.headers["Retry-After"]) <= 31


def test_answers_of_the_project(taken: str, tmp_path: Path) -> None:
    """Another status, a function's answer, a page in the place of ours, or none at all."""
    assert get(f"/locked/{taken}/").status_code == 423
    assert get(f"/limited/{taken}/").status_code == 429
    response = get(f"/own/{taken}/")
    assert (response.status_code, response.content) == (409, b"LockNotAcquired")
    assert response.headers["Retry-After"] == "99"
    page = tmp_path / "django_distlock" / "busy.html"
    page.parent.mkdir()
    page.write_text("wait {{ seconds }}, {{ error.code }}")
    with override_settings(TEMPLATES=[{**TEMPLATES[0], "DIRS": [tmp_path]}]):
        response = get(f"/plain/{taken}/")
    assert response.content.decode().startswith("wait ")
    assert "acquisition_timeout" in response.content.decode()
    with override_settings(TEMPLATES=[]):
        assert b"Someone else" in get(f"/plain/{taken}/").content
    with pytest.raises(LockNotAcquired):
        get(f"/raising/{taken}/")
    assert get(f"/running/{taken}/").content.startswith(b"held=False")


@locked_view("view:{request.user.username}", wait=0)
async def of_user(request: HttpRequest) -> HttpResponse:
    """Be an asynchronous view for those who are logged in."""
    return said()


def test_asynchronous_view_of_a_user_whom_nobody_has_loaded(key: str, tmp_path: Path) -> None:
    """The key asks the database for the user, and so does the page of the project."""
    user = User.objects.create(username=key)

    def answer() -> Any:
        request: Any = RequestFactory().get("/")
        request.user = SimpleLazyObject(lambda: User.objects.get(pk=user.pk))
        return async_to_sync(of_user)(request)

    page = tmp_path / "django_distlock" / "busy.html"
    page.parent.mkdir()
    page.write_text("wait, {{ request.user.username }}")
    options = {"context_processors": ["django.template.context_processors.request"]}
    with override_settings(TEMPLATES=[{**TEMPLATES[0], "DIRS": [tmp_path], "OPTIONS": options}]):
        assert answer().content[:9] == b"held=True"
        with held_elsewhere(distlock(f"view:{key}")):
            assert answer().content.decode() == f"wait, {key}"
    user.delete()


def test_conflict_of_the_views_own_is_not_answered(key: str) -> None:
    """What the view runs into itself is no conflict about the view."""
    with held_elsewhere(distlock(f"{key}:inner")), pytest.raises(LockNotAcquired):
        get(f"/inner/{key}/")


@pytest.mark.parametrize("view", ["away", "running", "going-on", "plain"])
def test_store_that_is_away(view: str, key: str) -> None:
    """Answered with 503, passed by, or raised: as the view says; a signal tells of passing by."""
    with Heard(lock_bypassed, f"view:{key}") as heard, lose_connection():
        if view == "plain":
            with pytest.raises(BackendUnavailable):
                get(f"/plain/{key}/")
            return
        response = get(f"/{view}/{key}/")
    if view == "away":
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert b"not possible at the moment" in response.content
    else:
        assert response.content.startswith(b"held=False")
        assert heard.once["waited"] < 5
        assert heard.once["holder"] is None


@pytest.fixture
def atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each request have a transaction."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)


@pytest.mark.usefixtures("atomic_requests")
@pytest.mark.parametrize("view", SYNC)
def test_transaction_is_inside_of_the_lock(view: str, key: str) -> None:
    """One transaction, begun behind the grant, and over when the key is given back."""
    assert get(f"/{view}/{key}/").content == b"held=True blocks=1"
    assert Later(distlock(f"view:{key}").locked).result() is False


@pytest.mark.usefixtures("atomic_requests")
def test_two_locks_around_a_view(key: str) -> None:
    """The one transaction is begun inside of both."""
    twice = locked_view("outer:{key}", wait=0)(plain)
    answer = twice(RequestFactory().get("/"), key=key)
    assert answer.content == b"held=True blocks=1"
    assert "default" in twice._non_atomic_requests


@pytest.mark.usefixtures("atomic_requests")
def test_what_is_written_is_committed_with_the_view(key: str) -> None:
    """Not before its end, and not at all where it fails."""
    assert get(f"/writing/{key}/").content == b"seen=False"
    assert Row.objects.filter(name=key).delete()[0] == 1
    with pytest.raises(ZeroDivisionError):
        get(f"/writing/{key}/?fail")
    assert not Row.objects.filter(name=key).exists()
    assert eventually(lambda: not distlock(f"view:{key}").locked())


@pytest.mark.usefixtures("atomic_requests")
def test_view_that_wants_no_transaction(key: str) -> None:
    """`non_atomic_requests` goes on to hold on either side, as do other marks of the view."""
    for view in ("unwrapped", "marked-above"):
        assert get(f"/{view}/{key}/").content == b"held=True blocks=0"
    assert locked_view("{key}")(unwrapped).csrf_exempt  # type: ignore[attr-defined]


def test_arguments_that_cannot_be() -> None:
    """They are refused where the decorator stands, and named."""
    wrong: dict[str, Any] = {
        "on_conflict": "wait", "on_unavailable": "wait", "status": 418, "ttl": -1,
        "heartbeat": "yes",
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(InvalidArgument, match=name):
            locked_view("key", **{name: value})


def test_mistakes_of_the_project_are_no_mistakes_of_the_client(key: str) -> None:
    """They are raised, and not answered with 400, as a key that no lock can have is."""
    assert get(f"/plain/{'x' * 600}/").status_code == 400
    with pytest.raises(InvalidArgument, match="NoneType"):
        get(f"/keyless/{key}/")
    with pytest.raises(ImproperlyConfigured, match="kay"):
        get(f"/misspelt/{key}/")


def test_mixin_locks_at_its_place(key: str, settings: Any) -> None:
    """A mixin before it decides before a key is taken, and leaves no fence; the check says so."""
    body = {"lock_key": Class.lock_key, "get": Class.get}
    outside: Any = type("Outside", (LoginRequiredMixin, LockedViewMixin, View), body)
    inside: Any = type("Inside", (LockedViewMixin, LoginRequiredMixin, View), body)
    views = [outside.as_view(), inside.as_view()]
    told = [each.msg for each in checks.run_checks() if each.id == "distlock.W008"]
    assert ["Inside" in each for each in told] == [True]
    settings.LOGIN_URL = "/login/"
    for view, fences in zip(views, (0, 1), strict=True):
        request = RequestFactory().get("/")
        request.user = AnonymousUser()
        assert view(request, key=key).status_code == 302
        assert FenceCounter.objects.filter(key=f"view:{key}").count() == fences


def test_mixin_locks_the_key_that_as_view_is_given(key: str) -> None:
    """And with the options that it is given, as other attributes of a class are replaced."""
    view = Class.as_view(lock_key="other:{key}", lock_options={"wait": 0, "status": 423})
    assert declared[view][0].key == "other:{key}"
    lease = distlock(f"other:{key}").acquire()
    refused = Later(view, RequestFactory().get("/"), key=key).result()
    lease.release()
    assert (refused.status_code, refused.headers["Retry-After"]) == (423, "1")
    with pytest.raises(ImproperlyConfigured, match="kay"):
        Class.as_view(lock_key="other:{kay}")(RequestFactory().get("/"), key=key)
    with pytest.raises(ImproperlyConfigured, match="lock_key"):
        Class.as_view(lock_key="")


def test_view_that_answers_later(key: str) -> None:
    """What returns an answer that is still to be made is told so, and nothing is made."""
    made = []

    async def answer() -> HttpResponse:
        made.append("answer")
        return HttpResponse()

    @locked_view(key)
    def view(request: HttpRequest) -> Any:
        return answer()

    with pytest.raises(LockUsageError, match="view returns a coroutine"):
        view(RequestFactory().get("/"))
    assert made == []
    assert not distlock(key).locked()


def test_missing_parentheses_are_told_at_import(tmp_path: Path) -> None:
    """A view is no key, and its module says so; of a method it is known when it is called."""
    text = "from django_distlock.views import locked_view\n@locked_view\ndef pay(request): ...\n"
    with (
        importable(tmp_path, {"bare": text}),
        pytest.raises(InvalidArgument, match=r"pay as its key\..*Write @locked_view\("),
    ):
        import_module("bare")


def test_what_is_no_view(key: str) -> None:
    """A class, a generator, a decorator without its key, a mixin at a wrong place."""

    def generator(request: HttpRequest) -> Iterator[bytes]:
        yield b""

    with pytest.raises(InvalidArgument, match="LockedViewMixin"):
        locked_view("view")(View)
    with pytest.raises(LockUsageError, match="generator"):
        locked_view("view")(generator)
    with pytest.raises(LockUsageError, match="abody returns a coroutine"):
        locked_view("view")(plainly(asynchronous))
    bare: Any = locked_view(plain)
    with pytest.raises(InvalidArgument, match="needs a key"):
        bare(RequestFactory().get("/"), key=key)
    with pytest.raises(InvalidArgument, match="pk"):
        locked_view("{pk}")(unwrapped)
    # Behind the view's class it would not be asked, and nothing would be locked.
    with pytest.raises(TypeError, match="first"):
        type("Last", (View, LockedViewMixin), {"lock_key": "view"})
    for lock_key in ("", None, 5):
        made: Any = type("Keyless", (LockedViewMixin, View), {"lock_key": lock_key})
        with pytest.raises(ImproperlyConfigured, match="lock_key"):
            made.as_view()
