"""Another process, which makes calls for this one: what is to be measured takes two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import django

from .clients import GOODBYE_SECONDS, PATIENCE_SECONDS


class Partner:
    """A process of its own. It ends with the block of `hired`, or with this process."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, function: Callable[..., object], *arguments: Any) -> None:
        """Let it call a function, one at a time. Function and arguments are pickled."""
        self._pipe.send((function, arguments))

    def result(self) -> Any:
        """Wait for what `begin` has begun, and return what came of it."""
        try:
            if not self._pipe.poll(PATIENCE_SECONDS):
                raise RuntimeError(f"the other process says nothing for {PATIENCE_SECONDS:.0f} s")
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the other process has ended") from None
        if isinstance(answer, Exception):
            raise RuntimeError(f"the other process: {answer}") from answer
        return answer

    def close(self) -> None:
        """Send it home."""
        self._pipe.close()
        self._process.join(GOODBYE_SECONDS)
        self._process.kill()
        self._process.join()
        self._process.close()


@contextmanager
def hired() -> Iterator[Partner]:
    """Start a partner for the block."""
    partner = Partner()
    try:
        partner.result()
        yield partner
    finally:
        partner.close()


def serve(pipe: Connection) -> None:
    """Be a partner: make calls until the other end of the pipe closes."""
    try:
        django.setup()
        pipe.send(None)
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send(function(*arguments))
            except Exception as error:  # noqa: BLE001 - whoever waits is told
                pipe.send(RuntimeError(repr(error)))
    except (EOFError, KeyboardInterrupt, ConnectionError):
        pass
