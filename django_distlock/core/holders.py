"""Who holds a lock, and who works in its store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from .errors import InvalidArgument, shown

MAX_METADATA_BYTES = 4096
MAX_METADATA_DEPTH = 20

#: Metadata of a holder whom others do not wait out, but stand by for: a leader.
LEADER: Mapping[str, Any] = {"role": "leader"}

#: Characters that a column takes.
MAX_TEXT = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The identity of a holder, as it is stored beside its lock.

    Attributes:
        host: The host's name, after `DISTLOCK_HOLDER["prefix"]`.
        boot_id: What tells the start of the host's kernel, and the PID namespace in it, from
            others: "<boot id>/<inode>"; "" if unknown. Where two are equal, so are the processes
            that a `pid` can mean.
        process: A name that a restarted worker keeps.
        started_at: When the process started, in seconds since the host's boot; None if unknown.
        task_id: The id of the task or job that runs, if one does.
        metadata: What the application adds: a user, a reason. JSON, at most 4096 bytes.
    """

    host: str = ""
    boot_id: str = ""
    process: str = ""
    pid: int = 0
    started_at: float | None = None
    thread: str = ""
    task_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("host", "boot_id", "process", "thread", "task_id"):
            value = getattr(self, name)
            if value is None and name == "task_id":
                continue
            if not is_plain_text(value) or len(value) > MAX_TEXT:
                raise InvalidArgument(
                    f"A holder's {name} must be a str of at most {MAX_TEXT} characters without NUL"
                    f" and surrogates, not {shown(value)}."
                )

    def is_one(self, host: str | None, task_id: str | None) -> bool:
        """Whether it has this host and this task; None: any."""
        return host in (None, self.host) and task_id in (None, self.task_id)

    @property
    def is_queued(self) -> bool:
        """Whether a task holds the key, or waits for it, from its queue: no process has to live."""
        return self.pid == 0 and self.host != "" and self.task_id is not None

    def as_queued(self) -> Holder:
        """Return a task in its queue: see `is_queued`."""
        return replace(self, pid=0, started_at=None, thread="")

    @property
    def where(self) -> str:
        """Where it runs, as tables show it; "": the store does not tell."""
        process = f"{self.process}[{self.pid}]" if self.pid else self.process
        return " ".join(each for each in (self.host, process) if each)

    @property
    def who(self) -> str:
        """Who it is, as sentences name it."""
        return f"{self.process or 'a process'} (pid {self.pid}) on {self.host or 'some host'}"

    def is_caller(self, other: Holder) -> bool:
        """Whether both are known to be the same thread of a process, or the same task."""
        if self.task_id is not None or not (self.host and self.pid):
            return self.task_id is not None and self.task_id == other.task_id
        ours = (self.host, self.boot_id, self.pid, self.started_at, self.thread)
        return ours == (other.host, other.boot_id, other.pid, other.started_at, other.thread)

    @property
    def leads(self) -> bool:
        """Whether it leads, and those stand by who do not get the key."""
        return bool(self.metadata.get("role") == LEADER["role"])

    def as_json(self) -> dict[str, Any]:
        """Return a dictionary that `from_json` reads."""
        return {name: getattr(self, name) for name in _NAMES} | {"metadata": dict(self.metadata)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Holder:
        """Return the holder that `data` describes.

        Names it does not know are left out: a newer version may have written them.

        Raises:
            InvalidArgument: Something in it is not what `as_json` would have written.
        """
        found = cls(**{name: value for name, value in data.items() if name in _NAMES})
        if not isinstance(found.metadata, Mapping) or not isinstance(found.pid, int):
            raise InvalidArgument(f"A holder must have a pid and metadata, not {shown(data)}.")
        since = found.started_at
        if not (since is None or (isinstance(since, int | float) and abs(since) < 2**63)):
            raise InvalidArgument(f"A holder's started_at must be a number, not {shown(since)}.")
        return found


_NAMES = {each.name: None for each in fields(Holder)}


def is_plain_text(value: object) -> bool:
    """Whether every store can keep `value`: text without NUL and lone surrogates."""
    if not isinstance(value, str) or "\0" in value:
        return False
    return value.isascii() or not any(0xD800 <= ord(char) <= 0xDFFF for char in value)


def validate_metadata(metadata: object) -> dict[str, Any]:
    """Return a copy of `metadata`, which must survive JSON unchanged.

    Raises:
        InvalidArgument: Not a mapping, not JSON, with text that PostgreSQL's `jsonb` refuses (NUL,
            lone surrogates), or more than 4096 bytes.
    """
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(f"metadata must be a mapping, not {shown(metadata)}.")
    copy: dict[str, Any] = _json(metadata, MAX_METADATA_DEPTH)
    size = len(json.dumps(copy, ensure_ascii=False).encode())
    if size > MAX_METADATA_BYTES:
        raise InvalidArgument(
            f"metadata can have at most {MAX_METADATA_BYTES} bytes of JSON, not {size}."
        )
    return copy


def _json(value: object, depth: int) -> Any:
    if depth == 0:
        raise InvalidArgument(f"metadata is nested more than {MAX_METADATA_DEPTH} deep.")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if isinstance(value, str):
        return _json_text(value)
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    if isinstance(value, (list, tuple)):
        return [_json(each, depth - 1) for each in value]
    if isinstance(value, Mapping):
        return {_json_text(name): _json(each, depth - 1) for name, each in value.items()}
    raise InvalidArgument(
        f"metadata must be JSON: text, finite numbers, lists and mappings; not {shown(value)}."
    )


def _json_text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"A name in metadata must be a str, not {shown(value)}.")
    if not is_plain_text(value):
        raise InvalidArgument(
            f"Text in metadata must not contain NUL or surrogates: {shown(value)}."
        )
    return str.__str__(value)


@dataclass(frozen=True, slots=True)
class Session:
    """A session of a store with a transaction that keeps a key from being granted anew.

    Attributes:
        pid: The server's number for it; for locks in memory, this process's.
        application: What it calls itself; "": nothing, or the server does not tell.
        client: The address it came from; "": a socket of the server's machine.
        since: When its transaction began, by the store's clock; None: not known.
    """

    pid: int
    application: str = ""
    user: str = ""
    client: str = ""
    since: datetime | None = None
