"""Which tests a run takes, and which servers they need.

`./dev test` takes the quick ones, `./dev test --all` all of them. Whoever names files, or chooses
by `-k`, `-m` or `--last-failed`, gets what was named, with every case on every backend. So does
`./dev nightly`, which names all of them.
"""

from __future__ import annotations

import functools
import gc
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest

from .backends import BACKENDS, Registered
from .mutants import MUTANTS
from .services_plugin import KINDS, ask_for

# Hypothesis would load trio, which only Selenium needs here: a second for each process of a run.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")

Tier = Literal["quick", "all", "chosen"]
TIER = pytest.StashKey[Tier]()
#: All that there is, where a run has collected it.
ALL = pytest.StashKey[list[pytest.Item]]()
ROOT = Path(__file__).parent

#: The files of the contract that are about backends. The others are about locks, whose code is
#: the same above all backends.
OF_BACKENDS = """
    advisory arguments async bounds busy calls cleanup contention durability expiry extend_many
    failures fence_floor fences grants keys listing model notes operators races raise_fences
    redis_records registry release sharing sharing_races transaction_locks transaction_races
    transaction_sqlite wakeups
""".split()  # noqa: SIM905 - as a list it would be a page
#: Files in which the shape of an argument is tested, which is checked above the backends.
OF_SHAPES = ["arguments", "keys", "raise_fences"]
#: Tests of that kind in other files. Each store is given such texts by a test of its listings.
SHAPES = {"test_bad_keys_are_refused", "test_bad_ttls_are_refused", "test_any_text_is_a_key"}
#: Backends for a test about locks: all cases on the first that it has, and one on the other. The
#: backends beside them take turns over the tests of a file, with one case each.
FULL = ("memory", "postgres")
#: Backends with all cases of a test about backends, one for each kind of code below it.
OF_EACH_KIND = ("memory", "postgres", "mariadb", "redis")
#: Backends whose code two others prove together.
SAME_CODE = {"sqlite_orm", "mariadb_orm"}
#: Of the files about locks, those that wait for leases to end, or interrupt at each line: a quick
#: run has them on one backend.
LONG = """
    heartbeat heartbeat_processes interrupted_blocks leader lost_async lost_leases
    promises_of_holding renewed_calls transaction_release waiting_in_turn
""".split()  # noqa: SIM905 - see above

#: Files about session locks alone.
OF_SESSIONS = ("session_agreement",)

#: Folders and files with a parameter whose values take turns over their tests: stores, where what
#: is seen is the same above each of them.
IN_TURN = {"celery": "store", "e2e/test_example.py": "shop"}

#: Folders whose tests share what takes long to start: workers with their broker, a browser. They
#: come first, so that one process runs them, and others help only at the end.
SHARING = ("celery", "e2e")

#: The backends of a quick run.
QUICK_BACKENDS = ("memory", "sqlite", "postgres", "redis")
#: The folders and files of a quick run; of a file only some tests, if they are named.
QUICK: dict[str, tuple[str, ...]] = {
    "audit/test_command.py": (),
    "audit/test_rules.py": (),
    "core": (),
    "unit": (),
    "contract": (),
    # Two histories. All of them were a quarter of what the tests of a quick run computed.
    "simulation/test_simulation.py": ("test_seed_is_one_history",),
    # One test of each thing that stands on the locks.
    "celery/test_endings.py": ("test_success",),
    "celery/test_locked_task.py": ("test_import_before_the_apps_are_loaded",),
    "e2e/test_dashboard_browser.py": ("test_key_is_taken_with_a_reason_and_audited",),
    "e2e/test_example.py": ("test_site_captures_and_sells_once",),
    "integration/test_dashboard.py": ("test_lock_is_in_the_list",),
    "integration/test_distlock_list.py": ("test_table_shows_who_holds_what",),
    "integration/test_distlock_release.py": ("test_dry_run_changes_nothing",),
    "integration/test_fencing_rows.py": ("test_lower_fence_is_refused_and_changes_nothing",),
    "integration/test_locked_views.py": (
        "test_view_runs_under_its_lock",
        "test_conflict_is_answered",
    ),
    "integration/test_metrics_prometheus.py": ("test_rejected_write_is_counted",),
    "integration/test_scheduling.py": ("test_one_of_many_runs",),
}
#: Words in the names of cases that need what a quick run does not start.
SLOW_WORDS = {"mariadb", "mysql", "redis_cluster"}
#: Files in these that are about the tests themselves, or run long.
NOT_QUICK = frozenset({"unit/test_promises.py", "unit/test_services.py"})

