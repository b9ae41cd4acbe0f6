"""Fences sent to other services: a signed header, and the middleware that checks it there."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ClassVar, TypeVar, overload
from urllib.parse import quote, unquote

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.signing import BadSignature, Signer
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse

from ..conf import fence_audiences, fence_secrets, validate_audience
from ..core.errors import InvalidArgument, LockUsageError, shown
from ..core.keys import IllegalKey, KeyTemplate, stored_key
from .rejecting import Fence, Fenced, require_fence
from .seen import FenceJump, see

__all__ = [
    "HEADER",
    "SEEN_HEADER",
    "BadFence",
    "FenceJump",
    "FenceMiddleware",
    "RequestFence",
    "fence_header",
    "fence_required",
    "read_fence_header",
]

View = Callable[..., Any]
#: Keeps a view's own type for type checkers.
V = TypeVar("V", bound=View)

#: The header of a request that carries a fence.
HEADER = "X-Lock-Fence"
#: The header of a refusal: the highest fence that was seen.
SEEN_HEADER = "X-Lock-Fence-Seen"

#: Keeps these signatures apart from others with the same secret.
_SALT = "django_distlock.fence"
_FORM = re.compile(r"([A-Za-z0-9_.~%-]+);([1-9][0-9]{0,14});[A-Za-z0-9_-]+")


class BadFence(InvalidArgument):
    """A fence's signature is invalid: forged, by another secret, or for another service."""

    code = "bad_fence"


class RequestFence(Fence):
    """A fence of a request, which was the highest one seen when the request arrived."""

    __slots__ = ()

    def overtaken(self, using: str, *, hold: bool) -> int | None:
        """See `Lease.overtaken`: compare with the fences of later requests."""
        mark = see(self)
        return mark if mark > self.fence else None


def fence_header(by: Fenced, *, audience: str | None = None) -> dict[str, str]:
    """Return the header that carries a fence to another service: `key;fence;signature`.

    The key is percent-encoded, so that any key can be sent. The signature proves that a service
    with our secret made the header, but not that it is new: an eavesdropper may send it again.

    Args:
        by: A lease, or a `Fence`.
        audience: The name of the other service (its `DISTLOCK_FENCE_AUDIENCE`), 1 to 100 printable
            characters: all others refuse the header. None: for services without a name.

    Raises:
        InvalidArgument: `audience` breaks a rule.
        LockUsageError: `by` has no fence.
        InvalidLockBackend: `DISTLOCK_FENCE_SECRET` breaks a rule.
    """
    signer = _signer(None if audience is None else validate_audience(audience))
    return {HEADER: signer.sign(f"{quote(by.key, safe='')};{require_fence(by)}")}


def read_fence_header(text: str) -> Fence:
    """Return the fence that a header carries.

    Raises:
        BadFence: It was not signed with our secret for this service. Also an `InvalidArgument`.
        InvalidArgument: It is not of the form that `fence_header` makes.
        InvalidLockBackend: `DISTLOCK_FENCE_SECRET` or `DISTLOCK_FENCE_AUDIENCE` breaks a rule.
    """
    form = _FORM.fullmatch(text)
    if form is None:
        raise InvalidArgument(
            f"{HEADER} must be key;fence;signature with a percent-encoded key, not {shown(text)}."
        )
    for audience in fence_audiences():
        with suppress(BadSignature):
            _signer(audience).unsign(text)
            break
    else:
        raise BadFence(
            f"{HEADER} has an invalid signature. Check that both services have the same"
            " DISTLOCK_FENCE_SECRET, and that its audience is in this service's"
            " DISTLOCK_FENCE_AUDIENCE."
        )
    try:
        return Fence(unquote(form[1], errors="strict"), int(form[2]))
    except UnicodeDecodeError:
        raise InvalidArgument(f"{HEADER} has a key that is not UTF-8.") from None


