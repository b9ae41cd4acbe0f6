"""What a block of code has taken from a store, and what ends that when the block is gone.

The handler of a signal (a time limit, Ctrl-C) may raise between any two steps of the main thread,
also at the first line of `__exit__`, and inside of every `finally`. So nothing here rests on Python
code that must run when a block is left. A block is open for as long as an object lives that the
interpreter itself keeps on its stack, and drops in whatever way the block is left: its sentinel. If
it dies before the block has closed, a thread of ours ends what the block has.

See docs/decisions/what-a-signal-can-interrupt.md.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from ..backends.base import BaseLockBackend
from ..core.durations import MAX_BOUND
from ..core.errors import LockError
from ..database import workers
from ..process import deferred_release
from ..process.at_exit import EXIT_PATIENCE, held_here

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Block:
    """A block of code, from before it asks for its key until it has given it back.

    Attributes:
        owner: Whose block it is; None: not known yet.
        name: The backend and the key.
        lease: What it holds, for the code inside.
        release: What ends that.
        inner: Whether a block around it holds the lease, and will release it.
        attempts: What asks for the key, and leaves nothing held where it fails.
        adopting: The release behind a transaction whose lease it goes on with.
        home: The thread whose transactions it works in; 0: it was asked for by a call.
    """

    name: tuple[str, str] | None = None
    lease: Any = None
    release: Any = None
    inner = False
    attempts: Any = None
    adopting: deferred_release.Deferred | None = None
    home = 0

    def __init__(self, owner: object):
        self.owner = owner

    @property
    def is_open(self) -> bool:
        """Whether it has neither closed nor gone."""
        sentinel = every.get(self)
        return sentinel is not None and sentinel() is not None

    def watch(self, sentinel: Any) -> None:
        """Be open for as long as an object lives, in the place of the one before."""
        every[self] = workers.when_gone(sentinel, self._end)

    def watched(self) -> object:
        """Be open for as long as the object lives that is returned."""
        sentinel = functools.partial(bool)
        self.watch(sentinel)
        return sentinel

    def stay_open(self) -> None:
        """Be open until it is closed, for who enters and leaves it by calls."""
        every[self] = object  # Called, it is never None.

    def close(self) -> None:
        """Say that nothing is left to end."""
        every.pop(self, None)
        # They refer to this one: the garbage collector would have to find out.
        self.lease = self.release = None

    # In the worker's thread

    def _end(self) -> None:
        """End what is left of a block that is gone."""
        # What has called may be the weak reference of before, which whoever looked at all blocks
        # kept alive: of a block that has closed, or is open for as long as another sentinel lives.
        if self not in every or self.is_open or self in _giving_up:
            return
        release, attempts, adopting = self.release, self.attempts, self.adopting
        if self.inner:
            pass
        elif release is not None and release.holding in held_here:
            if adopting is not None:
                adopting.owner.end_keeping()
                adopting.settle()
            release.end_left_block(self.home)
        elif adopting is not None:
            adopting.give_back()
        elif attempts is not None:
            # It may have to wait for an attempt in flight, and others here must not.
            _giving_up[self] = [attempts]
            try:
                attempts.backend.threads.submit(self._give_up)
            except RuntimeError:
                # No thread starts: the interpreter ends, or there are too many.
                self._give_up()
            return
        elif release is not None:
            release.end_left_block(self.home)
        self.close()

    def _give_up(self) -> None:
        try:
            attempts = _giving_up[self].pop()
        except (KeyError, IndexError):
            return  # It was done in place of a thread that did not start.
        try:
            attempts.fail(LockError("The acquire was interrupted.", code="aborted"))
        finally:
            self.close()
            _giving_up.pop(self, None)


#: Blocks that are quickly looked through.
FEW = 32
#: What is open, or gone and not ended yet.
every: dict[Block, Callable[[], object]] = {}
#: What asks for keys that nobody waits for any more.
_giving_up: dict[Block, list[Any]] = {}
_opening = threading.local()


class _Exit:
    def __init__(self, leave: Callable[..., Any]):
        self._leave = leave

    @classmethod
    def by(cls, leave: Callable[Concatenate[Any, S, P], R]) -> Callable[Concatenate[S, P], R]:
        """Return one that is a method for who checks types."""
        return cast("Callable[Concatenate[S, P], R]", cls(leave))


class Leaving(_Exit):
    """Is `__exit__` or `__aexit__`: the statement `with` gets one of its own each time.

    The interpreter asks for it before it calls `__enter__`, and keeps what it gets on its stack for
    as long as the block is open, where no traceback refers to it.
    """

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        block = _opening.block = Block(owner)
        if owner is None:
            sentinel = functools.partial(self._leave_by_class, block)
        else:
            sentinel = functools.partial(self._leave, block, owner)
        block.watch(sentinel)
        return sentinel

    def _leave_by_class(self, block: Block, owner: object, *end: object) -> Any:
        # Frames of an `ExitStack` refer to what it calls, and its errors to its frames.
        return (block.watched(), self._leave(block, owner, *end))[1]


def opened(owner: object) -> Block:
    """Return the block that `owner` enters: that of the statement `with`, or a new one."""
    block: Block | None = getattr(_opening, "block", None)
    _opening.block = None
    if (
        block is None
        or block.name is not None
        or not (block.owner is None or block.owner is owner)
        or not block.is_open
    ):
        block = Block(owner)
        block.stay_open()
    block.owner = owner
    return block


class Entered:
    """What a block has entered, of an object that may be kept and used again."""

    def __init__(self) -> None:
        self.block: Any = None

    def left(self) -> Any:
        """Return the block to leave, once."""
        block, self.block = self.block, None
        return block


class Keeping(_Exit):
    """Is `__exit__` or `__aexit__` of what enters locks: see `Leaving`.

    The statement `with` alone has what it returns, and with it all that the block holds: where a
    signal's exception breaks out of that, nothing else keeps it.
    """

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        entered = Entered()
        _opening.entered = owner, weakref.ref(entered)
        return functools.partial(self._leave, entered, *(() if owner is None else (owner,)))


def entered_by(owner: object) -> Entered | None:
    """Return what the statement `with` keeps that enters `owner`; None: it is entered by a call."""
    whose, reference = getattr(_opening, "entered", (None, lambda: None))
    _opening.entered = None, lambda: None
    entered: Entered | None = reference()
    return entered if whose is None or whose is owner else None


def flush(name: tuple[str, str]) -> None:
    """Wait until blocks on this key have ended that were left without their end.

    A store that hangs holds it up for a second at most.
    """
    until = time.monotonic() + MAX_BOUND
    while _is_left(name) and time.monotonic() < until:
        time.sleep(0.001)


async def aflush(backend: BaseLockBackend, name: tuple[str, str]) -> None:
    """See `flush`. The event loop's thread does not wait."""
    if _is_left(name):
        await backend.threads.run(flush, name)


def _is_left(name: tuple[str, str]) -> bool:
    # Where there are many, they are looked through only if one has gone.
    if len(every) > FEW and not (workers.has_gone() or _giving_up):
        return False
    left = [block for block, gone in list(every.items()) if block.name == name and gone() is None]
    return bool(left)


def _finish() -> None:
    """Let acquires that were interrupted a moment ago be given up: the interpreter ends."""
    until = time.monotonic() + EXIT_PATIENCE
    # What the worker has just taken from its queue is neither there nor begun, but still here.
    while any(gone() is None for gone in list(every.values())) and time.monotonic() < until:
        time.sleep(0.001)
    # Given up, they leave the release of what had no answer to the worker.
    workers.releases.finish()


atexit.register(_finish)
