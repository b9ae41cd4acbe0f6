"""Notes about what is decorated: every door makes one, and it dies with the function."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from django.core.management import BaseCommand
from django.http import HttpRequest, HttpResponse
from django.test import override_settings
from django.views import View

from django_distlock import RunScope, distlock
from django_distlock.contrib.celery import LockedTask
from django_distlock.contrib.celery import locked_task as celery_task
from django_distlock.contrib.celery.declaring import find
from django_distlock.contrib.tasks import locked_task as django_task
from django_distlock.core.declarations import Kind, declarations, declared
from django_distlock.core.keys import OWN_MARKER
from django_distlock.exceptions import InvalidLockBackend
from django_distlock.inspection.declared import DeclaredKey, _place, list_declared
from django_distlock.management.locked import LockedCommand
from django_distlock.scheduling import scheduled
from django_distlock.views import LockedViewMixin, locked_view
from tests.celery.current import current


def work(pk: int = 0) -> int:
    """Be a function of the project."""
    return pk


def view(request: HttpRequest, pk: int) -> HttpResponse:
    """Be a view of the project."""
    return HttpResponse(str(pk))


def make_key(*args: object, **kwargs: object) -> str:
    """Make a key."""
    return "made"


class Page(LockedViewMixin, View):
    """A view of a class."""

    lock_key = "page:{pk}"
    lock_options = {"ttl": 7, "on_conflict": "raise"}

    def get(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Answer."""
        return HttpResponse(str(pk))


def task_class(**attributes: Any) -> Any:
    """Make a task of Celery whose class says what is locked."""
    made: Any = type("Pay", (LockedTask,), {"run": lambda self, pk: pk, **attributes})
    return made.run


def command_class(**attributes: Any) -> type[LockedCommand]:
    """Make a command, as `load_command_class()` does."""
    made = type("Command", (LockedCommand, BaseCommand), {"__module__": "a.nightly", **attributes})
    made().declare_lock()
    return made


def noted(made: object) -> list[DeclaredKey]:
    """Give what is declared for one thing."""
    return [DeclaredKey.of(each, note) for each, note in declarations() if each is made]


def place_of(subject: object) -> tuple[str, int, str]:
    """Give where the source says that something stands."""
    line = inspect.getsourcelines(subject)[1]  # type: ignore[arg-type]
    return __file__, line, f"{__name__}.{subject.__qualname__}"  # type: ignore[attr-defined]


# What the doors declare

BEATS, HELD = ("heartbeat",), ("heartbeat", "hold")
FUNCTION: dict[str, Any] = {"ttl": 9, "wait": None, "on_conflict": "run", "hold": True}
CELERY: dict[str, Any] = {"unique": "c:{pk}", "ttl": 9, "wait": 2, "hold": True}
UNIQUE: dict[str, Any] = {"unique": "u:{pk}", "lock_options": {"on_conflict": "raise"}}
COMMAND = {"lock_key": "report:{day}", "lock_wait": None, "lock_hold": True, "lock_ttl": 60}
#: What is left out is the backend's, and a key has the prefix that the store sees. A unique key is
#: never waited for nor kept behind the run. What a task of Django does by itself depends on the
#: backend of its task.
DECLARED: list[tuple[Callable[[], object], list[tuple[object, ...]]]] = [
    (lambda: distlock("f:{pk}", **FUNCTION)(work), [
        (Kind.FUNCTION, "f:{pk}", 9, None, "run", HELD),
    ]),
    (lambda: distlock("f")(work), [(Kind.FUNCTION, "f", 30, 5, "raise", BEATS)]),
    (lambda: locked_view("v:{pk}", wait=0, ttl=8)(view), [
        (Kind.VIEW, "v:{pk}", 8, 0, "skip", BEATS),
    ]),
    (Page.as_view, [(Kind.VIEW, "page:{pk}", 7, 5, "raise", BEATS)]),
    (lambda: scheduled("s:{pk}", expected=8, margin=4)(work), [
        (Kind.SCHEDULE, OWN_MARKER + "schedule:s:{pk}", 12, 0, "skip", (*HELD, "require_global")),
    ]),
    (lambda: celery_task("c:{pk}", **CELERY)(work), [
        (Kind.CELERY_LOCK, "c:{pk}", 9, 2, "skip or retry", HELD),
        (Kind.CELERY_UNIQUE, OWN_MARKER + "unique:c:{pk}", 9, 0, "skip", BEATS),
    ]),
    (lambda: task_class(**UNIQUE), [
        (Kind.CELERY_UNIQUE, OWN_MARKER + "unique:u:{pk}", 30, 0, "raise", BEATS),
    ]),
    (lambda: django_task("d:{pk}")(work), [
        (Kind.DJANGO_TASK, "d:{pk}", 30, 0, "retry or raise", BEATS),
    ]),
    (lambda: django_task("d:{pk}", on_conflict="wait")(work), [
        (Kind.DJANGO_TASK, "d:{pk}", 30, 5, "wait", BEATS),
    ]),
    (command_class, [(Kind.COMMAND, "nightly", 30, 0, "skip", BEATS)]),
    (lambda: command_class(**COMMAND), [(Kind.COMMAND, "report:{day}", 60, None, "skip", HELD)]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "notes"), DECLARED)
