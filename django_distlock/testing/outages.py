"""Simulated outages of a store."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..core.errors import BackendUnavailable
from ..handler import lock_backends

#: The methods of a backend that call its store.
OPERATIONS = (
    "_acquire", "_acquire_many", "_extend", "_extend_many", "_release",
    "_read", "_read_many", "_read_token", "_sharing", "_list", "_expired",
    "_counter", "_counter_beside", "_fences_of", "_raise_fences",
    "_force_release", "_request_stop", "_pause", "_resume", "_cleanup",
    "_guard", "_is_guarded", "_guards_of", "_lock_for_transaction", "_kept_by_transactions",
    "_note_waiter", "_drop_waiter", "_open_door", "_waiters", "_count_waiters", "_note", "_noted",
    "_counts", "_states", "_time", "_clocks",
)  # fmt: skip


@contextmanager
def lose_connection(backend: str = "default", *, answers: bool = True) -> Iterator[None]:
    """Cut off the store while the block runs: calls to it raise `BackendUnavailable`.

    Args:
        backend: The backend's alias.
        answers: False: requests are carried out, and only their answers are lost. By default the
            requests do not arrive.
    """
    store, carried_out = lock_backends[backend], not answers
    own = vars(store)
    before = {name: own[name] for name in OPERATIONS if name in own}
    # An operation may call others, and only its own answer is lost.
    inside = threading.local() if carried_out else None
    cuts = {name: _losing(getattr(store, name), store.alias, inside) for name in OPERATIONS}
    own.update(cuts)
    try:
        yield
    finally:
        for name in OPERATIONS:
            del own[name]
        own.update(before)


def _losing(
    operation: Callable[..., Any], alias: str, inside: threading.local | None
) -> Callable[..., Any]:
    @functools.wraps(operation)
    def lose(*args: Any, **kwargs: Any) -> Any:
        if inside is None:
            raise _lost(alias)
        if getattr(inside, "is_entered", False):
            return operation(*args, **kwargs)
        inside.is_entered = True
        try:
            operation(*args, **kwargs)
        finally:
            inside.is_entered = False
        raise _lost(alias)

    return lose


def _lost(alias: str) -> BackendUnavailable:
    return BackendUnavailable(f"The test has cut the connection to the lock store {alias!r}.")
