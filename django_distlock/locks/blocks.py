"""Blocks: what a `with` statement has acquired, released even if the block never ends properly.

The handler of a signal (a time limit, Ctrl-C) may raise between any two steps of the main thread,
also at the first line of `__exit__` and inside every `finally`. So a release cannot depend on code
that runs at the end of the block. Instead, each block has a sentinel: an object that only the
interpreter's stack refers to. However the block is left, the interpreter drops the sentinel. If the
block has not closed by then, a thread of this package releases what the block holds.

The blocks around the running code are kept here as well, in a context variable.

See docs/decisions/what-a-signal-can-interrupt.md.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from multiprocessing.util import Finalize, register_after_fork
from types import CodeType, FrameType
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar, cast

from ..backends.base import BaseLockBackend
from ..core.durations import MAX_BOUND
from ..core.errors import LockError, LockUsageError
from ..core.threads import in_child
from ..database.connections import has_gone, releases, when_gone
from ..process import deferred_release
from ..process.heartbeat import EXIT_PATIENCE, held_here

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Block:
    """A block of code, from before the first attempt to acquire its key until after the release.

    Attributes:
        owner: The object that is entered; None: not known yet.
        name: The backend and the key.
        lease: The lease that the code inside gets.
        release: Releases the lease.
        nested: Whether other blocks were open around it when it was entered.
        inner: Whether an outer block holds the lease and will release it.
        attempts: The attempts to acquire the key. They clean up after themselves when they fail.
        adopting: The deferred release of an earlier block whose lease this block takes over.
        home: The thread whose transactions it works in; 0: the key was acquired by a call.
    """

    name: tuple[str, str] | None = None
    lease: Any = None
    release: Any = None
    nested = inner = False
    attempts: Any = None
    adopting: deferred_release.Deferred | None = None
    home = 0

    def __init__(self, owner: object):
        self.owner = owner

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed, and its sentinel is alive."""
        sentinel = every.get(self)
        return sentinel is not None and sentinel() is not None

    def watch(self, sentinel: Any) -> None:
        """Stay open while `sentinel` lives; it replaces the sentinel before."""
        every[self] = when_gone(sentinel, self._end)

    def watched(self) -> object:
        """Return a new sentinel: the block stays open while it lives."""
        sentinel = functools.partial(bool)
        self.watch(sentinel)
        return sentinel

    def stay_open(self) -> None:
        """Stay open until `close()`: for callers that enter and leave without a `with`."""
        every[self] = object  # A call of it never returns None, so the block never counts as gone.

    def close(self) -> None:
        """Mark the block as ended: nothing is left to release."""
        every.pop(self, None)
        # They refer back to the block, and only the garbage collector would free such a circle.
        self.lease = self.release = None

    # In the worker's thread

    def _end(self) -> None:
        """Release what a block holds whose sentinel has died."""
        if self.name is None or not (self.release or self.attempts or self.adopting):
            self._release()  # It has asked for nothing, or for several keys.
        else:
            deferred_release.apart(self.name[0], self._release)

    def _release(self) -> None:
        # The caller may be the weak reference of an earlier sentinel, kept alive by somebody who
        # iterated over all blocks. Then the block has closed, or has another sentinel by now.
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
            # This may wait for an attempt in flight, and this thread must not: others need it.
            _giving_up[self] = [attempts]
            try:
                attempts.backend.threads.submit(self._give_up)
            except RuntimeError:
                # No thread can be started: the interpreter is exiting, or there are too many.
                self._give_up()
            return
        elif release is not None:
            release.end_left_block(self.home)
        self.close()

    def _give_up(self) -> None:
        try:
            attempts = _giving_up[self].pop()
        except (KeyError, IndexError):
            return  # Done already, by the thread that could not start another one.
        try:
            attempts.fail(LockError("The acquire was interrupted.", code="aborted"))
        finally:
            self.close()
            _giving_up.pop(self, None)


