"""`idempotent`: of requests with one key, the first runs, and the others get its response."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import rest_framework.authentication
import rest_framework.exceptions
import rest_framework.response
import rest_framework.views
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import BadRequest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.handlers.wsgi import WSGIRequest
from django.db import IntegrityError, connections, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse, QueryDict, StreamingHttpResponse
from django.middleware.csrf import CsrfViewMiddleware
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory, override_settings
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from psycopg import IsolationLevel
from rest_framework.decorators import api_view, authentication_classes, permission_classes
from rest_framework.parsers import BaseParser, FileUploadParser
from rest_framework.permissions import BasePermission

from django_distlock import InvalidArgument, LockUsageError, distlock, idempotency
from django_distlock.core.declarations import declared
from django_distlock.idempotency import KEPT_HEADERS, idempotent
from django_distlock.inspection import prune_responses
from django_distlock.models import StoredResponse
from django_distlock.testing import lose_connection
from django_distlock.views import locked_view
from tests.contract.aliases import alias_like
from tests.contract.helpers import Later, at_once, prompt
from tests.contract.locking import eventually, held_elsewhere, rolled_back
from tests.processes import spawn
from tests.shop.models import Row

from .databases import Routed, ask
from .operating import run
from .projects import importable

ADA, BOB = (User(pk=pk, username=str(pk)) for pk in (1, 2))


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    StoredResponse.objects.all().delete()
    Row.objects.all().delete()
    # The checks of other tests are not about what is decorated here.
    declared.clear()


def request(
    key: str | None = "k", user: Any = ADA, data: Any = "{}", url: str = "/pay", **more: Any
) -> HttpRequest:
    """Return a request as a view gets it."""
    more = {"content_type": "application/json", **more}
    headers = {} if key is None else {"Idempotency-Key": key, **more.pop("headers", {})}
    method = more.pop("method", "post")
    made: HttpRequest = getattr(RequestFactory(), method)(url, data, headers=headers, **more)
    made.user = user
    return made


def pay(request: HttpRequest, *_: Any) -> HttpResponse:
    """Write a row for each run."""
    Row.objects.create(name="paid")
    number = Row.objects.filter(name="paid").count()
    return JsonResponse({"number": number}, status=201, headers={"Location": f"/paid/{number}"})


def paid() -> int:
    """Say how often it was paid."""
    return Row.objects.filter(name="paid").count()


def numbers(view: Any, *requests: HttpRequest) -> list[int]:
    """Return the number of the run that each request is answered with."""
    return [json.loads(view(each).content)["number"] for each in requests]


def told(response: Any) -> tuple[int, Any]:
    """Return the status, and what an error is called."""
    return response.status_code, json.loads(response.content).get("error")


# Once


def test_parameter_of_the_view_may_be_called_view() -> None:
    """It is the project's, and no argument of ours."""

    @idempotent()
    def paying(request: HttpRequest, view: str) -> HttpResponse:
        return pay(request, view)

    assert paying(request(), view="x").status_code == 201


def test_later_request_gets_the_stored_response() -> None:
    """Status, headers and body; the view does not run again."""
    view = idempotent()(pay)
    first, second = view(request()), view(request())
    assert paid() == 1
    for each in (first, second):
        assert (each.status_code, each.content) == (201, b'{"number": 1}')
        assert each["Location"] == "/paid/1"
        assert each["Content-Type"] == "application/json"
    assert "Idempotency-Replayed" not in first
    assert second["Idempotency-Replayed"] == "true"
    assert numbers(view, request("other")) == [2]


def test_requests_without_a_key_run_as_ever() -> None:
    """Unless a key is required. What is safe takes none."""
    view = idempotent()(pay)
    assert [view(request(None)).status_code for _ in range(2)] == [201, 201]
    strict = idempotent(required=True)(pay)
    assert told(strict(request(None))) == (400, "bad_key")
    assert paid() == 2
    for method in ("get", "head", "options", "trace"):
        assert strict(request(method=method, data=None, content_type="")).status_code == 201
    assert paid() == 6
    assert not StoredResponse.objects.exists()


def test_keys_have_a_form() -> None:
    """1 to 255 characters that can be printed."""
    made = request("k")
    for key in ("", "x" * 256, "tab\there", "ümlaut"):
        made.META["HTTP_IDEMPOTENCY_KEY"] = key
        assert told(idempotent()(pay)(made)) == (400, "bad_key")
    assert paid() == 0
    assert idempotent()(pay)(request("x" * 255)).status_code == 201


