"""What processes do that ask for one value at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

from django.core.cache import caches
from django.db import transaction

from django_distlock import single_flight
from tests.contract.helpers import Later
from tests.shop.models import Row


def ask(key: str, threads: int, backend: str) -> list[Any]:
    """Let many threads ask for a cold key at once; return what they got."""
    caches["shared"].get(key)
    print("ready")
    start = threading.Barrier(threads)

    def compute() -> dict[str, int]:
        Row.objects.create(name=key)
        time.sleep(0.5)
        return {"rows": Row.objects.filter(name=key).count()}

    def one() -> Any:
        start.wait()
        return single_flight(key, compute, timeout=60, cache="shared", backend=backend, wait=30)

    return [each.result(60) for each in [Later(one) for _ in range(threads)]]


def compute(key: str, backend: str, what: str, more: dict[str, Any]) -> Any:
    """Compute a value when told to, in the midst of a transaction or not, or fail."""

    def work() -> str:
        print("computing")
        if (told := input()) == "fail":
            raise ConnectionResetError(54, "the provider is away")
        return told

    how: dict[str, Any] = {"timeout": 60, "cache": "shared", "backend": backend, **more}
    if what != "atomic":
        return single_flight(key, work, **how)
    with transaction.atomic():
        Row.objects.count()
        got = single_flight(key, work, **how)
        print("computed")
        input()
    return got
