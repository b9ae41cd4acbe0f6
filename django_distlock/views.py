"""Views that one request at a time runs: a decorator, and a mixin for classes.

Django REST framework is not imported: its classes and requests are recognised by attributes.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from functools import partial, wraps
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, ParamSpec, TypeAlias, TypeVar
from urllib.parse import quote

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import BadRequest, ImproperlyConfigured, SynchronousOnlyOperation
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.template import Context, Engine, TemplateDoesNotExist, loader
from django.utils.decorators import method_decorator
from django.utils.translation import get_language, gettext, ngettext

from .core.bodies import refuse_function, signature_of, whole
from .core.declarations import Declaration, Kind, declared
from .core.durations import GRACE, Duration, seconds
from .core.errors import InvalidArgument, LockNotAcquired, LockUsageError, shown
from .core.keys import IllegalKey, KeyTemplate, normalize_key
from .core.metadata import MAX_METADATA_BYTES
from .core.records import MAX_TEXT
from .locks.checking import for_call
from .locks.lock import Lock, distlock
from .locks.policy import Policy, Refusal

P = ParamSpec("P")
T = TypeVar("T")

View = Callable[..., Any]
#: Keeps a view's own type for type checkers.
V = TypeVar("V", bound=View)
Status: TypeAlias = Literal[409, 423, 429]
#: Makes the response to a refused request.
MakeRefusal = Callable[[HttpRequest, Exception], HttpResponseBase]

TEMPLATE: Final = "django_distlock/busy.html"
#: The content type of errors for programs.
PROBLEM: Final = "application/problem+json"
#: Seconds until a client may try again, if it is unknown when the key will be free.
ASK_AGAIN: Final = 1
#: The name of the request in the metadata of its lock.
REQUEST: Final = "request"
#: Characters that a path may contain and that need no escape in JSON.
_PATH: Final = "/:@!$&'()*+,;=~"


def locked_view(
    key: str | Callable[..., str],
    *,
    on_conflict: Literal["skip", "raise", "run"] = "skip",
    on_unavailable: Literal["raise", "skip", "run"] = "raise",
    status: Status | None = None,
    refusal: MakeRefusal | None = None,
    retry_after: Duration | None = None,
    **options: Any,
) -> Callable[[V], V]:
    """Hold a lock around each call of a view, sync or async, or of a method of a view class.

    Methods are those with `self` and a request, of Django's classes and of Django REST framework's,
    actions included. Those of the latter answer a conflict with problem JSON (RFC 9457).

    With `ATOMIC_REQUESTS`, the transaction is inside the lock: it is committed before the key is
    free. The transaction of a method begins before the lock, so the key is free after the commit.
    The content of a streaming response is made after the view, without the lock.

    The holder's metadata contain the request, as `metadata["request"]`: "POST /invoices/5/", its
    path escaped, without the query, and cut to 255 characters, or to what other metadata leave.

    Args:
        key: A template of the view's parameters, such as `"invoice:{pk}"`, `"invoice:{kwargs[pk]}"`
            or `"cart:{request.user.pk}"`; or a function that returns it, called as the view is.
        on_conflict: What happens if the key is not granted within `wait`: `"skip"` answers
            `status` and `Retry-After` without a call of the view, `"raise"` raises
            `LockNotAcquired`, `"run"` runs the view without the lock.
        on_unavailable: What happens if the store is unavailable: `"raise"` raises
            `BackendUnavailable`, `"skip"` answers 503, `"run"` runs the view without the lock.
        status: 409 (Conflict), 423 (Locked) or 429 (Too Many Requests); None: 429 if `permits` is
            not 1, and else 409.
        refusal: Makes the answer of `"skip"` from the request and the error; None: problem JSON for
            views of Django REST framework, JSON if the request prefers that, else the template
            `django_distlock/busy.html`.
        retry_after: Seconds (or a `timedelta`) for `Retry-After`, rounded up; None: as long as the
            holder has had the key by now, at least 1 and at most until its lease ends.
        options: Those of `distlock()`: `ttl`, `wait`, `backend`, `metadata` and so on. A
            `"request"` among the metadata stays as it is.

    Raises:
        InvalidArgument: An argument breaks a rule, the template names no parameter of the view, or
            a class is decorated, or another object that is no view: see `LockedViewMixin`.
        LockUsageError: The view's body would run after its call, as that of a generator does, or
            `method_decorator` decorates it. If only the view's result shows that, or a call has no
            request, the call raises it.
    """
    refuse_function(key, "locked_view")
    locked = _Locked(
        on_conflict=on_conflict,
        on_unavailable=on_unavailable,
        status=status,
        refusal=refusal,
        retry_after=retry_after,
        **options,
    )

    def decorate(view: Any, /, *_: Any, **__: Any) -> Any:
        _require_view(view)
        view = whole(view)
        name = key if callable(key) else KeyTemplate.for_function(key, view).of
        made = locked.around(view, name)
        declared[made] = (Declaration.of(Kind.VIEW, key, locked.lock, on_conflict),)
        return made

    return decorate


class LockedViewMixin:
    """A base of class-based views that holds a lock around each request.

    Bases before it, such as `LoginRequiredMixin`, decide before the key is acquired. It must stand
    before the view's own class.

    Attributes:
        lock_key: A template of the URL's parameters and `request`, such as `"invoice:{pk}"`.
        lock_options: The other arguments of `locked_view`.

    `as_view()` also accepts both.
    """

    lock_key: ClassVar[str] = ""
    lock_options: ClassVar[dict[str, Any]] = {}
    _locked: _Locked | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(LockedViewMixin)]
        if any("as_view" in vars(each) for each in before if not issubclass(each, LockedViewMixin)):
            raise TypeError(f"{cls.__qualname__} would not be locked. Put LockedViewMixin first.")

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> View:
        """See Django's, and that of Django REST framework's viewsets.

        Raises:
            ImproperlyConfigured: `lock_key` is no template.
        """
        key = initkwargs.get("lock_key", cls.lock_key)
        options = initkwargs.get("lock_options", cls.lock_options)
        if not isinstance(key, str) or not key:
            raise ImproperlyConfigured(
                f"{cls.__qualname__}.lock_key must be a template, not {shown(key)}."
            )
        locked = _Locked(**options)
        locked.problems = hasattr(cls, "initialize_request")
        locked.key = cls._lock_template(KeyTemplate.for_keywords(key))
        view: View = super().as_view(*args, _locked=locked, **initkwargs)  # type: ignore[misc]
        if not iscoroutinefunction(view):
            locked.begin_transactions_of(view)
        on_conflict = options.get("on_conflict", "skip")
        declared[view] = (Declaration(Kind.VIEW, key, locked.lock, on_conflict),)
        return view

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Answer a request under the lock."""
        if self._locked is None:
            raise ImproperlyConfigured(f"{type(self).__qualname__} must be created by as_view().")
        answer = super().dispatch  # type: ignore[misc]
        if self.view_is_async:  # type: ignore[attr-defined]
            return self._locked.arun(answer, request, *args, **kwargs)
        return self._locked.run(whole(answer), request, *args, **kwargs)

    @classmethod
    def _lock_template(cls, template: KeyTemplate) -> Callable[..., str]:
        def key(request: HttpRequest, *args: Any, **kwargs: Any) -> str:
            try:
                return template.of(request=request, **kwargs)
            except TypeError as error:
                raise ImproperlyConfigured(
                    f"{cls.__qualname__}.lock_key is {template.template!r}, but the URL does not"
                    f" capture all of its fields: {error}."
                ) from error

        return key