def test_another_request_under_the_key_is_refused() -> None:
    """With 422, and without a word of what the first one was answered."""
    others: list[dict[str, Any]] = [
        {"data": '{"amount": 5}'},
        {"url": "/pay?again=1"},
        {"url": "/pay/other"},
        {"method": "put"},
        {"content_type": "text/plain"},
    ]
    view = idempotent()(pay)
    view(request())
    for each in others:
        assert told(view(request(**each))) == (422, "other_request"), each
    assert numbers(view, request()) == [1]


def upload(name: str, content: bytes, **fields: str) -> dict[str, Any]:
    """Return the parts of a form with a file."""
    return {**fields, "file": SimpleUploadedFile(name, content)}


@pytest.mark.parametrize("consumed", [False, True])
def test_form_with_a_file_is_compared_by_its_parts(*, consumed: bool) -> None:
    """Each attempt has another boundary; and a middleware may have read it already."""
    seen = []

    def take(request: HttpRequest) -> HttpResponse:
        (file,) = request.FILES.getlist("file")
        seen.append((request.POST["a"], file.read()))
        return HttpResponse("taken")

    view = idempotent()(take)

    def send(name: str, content: bytes, boundary: str, **fields: str) -> int:
        data = encode_multipart(boundary, upload(name, content, **fields))
        made = request(data=data, content_type=f"multipart/form-data; boundary={boundary}")
        if consumed:
            assert made.POST
        return int(view(made).status_code)

    assert send("x.txt", b"12", "one", a="1", b="2") == 200
    assert send("x.txt", b"12", "two", b="2", a="1") == 200
    assert send("x.txt", b"13", "two", a="1", b="2") == 422
    assert send("y.txt", b"12", "two", a="1", b="2") == 422
    assert send("x.txt", b"12", "two", a="1", b="3") == 422
    assert seen == [("1", b"12")]


def test_form_that_django_does_not_parse_is_compared_by_its_body() -> None:
    """It parses those of POST alone. Their boundaries do not count here either."""
    view = idempotent()(pay)

    def put(boundary: str, amount: str) -> int:
        data = encode_multipart(boundary, upload("x.txt", b"12", amount=amount))
        kind = f"multipart/form-data; boundary={boundary}"
        return int(view(request(method="put", data=data, content_type=kind)).status_code)

    assert [put("one", "5"), put("two", "5"), put("two", "6")] == [201, 201, 422]
    assert paid() == 1


class Broken(BytesIO):
    """A connection that breaks, of which mod_wsgi and uWSGI tell."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Raise what they raise."""
        raise OSError("broken")


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=one"])
@pytest.mark.parametrize("tells", [False, True])
def test_request_whose_connection_breaks_may_be_sent_again(kind: str, *, tells: bool) -> None:
    """What has arrived of it is no other request. Of gunicorn, nobody hears that it broke."""
    form = encode_multipart("one", upload("x.txt", b"1" * 99, amount="5"))
    data = b'{"amount": 5}' if "json" in kind else form

    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        whole = request.POST.get("amount") if "form" in kind else request.body == data
        return pay(request) if whole else HttpResponse(status=400)

    def send(stream: BytesIO) -> int:
        tokens = {"Cookie": f"csrftoken={'a' * 32}", "X-CSRFToken": "a" * 32}
        made: Any = request(data=data, content_type=kind, headers=tokens)
        made = WSGIRequest({**made.META, "wsgi.input": stream})
        made.user = ADA
        # Reads forms, and passes over a broken connection.
        csrf = CsrfViewMiddleware(view)
        csrf.process_request(made)
        assert csrf.process_view(made, view, (), {}) is None
        try:
            return int(view(made).status_code)
        except (BadRequest, OSError):
            return 0

    broken = Broken(data) if tells else BytesIO(data[:-9])
    assert [send(each) for each in (broken, BytesIO(data), BytesIO(data))] == [0, 201, 201]
    assert paid() == 1


# Whose key


def test_users_share_no_key() -> None:
    """The key of one never gives the response of another one, whatever `key` says."""
    # Of another kind, with the same number.
    robot = SimpleNamespace(pk=1, is_authenticated=True)
    for key in (None, "same", lambda *_: "same"):
        requests = [request(user=each) for each in (ADA, BOB, robot, ADA)]
        assert numbers(idempotent(key)(pay), *requests) == [1, 2, 3, 1]
        StoredResponse.objects.all().delete()
        Row.objects.all().delete()


