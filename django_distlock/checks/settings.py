"""`distlock.E001` and `W001` to `W008`: settings, processes, and what the project declares."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from .. import conf
from ..backends.base import BaseLockBackend
from ..core.declarations import Kind, declarations
from ..core.keys import OWN_MARKER, begins_with_field
from ..core.logs import log_fields
from ..core.pages import page
from ..handler import lock_backends
from ..scheduling import PREFIX, RunScope
from ..views import LockedViewMixin
from .configured import DOCS, Subject, check_each, where

logger = logging.getLogger("django_distlock")

T = TypeVar("T")

#: The part of a ttl after which two renewals fit into what is left of it.
_MOST_OF_THE_TTL: Final = 1 / 3

#: Bytes. With more, a counter takes twice the room and above that it takes after "distlock": 258
#: bytes for 135 on PostgreSQL, where the prefix is in the row and in the index. And it stays.
_LONG_PREFIX: Final = 64

#: Schedules that say themselves that each node may run them.
_PER_NODE: Final = {RunScope.PREFER_GLOBAL.value, RunScope.NODE_LOCAL.value}

#: Checked with their tasks, which are not imported yet, and known by their names.
_CELERY: Final = (Kind.CELERY_LOCK, Kind.CELERY_UNIQUE)


@checks.register("distlock")
def check_settings(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """E001: each alias of `DISTLOCK` makes a backend; the other settings keep their rules."""
    found: list[checks.CheckMessage] = []
    aliases = _read(conf.aliases, found) or []
    for read in (
        conf.holder_config, conf.fence_secrets, conf.fence_audiences, conf.fence_jump,
        conf.monitor_tokens, conf.refuse_unknown_settings, conf.history, partial(conf.task_url, ""),
    ):  # fmt: skip
        _read(read, found)
    for alias in aliases:
        _read(partial(lock_backends.__getitem__, alias), found, Subject((alias,)))
    return found


def _read(
    read: Callable[[], T], found: list[checks.CheckMessage], about: Subject | None = None
) -> T | None:
    try:
        return read()
    except ImproperlyConfigured as error:
        found.append(checks.Error(str(error), hint=DOCS, obj=about, id="distlock.E001"))
        return None


@checks.register("distlock")
def check_threads(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W001: uWSGI runs Python without threads, as releases before 2.0.27 do by themselves."""
    # What it was started with does not tell: the options are absent where they are the default.
    if getattr(sys.modules.get("uwsgi"), "has_threads", True):
        return []
    return [
        checks.Warning(
            "uWSGI runs this process without threads, so the heartbeat stops between requests. A"
            " lease that outlives its request is not renewed, and a lease whose release waits for"
            " a rollback stays held until the next request.",
            hint=f"Set enable-threads = true: see {page('howto/production')}.",
            id="distlock.W001",
        )
    ]


def warn_of_missing_threads() -> None:
    """Log what `check_threads` finds: commands that run checks do not run inside uWSGI."""
    for message in check_threads(None):
        logger.warning("%s %s", message.msg, message.hint, extra=log_fields("misused"))


@check_each(BaseLockBackend)
def check_scopes(backend: BaseLockBackend) -> Iterator[checks.CheckMessage]:
    """W003: what must run on one node only has a lock that reaches the others."""
    if backend.distributed:
        return
    for each in dict.fromkeys(declaration for _, declaration in declarations()):
        if each.scope == RunScope.REQUIRE_GLOBAL.value and each.lock.backend == backend.alias:
            yield checks.Warning(
                f"The schedule {each.key.removeprefix(PREFIX)!r} requires one node"
                " (RunScope.REQUIRE_GLOBAL), but other processes cannot see the locks of"
                f" {where(backend)}. Every process would run it.",
                hint=f"Use a distributed backend, or RunScope.PREFER_GLOBAL. {DOCS}",
                id="distlock.W003",
            )


