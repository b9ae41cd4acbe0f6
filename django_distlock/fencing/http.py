"""Fences on their way to another service: a signed header, and who reads it there."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from asgiref.sync import iscoroutinefunction, markcoroutinefunction, sync_to_async
from django.core.signing import BadSignature, Signer
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse

from ..conf import fence_secrets
from ..core.errors import InvalidArgument, LockUsageError, shown
from .rejecting import Fence, Fenced, require_fence
from .seen import see

#: The header of a request that carries a fence.
HEADER = "X-Lock-Fence"
#: The header of an answer that refuses one: the highest fence that was seen.
SEEN_HEADER = "X-Lock-Fence-Seen"

#: Keeps these signatures apart from whatever else the secret signs.
_SALT = "django_distlock.fence"
_FORM = re.compile(r"([A-Za-z0-9_.~%-]+);([1-9][0-9]{0,14});[A-Za-z0-9_-]+")


class BadFence(InvalidArgument):
    """The signature of a fence is not ours: somebody made it up, or has another secret."""

    code = "bad_fence"


class RequestFence(Fence):
    """A fence that came with a request, and was the highest one that was seen then."""

    __slots__ = ()

    def overtaken(self, using: str, *, hold: bool) -> int | None:
        """See `Lease.overtaken`: compared with what other requests have brought since."""
        mark = see(self)
        return mark if mark > self.fence else None


def fence_header(by: Fenced) -> dict[str, str]:
    """Return the header that carries a fence to another service: `key;fence;signature`.

    The key is percent-encoded, so that any key can be sent. The signature proves that a service
    with our secret sent it, and not that it is new: whoever overhears it may send it again.

    Raises:
        LockUsageError: `by` has no fence.
        InvalidLockBackend: `DISTLOCK_FENCE_SECRET` breaks a rule.
    """
    return {HEADER: _signer().sign(f"{quote(by.key, safe='')};{require_fence(by)}")}


def read_fence_header(text: str) -> Fence:
    """Return the fence that a header carries.

    Raises:
        BadFence: It was not signed with our secret. Also an `InvalidArgument`.
        InvalidArgument: It is not of the form that `fence_header` makes.
        InvalidLockBackend: `DISTLOCK_FENCE_SECRET` breaks a rule.
    """
    form = _FORM.fullmatch(text)
    if form is None:
        raise InvalidArgument(
            f"{HEADER} is key;fence;signature, with the key percent-encoded, not {shown(text)}."
        )
    try:
        _signer().unsign(text)
    except BadSignature:
        raise BadFence(
            f"{HEADER} carries a signature that is not ours. Do both services have the same"
            f" DISTLOCK_FENCE_SECRET?"
        ) from None
    try:
        return Fence(unquote(form[1], errors="strict"), int(form[2]))
    except UnicodeDecodeError:
        raise InvalidArgument(f"{HEADER} carries a key that is not UTF-8.") from None


class FenceMiddleware:
    """Refuse requests of holders whose time is over; give the others `request.fence`.

    =====================================  =====================================================
    the header `X-Lock-Fence`              what happens
    =====================================  =====================================================
    is missing                             `request.fence` is None
    is malformed                           400
    has a signature that is not ours       403
    has a lower fence than one seen        412, with the highest one seen as `X-Lock-Fence-Seen`
    has the highest fence, or a new one    `request.fence` is a `Fence`
    =====================================  =====================================================

    Where it refuses, neither the view nor any middleware below runs. The highest fence of each key
    is kept in the table of `SeenFence`, committed before the view begins.

    A request that passed may still be slow, and write behind a newer one: so the view writes with
    `fenced(request.fence)`.
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


def fence_required(view: Callable[..., Any]) -> Callable[..., Any]:
    """Answer 428 where a request carries no fence; a decorator of views.

    Raises:
        LockUsageError: When called: the project has no `FenceMiddleware`.
    """
    if iscoroutinefunction(view):

        @wraps(view)
        async def asynchronous(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            return _missing(request) or await view(request, *args, **kwargs)

        return asynchronous

    @wraps(view)
    def synchronous(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return _missing(request) or view(request, *args, **kwargs)

    return synchronous


def _signer() -> Signer:
    first, *others = fence_secrets()
    return Signer(key=first, sep=";", salt=_SALT, fallback_keys=others)


def _refusal(request: HttpRequest) -> HttpResponse | None:
    """Set `request.fence`, or return why not."""
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
    mark = see(fence)
    if mark > fence.fence:
        answer = _answer(412, "fence_rejected", key=fence.key, fence=fence.fence, seen=mark)
        answer[SEEN_HEADER] = str(mark)
        return answer
    request.fence = RequestFence(fence.key, fence.fence)  # type: ignore[attr-defined]
    return None


def _missing(request: HttpRequest) -> HttpResponse | None:
    if not hasattr(request, "fence"):
        raise LockUsageError(
            "fence_required needs django_distlock.fencing.http.FenceMiddleware in MIDDLEWARE."
        )
    if request.fence is None:
        return _answer(428, "fence_missing", detail=f"Send the header {HEADER}.")
    return None


def _answer(status: int, error: str, **facts: Any) -> HttpResponse:
    return JsonResponse({"error": error, **facts}, status=status)
