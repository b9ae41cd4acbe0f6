"""What the pages of reference say in tables, lists and signatures is what the code has."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from django.core.management import load_command_class
from django.core.management.base import BaseCommand
from django.utils.module_loading import import_string

from django_distlock import conf, inspection, signals
from django_distlock.backends.advisory import AdvisoryBackend
from django_distlock.backends.base import BaseLockBackend
from django_distlock.backends.database import DatabaseBackend
from django_distlock.backends.memory import MemoryBackend
from django_distlock.backends.redis import RedisBackend
from django_distlock.backends.redis.clients import _CODES, _WORDS
from django_distlock.backends.redis.store import RedisStore
from django_distlock.conf import BackendConfig
from django_distlock.core.errors import LockError
from django_distlock.core.retry import Retry
from django_distlock.database.vendors import VENDORS, mysql, postgresql, sqlite
from django_distlock.locks.taking import UNSET
from django_distlock.scheduling import RunScope

ROOT = Path(__file__).parents[2]
CODE = ROOT / "django_distlock"
REFERENCE = ROOT / "docs/reference"

#: Where each page says what a module has: by the heading of its section in `api.md`.
MODULES = (
    "django_distlock",
    "django_distlock.contrib.celery",
    "django_distlock.contrib.opentelemetry",
    "django_distlock.contrib.prometheus",
    "django_distlock.fencing",
    "django_distlock.inspection",
    "django_distlock.testing",
)
#: Modules without `__all__` whose signatures `api.md` has.
OTHERS = (
    "django_distlock.idempotency",
    "django_distlock.scheduling",
    "django_distlock.views",
    "django_distlock.contrib.tasks",
)
COMMANDS = sorted(each.stem for each in (CODE / "management/commands").glob("distlock_*.py"))


def page(name: str) -> str:
    """Return a page of reference."""
    return (REFERENCE / f"{name}.md").read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Return what stands under a heading of the second level, with what is below that."""
    assert f"\n## {heading}\n" in text, heading
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of the rows of all tables in a text."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|--"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def entries(text: str) -> dict[str, str]:
    """Return the lines of tables and lists in a text, by the name that each begins with."""
    lines = re.findall(r"^[|-] ((?:`\w+`(?:, )?)+)(.*(?:\n  .*)*)", text, re.MULTILINE)
    return {name: rest for those, rest in lines for name in re.findall(r"\w+", those)}


def names(text: str) -> set[str]:
    """Return the names that stand in backquotes, or begin a line of a block of text."""
    inline = re.findall(r"`\.?(\w+)[^`]*`", text)
    blocks = "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL))
    return {*inline, *re.findall(r"^(\w+)", blocks, re.MULTILINE)}


# Backends


def config() -> BackendConfig:
    """Return what the settings of a backend say that says nothing."""
    return BackendConfig(alias="default")


def on_database(vendor: str) -> Callable[[pytest.MonkeyPatch], BaseLockBackend]:
    """Return what makes the backend of a database; nothing is asked of one."""

    def make(patch: pytest.MonkeyPatch) -> BaseLockBackend:
        patch.setattr(DatabaseBackend, "_vendor_of", lambda *_: vendor)
        return DatabaseBackend(config(), using="default")

    return make


def on_redis(*, is_cluster: bool) -> Callable[[pytest.MonkeyPatch], BaseLockBackend]:
    """Return what makes the backend of Redis, which connects nowhere."""

    def make(patch: pytest.MonkeyPatch) -> BaseLockBackend:
        patch.setattr(RedisStore, "is_cluster", is_cluster)
        return RedisBackend(config(), url="redis://nowhere.invalid")

    return make


#: By the heading of a column.
COLUMNS: Mapping[str, Callable[[pytest.MonkeyPatch], BaseLockBackend]] = {
    "PostgreSQL": on_database("postgresql"),
    "MySQL": on_database("mysql"),
    "SQLite": on_database("sqlite"),
    "Redis": on_redis(is_cluster=False),
    "Redis Cluster": on_redis(is_cluster=True),
    "session": lambda _: AdvisoryBackend(config(), using="default"),
    "memory": lambda _: MemoryBackend(config()),
}


def lacking() -> dict[str, set[str]]:
    """Return the columns of the table of what backends can do: for each attribute, who lacks it."""
    heading, *cells = rows(section(page("backends"), "What each can do"))
    assert heading[2] == "not on"
    return {row[0].strip("`"): {*row[2].split(", ")} - {"none"} for row in cells}


def test_table_has_every_capability() -> None:
    """A row for each attribute; the names are those of the classes above it."""
    attributes = {*BaseLockBackend.__annotations__}
    assert {*lacking()} == attributes - {"storage_key_limit"}
    classes = [*rows(page("backends").partition("\n## ")[0])][1:]
    assert {name for row in classes for name in row[0].split(", ")} == {*COLUMNS}
    assert len([each for each in COLUMNS if each.lower() in VENDORS]) == len(VENDORS)