#: How many blocks can be searched one by one at little cost.
FEW = 32
#: All blocks that have not closed, with a callable that returns None once the sentinel has died.
every: dict[Block, Callable[[], object]] = {}
#: The attempts of blocks that were interrupted while they acquired their key.
_giving_up: dict[Block, list[Any]] = {}
_opening = threading.local()
#: The most frames between a `with` statement and the code that opens its block.
_DEPTH: Final = 8

#: A frame by its number and code, and a step in it.
_Place: TypeAlias = tuple[int, CodeType, int]


def _place() -> _Place:
    """Return where a method of the caller's is looked up."""
    frame = sys._getframe(2)
    return id(frame), frame.f_code, frame.f_lasti


def _was_called_from(place: _Place) -> bool:
    """Whether the caller was called from a frame, at a step or behind it.

    Who only keeps `__exit__`, as `ExitStack.push()` does, enters nothing there.
    """
    number, code, step = place
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        # The number of a frame may come again, and then its code is another one, or at its begin.
        if id(frame) == number and frame.f_code is code:
            return frame.f_lasti >= step
        frame = frame.f_back
    return False


class _Exit:
    def __init__(self, leave: Callable[..., Any]):
        self._leave = leave

    @classmethod
    def by(cls, leave: Callable[Concatenate[Any, S, P], R]) -> Callable[Concatenate[S, P], R]:
        """Wrap a method, typed as the method that it replaces."""
        return cast("Callable[Concatenate[S, P], R]", cls(leave))


class Leaving(_Exit):
    """A descriptor for `__exit__` and `__aexit__` that opens a new block at each lookup.

    The interpreter looks `__exit__` up before it calls `__enter__`, and keeps the result on its
    stack until the block is left. No traceback refers to it there, so it serves as the sentinel.
    """

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        block = Block(owner)
        _opening.block = block, _place()
        if owner is None:
            sentinel = functools.partial(self._leave_by_class, block)
        else:
            sentinel = functools.partial(self._leave, block, owner)
        block.watch(sentinel)
        return sentinel

    def _leave_by_class(self, block: Block, owner: object, *end: object) -> Any:
        # An `ExitStack` looks `__exit__` up on the class. Its frames keep the result alive, and its
        # errors keep the frames alive, so the block gets a sentinel that no frame refers to.
        return (block.watched(), self._leave(block, owner, *end))[1]


def opened(owner: object) -> Block:
    """Return the block that `owner` enters: the one of the `with` statement, or a new one."""
    pending: tuple[Block, _Place] | None = getattr(_opening, "block", None)
    _opening.block = None
    block = pending[0] if pending is not None and _was_called_from(pending[1]) else None
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
    """The block that one `with` statement has entered, of an object that may be entered again."""

    def __init__(self) -> None:
        self.block: Any = None

    def left(self) -> Any:
        """Return the block to leave, the first time; then None."""
        block, self.block = self.block, None
        return block


class Keeping(_Exit):
    """A descriptor like `Leaving`, for objects that enter a lock inside their own `__enter__`.

    Only the `with` statement refers to the result, and only the result refers to what was entered.
    So if a signal's handler raises out of the block, all of it is dropped.
    """

    def __get__(self, owner: object, kind: type | None = None) -> Callable[..., Any]:
        entered = Entered()
        _opening.entered = owner, weakref.ref(entered), _place()
        return functools.partial(self._leave, entered, *(() if owner is None else (owner,)))


def entered_by(owner: object) -> Entered | None:
    """Return the `Entered` of the `with` statement that enters `owner`; None: it was a call."""
    pending = getattr(_opening, "entered", None)
    _opening.entered = None
    if pending is None or not _was_called_from(pending[2]):
        return None
    entered: Entered | None = pending[1]()
    return entered if pending[0] is None or pending[0] is owner else None


# The blocks around the running code

#: The blocks around the running code, the innermost last. A tuple, because a task or thread with a
#: copy of the context must not see later changes of the original.
_bound: ContextVar[tuple[Block, ...]] = ContextVar("distlock_leases", default=())


def has_blocks() -> bool:
    """Whether the running code is inside a block of any lock."""
    return bool(_bound.get())


