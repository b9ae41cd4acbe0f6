"""How a task works under the lease of the one that sent it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from celery import current_app

from ... import holding, transactions
from ...attempts import Granted
from ...backends.base import BaseLockBackend
from ...core.errors import InvalidArgument, LockError, LockLost
from ...core.logs import log_fields
from ...core.records import Grant
from ...host import monotonic
from ...keeping import Terms as Kept
from ...leases import Lease
from .deliveries import LEASE
from .queueing import call_of
from .terms import terms_of

logger = logging.getLogger("django_distlock")

#: The leases of tasks that run in this process, by token: one thread may send what another runs.
_here: WeakValueDictionary[str, Lease] = WeakValueDictionary()


def remember(lease: Lease) -> None:
    """Let tasks of this process work under a lease."""
    if lease.held:
        _here[lease.token] = lease


def hand_down(
    sender: Any = None, body: Any = None, headers: dict[str, Any] | None = None, **_: Any
) -> None:
    """Tell a task under which lease it is sent: a receiver of `before_task_publish`.

    Not inside a transaction: it might begin before what was written there is committed.
    """
    if headers is None or LEASE in headers or holding.current_lease() is None:
        return
    task = current_app.tasks.get(sender)
    terms = terms_of(task)
    if terms is None or terms.lock is None or not terms.inherit:
        return
    args, kwargs = body[0], body[1]
    try:
        key = terms.lock.make(call_of(task, tuple(args), dict(kwargs)))
    except (InvalidArgument, TypeError):
        return  # The task itself will say so.
    lease = holding.holds(terms.backend, key)
    if lease is None:
        return
    if transactions.open_transactions():
        extra = log_fields("not_handed_down", backend=lease.backend, key=key)
        logger.warning(
            "%s is sent inside a transaction and takes %r as any other task does, not under the"
            " lease of its sender: send it by delay_on_commit()",
            sender,
            key,
            extra=extra,
        )
        return
    headers[LEASE] = lease.fence_token


@contextmanager
def under(store: BaseLockBackend, key: str, fence: str) -> Iterator[Lease | None]:
    """Work under the lease that has this fence; None where it is over.

    Its sender releases it. As long as both run, both renew it.

    Raises:
        LockLost: It ended before the block did.
    """
    record = store.read(key)
    if record is None or record.is_settled or f"{record.fence:015d}" != fence:
        yield None
        return
    theirs = _here.get(record.token)
    if theirs is not None and theirs.held:
        with _bound(theirs):
            yield theirs
        return
    sent_at = monotonic()
    known = Grant(
        key, record.token, record.fence, record.ttl, record.acquired_at, record.expires_at
    )
    answer = store.extend(known, record.ttl)
    if not isinstance(answer, Grant):
        yield None
        return
    deadline = math.inf if answer.ttl is None else sent_at + answer.ttl
    kept = Kept(ttl=answer.ttl, holder=record.holder, retry=store.config.retry)
    lease = Lease(store, Granted(answer, deadline), kept)
    try:
        lease.begin_block(heartbeat=True)
        with _bound(lease):
            yield lease
    finally:
        _let_go(lease)
    if lease.is_lost:
        raise LockLost(f"The lease on {key!r} ended before the task that worked under it.", key=key)


@contextmanager
def _bound(lease: Lease) -> Iterator[None]:
    owner = object()
    holding.bind(owner, lease, inner=True)
    try:
        yield
    finally:
        holding.unbind(owner)


def _let_go(lease: Lease) -> None:
    """Neither renew nor watch it any more, and leave it as it is."""
    try:
        lease.let_go()
    except LockError:
        # Lost: then there is nothing to let go of.
        return
