"""The identity of this process as a holder, and whether other holders' processes are gone."""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from django.core.signals import setting_changed

from ..conf import holder_config
from ..core.records import MAX_TEXT, Holder
from ..core.threads import in_child


def current_holder(metadata: Mapping[str, Any] | None = None) -> Holder:
    """Return the identity under which this thread acquires locks."""
    # The pid is asked for each time, because some programs fork without telling Python: uWSGI.
    holder = _this_thread(os.getpid(), threading.current_thread().name)
    return replace(holder, metadata=dict(metadata)) if metadata else holder


def is_gone(holder: Holder) -> bool:
    """Whether the process that took a lock is provably gone, so that its lock may be taken over.

    Two kinds of proof are accepted; without one the answer is False, and the ttl decides.

    - It ran where this process runs: same host, same start of the kernel, same PID namespace. Then
      the kernel is asked. It is gone if there is no process of its number, if the one there is
      started at another time, or if it is a zombie without a living thread. A process that is
      stopped, hidden (`hidepid`) or another user's is alive.
    - It had the name of this process: `DISTLOCK_HOLDER["process"]` is set here, and host and name
      are the same. Whoever sets a name promises that one process at a time has it, so this one is
      its successor. Where the kernel can be asked it has the last word: of workers that share a
      name none steals from another one that lives.

    Another host, or another start of this one, proves nothing by itself: two machines may have one
    name. Nor does a number in another PID namespace: there it counts other processes.

    Returns:
        True: nothing of that process runs any more. Work that it gave to others may: a subprocess,
        a statement in a database. False: it is alive, or nobody here can tell.
    """
    ours = current_holder()
    if holder.host != ours.host or not _is_pid(holder.pid):
        return False
    if holder.boot_id and holder.boot_id == ours.boot_id:
        return _has_ended(holder.pid, holder.started_at)
    if not (holder_config().process and holder.process == ours.process and _names_a_host(ours)):
        return False
    is_elsewhere = holder.boot_id != "" and ours.boot_id != ""
    return is_elsewhere or _exists(holder.pid) is False


@functools.lru_cache(maxsize=256)
def _this_thread(pid: int, name: str) -> Holder:
    config = holder_config()
    seen = _look_at("self")
    return Holder(
        host=_plain(config.prefix + socket.gethostname()),
        boot_id=_boot_id(),
        process=_plain(config.process or _process_name()),
        pid=pid,
        started_at=seen.started_at if seen else None,
        thread=_plain(name),
    )


def _forget(*, setting: str, **_: Any) -> None:
    if setting == "DISTLOCK_HOLDER":
        _this_thread.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_distlock.process.host")
# A forked child is another process, even if it has the pid of an earlier one.
in_child(_this_thread.cache_clear)


def _plain(text: str) -> str:
    """Return a name of the system or the program as every store can keep it."""
    return text.encode("utf-8", "replace").decode().replace("\0", "")[:MAX_TEXT]


def _process_name() -> str:
    """Return the program's name, and that of a worker, which it keeps after a restart."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    if program in ("manage.py", "django-admin") and len(sys.argv) > 1:
        program = f"{program} {sys.argv[1]}"
    worker = multiprocessing.current_process().name
    return program if worker == "MainProcess" else f"{program}:{worker}"


def _boot_id() -> str:
    """Return an id of this boot of the kernel and this PID namespace.

    Containers may share a host and a kernel, but have PID namespaces of their own.
    """
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""  # Not Linux.


def _names_a_host(holder: Holder) -> bool:
    # Many machines have these names by default.
    return holder.host not in ("", "localhost", "localhost.localdomain")


def _is_pid(value: object) -> bool:
    """Whether a value is a pid. 0 and negative numbers would mean process groups."""
    return isinstance(value, int) and 0 < value < 2**31


def _exists(pid: int) -> bool | None:
    """Whether a process with this pid exists, of whatever user; None: unknown."""
    if sys.platform == "win32":
        return None  # On Windows, signal 0 is Ctrl-C.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # Another user's.
    return True


def _has_ended(pid: int, started_at: float | None) -> bool:
    """Whether a process of this PID namespace is dead; False if that is unknown."""
    if _exists(pid) is False:
        return True
    seen = _look_at(pid) if _proc_is_ours() else None
    if seen is None:
        return False
    if _differ(seen.started_at, started_at):
        return True  # The pid was reused.
    # If the first thread ends before the others, the process looks like a zombie.
    return seen.state in b"ZXx" and seen.threads <= 1


def _differ(one: float | None, other: float | None) -> bool:
    """Whether both times are known and differ by more than rounding. A tick has 10 ms."""
    return one is not None and other is not None and abs(one - other) > 0.001


class _Seen(NamedTuple):
    """What /proc says about a process."""

    state: bytes
    threads: int
    started_at: float | None


def _look_at(pid: int | str) -> _Seen | None:
    """Return what /proc says about a process; None: nothing, or there is no /proc."""
    try:
        # The name in parentheses may contain anything, so fields are counted after it.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        started_at = int(fields[19]) / os.sysconf("SC_CLK_TCK") if _shares_clocks() else None
        return _Seen(fields[0], int(fields[17]), started_at)
    except (OSError, ValueError, IndexError):
        return None


def _shares_clocks() -> bool:
    """Whether times since the boot are the same as elsewhere on this machine."""
    try:
        return Path("/proc/self/ns/time").stat().st_ino == _FIRST_TIME_NAMESPACE
    except OSError:
        return True  # A kernel without time namespaces.


#: The kernel's inode number of the first time namespace (`TIME_NS_INIT_INO`).
_FIRST_TIME_NAMESPACE = 0xEFFFFFFA


def _proc_is_ours() -> bool:
    """Whether a pid means the same process in /proc and for `os.kill`.

    In a container with the host's /proc, that shows the PID namespace of the host.
    """
    try:
        status = Path("/proc/self/status").read_bytes()
    except OSError:
        return False
    # The pids of this process in the namespace of /proc, and in each one below down to its own.
    numbers = status.partition(b"\nNSpid:")[2].partition(b"\n")[0]
    return len(numbers.split()) == 1
