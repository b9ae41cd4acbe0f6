"""The clock of this process: it counts how long leases last, and no store's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)

#: Returns seconds that never go back and that count while the machine is suspended. Where a system
#: has no such clock it is `time.monotonic`, and a lease may end in the store while the machine
#: sleeps and its holder's clock stands.
#: Both are wrapped: a library that freezes time in tests replaces functions of `time` anywhere.
monotonic: Callable[[], float] = (
    partial(time.monotonic) if _BOOT_CLOCK is None else partial(time.clock_gettime, _BOOT_CLOCK)
)