def refuse(request: HttpRequest, error: Exception, again_in: int) -> HttpResponse:
    """Return the response to a refused request; the caller sets the status and `Retry-After`.

    Args:
        again_in: Seconds until the client may try again.
    """
    said, again = _said(error, again_in)
    wanted = request.get_preferred_type(["text/html", "application/json"])
    if wanted == "application/json":
        code = getattr(error, "code", "internal")
        return JsonResponse({"error": code, "detail": f"{said} {again}", "retry_after": again_in})
    context = {
        "said": said,
        "again": again,
        "seconds": again_in,
        "error": error,
        "language": get_language() or "en",
    }
    try:
        template = loader.get_template(TEMPLATE)
    except (ImproperlyConfigured, TemplateDoesNotExist):
        # The project has no templates, or does not load those of its apps.
        builtin = Path(__file__).parent / "templates" / TEMPLATE
        made = Engine().from_string(builtin.read_text(encoding="utf-8"))
        return HttpResponse(made.render(Context(context)))
    return HttpResponse(template.render(context, request))


def problem(error: Exception, again_in: int, status: int) -> HttpResponse:
    """Return the same as problem JSON (RFC 9457)."""
    content = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": " ".join(_said(error, again_in)),
        "error": getattr(error, "code", "internal"),
        "retry_after": again_in,
    }
    return JsonResponse(content, status=status, content_type=PROBLEM)