@check_each(BaseLockBackend)
def check_heartbeat(backend: BaseLockBackend) -> Iterator[checks.CheckMessage]:
    """W004: a renewal that gets no answer leaves the time for another one."""
    if (part := backend.config.heartbeat) > _MOST_OF_THE_TTL:
        yield checks.Warning(
            f"{where(backend)} renews a lease after {part:.0%} of its ttl (HEARTBEAT). If one"
            f" renewal fails, at most {1 - 2 * part:.0%} of the ttl is left when the next one is"
            " due. A single failure may end a lease.",
            hint=f"Set HEARTBEAT to 1/3 or less. {DOCS}",
            id="distlock.W004",
        )


@check_each(BaseLockBackend, deploy=True)
def check_memory(backend: BaseLockBackend) -> Iterator[checks.CheckMessage]:
    """W005: no other process sees the locks. Asked by `check --deploy` alone.

    Quiet where all that is known to use a backend are schedules that may run on each node.
    """
    users = [each for _, each in declarations() if each.lock.backend == backend.alias]
    strict = sorted({each.key for each in users if each.scope not in _PER_NODE})
    if backend.distributed or (users and not strict):
        return
    named = f" For example, {strict[0]!r} uses it." if strict else ""
    yield checks.Warning(
        f"{where(backend)} keeps its locks in process memory. Other processes cannot see them, so"
        f" several may hold the same key.{named}",
        hint="Use a backend that is shared between processes: see"
        f" {page('howto/choose-a-database')}.",
        id="distlock.W005",
    )


@check_each(BaseLockBackend)
def check_prefixes(backend: BaseLockBackend) -> Iterator[checks.CheckMessage]:
    """W006: a prefix costs its length for each key that was ever locked.

    One that a store cannot take is refused, as `distlock.E001`. What is left is only wasteful.
    """
    if (size := len(backend.key_prefix.encode())) > _LONG_PREFIX:
        yield checks.Warning(
            f"{where(backend)} has a KEY_PREFIX of {size} bytes. It is stored with every key that"
            " was ever locked, permanently.",
            hint=f"Choose a prefix of at most {_LONG_PREFIX} bytes before the first use. A change"
            f" of the prefix restarts all fences. {DOCS}",
            id="distlock.W006",
        )


@checks.register("distlock")
def check_templates(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W007: a template begins with a text of its own."""
    return [
        checks.Warning(
            f"The key template {each.key!r} of {getattr(made, '__qualname__', made)} starts with a"
            " field. A value chosen by someone else, such as a file name, could then equal the"
            " key of another lock.",
            hint=f"Start it with a text: 'invoice:{{number}}'. {DOCS}",
            id="distlock.W007",
        )
        for made, each in declarations()
        if each.is_template
        and each.kind not in _CELERY
        and not each.key.startswith(OWN_MARKER)
        and begins_with_field(each.key)
    ]


@checks.register("distlock")
def check_mixins(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W008: strangers take no keys."""
    # Imported by whoever has such a view; it needs an installed `django.contrib.auth`.
    access = getattr(sys.modules.get("django.contrib.auth.mixins"), "AccessMixin", None)
    if access is None:
        return []
    classes = dict.fromkeys(
        getattr(made, "view_class", None) for made, each in declarations() if each.kind is Kind.VIEW
    )
    return [
        checks.Warning(
            f"{view.__module__}.{view.__qualname__} acquires its lock before it authenticates the"
            " client. Anyone can then hold its keys, create fence counters, and learn whether a"
            " key is held.",
            hint=f"Put LoginRequiredMixin and similar mixins before LockedViewMixin. {DOCS}",
            id="distlock.W008",
        )
        for view in classes
        if view is not None and _locks_first(view.__mro__, access)
    ]


def _locks_first(bases: tuple[type, ...], access: type) -> bool:
    if LockedViewMixin not in bases:
        return False
    behind = bases[bases.index(LockedViewMixin) :]
    return any(issubclass(each, access) for each in behind)
