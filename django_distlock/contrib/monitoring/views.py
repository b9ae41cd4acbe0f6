"""Who may ask the endpoints, and what they answer."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Final

from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.db.utils import DatabaseError, InterfaceError
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.http import require_safe

from ...conf import monitor_tokens
from ...core.errors import LockError
from ...handler import lock_backends
from ...inspection import Operation, Statistics, may, statistics
from ..metrics.gauges import ask_each, health

View = Callable[[HttpRequest], HttpResponseBase]

#: Seconds for which an answer is good enough for whoever asks again.
HEALTH_AGE: Final = 1.0
STATS_AGE: Final = 10.0
#: Seconds until what has not answered counts as silent.
HEALTH_PATIENCE: Final = 2.0
STATS_PATIENCE: Final = 5.0
#: How often a scrape begins anew: the client makes the file of a worker's metrics empty, and then
#: fills it, and who reads it in between gets an error.
UNFINISHED: Final = 3


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
        # All of them, so that the time tells nothing of which it was.
        are_same = [constant_time_compare(shown.strip(), each) for each in monitor_tokens()]
        return None if any(are_same) else _unknown()
    try:
        user = getattr(request, "user", None)
        if user is None or not user.is_authenticated:
            return _unknown()
        # A project without Django's admin need not know who is staff.
        if user.is_active and getattr(user, "is_staff", False) and may(user, Operation.VIEW):
            return None
    except (DatabaseError, InterfaceError):
        return _unknown()  # Nobody can tell.
    return HttpResponse(status=403)


def _unknown() -> HttpResponse:
    return HttpResponse(status=401, headers={"WWW-Authenticate": "Bearer"})


@guarded
def health_view(request: HttpRequest) -> HttpResponse:
    """Answer 200 where every store does, and else 503."""
    found = health(max_age=HEALTH_AGE, patience=HEALTH_PATIENCE)
    is_up = all(each.is_up for each in found.values())
    said = {alias: {"status": each.code, "seconds": each.seconds} for alias, each in found.items()}
    return JsonResponse(
        {"status": "ok" if is_up else "unavailable", "backends": said}, status=200 if is_up else 503
    )


@guarded
def stats_view(request: HttpRequest) -> HttpResponse:
    """Answer what `distlock_stats --json` prints, without the texts of errors."""
    found: list[Any] = []
    failures: list[Any] = []
    answers = ask_each(_statistics, max_age=STATS_AGE, patience=STATS_PATIENCE)
    for alias, answer in answers.items():
        if isinstance(answer, Statistics):
            found.append(answer.as_json())
        else:
            failures.append({"backend": alias, "code": answer or "timeout"})
    return JsonResponse({"backends": found, "failures": failures})


@guarded
def metrics_view(request: HttpRequest) -> HttpResponse:
    """Answer a scrape of Prometheus; 404 where its client is not installed."""
    try:
        from prometheus_client import exposition

        from ..prometheus import scrape_registry
    except ImportError:
        return HttpResponse(status=404)
    encode, content_type = exposition.choose_encoder(request.headers.get("Accept", ""))
    for _ in range(UNFINISHED):
        with suppress(struct.error):
            return HttpResponse(encode(scrape_registry()), content_type=content_type)
        time.sleep(0.05)
    return HttpResponse(encode(scrape_registry()), content_type=content_type)


def _statistics(alias: str) -> Statistics | str:
    """Return how much there is, or the code of what is in the way."""
    try:
        # What is in memory is that of one process, of many.
        return statistics(alias) if lock_backends[alias].distributed else "unsupported"
    except LockError as error:
        return error.code
    except ImproperlyConfigured:
        return "misconfigured"
