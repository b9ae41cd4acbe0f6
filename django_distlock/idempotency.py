"""Requests that clients send again: the first one runs, and the others get its response.

Each request has a row in the database. The row is made before the view runs, in the transaction
that the view writes in, and gets the response at its end: both are committed, or neither is. While
that transaction is open, no other request can make the row, so no lease is needed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import string
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from asgiref.sync import iscoroutinefunction
from django.apps import apps
from django.core.exceptions import BadRequest
from django.db import DatabaseError, router, transaction
from django.http import HttpResponse, HttpResponseBase, JsonResponse
from django.http.request import RawPostDataException
from django.utils.translation import gettext

from .core.bodies import refuse_function, whole
from .core.durations import Duration, seconds
from .core.errors import InvalidArgument, LockUsageError, shown
from .core.keys import IllegalKey, KeyTemplate
from .database import vendors

View = Callable[..., Any]
#: Keeps a view's own type for type checkers.
V = TypeVar("V", bound=View)

HEADER: Final = "Idempotency-Key"
#: The header of a response that was stored.
REPLAYED: Final = "Idempotency-Replayed"
#: Seconds until a client may send a request again while the first one runs.
ASK_AGAIN: Final = 1
#: Seconds to wait for the transaction of another request that has made the row.
BOUND: Final = 0.25
#: Seconds for which responses are kept at most.
LONGEST: Final = 366 * 86_400.0
#: The default number of bytes of the longest body that is kept.
MAX_BODY: Final = 262_144
#: Methods that change nothing, and may be repeated as they are.
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
#: Statuses that only say "not now" or "not you": clients send such requests again.
NOT_KEPT: Final = frozenset({401, 403, 408, 409, 423, 425, 429})
#: Headers about the body and what was made. No cookie, and nothing about one connection.
KEPT_HEADERS: Final = (
    "Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language",
    "Content-Location", "Content-Type", "ETag", "Last-Modified", "Link", "Location", "Vary",
)  # fmt: skip

_KEY: Final = re.compile(r"[\x20-\x7e]{1,255}")


def idempotent(
    key: str | Callable[..., str | None] | None = None,
    *,
    keep: Duration = 86_400,
    max_body: int = MAX_BODY,
    required: bool = False,
) -> Callable[[V], V]:
    """Run a request with an `Idempotency-Key` once, and answer the same one with its response.

    A decorator of views, and of methods of Django's and Django REST framework's classes, where it
    must be next to the function. While the first request runs, others are answered with 409 and
    `Retry-After`; after it, with the stored status, headers (`KEPT_HEADERS`), body, and
    `Idempotency-Replayed: true`. A different request with the same key is answered with 422: one
    with another path, query, method, type of content or body.

    The view runs in a transaction on the database to which the router sends `StoredResponse`. That
    is rolled back if the view raises, answers with a status above 499 or in `NOT_KEPT`, or calls
    `set_rollback(True)`. Then the request may be sent again with the same key.

    A key counts for one host, view and user only. GET, HEAD, OPTIONS and TRACE run as if there were
    no key.

    Args:
        key: The owner of the key, in addition to the user who is logged in: a template of the
            view's parameters, such as `"{request.session.session_key}"`, or a function that returns
            a text, called as the view is. If it is left out, empty or None, and nobody is logged
            in, the answer is 400.
        keep: Seconds (or a `timedelta`) for which a response is kept, from 1 to 366 days.
        max_body: Bytes of the longest body that is kept.
        required: Whether a request without a key is answered with 400, and does not run.

    Raises:
        BadRequest: On a call: the body has fewer bytes than `Content-Length` says.
        InvalidArgument: An argument breaks a rule, or the template names no parameter of the view.
        LockUsageError: The view is asynchronous: Django has no transactions for those. Or a call
            has no request, or one that was read as a stream before; or the response is streaming,
            or longer than `max_body`, and then what was written is rolled back.
    """
    refuse_function(key, "idempotent", "")
    if not (key is None or callable(key) or (isinstance(key, str) and key)):
        raise InvalidArgument(f"key must be a template or a function, not {shown(key)}.")
    kept_for = timedelta(seconds=seconds(keep, "keep", minimum=1.0, maximum=LONGEST))
    if isinstance(max_body, bool) or not isinstance(max_body, int) or max_body < 0:
        raise InvalidArgument(f"max_body must be a number of bytes, not {shown(max_body)}.")

    def decorate(view: Any, /) -> Any:
        if iscoroutinefunction(view):
            raise LockUsageError(
                f"{view.__qualname__} is asynchronous, and Django has no asynchronous"
                " transactions. Decorate a synchronous view.",
                code="unsupported",
            )
        view_class = _class_of(view)
        view = whole(view)
        client = _clients(key, view) if isinstance(key, str) else key

        @functools.wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            request = _request_of(view, *args, **kwargs)
            call = functools.partial(view, *args, **kwargs)
            given = request.headers.get(HEADER)
            if request.method in SAFE or (given is None and not required):
                return call()
            if given is None or not _KEY.fullmatch(given):
                return _refusal(
                    400,
                    "bad_key",
                    gettext("Send an Idempotency-Key: 1 to 255 characters of ASCII."),
                )
            owner = _owner(request, None if client is None else client(*args, **kwargs))
            if owner is None:
                login = gettext("An Idempotency-Key requires a login.")
                known = gettext("An Idempotency-Key requires a known client.")
                return _refusal(400, "no_owner", login if client is None else known)
            # Several classes may inherit one method.
            owning = type(args[0]) if args and args[0] is not request else view_class or view
            names = (f"{each.__module__}.{each.__qualname__}" for each in (view, owning))
            name = _digest(request.get_host(), *names, *owner, given)
            return _once(name, request, call, kept_for, max_body)

        return wrapper

    return decorate


def _class_of(view: Any) -> type | None:
    """Return the class that a view belongs to, where it tells."""
    # `method_decorator` decorates bound methods, and `as_view()` names its class.
    instance = getattr(getattr(view, "func", view), "__self__", None)
    return getattr(view, "view_class", None) if instance is None else type(instance)


def _request_of(view: View, /, *args: Any, **kwargs: Any) -> Any:
    # The first argument of a method is its object.
    found = (each for each in (*args[:2], kwargs.get("request")) if hasattr(each, "META"))
    if (request := next(found, None)) is None:
        raise LockUsageError(
            f"idempotent finds no request in a call of {view.__qualname__}: it decorates functions"
            " that get one first, and methods that get it behind self.",
            code="unsupported",
        )
    return request


def _once(
    name: str, request: Any, call: Callable[[], Any], kept_for: timedelta, max_body: int
) -> HttpResponseBase:
    """Call a view, or return the response that was stored for this name."""
    # Not imported, because views may be imported before the apps are loaded.
    model = apps.get_model("django_distlock", "StoredResponse")
    using = router.db_for_write(model)
    rows, content = model.objects.using(using), _digest(*_content(request))
    now = datetime.now(UTC)
    # Outside our transaction, which has to begin with a write: on SQLite, one that has read is
    # refused immediately if another writes, whatever the connection's time-out.
    row = rows.filter(pk=name).first()
    if row is None or row.until <= now:
        with transaction.atomic(using=using):
            try:
                with vendors.of(using).short_transaction(BOUND):
                    if row is not None:
                        rows.filter(pk=name, until__lte=now).delete()
                    made = rows.create(
                        name=name, request=content, status=0, made_at=now, until=now + kept_for
                    )
            except DatabaseError as error:
                vendor = vendors.of(using)
                is_over = vendor.has_rolled_back(error) or vendor.is_overtaken(error)
                if not (is_over or vendor.is_duplicate(error) or vendor.is_busy(error)):
                    raise
                transaction.set_rollback(True, using)
            else:
                response: HttpResponse = _finished(call(), request)
                # Django itself raises an error if this is no response.
                status = getattr(response, "status_code", 500)
                if status >= 500 or status in NOT_KEPT or transaction.get_rollback(using):
                    transaction.set_rollback(True, using)
                else:
                    _keep(made, response, kept_for, max_body)
                return response
        # The row was committed since we looked, or is not yet. If a snapshot does not show it, or
        # the transaction around ours can do no more, the next request will find it.
        row = None if is_over else rows.filter(pk=name, until__gt=now).first()
    # READ UNCOMMITTED shows a row whose view has not answered.
    if row is None or row.status == 0:
        said = gettext("The first request with this Idempotency-Key is not answered yet.")
        return _refusal(409, "in_progress", said, {"Retry-After": str(ASK_AGAIN)})
    if row.request != content:
        said = gettext("This Idempotency-Key was used for another request.")
        return _refusal(422, "other_request", said)
    again = HttpResponse(bytes(row.body), status=row.status)
    again.headers.pop("Content-Type", None)
    for header, value in {**row.headers, REPLAYED: "true"}.items():
        again.headers[header] = value
    return again


def _keep(row: Any, response: Any, kept_for: timedelta, max_body: int) -> None:
    if response.streaming or len(response.content) > max_body:
        what = "is streaming" if response.streaming else f"has {len(response.content)} bytes"
        raise LockUsageError(
            f"The response {what}, and cannot be stored: idempotent stores bodies of at most"
            f" {max_body} bytes. Return a smaller response, or raise max_body. Nothing was"
            " written.",
            code="unsupported",
        )
    row.status, row.body = response.status_code, response.content
    row.headers = {
        each: response.headers[each] for each in KEPT_HEADERS if each in response.headers
    }
    # Counted from here: a view that takes longer than `keep` would run again.
    row.until = datetime.now(UTC) + kept_for
    row.save(update_fields=["status", "headers", "body", "until"])


def _finished(response: Any, request: Any) -> Any:
    """Return a response with its content, which some responses render after their view."""
    if getattr(response, "is_rendered", True):
        return response
    renderer = getattr(request, "accepted_renderer", None)
    if renderer is not None and not hasattr(response, "accepted_renderer"):
        # As Django REST framework does it, after its methods.
        response.accepted_renderer = renderer
        response.accepted_media_type = request.accepted_media_type
        response.renderer_context = request.parser_context["view"].get_renderer_context()
    return response.render()


# The owner of a key, and the content of a request


def _clients(template: str, view: View) -> Callable[..., str | None]:
    """Return a function that fills a template, or returns None if one of its fields is empty."""
    made = KeyTemplate.for_function(template, view)

    def client(*args: Any, **kwargs: Any) -> str | None:
        bound = made.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        names = [name for _literal, name, _spec in made.parts if name is not None]
        field = string.Formatter().get_field
        try:
            if any(field(name, (), bound.arguments)[0] in (None, "") for name in names):
                return None
            return made.render(args, kwargs)
        except (IllegalKey, LookupError):
            return None  # The fields contain what a client has sent, or are missing.

    return client


def _owner(request: Any, client: object) -> tuple[str, str] | None:
    """Return the owner of a key, so that no user ever gets the response to another one."""
    if not isinstance(client, str | None):
        raise InvalidArgument(
            f"The key of idempotent() must be a str or None, not {shown(client)}."
        )
    user: Any = getattr(request, "user", None)
    number = user.pk if getattr(user, "is_authenticated", False) else None
    if number is None:
        return ("", client) if client else None
    # Not type(): a lazy user has the class of the real one as `__class__`.
    return f"{user.__class__.__module__}.{user.__class__.__qualname__} {number}", client or ""


def _content(request: Any) -> Iterator[bytes | str]:
    """Yield the parts in which requests differ."""
    kind = request.META.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
    yield from (str(request.method), request.get_full_path(), kind)
    # Django REST framework's request contains that of Django.
    is_form, inner = kind == "multipart/form-data", getattr(request, "_request", request)
    # Of one that was read as a stream, Django makes an empty form.
    is_gone = not (hasattr(inner, "_post") or hasattr(inner, "_body")) and inner._read_started
    # Django parses the forms of POST only, Django REST framework those of all methods.
    if is_form and not is_gone and (request.method == "POST" or request.POST or request.FILES):
        # Each attempt has another boundary between the parts.
        fields, uploads = sorted(request.POST.lists()), sorted(request.FILES.lists())
        _require_end(inner)
        for name, values in fields:
            yield json.dumps([name, values])
        for name, files in uploads:
            for file in files:
                yield from _file(name, file)
        return
    try:
        body = request.body
        _require_end(inner)
        if is_form and (boundary := request.content_params.get("boundary")):
            body = body.replace(f"--{boundary}".encode(), b"--")
        yield body
    except RawPostDataException:
        if not hasattr(request, "data"):
            _require_end(inner)
            raise LockUsageError(
                "Something has read this request as a stream, and idempotent cannot compare its"
                " body. Read request.body instead.",
                code="unsupported",
            ) from None
        # Django REST framework has read it, such as for permissions. Fields of a form have lists.
        data = request.data
        data = dict(data.lists()) if hasattr(data, "lists") else data
        yield json.dumps(data, sort_keys=True, default=str)
        # `data` contains their names alone.
        for name in sorted(request.FILES):
            yield from _file(name, request.FILES[name])


def _file(name: str, file: Any) -> Iterator[bytes | str]:
    yield json.dumps([name, file.name, file.size])
    yield from file.chunks()
    file.seek(0)


def _require_end(request: Any) -> None:
    """Refuse a request whose connection broke: the client sends all of it again.

    Some servers only end its body early, and Django makes an empty form of it.
    """
    body: bytes | None = getattr(request, "_body", None)
    stream, length = getattr(request, "_stream", None), str(request.META.get("CONTENT_LENGTH"))
    arrived = getattr(stream, "_pos", None) if body is None else len(body)
    if arrived is not None and length.isdecimal() and arrived < int(length):
        raise BadRequest(f"Of a body of {length} bytes, {arrived} have arrived.")


def _digest(*parts: bytes | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # JSON may have half of a character, and a client may be named by it.
        raw = part if isinstance(part, bytes) else part.encode(errors="surrogatepass")
        digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()


def _refusal(
    status: int, code: str, said: str, headers: dict[str, str] | None = None
) -> JsonResponse:
    headers = {"Cache-Control": "no-store", **(headers or {})}
    return JsonResponse({"error": code, "detail": said}, status=status, headers=headers)
