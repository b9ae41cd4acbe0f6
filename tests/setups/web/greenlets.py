"""Views for a worker whose requests are greenlets: one thread, which blocking calls hand over."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from django.http import HttpRequest, JsonResponse

from django_distlock import Lease, LockLost, Retry, distlock
from django_distlock.core.clock import monotonic

#: Slower than any test: who is granted a key sooner was woken.
UNHURRIED = Retry(delay=60, cap=60)


def keep(request: HttpRequest) -> JsonResponse:
    """Hold a short lease for two of its lifetimes, in which others run."""
    monkey: Any = import_module("gevent.monkey")
    ttl = float(request.GET["ttl"])
    with distlock(request.GET["key"], ttl=ttl, backend=request.GET["backend"]) as lease:
        ends = lease.deadline + ttl
        while monotonic() < ends:
            time.sleep(0.02)
        said = {"outcome": _outcome(lease), "patched": monkey.is_module_patched("threading")}
    return JsonResponse(said)


def take(request: HttpRequest) -> JsonResponse:
    """Wait for a key to be called out, and tell when it was granted."""
    lock = distlock(request.GET["key"], wait=60, backend=request.GET["backend"], retry=UNHURRIED)
    with lock as lease:
        return JsonResponse({"at": time.monotonic(), "fence": lease.fence})


def starve(request: HttpRequest) -> JsonResponse:
    """Block for longer than a lease lives, and hand over to nobody; then ask for the lease."""
    ttl = float(request.GET["ttl"])
    outcomes = []
    try:
        with distlock(request.GET["key"], ttl=ttl, backend=request.GET["backend"]) as lease:
            # As gevent has not patched it: the thread stands still, and so do all its greenlets.
            sleep = import_module("gevent.monkey").get_original("time", "sleep")
            sleep(lease.deadline + ttl / 4 - monotonic())
            if request.GET.get("late_beat"):
                # The heartbeat's turn comes now, and the store would still renew.
                time.sleep(0.2)
            outcomes += [_outcome(lease), lease.held]
    except LockLost:
        outcomes.append("lost")
    return JsonResponse({"outcomes": outcomes})


def _outcome(lease: Lease) -> str:
    try:
        lease.check()
    except LockLost:
        return "lost"
    return "held"
