"""What is measured: one generator for each candidate, which gives its subjects while it lives.

Each is asked at up to three levels: `backend` is one attempt at the narrow waist, `lock` is
`acquire()` and `release()` of the public API, `block` is `with distlock(key):`. The functions of
PostgreSQL are called past all of it too, in the ways in which the floor is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import cycle
from typing import Any

from django.db import connections

from django_distlock import distlock, lock_backends
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.keys import new_token
from django_distlock.core.records import Contended, Grant
from django_distlock.functions import ServerFunctions
from django_distlock.host import current_holder
from django_distlock.leases import Lease

from . import floor
from .databases import hold
from .race import Candidate, Unavailable
from .timing import Subject

#: Keys that are taken in turn: each has a fence counter after the warm-up.
KEYS = [f"invoice:{number}" for number in range(100)]
HOT = "invoice:hot"
TTL = 30.0


class Waist:
    """The operations of one backend, with what they have to remember between two steps."""

    def __init__(self, backend: BaseLockBackend, keys: Sequence[str]):
        self._backend = backend
        self._keys = cycle(keys)
        self._holder = current_holder()
        self.grant: Grant | None = None

    def acquire(self) -> None:
        """Take the next key."""
        answer = self._backend.acquire(next(self._keys), new_token(), TTL, self._holder)
        if not isinstance(answer, Grant):
            raise RuntimeError(f"{self._backend.alias}: not granted: {answer}")
        self.grant = answer

    def extend(self) -> None:
        """Renew what is held."""
        assert self.grant
        if not isinstance(self._backend.extend(self.grant, TTL), Grant):
            raise RuntimeError(f"{self._backend.alias}: {self.grant.key!r} was not extended")

    def lose(self) -> None:
        """Try for the key that somebody else holds."""
        answer = self._backend.acquire(HOT, new_token(), TTL, self._holder)
        if not isinstance(answer, Contended) or answer.busy:
            raise RuntimeError(f"{self._backend.alias}: not contended: {answer}")

    def release(self) -> None:
        """Give back what is held."""
        assert self.grant
        if self._backend.release(self.grant) is not True:
            raise RuntimeError(f"{self._backend.alias}: {self.grant.key!r} was not released")


class BareFunctions(ServerFunctions):
    """The server functions, called past Django's cursor."""

    def __init__(self, using: str, execute: floor.Execute):
        super().__init__(using, '"{}"'.format)
        self._execute = execute

    def _call(self, operation: str, arguments: list[Any]) -> str:
        rows: Any = self._execute(self._statement(operation), arguments)
        return str(rows[0][0])


class Calls:
    """The server functions themselves: no checks of arguments, no choice of a connection.

    Args:
        prefix: What storage keys start with.
    """

    def __init__(self, functions: ServerFunctions, prefix: str, keys: Sequence[str]):
        self._functions = functions
        self._prefix = prefix
        self._keys = cycle(keys)
        self._holder = current_holder()
        self.grant: Grant | None = None

    def acquire(self) -> None:
        """Take the next key."""
        if not self.attempt():
            raise RuntimeError("not granted")

    def attempt(self) -> bool:
        """Try for the next key."""
        answer = self._ask(next(self._keys))
        self.grant = answer if isinstance(answer, Grant) else None
        return self.grant is not None

    def lose(self) -> None:
        """Try for the key that somebody else holds."""
        answer = self._ask(HOT)
        if not isinstance(answer, Contended) or answer.busy:
            raise RuntimeError(f"not contended: {answer}")

    def release(self) -> None:
        """Give back what is held."""
        assert self.grant
        name = f"{self._prefix}:{self.grant.key}"
        if self._functions.release(name, self.grant, bound=1.0) != "released":
            raise RuntimeError(f"{self.grant.key!r} was not released")

    def _ask(self, key: str) -> Grant | Contended:
        return self._functions.acquire(
            f"{self._prefix}:{key}", key, new_token(), TTL, self._holder,
            wanted=False, replace=None, bound=1.0,
        )  # fmt: skip


