"""The configured backends, as what checks look at and what their messages are about."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from .. import conf
from ..backends.base import BaseLockBackend
from ..core.pages import page
from ..handler import lock_backends

if TYPE_CHECKING:
    from ..backends.redis import RedisBackend

B = TypeVar("B")
Check = Callable[..., list[checks.CheckMessage]]

DOCS = f"See {page('reference/checks')}."
#: These backends are known by path, because their drivers may not be installed.
ADVISORY = "django_distlock.backends.advisory.AdvisoryBackend"
REDIS = "django_distlock.backends.redis.RedisBackend"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a message is about, as its `obj`: backends, or the project, and some of the keys."""

    aliases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(self.aliases) or "?"


def check_each(
    kind: type[B] | str, *, deploy: bool = False
) -> Callable[[Callable[[B], Iterable[checks.CheckMessage]]], Check]:
    """Register a check of each backend of a kind: a class, or the import path of one."""

    def registered(check: Callable[[B], Iterable[checks.CheckMessage]]) -> Check:
        def check_all(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
            return [
                message
                for backend in configured(kind)
                for message in about([backend.alias], check(backend))  # type: ignore[attr-defined]
            ]

        # No `functools.wraps`: Django would look for keyword arguments in its `__wrapped__`.
        check_all.__name__, check_all.__module__ = check.__name__, check.__module__
        check_all.__doc__ = check.__doc__
        return checks.register("distlock", deploy=deploy)(check_all)

    return registered


def about(
    aliases: Iterable[str], messages: Iterable[checks.CheckMessage]
) -> Iterator[checks.CheckMessage]:
    """Yield messages with the backends that they are about as their `obj`."""
    subject = Subject(tuple(aliases))
    for message in messages:
        message.obj = subject
        yield message


def configured(kind: type[B] | str) -> Iterator[B]:
    """Yield the backends of a kind. `distlock.E001` reports those that cannot be made."""
    try:
        aliases = conf.aliases()
    except ImproperlyConfigured:
        return
    for alias in aliases:
        try:
            backend = lock_backends[alias]
        except ImproperlyConfigured:
            continue
        if is_of(backend, kind):
            yield backend  # type: ignore[misc]


def is_of(backend: BaseLockBackend, kind: type | str) -> bool:
    """Whether a backend is of a class, or of the class with this import path."""
    if isinstance(kind, type):
        return isinstance(backend, kind)
    return any(f"{each.__module__}.{each.__qualname__}" == kind for each in type(backend).__mro__)


def is_redis(backend: BaseLockBackend) -> TypeGuard[RedisBackend]:
    """Whether a backend is the Redis backend."""
    return is_of(backend, REDIS)


def where(backend: Any) -> str:
    """Return the setting that makes a backend, for messages."""
    return f"DISTLOCK[{backend.alias!r}]"
