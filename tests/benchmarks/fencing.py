"""What a write costs that refuses stale fences, beside the same write that does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import count, cycle
from typing import Any

from django.db import connections, models, transaction
from django.test.utils import CaptureQueriesContext

from django_distlock import Lease, distlock

from .options import Options
from .race import Unavailable, race
from .report import Result, Sheet
from .timing import Comparison, Subject

#: Rows of a write of many.
MANY = 100
#: Lock backends, by the database that their rows are in.
DATABASES = {"default": "functions", "sqlite": "sqlite", "mariadb": "mariadb"}
NAMES = {"default": "PostgreSQL", "sqlite": "SQLite", "mariadb": "MariaDB"}


COMPARISONS = tuple(
    comparison
    for using, name in NAMES.items()
    for comparison in (
        Comparison(
            what=f"{name}: update of one row by its key", of=f"{using}/fenced/update",
            to=f"{using}/plain/update", at_most=1.15,
        ),
        Comparison(
            what=f"{name}: update of {MANY} rows", of=f"{using}/fenced/update_many",
            to=f"{using}/plain/update_many",
        ),
        Comparison(
            what=f"{name}: save", of=f"{using}/fenced/save", to=f"{using}/plain/save",
        ),
        Comparison(
            what=f"{name}: save without a lease", of=f"{using}/unfenced/save",
            to=f"{using}/plain/save",
        ),
        Comparison(
            what=f"{name}: get, fence raised before", of=f"{using}/fenced/get",
            to=f"{using}/plain/get",
        ),
        Comparison(
            what=f"{name}: atomic, one update in it", of=f"{using}/fenced/atomic",
            to=f"{using}/plain/atomic",
        ),
    )
)  # fmt: skip

#: How many statements more at most.
MORE = {"update": 0, "update_many": 1, "save": 0, "get": 1, "atomic": 1}


class Rows:
    """Writes rows in turn.

    Args:
        rows: What to write them through.
        lease: Under what; None: nothing.
    """

    def __init__(self, using: str, rows: models.QuerySet[Any], lease: Lease | None):
        self._using = using
        self._rows = rows
        self._lease = lease
        self._pks = cycle(list(rows.values_list("pk", flat=True)[:MANY]))
        self._numbers = count()
        self._instances = {row.pk: row for row in rows[:MANY]}

    @property
    def rows(self) -> Any:
        """What to read and write through."""
        rows: Any = self._rows
        return rows if self._lease is None else rows.fenced(self._lease)

    def update(self) -> None:
        """Write one row."""
        _one(self.rows.filter(pk=next(self._pks)).update(value=next(self._numbers)))

    def update_many(self) -> None:
        """Write all of them."""
        if self.rows.update(value=next(self._numbers)) != MANY:
            raise RuntimeError("not all rows were written")

    def save(self) -> None:
        """Save one that was read before."""
        row = self._instances[next(self._pks)]
        row.value = next(self._numbers)
        row.save() if self._lease is None else row.save(lease=self._lease)

    def get(self) -> None:
        """Read one row."""
        self.rows.get(pk=next(self._pks))

    def atomic(self) -> None:
        """Write one row in a transaction, which a lease guards."""
        lease = self._lease
        with transaction.atomic(self._using) if lease is None else lease.atomic(self._using):
            _one(self._rows.filter(pk=next(self._pks)).update(value=next(self._numbers)))

    def subjects(self, of: str, *names: str) -> list[Subject]:
        """Return some of these, to be measured."""
        return [Subject(of, {name: getattr(self, name)}) for name in names]


def run(options: Options) -> Result:
    """Measure each, and count what is sent."""
    done = race({using: partial(_candidate, using) for using in DATABASES}, options)
    result = done.result("Fencing", options, done.samples.ratios(COMPARISONS))
    counted = _counted()
    result.data["statements"] = counted
    rows = [
        [name, str(plain), str(fenced), f"<= {plain + MORE[name]}"]
        for name, (plain, fenced) in counted.items()
    ]
    result.sheets.append(
        Sheet("Fencing: statements", ["PostgreSQL", "plain", "fenced", "target"], rows)
    )
    return result


def _candidate(using: str) -> Iterator[list[Subject]]:
    if using not in connections.settings:
        raise Unavailable("no such database")
    with _tables(using), distlock("bench:fencing", ttl=600, backend=DATABASES[using]) as lease:
        plain, fenced, unfenced = _rows(using, lease)
        steps = ["update", "update_many", "save", "get"]
        guarded = ["atomic"] if using != "sqlite" else []
        # Each step by itself: one after the other, the guard of one would count for the next.
        yield [
            *plain.subjects(f"{using}/plain", *steps, "atomic"),
            *fenced.subjects(f"{using}/fenced", *steps, *guarded),
            *unfenced.subjects(f"{using}/unfenced", "save"),
        ]


def _rows(using: str, lease: Lease) -> tuple[Rows, Rows, Rows]:
    payments = _payments()
    return (
        Rows(using, payments.Plain._base_manager.using(using), None),
        Rows(using, payments.Payment.objects.using(using), lease),
        Rows(using, payments.Payment._base_manager.using(using), None),
    )


def _counted() -> Mapping[str, tuple[int, int]]:
    """Count the statements of each step on PostgreSQL."""
    counted: dict[str, tuple[int, int]] = {}
    with _tables("default"), distlock("bench:fencing", ttl=600, backend="functions") as lease:
        plain, fenced, _ = _rows("default", lease)
        for name in MORE:
            counts = []
            for side in (plain, fenced):
                with CaptureQueriesContext(connections["default"]) as queries:
                    getattr(side, name)()
                counts.append(len(queries))
            counted[name] = counts[0], counts[1]
    return counted


def _payments() -> Any:
    return import_module(f"{__package__}.payments")


@contextmanager
def _tables(using: str) -> Iterator[None]:
    """Make tables with rows, for a block."""
    tables = _payments().Plain, _payments().Payment
    with connections[using].schema_editor() as editor:
        for model in tables:
            editor.create_model(model)
    try:
        for model in tables:
            model._base_manager.using(using).bulk_create([model() for _ in range(MANY)])
        yield
    finally:
        with connections[using].schema_editor() as editor:
            for model in tables:
                editor.delete_model(model)


def _one(rows: int) -> None:
    if rows != 1:
        raise RuntimeError("the row was not written")
