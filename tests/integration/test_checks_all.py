"""What holds for every system check of ours: no connection unasked, and where to read on."""

from __future__ import annotations

import ast
import re
import socket
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.conf import settings
from django.core.checks.registry import registry
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import override_settings

import django_distlock
from django_distlock.core.pages import DOCS_URL, page
from tests import services
from tests.contract.helpers import Later

ROOT = Path(__file__).parents[2]
PACKAGE = Path(django_distlock.__file__).parent
#: Where hints have their common ends from.
SHARED = Path("django_distlock/checks/configured.py")
#: Whether this thread runs checks.
HERE = threading.local()


# Nobody is asked


def ours(*, deploy: bool) -> list[Callable[..., Any]]:
    """Return our checks: those that always run, and those of `check --deploy`."""
    every = registry.get_checks(include_deployment_checks=deploy)
    return [each for each in every if each.__module__.startswith("django_distlock.")]


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Refuse every way to a server or into a file of SQLite; give what was tried."""
    tried: list[str] = []

    def refused(name: str, connect: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*arguments: Any, **more: Any) -> Any:
            # Threads of other tests may go on connecting.
            if not getattr(HERE, "checks", False):
                return connect(*arguments, **more)
            tried.append(name)
            raise OSError(f"{name} is refused")

        return refusing

    for owner, name in (
        (socket.socket, "connect"),
        (socket.socket, "connect_ex"),
        (socket, "getaddrinfo"),
        # The drivers of databases are written in C.
        (BaseDatabaseWrapper, "connect"),
        (psycopg, "connect"),
        (psycopg.Connection, "connect"),
        (services.mysql_driver(), "connect"),
    ):
        monkeypatch.setattr(owner, name, refused(f"{owner.__name__}.{name}", getattr(owner, name)))
    return tried


def ask(every: list[Callable[..., Any]], databases: list[str] | None) -> set[str]:
    """Run checks, in a thread without connections, over backends that nobody has used yet."""
    said: set[str] = set()

    def run() -> None:
        HERE.checks = True
        for check in every:
            try:
                found = check(app_configs=None, databases=databases)
            except OSError as error:
                said.add(str(error))
            else:
                said.update(str(each.id) for each in found)

    with override_settings(DISTLOCK=settings.DISTLOCK):
        Later(run).result()
    return said


def test_plain_check_asks_nobody(connected: list[str]) -> None:
    """Over every kind of backend, what runs without `--database` and `--deploy` connects nowhere.

    With either, the same refusals stop it: so they would have stopped the others.
    """
    assert len(ours(deploy=False)) >= 11
    said = ask(ours(deploy=False), None)
    assert connected == []
    assert said <= {"distlock.W201", *settings.SILENCED_SYSTEM_CHECKS}
    ask(ours(deploy=False), ["default"])
    assert "BaseDatabaseWrapper.connect" in connected
    connected.clear()
    ask([each for each in ours(deploy=True) if each not in ours(deploy=False)], None)
    assert "BaseDatabaseWrapper.connect" in connected
    assert any(each.startswith("socket.") for each in connected)


# What to do


def hints() -> dict[str, list[tuple[Path, ast.expr | None]]]:
    """Return, by id, in which files the source says something, and with which hint."""
    found: dict[str, list[tuple[Path, ast.expr | None]]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text()
        if 'id="distlock.' not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            given = {each.arg: each.value for each in getattr(node, "keywords", ())}
            named = given.get("id")
            if isinstance(named, ast.Constant) and str(named.value).startswith("distlock."):
                # A message of one line has its address itself.
                hint = given.get("hint") or node.args[0]  # type: ignore[attr-defined]
                found.setdefault(str(named.value), []).append((file.relative_to(ROOT), hint))
    return found


HINTS = hints()


def text_of(file: Path, node: ast.expr | None) -> str:
    """Return a hint as it is written, with the constants of its module put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(file, each) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(file, node.value)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "page":
        return page(text_of(file, node.args[0]))
    if isinstance(node, ast.Name):
        # Read and not imported: who imports what is Celery's registers its checks.
        for place in (file, SHARED):
            if node.id in (constants := constants_of(place)):
                return text_of(place, constants[node.id])
    return "…"


@cache
def constants_of(file: Path) -> dict[str, ast.expr]:
    """Return what a file gives names to."""
    return {
        target.id: node.value
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }


def test_hints_end_with_an_address() -> None:
    """Each ends with a page of the docs, and the page is there."""
    for name in HINTS:
        for file, hint in HINTS[name]:
            said = text_of(file, hint)
            address = re.search(rf"{re.escape(DOCS_URL)}([\w/-]+)\.html\.$", said)
            assert address, f"{file}: {said}"
            assert (ROOT / f"docs/{address[1]}.md").is_file(), f"{file}: {said}"


def test_every_message_was_looked_at() -> None:
    """Ids of messages that are made in another way would be missed."""
    code = "".join(each.read_text() for each in PACKAGE.rglob("*.py"))
    assert set(HINTS) == set(re.findall(r"[\"'](distlock\.[EW]\d+)[\"']", code))
