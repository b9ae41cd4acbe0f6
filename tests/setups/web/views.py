"""What the project does with locks. Every view answers with JSON."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse

from django_distlock import Lock, LockUsageError, distlock
from tests.contract.locking import rolled_back
from tests.setups.counting import EAGER, acount_once, count_inside, count_once
from tests.shop.models import Row

from . import preload


def ready(request: HttpRequest) -> JsonResponse:
    """Answer."""
    return JsonResponse({})


def worker(request: HttpRequest) -> JsonResponse:
    """Tell who answers, on which session, and what it may do with the lease of its master."""
    with transaction.atomic(), distlock(f"{request.GET['key']}:{os.getpid()}") as lease:
        connection.ensure_connection()
        said: dict[str, Any] = {
            "pid": os.getpid(),
            "session": connection.connection.info.backend_pid,
            "fence": lease.fence,
        }
    if preload.leases:
        said["master"] = _of_the_master()
    return JsonResponse(said)


def _of_the_master() -> dict[str, Any]:
    (lease,) = preload.leases
    said: dict[str, Any] = {"held": lease.held, "release": lease.release()}
    try:
        lease.extend()
    except LockUsageError as error:
        said["extend"] = error.code
    return said


def count(request: HttpRequest) -> JsonResponse:
    """Add one to the counter, in a transaction or not."""
    add = count_inside if request.GET.get("inside") else count_once
    counted = add(_lock(request), request.GET["key"])
    return JsonResponse({"pid": os.getpid(), "counted": counted})


async def acount(request: HttpRequest) -> JsonResponse:
    """Add one to the counter."""
    counted = await acount_once(_lock(request), request.GET["key"])
    return JsonResponse({"pid": os.getpid(), "counted": counted})


def hold(request: HttpRequest) -> JsonResponse:
    """Hold the lock until there is a row that says to let go."""
    with _lock(request) as lease:
        while not Row.objects.filter(name=f"{request.GET['key']}:let go").exists():
            time.sleep(0.02)
        return JsonResponse({"pid": os.getpid(), "fence": lease.fence})


async def ahold(request: HttpRequest) -> JsonResponse:
    """Hold the lock until there is a row that says to let go."""
    async with _lock(request) as lease:
        gone = Row.objects.filter(name=f"{request.GET['key']}:let go")
        while not await gone.aexists():  # noqa: ASYNC110 - another process inserts it
            await asyncio.sleep(0.02)
        return JsonResponse({"pid": os.getpid(), "fence": lease.fence})


async def await_alone(request: HttpRequest) -> JsonResponse:
    """Hold the lock, without a query of the view's own, until the client goes away."""
    async with _lock(request):
        await asyncio.sleep(60)
    return JsonResponse({})


def give_up(request: HttpRequest) -> JsonResponse:
    """Lock in a transaction that is rolled back, without which the key would not be free."""
    with rolled_back(), _lock(request) as lease:
        pass
    return JsonResponse({"pid": os.getpid(), "fence": lease.fence})


def leave(request: HttpRequest) -> JsonResponse:
    """Take the lock, and end without giving it back."""
    lease = _lock(request).acquire()
    return JsonResponse({"pid": os.getpid(), "fence": lease.fence})


def _lock(request: HttpRequest) -> Lock:
    ttl = float(request.GET.get("ttl", 60))
    backend = request.GET.get("backend", "default")
    return distlock(request.GET["key"], ttl=ttl, wait=60, backend=backend, retry=EAGER)
