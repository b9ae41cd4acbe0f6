"""The monitoring endpoints, and the check of who may call them."""

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
from ...inspection.asking import ask_each
from ..metrics.gauges import health

View = Callable[[HttpRequest], HttpResponseBase]

#: Seconds for which an answer is reused for further requests.
HEALTH_AGE: Final = 1.0
STATS_AGE: Final = 10.0
#: Seconds until a store that has not answered is reported as a timeout.
HEALTH_PATIENCE: Final = 2.0
STATS_PATIENCE: Final = 5.0
#: How often a scrape is tried again: the client creates the file of a worker's metrics empty, and
#: a read before it is filled raises an error.
UNFINISHED: Final = 3


def guarded(view: View) -> View:
    """Restrict a view to tokens of `DISTLOCK_MONITOR_TOKEN` and to staff who may see locks.

    Other requests get an empty 401 or 403 without a redirect. A request with a token is judged by
    the token alone. Caches do not store the answers.
    """

    @wraps(view)
    def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        refusal = _refusal(request)
        response = view(request, *args, **kwargs) if refusal is None else refusal
        response.headers["Cache-Control"] = "no-store"
        return response

    # The views must report a database that is down, so the request must not need a transaction.
    for using in connections:
        transaction.non_atomic_requests(using)(wrapper)
    return login_not_required(require_safe(wrapper))


def _refusal(request: HttpRequest) -> HttpResponse | None:
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        # Compare all tokens, so that the time does not reveal which one matched.
        are_same = [constant_time_compare(shown.strip(), each) for each in monitor_tokens()]
        return None if any(are_same) else _unknown()
    try:
        user = getattr(request, "user", None)
        if user is None or not user.is_authenticated:
            return _unknown()
        # The user model of a project without Django's admin may have no `is_staff`.
        if user.is_active and getattr(user, "is_staff", False) and may(user, Operation.VIEW):
            return None
    except (DatabaseError, InterfaceError):
        return _unknown()  # Without the database, the user is unknown.
    return HttpResponse(status=403)


def _unknown() -> HttpResponse:
    return HttpResponse(status=401, headers={"WWW-Authenticate": "Bearer"})


@guarded
def health_view(request: HttpRequest) -> HttpResponse:
    """Answer 200 if every store answers, else 503."""
    found = health(max_age=HEALTH_AGE, patience=HEALTH_PATIENCE)
    is_up = all(each.is_up for each in found.values())
    said = {alias: {"status": each.code, "seconds": each.seconds} for alias, each in found.items()}
    return JsonResponse(
        {"status": "ok" if is_up else "unavailable", "backends": said}, status=200 if is_up else 503
    )


@guarded
def stats_view(request: HttpRequest) -> HttpResponse:
    """Answer with what `distlock_stats --json` prints, without the texts of errors."""
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
    """Answer a scrape of Prometheus; 404 if its client is not installed."""
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
    """Return the statistics of a store, or the code of its error."""
    try:
        # Locks in memory are those of one process among many.
        return statistics(alias) if lock_backends[alias].distributed else "unsupported"
    except LockError as error:
        return error.code
    except ImproperlyConfigured:
        return "misconfigured"
