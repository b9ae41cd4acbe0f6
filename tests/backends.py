"""The registry of lock backends: the contract suite runs on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Store = Literal["memory", "sqlite", "postgresql", "mysql"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A backend that the contract suite runs on.

    Attributes:
        alias: Its name in the `DISTLOCK` of `tests.settings`.
        path: The import path of its class.
        store: What keeps its records.
        using: The alias of the store's database; "": it has none.
    """

    alias: str
    path: str
    store: Store
    using: str = ""


MEMORY = "django_distlock.backends.memory.MemoryBackend"
DATABASE = "django_distlock.backends.database.DatabaseBackend"

#: A new backend is a line here, and an alias in `tests.settings`.
BACKENDS: Mapping[str, Registered] = {
    each.alias: each
    for each in (
        Registered(alias="memory", path=MEMORY, store="memory"),
        Registered(alias="sqlite", path=DATABASE, store="sqlite", using="sqlite"),
        Registered(alias="postgres", path=DATABASE, store="postgresql", using="default"),
        Registered(alias="postgres_orm", path=DATABASE, store="postgresql", using="default"),
        Registered(alias="mariadb", path=DATABASE, store="mysql", using="mariadb"),
    )
}