def holds(backend: str, key: str) -> Any:
    """Return the lease that an outer block holds on a key, or None."""
    for each in around():
        # `held` costs most, so it is asked last.
        if each.key == key and each.backend == backend and each.held:
            return each
    return None


def enter(owner: object, backend: str, key: str) -> Block:
    """Return the block that `owner` enters, and add it to the current context."""
    block = opened(owner)
    block.name, block.home = (backend, key), deferred_release.home()
    # Blocks that a signal's exception has broken out of are still listed, but not open.
    outer = _bound.get()
    block.nested = bool(outer)
    _bound.set((*(each for each in outer if each.is_open), block) if outer else (block,))
    return block


def unbind(owner: object, block: Block | None = None) -> tuple[Block | None, LockUsageError | None]:
    """Take the block that is left out of the current context, and return it.

    If another thread or task entered the block, an error is returned that says so. The block is
    returned with it if there is no doubt which one it is, because its lease can still be released.

    Args:
        owner: The object that is left.
        block: The block of the `with` statement; None, or never entered: the owner's last one.
    """
    held, found = _bound.get(), [block]
    if block is None or block.lease is None:
        if block is not None:
            block.close()
        found = [each for each in held if each.owner is owner and each.is_open]
        block = found[-1] if found else None
    if block in held:
        _bound.set(tuple([each for each in held if each is not block]))
        return block, None
    if block is None:
        entered = [each for each in list(every) if each.owner is owner]
        found = [each for each in entered if each.lease is not None]
    return found[0] if len(found) == 1 else None, LockUsageError(
        "This block was entered in another thread or task. Enter and leave it in the same one, or"
        " use acquire() and release().",
        code="foreign_context",
    )


def drop(block: Block) -> None:
    """Close a block that holds nothing (any more), and take it out of the current context."""
    held = _bound.get()
    if block in held:
        _bound.set(tuple([each for each in held if each is not block]))
    block.close()


def around() -> list[Any]:
    """Return the leases of these blocks, the innermost first."""
    # A copied context may list blocks that the original has left, or is leaving right now.
    return [
        lease for block in reversed(_bound.get())
        if (lease := block.lease) is not None and block.is_open
    ]  # fmt: skip


# Blocks that were interrupted


def flush(name: tuple[str, str]) -> None:
    """Wait until interrupted blocks on this key have released it: `MAX_BOUND` seconds at most."""
    until = time.monotonic() + MAX_BOUND
    while _is_left(name) and time.monotonic() < until:
        time.sleep(0.001)


async def aflush(backend: BaseLockBackend, name: tuple[str, str]) -> None:
    """See `flush`; the event loop does not block."""
    if _is_left(name):
        await backend.threads.run(flush, name)


def _is_left(name: tuple[str, str]) -> bool:
    # Many blocks are searched only if a sentinel has died: the search takes its time.
    if len(every) > FEW and not (has_gone() or _giving_up):
        return False
    left = [
        block
        for block, gone in list(every.items())
        if (block.name == name or name in getattr(block.attempts, "names", ())) and gone() is None
    ]
    return bool(left)


def finish() -> None:
    """Before the interpreter exits, wait until interrupted blocks have been cleaned up."""
    until = time.monotonic() + EXIT_PATIENCE
    # `every` is looked at, and not the worker's queue: a block that the worker has just taken from
    # there is only in `every`.
    while any(gone() is None for gone in list(every.values())) and time.monotonic() < until:
        time.sleep(0.001)
    # Attempts that had no answer leave their release to the worker.
    releases.finish()


def _finish_in_child(at_exit: Callable[[], None]) -> None:
    # Before the leases that are held are released, as in a process of its own.
    Finalize(None, at_exit, exitpriority=1)


def _forget_parent() -> None:
    # What the parent is ending right now is ended by nobody here.
    for block, gone in list(every.items()):
        if gone() is None:
            every.pop(block, None)
    _giving_up.clear()


atexit.register(finish)
# The children of `multiprocessing` call nothing that `atexit` knows from their parent.
register_after_fork(finish, _finish_in_child)
in_child(_forget_parent)