def test_nobody_has_no_key() -> None:
    """Who is not logged in, and is not told apart by `key`, is refused."""
    nobody = request(user=AnonymousUser(), url=f"/{'x' * 600}")
    nobody.session = SimpleNamespace(session_key=None)  # type: ignore[assignment]
    without = request(url=nobody.path)
    without.session = nobody.session
    del without.user
    ways: dict[str, Any] = {
        "left out": None,
        "none": lambda *_: None,
        "empty": lambda *_: "",
        "no session": "{request.session.session_key}",
        "too long": "{request.path}",
        "no header": "{request.headers[X-Client]}",
    }
    for way, key in ways.items():
        view = idempotent(key)(pay)
        assert told(view(nobody)) == told(view(without)) == (400, "no_owner"), way
        what = "a login" if key is None else "a known client"
        assert json.loads(view(nobody).content)["detail"] == f"An Idempotency-Key requires {what}."
    assert paid() == 0


def test_key_tells_clients_apart_who_do_not_log_in() -> None:
    """By a header, say, or by an argument of the view."""
    by_header = idempotent(lambda request: request.headers.get("X-Client"))(pay)

    def send(client: str) -> HttpRequest:
        return request(user=AnonymousUser(), headers={"X-Client": client})

    assert numbers(by_header, *map(send, "aba")) == [1, 2, 1]

    @idempotent("shop:{shop}")
    def by_argument(request: HttpRequest, shop: str) -> HttpResponse:
        return pay(request)

    for shop, number in (("x", 3), ("y", 4), ("x", 3)):
        view = functools.partial(by_argument, shop=shop)
        assert numbers(view, request(user=AnonymousUser())) == [number]


@override_settings(ALLOWED_HOSTS=["*"])
def test_hosts_share_no_key() -> None:
    """Each may be the site of another tenant."""
    view = idempotent()(pay)
    hosts = ("a.example.org", "b.example.org", "a.example.org")
    assert numbers(view, *(request(headers={"Host": each}) for each in hosts)) == [1, 2, 1]


def test_views_share_no_key() -> None:
    """Nor do parts of a name run together."""

    @idempotent("1")
    def one(request: HttpRequest) -> HttpResponse:
        return pay(request)

    @idempotent("1")
    def other(request: HttpRequest) -> HttpResponse:
        return pay(request)

    assert numbers(one, request()) + numbers(other, request()) == [1, 2]
    assert numbers(idempotent("1")(pay), request("1k")) == [3]
    assert numbers(idempotent("11")(pay), request("k")) == [4]


class Paying(View):
    """A view whose versions inherit its method."""

    @idempotent()
    def post(self, request: HttpRequest) -> HttpResponse:
        """Pay."""
        return pay(request)


class PayingDifferently(Paying):
    """Another view, at the same address for who asks for another type."""


class Decorated(View):
    """A view whose method is decorated as Django decorates methods."""

    @method_decorator(idempotent())
    def post(self, request: HttpRequest) -> HttpResponse:
        """Pay."""
        return pay(request)


class DecoratedDifferently(Decorated):
    """Another view."""


class Undecorated(View):
    """A view whose `as_view()` is decorated."""

    def post(self, request: HttpRequest) -> HttpResponse:
        """Pay."""
        return pay(request)


class UndecoratedToo(Undecorated):
    """Another view."""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Paying.as_view(), PayingDifferently.as_view()),
        (Decorated.as_view(), DecoratedDifferently.as_view()),
        (idempotent()(Undecorated.as_view()), idempotent()(UndecoratedToo.as_view())),
    ],
    ids=["method", "method_decorator", "as_view"],
)
def test_classes_share_no_key(one: Any, other: Any) -> None:
    """Each is a view of its own, though they inherit one method."""
    assert [numbers(each, request()) for each in (one, other, one)] == [[1], [2], [1]]


def test_half_of_a_character_names_a_client() -> None:
    """JSON may have one, which no encoding has."""
    view = idempotent(lambda request: json.loads(request.body)["client"])(pay)
    clients = ('{"client": "\\ud800"}', '{"client": "\\ud801"}', '{"client": "\\ud800"}')
    asked = (request(user=AnonymousUser(), data=each) for each in clients)
    assert numbers(view, *asked) == [1, 2, 1]


# What is kept


def test_cookies_and_what_is_of_one_connection_are_not_kept() -> None:
    """The session of one request is not given to another one."""

    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        made = HttpResponse(
            "x", headers={"X-Secret": "1", "WWW-Authenticate": "Basic", "ETag": '"5"'}
        )
        made.set_cookie("sessionid", "secret")
        return made

    assert "sessionid" in view(request()).cookies
    again = view(request())
    assert not again.cookies
    assert dict(again.items()) == {
        "Content-Type": "text/html; charset=utf-8",
        "ETag": '"5"',
        "Idempotency-Replayed": "true",
    }
    assert "Set-Cookie" not in KEPT_HEADERS


