"""Find the claims of tasks that neither the broker nor a worker has any more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from kombu.exceptions import OperationalError

from ...backends.base import BaseLockBackend
from ...backends.counts import every_record
from ...core.errors import BackendUnavailable, LockError
from ...core.keys import BACKLOG_PREFIX, UNIQUE_PREFIX
from ...core.records import Record
from ...process.host import is_gone

#: How many messages or ids are read in one call.
_PAGE: Final = 1000
#: Seconds to wait for a connection to the broker.
_CONNECT: Final = 5.0
#: The queues in which RabbitMQ delays tasks with a countdown, if Celery's are quorum queues.
_DELAYED: Final = frozenset(f"celery_delayed_{level}" for level in range(28))


class Unseen(LockError):
    """The broker does not show which tasks it has."""

    code = "unsupported"


def candidates(store: BaseLockBackend, older_than: float) -> list[Record]:
    """Return the claims that no process holds: of queued tasks, retries and dead processes.

    They are unique keys, and places in a backlog, of which several have one key.

    Args:
        older_than: The seconds that a claim must have been held, by the store's clock, because a
            sender acquires it before it sends the task.
    """
    since = store.clock() - timedelta(seconds=older_than)
    found: dict[str, Record] = {}
    for prefix in (UNIQUE_PREFIX, BACKLOG_PREFIX):
        for record in every_record(store, prefix=prefix):
            holder = record.holder
            is_free = not holder.pid or is_gone(holder)
            if holder.task_id and is_free and record.acquired_at <= since:
                found[record.token] = record
    return list(found.values())


def missing(app: Any, ids: Iterable[str], queues: Iterable[str], patience: float) -> set[str]:
    """Return the ids of the tasks that neither the broker nor a worker has.

    Args:
        queues: More queues to search, besides those that the app, workers and broker know.
        patience: Seconds to wait for the answers of workers.
    """
    left = set(ids)
    if not left:
        return left
    with _asking(app) as connection:
        kind = connection.transport.driver_type
        look = {"redis": _in_redis, "amqp": _in_amqp}.get(kind)
        if look is None:
            raise Unseen(
                f"A broker of the kind {kind!r} cannot list its tasks. Redis and RabbitMQ can."
            )
        names = {*app.amqp.queues, *queues}
        left -= look(app, connection, names, patience)
        left -= _in_workers(app, left, patience)
        if kind == "redis":
            # A second look, because the messages of a worker that ends go back to their queue.
            left -= look(app, connection, names, patience)
        return left


@contextmanager
def _asking(app: Any) -> Iterator[Any]:
    with app.connection_for_read() as connection:
        errors = (OperationalError, *connection.connection_errors, *connection.channel_errors)
        try:
            connection.ensure_connection(max_retries=1, timeout=_CONNECT)
            yield connection
        except errors as error:
            raise BackendUnavailable(f"The broker is unavailable: {error}") from error


# Redis: all messages can be read


def _in_redis(app: Any, connection: Any, names: set[str], patience: float) -> set[str]:
    from redis import Redis

    channel = connection.default_channel
    # Celery's own client adds its prefix to the keys of only some commands.
    client = Redis(connection_pool=channel.pool)
    prefix = channel.global_keyprefix or ""
    found: set[str] = set()
    for name in names | _bound(channel, client, prefix):
        for step in channel.priority_steps:
            found |= _listed(client, prefix + channel._q_for_pri(name, step))
    # Read after the queues, because a message that is taken from a queue is added here.
    for _, held in client.hscan_iter(prefix + channel.unacked_key, count=_PAGE):
        found |= _id_of(json.loads(held)[0])
    return found


def _bound(channel: Any, client: Any, prefix: str) -> set[str]:
    """Return the names of all queues that messages were ever sent to."""
    names: set[str] = set()
    for key in client.scan_iter(prefix + channel.keyprefix_queue % "*", count=_PAGE):
        names |= {each.decode().rpartition(channel.sep)[2] for each in client.smembers(key)}
    return names


def _listed(client: Any, key: str) -> set[str]:
    found: set[str] = set()
    start = 0
    # Read from the end where messages are added, so that changes meanwhile hide no message.
    while page := client.lrange(key, start, start + _PAGE - 1):
        for message in page:
            found |= _id_of(json.loads(message))
        start += _PAGE
    return found


def _id_of(message: Any) -> set[str]:
    properties = message.get("properties") if isinstance(message, Mapping) else None
    task_id = (properties or {}).get("correlation_id")
    return {task_id} if isinstance(task_id, str) else set()


# RabbitMQ: queues report how many messages they have, but not which


def _in_amqp(app: Any, connection: Any, names: set[str], patience: float) -> set[str]:
    """Return no ids if the queues are empty and all of their consumers answer.

    Messages are not read, because reading would take them and put them back as redelivered.

    Raises:
        Unseen: A queue is not empty, or one of its consumers does not answer.
    """
    consumed = app.control.inspect(timeout=patience).active_queues() or {}
    asked = [each["name"] for queues in consumed.values() for each in queues]
    for name in sorted(names | _DELAYED | set(asked)):
        queue = _declared(connection, name)
        if queue is None:
            continue
        if queue.message_count:
            raise Unseen(
                f"The queue {name!r} has {queue.message_count} messages, which RabbitMQ cannot"
                " list. Let workers empty it, or purge it."
            )
        if queue.consumer_count > asked.count(name):
            raise Unseen(
                f"{asked.count(name)} of {queue.consumer_count} consumers of the queue {name!r}"
                f" listed their tasks within {patience:g} s."
            )
    return set()


def _declared(connection: Any, name: str) -> Any:
    """Return the state of a queue; None: there is no such queue."""
    channel = connection.channel()
    try:
        return channel.queue_declare(queue=name, passive=True)
    except connection.channel_errors as error:
        if getattr(error, "code", None) != 404:
            raise
        return None
    finally:
        # The server closes a channel that declares a missing queue passively.
        if channel.is_open:
            channel.close()


# Workers


def _in_workers(app: Any, ids: set[str], patience: float) -> set[str]:
    """Return the ids of tasks that workers have fetched: running, or waiting for their time."""
    ask = app.control.inspect(timeout=patience)
    found: set[str] = set()
    for entries in (ask.scheduled() or {}).values():
        found |= {each["request"]["id"] for each in entries}
    left = sorted(ids - found)
    for start in range(0, len(left), _PAGE):
        told = ask.query_task(left[start : start + _PAGE]) or {}
        found |= {task_id for known in told.values() for task_id in known}
    return found
