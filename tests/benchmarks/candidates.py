"""What is measured: one generator for each candidate, which gives its subjects while it lives.

Each is asked at up to three levels: `backend` is one attempt at the narrow waist, `lock` is
`acquire()` and `release()` of the public API, `block` is `with distlock(key):`. The functions of
PostgreSQL are called past all of it too, in the ways in which the floor is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import cycle
from typing import Any

from django.db import connections, transaction

from django_distlock import distlock, lock_backends, transaction_lock
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Attempt, Grant
from django_distlock.database.server_functions import ServerFunctions
from django_distlock.process.host import current_holder

from . import floor
from .databases import ask, hold
from .race import Candidate, Unavailable
from .timing import Subject

#: Keys that are taken in turn: each has a fence counter after the warm-up.
KEYS = [f"invoice:{number}" for number in range(100)]
HOT = "invoice:hot"
TTL = 30.0
#: Keys that one transaction locks.
SEVERAL = 20


class NoLock(RuntimeError):
    """What says that it locked did not."""


class Operations:
    """What is measured of something that locks, and what is held between two steps.

    Args:
        name: Whose operations they are.
        attempt: Tries for a key once; gives what is held, or None.
        release: Gives that back; False: it was not held.
        extend: Renews it; False: it was not held.
        keys: What is taken in turn.
        hot: What somebody else holds.
    """

    def __init__(
        self,
        name: str,
        *,
        attempt: Callable[[str], Any],
        release: Callable[[Any], object],
        extend: Callable[[Any], object] = lambda _held: False,
        keys: Iterable[str],
        hot: Iterable[str] = (HOT,),
    ):
        self._name = name
        self._attempt, self._release, self._extend = attempt, release, extend
        # An iterator has no end, and is not kept.
        self._keys, self._hot = (
            each if isinstance(each, Iterator) else cycle(each) for each in (keys, hot)
        )
        self.held: Any = None

    def attempt(self) -> bool:
        """Try for the next key."""
        self.held = self._attempt(next(self._keys))
        return self.held is not None

    def acquire(self) -> None:
        """Take the next key."""
        if not self.attempt():
            raise NoLock(f"{self._name}: not granted")

    def extend(self) -> None:
        """Renew what is held."""
        if self._extend(self.held) is False:
            raise NoLock(f"{self._name}: not extended")

    def lose(self) -> None:
        """Try for a key that somebody else holds."""
        if self._attempt(next(self._hot)) is not None:
            raise NoLock(f"{self._name}: not contended")

    def release(self) -> None:
        """Give back what is held."""
        if self._release(self.held) is False:
            raise NoLock(f"{self._name}: not released")

    def pairs(self, name: str) -> list[Subject]:
        """Return what is measured beside an extend, which needs a key that is held."""
        steps = {"acquire": self.acquire, "release": self.release}
        return [Subject(name, steps, "pair"), Subject(name, {"lose": self.lose})]


def waist(backend: BaseLockBackend, keys: Iterable[str], hot: Iterable[str] = (HOT,)) -> Operations:
    """Return those of a backend."""
    holder = current_holder()

    def attempt(key: str) -> Grant | None:
        answer = backend.acquire(key, new_token(), TTL, holder)
        return answer if isinstance(answer, Grant) else None

    return Operations(
        backend.alias,
        attempt=attempt,
        release=lambda grant: backend.release(grant) is True,
        extend=lambda grant: isinstance(backend.extend(grant, TTL), Grant),
        keys=keys,
        hot=hot,
    )


def public_api(alias: str, keys: Sequence[str]) -> Operations:
    """Return the same through `Lock` and `Lease`."""
    locks = {key: distlock(key, wait=0, ttl=TTL, backend=alias) for key in (*keys, HOT)}
    return Operations(
        alias,
        attempt=lambda key: locks[key].try_acquire(),
        release=lambda lease: lease.release(),
        extend=lambda lease: lease.extend(),
        keys=keys,
    )


class BareFunctions(ServerFunctions):
    """The server functions, called past Django's cursor."""

    def __init__(self, using: str, execute: floor.Execute):
        super().__init__(using, '"{}"'.format)
        self._execute = execute

    def _call(self, operation: str, arguments: list[Any]) -> str:
        rows: Any = self._execute(self._statement(operation), arguments)
        return str(rows[0][0])


def calls(functions: ServerFunctions, prefix: str, keys: Sequence[str]) -> Operations:
    """Return the server functions themselves: no checks of arguments, no choice of a connection.

    Args:
        prefix: What storage keys start with.
    """
    holder = current_holder()

    def attempt(key: str) -> Grant | None:
        answer = functions.acquire(
            Attempt(f"{prefix}:{key}", key, new_token(), TTL, holder, False, None, 1.0)
        )
        return answer if isinstance(answer, Grant) else None

    def release(grant: Grant) -> bool:
        return functions.release(f"{prefix}:{grant.key}", grant, bound=1.0) == "released"

    return Operations("functions", attempt=attempt, release=release, keys=keys)