class FenceMiddleware:
    """Refuse requests of stale holders; give the others `request.fence`.

    =====================================  =====================================================
    the header `X-Lock-Fence`              what happens
    =====================================  =====================================================
    is missing                             `request.fence` is None
    is malformed                           400
    has an invalid signature               403
    has a fence that no lock has granted   400: it is too far above those seen, see `FenceJump`
    has a lower fence than one seen        412, with the highest one seen as `X-Lock-Fence-Seen`
    has the highest fence, or a new one    `request.fence` is a `Fence`
    =====================================  =====================================================

    After a refusal, neither the view nor any later middleware runs. The highest fence of each key
    is committed to the table of `SeenFence` before the view begins.

    A request that passed may still be slow and write after a newer one, so the view must write
    with `fenced(request.fence)`.
    """

    sync_capable: ClassVar[bool] = True
    async_capable: ClassVar[bool] = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]):
        self.get_response = get_response
        self._is_async = iscoroutinefunction(get_response)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponseBase | Awaitable[HttpResponseBase]:
        """Answer a request, or await the answer."""
        if self._is_async:
            return self._acall(request)
        answer: HttpResponseBase = _refusal(request) or self.get_response(request)
        return answer

    async def _acall(self, request: HttpRequest) -> HttpResponseBase:
        if HEADER in request.headers:
            refusal = await sync_to_async(_refusal)(request)
        else:
            refusal = _refusal(request)
        return refusal or await self.get_response(request)


@overload
def fence_required(view: V) -> V: ...
@overload
def fence_required(*, key: str | Callable[..., str]) -> Callable[[V], V]: ...
def fence_required(view: View | None = None, *, key: str | Callable[..., str] | None = None) -> Any:
    """Answer 428 if a request has no fence, and 403 if the fence is that of another key.

    A decorator, with or without arguments, of views and of methods that get a request.

    Args:
        view: The view.
        key: The key that the fence must be of: a template of the view's parameters, such as
            `"payment:{pk}"`, or a function that returns it, called as the view is. None: any key.

    Raises:
        InvalidArgument: `key` is neither, or the template names no parameter of the view.
        LockUsageError: On a call of the view: the project has no `FenceMiddleware`.
    """
    if key is not None and not (isinstance(key, str) or callable(key)):
        raise InvalidArgument(
            f"key must be a template or a function that returns one, not {shown(key)}."
        )

    def decorate(view: View) -> View:
        made = KeyTemplate.for_function(key, view).of if isinstance(key, str) else key
        if iscoroutinefunction(view):

            @wraps(view)
            async def asynchronous(*args: Any, **kwargs: Any) -> Any:
                # The key may contain `request.user`, which queries the database.
                unmet = await sync_to_async(_unmet)(made, *args, **kwargs)
                return unmet or await view(*args, **kwargs)

            return asynchronous

        @wraps(view)
        def synchronous(*args: Any, **kwargs: Any) -> Any:
            return _unmet(made, *args, **kwargs) or view(*args, **kwargs)

        return synchronous

    return decorate if view is None else decorate(view)


def _signer(audience: str | None) -> Signer:
    first, *others = fence_secrets()
    salt = _SALT if audience is None else f"{_SALT}:{audience}"
    return Signer(key=first, sep=";", salt=salt, fallback_keys=others)


def _refusal(request: HttpRequest) -> HttpResponse | None:
    """Set `request.fence`, or return the refusal of the request."""
    request.fence = None  # type: ignore[attr-defined]
    header = request.headers.get(HEADER)
    if header is None:
        return None
    try:
        fence = read_fence_header(header)
    except BadFence as error:
        return _answer(403, error.code, detail=str(error))
    except InvalidArgument as error:
        return _answer(400, error.code, detail=str(error))
    try:
        mark = see(fence)
    except FenceJump as error:
        return _answer(400, error.code, detail=str(error))
    if mark > fence.fence:
        answer = _answer(412, "fence_rejected", key=fence.key, fence=fence.fence, seen=mark)
        answer[SEEN_HEADER] = str(mark)
        return answer
    request.fence = RequestFence(fence.key, fence.fence)  # type: ignore[attr-defined]
    return None


def _unmet(key: Callable[..., str] | None, /, *args: Any, **kwargs: Any) -> HttpResponse | None:
    """Return the refusal that replaces the call of a view; None: call it."""
    # The first argument of a method is its object.
    given = (*args[:2], kwargs.get("request"))
    request: Any = next((each for each in given if hasattr(each, "META")), None)
    if not hasattr(request, "fence"):
        raise LockUsageError(
            "fence_required requires django_distlock.fencing.http.FenceMiddleware in MIDDLEWARE."
        )
    if request.fence is None:
        return _answer(428, "fence_missing", detail=f"Send the header {HEADER}.")
    if key is None:
        return None
    try:
        wanted = stored_key(key(*args, **kwargs))
    except IllegalKey as error:
        # The key contains what the client has sent.
        return _answer(400, error.code, detail=str(error))
    if request.fence.key == wanted:
        return None
    return _answer(403, "other_key", key=request.fence.key, wanted=wanted)


def _answer(status: int, error: str, **facts: Any) -> HttpResponse:
    return JsonResponse({"error": error, **facts}, status=status)