def test_outcome_is_kept_with_what_was_written() -> None:
    """Also one that is an error of the client's."""

    @idempotent("{status}")
    def view(request: HttpRequest, status: int) -> HttpResponse:
        pay(request)
        return HttpResponse(status=status)

    outcomes = (200, 204, 302, 400, 402, 404, 422)
    for status in outcomes:
        assert [view(request(), status).status_code for _ in range(3)] == [status] * 3
    assert paid() == len(outcomes)


def test_what_is_not_kept_is_rolled_back() -> None:
    """So it may be asked for again with the same key, and nothing is done twice."""

    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        pay(request)
        return HttpResponse(status=answers.pop(0))

    for number, status in enumerate((401, 403, 408, 409, 423, 425, 429, 500, 503)):
        answers = [status, 201]
        assert view(request(str(status))).status_code == status
        assert paid() == number
        assert [view(request(str(status))).status_code for _ in range(2)] == [201, 201]


def test_refusal_of_a_lock_is_not_kept() -> None:
    """A request that finds the key held, or its store away, runs when it is sent again."""
    lock = distlock("pay:refused", backend="memory")
    locked = locked_view(lock.key, wait=0, on_unavailable="skip", backend="memory")
    view = idempotent()(locked(pay))
    with lose_connection("memory"):
        assert [view(request()).status_code for _ in range(2)] == [503, 503]
    with held_elsewhere(lock):
        assert view(request()).status_code == 409
    assert not StoredResponse.objects.exists()
    assert numbers(view, request(), request()) == [1, 1]


def test_view_that_rolls_back_or_has_no_response_is_not_kept() -> None:
    """Whatever it answers; of None, Django says what is wrong with it."""

    def view(request: HttpRequest) -> HttpResponse:
        pay(request)
        transaction.set_rollback(True)
        return HttpResponse(status=400)

    def without(request: HttpRequest) -> Any:
        pay(request)

    assert [idempotent()(view)(request()).status_code for _ in range(2)] == [400, 400]
    assert idempotent()(without)(request()) is None
    assert (paid(), StoredResponse.objects.count()) == (0, 0)


def test_error_leaves_nothing() -> None:
    """It reaches the caller, also one that looks like ours."""
    errors: list[Exception] = [ZeroDivisionError(), IntegrityError("the view's own")]

    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        pay(request)
        if errors:
            raise errors.pop(0)
        return HttpResponse("done")

    for kind in (ZeroDivisionError, IntegrityError):
        with pytest.raises(kind):
            view(request())
        assert (paid(), StoredResponse.objects.count()) == (0, 0)
    assert [view(request()).content for _ in range(2)] == [b"done"] * 2
    assert paid() == 1


def test_what_cannot_be_kept_is_an_error() -> None:
    """And leaves nothing: it could not be answered again."""

    def view(request: HttpRequest) -> Any:
        pay(request)
        return StreamingHttpResponse(["x"]) if b"stream" in request.body else HttpResponse("x" * 9)

    with pytest.raises(LockUsageError, match="has 9 bytes.*at most 8"):
        idempotent(max_body=8)(view)(request())
    with pytest.raises(LockUsageError, match="is streaming"):
        idempotent()(view)(request(data="stream"))
    assert (paid(), StoredResponse.objects.count()) == (0, 0)
    assert idempotent(max_body=9)(view)(request()).status_code == 200


def test_template_is_rendered_before_it_is_kept() -> None:
    """Others do so behind the view."""

    @idempotent()
    def view(request: HttpRequest) -> TemplateResponse:
        return TemplateResponse(request, "django_distlock/busy.html", {"said": f"paid {paid()}"})

    templates = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
    with override_settings(TEMPLATES=templates):
        first = view(request())
        pay(request())
        assert view(request()).content == first.content
    assert b"paid 0" in first.content


def test_response_is_over_behind_its_time() -> None:
    """Then the request runs again, whatever it is. The time of the view does not count."""
    began = []

    @idempotent(keep=timedelta(hours=1))
    def view(request: HttpRequest) -> HttpResponse:
        response = pay(request)
        began.append(datetime.now(UTC))
        return response

    view(request())
    row = StoredResponse.objects.get()
    assert (row.until - timedelta(hours=1) >= began[0], row.status) == (True, 201)
    StoredResponse.objects.update(until=datetime.now(UTC))
    assert numbers(view, request(data="[]"), request(data="[]")) == [2, 2]
    assert StoredResponse.objects.get().until > datetime.now(UTC)


# At once