def locks_on(name: str, alias: str) -> Iterator[list[Subject]]:
    """Give the subjects of a lock backend."""
    hot, backend = hold(alias, HOT), lock_backends[alias]
    blocks = cycle([distlock(key, wait=0, ttl=TTL, backend=alias) for key in KEYS])

    def block() -> None:
        with next(blocks):
            pass

    # Held throughout, to be extended; no pair's key.
    held, lease = waist(backend, ["invoice:held-1"]), public_api(alias, ["invoice:held-2"])
    held.acquire()
    lease.acquire()
    yield [
        *waist(backend, KEYS).pairs(f"{name}/backend"),
        Subject(f"{name}/backend", {"extend": held.extend}),
        *public_api(alias, KEYS).pairs(f"{name}/lock"),
        Subject(f"{name}/lock", {"extend": lease.extend}),
        Subject(f"{name}/block", {"pair": block}),
    ]
    lease.release()
    held.release()
    backend.release(hot)


def functions() -> Iterator[list[Subject]]:
    """Give the backend on server functions, and the functions over the floor's own ways."""
    prefix = lock_backends["functions"].key_prefix
    with ExitStack() as stack:
        subjects = stack.enter_context(contextmanager(locks_on)("functions", "functions"))
        for way in ("driver", "prepared"):
            execute = stack.enter_context(floor.WAYS["postgresql"][way]("default"))
            made = calls(BareFunctions("default", execute), prefix, KEYS)
            subjects += made.pairs(f"functions/{way}")
        yield subjects


def pglock() -> Iterator[list[Subject]]:
    """Give django-pglock's: a session's advisory lock, without expiry, fence and durability."""
    try:
        module: Any = import_module("pglock")
    except ImportError:
        raise Unavailable("pip install django-pglock") from None

    def of(key: str) -> Any:
        return module.advisory(key, using="default", timeout=0)

    turns, made = cycle(KEYS), {key: of(key) for key in KEYS}

    def attempt(key: str) -> Any:
        lock = made.get(key) or of(key)
        return lock if lock.acquire() else None

    def block() -> None:
        with of(next(turns)) as granted:
            if not granted:
                raise NoLock("pglock: not granted")

    pairs = Operations(
        "pglock", attempt=attempt, release=lambda lock: lock.release() and None, keys=KEYS
    )
    _prove(pairs)
    with held_elsewhere(module.advisory(HOT).int_lock_id):
        yield [*pairs.pairs("pglock/lock"), Subject("pglock/block", {"pair": block})]


def transactions() -> Iterator[list[Subject]]:
    """Give twenty keys of one transaction, beside as many advisory locks in one SELECT."""
    numbers = list(range(SEVERAL))

    def locked() -> None:
        with transaction.atomic():
            transaction_lock(*KEYS[:SEVERAL], backend="functions")

    def advisory() -> None:
        with transaction.atomic(), connections["default"].cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(n) FROM unnest(%s::bigint[]) n", [numbers])

    def nothing() -> None:
        with transaction.atomic(), connections["default"].cursor() as cursor:
            cursor.execute("SELECT 1")

    yield [
        Subject("transaction/django", {"20 keys": locked}),
        Subject("advisory/django", {"20 keys": advisory}),
        Subject("transaction/django", {"no lock": nothing}),
    ]


def _prove(pairs: Operations) -> None:
    """See that a pair takes an advisory lock of the session, and gives it back."""
    held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
    before = ask("default", held)[0][0]
    pairs.acquire()
    if ask("default", held)[0][0] != before + 1:
        raise NoLock("the server knows of no lock")
    pairs.release()
    if ask("default", held)[0][0] != before:
        raise NoLock("it was not given back")


@contextmanager
def held_elsewhere(number: int) -> Iterator[None]:
    """Hold an advisory lock in another session."""
    other = connections["default"].copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s)", [number])
        yield
    finally:
        other.close()


def floor_of(alias: str, backend: str) -> Iterator[list[Subject]]:
    """Give the floor of a database."""
    grant = hold(backend, "floor:hot")
    prefix = lock_backends[backend].key_prefix
    keys = [f"{prefix}:{key}" for key in KEYS]
    yield from floor.subjects(alias, backend, keys, f"{prefix}:floor:hot")
    lock_backends[backend].release(grant)


def mariadb() -> Iterator[list[Subject]]:
    """Give the backend on MariaDB."""
    if "mariadb" not in connections.settings:
        raise Unavailable("apt-get install mariadb-server-core mariadb-client-core")
    yield from locks_on("mariadb", "mariadb")


def mariadb_floor() -> Iterator[list[Subject]]:
    """Give the floor of MariaDB."""
    if "mariadb" not in connections.settings:
        raise Unavailable("no server, as for the backend")
    yield from floor_of("mariadb", "mariadb")


#: Another database joins here, with its lines in `floor` and its comparisons in `latency`.
CANDIDATES: dict[str, Candidate] = {
    "functions": functions,
    "orm": lambda: locks_on("orm", "orm"),
    "pglock": pglock,
    "transactions": transactions,
    "floor": lambda: floor_of("default", "functions"),
    "sqlite": lambda: locks_on("sqlite", "sqlite"),
    "sqlite-floor": lambda: floor_of("sqlite", "sqlite"),
    "mariadb": mariadb,
    "mariadb-floor": mariadb_floor,
    "memory": lambda: locks_on("memory", "memory"),
}
