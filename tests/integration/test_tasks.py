"""`locked_task`: tasks of `django.tasks` and of its backport, one at a time for each key."""

from __future__ import annotations

import json
import logging
import math
import pickle
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import pytest
from django.core.management import call_command
from django.utils import timezone

from django_distlock import (
    InvalidArgument,
    LockError,
    LockNotAcquired,
    LockUsageError,
    Retry,
    current_lease,
    distlock,
    signals,
)
from django_distlock.contrib import jobs
from django_distlock.contrib.tasks import locked_task
from django_distlock.handler import lock_backends
from django_distlock.signals import work_requeued
from django_distlock.testing import lose_connection
from tests.contract.helpers import PATIENCE, Later
from tests.contract.locking import Heard, eventually, held_elsewhere

from .projects import Project

PACKAGES = [name for name in ("django.tasks", "django_tasks") if find_spec(name)]
#: The one that django-tasks-db has its workers for is the first.
MODULES: dict[str, Any] = {name: import_module(name) for name in PACKAGES}


def task(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a task of the first package."""
    made: Callable[[Callable[..., Any]], Any] = MODULES[PACKAGES[0]].task(**options)
    return made


NAME = attrgetter("name")


def said(**more: Any) -> dict[str, Any]:
    """Say what the task works under."""
    lease = current_lease()
    held = lease is not None and lease.held
    return {"held": held, "task_id": None if lease is None else lease.holder.task_id, **more}


@task()
@locked_task("task:{key}")
def plain(key: str, more: int = 7) -> dict[str, Any]:
    """Be a task."""
    return said(more=more)


@task()
@locked_task("task:{key}")
async def asynchronous(key: str, more: int = 7) -> dict[str, Any]:
    """Be an asynchronous task."""
    return said(more=more)


@task(takes_context=True)
@locked_task("task:{key}")
def taking(context: Any, key: str, more: int = 7) -> dict[str, Any]:
    """Take the context."""
    return said(more=more, attempt=context.attempt)


@task(takes_context=True)
@locked_task(lambda key, more=7: f"task:{key}")
async def async_taking(context: Any, key: str, more: int = 7) -> dict[str, Any]:
    """Take the context, and a key that a function makes."""
    return said(more=more, attempt=context.attempt)


@task()
@locked_task("task:{key}", on_conflict="retry")
def retrying(key: str) -> dict[str, Any]:
    """Insist on another attempt."""
    return said()


def body(key: str) -> dict[str, Any]:
    """Be the body of several tasks."""
    return said()


async def async_body(key: str) -> dict[str, Any]:
    """Be that of asynchronous ones."""
    return said()


def locked(function: Callable[..., Any], **options: Any) -> Any:
    """Make a task that holds its key, or what the options say; it has no path to be queued by."""
    key: dict[str, Any] = {} if "locks" in options else {"key": "task:{key}"}
    return task()(locked_task(**key, **options)(function))


waiting = locked(body, on_conflict="wait", wait=20)
#: Those that leave the key to others, and those that go on without it.
SKIPPING = [locked(each, on_conflict="skip", on_unavailable="skip") for each in (body, async_body)]
RUNNING = [locked(each, on_conflict="run", on_unavailable="run") for each in (body, async_body)]
skipping = SKIPPING[0]
#: Those with two limits.
BOTH: list[Any] = [("task:{key}", lambda key: 2), "task:{key}:shared"]
LIMITED = [locked(each, locks=BOTH, on_conflict="skip") for each in (body, async_body)]
KINDS = ["sync", "async"]


@task()
@locked_task("task:{key}:outer")
def inner_conflict(key: str) -> None:
    """Meet a conflict of one's own."""
    distlock(f"task:{key}", wait=0).acquire()


@task()
@locked_task("task:{key}:outer")
def calling(key: str) -> dict[str, Any]:
    """Call another task's function."""
    called: dict[str, Any] = plain.func(key)
    return called


@task()
@locked_task("task:{key}")
def recursing(key: str, other: str = "") -> dict[str, Any]:
    """Call one's own function."""
    called: dict[str, Any] = recursing.func(other) if other else said()
    return called


@task(takes_context=True)
@locked_task("task:{key}")
def recursing_with_context(context: Any, key: str, other: str = "") -> dict[str, Any]:
    """Call one's own function, with the context."""
    called: dict[str, Any] = recursing_with_context.func(context, other) if other else said()
    return called


@task()
@locked_task("task:{key}")
def naming(context: str, key: str) -> dict[str, Any]:
    """Have an argument of this name, which is none."""
    return said(context=context)


@task()
@locked_task(locks=[("task:{key}", 2), ("task:{key}:shared", 1)])
def limited_again(key: str) -> dict[str, Any]:
    """Be one that is queued again."""
    return said()


@task()
@locked_task("task:{key}", on_conflict="raise")
def raising(key: str) -> dict[str, Any]:
    """Fail."""
    return said()


@task()
@locked_task("task:{key}", max_wait=None, retry=Retry(delay=5, cap=5, max_retries=2))
def counted(key: str) -> dict[str, Any]:
    """Be queued again twice at most."""
    return said()


@task()
@locked_task("drill", ttl=20, retry=Retry(delay=0.2, cap=0.5))
def drill(number: int, file: str) -> dict[str, Any]:
    """Note begin and end, and take some time."""
    note(file, number)
    time.sleep(0.3)
    note(file, number)
    return said()


def note(file: str, number: int) -> None:
    """Write a line into a file that all processes write."""
    with Path(file).open("a") as opened:
        opened.write(f"{number}\n")


class Tasks:
    """One of the packages, with tasks that run at once, or later."""

    def __init__(self, package: str):
        self.module = MODULES[package]
        self._signals: Any = import_module(f"{package}.signals")
        backends = f"{package}.backends"
        self.settings = {
            "default": {"BACKEND": f"{backends}.immediate.ImmediateBackend"},
            "later": {"BACKEND": f"{backends}.dummy.DummyBackend", "QUEUES": ["default", "slow"]},
        }

    def of(self, task: Any, **options: Any) -> Any:
        """Return the task that this package makes of another one's function."""
        return self.module.task(takes_context=task.takes_context, **options)(task.func)

    def now(self, task: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a task at once; return its result."""
        return self.of(task).enqueue(*args, **kwargs)

    def queue(self) -> list[Any]:
        """Return what was queued to be run later."""
        results: list[Any] = self.module.task_backends["later"].results
        return results

    def work(self, result: Any) -> Any:
        """Run what was queued, as a worker does; return what it returned."""
        sender = type(result.task.get_backend())
        context = self.module.TaskContext(task_result=result)
        self._signals.task_started.send(sender, task_result=result)
        try:
            hidden = [context] if result.task.takes_context else []
            return result.task.call(*hidden, *result.args, **result.kwargs)
        finally:
            self._signals.task_finished.send(sender, task_result=result)


@pytest.fixture
def tasks(request: pytest.FixtureRequest, settings: Any) -> Tasks:
    """Give the first package, or the one that is asked for."""
    made = Tasks(getattr(request, "param", PACKAGES[0]))
    settings.TASKS = made.settings
    return made


#: For what asks a package, or is told by it. All else is the same code for each.
EACH_PACKAGE = pytest.mark.parametrize("tasks", PACKAGES, indirect=True)


@pytest.fixture
def taken(key: str) -> Iterator[str]:
    """Hold the key of a task."""
    lease = Later(distlock(f"task:{key}", ttl=30).acquire).result()
    yield key
    Later(lease.release).result()


ALL = pytest.mark.parametrize("task", [plain, asynchronous, taking, async_taking], ids=NAME)


@EACH_PACKAGE
@ALL
def test_task_runs_under_its_lock(tasks: Tasks, task: Any, key: str) -> None:
    """It is held while the body runs, known by the task's id, and free behind it."""
    result = tasks.now(task, key, more=8)
    assert result.return_value["held"] is True
    assert result.return_value["more"] == 8
    assert result.return_value["task_id"] == result.id
    assert Later(distlock(f"task:{key}").locked).result() is False


@ALL
def test_conflict_queues_the_task_again(tasks: Tasks, task: Any, key: str) -> None:
    """With the same arguments, for later; the first one succeeds and says so."""
    slow = tasks.of(task, backend="later").using(queue_name="slow", priority=9)
    first = slow.enqueue(key, more=8)
    before = timezone.now()
    lease = Later(distlock(f"task:{key}", ttl=30).acquire).result()
    with Heard(work_requeued, f"task:{key}") as heard:
        marker = tasks.work(first)
    assert isinstance(heard.once["cause"], LockNotAcquired)
    second = tasks.queue()[-1]
    assert marker == {"distlock": "queued again", "key": f"task:{key}", "as": second.id}
    assert json.loads(json.dumps(marker)) == marker
    assert len(tasks.queue()) == 2
    assert second.id != first.id
    assert second.args == [key]
    assert second.task.func is task.func
    assert (second.task.queue_name, second.task.priority) == ("slow", 9)
    assert before <= second.task.run_after <= timezone.now() + timedelta(seconds=1)
    third = tasks.queue()[-1]
    for times in (2, 3):
        tasks.work(third)
        third = tasks.queue()[-1]
        assert third.kwargs["_distlock"] == [second.kwargs["_distlock"][0], times]
    Later(lease.release).result()
    returned = tasks.work(third)
    assert (returned["held"], returned["more"], returned["task_id"]) == (True, 8, third.id)
    assert len(tasks.queue()) == 4


@pytest.mark.parametrize("task", LIMITED, ids=KINDS)
def test_two_limits_all_or_none(tasks: Tasks, task: Any, key: str) -> None:
    """Beside one who has a permit it runs; where one of the limits is met, it holds none."""
    limit, shared = distlock(f"task:{key}", permits=2), distlock(f"task:{key}:shared")
    with held_elsewhere(limit):
        assert tasks.now(task, key).return_value["held"] is True
        with held_elsewhere(limit):
            skipped = tasks.now(task, key).return_value
            assert (skipped["distlock"], skipped["key"]) == ("skipped", limit.key)
            assert not Later(shared.locked).result()
    with held_elsewhere(shared):
        skipped = tasks.now(task, key).return_value
        assert (skipped["distlock"], skipped["key"]) == ("skipped", shared.key)
        assert not Later(limit.locked).result()


def test_two_limits_queue_the_task_again(tasks: Tasks, key: str) -> None:
    """It says which of the keys was taken, and runs when both are free."""
    first = tasks.of(limited_again, backend="later").enqueue(key)
    with held_elsewhere(distlock(f"task:{key}:shared")):
        assert tasks.work(first)["key"] == f"task:{key}:shared"
    assert tasks.work(tasks.queue()[-1])["held"] is True


def test_function_of_a_key_returns_any_spelling(key: str) -> None:
    """A file's name comes from macOS with each accent as a character of its own."""

    @locked_task(lambda name: name)
    def body(name: str) -> str | None:
        """Tell the key."""
        lease = current_lease()
        return None if lease is None else lease.key

    assert body(f"{key}-e\u0301") == f"{key}-\u00e9"


def test_arguments_that_cannot_be() -> None:
    """They are refused where the decorator stands, and named."""

    def body(key: str) -> None:
        pass

    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "takes a key, or several"),
        ({"key": 5}, "takes a key, or several as locks=.*, not 5"),
        ({"key": "k", "locks": ["k"]}, "not both"),
        ({"locks": []}, "list of keys and permits"),
        ({"locks": "k"}, "list of keys and permits"),
        ({"locks": [("k", 2, 3)]}, "how many may hold it"),
        ({"locks": [5]}, "how many may hold it"),
        ({"locks": [("k", 0)]}, "from 1 to 10,000, not 0"),
        ({"locks": ["k"], "permits": 3}, "leave permits out"),
        ({"key": "k", "on_conflict": "sometimes"}, "on_conflict"),
        ({"key": "k", "on_unavailable": "retry"}, "on_unavailable"),
        ({"key": "k", "max_wait": -1}, "max_wait"),
        ({"key": "k", "ttl": -1}, "ttl"),
        ({"key": "k", "retry": 5}, "retry"),
        ({"key": "k", "backend": 5}, "backend"),
    ]
    for options, rule in bad:
        with pytest.raises(InvalidArgument, match=rule):
            locked_task(**options)(body)


