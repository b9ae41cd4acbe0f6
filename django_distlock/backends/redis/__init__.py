"""Locks in Redis, or Valkey: one server, one behind Sentinel, or a cluster."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache, partial
from itertools import compress
from typing import Any, ClassVar, Final, TypeVar

from ...conf import BackendConfig
from ...core.durations import GRACE
from ...core.errors import BackendUnavailable, LockError
from ...core.keys import key_hash, whole_name
from ...core.logs import log_fields
from ...core.records import (
    FENCE_MAX,
    MOST_SHOWN,
    SPOILED,
    UNKNOWN,
    Attempt,
    Contended,
    Counter,
    Grant,
    Holder,
    InTheWay,
    Page,
    Raised,
    Record,
    Unknown,
    Unreadable,
    Waiting,
    Waits,
    from_microseconds,
    to_microseconds,
    used_up,
)
from ...core.secrets import Token
from ...core.sharing import DOOR_SECONDS
from ...exceptions import InvalidLockBackend
from ..base import BaseLockBackend
from ..counts import Counts, States, Strain
from ..listening import Listener
from ..lua import script
from .answers import (
    counted,
    extended,
    granted,
    granted_many,
    held,
    sharing,
    unreadable,
    waiting,
)
from .clients import client_source
from .lines import Call, ThreadLines, answered
from .sampling import count_keys, sampled_states
from .store import RedisStore, escaped, text

#: A pattern for the hash between a role and the user's key. It is in braces, so that a cluster puts
#: all keys of one lock into one slot.
_ANY_TAG: Final = "{" + "?" * 22 + "}:"
_GRACE: Final = repr(GRACE)
_FENCE_MAX: Final = str(FENCE_MAX)

logger = logging.getLogger("django_distlock")

T = TypeVar("T")


class RedisBackend(BaseLockBackend):
    """Keeps locks and fences in Redis.

    Each operation is one script, so no answer is ever busy. Fences follow the server's clock,
    whatever `FENCE_FLOOR` says, because Redis may lose data, or have old data after a failover.

    Args:
        cache: The alias of a cache in Redis, by django-redis or Django.
        url: The address of a server.
        password: The password of that server, so that it is not a part of the address.
        client_factory: A function that makes a `redis.Redis` or `redis.RedisCluster` for locks, or
            its import path. Called once, at first use; for a cluster also in a forked child.
        cleanup_on_read: Remove an expired record when it is read.
    """

    distributed: ClassVar[bool] = True
    supports_wakeups: ClassVar[bool] = True

    _listener: Listener

    def __init__(
        self,
        config: BackendConfig,
        *,
        cache: str | None = None,
        url: str | None = None,
        password: str | None = None,
        client_factory: str | Callable[[], Any] | None = None,
        cleanup_on_read: bool = False,
        **unknown: Any,
    ):
        super().__init__(config, **unknown)
        where = f"DISTLOCK[{self.alias!r}]"
        if not isinstance(cleanup_on_read, bool):
            raise InvalidLockBackend(
                f"{where}: cleanup_on_read must be True or False, not {cleanup_on_read!r}."
            )
        self.cleanup_on_read = cleanup_on_read
        self.cache = cache
        source = client_source(
            where, {"cache": cache, "url": url, "client_factory": client_factory}, password
        )
        self.store = RedisStore(self.alias, source, config.lock_connections)
        self._prefix = f"{self.key_prefix}:" if self.key_prefix else ""
        self._channel = f"{self._prefix}wake"
        #: A sorted set of the held locks, to list them without `SCAN`. A cluster has none.
        self._listing = self._at("listing", self._name("listing"))
        self._listener = Listener(
            f"distlock-{self.alias}-wakeups",
            partial(self.store.subscribed, self._channel),
            self.queues,
        )

    @property
    def supports_token_lookup(self) -> bool:  # type: ignore[override]
        """False on a cluster, where a token may be on another server than its record."""
        return not self.store.is_cluster

    @property
    def acquires_together(self) -> bool:  # type: ignore[override]
        """False on a cluster, whose servers have different keys."""
        return not self.store.is_cluster

    def _acquire(self, attempt: Attempt) -> Grant | Contended:
        keys = [self._at(kind, attempt.name) for kind in ("lock", "fence", "pause", "shared")]
        concerned = (attempt.token, attempt.replace)
        tokens = (self._token(each) for each in concerned if each is not None)
        indexes = [self._listing, *tokens]
        arguments = (
            attempt.token, _number(attempt.ttl), _GRACE, _FENCE_MAX, attempt.key,
            json.dumps(attempt.holder.as_json()), "1" if attempt.wanted else "",
            attempt.replace or "", self._channel,
        )  # fmt: skip
        if not attempt.shared:
            question = Call(script("acquire"), keys, arguments, indexes)
            answer = self._run(question, partial(_granted_alone, attempt), attempt.key)
            if answer is not None:
                return answer
        more = _number(attempt.permits), repr(DOOR_SECONDS)
        places = [self._at("lock", attempt.place), *keys]
        question = Call(script("share"), places, (*arguments, *more), indexes)
        return self._run(question, partial(granted, attempt), attempt.key)

    def _acquire_many(self, attempts: Sequence[Attempt]) -> Sequence[Grant] | InTheWay:
        if not self.acquires_together:
            return super()._acquire_many(attempts)
        first, keys, named = attempts[0], list[str](), list[str]()
        for each in attempts:
            keys.append(self._at("lock", each.place))
            keys += [self._at(kind, each.name) for kind in ("lock", "fence", "pause", "shared")]
            keys.append(self._token(each.token))
            named += [each.token, each.key]
        arguments = (
            *(_number(first.ttl), _GRACE, _FENCE_MAX, json.dumps(first.holder.as_json())),
            *(self._channel, _number(first.permits), repr(DOOR_SECONDS), *named),
        )
        question = Call(script("acquire_many"), keys, arguments, [self._listing])
        return self._run(question, partial(granted_many, attempts))

    def _extend(self, name: str, grant: Grant, ttl: float | None, *, bound: float) -> Grant | None:
        question = self._extension(name, grant, ttl)
        return self._run(question, partial(extended, grant, ttl), grant.key)

    def _extend_many(self, named: Sequence[tuple[str, Grant]]) -> list[Grant | Unknown | None]:
        calls = [self._extension(name, grant, grant.ttl) for name, grant in named]
        answers = self.store.ask_all(calls)
        failed = [each for each in answers if isinstance(each, LockError)]
        if len(failed) == len(answers):
            raise failed[0]
        found: list[Grant | Unknown | None] = []
        for (_name, grant), call, answer in zip(named, calls, answers, strict=True):
            # If a server of a cluster fails, or a record is spoiled, the other leases are renewed.
            with suppress(LockError):
                found.append(_read(partial(extended, grant, grant.ttl), answered(answer), call))
                continue
            found.append(UNKNOWN)
        return found

    def _extension(self, name: str, grant: Grant, ttl: float | None) -> Call:
        arguments = (grant.token, _number(ttl), _GRACE, self._channel)
        indexes = [self._listing, self._token(grant.token)]
        return Call(script("extend"), self._kept_at(name), arguments, indexes)

    def _release(self, name: str, grant: Grant, held: float | None, *, bound: float) -> bool:
        def read(answer: str) -> bool:
            if answer == "wanted":
                self.queues.note_wanted(name)
            elif answer != "released":
                extra = log_fields("release_failed", backend=self.alias, key=grant.key)
                logger.debug("%r cannot be released: %s", grant.key, answer, extra=extra)
                return False
            return True

        arguments = (grant.token, self._channel, *([] if held is None else [repr(held)]))
        indexes = [self._listing, self._token(grant.token)]
        question = Call(script("release"), self._kept_at(name), arguments, indexes)
        return self._run(question, read, grant.key)

    def _read(self, name: str) -> Record | None:
        return self._run(self._reading(self._at("lock", name), self._at("shared", name)), held)

    def _sharing(self, name: str) -> Sequence[Record]:
        return self._run(Call(script("sharing"), [self._at("shared", name)], ()), sharing)

    def _read_many(self, names: Sequence[str]) -> Sequence[Record | None]:
        calls = [self._reading(self._at("lock", name), self._at("shared", name)) for name in names]
        answers = zip(self.store.ask_all(calls), calls, strict=True)
        return [_read(held, answered(answer), call) for answer, call in answers]

    def _read_token(self, token: str) -> Record | None:
        lock = self.store.command("GET", self._token(token))
        record = None if lock is None else self._run(self._reading(text(lock)), held)
        # The index may be a moment older than the record.
        if record is None or record.token != token or record.is_settled:
            return None
        return record

    def _reading(self, *keys: str) -> Call:
        return Call(script("read"), keys, ("1" if self.cleanup_on_read else "",))

    def _list(
        self, prefix: str, cursor: str | None, *, host: str | None, task_id: str | None, limit: int
    ) -> Page:
        found: list[Record] = []
        spoiled: list[Unreadable] = []
        pattern = _ANY_TAG + escaped(prefix) + "*"
        seen: set[str] = set()
        start = self._at("lock", "")
        walk = self.store.walk(start, pattern, cursor, lambda: limit - len(found), self._listing)
        for line, walked in walk:
            # A server that shrinks its hash table meanwhile may return some names again.
            chunk = [each for each in walked if each[0] not in seen]
            seen.update(name for name, _place in chunk)
            if host is not None or task_id is not None:
                locks = [self._at("lock", name) for name, _place in chunk]
                fits = self.store.held_by(line, locks, host, task_id)
                chunk = list(compress(chunk, fits))
            records = self.records_on(line, [name for name, _place in chunk])
            for record, (_name, place) in zip(records, chunk, strict=True):
                if isinstance(record, Unreadable):
                    spoiled.append(record)
                elif record is not None and record.holder.is_one(host, task_id):
                    if len(found) == limit:
                        return _page(found, place, spoiled)
                    found.append(record)
        return _page(found, None, spoiled)

    def records_on(
        self, line: ThreadLines, names: Sequence[str]
    ) -> list[Record | Unreadable | None]:
        """Return the records of these locks on one server, in order; None: not held."""
        again = lambda lock: self._run(self._reading(lock), held)  # noqa: E731
        return self.store.live_records(line, [self._at("lock", name) for name in names], again)

    def _force_release(
        self, name: str, key: str, fence: int | None, *, bound: float
    ) -> Record | None:
        def read(answer: str) -> Record | None:
            if answer == "overflow":
                raise used_up(key)
            return held(answer)

        whole = whole_name(name)
        keys = [self._at("lock", name), self._at("fence", whole), self._at("shared", whole)]
        arguments = (_FENCE_MAX, self._channel, _number(fence))
        question = Call(script("force_release"), keys, arguments, [self._listing])
        record = self._run(question, read, key)
        if record is not None:
            # The index of a token that the script did not know. A stale entry does no harm, because
            # readers compare the token in the record.
            with suppress(LockError):
                self.store.command("DEL", self._token(record.token))
        return record

    def _request_stop(
        self, name: str, within: float | None, token: str | None, fence: int | None, *, bound: float
    ) -> Record | None:
        keys = [self._at("lock", name), *([] if token is None else [self._token(token)])]
        arguments = (_number(within), token or "", self._channel, _number(fence))
        return self._run(Call(script("request_stop"), keys[:1], arguments, keys[1:]), held)

    def _pause(self, name: str, key: str, until: datetime, by: str | None, *, bound: float) -> None:
        arguments = (str(to_microseconds(until)), by or "")
        self._run(Call(script("pause"), [self._at("pause", name)], arguments), str, key)

    def _resume(self, name: str, *, bound: float) -> bool:
        question = Call(script("resume"), [self._at("pause", name)], (self._channel,))
        return self._run(question, str) == "resumed"

    def _time(self) -> datetime:
        # In a cluster, the clock of the server that would have this key.
        question = Call(script("clock"), [self._at("lock", self._name("clock"))], ())
        return self._run(question, lambda answer: from_microseconds(int(answer)))

    def _clocks(self) -> Mapping[str, datetime]:
        told = self.store.of_each_server("TIME")
        return {
            name: datetime.fromtimestamp(int(seconds), UTC).replace(microsecond=int(microseconds))
            for name, (seconds, microseconds) in told.items()
        }

    def _counter(self, name: str) -> Counter | None:
        return self._run(self._counting(name), counted)

    def _counting(self, name: str) -> Call:
        return Call(script("counter"), [self._at("fence", name), self._at("pause", name)], ())

    def _fences_of(self, names: Sequence[str]) -> Sequence[int | None]:
        answers = self.store.ask_all(list(map(self._counting, names)))
        return [
            None if isinstance(each, LockError) else (counted(each) or Counter(0)).fence
            for each in answers
        ]

    def _note(self, name: str, fence: int, seconds: float) -> None:
        milliseconds = str(max(1, math.ceil(seconds * 1000)))
        place = self._at("note", self._name(name))
        self.store.command("SET", place, str(fence), "PX", milliseconds)

    def _noted(self, name: str) -> int | None:
        fence = self.store.command("GET", self._at("note", self._name(name)))
        return None if fence is None else int(fence)

    def data_mark(self) -> tuple[int, datetime] | None:
        """Return the mark of this data, and when it was set; None: there is none, or it was lost.

        In a cluster, one server has the mark.

        Raises:
            LockError: The store is unavailable, or another program has changed the mark.
        """
        found = self.store.command("GET", self._data_mark_at)
        try:
            mark, _, at = ("" if found is None else text(found)).partition(" ")
            return None if found is None else (int(mark), from_microseconds(int(at)))
        except SPOILED as error:
            raise LockError(
                f"The mark {self._data_mark_at!r} cannot be read: {error!r}."
            ) from error

    def mark_data(self) -> tuple[int, datetime]:
        """Mark this data unless it is marked; return the mark, and when it was set."""
        while (found := self.data_mark()) is None:
            mark = f"{1 + secrets.randbelow(FENCE_MAX)} {to_microseconds(self._time())}"
            self.store.command("SET", self._data_mark_at, mark, "NX")
        return found

    @property
    def _data_mark_at(self) -> str:
        return self._at("data-mark", self._name("data-mark"))

    # Waiters

    def _note_waiter(
        self, name: str, holder: Holder, seconds: float, note: str | None
    ) -> str | None:
        # With a random part, because one holder may wait twice.
        who = f"{int(self.is_listening)} {secrets.token_hex(8)} {json.dumps(holder.as_json())}"
        arguments = (note or "", repr(seconds), who)
        keys = [self._at("waiters", name)]
        return self.store.ask(Call(script("note_waiter"), keys, arguments, [self._listing]))

    def _open_door(self, name: str) -> None:
        keys = [self._at("lock", name), self._at("shared", name)]
        self.store.ask(Call(script("open_door"), keys, (self._channel,)))

    def _drop_waiter(self, name: str, note: str) -> None:
        keys = [self._at("waiters", name)]
        self.store.ask(Call(script("drop_waiter"), keys, (note,), [self._listing]))

    def _waiters(self, name: str) -> Sequence[Waiting]:
        keys = [self._at("waiters", name)]
        return waiting(self.store.ask(Call(script("waiters"), keys, (str(MOST_SHOWN),))))

    def _count_waiters(self, names: Sequence[str]) -> Sequence[Waits]:
        counting = script("count_waiters")
        calls = [Call(counting, [self._at("waiters", name)], ()) for name in names]
        return [Waits(*map(int, answered(each).split())) for each in self.store.ask_all(calls)]

    # Counts, fences and forks

    def _counts(self) -> Counts:
        return count_keys(self)

    def _states(self, soon: float) -> tuple[States, Strain]:
        return sampled_states(self, soon)

    def _raise_fences(
        self, to: int | None, name: str | None, key: str | None, *, cursor: str | None, limit: int
    ) -> Raised:
        if name is not None:
            return self._raised(to, [name], is_page=False)
        left: list[str] = []
        raised, todo = 0, limit
        walk = self.store.walk(self._at("fence", ""), _ANY_TAG + "*", cursor, lambda: todo)
        for _line, chunk in walk:
            part = chunk[:todo]
            if part:
                done = self._raised(to, [name for name, _place in part])
                raised += done.raised
                left += done.left
                todo -= len(part)
            if len(part) < len(chunk):
                return Raised(raised, tuple(left), chunk[len(part)][1])
        return Raised(raised, tuple(left))

    def _raised(self, to: int | None, names: Sequence[str], *, is_page: bool = True) -> Raised:
        roles, arguments = ("lock", "fence", "shared"), (_number(to),)
        outcomes = self.store.ask_all(
            [
                Call(script("raise_fence"), [self._at(role, name) for role in roles], arguments)
                for name in names
            ]
        )
        # On a page, a spoiled counter is skipped, and the others are raised.
        fails = BackendUnavailable if is_page else LockError
        for outcome in outcomes:
            if isinstance(outcome, fails):
                raise outcome
        kept = (each not in ("raised", "enough") for each in outcomes)
        left = tuple(name[len(_ANY_TAG) :] for name in compress(names, kept))
        return Raised(outcomes.count("raised"), left)

    def _begin_in_child(self) -> None:
        super()._begin_in_child()
        self.store.begin_in_child()

    def _keep_no_connections(self) -> None:
        self.store.keep_none()

    def _run(self, question: Call, read: Callable[[str], T], key: str | None = None) -> T:
        return _read(read, self.store.ask(question, key), question)

    # Names

    def _name(self, key: str) -> str:
        # With a hash tag of our own, because a cluster would use braces in the key as one.
        return _tagged(self._prefix, key)

    def _kept_at(self, name: str) -> list[str]:
        """Return the name of a lease, and with a shared key that of its holder's place."""
        whole = whole_name(name)
        lock = self._at("lock", name)
        return [lock] if whole == name else [lock, self._at("shared", whole)]

    def _at(self, role: str, name: str) -> str:
        return f"{self._prefix}{role}:{name}"

    def _token(self, token: str) -> str:
        # Secret as well, because the name of the index contains the token.
        return Token(f"{self._prefix}token:{token}")


def _page(found: Sequence[Record], cursor: str | None, spoiled: Sequence[Unreadable]) -> Page:
    # Sorted, because they come in the order of their hashes.
    return Page(tuple(sorted(found, key=lambda each: each.key)), cursor, tuple(spoiled))


def _granted_alone(attempt: Attempt, answer: str) -> Grant | Contended | None:
    """Read the answer to an exclusive acquire; None: the key is shared, or was."""
    return None if answer == "shared" else granted(attempt, answer)


@lru_cache(maxsize=1024)  # A key is named again when it is released.
def _tagged(prefix: str, key: str) -> str:
    return f"{{{key_hash(prefix + key)}}}:{key}"


def _read(read: Callable[[str], T], answer: str, question: Call) -> T:
    """Read an answer; `LockError`: it is about a spoiled record."""
    try:
        return read(answer)
    except LockError:
        raise
    except SPOILED as error:
        raise unreadable(question.keys[0], error).error from error


def _number(value: float | None) -> str:
    return "" if value is None else str(value)