def test_backends_can_do_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lacks what the table says that it lacks, and nothing else."""
    table = lacking()
    for column, make in COLUMNS.items():
        backend = make(monkeypatch)
        told = {name for name, without in table.items() if column in without}
        lacks = {name for name in table if getattr(backend, name) in {False, "client"}}
        assert told == lacks, column
        limit = {"Redis": 1000, "Redis Cluster": 1000, "memory": 10000}.get(column, 640)
        assert backend.storage_key_limit == limit, column
        assert re.search(rf"^`storage_key_limit` .*\b{limit}\b", page("backends"), re.MULTILINE)


def test_every_method_of_a_backend_is_listed() -> None:
    """There are few of them, and each has its place on the page."""
    methods = {
        name
        for name, each in vars(BaseLockBackend).items()
        if not name.startswith("_") and (callable(each) or isinstance(each, property))
    }
    assert len(methods) <= 20
    assert methods - names(section(page("api"), "`lock_backends`, `default_lock_backend`")) == set()


def test_classes_are_importable_by_their_paths() -> None:
    """The path of each class is right."""
    paths = re.findall(r"^\|[^|]*\| `(django_distlock\.[\w.]+)` \|", page("backends"), re.MULTILINE)
    assert [import_string(each) for each in paths] == [
        DatabaseBackend, RedisBackend, AdvisoryBackend, MemoryBackend,
    ]  # fmt: skip


def options_of(kind: type[BaseLockBackend]) -> set[str]:
    """Return the names that `OPTIONS` of a backend may have."""
    return set(inspect.signature(kind).parameters) - {"config", "unknown"}


def test_settings_are_listed() -> None:
    """Every name has an entry, and every entry a name."""
    known = {
        "## `DISTLOCK`": set(conf._READERS),
        "## `DISTLOCK_TABLES`": set(conf.DEFAULT_TABLES),
        "## `DISTLOCK_HOLDER`": {each.name for each in dataclasses.fields(conf.HolderConfig)},
        "### `RETRY`": {each.name for each in dataclasses.fields(Retry)},
        "### `OPTIONS` of the database backend": options_of(DatabaseBackend),
        "### `OPTIONS` of the memory backend": options_of(MemoryBackend),
        "### `OPTIONS` of the Redis backend": options_of(RedisBackend),
        "### `OPTIONS` of the session-advisory backend": options_of(AdvisoryBackend),
    }
    for heading, names_of in known.items():
        part = page("settings").partition(f"\n{heading}\n")[2].partition("\n#")[0]
        assert set(entries(part)) == names_of, heading


def test_every_setting_is_listed() -> None:
    """Each name that `conf` reads has a section, and is named in the first sentence."""
    read = set(re.findall(r'settings, "(DISTLOCK\w*)"', (CODE / "conf.py").read_text()))
    settings = page("settings")
    assert set(re.findall(r"^## `(DISTLOCK\w*)`", settings, re.MULTILINE)) == read
    assert set(re.findall(r"`(DISTLOCK\w*)`", settings.partition("\n##")[0])) == read


# API


def test_public_names_are_listed() -> None:
    """Every name in `__all__` stands in the section of its module; those of the root, anywhere."""
    api = page("api") + page("errors")
    for module in MODULES:
        text = api if module == "django_distlock" else section(api, f"`{module}`")
        told = names(text) | set(re.findall(r"^## `(\w+)`", api, re.MULTILINE))
        assert set(importlib.import_module(module).__all__) - told == set(), module


def signatures() -> Iterator[tuple[str, str]]:
    """Yield the signatures that the page has, each with the module that it is about."""
    for part in re.split(r"^## ", page("api"), flags=re.MULTILINE):
        heading = re.match(r"`([\w.]+)`", part)
        module = heading[1] if heading and "." in heading[1] else "django_distlock"
        for block in re.findall(r"```text\n(.*?)```", part, re.DOTALL):
            for each in re.split(r"\n(?=\w)", block.strip()):
                if re.match(r"\w+\(", each):
                    yield module, each


def parameters(signature: str) -> list[inspect.Parameter]:
    """Return the parameters that a signature on the page has."""
    head = signature.partition(" -> ")[0].replace("…", "...")
    made: dict[str, object] = {"UNSET": UNSET, "RunScope": RunScope}
    exec(f"def function{head[head.index('(') :]}: pass", made)
    return [*inspect.signature(made["function"]).parameters.values()]  # type: ignore[arg-type]


def bare(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter of the code as the page has it: no types, and a function is "…"."""
    default = ... if inspect.isfunction(parameter.default) else parameter.default
    return parameter.replace(annotation=parameter.empty, default=default)


ALL_SIGNATURES = list(signatures())


def test_signatures_are_those_of_the_code() -> None:
    """Names, order, kinds and defaults."""
    for module, signature in ALL_SIGNATURES:
        function = getattr(importlib.import_module(module), signature.partition("(")[0])
        known = [bare(each) for each in inspect.signature(function).parameters.values()]
        assert parameters(signature) == known, signature


