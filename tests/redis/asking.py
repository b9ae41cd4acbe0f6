"""A story that asks a backend everything."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant, Holder
from tests.contract.helpers import contend, held, listed, take

from .hearing import hand_over, waiting


class Interrupted:
    """A backend to which something happens before each question.

    Args:
        before: What happens.
    """

    def __init__(self, backend: Any, before: Callable[[], object]):
        self._backend = backend
        self._before = before

    def __getattr__(self, name: str) -> Any:
        self._before()
        return getattr(self._backend, name)


def tell_story(backend: Any, key: str) -> None:
    """Ask a backend everything that can be asked, and check that each answer is right."""
    grant = take(backend, key, 30)
    assert contend(backend, key, wanted=True).fence == grant.fence
    assert held(backend, key).wanted
    if backend.supports_token_lookup:
        assert backend.read_token(grant.token) == backend.read(key)
    other = take(backend, f"{key}-other", None)
    for renewed in (backend.extend(grant, 60), *backend.extend_many([grant, other])):
        assert isinstance(renewed, Grant)
    assert sorted(listed(backend, key)) == [key, f"{key}-other"]
    _wait(backend, f"{key}-woken")
    _meddle(backend, key, grant)
    _pause(backend, key, grant)
    replaced = take(backend, key, replace=grant.token)
    assert backend.release(grant) is False
    assert backend.release(replaced, 60) is True
    assert backend.release(replaced, 60) is False
    assert held(backend, key).is_settled
    _take_away(backend, key)
    assert backend.release(other) is True
    assert backend.release(other) is False
    assert backend.read(f"{key}-other") is None
    assert backend.cleanup(datetime.now(UTC)) == 0


def _wait(backend: Any, key: str) -> None:
    with waiting(backend, key) as waiter:
        hand_over(backend, backend, waiter, key)
    note = backend.waiters.note(key, Holder(host="there"), 30)
    again = backend.waiters.note(key, Holder(host="there"), 60, note)
    assert [each.holder.host for each in backend.waiters.of(key)] == ["there"]
    backend.waiters.drop(key, again)
    assert backend.waiters.of(key) == []


def _meddle(backend: Any, key: str, grant: Grant) -> None:
    assert backend.request_stop(key).stop_requested_at is not None
    assert backend.extend(grant).stop_requested
    for token in (None, grant.token):
        before = held(backend, key).free_at
        assert before is not None
        assert backend.request_stop(key, 20, token).free_at <= before
    assert backend.request_stop(key, 5, new_token()) is None


def _pause(backend: Any, key: str, grant: Grant) -> None:
    assert backend.pause(key, datetime.now(UTC) + timedelta(hours=1), "somebody") is True
    answer = backend.acquire(key, new_token(), 30, replace=grant.token)
    assert isinstance(answer, Contended)
    assert answer.paused
    assert backend.pause(key, None) is True
    assert backend.pause(key, None) is False


def _take_away(backend: Any, key: str) -> None:
    fence = held(backend, key).fence
    assert backend.force_release(key).fence == fence
    assert backend.force_release(key) is None
    far = fence + 10**12
    assert backend.raise_fences(far, key=key).raised == 1
    assert backend.raise_fences(far, limit=10_000).left == (f"{key}-other",)
    after = take(backend, key)
    assert after.fence == far + 1
    assert backend.release(after) is True
