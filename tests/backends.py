"""The registry of lock backends: the contract suite runs on each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Store = Literal["memory", "sqlite", "postgresql", "mysql", "redis", "redis_cluster", "session"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A backend that the contract suite runs on.

    Attributes:
        alias: Its name in the `DISTLOCK` of `tests.settings`.
        path: The import path of its class.
        store: What keeps its records.
        using: The alias of the store's database; "": it has none.
        follows_clock: Whether its fences are never below the clock's, instead of counting from 1.
    """

    alias: str
    path: str
    store: Store
    using: str = ""
    follows_clock: bool = False

    def is_next(self, fence: int, before: int = 0, *, grants: int = 1) -> bool:
        """Say whether a fence is that of so many grants after another one; 0: there was none."""
        if self.follows_clock:
            return fence >= before + grants
        return fence == before + grants

    def are_next(self, fences: Sequence[int], before: int = 0) -> bool:
        """Say whether fences are those of grants in a row after another one; 0: there was none."""
        return all(map(self.is_next, fences, [before, *fences]))

    def ordered(self, keys: list[str]) -> list[str]:
        """Return what was listed, made to one order, and once each, where the store has no order.

        There, what is held may come twice while others come and go.
        """
        return sorted(set(keys)) if self.store in ("redis", "redis_cluster") else keys


MEMORY = "django_distlock.backends.memory.MemoryBackend"
DATABASE = "django_distlock.backends.database.DatabaseBackend"
REDIS = "django_distlock.backends.redis.RedisBackend"
ADVISORY = "django_distlock.backends.advisory.AdvisoryBackend"

#: A new backend is a line here, and an alias in `tests.settings`.
BACKENDS: Mapping[str, Registered] = {
    each.alias: each
    for each in (
        Registered(alias="memory", path=MEMORY, store="memory"),
        Registered(alias="sqlite", path=DATABASE, store="sqlite", using="sqlite"),
        Registered(alias="sqlite_orm", path=DATABASE, store="sqlite", using="sqlite"),
        Registered(alias="postgres", path=DATABASE, store="postgresql", using="default"),
        Registered(alias="postgres_orm", path=DATABASE, store="postgresql", using="default"),
        Registered(alias="mariadb", path=DATABASE, store="mysql", using="mariadb"),
        Registered(alias="mariadb_orm", path=DATABASE, store="mysql", using="mariadb"),
        Registered(alias="redis", path=REDIS, store="redis", follows_clock=True),
        Registered(alias="redis_cluster", path=REDIS, store="redis_cluster", follows_clock=True),
        Registered(
            alias="advisory", path=ADVISORY, store="session", using="default", follows_clock=True
        ),
    )
}