def test_modules_have_their_signatures() -> None:
    """Every function in `inspection`, in `testing` and in other modules has its signature."""
    told = {f"{module}.{each.partition('(')[0]}" for module, each in ALL_SIGNATURES}
    public = {
        f"{module}.{name}"
        for module in MODULES
        for name in importlib.import_module(module).__all__
        if inspect.isfunction(getattr(importlib.import_module(module), name))
    }
    assert public - told == set()
    assert {each.rpartition(".")[0] for each in told} == {*MODULES, *OTHERS} - {
        "django_distlock.fencing"
    }


def test_values_of_inspection_are_listed() -> None:
    """The entry of a value names every attribute that it has."""
    lines = entries(section(page("api"), "`django_distlock.inspection`"))
    for kind in (getattr(inspection, name) for name in inspection.__all__):
        if (
            isinstance(kind, type)
            and dataclasses.is_dataclass(kind)
            and kind != inspection.LockInfo
        ):
            shown = {name for name, each in vars(kind).items() if isinstance(each, property)}
            known = {field.name for field in dataclasses.fields(kind)} | shown
            assert known - names(lines[kind.__name__]) == set(), kind


def test_every_signal_is_listed() -> None:
    """Every signal has an entry, and every entry a signal."""
    assert sorted(entries(page("signals"))) == sorted(signals.__all__)


# Errors


def given_codes() -> set[str]:
    """Return the codes that the code gives to errors."""
    found = set(_WORDS.values()) | {code for _classes, code in _CODES}
    for vendor in (mysql, postgresql, sqlite):
        found |= set(vendor._CODES.values())
    for file in CODE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code":
                value = node.value.value if isinstance(node.value, ast.Constant) else None
                found |= {value} if isinstance(value, str) else set()
    return found | {each.code for each in kinds(LockError)}


def kinds(error: type[LockError]) -> Iterator[type[LockError]]:
    """Yield a class of errors of this package, and all below."""
    yield error
    for each in error.__subclasses__():
        if each.__module__.startswith("django_distlock."):
            yield from kinds(each)


def test_errors_page_lists_the_codes() -> None:
    """Every code that an error may have is in the tree and is explained, and there is no other."""
    importlib.import_module("django_distlock.fencing.http")
    errors = page("errors")
    tree = re.search(r"```text\n(.*?)```", errors, re.DOTALL)
    assert tree
    drawn = set(re.findall(r"\b[a-z_]{4,}\b", re.sub(r"\(also.*|a mistake.*", "", tree[1])))
    explained = errors.partition("\n## ")[2]
    single = re.search(r"have one code each: (.*)\.", explained)
    assert single
    told = set(entries(explained))
    assert drawn == told | set(re.findall(r"`([a-z_]+)`", single[1])) == given_codes()


def test_codes_are_told_where_they_come() -> None:
    """A code stands under the class that gives it, and in its line of the tree."""
    for kind in ("BackendUnavailable", "LockUsageError", "LockError"):
        told = entries(section(page("errors"), f"Codes of `{kind}`"))
        line = re.search(rf"^.*\b{kind} +(.*)$", page("errors"), re.MULTILINE)
        assert line
        assert sorted(told) == sorted(line[1].split(", "))


# Commands


def options(command: str) -> set[str]:
    """Return the options of a command that not every command has."""
    parser = load_command_class("django_distlock", command).create_parser("manage.py", command)
    common = BaseCommand().create_parser("manage.py", command)
    every = {name for action in common._actions for name in action.option_strings}
    found, parsers = set(), [parser]
    while parsers:
        for action in parsers.pop()._actions:
            if action.help != argparse.SUPPRESS:
                found |= {name for name in action.option_strings if name.startswith("--")}
            choices = getattr(action, "choices", None)
            parsers += choices.values() if isinstance(choices, dict) else []
    return found - every


def test_every_command_has_a_section() -> None:
    """And every section is about a command; as the first lines say, one of them prints no JSON."""
    assert re.findall(r"^## `(\w+)`", page("commands"), re.MULTILINE) == COMMANDS
    assert [each for each in COMMANDS if "--json" not in options(each)] == ["distlock_run"]


def test_all_of_this_is_looked_for() -> None:
    """What the tests here go through is not empty."""
    assert len(COMMANDS) == 12
    assert len(ALL_SIGNATURES) > 30


def test_options_of_commands_are_listed() -> None:
    """The line of the command has every option, and so has the text below; there is no other."""
    everywhere = {"--json", "--backend"}  # explained above all commands
    for command in COMMANDS:
        text = section(page("commands"), f"`{command}`")
        usage = "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL))
        listed = "".join(re.findall(r"```text\n.*?```(.*?)(?=```text|$)", text, re.DOTALL))
        known = options(command)
        assert set(re.findall(r"--[a-z][a-z-]*", usage)) | {"--json"} == known | {"--json"}
        assert set(re.findall(r"--[a-z][a-z-]*", listed)) | everywhere >= known
        assert set(re.findall(r"`(--[a-z][a-z-]*)", listed)) <= known
