"""The end of a process that was forked, without the last that Python does there.

That is to free each object, for which it copies most of the memory of the fork server: 0.1 s of
processor. All before takes place: threads are waited for, and `atexit` calls what it knows.
"""

from __future__ import annotations

import atexit
import os
import sys

#: A variable of a process that shall end as any other.
WHOLE = "DISTLOCK_TEST_WHOLE_END"

#: The status of a process whose function has ended; None: it has not, or by an error.
status: int | None = None


def _leave() -> None:
    if status is not None and WHOLE not in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# Imported before all that registers something: `atexit` calls it last.
atexit.register(_leave)