class Slow:
    """A view that waits until it is told to end."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Pay, and wait."""
        made = pay(request)
        self.begun.set()
        assert self.end.wait(20)
        return made


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the alias in which responses are kept, and rows of the shop."""
    if request.param == "postgresql":
        yield "default"
        return
    if request.param not in connections.settings:
        pytest.skip("declared: no MariaDB")
    with kept_in(request.param):
        yield request.param


@contextmanager
def kept_in(using: str) -> Iterator[None]:
    """Keep responses, and rows of the shop, in the database of an alias."""
    with override_settings(DATABASE_ROUTERS=[Routed(using, StoredResponse, Row)]):
        StoredResponse.objects.all().delete()
        Row.objects.all().delete()
        yield
        StoredResponse.objects.all().delete()
        Row.objects.all().delete()
        connections[using].close()


@pytest.mark.parametrize("outer", [False, True])
def test_request_beside_the_first_is_told_to_come_again(store: str, *, outer: bool) -> None:
    """Soon, and without waiting for it: also where the transaction is around the view."""
    slow = Slow()
    plain = idempotent()(slow.__call__)

    def view(request: HttpRequest) -> Any:
        if not outer:
            return plain(request)
        with transaction.atomic(using=store):
            return plain(request)

    first = Later(view, request())
    assert slow.begun.wait(10)
    # On SQLite, whoever writes waits for the file as long as its connection says.
    with prompt(5 if store == "sqlite" else 1.5):
        refused = Later(view, request()).result()
    assert told(refused) == (409, "in_progress")
    assert (refused["Retry-After"], refused["Cache-Control"]) == ("1", "no-store")
    if store != "sqlite":
        other = Later(idempotent()(pay), request("other")).result()
        assert other.status_code == 201
    slow.end.set()
    assert first.result().status_code == 201
    assert view(request()).content == first.result().content


@pytest.mark.parametrize("store", ["mariadb"], indirect=True)
def test_row_that_is_not_committed_is_no_response(store: str) -> None:
    """READ UNCOMMITTED shows it before the view has answered."""
    with (
        alias_like(store, OPTIONS={"isolation_level": "read uncommitted"}) as using,
        kept_in(using),
    ):
        slow = Slow()
        view = idempotent()(slow.__call__)
        first = Later(view, request())
        assert slow.begun.wait(10)
        assert told(view(request())) == (409, "in_progress")
        slow.end.set()
        assert first.result().status_code == 201
        assert view(request()).status_code == 201


def test_many_at_once_run_once(store: str) -> None:
    """Each gets the response, or is told to come again, and then gets it."""
    view = idempotent()(pay)

    def send() -> Any:
        while (answer := view(request())).status_code == 409:
            assert answer["Retry-After"] == "1"
        return answer

    answers = at_once([send] * 8)
    assert {each.content for each in answers} == {b'{"number": 1}'}
    assert paid() == 1


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
def test_first_request_waits_for_the_one_writer_of_sqlite(store: str) -> None:
    """As long as its connection says, and is not taken for a repeat."""
    with transaction.atomic(using=store):
        Row.objects.create(name="beside")
        first = Later(idempotent()(pay), request())
        assert not eventually(lambda: first.is_done, 0.2)
    assert first.result().status_code == 201


@pytest.mark.parametrize("store", ["mariadb"], indirect=True)
@pytest.mark.parametrize("outer", [False, True])
def test_repeats_that_deadlock_are_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch, store: str, *, outer: bool
) -> None:
    """MariaDB ends all but one of those that wait, with their transactions, if the first fails."""
    monkeypatch.setattr(idempotency, "BOUND", 10.0)
    begun, fails = threading.Event(), [True]

    def waiting() -> int:
        ((many,),) = ask(
            store,
            "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE()"
            " AND id <> CONNECTION_ID() AND info LIKE '%INSERT%'",
        )
        return int(many)

    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        if fails and fails.pop():
            begun.set()
            assert eventually(lambda: waiting() == 4, 5)
            return HttpResponse(status=503)
        return pay(request)

    def send() -> int:
        with transaction.atomic(using=store) if outer else nullcontext():
            return int(view(request()).status_code)

    first = Later(send)
    assert begun.wait(10)
    repeats = [Later(send) for _ in range(4)]
    assert first.result() == 503
    assert {each.result() for each in repeats} <= {201, 409}
    assert paid() == 1


@pytest.mark.parametrize("expired", [False, True])
@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_repeat_that_is_overtaken_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch, level: IsolationLevel, *, expired: bool
) -> None:
    """Or gets the response: above READ COMMITTED, PostgreSQL ends the transaction that waited."""
    monkeypatch.setattr(idempotency, "BOUND", 10.0)
    slow = Slow()
    view = idempotent()(slow.__call__)

    def waits() -> bool:
        asked = (
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event_type = 'Lock'"
        )
        return bool(ask("default", asked))

    with alias_like("default", OPTIONS={"isolation_level": level}) as using, kept_in(using):
        if expired:
            slow.end.set()
            view(request())
            StoredResponse.objects.update(until=datetime.now(UTC))
            slow = Slow()
            view = idempotent()(slow.__call__)
        first = Later(view, request())
        assert slow.begun.wait(10)
        repeat = Later(view, request())
        assert eventually(waits, 5)
        slow.end.set()
        assert first.result().status_code == 201
        assert repeat.result().status_code in {201, 409}
        assert view(request())["Idempotency-Replayed"] == "true"
        assert paid() == 1 + expired


def test_transaction_around_it_is_rolled_back_with_the_response(store: str) -> None:
    """The caller's transaction, that is: one cannot be there without the other."""
    view = idempotent()(pay)
    with rolled_back(store):
        assert view(request()).status_code == 201
    assert (paid(), StoredResponse.objects.count()) == (0, 0)
    with transaction.atomic(using=store):
        Row.objects.create(name="beside")
        assert view(request()).status_code == 201
        assert view(request())["Idempotency-Replayed"] == "true"
    assert paid() == 1
    assert Row.objects.filter(name="beside").exists()


