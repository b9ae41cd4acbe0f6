"""`distlock.E001` and `W001` to `W008`: settings, processes, and the project's declared locks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, TypeVar

from django.conf import settings
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

#: The largest part of a ttl before a renewal that leaves the time for two more.
_MOST_OF_THE_TTL: Final = 1 / 3

#: Bytes. At this length, a counter is about twice as large as with "distlock": 258 bytes instead of
#: 135 on PostgreSQL, where row and index have the prefix. And counters are never deleted.
_LONG_PREFIX: Final = 64

#: Scopes of schedules that each node may run.
_PER_NODE: Final = {RunScope.PREFER_GLOBAL.value, RunScope.NODE_LOCAL.value}

#: Checked with their tasks, which are not imported yet; their kinds are known by name.
_CELERY: Final = (Kind.CELERY_LOCK, Kind.CELERY_UNIQUE)


@checks.register("distlock")
def check_settings(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """E001: each alias of `DISTLOCK` makes a backend, and the other settings are valid."""
    found: list[checks.CheckMessage] = []
    aliases = _read(conf.aliases, found) or []
    # Without it, fences are signed by SECRET_KEY, which commands may do without.
    is_unset = getattr(settings, "DISTLOCK_FENCE_SECRET", None) is None
    secrets: Callable[[], object] = tuple if is_unset else conf.fence_secrets
    for read in (
        conf.holder_config, secrets, conf.fence_audiences, conf.fence_jump,
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
    """W001: uWSGI runs Python with threads, which is not the default before 2.0.27."""
    # Its options do not show this: an option that is the default is absent.
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
    """Log what `check_threads` finds, because no command that runs checks runs inside uWSGI."""
    for message in check_threads(None):
        logger.warning("%s %s", message.msg, message.hint, extra=log_fields("misused"))


@check_each(BaseLockBackend)
def check_scopes(backend: BaseLockBackend) -> Iterator[checks.CheckMessage]:
    """W003: a schedule that must run on one node only has a lock that other nodes see."""
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
    """W004: after a failed renewal, there is time for another one."""
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
    """W005: other processes see the locks. Only `check --deploy` runs this check.

    No warning if the only known users of a backend are schedules that may run on each node.
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
    """W006: the prefix is short, because it is stored with each key that was ever locked.

    `distlock.E001` reports a prefix that a store cannot take. The others are only wasteful.
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
    """W007: a key template begins with a fixed text."""
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
    """W008: a view authenticates its client before it acquires a lock."""
    # Not imported here: that needs `django.contrib.auth` installed. Views with a mixin import it.
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
