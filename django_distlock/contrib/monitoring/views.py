"""What the endpoints answer."""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse

from ...core.errors import LockError
from ...handler import lock_backends
from ...inspection import Statistics, statistics
from ..metrics.asking import ask_each
from ..metrics.stores import health
from .access import guarded

#: Seconds for which an answer is good enough for whoever asks again.
HEALTH_AGE: Final = 1.0
STATS_AGE: Final = 10.0
#: Seconds until what has not answered counts as silent.
HEALTH_PATIENCE: Final = 2.0
STATS_PATIENCE: Final = 5.0
#: How often a scrape begins anew: the client makes the file of a worker's metrics empty, and then
#: fills it, and who reads it in between gets an error.
UNFINISHED: Final = 3


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