class PublicApi:
    """The same through `Lock` and `Lease`."""

    def __init__(self, alias: str, keys: Sequence[str]):
        self._locks = cycle([distlock(key, wait=0, ttl=TTL, backend=alias) for key in keys])
        self._hot = distlock(HOT, wait=0, ttl=TTL, backend=alias)
        self.lease: Lease | None = None

    def acquire(self) -> None:
        """Take the next key."""
        self.lease = next(self._locks).acquire()

    def extend(self) -> None:
        """Renew what is held."""
        assert self.lease
        self.lease.extend()

    def lose(self) -> None:
        """Try for the key that somebody else holds."""
        if self._hot.try_acquire() is not None:
            raise RuntimeError(f"{HOT!r} was not contended")

    def release(self) -> None:
        """Give back what is held."""
        assert self.lease
        if not self.lease.release():
            raise RuntimeError(f"{self.lease.key!r} was not released")

    def block(self) -> None:
        """Hold the next key around nothing."""
        with next(self._locks):
            pass


def locks_on(name: str, alias: str) -> Iterator[list[Subject]]:
    """Give the subjects of a lock backend."""
    hot, backend = hold(alias, HOT), lock_backends[alias]
    # Held throughout, to be extended; no pair's key.
    waist, api = Waist(backend, ["invoice:held-1"]), PublicApi(alias, ["invoice:held-2"])
    waist.acquire()
    api.acquire()
    pairs, public = Waist(backend, KEYS), PublicApi(alias, KEYS)
    yield [
        Subject(
            f"{name}/backend", {"acquire": pairs.acquire, "release": pairs.release}, total="pair"
        ),
        Subject(f"{name}/backend", {"extend": waist.extend}),
        Subject(f"{name}/backend", {"lose": waist.lose}),
        Subject(
            f"{name}/lock", {"acquire": public.acquire, "release": public.release}, total="pair"
        ),
        Subject(f"{name}/lock", {"extend": api.extend}),
        Subject(f"{name}/lock", {"lose": api.lose}),
        Subject(f"{name}/block", {"pair": public.block}),
    ]
    api.release()
    waist.release()
    backend.release(hot)


def functions() -> Iterator[list[Subject]]:
    """Give the backend on server functions, and the functions over the floor's own ways."""
    prefix = lock_backends["functions"].key_prefix
    with ExitStack() as stack:
        subjects = stack.enter_context(contextmanager(locks_on)("functions", "functions"))
        for way in ("driver", "prepared"):
            execute = stack.enter_context(floor.WAYS["postgresql"][way]("default"))
            calls = Calls(BareFunctions("default", execute), prefix, KEYS)
            subjects += [
                Subject(
                    f"functions/{way}", {"acquire": calls.acquire, "release": calls.release},
                    total="pair",
                ),
                Subject(f"functions/{way}", {"lose": calls.lose}),
            ]  # fmt: skip
        yield subjects


def pglock() -> Iterator[list[Subject]]:
    """Give django-pglock's: a session's advisory lock, without expiry, fence and durability."""
    try:
        module: Any = import_module("pglock")
    except ImportError:
        raise Unavailable("pip install django-pglock") from None
    turns = cycle(KEYS)

    def block() -> None:
        with module.advisory(next(turns), using="default"):
            pass

    def lose() -> None:
        with module.advisory(HOT, using="default", timeout=0) as acquired:
            if acquired:
                raise RuntimeError(f"{HOT!r} was not contended")

    with held_elsewhere(module.advisory(HOT).int_lock_id):
        yield [
            Subject("pglock/block", {"pair": block}),
            Subject("pglock/block", {"lose": lose}),
        ]


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
    """Give the backend on MariaDB, which runs ORM code."""
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
    "floor": lambda: floor_of("default", "functions"),
    "sqlite": lambda: locks_on("sqlite", "sqlite"),
    "sqlite-floor": lambda: floor_of("sqlite", "sqlite"),
    "mariadb": mariadb,
    "mariadb-floor": mariadb_floor,
    "memory": lambda: locks_on("memory", "memory"),
}
