"""What runs with a mutex locked can be interrupted, and the mutex is free again all the same."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import django_distlock

PACKAGE = Path(django_distlock.__file__).parent
#: Interpreters have no handler for its jump back where an element does not pass.
FILTERED = """
def look(self):
    with self._mutex:
        return [each for each in self.all if each]
"""
#: The same in a frame of its own: what is raised there comes out of a call, which has one.
CALLED = FILTERED.replace("[each for each in self.all if each]", "list(filter(None, self.all))")


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a module, and of all that is defined in it.

    Comprehensions, generators and lambdas that have frames of their own are left out: what is
    raised in them comes out of a call.
    """
    if code.co_name == "<module>" or not code.co_name.startswith("<"):
        yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes_of(each)


def jumps_without_handler(source: str) -> set[int]:
    """Return the lines with a mutex locked from which a jump back would leave it locked.

    Since Python 3.12 the compiler gives no handler to the jump that goes back where a condition is
    not met (of a filtered comprehension, of a `while`, of an `if` that ends a loop's body), and the
    interpreter looks for signals there.
    """
    locked = [
        range(each.body[0].lineno, (each.end_lineno or 0) + 1)
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.With)
        and any("mutex" in ast.unparse(item.context_expr) for item in each.items)
    ]
    found = set()
    for code in codes_of(compile(source, "", "exec")):
        read: Any = dis.Bytecode(code)
        for each in read:
            line = each.positions and each.positions.lineno
            if (
                each.opname == "JUMP_BACKWARD"
                and any(line in lines for lines in locked)
                and not any(one.start <= each.offset < one.end for one in read.exception_entries)
            ):
                found.add(line or 0)
    return found


def test_signal_with_a_mutex_locked_unlocks_it() -> None:
    """No loop that a signal's exception could leave past the end of the `with`."""
    sources = {str(path): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {path: jumps_without_handler(s) for path, s in sources.items() if "mutex" in s}
    assert len(found) > 20
    assert not {path: lines for path, lines in found.items() if lines}


def test_loops_that_would_leave_a_mutex_locked_are_found() -> None:
    """A later Python may give them a handler; then these helpers are of no use any more."""
    # Until 3.11, comprehensions have frames of their own.
    assert jumps_without_handler(FILTERED) == ({4} if sys.version_info >= (3, 12) else set())
    assert not jumps_without_handler(CALLED)