def _said(error: Exception, again_in: int) -> tuple[str, str]:
    """Return what is wrong, and when to try again, in the language of the request."""
    if isinstance(error, LockNotAcquired):
        said = gettext("Someone else is working on this right now.")
    else:
        said = gettext("This is not possible at the moment.")
    again = ngettext("Try again in %d second.", "Try again in %d seconds.", again_in) % again_in
    return said, again


class _Locked:
    """Answers requests under a lock. The arguments are those of `locked_view`."""

    #: Returns the key of a request, from the view's arguments.
    key: Callable[..., str]
    #: The place of the request among the view's arguments: after the object, if it is a method.
    _place = 0
    #: Whether refusals are problem JSON for any request, as for Django REST framework's classes.
    problems = False

    def __init__(
        self,
        *,
        on_conflict: Literal["skip", "raise", "run"] = "skip",
        on_unavailable: Literal["raise", "skip", "run"] = "raise",
        status: Status | None = None,
        refusal: MakeRefusal | None = None,
        retry_after: Duration | None = None,
        **options: Any,
    ):
        self._policy = Policy.of(on_conflict, on_unavailable)
        if status not in (None, 409, 423, 429):
            raise InvalidArgument(f"status must be 409, 423 or 429, not {shown(status)}.")
        in_conflict: Literal["run", "raise"] = "run" if on_conflict == "run" else "raise"
        self.lock = distlock("?", on_conflict=in_conflict, **options)
        self._status, self._make = status, refusal
        self._retry_after = None if retry_after is None else seconds(retry_after, "retry_after")
        taken = len(json.dumps({REQUEST: "", **self.lock.metadata}, ensure_ascii=False).encode())
        #: Characters of a request that fit next to other metadata; 0: it is left out.
        self._room = max(0, min(MAX_TEXT, MAX_METADATA_BYTES - taken))
        #: Aliases on which no transaction is begun for the view.
        self._not_atomic: set[str] | _Every = set()

    def around(self, view: View, key: Callable[..., str]) -> View:
        """Return the wrapper that is called in place of a view."""
        # A decorator may be used more than once.
        locked = copy(self)
        # A view that Django REST framework makes of a function or a class has the class.
        locked.problems = hasattr(getattr(view, "cls", None), "initialize_request")
        locked.key, locked._not_atomic = key, set()
        if next(iter(signature_of(view).parameters), "") == "self":
            # The transaction of a method's request has begun before the lock.
            locked._place, locked._not_atomic = 1, _Every(set())
        if iscoroutinefunction(view):

            @wraps(view)
            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                return await locked.arun(view, *args, **kwargs)

            return asynchronous

        @wraps(view)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            return locked.run(view, *args, **kwargs)

        if not locked._place:
            locked.begin_transactions_of(synchronous)
        return synchronous

    def begin_transactions_of(self, view: Any) -> None:
        """Begin the transactions of a request inside the lock: Django's would be around it."""
        marks = getattr(view, "_non_atomic_requests", ())
        # If the view has another lock inside, its transactions begin inside that.
        self._not_atomic = marks if isinstance(marks, _Every) else set(marks)
        view._non_atomic_requests = _Every(self._not_atomic)

    def run(self, view: View, /, *args: Any, **kwargs: Any) -> Any:
        """Answer a request."""
        request = self._request_of(view, *args, **kwargs)
        lock = self._lock_of(request, args, kwargs)
        return self._policy.run(
            lock,
            partial(self._atomic, view, *args, **kwargs),
            partial(self._answer, request),
        )

    async def arun(self, view: View, /, *args: Any, **kwargs: Any) -> Any:
        """Answer a request, with awaits."""
        request = self._request_of(view, *args, **kwargs)
        lock = await _called(self._lock_of, request, args, kwargs)

        async def answer(error: Refusal) -> HttpResponseBase:
            return await _called(self._answer, request, error)

        return await self._policy.arun(lock, partial(view, *args, **kwargs), answer)

    def _answer(self, request: HttpRequest, error: Exception) -> HttpResponseBase:
        """Return the response to a refused request."""
        given = self._retry_after
        again = _estimated(error) if given is None else math.ceil(given)
        status: int = 503
        if isinstance(error, LockNotAcquired):
            status = self._status or (429 if getattr(error.lock, "permits", 1) != 1 else 409)
        if self._make is not None:
            made = self._make(request, error)
        elif self.problems or hasattr(request, "parser_context"):
            made = problem(error, again, status)
        else:
            made = refuse(request, error, again)
        made.status_code = status
        made.headers.setdefault("Retry-After", str(again))
        made.headers.setdefault("Cache-Control", "no-store")
        return made

    def _request_of(self, view: View, /, *args: Any, **kwargs: Any) -> HttpRequest:
        request: Any = kwargs.get("request")
        if len(args) > self._place:
            request = args[self._place]
        if not hasattr(request, "META"):
            raise LockUsageError(
                f"locked_view finds no request in a call of {view.__qualname__}: it decorates"
                " functions that get one first, and methods that get it behind self. A method is"
                " decorated where it is defined.",
                code="unsupported",
            )
        return request  # type: ignore[no-any-return]

    def _lock_of(
        self, request: HttpRequest, values: tuple[Any, ...], named: dict[str, Any]
    ) -> Lock:
        try:
            key = normalize_key(self.key(*values, **named))
        except IllegalKey as error:
            # The key contains what the client has sent.
            raise BadRequest(str(error)) from error
        metadata = self.lock.metadata
        if self._room:
            # In ASCII, because a client may put anything into method and path, such as NUL.
            parts = (request.method or "", request.path)
            line = " ".join(quote(each, _PATH, errors="replace") for each in parts)
            metadata = {REQUEST: line[: self._room], **metadata}
        return for_call(self.lock, key, values, named, metadata=metadata)

    def _atomic(self, view: View, /, *args: Any, **kwargs: Any) -> Any:
        """Call a view in the transactions that Django would have begun around it."""
        with ExitStack() as stack:
            for alias in connections:
                wanted = connections.settings[alias]["ATOMIC_REQUESTS"]
                if wanted and alias not in self._not_atomic:
                    stack.enter_context(transaction.atomic(using=alias))
            return view(*args, **kwargs)


