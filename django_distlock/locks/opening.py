"""Ask for several keys in one request, before each of them is acquired by itself."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from ..backends.base import BaseLockBackend
from ..core import durations
from ..core.durations import MAX_BOUND
from ..core.errors import BackendUnavailable, LockError
from ..core.keys import new_token
from ..core.pacing import leaves_mark
from ..core.records import UNKNOWN, Grant, InTheWay
from ..process import deferred_release
from ..process.transaction_locks import keeps
from . import blocks
from .attempts import Answered, release_unanswered
from .blocks import Block, Leaving

if TYPE_CHECKING:
    from .lease import Lease
    from .lock import Lock


def _leave(block: Block, opening: Opening, *end: Any) -> None:
    if end[1] is not None:
        opening.fail(end[1])
    opening.forget()
    block.close()


def _aleave(block: Block, opening: Opening, *end: Any) -> Any:
    ending = _end_awaited(block, opening, end[1])
    block.watch(ending)
    return ending


async def _end_awaited(block: Block, opening: Opening, exc: BaseException | None) -> None:
    if exc is not None:
        await opening.backend.threads.run(opening.fail, exc)
    opening.forget()
    block.close()


class Opening:
    """Asks for several keys at once, and owns the grants until each key has its lease.

    The leases are entered inside a block of this object. If that raises or is interrupted, no key
    stays granted. If the store grants all keys, each lease takes its grant from here. If one is
    contended, or the store cannot grant several keys in one step, nothing was granted, and the keys
    are acquired one by one in their order. (A caller that held nothing while it waits might never
    find all keys free at the same time.)

    Args:
        locks: The locks, in the order of their keys.
        wait: Seconds for all of them; None: for ever.
        taken: The list that the leases are added to as they are entered.

    Attributes:
        asks: Whether one request for all keys makes sense.
        began: When the call began, by the store's `monotonic`.
        refused: The key that was refused with `wait=0`; None: none was.
    """

    def __init__(
        self,
        backend: BaseLockBackend,
        locks: Sequence[Lock],
        wait: float | None,
        taken: Sequence[Lease],
    ):
        self.backend, self.wait, self._taken = backend, wait, taken
        self.began = backend.monotonic()
        self.refused: str | None = None
        self.asks = len(locks) > 1 and self._may_ask(locks)
        self._locks = locks
        self.names = {(each.backend, each.key) for each in locks}
        # For each key, the seconds from the grant for which it stays taken after a release. A lock
        # that is entered again keeps its own.
        self._holds = {
            each.key: each._terms(backend).hold
            for each in locks
            if (each.hold or each.min_hold) and blocks.holds(each.backend, each.key) is None
        }
        self._tokens = {each.key: new_token() for each in locks}
        self._answers: dict[str, Answered] = {}
        self._abandoned = False
        # The keys that the store has granted, or may have.
        self._granted: list[Grant] = []
        self._unanswered = False
        # Held during the request, so that `fail` waits for it before it gives the keys back.
        self._mutex = threading.Lock()

    __exit__ = Leaving.by(_leave)
    __aexit__ = Leaving.by(_aleave)

    def __enter__(self) -> Opening:
        blocks.opened(self).attempts = self
        return self

    async def __aenter__(self) -> Opening:
        return self.__enter__()

    def ask(self) -> None:
        """Make one request for all keys, and keep the answer for the leases."""
        try:
            if not self.backend.acquires_together:
                return
        except LockError:
            return  # The store is unavailable, as acquiring the first key will report.
        for each in self._locks:
            # Releases that a rollback or an interruption has left are waited for first.
            blocks.flush((each.backend, each.key))
            deferred_release.flush((each.backend, each.key))
        with self._mutex:
            if not self._abandoned:
                self._ask()

    def take(self, key: str) -> Answered | None:
        """Return the answer about a key, once."""
        return self._answers.pop(key, None)

    def leave_to_lease(self, key: str) -> None:
        """Let the lease of a key release it from now on."""
        self._granted = [each for each in self._granted if each.key != key]

    def complete(self) -> None:
        """Apply `hold` and `min_hold`, now that all keys are granted."""
        for each in self._taken:
            if each.key in self._holds:
                each._holding.keep_window(self._holds[each.key])

    def forget(self) -> None:
        """Forget the answers."""
        self._answers.clear()

    def fail(self, error: BaseException) -> None:
        """Release all keys except those that a transaction has kept since before."""
        with self._mutex:
            self._abandoned = True
            self.forget()
            self._give_back()
        for lease in reversed(self._taken):
            if not lease._holding.goes_on:
                # At once, and not after the transaction: no work was done under it.
                lease._release.quietly()

    def _may_ask(self, locks: Sequence[Lock]) -> bool:
        """Whether one request can serve all keys.

        It cannot if the caller or its transaction holds one of them, if others wait for one, or if
        the locks differ in more than the key, such as in permits.
        """
        if any(replace(each, key=locks[0].key) != locks[0] for each in locks):
            return False
        home, queues = deferred_release.home(), self.backend.queues
        transactions = deferred_release.managed_transactions(home)
        for each in locks:
            name, stored = (each.backend, each.key), queues.name_of(each.key)
            if blocks.holds(*name) or deferred_release.waiting_release(name, home) is not None:
                return False
            if any(keeps(connection, *name) for connection in transactions):
                return False
            if self.wait != 0 and (stored in queues or queues.rest(stored, MAX_BOUND) > 0):
                return False
        first = locks[0].backend, locks[0].key
        return self.wait is not None or deferred_release.kept_beside([first], home) is None

    def _ask(self) -> None:
        store, lock = self.backend, self._locks[0]
        terms = lock._terms(store)
        wait = math.inf if self.wait is None else self.wait
        end = time.monotonic() + wait + durations.PATIENCE
        now, shared = datetime.now(UTC), terms.permits != 1
        self._granted = [
            Grant(key, token, 1, terms.ttl, now, None, shared=shared)
            for key, token in self._tokens.items()
        ]
        # True until there is an answer, because a signal's handler may raise before it is stored.
        self._unanswered, sent_at = True, store.monotonic()
        answered = partial(Answered, sent_at=sent_at)
        try:
            found = durations.spend(
                end,
                store.records.acquire,
                *(self._tokens, terms.ttl, terms.holder),
                permits=terms.permits,
                bound=min(MAX_BOUND, wait),
            )
        except BackendUnavailable as error:
            # Each key may have been granted, so the next attempt for it uses the same token.
            for key, token in self._tokens.items():
                self._answers[key] = answered(token, outcome=error)
            return
        except LockError:
            # The key that this is about will fail again when it is acquired by itself.
            self._give_back()
            return
        self._unanswered = False
        if isinstance(found, InTheWay):
            self._granted = []
            if wait == 0 and leaves_mark(found.answer) and not lock.steal_if_dead:
                token = self._tokens[found.key]
                self._answers[found.key] = answered(token, outcome=found.answer)
                self.refused = found.key
        elif terms.ttl is not None and store.monotonic() >= sent_at + terms.ttl:
            # The leases were over before the answer came.
            self._give_back()
        else:
            for grant in found:
                self._answers[grant.key] = answered(grant.token, outcome=grant)

    def _give_back(self) -> None:
        given, self._granted = self._granted, []
        for grant in given:
            is_known = not self._unanswered
            try:
                is_known = is_known and self.backend.release(grant) is not UNKNOWN
            except LockError:
                is_known = False
            if not is_known:
                release_unanswered(self.backend, grant)
