"""The system checks of this package, as part of a diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from django.apps import apps
from django.core import checks
from django.core.checks.registry import registry

from ...backends.base import BaseLockBackend
from ...backends.database import DatabaseBackend
from ...backends.tables import FenceTable
from ...checks.configured import Subject, is_redis
from ...checks.routers import written_to
from ...core import threads
from ...database.connections import close_here
from .findings import Mark, Notes, level_of

#: Checks that report an unavailable store, which the diagnosis has already reported.
_SILENCE: Final = ("distlock.W102", "distlock.W205", "distlock.W302")

#: What checks look at, by kind of backend. The rest is about settings.
_TABLES: Final = {
    "tables": "W103 W104",
    "migrations": "W106",
    "functions and triggers": "W107",
    "indexes": "W111",
    "replica": "E105 W115",
    "persistence": "W105 W108",
    "database": "E103 W101 W110",
}
#: What is looked at only after the migrations are applied.
_MIGRATED: Final = ("migrations", "functions and triggers", "indexes")
_SESSIONS: Final = {"pooling": "E301 W301", "sessions": "W303"}
_REDIS: Final = {
    "replica": "W204",
    "eviction": "W202",
    "persistence": "W203",
    "cluster": "E201",
    "cache": "W201",
}


def begun(work: Callable[[], None], name: str) -> Future[None]:
    """Begin work that may hang, in its own thread with its own connections."""

    def work_and_close() -> None:
        try:
            work()
        finally:
            close_here()

    return threads.begun(work_and_close, f"distlock-doctor-{name}")


def run(
    project: Notes,
    notes: Mapping[str, Notes],
    stores: Sequence[BaseLockBackend],
    *,
    everything: bool,
    patience: float,
) -> None:
    """Run the system checks of this package, those of deployment too, and note their messages.

    Args:
        notes: The notes about each backend, to add to. Its store was queried before.
        everything: Whether to query all databases that the project writes to.
    """
    databases = _databases(notes, stores, everything=everything)
    of: dict[str | None, list[checks.CheckMessage]] = {alias: [] for alias in (None, *notes)}
    for message in _said(project, databases, patience):
        named = message.obj.aliases if isinstance(message.obj, Subject) else ()
        aliases = [alias for alias in named if alias in notes]
        if named and not aliases:
            continue  # It is about other backends only.
        if message.id in _SILENCE and any(notes[alias].is_silent for alias in aliases):
            continue
        if named:
            message.obj = Subject(tuple(aliases))
        for about in aliases or (None,):
            of[about].append(message)
        (notes[aliases[0]] if len(aliases) == 1 else project).findings.append(message)
    _note(project, "settings", of[None])
    for store in stores:
        _note_areas(notes[store.alias], store, of[store.alias])


def _said(project: Notes, databases: list[str], patience: float) -> list[checks.CheckMessage]:
    """Return what our checks report in time. Checks of others may raise if a server is down."""
    ours = {
        getattr(check, "__name__", "check"): check
        for check in registry.get_checks(include_deployment_checks=True)
        if check.__module__.startswith("django_distlock.")
    }
    said: list[list[checks.CheckMessage]] = []
    try:
        work = partial(_ask, ours, said, project, databases)
        begun(work, "checks").result(max(0.0, patience))
    except TimeoutError:
        rest = ", ".join(list(ours)[len(said) :])
        text = f"the system checks have not ended within {patience:.0f} s. No answer from:"
        hint = f"Check which of these databases hangs: {', '.join(databases)}."
        project.find("D013", "system checks", f"{text} {rest}", hint)
    return [message for each in list(said) for message in each]


def _ask(
    ours: Mapping[str, Callable[..., Iterable[checks.CheckMessage]]],
    said: list[list[checks.CheckMessage]],
    project: Notes,
    databases: list[str],
) -> None:
    for name, check in ours.items():
        found: list[checks.CheckMessage] = []
        try:
            found += check(app_configs=None, databases=databases)
        except Exception as error:  # noqa: BLE001 - one check's trouble stops no other
            text = f"the check {name} failed: {type(error).__name__}: {error}"
            hint = "Run manage.py check to see where."
            project.find("D013", name.replace("_", " "), text, hint)
        said.append(found)


def _note_areas(
    notes: Notes, store: BaseLockBackend, messages: Sequence[checks.CheckMessage]
) -> None:
    if notes.is_silent or any(each.id in _SILENCE for each in messages):
        return  # Nothing is known of this store.
    areas: dict[str, str] = {}
    if isinstance(store, FenceTable):
        areas = _TABLES if isinstance(store, DatabaseBackend) else _TABLES | _SESSIONS
    elif is_redis(store):
        areas = _REDIS
    rest = list(messages)
    for what, ids in areas.items():
        there = [each for each in messages if _number(each) in ids.split()]
        rest = [each for each in rest if each not in there]
        if what in _MIGRATED and not there and {*map(_number, messages)} & {"W103", "W106"}:
            notes.skip(what, "not before the migrations are applied")
        else:
            _note(notes, what, there)
    _note(notes, "settings", rest)


def _number(message: checks.CheckMessage) -> str:
    return str(message.id).removeprefix("distlock.")


def _note(notes: Notes, what: str, messages: Sequence[checks.CheckMessage]) -> None:
    """Note the result of a look, by the messages about it."""
    loud = [each for each in messages if not each.is_silenced()]
    if loud:
        worst = max(loud, key=lambda each: each.level)
        ids = ", ".join(sorted({str(each.id) for each in loud}))
        notes.look(what, ids, Mark(level_of(worst)))
    else:
        notes.look(what, ", ".join(f"{each.id} is silenced" for each in messages))


def _databases(
    notes: Mapping[str, Notes], stores: Sequence[BaseLockBackend], *, everything: bool
) -> list[str]:
    """Return the databases to query, without those that have already not answered."""
    tables = [store for store in stores if store.using]
    wanted = {store.using for store in tables}
    if everything:
        # Rows that refuse stale fences may be in any database.
        wanted.update(filter(None, map(written_to, apps.get_models())))
    return sorted(wanted - {store.using for store in tables if notes[store.alias].is_silent})
