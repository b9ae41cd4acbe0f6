"""`distlock.W110`: whether the routers lead to the database of the locks."""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.db import connections, models, router

from ..backends.tables import FenceTable
from ..core.pages import page
from ..database.connections import database_file
from ..models import HeldLock
from .configured import Subject, configured, where

_HINT = (
    "Add a router that sends django_distlock to the database of the locks, and allows its"
    f" migrations there: see {page('howto/choose-a-database')}."
)


@checks.register("distlock")
def check_routers(app_configs: Any, **_: Any) -> list[checks.CheckMessage]:
    """W110: routers allow the migrations in the locks' database, and send the models there.

    Several aliases may lead to one database, such as one through a pooler and one around it. If
    the locks are in several databases, a router can name only one of them.
    """
    found: list[checks.CheckMessage] = []
    backends = {each.using: each for each in configured(FenceTable)}
    for using, backend in backends.items():
        if not is_made(HeldLock, using):
            found.append(
                checks.Warning(
                    f"{where(backend)} keeps its locks in {using!r}, but the database routers do"
                    " not allow the migrations of django_distlock there.",
                    hint=_HINT,
                    obj=Subject((backend.alias,)),
                    id="distlock.W110",
                )
            )
    written = written_to(HeldLock)
    is_elsewhere = not any(written in aliases_of(using) for using in backends)
    if backends and written is not None and is_elsewhere:
        found.append(
            checks.Warning(
                f"{', '.join(map(where, backends.values()))} keeps locks in"
                f" {', '.join(map(repr, backends))}, but the routers send the models of"
                f" django_distlock to {written!r}. The admin shows no locks, and events are stored"
                " apart from them.",
                hint=_HINT,
                obj=Subject(tuple(each.alias for each in backends.values())),
                id="distlock.W110",
            )
        )
    return found


def written_to(model: type[models.Model]) -> str | None:
    """Return the database that a model is written to; None: its router needs an instance."""
    try:
        return router.db_for_write(model)
    except Exception:  # noqa: BLE001 - code of the project, such as one that asks for a tenant
        return None


def is_made(model: type[models.Model], using: str) -> bool:
    """Whether `migrate` may make the table of a model in the database of an alias."""
    return any(router.allow_migrate_model(alias, model) for alias in aliases_of(using))


def aliases_of(using: str) -> list[str]:
    """Return the aliases that lead to the same database as this one, according to settings.

    Hosts are not compared: there may be a pooler on the way.
    """
    return [alias for alias in connections if _database(alias) == _database(using)]


def _database(alias: str) -> tuple[str, str]:
    connection = connections[alias]
    if connection.vendor == "sqlite":
        return connection.vendor, database_file(connection)
    return connection.vendor, str(connection.settings_dict["NAME"])
