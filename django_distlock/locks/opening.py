"""The one question for several keys that comes before each of them is asked for by itself."""

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
from ..core import budgets
from ..core.durations import MAX_BOUND
from ..core.errors import BackendUnavailable, LockError
from ..core.keys import new_token
from ..core.pacing import leaves_mark
from ..core.records import UNKNOWN, Grant, InTheWay
from ..process import deferred_release
from ..process.transaction_locks import keeps
from . import blocks, context
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
    """Asks for several keys at once, and has what was granted until each key has its lease.

    The leases are entered inside of a block of it. If that raises, or is interrupted, no key stays
    granted. Where the store grants them, each lease takes its part of the answer. Where a key is
    contended, nothing was taken, and the keys are waited for one by one, in their order: a caller
    that holds nothing while it waits might never find all of many keys free at the same time. So it
    is where the store does not grant several keys in one step.

    Args:
        locks: What to ask for, in the order of the keys.
        wait: Seconds for all of them; None: for ever.
        taken: Takes the leases as they are entered.

    Attributes:
        asks: Whether there is anything to ask.
        began: When the call began, by the store's `monotonic`.
        refused: The key that a call with `wait=0` was refused; None: there is none.
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
        # Seconds from its grant for which a key stays taken behind a release. What is entered again
        # keeps what it was promised.
        self._holds = {
            each.key: each._terms(backend).hold
            for each in locks
            if (each.hold or each.min_hold) and context.holds(each.backend, each.key) is None
        }
        self._tokens = {each.key: new_token() for each in locks}
        self._answers: dict[str, Answered] = {}
        self._abandoned = False
        # What the store has granted, or may have.
        self._granted: list[Grant] = []
        self._unanswered = False
        # Held by the question in flight, so that whoever gives up waits for it and undoes it.
        self._mutex = threading.Lock()

    __exit__ = Leaving.by(_leave)
    __aexit__ = Leaving.by(_aleave)

    def __enter__(self) -> Opening:
        blocks.opened(self).attempts = self
        return self

    async def __aenter__(self) -> Opening:
        return self.__enter__()

    def ask(self) -> None:
        """Ask the store once. Its answer is for the leases."""
        try:
            if not self.backend.acquires_together:
                return
        except LockError:
            return  # It cannot be reached, as the first key will say.
        for each in self._locks:
            # What a rollback or an interruption has left must not be in the way.
            blocks.flush((each.backend, each.key))
            deferred_release.flush((each.backend, each.key))
        with self._mutex:
            if not self._abandoned:
                self._ask()

    def take(self, key: str) -> Answered | None:
        """Return the answer about a key, once."""
        return self._answers.pop(key, None)

    def leave_to_lease(self, key: str) -> None:
        """Give back a key no more: its lease does."""
        self._granted = [each for each in self._granted if each.key != key]

    def complete(self) -> None:
        """Keep the keys taken behind their leases as their locks say: all of them are granted."""
        for each in self._taken:
            if each.key in self._holds:
                each._holding.keep_window(self._holds[each.key])

    def forget(self) -> None:
        """Give no answer any more."""
        self._answers.clear()

    def fail(self, error: BaseException) -> None:
        """Release all keys but those that a transaction has kept from before."""
        with self._mutex:
            self._abandoned = True
            self.forget()
            self._give_back()
        for lease in reversed(self._taken):
            if not lease._holding.goes_on:
                # At once, and not behind the transaction: no work was done under it.
                lease._release.quietly()

    def _may_ask(self, locks: Sequence[Lock]) -> bool:
        """Whether nothing here has to be looked at key by key.

        That is where the caller, or its transaction, has one of the keys, others were first, or the
        locks differ in more than the key, as those with limits of their own.
        """
        if any(replace(each, key=locks[0].key) != locks[0] for each in locks):
            return False
        home, queues = deferred_release.home(), self.backend.queues
        transactions = deferred_release.managed_transactions(home)
        for each in locks:
            name, stored = (each.backend, each.key), queues.name_of(each.key)
            if context.holds(*name) or deferred_release.waiting_release(name, home) is not None:
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
        end = time.monotonic() + wait + budgets.PATIENCE
        now, shared = datetime.now(UTC), terms.permits != 1
        self._granted = [
            Grant(key, token, 1, terms.ttl, now, None, shared=shared)
            for key, token in self._tokens.items()
        ]
        # Until an answer has come: a signal's handler may raise before it is kept.
        self._unanswered, sent_at = True, store.monotonic()
        answered = partial(Answered, sent_at=sent_at)
        try:
            found = budgets.spend(
                end,
                store.records.acquire,
                *(self._tokens, terms.ttl, terms.holder),
                permits=terms.permits,
                bound=min(MAX_BOUND, wait),
            )
        except BackendUnavailable as error:
            # Each key may have been granted: who asks for it next asks by the same token.
            for key, token in self._tokens.items():
                self._answers[key] = answered(token, outcome=error)
            return
        except LockError:
            # Asked for by itself, the key that it is about says so.
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
