"""Keep tasks that failed because the store of their locks was unavailable, to send them again.

A task is kept in a table only if its body had not begun, so nothing of it was done. Functions that
read the table raise `BackendUnavailable` if the database does not answer.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

from celery.result import EagerResult
from django.apps import apps
from django.db import connections, router
from kombu.exceptions import EncodeError, OperationalError
from kombu.serialization import dumps, loads, prepare_accept_content

from ...core.durations import MAX_BOUND
from ...core.errors import BackendUnavailable, LockNotAcquired, LockUsageError
from ...database import vendors
from ...database.borrowing import NoConnectionFree
from ...database.schemas import TableConnections
from . import leftovers
from .deliveries import Delivery

if TYPE_CHECKING:
    from ...models import FailedTask

#: These functions of kombu have no types.
_dumps: Any = dumps
_loads: Any = loads
_accepted: Any = prepare_accept_content

#: Maximum bytes of arguments that are kept, because many may wait in the worker's memory.
MAX_BODY: Final = 100_000

_WORDS: Final = leftovers.Words(
    "failed_task_unlisted",
    "The failed task %r is listed when the database answers: %s",
    "The failed task %r is not listed, and cannot be sent again: %s",
)


def keep(delivery: Delivery, backend: str, key: str) -> None:
    """Keep a failed task, now or as soon as the database answers; `key` "": unknown."""
    task, request = delivery.task, delivery.request
    using = router.db_for_write(_model())
    if connections[using].vendor not in vendors.VENDORS:
        return  # Without a database, the project has no place to keep the task.
    row = _model()(
        task_id=str(request.id),
        task=task.name,
        backend=backend,
        key=key,
        failed_at=datetime.now(UTC),
        message=_packed(task, request),
        route=_route(request.delivery_info or {}),
    )
    leftovers.free(partial(_write, using, row), using, row.pk, _WORDS)


def failed(*, sent: bool) -> list[FailedTask]:
    """Return the kept tasks in the order of their failures; `sent`: also those sent again."""
    using = router.db_for_write(_model())
    rows = _model().objects.using(using).order_by("failed_at", "pk")
    with vendors.translated(using):
        return list(rows if sent else rows.filter(sent_at=None))


def send(app: Any, row: FailedTask) -> str | None:
    """Send a task again, once, with a new id: only the caller that marks its row first sends it.

    The row is marked before the task is sent. A process that dies between the two sends nothing.

    Returns:
        The id; None: the task was sent already.

    Raises:
        LockNotAcquired: The task was not queued, as its terms say. Its row is not marked then.
        LockUsageError: Its arguments were not kept, or this app does not accept their format.
        BackendUnavailable: The database, the broker or the store of a unique task is unavailable.
            The row is marked then only if the database failed after it had been marked.
    """
    args, kwargs = _unpacked(app, row)
    using = row._state.db or router.db_for_write(_model())
    unsent = _model().objects.using(using).filter(pk=row.pk, sent_at=None)
    with vendors.translated(using):
        if not unsent.update(sent_at=datetime.now(UTC)):
            return None
    marked = _model().objects.using(using).filter(pk=row.pk)
    try:
        task = app.tasks.get(row.task)
        publish = partial(app.send_task, row.task) if task is None else task.apply_async
        result = publish(args, kwargs, **row.route)
        marker = result.result if isinstance(result, EagerResult) else None
        if isinstance(marker, dict) and marker.get("distlock") == "skipped":
            raise LockNotAcquired(
                f"The task was not queued: {marker['why']}.", key=marker["key"], code=marker["why"]
            )
    except Exception as error:
        with vendors.translated(using):
            marked.update(sent_at=None)
        if isinstance(error, OperationalError | OSError):
            raise BackendUnavailable(f"The broker is unavailable: {error}") from error
        raise
    with vendors.translated(using):
        marked.update(sent_as=str(result.id))
    return str(result.id)


def drop(row: FailedTask) -> None:
    """Delete the row of a task."""
    using = row._state.db or router.db_for_write(_model())
    with vendors.translated(using):
        _model().objects.using(using).filter(pk=row.pk).delete()


def _model() -> type[FailedTask]:
    # Tasks are imported before the apps are loaded.
    return apps.get_model("django_distlock", "FailedTask")


def _route(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that send a message where one was delivered."""
    names = ["priority", "exchange", "routing_key"]
    if info.get("exchange") == "" and info.get("routing_key"):
        # The default exchange, which has no name, routes by the name of the queue.
        info, names = {**info, "queue": info["routing_key"]}, ["priority", "queue"]
    return {name: info[name] for name in names if info.get(name) is not None}


def _packed(task: Any, request: Any) -> dict[str, str]:
    """Return the arguments in the format of the task's messages; {}: they cannot be kept."""
    serializer = task.serializer or task.app.conf.task_serializer
    try:
        kind, encoding, body = _dumps((request.args, request.kwargs), serializer)
    except EncodeError:
        return {}
    raw = body.encode() if isinstance(body, str) else bytes(body)
    if len(raw) > MAX_BODY:
        return {}
    return {"type": kind, "encoding": encoding, "body": base64.b64encode(raw).decode()}


def _unpacked(app: Any, row: FailedTask) -> tuple[list[Any], dict[str, Any]]:
    message = row.message
    if not message:
        raise LockUsageError(
            f"The arguments of the task {row.pk} were not stored: they have more than {MAX_BODY}"
            " bytes or cannot be serialised. Send the task again from its source."
        )
    accepted = _accepted(app.conf.accept_content)
    if message["type"] not in accepted:
        raise LockUsageError(
            f"The arguments of the task {row.pk} are {message['type']}, which is not in the"
            f" accept_content of this Celery app."
        )
    raw = base64.b64decode(message["body"])
    args, kwargs = _loads(raw, message["type"], message["encoding"], accept=accepted)
    return list(args), dict(kwargs)


def _write(using: str, row: FailedTask) -> None:
    # As for locks: a server that stops answering must not block the worker for more than seconds.
    try:
        with (
            vendors.translated(using),
            _connections(using).use() as on,
            vendors.of(on).short_transaction(MAX_BOUND),
        ):
            # A write that is tried again, or a redelivered task, has the same id.
            _model().objects.using(on).bulk_create([row], ignore_conflicts=True)
    except NoConnectionFree as error:
        raise BackendUnavailable(str(error), code="network_timeout") from error


@cache
def _connections(using: str) -> TableConnections:
    return TableConnections(using, 2, looked_for="failed")