#: The faults whose test a quick run has: without MariaDB, and without workers of Celery.
QUICK_FAULTS = [
    each
    for each in MUTANTS
    if not each.backend.startswith(("mariadb", "redis_cluster"))
    and not each.test.startswith("tests/celery/")
]


def case_of(test_id: str) -> tuple[str, Set[str]]:
    """Return a test and the words of its case: their order depends on what else is collected."""
    test, _, case = test_id.partition("[")
    return test, frozenset(case.rstrip("]").split("-"))


#: Whoever runs all tests has the cases that are named for faults.
OF_FAULTS = {case_of(each.test_id) for each in MUTANTS}
OF_QUICK_FAULTS = {case_of(each.test_id) for each in QUICK_FAULTS}
FILES_OF_FAULTS = {each.test.partition("::")[0].removeprefix("tests/") for each in QUICK_FAULTS}
#: Tests of the contract, and the backends that they run on for a fault.
ON_BACKENDS = {(each.test, each.backend) for each in QUICK_FAULTS}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`."""
    parser.addoption("--all", action="store_true", help="all tests, and not only the quick ones")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Find out what is wanted; a worker of xdist has been told."""
    config.stash[TIER] = getattr(config, "workerinput", {}).get("tier") or _wanted(config)


def _wanted(config: pytest.Config) -> Tier:
    option = config.option
    named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if named or option.keyword or option.markexpr or getattr(option, "lf", False):
        return "chosen"
    return "all" if option.all else "quick"


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many workers `-n auto` starts: tests wait more than they compute."""
    return min(12, 4 * (os.cpu_count() or 1))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """Tell a worker."""
    node.workerinput["tier"] = node.config.stash[TIER]  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the files first, in a worker of a whole run.

    Where no bytecode is kept yet, each file is compiled once, and not by every worker.
    """
    # Nearly all of what a collection makes stays. The conftest turns the collector on again.
    gc.disable()
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.stash[TIER] == "chosen":
        return
    is_all = session.config.stash[TIER] == "all"
    files = [each for each in sorted(ROOT.glob("*/**/test_*.py")) if is_all or _has_quick(each)]
    number = int(worker["workerid"].removeprefix("gw"))
    for file in files[number :: worker["workercount"]]:
        # Whatever a file raises or warns of, its collection says, which imports it anew.
        with suppress(Exception, pytest.skip.Exception), warnings.catch_warnings(action="error"):
            import_module(".".join(("tests", *_relative(file).with_suffix("").parts)))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what has no quick test."""
    if config.stash[TIER] != "quick" or collection_path.suffix != ".py":
        return None
    return not _has_quick(collection_path) or None


@functools.cache
def _relative(path: Path) -> Path:
    return path.relative_to(ROOT)


def _has_quick(file: Path) -> bool:
    path = _relative(file)
    return path.as_posix() in FILES_OF_FAULTS or _is_named(path)


def _is_named(path: Path) -> bool:
    is_named = not {path.parts[0], path.as_posix()}.isdisjoint(QUICK)
    return is_named and path.as_posix() not in NOT_QUICK


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the tier leaves out."""
    option = config.option
    if config.stash[TIER] == "all" and not (option.ignore or option.ignore_glob or option.deselect):
        config.stash[ALL] = items[:]
    kept = taken(items, config.stash[TIER])
    wanted = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = sorted(kept, key=_place)


def _place(item: pytest.Item) -> int:
    """Say where a test comes; beside others of the same place, the order is by chance."""
    folder = _relative(item.path).parts[0]
    return SHARING.index(folder) if folder in SHARING else len(SHARING)


def taken(items: list[pytest.Item], tier: Tier) -> list[pytest.Item]:
    """Return those of all tests that a tier takes."""
    if tier == "chosen":
        return items[:]
    wanted = {*_paired(each for each in items if not each.get_closest_marker("nightly"))}
    wanted |= {each for each in items if case_of(each.nodeid) in OF_FAULTS}
    return [each for each in items if each in wanted and (tier == "all" or _is_quick(each))]


def _is_quick(item: pytest.Item) -> bool:
    if case_of(item.nodeid) in OF_QUICK_FAULTS:
        return True
    path = _relative(item.path)
    names = QUICK.get(path.as_posix())
    if not _is_named(path) or (names and item.name.partition("[")[0] not in names):
        return False
    callspec = getattr(item, "callspec", None)
    if callspec and not SLOW_WORDS.isdisjoint(callspec.id.split("-")):
        return False
    alias = _alias(item)
    return not alias or alias in _quick_backends(_subject(item))


def _quick_backends(subject: str) -> Collection[str]:
    if subject in LONG:
        return ("postgres",)
    if subject in OF_SESSIONS:
        return ("advisory",)
    return QUICK_BACKENDS if subject in OF_BACKENDS else FULL


def may_take(test: pytest.Item, alias: str) -> bool:
    """Say whether this run may take a test of the contract on a backend: others need no cases."""
    subject = _subject(test)
    # A shape has its turn on one of all backends.
    is_quick = test.config.stash[TIER] == "quick" and subject not in OF_SHAPES
    is_of_fault = (test.nodeid, alias) in ON_BACKENDS
    return not is_quick or is_of_fault or alias in _quick_backends(subject)


def _paired(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Leave out, of the products of cases and backends, what others of them prove."""
    files: defaultdict[Path, defaultdict[str, defaultdict[str, list[pytest.Item]]]]
    files = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    # Whatever the order of this run is, it takes the same cases as another one.
    for item in sorted(items, key=lambda each: each.nodeid):
        test = item.nodeid.partition("[")[0]
        if value := _alias(item) or value_in_turn(item):
            files[item.path][test][value].append(item)
        else:
            yield item
    for tests in files.values():
        yield from _taking_turns([*tests.values()])


def _taking_turns(tests: list[dict[str, list[pytest.Item]]]) -> Iterator[pytest.Item]:
    """Give, of the tests of a file, all cases on some values, and one case on one other value.

    Where the code is that of a backend, one case on each value that has code of its own. A value
    that has had no turn behind the last test has one more test to itself.
    """
    turns: Counter[str] = Counter()
    left: dict[str, list[pytest.Item]] = {}
    for cases in tests:
        first = next(iter(cases.values()))[0]
        full, once = _full(first, cases), _once(first, cases)
        others = [value for value in cases if value not in full and value not in once]
        for value in cases.keys() & set(full):
            yield from cases[value]
        for value in sorted(cases.keys() & once):
            yield cases[value][turns[value] % len(cases[value])]
            turns[value] += 1
        for value in others:
            left.setdefault(value, cases[value])
        if others:
            value = min(others, key=turns.__getitem__)
            yield cases[value][turns[value] % len(cases[value])]
            turns[value] += 1
    for value, several in left.items():
        if not turns[value]:
            yield several[0]


def _full(item: pytest.Item, values: Collection[str]) -> Collection[str]:
    """Return the backends with all cases of a test."""
    if not _alias(item):
        return ()
    if _is_about_shapes(item):
        return ("memory",)
    if _subject(item) in OF_BACKENDS:
        return OF_EACH_KIND
    return [alias for alias in FULL if alias in values][:1]


def _once(item: pytest.Item, values: Collection[str]) -> Set[str]:
    """Return the backends with one case of a test at least."""
    if not _alias(item) or _is_about_shapes(item):
        return set()
    if _subject(item) in OF_BACKENDS:
        return BACKENDS.keys() - SAME_CODE - {*OF_EACH_KIND}
    return {*FULL} - {*_full(item, values)}


def _is_about_shapes(item: pytest.Item) -> bool:
    return _subject(item) in OF_SHAPES or item.nodeid.partition("[")[0].endswith((*SHAPES,))


def _alias(item: pytest.Item) -> str:
    """Return the backend that a test of the contract runs on; "": it chooses by itself."""
    line = _line(item)
    return line.alias if line else ""


def _line(item: pytest.Item) -> Registered | None:
    callspec = getattr(item, "callspec", None)
    line = callspec.params.get("registered") if callspec else None
    return line if item.path.parent.name == "contract" else None


def value_in_turn(item: pytest.Item) -> str:
    """Return the value of the parameter whose values take turns; "": there is none."""
    path, callspec = _relative(item.path), getattr(item, "callspec", None)
    name = IN_TURN.get(path.parts[0], IN_TURN.get(path.as_posix(), ""))
    return str(callspec.params.get(name, "")) if callspec else ""


def _subject(item: pytest.Item) -> str:
    return item.path.stem.removeprefix("test_")


def servers(item: pytest.Item) -> Collection[str]:
    """Return the servers that a test needs."""
    if marker := item.get_closest_marker("servers"):
        return marker.args
    folder = _relative(item.path).parts[0]
    if folder in ("audit", "core", "simulation", "specification"):
        return ()
    if folder in ("contract", "unit"):
        more = {"mysql": "MariaDB", "redis": "Redis", "redis_cluster": "Redis Cluster"}
        line = _line(item)
        return ("PostgreSQL", more.get(line.store if line else "", "PostgreSQL"))
    return KINDS if item.config.stash[TIER] != "quick" else ("PostgreSQL", "Redis")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the servers."""
    if not (session.config.option.collectonly or session.testsfailed):
        ask_for({each for item in session.items for each in servers(item)})
