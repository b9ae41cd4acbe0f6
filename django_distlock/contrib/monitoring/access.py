"""Who may ask the endpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.db import connections, transaction
from django.db.utils import DatabaseError, InterfaceError
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.utils.crypto import constant_time_compare
from django.views.decorators.http import require_safe

from ...conf import monitor_tokens
from ...inspection import Operation, may

View = Callable[[HttpRequest], HttpResponseBase]


def guarded(view: View) -> View:
    """Let a view answer a token of `DISTLOCK_MONITOR_TOKEN`, and staff who may see locks.

    Others get an empty 401 or 403, and no redirect. Whoever shows a token is judged by that alone.
    Nothing of an answer is kept by caches.
    """

    @wraps(view)
    def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        refusal = _refusal(request)
        response = view(request, *args, **kwargs) if refusal is None else refusal
        response.headers["Cache-Control"] = "no-store"
        return response

    # A database that is down is what they are to tell, so none is asked on the way to them.
    for using in connections:
        transaction.non_atomic_requests(using)(wrapper)
    return login_not_required(require_safe(wrapper))


def _refusal(request: HttpRequest) -> HttpResponse | None:
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return None if _is_token(shown.strip()) else _unknown()
    try:
        user = getattr(request, "user", None)
        if user is None or not user.is_authenticated:
            return _unknown()
        if user.is_active and user.is_staff and may(user, Operation.VIEW):
            return None
    except (DatabaseError, InterfaceError):
        return _unknown()  # Nobody can tell.
    return HttpResponse(status=403)


def _unknown() -> HttpResponse:
    return HttpResponse(status=401, headers={"WWW-Authenticate": "Bearer"})


def _is_token(shown: str) -> bool:
    # All of them, so that the time tells nothing of which it was.
    return any([constant_time_compare(shown, each) for each in monitor_tokens()])  # noqa: C419