def test_refused_request_leaves_the_transaction_around_it_as_it_was() -> None:
    """What it wrote before is there, and its own bound on waits."""
    slow = Slow()
    view = idempotent()(slow.__call__)
    first = Later(view, request())
    assert slow.begun.wait(10)
    with transaction.atomic():
        Row.objects.create(name="beside")
        ask("default", "SET LOCAL lock_timeout = '7s'")
        assert view(request()).status_code == 409
        assert ask("default", "SHOW lock_timeout") == [("7s",)]
    slow.end.set()
    first.result()
    assert Row.objects.filter(name="beside").exists()


def test_view_has_its_own_bound_on_waits() -> None:
    """That of the row ends with it."""

    @idempotent()
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(ask("default", "SHOW lock_timeout")[0][0])

    assert view(request()).content == b"0"


def test_process_that_dies_leaves_nothing() -> None:
    """The next request runs: what the first one wrote was not committed."""
    with spawn("tests.integration.test_idempotency:pay_and_hang") as worker:
        worker.wait_for("paying")
        worker.kill()
    view = idempotent()(pay)

    def send() -> Any:
        while (answer := view(request())).status_code == 409:
            pass  # Until the server has seen it.
        return answer

    assert Later(send).result().status_code == 201
    assert paid() == 1


def pay_and_hang() -> None:
    """Be a server that hangs in its view."""

    def hang(request: HttpRequest) -> HttpResponse:
        made = pay(request)
        print("paying")
        input()
        return made

    with override_settings(ALLOWED_HOSTS=["testserver"]):
        idempotent()(functools.wraps(pay)(hang))(request())


# Views of all kinds


class Token(rest_framework.authentication.BaseAuthentication):  # type: ignore[misc] # it has no types
    """Knows who asks only within the framework."""

    def authenticate(self, request: Any) -> Any:
        """Return who has the token."""
        users = {"ada": ADA, "bob": BOB}
        return (users[request.headers["X-Token"]], None) if "X-Token" in request.headers else None


class HasBody(BasePermission):  # type: ignore[misc] # it has no types
    """Reads the body before the view."""

    def has_permission(self, request: Any, view: Any) -> bool:
        """Refuse what is empty."""
        return bool(request.data)


class Api(rest_framework.views.APIView):  # type: ignore[misc] # it has no types
    """A view of Django REST framework."""

    authentication_classes = (Token,)

    @idempotent()
    def post(self, request: Any) -> Any:
        """Pay, unless there is nothing to be paid."""
        if request.data.get("amount") == 0:
            Row.objects.create(name="paid")
            raise rest_framework.exceptions.ValidationError("nothing")
        pay(request)
        return rest_framework.response.Response({"number": paid()}, 201, headers={"ETag": '"1"'})

    @idempotent("{request.user.pk}")
    def put(self, request: Any) -> Any:
        """Pay."""
        return self.post(request)


class Streamed(BaseParser):  # type: ignore[misc] # it has no types
    """Reads a form as that of older releases does, behind which nobody else can."""

    media_type = "*/*"

    def parse(self, stream: Any, *_: Any) -> QueryDict:
        """Return all of its values."""
        return QueryDict(stream.read())


class Reading(Api):
    """One whose permission has read the body."""

    permission_classes = (HasBody,)


