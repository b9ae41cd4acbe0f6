"""The system checks of this package, as part of a diagnosis."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from django.apps import apps
from django.core import checks
from django.core.checks.registry import registry
from django.db import router

from ...backends.base import BaseLockBackend
from ...backends.database import DatabaseBackend
from ...backends.tables import FenceTable
from .findings import Finding, Level, Look, Mark, Notes, address
from .kinds import is_redis
from .patience import begun

#: What a store that does not answer is told of twice.
_SILENCE: Final = ("distlock.W102", "distlock.W205", "distlock.W302")

#: How messages name a backend.
_ALIAS = re.compile(r"DISTLOCK\[('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")\]")

#: What checks look at, by kind of backend. The rest is about settings.
_TABLES: Final = {
    "tables": ("W103", "W104"),
    "migrations": ("W106",),
    "functions and triggers": ("W107",),
    "indexes": ("W111",),
    "replica": ("E102", "E105"),
    "persistence": ("W105", "W108"),
    "database": ("E103", "W101", "W110"),
}
#: What is looked at once the migrations are applied.
_MIGRATED: Final = ("migrations", "functions and triggers", "indexes")
_SESSIONS: Final = {"pooling": ("E301", "W301"), "sessions": ("W303",)}
_REDIS: Final = {
    "replica": ("W204",),
    "eviction": ("W202",),
    "persistence": ("W203",),
    "cluster": ("E201",),
    "cache": ("W201",),
}


def run(
    project: Notes,
    notes: Mapping[str, Notes],
    stores: Sequence[BaseLockBackend],
    *,
    everything: bool,
    patience: float,
) -> None:
    """Run the system checks of this package, those of deployment too, and note what they say.

    Args:
        project: What they say of no backend alone.
        notes: What they say of each backend. Its store was asked before.
        stores: The backends that are made, and share their locks.
        everything: Whether to look into all databases that the project writes to.
        patience: Seconds that the checks get together.
    """
    databases = _databases(notes, stores, everything=everything)
    names = _ours()
    found: list[list[checks.CheckMessage]] = []
    try:
        work = partial(_ask, names, found, project, databases)
        begun(work, "distlock-doctor-checks").result(max(0.0, patience))
    except TimeoutError:
        rest = ", ".join(list(names)[len(found) :])
        text = f"the system checks have not ended within {patience:.0f} s; without an answer:"
        hint = f"Look which of these databases hangs: {', '.join(databases)}."
        project.find("D013", "system checks", f"{text} {rest}", hint)
    messages = [message for each in list(found) for message in each]
    of_aliases: dict[str, list[checks.CheckMessage]] = {alias: [] for alias in notes}
    of_project: list[checks.CheckMessage] = []
    for message in messages:
        named = _ALIAS.search(message.msg)
        alias = None if named is None else ast.literal_eval(named[1])
        about = _about(message.msg, stores) if alias is None else [alias]
        if about and not set(about) & set(notes):
            continue  # Nobody asked about it.
        if message.id in _SILENCE and any(notes[each].is_silent for each in about):
            continue
        for each in about:
            of_aliases[each].append(message)
        if not about:
            of_project.append(message)
        _add(notes[about[0]] if len(about) == 1 else project, message)
    project.looks.insert(0, _looked("settings", of_project, None))
    for store in stores:
        _note_areas(notes[store.alias], store, of_aliases[store.alias])


def _about(text: str, stores: Sequence[BaseLockBackend]) -> list[str]:
    """Return the aliases whose database a message names."""
    tables = [store for store in stores if isinstance(store, FenceTable)]
    return [store.alias for store in tables if repr(store.using) in text]


def _ours() -> dict[str, Callable[..., Iterable[checks.CheckMessage]]]:
    """Return our checks by name, and no others: they may raise where a server is down."""
    every = registry.get_checks(include_deployment_checks=True)
    return {
        getattr(check, "__name__", "check"): check
        for check in every
        if check.__module__.startswith("django_distlock.")
    }


def _ask(
    ours: Mapping[str, Callable[..., Iterable[checks.CheckMessage]]],
    found: list[list[checks.CheckMessage]],
    project: Notes,
    databases: list[str],
) -> None:
    """Add to `found` what each check says, one by one."""
    for name, check in ours.items():
        said: list[checks.CheckMessage] = []
        try:
            said += check(app_configs=None, databases=databases)
        except Exception as error:  # noqa: BLE001 - one check's trouble stops no other
            text = f"the check {name} failed: {type(error).__name__}: {error}"
            hint = "Run manage.py check, which shows where."
            project.find("D013", name.replace("_", " "), text, hint)
        found.append(said)


def _add(notes: Notes, message: checks.CheckMessage) -> None:
    hint = message.hint or ""
    finding = Finding(
        id=str(message.id),
        level=_level(message),
        backend=notes.backend,
        message=message.msg,
        hint=hint,
        address=address(str(message.id), hint),
    )
    notes.findings.append(finding)


def _level(message: checks.CheckMessage) -> Level:
    if message.level >= checks.ERROR:
        return Level.ERROR
    return Level.WARNING if message.level >= checks.WARNING else Level.INFO


def _note_areas(
    notes: Notes, store: BaseLockBackend, messages: Sequence[checks.CheckMessage]
) -> None:
    if notes.is_silent or any(each.id in _SILENCE for each in messages):
        return  # Nothing is known of it.
    areas: dict[str, tuple[str, ...]] = {}
    if isinstance(store, FenceTable):
        areas |= _TABLES
        if not isinstance(store, DatabaseBackend):
            areas |= _SESSIONS
    elif is_redis(store):
        areas |= _REDIS
    numbers = {str(each.id).removeprefix("distlock.") for each in messages}
    for what, ids in areas.items():
        there = [each for each in messages if str(each.id).removeprefix("distlock.") in ids]
        if what in _MIGRATED and not there and numbers & {"W103", "W106"}:
            notes.look(what, "not before the migrations are applied", skipped=True)
        else:
            notes.looks.append(_looked(what, there, notes.backend))
    known = {each for ids in areas.values() for each in ids}
    rest = [each for each in messages if str(each.id).removeprefix("distlock.") not in known]
    notes.looks.append(_looked("settings", rest, notes.backend))


def _looked(what: str, messages: Sequence[checks.CheckMessage], backend: str | None) -> Look:
    """Return what came of a look at what these messages are about."""
    loud = [each for each in messages if not each.is_silenced()]
    if not loud:
        text = ", ".join(f"{each.id} is silenced" for each in messages)
        return Look(what=what, mark=Mark.OK, text=text, backend=backend)
    worst = max(loud, key=lambda each: each.level)
    mark = Mark.ERROR if _level(worst) is Level.ERROR else Mark.WARNING
    text = ", ".join(sorted({str(each.id) for each in loud}))
    return Look(what=what, mark=mark, text=text, backend=backend)


def _databases(
    notes: Mapping[str, Notes], stores: Sequence[BaseLockBackend], *, everything: bool
) -> list[str]:
    """Return the databases to look into, without those that are silent anyway."""
    tables = [store for store in stores if isinstance(store, FenceTable)]
    wanted = {store.using for store in tables}
    if everything:
        # Rows that refuse stale fences may be anywhere.
        wanted |= {router.db_for_write(model) for model in apps.get_models()}
    return sorted(wanted - {store.using for store in tables if notes[store.alias].is_silent})
