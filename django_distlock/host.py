"""What this process knows about itself: its clock and its identity."""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.core.signals import setting_changed

from .conf import holder_config
from .core.holders import MAX_TEXT, Holder


def monotonic() -> float:
    """Return seconds that never go back and that count while the machine is suspended.

    Where a system has no such clock it is `time.monotonic`, and a lease may end in the store while
    the machine sleeps and its holder's clock stands.
    """
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def current_holder(metadata: Mapping[str, Any] | None = None) -> Holder:
    """Return the identity under which this thread takes a lock."""
    holder = _this_thread(threading.current_thread().name)
    return replace(holder, metadata=dict(metadata)) if metadata else holder


@functools.lru_cache(maxsize=256)
def _this_thread(name: str) -> Holder:
    config = holder_config()
    return Holder(
        host=_plain(config.prefix + socket.gethostname()),
        boot_id=_boot_id(),
        process=_plain(config.process or _process_name()),
        pid=os.getpid(),
        started_at=_started_at(os.getpid()),
        thread=_plain(name),
    )


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "DISTLOCK_HOLDER":
        _this_thread.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_distlock.host")
if hasattr(os, "register_at_fork"):
    # A forked child is another process, also where it got the number of one that was here before.
    os.register_at_fork(after_in_child=_this_thread.cache_clear)


def _plain(text: str) -> str:
    """Return what every store can keep of a name that the system or the program gave."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")[:MAX_TEXT]


def _process_name() -> str:
    """Return the program's name, and behind it the worker's, which a restarted one keeps."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    if program in ("manage.py", "django-admin") and len(sys.argv) > 1:
        program = f"{program} {sys.argv[1]}"
    worker = multiprocessing.current_process().name
    return program if worker == "MainProcess" else f"{program}:{worker}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # Not Linux.


def _started_at(pid: int) -> float | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        # The name in parentheses may contain anything; behind it, this is the 20th field.
        ticks = int(stat.rpartition(")")[2].split()[19])
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None  # Not Linux.