@api_view(["POST"])
@authentication_classes([Token])
@permission_classes([HasBody])
@idempotent()
def api(request: Any) -> Any:
    """Pay."""
    pay(request)
    return rest_framework.response.Response({"number": paid()}, 201)


class Plain(View):
    """A view of Django."""

    @idempotent("{pk}")
    def post(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Pay."""
        return pay(request)


@method_decorator(idempotent(lambda *_, **__: "client"), name="dispatch")
class Dispatching(View):
    """One that is decorated as a whole."""

    def post(self, request: HttpRequest) -> HttpResponse:
        """Pay."""
        return pay(request)

    put = post


urlpatterns = [
    path("api/class/", Api.as_view()),
    path("api/reading/", Reading.as_view()),
    path("api/function/", api),
    path("plain/<int:pk>/", Plain.as_view()),
    path("dispatching/", Dispatching.as_view()),
]


def send(url: str, data: Any = "{}", method: str = "post", **headers: str) -> Any:
    """Send a request with a key through all of Django."""
    headers = {"Idempotency-Key": "k", **headers}
    how: dict[str, Any] = {"content_type": "application/json"} if isinstance(data, str) else {}
    with override_settings(ROOT_URLCONF=__name__):
        client = Client(raise_request_exception=True)
        return getattr(client, method)(url, data, headers=headers, **how)


@pytest.mark.parametrize(
    ("url", "requests"),
    [("/api/class/", False), ("/api/reading/", True), ("/api/function/", True)],
)
def test_framework_takes_a_request_once(url: str, *, requests: bool) -> None:
    """For the user that it has found out, whatever its permissions have read by then."""
    with patch.dict(connections.settings["default"], {"ATOMIC_REQUESTS": requests}):
        answers = [
            send(url, '{"amount": 5}', **{"X-Token": each}) for each in ("ada", "bob", "ada")
        ]
        assert [each.json() for each in answers] == [{"number": 1}, {"number": 2}, {"number": 1}]
        assert [each.status_code for each in answers] == [201] * 3
        assert {each["Content-Type"] for each in answers} == {"application/json"}
        assert send(url, '{"amount": 6}', **{"X-Token": "ada"}).status_code == 422
        if url != "/api/function/":
            assert send(url, '{"amount": 5}').status_code == 400
    assert paid() == 2


def test_response_of_the_framework_is_rendered_in_the_context_of_its_view() -> None:
    """A view may say what its renderer gets."""

    def spacious(self: Any) -> dict[str, Any]:
        return {"view": self, "request": self.request, "indent": 1}

    with patch.object(Api, "get_renderer_context", spacious):
        answers = [send("/api/class/", **{"X-Token": "ada"}).content for _ in range(2)]
    assert answers == [b'{\n "number": 1\n}'] * 2


def test_error_of_the_framework_leaves_nothing() -> None:
    """It makes a response of it behind the method."""
    for _ in range(2):
        answer = send("/api/class/", '{"amount": 0}', **{"X-Token": "ada"})
        assert (answer.status_code, answer.json()) == (400, ["nothing"])
    assert (paid(), StoredResponse.objects.count()) == (0, 0)


def test_form_of_the_framework_is_compared_by_its_parts() -> None:
    """Django's client makes a boundary of its own."""
    files = [
        send("/api/class/", upload("x", content, amount="5"), **{"X-Token": "ada"}).status_code
        for content in (b"1", b"1", b"2")
    ]
    assert files == [201, 201, 422]
    assert paid() == 1


def test_another_file_put_under_the_key_is_refused() -> None:
    """Through all of Django, which leaves the form of a PUT to the view."""

    def put(content: bytes) -> int:
        data = encode_multipart(BOUNDARY, upload("x.txt", content))
        with override_settings(ROOT_URLCONF=__name__):
            answer = Client().put(
                "/dispatching/", data, MULTIPART_CONTENT, headers={"Idempotency-Key": "k"}
            )
        return answer.status_code

    assert [put(content) for content in (b"1", b"1", b"2")] == [201, 201, 422]
    assert paid() == 1


def test_form_that_was_read_before_is_compared_by_all_of_its_values() -> None:
    """A field may have several of them."""
    with patch.object(Reading, "parser_classes", (Streamed,)):
        answers = [
            send("/api/reading/", f"to={to}&to=bob", **{"X-Token": "ada"})
            for to in ("ada", "ada", "eve")
        ]
    assert [each.status_code for each in answers] == [201, 201, 422]


def test_file_that_was_read_before_is_compared_by_its_content() -> None:
    """The body is the file, under a name of a header."""
    headers = {"Content-Disposition": "attachment; filename=x.png", "X-Token": "ada"}
    with patch.object(Reading, "parser_classes", (FileUploadParser,)):
        answers = [send("/api/reading/", data, **headers) for data in ("one", "one", "two")]
    assert [each.status_code for each in answers] == [201, 201, 422]


def test_methods_and_classes_take_a_request_once() -> None:
    """Decorated next to the function, or as a whole."""
    for url in ("/plain/5/", "/plain/6/", "/dispatching/"):
        before = paid()
        assert [send(url).status_code for _ in range(2)] == [201, 201]
        assert paid() == before + 1
    puts = [send("/api/class/", method="put", **{"X-Token": "ada"}) for _ in range(2)]
    assert [each.status_code for each in puts] == [201, 201]


# Cleaning up


def test_responses_whose_time_is_over_are_removed() -> None:
    """By the command, batch by batch; and what is not over stays."""
    now = datetime.now(UTC)
    StoredResponse.objects.bulk_create(
        StoredResponse(name=f"{n}", status=200, made_at=now, until=now + timedelta(hours=n - 5))
        for n in range(10)
    )
    steps: list[int] = []
    assert prune_responses(batch=4, progress=steps.append) == 6
    assert steps == [4, 6]
    assert StoredResponse.objects.count() == 4
    StoredResponse.objects.filter(name="9").update(until=now)
    kept = ["--older-than=3600", "--events-older-than=never"]
    assert run("distlock_cleanup", *kept, "--backend=postgres", "--json").json["responses"] is None
    assert "responses: 1 response removed.\n" in run("distlock_cleanup", *kept).out
    assert run("distlock_cleanup", *kept, "--json").json["responses"] == 0
    assert "response" not in run("distlock_cleanup", *kept).out
    with pytest.raises(InvalidArgument):
        prune_responses(batch=0)


def test_every_database_keeps_responses(store: str) -> None:
    """As bytes, whatever these are."""
    now, raw = datetime.now(UTC), bytes(range(256)) * 900
    StoredResponse(name="n", status=200, body=raw, made_at=now, until=now).save(using=store)
    assert bytes(StoredResponse.objects.using(store).get().body) == raw


# Wrong uses


def test_wrong_arguments_are_refused() -> None:
    """Where the view is decorated."""
    wrong: list[tuple[str, list[Any]]] = [
        ("keep", [0, None, 400 * 86_400]),
        ("max_body", [-1, True, 1.5]),
        ("key", [5, ""]),
    ]
    for named, values in wrong:
        for value in values:
            with pytest.raises(InvalidArgument, match=named):
                idempotent(**{named: value})


def test_missing_parentheses_are_told_at_import(tmp_path: Path) -> None:
    """A view is no key, and its module says so; of a method it is known when it is called."""
    text = (
        "from django_distlock.idempotency import idempotent\n@idempotent\ndef pay(request): ...\n"
    )
    with (
        importable(tmp_path, {"bare": text}),
        pytest.raises(InvalidArgument, match=r"pay as its key\..*Write @idempotent\(\)"),
    ):
        import_module("bare")
    bare: Any = idempotent(lambda request: "")
    with pytest.raises(InvalidArgument, match="without parentheses"):
        bare(request())


def test_request_has_to_be_found_and_unread() -> None:
    """It may have its name in the call, as some decorators pass it on."""
    view = idempotent()(pay)
    assert view(request=request()).status_code == 201
    with pytest.raises(LockUsageError, match="finds no request"):
        view(HttpResponse())  # type: ignore[arg-type]
    form = encode_multipart("one", {"amount": "5"})
    for data, kind in (("{}", "application/json"), (form, "multipart/form-data; boundary=one")):
        made = request(data=data, content_type=kind)
        made.read()
        with pytest.raises(LockUsageError, match="as a stream"):
            view(made)


def test_wrong_views_are_refused() -> None:
    """Asynchronous, classes, and templates of other views."""

    async def later(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    with pytest.raises(LockUsageError, match="asynchronous"):
        idempotent()(later)
    with pytest.raises(LockUsageError, match="class"):
        idempotent()(Plain)
    with pytest.raises(InvalidArgument, match="shop"):
        idempotent("{shop}")(pay)
    number: Any = lambda request: request.user.pk  # noqa: E731
    with pytest.raises(InvalidArgument, match="a str or None, not 1"):
        idempotent(number)(pay)(request())


def test_alias_of_the_responses_is_the_routers() -> None:
    """The view writes there, too, or elsewhere."""
    with override_settings(DATABASE_ROUTERS=[Routed("sqlite", StoredResponse)]):
        view: Any = idempotent()(pay)
        assert numbers(view, request(), request()) == [1, 1]
        (response,) = StoredResponse.objects.using("sqlite")
        response.delete()
