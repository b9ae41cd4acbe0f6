"""Checks `distlock.E4xx` and `W4xx` of locked Celery tasks, registered by this module's import."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

from django.core import checks

from ...core.errors import LockUsageError
from ...core.keys import begins_with_field
from ...core.logs import log_fields
from ...core.pages import page
from .declaring import app_of_project, import_modules
from .runs import require_base
from .terms import Terms, terms_of

logger = logging.getLogger("django_distlock")

_DOCS: Final = f"See {page('howto/lock-celery-tasks')}."
#: Brokers that redeliver unacknowledged messages, and after how many seconds.
_VISIBILITY: Final = {"redis": 3600.0, "rediss": 3600.0, "sentinel": 3600.0, "sqs": 1800.0}
#: Tasks without the required base that this process has already reported.
_told: set[str] = set()


@checks.register("distlock")
def check_tasks(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """E401, E402, W007 and W401 to W403: locks that do not fit how Celery runs their tasks."""
    found: list[checks.CheckMessage] = []
    app = app_of_project()
    if app is None:
        return found
    # In most projects, only a worker imports the tasks.
    import_modules(app)
    for _name, task in sorted(app.tasks.items()):
        found += _check_attributes(task)
        terms = terms_of(task)
        if terms is not None:
            found += _check_base(task, terms)
            found += _check_limits(task, terms)
            found += _check_visibility(task, terms)
            found += _check_policy(task, terms)
            found += _check_template(task, terms)
    return found


def _check_attributes(task: Any) -> Iterator[checks.CheckMessage]:
    kind = type(task)
    if getattr(kind, "distlock_base", False):
        return
    # Only new attributes count: a base class of the project may use `lock` for something else.
    ours = [
        name
        for name in ("lock", "unique", "lock_options")
        if name in vars(kind) and not any(name in vars(base) for base in kind.__mro__[1:])
    ]
    if ours:
        yield checks.Error(
            f"The task {task.name} says {' and '.join(ours)}, but only LockedTask reads these"
            " options. The task is not locked. Use @shared_task(base=LockedTask), or a subclass"
            " of it.",
            hint=_DOCS,
            id="distlock.E401",
        )


def _check_base(task: Any, terms: Terms) -> Iterator[checks.CheckMessage]:
    if terms.unique is None and not terms.max_queued:
        return
    try:
        require_base(task)
    except LockUsageError as error:
        yield checks.Error(str(error), hint=_DOCS, id="distlock.E401")


def _check_limits(task: Any, terms: Terms) -> Iterator[checks.CheckMessage]:
    limit = task.time_limit or task.soft_time_limit
    lock = terms.rules.lock
    lives = None if lock.heartbeat and not lock.basic else lock.ttl
    longest = lock.max_lifetime if lock.max_lifetime is not None else lives
    if limit and longest is not None and limit > longest:
        yield checks.Error(
            f"The task {task.name} may run for {limit:g} s, but its lease ends after {longest:g}"
            " s.",
            hint=f"Lower the time limit, or raise max_lifetime or ttl. {_DOCS}",
            id="distlock.E402",
        )


def _check_visibility(task: Any, terms: Terms) -> Iterator[checks.CheckMessage]:
    if not (task.acks_late or terms.debounce):
        return
    conf = task.app.conf
    scheme = str(conf.broker_url or "").partition(":")[0]
    default = _VISIBILITY.get(scheme)
    if default is None:
        return
    options = conf.broker_transport_options or {}
    visible = float(options.get("visibility_timeout", default))
    needed = max(float(task.time_limit or 0), terms.rules.lock.ttl or 0.0)
    late = []
    if visible < terms.debounce:
        late.append(
            f"calls of the task {task.name} are delayed by {terms.debounce:g} s. A call may run"
            " twice."
        )
    if task.acks_late and visible < needed:
        late.append(
            f"the task {task.name} may take {needed:g} s. It is redelivered while it runs, and"
            " queued again until the run has ended."
        )
    for each in late:
        yield checks.Warning(
            f"The broker redelivers messages that are not acknowledged within {visible:g} s, but"
            f" {each}",
            hint=f"Raise visibility_timeout in broker_transport_options. {_DOCS}",
            id="distlock.W401",
        )


def _check_policy(task: Any, terms: Terms) -> Iterator[checks.CheckMessage]:
    if terms.on_conflict == "skip" and task.acks_late and task.reject_on_worker_lost:
        yield checks.Warning(
            f"The task {task.name} is redelivered when its worker dies, but is skipped if its key"
            " is held. The lease of the dead worker may still hold the key, and the work would be"
            " lost.",
            hint=f'Use on_conflict="retry". {_DOCS}',
            id="distlock.W402",
        )
    if terms.on_conflict == "run" and task.acks_late:
        yield checks.Warning(
            f"The task {task.name} may be redelivered while it runs, and runs without its lock if"
            " the key is held. It may then run twice.",
            hint=f'Use on_conflict="retry". {_DOCS}',
            id="distlock.W403",
        )


def _check_template(task: Any, terms: Terms) -> Iterator[checks.CheckMessage]:
    given = None if terms.lock is None else terms.lock.given
    # Only the run's key is checked: a unique key begins with a prefix of this package.
    if isinstance(given, str) and begins_with_field(given):
        yield checks.Warning(
            f"The key template {given!r} of the task {task.name} starts with a field. A value"
            " chosen by someone else, such as a file name, could then equal the key of another"
            " lock.",
            hint=f"Start it with a text: 'invoice:{{number}}'. {_DOCS}",
            id="distlock.W007",
        )


def tell_all(sender: Any = None, **_: Any) -> None:
    """Report all unique tasks without the required base: a receiver of `worker_init`."""
    for task in list(sender.app.tasks.values()):
        _tell(task)


def tell_sent(sender: Any = None, **_: Any) -> None:
    """Report a sent task like `tell_all`: a receiver of `before_task_publish`."""
    app = app_of_project()
    # A task sent by its name must not finalize an app that has no tasks yet.
    if app is not None and app.finalized:
        _tell(app.tasks.get(sender))


def _tell(task: Any) -> None:
    """Log the error once for each task, because Celery swallows what signal receivers raise."""
    terms = terms_of(task)
    if terms is None or task.name in _told:
        return
    for found in _check_base(task, terms):
        _told.add(task.name)
        extra = log_fields("misused", error=LockUsageError(found.msg))
        logger.error("%s", found.msg, extra=extra)