def test_note_lives_as_long_as_what_is_decorated(make: Callable[[], object], notes: object) -> None:
    """It has each of the keys; whoever decorates for each request does not fill the memory."""
    made = make()
    assert [
        (each.kind, each.key, each.ttl, each.wait, each.on_conflict, each.mode)
        for each in noted(made)
    ] == notes
    gc.collect()
    before = len(declared)
    for _ in range(5):
        make()
    gc.collect()
    assert len(declared) == before


def test_modes_are_named_in_the_words_of_distlock() -> None:
    """A lock without expiry has no ttl, one without heartbeat says so, numbers come along."""
    forever, still, long = (
        noted(distlock("m", **options)(work))[0]
        for options in (
            {"basic": True, "reentrant": True},
            {"heartbeat": False, "min_hold": 3, "steal_if_dead": True},
            {"max_lifetime": 90},
        )
    )
    assert (forever.mode, forever.ttl) == (("basic", "reentrant"), None)
    assert (still.mode, still.min_hold) == (("no heartbeat", "min_hold", "steal_if_dead"), 3)
    assert (long.mode, long.max_lifetime) == (("heartbeat", "max_lifetime"), 90)
    everywhere = scheduled("local", expected=8, scope=RunScope.NODE_LOCAL)(work)
    assert noted(everywhere)[0].mode == ("no lock", "node_local")


def test_stacked_decorators_are_noted_each() -> None:
    """The outer one does not hide what the inner one locks."""
    inner = distlock("inner")(work)
    outer = distlock("outer")(inner)
    assert [each.key for each in noted(inner)] == ["inner"]
    assert [each.key for each in noted(outer)] == ["outer"]
    for made in (inner, outer):
        assert [(each.file, each.line, each.name) for each in noted(made)] == [place_of(work)]


def test_key_that_is_made_by_code_is_named_by_that() -> None:
    """A dotted name, of a partial, too; and Celery's key of all arguments."""
    name = f"callable {__name__}.make_key"
    for given in (make_key, functools.partial(make_key, 1)):
        (each,) = noted(locked_view(given)(view))
        assert (each.key, each.is_template) == (name, False)
    assert [each.key for each in noted(django_task(make_key)(work))] == [name]
    assert [each.key for each in noted(celery_task(True)(work))] == ["all arguments"]


@pytest.mark.parametrize(("acks_late", "policy"), [(True, "retry"), (False, "skip")])
def test_task_tells_what_its_function_does_not_know(acks_late: bool, policy: str) -> None:
    """Whether it is queued again follows from `acks_late`, also below `autoretry_for`."""
    made = celery_task("c:{pk}")(work)
    app = Celery("told", set_as_current=False)
    app.task(acks_late=acks_late, autoretry_for=(OSError,), shared=False, bind=True)(made)
    with current(app):
        find(lambda _what, step: step())
    assert [each.on_conflict for each in noted(made)] == [policy]


