"""How the Redis backend wakes those who wait for a key, and shows them to people."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from ...core.holders import Holder
from ...core.records import SPOILED, Waiting, Waits
from ...database.fields import from_microseconds
from ..base import BaseLockBackend
from ..listening import Listener
from ..lua import script
from .lines import Call, answered
from .store import RedisStore

#: How many waiters of a key are shown.
MANY = 1000


class RedisWaiters(BaseLockBackend):
    """What the Redis backend knows of waiters: those of this process are woken, all are shown."""

    supports_wakeups: ClassVar[bool] = True

    store: RedisStore
    _prefix: str
    _listing: str
    _listener: Listener

    @property
    def is_listening(self) -> bool:
        """Whether this process is woken right now when a key becomes free."""
        return self._listener.is_live

    def listen(self, bound: float = 0.0) -> bool:
        """See `BaseLockBackend.listen`."""
        return self._listener.ensure(bound)

    def _begin_in_child(self) -> None:
        super()._begin_in_child()
        self._listener.forget()
        self.store.begin_in_child()

    def _note_waiter(
        self, name: str, holder: Holder, seconds: float, note: str | None
    ) -> str | None:
        # Two waiters of one holder are two.
        who = f"{int(self.is_listening)} {secrets.token_hex(8)} {json.dumps(holder.as_json())}"
        arguments = (note or "", repr(seconds), who)
        question = Call(script("note_waiter"), [self._waiting(name)], arguments, [self._listing])
        return self.store.ask(question)

    def _drop_waiter(self, name: str, note: str) -> None:
        self.store.ask(Call(script("drop_waiter"), [self._waiting(name)], (note,), [self._listing]))

    def _waiters(self, name: str) -> Sequence[Waiting]:
        return _read(self.store.ask(self._question(name)))

    def _count_waiters(self, names: Sequence[str]) -> Sequence[Waits]:
        answers = self.store.ask_all([self._question(name) for name in names])
        return [Waits.of(_read(answered(answer))) for answer in answers]

    def _question(self, name: str) -> Call:
        return Call(script("waiters"), [self._waiting(name)], (str(MANY),))

    def _waiting(self, name: str) -> str:
        return f"{self._prefix}waiters:{name}"


def _read(answer: str) -> list[Waiting]:
    """Return who waits, the first to come first."""
    found = json.loads(answer)
    shown = []
    # Each note has its end behind it.
    for note, until in zip(found[::2], found[1::2], strict=True):
        # For people to see: what somebody has spoiled hides nobody else.
        with suppress(*SPOILED):
            shown.append(_shown(note, until))
    return sorted(shown, key=lambda each: each.since)


def _shown(note: str, until: str) -> Waiting:
    since, is_woken, _number, holder = note.split(" ", 3)
    return Waiting(
        holder=Holder.from_json(json.loads(holder)),
        since=from_microseconds(int(since)),
        until=from_microseconds(int(float(until))),
        is_woken=is_woken == "1",
    )