def test_task_is_not_queued_for_ever(tasks: Tasks, taken: str) -> None:
    """It fails where `max_wait` ends, counted from the first time, or `max_retries` are over."""
    since = time.time() - jobs.MAX_WAIT
    task = tasks.of(plain, backend="later")
    tasks.work(task.enqueue(taken, _distlock=[since + 5, 40]))
    last = tasks.queue()[-1]
    assert last.kwargs["_distlock"] == [since + 5, 41]
    # `max_wait` ends in 5 s. Between two looks at the clock a busy machine may stand still.
    assert last.task.run_after.timestamp() <= since + jobs.MAX_WAIT + 5 + 5
    with pytest.raises(LockNotAcquired) as caught:
        tasks.work(task.enqueue(taken, _distlock=[since - 1, 41]))
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"Queued again 41 times, in 36\d\d s\.", note)
    assert tasks.queue()[-1].kwargs["_distlock"][1] == 41
    task = tasks.of(counted, backend="later")
    assert tasks.work(task.enqueue(taken, _distlock=[0.0, 1]))["distlock"] == "queued again"
    with pytest.raises(LockNotAcquired):
        tasks.work(task.enqueue(taken, _distlock=[0.0, 2]))


@EACH_PACKAGE
def test_conflict_is_raised_where_the_backend_cannot_defer(tasks: Tasks, taken: str) -> None:
    """Rather than lost: the task has failed, for all to see."""
    result = tasks.now(plain, taken)
    assert result.status == "FAILED"
    assert result.errors[0].exception_class is LockNotAcquired
    assert "Its backend cannot run a task later (supports_defer)." in result.errors[0].traceback
    assert "Queued again" not in result.errors[0].traceback