def test_backend_that_is_not_configured_is_shown_as_such() -> None:
    """Its `TTL` and `WAIT` nobody knows."""
    made = distlock("f", backend="nowhere")(work)
    (each,) = noted(made)
    assert (each.backend, each.is_configured, each.ttl, each.wait) == ("nowhere", False, None, None)
    settings = {"nowhere": {"BACKEND": "any.Path", "TTL": 44, "WAIT": None}}
    with override_settings(DISTLOCK=settings):
        (each,) = noted(made)
    assert (each.is_configured, each.ttl, each.wait) == (True, 44, None)


# How long a note lives


def test_note_dies_at_once_where_no_cycle_keeps_its_function() -> None:
    """The garbage collector has nothing to do with it."""
    gc.collect()
    gc.disable()
    try:
        before = len(declared)
        for number in range(50):
            made = distlock(f"n:{number}", backend="memory")(lambda: "worked")
            assert made() == "worked"
            del made
        assert len(declared) == before
    finally:
        gc.enable()


def test_note_does_not_keep_a_function_that_its_own_key_leads_to() -> None:
    """A key made by a closure over the decorated function is named, not referred to."""

    def make() -> None:
        def key(request: HttpRequest) -> str:
            return str(page)

        @locked_view(key)
        def page(request: HttpRequest) -> HttpResponse:
            return HttpResponse(str(page))

        assert noted(page)

    gc.collect()
    before = len(declared)
    make()
    gc.collect()
    assert len(declared) == before


def test_notes_can_be_read_while_others_are_made() -> None:
    """A thread of the server may decorate while a check looks at schedules."""
    kept: list[object] = [distlock("first")(work)]
    for _ in declarations():
        kept.append(distlock("later")(work))
        if len(kept) > 50:
            break
    assert len(kept) > 1


# What is shown


@pytest.mark.parametrize(
    ("template", "prefix", "may"),
    [
        ("invoice:{pk}", "", True),
        ("invoice:{pk}", "inv", True),
        ("invoice:{pk}", "invoice:4711", True),
        ("invoice:{pk}", "invoices", False),
        ("nightly", "nightly:1", False),
        ("{pk}", "anything", True),
        ("a{{b}}:{pk}", "a{b}:7", True),
        ("a{{b}}:{pk}", "a{{b", False),
        (make_key, "whatever", True),
    ],
)
def test_prefix_finds_the_templates_that_may_make_such_keys(
    template: Any, prefix: str, may: bool
) -> None:
    """What an operator copies from a held key leads to where it comes from; code makes any."""
    made = locked_view(template)(view)
    assert noted(made)[0].may_make(prefix) is may


def test_list_is_narrowed_by_prefix_and_backend() -> None:
    """A class that several URLs lead to declares one key; a missing backend can be asked for."""
    kept = [Page.as_view(), Page.as_view(), distlock("page", backend="not-yet")(work)]
    found, _ = list_declared(prefix="page:4711")
    # Other tests may have left more that makes such keys.
    assert [each.key for each in found if each.key.startswith("page")] == ["page:{pk}"]
    found, _ = list_declared(backends=["not-yet"])
    assert [each.key for each in found] == ["page"]
    with pytest.raises(InvalidLockBackend, match="'rediss' is not configured"):
        list_declared(backends=["rediss"])
    assert len(kept) == 3


# Where it stands


class Called:
    """A class whose objects are called."""

    def __call__(self) -> None:
        """Be called."""


@pytest.mark.parametrize(
    ("made", "subject"),
    [
        (functools.partial(work, 1), work),
        (staticmethod(work), work),
        (Page().get, Page.get),
        (Page.as_view(), Page),
        (Page, Page),
        (Called(), Called),
    ],
)
def test_place_is_that_of_the_function_or_class(made: object, subject: object) -> None:
    """Be it a partial, a method, a view of a class, or called by `__call__`."""
    assert _place(made) == place_of(subject)
    # A class that was made in memory, of a module that there is not.
    made = type("Made", (), {"__module__": "not.there"})
    assert _place(made) == ("", None, "not.there.Made")
