"""Which tests a run takes, and which servers they need.

`./dev test` takes the quick ones, `./dev test --all` all of them. Whoever names files, or chooses by
`-k`, `-m` or `--last-failed`, gets what was named, with every case on every backend.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest

from .services_plugin import KINDS, ask_for

Tier = Literal["quick", "all", "chosen"]
TIER = pytest.StashKey[Tier]()
ROOT = Path(__file__).parent

#: The files of the contract that are about backends. The others are about locks, whose code is
#: the same above all backends.
OF_BACKENDS = frozenset(
    f"test_{name}"
    for name in (
        "advisory arguments async bounds busy cleanup contention durability expiry extend_many"
        " failures fence_floor fences grants keys listing notes operators races raise_fences"
        " redis_records registry release wakeups"
    ).split()
)
#: Files in which the shape of an argument is tested, which is checked above the backends.
OF_SHAPES = frozenset({"test_arguments", "test_keys", "test_raise_fences"})
#: Backends with all cases of a test about locks. The others have one case of each test, in turn.
FULL = ("memory", "postgres")

#: The backends of a quick run.
QUICK_BACKENDS = ("memory", "sqlite", "postgres", "redis")
#: The folders and files of a quick run; of the latter only some tests, if they are named.
QUICK: dict[str, tuple[str, ...]] = {
    "core": (),
    "unit": (),
    "contract": (),
}
#: Files in these that are about the tests themselves, or run long.
NOT_QUICK = frozenset({"unit/test_services.py"})


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`."""
    parser.addoption("--all", action="store_true", help="all tests, and not only the quick ones")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Find out what is wanted; a worker of xdist has been told."""
    option = config.option
    told = getattr(config, "workerinput", {}).get("tier")
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if told or named or option.keyword or option.markexpr or option.lf:
        config.stash[TIER] = told or "chosen"
    else:
        config.stash[TIER] = "all" if option.all else "quick"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """Tell a worker."""
    node.workerinput["tier"] = node.config.stash[TIER]  # type: ignore[attr-defined]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what has no quick test."""
    if config.stash[TIER] != "quick" or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(ROOT)
    is_quick = not {path.parts[0], path.as_posix()}.isdisjoint(QUICK)
    return (not is_quick or path.as_posix() in NOT_QUICK) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the tier leaves out."""
    tier = config.stash[TIER]
    if tier == "chosen":
        return
    wanted = set(_paired(items))
    kept = [item for item in items if item in wanted and (tier == "all" or _is_quick(item))]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _is_quick(item: pytest.Item) -> bool:
    names = QUICK.get(item.path.relative_to(ROOT).as_posix())
    if names and item.name.partition("[")[0] not in names:
        return False
    alias = _alias(item)
    return not alias or alias in (QUICK_BACKENDS if _is_of_backends(item) else FULL)


def _paired(items: Iterable[pytest.Item]) -> Iterable[pytest.Item]:
    """Leave out, of the products of cases and backends, what others of them prove."""
    cases: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if alias := _alias(item):
            cases[item.nodeid.partition("[")[0], alias].append(item)
        else:
            yield item
    turns: defaultdict[str, int] = defaultdict(int)
    for (_, alias), several in cases.items():
        full = {"memory"} if several[0].path.stem in OF_SHAPES else set(FULL)
        if alias in full or _is_of_backends(several[0]) and several[0].path.stem not in OF_SHAPES:
            yield from several
        else:
            yield several[turns[alias] % len(several)]
            turns[alias] += 1


def _alias(item: pytest.Item) -> str:
    """Return the backend that a test of the contract runs on; "": it chooses by itself."""
    callspec = getattr(item, "callspec", None)
    line = callspec.params.get("registered") if callspec else None
    return line.alias if line and item.path.parent.name == "contract" else ""


def _is_of_backends(item: pytest.Item) -> bool:
    return item.path.stem in OF_BACKENDS


def servers(item: pytest.Item) -> set[str]:
    """Return the servers that a test needs."""
    if item.path.is_relative_to(ROOT / "core"):
        return set()
    alias = _alias(item)
    if alias or item.path.parent.name == "unit" and item.path.stem != "test_services":
        by_alias = {"mariadb": "MariaDB", "redis": "Redis", "redis_cluster": "Redis Cluster"}
        return {"PostgreSQL", by_alias.get(alias, "PostgreSQL")}
    return set(KINDS)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the servers."""
    if not (session.config.option.collectonly or session.testsfailed):
        ask_for(set().union(*map(servers, session.items)))