@EACH_PACKAGE
def test_retry_is_refused_where_the_backend_cannot_defer(tasks: Tasks, key: str) -> None:
    """At the first run, and not at the first conflict; the error says what to do."""
    result = tasks.now(retrying, key)
    assert result.errors[0].exception_class is LockUsageError
    said = result.errors[0].traceback
    assert "supports_defer" in said
    assert "tests.integration.test_tasks.retrying" in said
    assert "'default' (ImmediateBackend)" in said
    task = tasks.of(retrying, backend="later")
    assert tasks.work(task.enqueue(key))["held"] is True


@EACH_PACKAGE
def test_call_of_the_function_is_not_queued(tasks: Tasks, taken: str) -> None:
    """It is locked, and its caller gets the error, also inside of the body of another task."""
    assert plain.func(f"{taken}:free") == {"held": True, "task_id": None, "more": 7}
    with pytest.raises(LockNotAcquired) as caught:
        plain.func(taken)
    assert "The function was called directly" in caught.value.__notes__[0]
    with pytest.raises(LockNotAcquired):
        tasks.work(tasks.of(calling, backend="later").enqueue(taken))
    with pytest.raises(LockNotAcquired):
        tasks.work(tasks.of(recursing, backend="later").enqueue(f"{taken}:own", taken))
    with pytest.raises(LockNotAcquired):
        tasks.work(tasks.of(recursing_with_context, backend="later").enqueue(f"{taken}:own", taken))
    assert len(tasks.queue()) == 3


