"""What other processes do in these tests. See `tests.processes`."""

from __future__ import annotations

from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant
from django_distlock.handler import lock_backends


def hold(key: str) -> None:
    """Hold a key until told to let go."""
    backend = lock_backends["redis"]
    grant = backend.acquire(key, new_token(), 60)
    assert isinstance(grant, Grant)
    print("held")
    input()
    assert backend.release(grant) is True
