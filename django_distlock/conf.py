"""The one reader of `DISTLOCK` and of the settings whose names start with `DISTLOCK_`.

Settings are read when first needed, checked, and copied: nothing here keeps or changes the
project's dictionaries. A setting that breaks a rule raises `InvalidLockBackend`, with the rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from typing import Any, Final, Literal
from urllib.parse import quote

from django.conf import settings
from django.core.signals import setting_changed

from .core.durations import LONGEST, MIN_TTL, number, seconds
from .core.errors import InvalidArgument, shown
from .core.records import FENCE_MAX, validate_fence
from .core.retry import Retry
from .core.secrets import Secret
from .core.wording import suggestion
from .exceptions import InvalidLockBackend

#: All settings of this package.
SETTINGS: Final = (
    "DISTLOCK", "DISTLOCK_TABLES", "DISTLOCK_HOLDER", "DISTLOCK_FENCE_SECRET",
    "DISTLOCK_FENCE_AUDIENCE", "DISTLOCK_FENCE_JUMP", "DISTLOCK_MONITOR_TOKEN",
    "DISTLOCK_HISTORY", "DISTLOCK_TASK_URL",
)  # fmt: skip

DEFAULT_BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "default": {"BACKEND": "django_distlock.backends.database.DatabaseBackend"}
}

DEFAULT_TABLES: Mapping[str, str] = {
    "locks": "django_distlock_heldlock",
    "fences": "django_distlock_fencecounter",
    "events": "django_distlock_lockevent",
    "waiters": "django_distlock_waiter",
    "seen": "django_distlock_seenfence",
    "notes": "django_distlock_runnote",
    "failed": "django_distlock_failedtask",
    "responses": "django_distlock_storedresponse",
}

#: PostgreSQL's names have at most 63 bytes, and those of constraints add up to 15.
_MAX_TABLE_NAME = 48
#: The names of functions begin with that of the table of locks, and add up to 20.
_MAX_LOCKS_NAME = 43
#: Tables without models, whose names begin with that of the locks as well: the secret, and the last
#: grant of each session with a session lock.
SIDE_TABLES: Final = ("salt", "session")
#: The columns of the tables. No table has such a name, because statements of Django's get our
#: schema before each name of a table.
COLUMNS: Final = frozenset({
    "acquired_at", "actor", "at", "backend", "body", "channel", "closed_until", "details",
    "expires_at", "failed_at", "fence", "free_at", "headers", "holder", "holder_host", "id",
    "key", "kind", "made_at", "message", "name", "paused_by", "paused_until", "raised_at",
    "reason", "renewed_at", "renewed_until", "request", "route", "sent_as", "sent_at", "since",
    "status", "stop_requested_at", "storage_key", "task", "task_id", "token", "ttl", "until",
    "wanted",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """The settings of one alias in `DISTLOCK`.

    Attributes:
        backend: The import path of the backend's class.
        ttl: Seconds that a lease lasts, unless its lock has a ttl.
        wait: Seconds to keep trying, unless a lock has a wait; None: for ever.
        max_ttl: The longest legal ttl, in seconds.
        heartbeat: The part of the ttl between two renewals.
        lock_connections: The package's own connections that a process opens at most.
        retry: Pauses between attempts, unless a lock has its own.
        fence_floor: "clock": no fence is below the store's clock; None: fences just count.
        options: Keyword arguments of the backend's class.
    """

    alias: str = "default"
    backend: str = ""
    key_prefix: str = "distlock"
    ttl: float = 30.0
    wait: float | None = 5.0
    max_ttl: float = 604_800.0
    heartbeat: float = 1 / 3
    lock_connections: int = 4
    retry: Retry = field(default_factory=Retry)
    fence_floor: Literal["clock"] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def aliases() -> list[str]:
    """Return the names of the configured backends, without reading their settings."""
    return list(_configured())


def backend_config(alias: str) -> BackendConfig:
    """Return the settings of `alias` in `DISTLOCK`, checked."""
    configured = _configured()
    if alias not in configured:
        names = ", ".join(map(repr, configured)) or "none"
        raise InvalidLockBackend(
            f"The lock backend {alias!r} is not configured. Configured aliases: {names}."
        )
    where, raw = f"DISTLOCK[{alias!r}]", configured[alias]
    if not isinstance(raw, Mapping):
        raise InvalidLockBackend(f"{where} must be a dictionary, not {shown(raw)}.")
    _refuse_unknown(where, raw, _READERS)
    if "BACKEND" not in raw:
        raise InvalidLockBackend(f"{where}: BACKEND is missing, the import path of a backend.")
    if not isinstance(raw["BACKEND"], str):
        raise InvalidLockBackend(
            f"{where}: BACKEND must be the import path of a backend, not {shown(raw['BACKEND'])}."
        )
    read: dict[str, Any] = {"alias": alias}
    for name, value in raw.items():
        try:
            read[name.lower()] = _READERS[name](value)
        except InvalidArgument as error:
            said = str(error)
            about = "" if said.startswith(name) else f"{name}: "
            raise InvalidLockBackend(f"{where}: {about}{said}") from None
    config = BackendConfig(**read)
    if config.ttl > config.max_ttl:
        raise InvalidLockBackend(
            f"{where}: TTL ({config.ttl:g} s) is above MAX_TTL ({config.max_ttl:g} s)."
        )
    return config


def table(name: str) -> str:
    """Return one of the tables of `DISTLOCK_TABLES`, such as `"locks"`."""
    return _tables()[name]


@cache
def _tables() -> Mapping[str, str]:
    """Return all tables; cached, because each call to a server needs one, and settings are slow."""
    raw = getattr(settings, "DISTLOCK_TABLES", DEFAULT_TABLES)
    if not isinstance(raw, Mapping):
        raise InvalidLockBackend(f"DISTLOCK_TABLES must be a dictionary, not {shown(raw)}.")
    _refuse_unknown("DISTLOCK_TABLES", raw, DEFAULT_TABLES)
    tables: dict[str, str] = {**DEFAULT_TABLES, **raw}
    for what, value in tables.items():
        if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            raise InvalidLockBackend(
                f"DISTLOCK_TABLES[{what!r}] must be an identifier, not {shown(value)}."
            )
        longest = _MAX_LOCKS_NAME if what == "locks" else _MAX_TABLE_NAME
        if len(value) > longest:
            raise InvalidLockBackend(
                f"DISTLOCK_TABLES[{what!r}] has {len(value)} characters, more than"
                f" {longest}: {shown(value)}."
            )
        if value.lower() in COLUMNS:
            raise InvalidLockBackend(
                f"DISTLOCK_TABLES[{what!r}] must not be the name of a column: {shown(value)}."
            )
    # Some databases fold the case of names.
    names = [*tables.values(), *(f"{tables['locks']}_{each}" for each in SIDE_TABLES)]
    if len({value.lower() for value in names}) < len(names):
        raise InvalidLockBackend(
            f"DISTLOCK_TABLES must name different tables, so that no cleanup of locks can reach"
            f" the fence counters: {tables!r}."
        )
    return tables


def _forget_tables(*, setting: str, **_signal: object) -> None:
    if setting == "DISTLOCK_TABLES":
        _tables.cache_clear()


setting_changed.connect(_forget_tables, dispatch_uid="django_distlock.conf")


def index_name(name: str, what: str) -> str:
    """Return the name of an index of a table, which some databases want to be unique."""
    return f"distlock_{name}_{what}_{sha256(table(name).encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class HolderConfig:
    """The settings in `DISTLOCK_HOLDER`. The default name of a process is that of its program."""

    prefix: str = ""
    process: str | None = None


def holder_config() -> HolderConfig:
    """Return the settings by which this process names itself."""
    raw = getattr(settings, "DISTLOCK_HOLDER", {})
    if not isinstance(raw, Mapping):
        raise InvalidLockBackend(f"DISTLOCK_HOLDER must be a dictionary, not {shown(raw)}.")
    _refuse_unknown("DISTLOCK_HOLDER", raw, ("prefix", "process"))
    for name, value in raw.items():
        if name == "process" and value is None:
            continue
        try:
            _stored_text(value)
        except InvalidArgument as error:
            raise InvalidLockBackend(f"DISTLOCK_HOLDER[{name!r}] {error}") from None
    return HolderConfig(**raw)


def fence_secrets() -> tuple[str | bytes, ...]:
    """Return the secrets for fences in headers: the first one signs, and each one verifies."""
    raw = getattr(settings, "DISTLOCK_FENCE_SECRET", None)
    if raw is None:
        return (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    secrets = _several(raw)
    if not secrets or not all(isinstance(each, str) and len(each) >= 16 for each in secrets):
        # Without the value, which may be a part of the secret.
        raise InvalidLockBackend(
            "DISTLOCK_FENCE_SECRET must be None, or a str of at least 16 characters, or a list of"
            " such."
        )
    return secrets


def fence_audiences() -> tuple[str | None, ...]:
    """Return the audiences of fences that this service accepts; None: fences without one."""
    audiences = _several(getattr(settings, "DISTLOCK_FENCE_AUDIENCE", None))
    try:
        for each in audiences:
            if each is not None:
                validate_audience(each)
        if not audiences:
            validate_audience(audiences)
    except InvalidArgument as error:
        raise InvalidLockBackend(f"DISTLOCK_FENCE_AUDIENCE: {error}") from None
    return audiences


def validate_audience(value: object) -> str:
    """Return the name of a service that fences are sent to, or raise `InvalidArgument`."""
    if not isinstance(value, str) or not (value.isprintable() and 1 <= len(value) <= 100):
        raise InvalidArgument(
            f"An audience is a str of 1 to 100 printable characters, not {shown(value)}."
        )
    return value


def fence_jump() -> int | None:
    """Return how far a fence in a header may be above the highest one seen; None: see `seen`."""
    jump = getattr(settings, "DISTLOCK_FENCE_JUMP", None)
    if jump is None:
        return None
    try:
        return validate_fence(jump)
    except InvalidArgument:
        raise InvalidLockBackend(
            f"DISTLOCK_FENCE_JUMP must be None, or an int from 1 to {FENCE_MAX}, not {shown(jump)}."
        ) from None


def monitor_tokens() -> tuple[str, ...]:
    """Return the tokens that monitoring endpoints accept from machines; (): none."""
    raw = getattr(settings, "DISTLOCK_MONITOR_TOKEN", None)
    if raw is None:
        return ()
    tokens = _several(raw)
    for token in tokens:
        # A header must be able to carry it. The error lacks the value, which may be the secret.
        if not isinstance(token, str) or not re.fullmatch(r"[\w.~+/-]{16,}=*", token, re.ASCII):
            raise InvalidLockBackend(
                "DISTLOCK_MONITOR_TOKEN must be None, or a str of at least 16 letters, digits or"
                " any of -._~+/, or a list of such."
            )
    return tokens


def history() -> float:
    """Return which part of all releases is kept as events, from 0 to 1."""
    raw = getattr(settings, "DISTLOCK_HISTORY", None)
    try:
        return 0.0 if raw is None else number(raw, "DISTLOCK_HISTORY", minimum=0, maximum=1)
    except InvalidArgument as error:
        raise InvalidLockBackend(str(error)) from None


def task_url(task_id: str) -> str:
    """Return the page of a task in another tool; "": there is none."""
    raw = getattr(settings, "DISTLOCK_TASK_URL", None)
    if raw is None:
        return ""
    # Only these schemes, because the page makes a link of it.
    if not isinstance(raw, str) or not re.match(r"https?://|/", raw) or "{task_id}" not in raw:
        raise InvalidLockBackend(
            "DISTLOCK_TASK_URL must be None, or an address that starts with http://, https:// or /"
            f" and contains {{task_id}}, not {shown(raw)}."
        )
    return raw.replace("{task_id}", quote(task_id, safe=""))


def _several(raw: Any) -> tuple[Any, ...]:
    return tuple(raw) if isinstance(raw, (list, tuple)) else (raw,)


def _configured() -> Mapping[str, Any]:
    raw = getattr(settings, "DISTLOCK", DEFAULT_BACKENDS)
    if not isinstance(raw, Mapping):
        raise InvalidLockBackend(f"DISTLOCK must be a dictionary, not {shown(raw)}.")
    if isinstance(raw.get("BACKEND"), str):
        raise InvalidLockBackend(
            'DISTLOCK maps aliases to backends: {"default": {"BACKEND": …}}. BACKEND is no alias.'
        )
    for alias in raw:
        if not isinstance(alias, str):
            raise InvalidLockBackend(f"An alias in DISTLOCK must be a str, not {shown(alias)}.")
    return raw


def _refuse_unknown(where: str, raw: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = [name for name in raw if name not in known]
    if unknown:
        raise InvalidLockBackend(
            f"{where}: Unknown settings: {', '.join(map(repr, unknown))}. Known settings:"
            f" {', '.join(known)}.{suggestion(unknown[0], known)}"
        )


def refuse_unknown_settings() -> None:
    """Refuse unknown settings whose names begin as ours do, such as `DISTLOCKS`."""
    unknown = [
        f"There is no setting {name}.{_remedy(name)}"
        for name in dir(settings)
        if name.startswith("DISTLOCK") and name.isupper() and name not in SETTINGS
    ]
    if unknown:
        raise InvalidLockBackend(f"{' '.join(unknown)} Known settings: {', '.join(SETTINGS)}.")


def _remedy(name: str) -> str:
    of_alias = name.removeprefix("DISTLOCK_")
    if of_alias in _READERS:
        return f" {of_alias} belongs in DISTLOCK['default']."
    return suggestion(name, SETTINGS)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"must be a str, not {shown(value)}.")
    return value


def _stored_text(value: object) -> str:
    text = _text(value)
    if not text.isprintable() or len(text) > 100:
        raise InvalidArgument(
            f"must be printable text of at most 100 characters, not {shown(value)}."
        )
    return text


def _connections(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"must be an int of at least 1, not {shown(value)}.")
    return value


def _retry(value: object) -> Retry:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"must be a dictionary, not {shown(value)}.")
    known = ("delay", "factor", "cap", "max_retries")
    unknown = [name for name in value if name not in known]
    if unknown:
        raise InvalidArgument(
            f"unknown: {', '.join(map(repr, unknown))}; known: {', '.join(known)}."
            f"{suggestion(unknown[0], known)}"
        )
    return Retry(**value)


def _fence_floor(value: object) -> str | None:
    if value is not None and value != "clock":
        raise InvalidArgument(f'must be "clock" or None, not {shown(value)}.')
    return value


def _options(value: object) -> Mapping[str, Any]:
    # Without the value, which may contain a password.
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"must be a dictionary of options, not a {type(value).__name__}.")
    for name in value:
        if not isinstance(name, str):
            raise InvalidArgument(f"must have names that are a str, not {shown(name)}.")
    password = value.get("password")
    return {**value, "password": Secret(password)} if isinstance(password, str) else dict(value)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "BACKEND": _text,
    "KEY_PREFIX": _text,
    "TTL": lambda value: seconds(value, "TTL", minimum=MIN_TTL),
    "WAIT": lambda value: None if value is None else seconds(value, "WAIT"),
    "MAX_TTL": lambda value: seconds(value, "MAX_TTL", minimum=MIN_TTL, maximum=LONGEST),
    # Above a half, one failed renewal is enough to lose the lease.
    "HEARTBEAT": lambda value: number(value, "HEARTBEAT", minimum=0.01, maximum=0.5),
    "LOCK_CONNECTIONS": _connections,
    "RETRY": _retry,
    "FENCE_FLOOR": _fence_floor,
    "OPTIONS": _options,
}