def test_argument_that_is_called_context(tasks: Tasks, key: str) -> None:
    """By its place and by its name, it is an argument like any other, but none of the key's."""
    assert tasks.now(naming, "one", key).return_value["context"] == "one"
    assert tasks.now(naming, context="two", key=key).return_value["context"] == "two"


@pytest.mark.parametrize("is_away", [False, True], ids=["conflict", "outage"])
@pytest.mark.parametrize("task", SKIPPING, ids=KINDS)
def test_task_can_be_skipped(
    tasks: Tasks, task: Any, taken: str, is_away: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The task succeeds, says why, and who has the key; the log has it too."""
    caplog.set_level(logging.INFO, "django_distlock")
    record = lock_backends["default"].read(f"task:{taken}")
    assert record is not None
    with lose_connection() if is_away else nullcontext():
        marker = tasks.now(task, taken).return_value
    holder = {"host": record.holder.host, "pid": record.holder.pid, "task_id": None}
    assert marker == {
        "distlock": "skipped",
        "key": f"task:{taken}",
        "why": "service_unavailable" if is_away else "acquisition_timeout",
        "holder": None if is_away else holder,
    }
    (logged,) = [each.levelname for each in caplog.records if "is skipped" in each.message]
    assert logged == ("ERROR" if is_away else "INFO")


def test_skipped_task_names_the_task_that_runs(tasks: Tasks, key: str) -> None:
    """Whoever reads the result finds it."""
    seen: list[Any] = []

    @locked_task("task:{key}")
    def body(key: str) -> None:
        """Meet another task while this one runs."""
        seen.append(Later(tasks.now, skipping, key).result().return_value)

    body.__qualname__ = "body"
    result = tasks.module.task()(body).enqueue(key)
    assert result.errors == []
    assert seen[0]["holder"]["task_id"] == result.id


def test_conflict_can_be_waited_for(tasks: Tasks, key: str) -> None:
    """In the worker, for `wait` seconds."""
    lease = Later(distlock(f"task:{key}", ttl=30).acquire).result()
    waits = Later(tasks.now, waiting, key)
    assert eventually(lambda: asked_for(f"task:{key}"), 10)
    Later(lease.release).result()
    assert waits.result().return_value["held"] is True


def asked_for(key: str) -> bool:
    """Whether somebody waits for a key."""
    from django_distlock.models import HeldLock

    return HeldLock.objects.filter(key=key, wanted=True).exists()


def test_wait_by_default() -> None:
    """One attempt, for a worker that waits works for nobody; a few seconds if it is to wait."""
    about: dict[str, Any] = {"on_unavailable": "raise", "max_wait": 1}
    policies: dict[Any, float] = {"wait": 5, "raise": 0, "skip": 0, "retry": 0, "run": 0}
    for on_conflict, wait in policies.items():
        assert jobs.Rules.of(on_conflict=on_conflict, **about).lock.wait == wait
        assert jobs.Rules.of(on_conflict=on_conflict, wait=2, **about).lock.wait == 2


@pytest.mark.parametrize("task", RUNNING, ids=KINDS)
def test_body_can_run_without_the_lock(tasks: Tasks, task: Any, taken: str) -> None:
    """Whether somebody has the key or the store is away; the signal says so."""
    with Heard(signals.lock_bypassed, f"task:{taken}") as heard:
        assert tasks.now(task, taken).return_value == {"held": False, "task_id": None}
        with lose_connection():
            assert tasks.now(task, taken).return_value == {"held": False, "task_id": None}
    assert [facts["alias"] for facts in heard.facts] == ["default", "default"]
    assert heard.facts[1]["waited"] >= 0


def test_outage_is_raised(tasks: Tasks, key: str) -> None:
    """Unless the decorator says otherwise; nothing is queued again."""
    with lose_connection(), pytest.raises(LockError) as caught:
        tasks.work(tasks.of(plain, backend="later").enqueue(key))
    assert caught.value.code == "service_unavailable"
    assert len(tasks.queue()) == 1


def test_conflict_of_the_bodys_own_is_raised(tasks: Tasks, taken: str) -> None:
    """As where that is asked for: the task has failed, although it could run later."""
    for task in (inner_conflict, raising):
        with pytest.raises(LockNotAcquired):
            tasks.work(tasks.of(task, backend="later").enqueue(taken))
    assert len(tasks.queue()) == 2


def test_pauses_grow_and_have_full_jitter() -> None:
    """Those that have met one holder do not come back together."""
    rules = jobs.Rules.of(
        on_conflict="retry", on_unavailable="raise", max_wait=1000, retry=Retry(4, 2, 16)
    )
    for times, step in ((0, 4), (1, 8), (2, 16), (9, 16)):
        queued = jobs.Queued(100.0, times)
        pauses = [rules.pause(queued, 100.0) or 0.0 for _ in range(300)]
        assert max(pauses) <= step
        assert max(pauses) > step * 0.8
        assert min(pauses) < step * 0.2
    assert (rules.pause(jobs.Queued(100.0, 9), 1099.0) or 0.0) <= 1
    assert rules.pause(jobs.Queued(100.0, 0), 1100.0) is None


def test_tasks_are_found_by_their_path(tasks: Tasks) -> None:
    """The decorated function has the name and the signature of its body, and tasks are pickled."""
    assert tasks.of(plain).module_path == "tests.integration.test_tasks.plain"
    assert tasks.of(plain).name == "plain"
    assert drill.module_path == "tests.integration.test_tasks.drill"
    if hasattr(drill, "_reconstruct"):
        assert pickle.loads(pickle.dumps(drill.using(priority=5))).func is drill.func


@EACH_PACKAGE
def test_missing_parentheses_are_told_at_import(
    tasks: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of a task is no key, and its module says so when it is imported."""
    name = f"bare_{secrets.token_hex(6)}"
    (tmp_path / f"{name}.py").write_text(
        f"from {tasks.module.__name__} import task\n"
        "from django_distlock.contrib.tasks import locked_task\n"
        "@task()\n"
        "@locked_task\n"
        "def send(number): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidArgument, match=r"send as its key\..*Write @locked_task\("):
        import_module(name)


def test_what_cannot_be_decorated_is_refused(tasks: Tasks) -> None:
    """Where it stands, or at the first call where nothing was known before; nothing runs."""
    ran = []

    async def work() -> None:
        ran.append("work")

    @locked_task("{key}")
    def returning(key: str) -> object:
        """Return what is to be awaited."""
        return work()

    @wraps(work)
    def wrapped() -> Any:
        return work()

    def generating(key: str) -> Iterator[int]:
        """Give a number."""
        yield 1

    def named(_distlock: str) -> None:
        """Have the name by which we tell a task how often it was queued."""

    def body(*numbers: int) -> None:
        """Be taken for a key."""

    with pytest.raises(LockUsageError, match="returning returns a coroutine"):
        returning(secrets.token_hex(6))
    with pytest.raises(LockUsageError, match="returns a coroutine"):
        locked_task("key")(wrapped)
    assert ran == []
    with pytest.raises(LockUsageError, match="generator"):
        locked_task("{key}")(generating)
    with pytest.raises(LockUsageError, match="below @task()"):
        locked_task("{key}")(tasks.of(plain))
    with pytest.raises(InvalidArgument, match="named has a parameter _distlock"):
        locked_task("key")(named)
    for template in ("{other}", "{context.attempt}"):
        with pytest.raises(InvalidArgument, match=r"not a parameter of taking\(key: "):
            locked_task(template)(taking.func.__wrapped__)
    for arguments in ((), (3,), (3, 4)):
        with pytest.raises(InvalidArgument, match=r"without parentheses\? Write @locked_task\("):
            cast("Any", locked_task)(body)(*arguments)


def test_what_has_not_travelled(tasks: Tasks, key: str) -> None:
    """Arguments come from a queue: what is in there may be from anybody."""
    for bad in ("x", [1], [1, "x"], [0, math.inf], None):
        with pytest.raises(InvalidArgument, match="how a job was queued"):
            tasks.work(tasks.of(plain, backend="later").enqueue(key, _distlock=bad))


# With workers


def work() -> None:
    """Be a worker, until killed."""
    call_command("db_worker", interval=0.1, startup_delay=False, verbosity=0)


def enqueue(numbers: list[int], file: str) -> list[str]:
    """Queue tasks; return their ids."""
    return [str(drill.enqueue(number, file).id) for number in numbers]


def results() -> dict[str, tuple[str, Any]]:
    """Return the status and the result of all tasks."""
    model: Any = import_module("django_tasks_db.models").DBTaskResult
    return {str(each.id): (each.status, each.return_value) for each in model.objects.all()}


@pytest.fixture
def project(postgresql: str) -> Project:
    """Give a project whose tasks are in a database of its own."""
    apps = ["contenttypes", "auth"]
    made = Project(
        postgresql,
        TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
        INSTALLED_APPS=[
            *(f"django.contrib.{app}" for app in apps),
            "django_distlock",
            *(["django_tasks"] if PACKAGES[0] == "django_tasks" else []),
            "django_tasks_db",
        ],
    )
    made.manage("migrate", "--verbosity=0")
    return made


def followed(found: dict[str, tuple[str, Any]], task_id: str) -> tuple[str, str, Any]:
    """Return what became of a task: the id of the last one in its place, and its result."""
    status, value = found[task_id]
    if isinstance(value, dict) and value.get("distlock") == "queued again":
        return followed(found, value["as"])
    return task_id, status, value


def hold() -> None:
    """Hold the key until told."""
    with distlock("drill", ttl=20):
        print("held")
        input()


def test_worker_comes_back_to_a_task(project: Project, tmp_path: Path) -> None:
    """Its key is taken at first; what was queued in its place runs when it is free."""
    file = tmp_path / "notes"
    with ExitStack() as stack:
        holder = stack.enter_context(project.start("tests.integration.test_tasks:hold"))
        holder.wait_for("held", PATIENCE)
        (first,) = project.run("tests.integration.test_tasks:enqueue", [1], str(file))
        stack.enter_context(project.start("tests.integration.test_tasks:work"))
        give_up = time.monotonic() + PATIENCE
        while len(found := project.run("tests.integration.test_tasks:results")) < 3:
            assert time.monotonic() < give_up, found
        assert not file.exists()
        holder.send("let go")
        assert eventually(lambda: file.exists() and len(file.read_text().split()) == 2, PATIENCE)
        while followed(found, first)[1] != "SUCCESSFUL":
            assert time.monotonic() < give_up, found
            found = project.run("tests.integration.test_tasks:results")
    last, _, value = followed(found, first)
    assert last != first
    assert found[first][1]["distlock"] == "queued again"
    assert value == {"held": True, "task_id": last}


def test_workers_run_one_task_of_a_key_at_a_time(project: Project, tmp_path: Path) -> None:
    """And every task once, in whichever order."""
    file = tmp_path / "notes"
    numbers = random.sample(range(100), 5)
    with ExitStack() as stack:
        project.run("tests.integration.test_tasks:enqueue", numbers, str(file))
        for _ in range(3):
            stack.enter_context(project.start("tests.integration.test_tasks:work"))
        assert eventually(lambda: file.exists() and len(file.read_text().split()) == 10, PATIENCE)
    noted = [int(line) for line in file.read_text().split()]
    assert noted[::2] == noted[1::2]
    assert sorted(noted[::2]) == sorted(numbers)