async def _called(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function; in a thread if it queries a database, such as for `request.user`."""
    try:
        return call(*args, **kwargs)
    except SynchronousOnlyOperation:
        return await sync_to_async(call)(*args, **kwargs)


class _Every:
    """Contains every alias, so that Django begins no transaction; keeps those marked later."""

    def __init__(self, marked: set[str] | _Every):
        self._marked = marked

    def __contains__(self, alias: object) -> bool:
        return True

    def add(self, alias: str) -> None:
        """Begin no transaction on an alias, because `non_atomic_requests` stands above."""
        self._marked.add(alias)


def _require_view(view: object) -> None:
    if not callable(view):
        raise InvalidArgument(
            'locked_view needs a key, as in @locked_view("…"), and decorates a view, not'
            f" {shown(view)}."
        )
    if inspect.isclass(view):
        raise InvalidArgument(
            "locked_view decorates functions and methods. For a class, use LockedViewMixin as its"
            " first base."
        )
    # The function that it decorates has other arguments than the method, and no request.
    if getattr(view, "__module__", None) == method_decorator.__module__:
        raise LockUsageError(
            "locked_view decorates a method where it is defined, without method_decorator.",
            code="unsupported",
        )


def _estimated(error: Exception) -> int:
    """Return in how many seconds to try again: when the holder may have finished."""
    expires_in: float | None = getattr(error, "expires_in", None)
    if expires_in is None:
        return ASK_AGAIN
    # Without a release, a key is free a grace after the end of its lease.
    latest = math.ceil(max(0.0, expires_in) + GRACE)
    # A holder that has worked for long goes on for long: nothing else is known about the rest.
    held_for: float | None = getattr(error, "held_for", None)
    if held_for is None:
        return latest
    return min(latest, max(ASK_AGAIN, math.ceil(held_for)))
