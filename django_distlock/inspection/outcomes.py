"""What became of an operation."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..core.documents import Document
from ..core.holders import Session
from .held import HeldKey
from .permissions import Operation


class Result(enum.StrEnum):
    """What became of it, in a word.

    `NOTHING`: there was nothing to do it to: nobody held the key, or not by the fence that was
    expected, it was not paused, no record was over. `BUSY`: somebody's transaction is in the way,
    and nothing was changed.
    """

    DONE = "done"
    NOTHING = "nothing"
    BUSY = "busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Document):
    """What became of an operation on a key, or of a cleanup.

    Attributes:
        operation: Which one.
        backend: The alias of the backend.
        key: The key, normalised; "" for a cleanup.
        result: What became of it.
        held: The lock: as it was when it was taken away, else as it is now, which may be another
            holder's than was expected; None: nobody held it, or it was not looked at.
        fence_before: The key's fence before; None: not known, or the key was never granted.
        fence_after: The same behind it. A force-release makes it higher, nothing else changes it,
            but for a grant that came right behind.
        sessions: Busy: those whose transactions are in the way; (): they have ended meanwhile, or
            something else was in the way; None: the store cannot tell.
        removed: How many records a cleanup has removed.
    """

    operation: Operation
    backend: str
    key: str
    result: Result
    held: HeldKey | None = None
    fence_before: int | None = None
    fence_after: int | None = None
    sessions: tuple[Session, ...] | None = ()
    removed: int = 0

    @property
    def is_done(self) -> bool:
        """Whether something was changed."""
        return self.result is Result.DONE

    @property
    def is_busy(self) -> bool:
        """Whether somebody's transaction was in the way."""
        return self.result is Result.BUSY
