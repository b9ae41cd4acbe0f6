"""`locked_task` and `LockedTask` where no message travels, and what their parts promise."""

# mypy: disable-error-code="untyped-decorator"
# Celery comes without types.

from __future__ import annotations

import base64
import functools
import json
import logging
import os
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from celery import Celery, Task, _state, chain
from celery.app.trace import build_tracer
from celery.concurrency.prefork import process_destructor
from celery.exceptions import Ignore, OperationalError, Reject, SoftTimeLimitExceeded
from celery.signals import before_task_publish, task_postrun
from celery.utils.imports import symbol_by_name
from django.core.checks import CheckMessage
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import override_settings
from django.utils import timezone
from django.utils.functional import keep_lazy_text

from django_distlock import (
    BackendUnavailable,
    InvalidArgument,
    Lease,
    LockLost,
    LockNotAcquired,
    LockUsageError,
    current_lease,
    distlock,
    lock_backends,
)
from django_distlock.contrib import prometheus
from django_distlock.contrib.celery import (
    LockedTask,
    claims,
    endings,
    failed,
    leftovers,
    locked_task,
    queueing,
    runs,
)
from django_distlock.contrib.celery.checks import check_tasks
from django_distlock.contrib.celery.deliveries import LEASE, OF
from django_distlock.contrib.celery.terms import terms_of
from django_distlock.core.keys import RUNS_PREFIX, own_key
from django_distlock.core.records import Contended
from django_distlock.locks import blocks
from django_distlock.models import FailedTask, LockEvent
from django_distlock.signals import lock_bypassed, lock_not_acquired, work_skipped
from django_distlock.testing import hold, lose_connection, memory_locks, simulate_pause
from tests.contract.helpers import Later, there
from tests.contract.locking import Heard, eventually
from tests.integration.projects import importable, run_python
from tests.integration.test_metrics_opentelemetry import Told
from tests.integration.test_metrics_prometheus import Scraped
from tests.processes import spawn

#: Where processes find what they call of this file.
HERE = "tests.celery.test_locked_task"
#: What a unique task holds that has the key "7".
UNIQUE = own_key("unique:7")


@pytest.fixture
def app() -> Iterator[Celery]:
    """Give an app that runs tasks where they are sent."""
    made = Celery("eager", set_as_current=False, broker="memory://", backend="cache+memory://")
    made.conf.update(task_always_eager=True, task_store_eager_result=True)
    with memory_locks():
        yield made
    made.close()


def deliver(task: Any, /, *args: Any, **request: Any) -> str:
    """Run a task as a worker does, which took it from a queue; return its id."""
    request = {"id": uuid.uuid4().hex, "is_eager": False, "delivery_info": {}, **request}
    trace = build_tracer(task.name, task.app.tasks[task.name], app=task.app)
    trace(request["id"], args, {}, request)
    return str(request["id"])


def lease_now() -> Lease:
    """Return the lease of the task around the caller."""
    return there(current_lease())


def held_now() -> list[str]:
    """Return the keys that are held."""
    return [each.key for each in lock_backends["default"].list().records]


def key_now() -> str:
    """Return the key that is held around the caller."""
    return lease_now().key


# Keys


def test_key_of_all_arguments(app: Celery) -> None:
    """Without a template, the key is the task and all of its arguments, but for the task itself."""

    @app.task(shared=False, name="sums", bind=True)
    @locked_task()
    def work(self: Any, one: Any, two: Any = "b") -> str:
        return key_now()

    assert work.delay(1).get() == 'sums:{"one":1,"two":"b"}'
    assert work.delay(two="b", one=1).get() == work.delay(1).get()
    assert work.delay("1").get() != work.delay(1).get()
    assert len(work.delay("long" * 500).get()) < 100
    assert work.delay({10: 1, 9: 2}).get() == work.delay({"9": 2, "10": 1}).get()
    assert work.delay({1: 1, "a": 2}).get() == 'sums:{"one":{"1":1,"a":2},"two":"b"}'
    for one in ("\ud800", {(1, 2): 3}, FailedTask()):
        with pytest.raises(InvalidArgument, match="no canonical text"):
            work(one)


def test_key_of_arguments_without_names(app: Celery) -> None:
    """As of a body whose decorator hides its parameters: of them, the task alone does not count."""

    @app.task(shared=False, name="sums.hidden", bind=True)
    @locked_task()
    def work(*args: Any, more: int = 3) -> str:
        return key_now()

    assert work.delay(1).get() == 'sums.hidden:{"args":[1],"more":3}'
    assert work.delay().get() == 'sums.hidden:{"args":[],"more":3}'


def key_of(number: int) -> str:
    """Make a key."""
    return f"made:{number}"


@pytest.mark.parametrize(
    "lock",
    [lambda number: f"made:{number}", key_of, keep_lazy_text(key_of)],
    ids=["lambda", "function of a module", "wrapped by another module"],
)
def test_key_that_a_function_makes(app: Celery, lock: Callable[..., str]) -> None:
    """It gets what the caller gave, and is not taken for the function of a task."""

    @app.task(shared=False, name="by.function", bind=True)
    @locked_task(lock)
    def work(self: Any, number: int) -> str:
        return key_now()

    assert work.delay(number=7).get() == "made:7"


@pytest.mark.parametrize("lock", [True, lambda name: name], ids=["all arguments", "function"])
def test_arguments_in_any_spelling(app: Celery, lock: Any) -> None:
    """A file's name comes from macOS with each accent as a character of its own."""

    @app.task(shared=False, name="by.name", base=LockedTask)
    @locked_task(lock, unique=lock)
    def work(name: str) -> list[str]:
        return held_now()

    held = work.delay("caf\u00e9").get()
    assert len(held) == 2
    assert work.delay("cafe\u0301").get() == held


def test_keys_of_classes(app: Celery) -> None:
    """A class describes its lock by attributes, and so do the options of a decorator."""

    class Work(LockedTask):
        name = "work"
        lock = "class:{number}"
        lock_options = {"ttl": 60}

        def run(self, number: int) -> str:
            return key_now()

    class Other(Work):
        name = "other"
        lock = "other:{number}"

    @app.task(shared=False, base=LockedTask, lock="options:{number}")
    def work(number: int) -> str:
        return key_now()

    assert app.register_task(Work()).delay(1).get() == "class:1"
    assert app.register_task(Other()).delay(1).get() == "other:1"
    assert work.delay(1).get() == "options:1"


def test_keys_of_mixins(app: Celery) -> None:
    """A body and a key may come from two classes above, and are one task."""

    class Base(LockedTask):
        lock = "class:{number}"

    class Body:
        def run(self, number: int) -> str:
            return key_now()

    class Keyed:
        lock = "mixin:{number}"

    class Work(Body, Base):
        name = "work"

    class Other(Keyed, Work):
        name = "other"

    assert app.register_task(Work()).delay(1).get() == "class:1"
    assert app.register_task(Other()).delay(1).get() == "mixin:1"
    free = type("Free", (Work,), {"name": "free", "lock": None})
    assert terms_of(app.register_task(free())) is None


def test_arguments_are_checked_when_a_task_is_sent(app: Celery) -> None:
    """As without the lock."""

    @app.task(shared=False, bind=True)
    @locked_task("{number}")
    def work(self: Any, number: int) -> None: ...

    with pytest.raises(TypeError, match="number"):
        work.delay()
    with pytest.raises(TypeError):
        work.delay(1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lock": "{other}"}, "names 'other'"),
        ({"lock": 7}, "lock must be a template"),
        ({"on_conflict": "wiat"}, "on_conflict must be one of"),
        ({"on_unavailable": "wait"}, "on_unavailable must be one of"),
        ({"wait": None}, "wait must be limited"),
        ({"grace": -1}, "grace"),
        ({"inherit": "yes"}, "inherit must be True or False"),
    ],
)
def test_wrong_arguments_are_told_at_import(options: dict[str, Any], message: str) -> None:
    """What breaks a rule is named when the task is defined."""
    with pytest.raises(InvalidArgument, match=message):

        @locked_task(**{"lock": "{number}", **options})
        def work(number: int) -> None: ...


def test_body_that_is_returned_does_not_run() -> None:
    """A task whose function returns a coroutine or a generator has done nothing: it fails."""

    async def awaited() -> None: ...

    def generating() -> Iterator[int]:
        yield 1

    @locked_task(uuid.uuid4().hex)
    def work() -> Any:
        return generating()

    with pytest.raises(LockUsageError, match="work returns a generator"):
        work()
    with pytest.raises(LockUsageError, match="awaited returns a coroutine"):
        locked_task("key")(awaited)
    with pytest.raises(LockUsageError, match="returns a generator"):
        locked_task("key")(contextmanager(generating))


@pytest.mark.django_db(transaction=True)
def test_lease_is_not_handed_down_before_the_commit(
    app: Celery, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is sent inside a transaction may begin before it is committed."""
    sent: list[dict[str, Any]] = []

    @app.task(shared=False, name="locked.handed_down")
    @locked_task("key:{number}", inherit=True)
    def work(number: int) -> None: ...

    def send() -> None:
        headers: dict[str, Any] = {"id": "7", OF: "6", "distlock_until": 5}
        queueing.hand_down(work.name, ((7,), {}, {}), headers)
        sent.append(headers)

    monkeypatch.setattr(queueing, "current_app", app)
    with distlock("key:7") as lease:
        with transaction.atomic():
            send()
            transaction.on_commit(send)
        send()
    given = {"id": "7", OF: "6", "distlock_until": 5}
    handed = {"id": "7", OF: "7", LEASE: lease.fence_token}
    assert sent == [given, handed, handed]
    assert "delay_on_commit" in caplog.text


@pytest.mark.parametrize("decorator", ["shared_task", "app.task", "app.task(bind=True)"])
def test_missing_parentheses_are_told_at_import(decorator: str, tmp_path: Path) -> None:
    """The function of a task is no key, and its module says so when it is imported."""
    text = (
        "from celery import Celery, shared_task\n"
        "from django_distlock.contrib.celery import locked_task\n"
        "app = Celery('bare', set_as_current=False)\n"
        f"@{decorator}\n"
        "@locked_task\n"
        "def capture(number): ...\n"
    )
    rule = r"capture as its key\..*Write @locked_task\("
    with importable(tmp_path, {"bare": text}), pytest.raises(InvalidArgument, match=rule):
        import_module("bare")


@pytest.mark.parametrize("mistake", [locked_task, locked_task("key")], ids=["as key", "wrapped"])
def test_task_is_refused_before_it_is_made(mistake: Any) -> None:
    """A look at a task that is shared would finalize the app, before its other tasks are there."""
    app = Celery("lazy", set_as_current=False)

    @app.task(shared=False)
    def capture() -> None: ...

    with pytest.raises(InvalidArgument, match=r"needs a key|a task already"):
        mistake(capture)
    assert not capture.__evaluated__()


def test_missing_parentheses_are_told_at_the_first_run(app: Celery) -> None:
    """Of a function inside of another one it is not known before, whatever it is called with."""
    bare: Any = locked_task

    @app.task(shared=False, name="bare")
    @bare
    def work(number: int) -> None: ...

    @app.task(shared=False, name="bare.bound", bind=True)
    @bare
    def bound(self: Any, number: int) -> None: ...

    for result in (work.delay(3), bound.delay(3)):
        assert isinstance(result.result, InvalidArgument)
        assert "without parentheses? Write @locked_task(…)" in str(result.result)


# Conflicts


@pytest.fixture
def counted() -> Iterator[Callable[[str], tuple[float | None, float]]]:
    """Give what Prometheus and OpenTelemetry have counted of an outcome, for keys of invoices."""
    scraped, told = Scraped(stores=False), Told()
    labels = {"backend": "default", "prefix": "invoice"}
    yield lambda outcome: (
        scraped.value("acquire_total", outcome=outcome, **labels),
        told.point("acquire", outcome=outcome, **labels).value,
    )
    told.close()
    prometheus.uninstall(scraped.registry)


@pytest.mark.parametrize(
    ("in_the_way", "why", "level", "outcome"),
    [
        (lambda: hold("invoice:7"), "acquisition_timeout", logging.INFO, "conflict"),
        (lose_connection, "service_unavailable", logging.ERROR, "unavailable"),
    ],
    ids=["somebody else", "no answer"],
)
def test_skipping_is_told(
    app: Celery,
    caplog: pytest.LogCaptureFixture,
    counted: Callable[[str], tuple[float | None, float]],
    in_the_way: Callable[[], AbstractContextManager[object]],
    why: str,
    level: int,
    outcome: str,
) -> None:
    """By a marker that JSON can carry, by the log, by the signal, and by the counters."""

    @app.task(shared=False)
    @locked_task("invoice:{number}", on_unavailable="skip")
    def work(number: int) -> None:
        pytest.fail("It is to be skipped.")

    with (
        in_the_way(),
        caplog.at_level(logging.INFO, "django_distlock"),
        Heard(lock_not_acquired, "invoice:7") as heard,
    ):
        result = work.delay(7)
    assert result.state == "SUCCESS"
    marker = json.loads(json.dumps(result.get()))
    assert bool(marker.pop("holder")) is (outcome == "conflict")
    assert marker == {"distlock": "skipped", "key": "invoice:7", "why": why}
    (said,) = [each for each in caplog.records if "is skipped" in each.getMessage()]
    assert said.getMessage().startswith(f"The task {result.id} is skipped")
    assert said.levelno == level
    assert (heard.once["alias"], heard.once["wait"]) == ("default", 0)
    assert heard.once["cause"].code == why
    assert counted(outcome) == (1, 1)


def test_skipping_of_a_call_is_told(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """A call has no id, and the log names the task."""

    @app.task(shared=False, name="called.directly", bind=True)
    @locked_task("{number}", on_unavailable="skip")
    def work(self: Any, number: int) -> None: ...

    with hold("7"), caplog.at_level(logging.INFO, "django_distlock"):
        work(7)
    with lose_connection():
        work(7)
    told = [each.getMessage() for each in caplog.records if "is skipped" in each.getMessage()]
    assert [each.split(" is skipped")[0] for each in told] == ["The task called.directly"] * 2


def test_queueing_again_has_an_end_without_a_queue(app: Celery) -> None:
    """An eager task waits where it is, for no longer than `max_wait`, and counts no retry."""
    runs: list[int] = []

    @app.task(shared=False, bind=True, max_retries=0)
    @locked_task("{number}", on_conflict="retry", max_wait=0.2)
    def work(self: Any, number: int) -> None:
        runs.append(self.request.retries)

    with hold("7"):
        result = work.delay(7)
    assert isinstance(result.result, LockNotAcquired)
    work.delay(7).get()
    assert runs == [0]


def test_conflicts_of_the_body_are_its_own(app: Celery) -> None:
    """What the body raises is never taken for the task's own conflict."""

    @app.task(shared=False)
    @locked_task("{number}")
    def work(number: int) -> None:
        with distlock("inner", wait=0):
            pass

    with hold("inner"):
        assert isinstance(work.delay(7).result, LockNotAcquired)


def test_function_in_the_body_of_another_task(app: Celery) -> None:
    """A locked function that another task calls is no task, and does not go by that one's id."""

    @locked_task("inner")
    def inner() -> Any:
        return lease_now().holder.task_id

    @app.task(shared=False, bind=True)
    @locked_task("outer")
    def outer(self: Any) -> Any:
        return lease_now().holder.task_id == self.request.id, inner()

    assert outer.delay().get() == (True, None)


def test_task_that_calls_itself(app: Celery) -> None:
    """Each inner call has its own locks until it ends, and nothing of the outer one's message."""
    seen: list[Any] = []

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task("lock:{number}", unique="{number}", on_conflict="retry", max_wait=0.2)
    def work(self: Any, number: int) -> None:
        seen.append((number, lease_now().holder.task_id, self.request.headers or {}))
        if number > 6:
            self(number - 1)
            seen.append(distlock(own_key("unique:6")).locked())
            with hold("lock:6"), pytest.raises(LockNotAcquired):
                self.run(number - 1)
            assert distlock(UNIQUE).locked()

    task_id = deliver(work, 7)
    assert seen == [(7, task_id, {}), (6, None, {}), False]
    assert not distlock(UNIQUE).locked()


def test_run_of_a_class_above(app: Celery) -> None:
    """The lock of a task is that of its class, and holds while it runs what a class above does."""

    class Work(LockedTask):
        name = "work"
        lock = "above:{number}"
        unique = "{number}"

        def run(self, number: int) -> list[str]:
            return [*map(str, held_now()), "done"]

    class Same(Work):
        name = "same"

        def run(self, number: int) -> list[str]:
            return super().run(number)

    class Other(Same):
        name = "other"
        lock = "{number}"

        def run(self, number: int) -> list[str]:
            return super().run(number)

    @locked_task("helper:{number}")
    def helper(task: Any, number: int) -> list[str]:
        return held_now()

    class Helped(Work):
        name = "helped"

        def run(self, number: int) -> list[str]:
            return helper(self, number)

    for task, keys in ((Same, ["above:7"]), (Other, ["7"]), (Helped, ["above:7", "helper:7"])):
        work = app.register_task(task())
        assert sorted(set(work.AsyncResult(deliver(work, 7)).get()) - {"done", UNIQUE}) == keys
        assert not distlock(UNIQUE).locked()


def test_task_whose_class_wraps_its_call(app: Celery) -> None:
    """Celery copies the request there, and its unique key still ends with the result."""

    class Wrapped(LockedTask):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    @app.task(shared=False, base=Wrapped)
    @locked_task(unique="{number}")
    def work(number: int) -> str | None:
        return lease_now().holder.task_id

    task_id = deliver(work, 7)
    assert work.AsyncResult(task_id).get() == task_id
    assert not distlock(UNIQUE).locked()


@pytest.mark.parametrize("policy", ["raise", "run"])
def test_store_that_does_not_answer(app: Celery, policy: Any) -> None:
    """The task fails, or runs without its lock and says so; how it is skipped, see above."""

    @app.task(shared=False)
    @locked_task("{number}", on_unavailable=policy)
    def work(number: int) -> bool:
        return current_lease() is None

    with lose_connection(), Heard(lock_bypassed, "7") as heard:
        result = work.delay(7)
    if policy == "raise":
        assert isinstance(result.result, BackendUnavailable)
        assert not heard.facts
    else:
        assert result.get() is True
        assert heard.once


# Unique tasks


@pytest.mark.parametrize("options", [{}, {"lock_options": {"ttl": 5}}])
def test_unique_needs_its_base(app: Celery, options: dict[str, Any]) -> None:
    """A task that could never be seen in the queue says so at its first call, whatever its options.

    One that is named as those of the base is not taken for a sign of it.
    """

    @app.task(shared=False, **options)
    @locked_task(unique="{number}")
    def work(number: int) -> None: ...

    result = work.delay(7).result
    assert isinstance(result, LockUsageError)
    assert "base=LockedTask" in str(result)


def test_sending_that_fails_gives_the_key_back(app: Celery) -> None:
    """A broker that takes no message leaves nothing behind."""
    app.conf.update(task_always_eager=False, broker_url="redis://127.0.0.1:1/0")

    @app.task(shared=False, base=LockedTask)
    @locked_task(unique="{number}")
    def work(number: int) -> None: ...

    for _ in range(2):
        with pytest.raises(OperationalError):
            work.apply_async((7,), retry=False)
        assert not distlock(UNIQUE).locked()


def test_value_does_not_reach_the_key_of_a_queued_task(app: Celery) -> None:
    """Whoever holds what looks like it, a file of that name, keeps no task from being queued."""

    @app.task(shared=False, base=LockedTask)
    @locked_task("{name}", unique="{name}")
    def work(name: str) -> str:
        return key_now()

    for name in ("unique:report.pdf", str(own_key("unique:report.pdf"))):
        with distlock(name):
            assert work.delay("report.pdf").get() == "report.pdf"


def produce(key: str) -> str:
    """Send a unique task whose key could be taken from a dead holder; return its id."""
    made = Celery("producer", set_as_current=False, broker="memory://")

    @made.task(shared=False, name="produced", base=LockedTask)
    @locked_task(unique="{key}", backend="redis", ttl=300, steal_if_dead=True)
    def work(key: str) -> None: ...

    return str(work.delay(key).id)


@pytest.mark.parametrize("keys", [{"lock": "{number}"}, {"unique": "{number}"}])
@pytest.mark.parametrize("on_lost", ["raise", "ignore"])
def test_lease_that_is_lost(app: Celery, keys: dict[str, Any], on_lost: Any) -> None:
    """The task fails, unless it may outlive its lease, whichever key it is that it runs under."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(**keys, on_lost=on_lost)
    def work(number: int) -> None:
        simulate_pause(lease_now())

    result = work.delay(7)
    assert isinstance(result.result, LockLost) is (on_lost == "raise")


def test_unique_key_outlives_its_producer(key: str) -> None:
    """A task is queued although the process that sent it is gone, and it is not queued twice."""
    with spawn(f"{HERE}:produce", key) as producer:
        sent = producer.result()
    assert produce(key) == sent
    record = there(lock_backends["redis"].read(own_key(f"unique:{key}")))
    assert (record.holder.task_id, record.holder.pid) == (sent, 0)
    lock_backends["redis"].force_release(record.key)


def be_recycled(key: str) -> None:
    """End as a process of a pool does behind its last task."""
    with override_settings(DISTLOCK_HISTORY=1), distlock(key):
        pass
    kept = distlock(f"{key}:kept", ttl=300).acquire(heartbeat=True)
    assert kept.held
    process_destructor(os.getpid(), 0)
    os._exit(0)


def test_end_of_a_pools_process(key: str) -> None:
    """It gives back what it holds, and its last release is kept: for one task, its only one."""
    with spawn(f"{HERE}:be_recycled", key) as process:
        process.popen.wait()
    assert LockEvent.objects.filter(key=key, kind=LockEvent.Kind.RELEASED).count() == 1
    assert not distlock(f"{key}:kept").locked()


def test_unique_and_lock_may_be_one_text(app: Celery) -> None:
    """What is queued is not in the way of what runs, and both are free behind it."""

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task("{number}", unique="{number}")
    def work(self: Any, number: int) -> Any:
        duplicate = self.delay(number)
        return key_now(), distlock(UNIQUE).locked(), duplicate.id == self.request.id

    with Heard(work_skipped, UNIQUE) as heard:
        assert work.delay(7).get() == ("7", True, True)
    assert [type(each["cause"]) for each in heard.facts] == [LockNotAcquired]
    assert not distlock("7").locked()
    assert not distlock(UNIQUE).locked()


def test_call_in_the_transaction_of_a_run_is_queued(app: Celery) -> None:
    """The transaction keeps the key of the run that has ended, and the call goes on with it."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(unique="{number}")
    def work(number: int) -> Any:
        record = lock_backends["default"].read(UNIQUE)
        return record is not None and record.holder.task_id

    with transaction.atomic():
        for run in (work.apply((7,)), work.delay(7)):
            assert run.get() == run.id
    assert not distlock(UNIQUE).locked()


def test_retry_with_another_unique_key(app: Celery) -> None:
    """It takes its own key, and that of the run that sends it ends."""

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task(unique="{number}")
    def work(self: Any, number: int, *, last: bool = False) -> list[str]:
        if self.request.retries < 3:
            args = (number, 7, 8)[self.request.retries]
            raise self.retry(countdown=0, args=(args,), kwargs={"last": True})
        return held_now()

    assert work.delay(7).get() == [own_key("unique:8")]
    assert not held_now()


@contextmanager
def queue_of(app: Celery) -> Iterator[Callable[[], Any]]:
    """Queue what is sent in the block; give what takes the next message from the queue, if any."""
    app.conf.task_always_eager = False
    with app.connection() as connection:
        queue = app.amqp.queues["celery"].bind(connection.channel())
        queue.declare()
        # Of this process, and so of other tests, too.
        queue.purge()
        yield lambda: queue.get(no_ack=True)


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "given"])
@pytest.mark.parametrize("options", [{}, {"debounce": 1}, {"lock": "lock", "on_conflict": "run"}])
def test_retry_whose_body_has_changed_its_key(
    app: Celery, options: dict[str, Any], *, in_place: bool
) -> None:
    """It runs, whatever was called before for the new key, and the old key ends."""
    ran: list[int] = []

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task(unique="{numbers[0]}", **options)
    def work(self: Any, numbers: list[int]) -> None:
        ran.append(numbers[0])
        if numbers[0] == 7:
            numbers[0] = 8
            raise self.retry(countdown=0, args=None if in_place else ([8],))

    with queue_of(app) as next_message, hold("lock"):
        for number in (8, 8, 7):
            work.delay([number])
            while (message := next_message()) is not None:
                deliver(work, *message.payload[0], **message.headers)
    assert ran == [8, 8, 7, 8]
    assert not held_now()


def test_headers_of_another_task(app: Celery) -> None:
    """Sent on with what a task sends, they say nothing about the keys of that."""
    sent: list[Any] = []

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task("lock:{number}", unique="{number}", inherit=True)
    def work(self: Any, number: int) -> str:
        if number == 7:
            each = [self.apply_async((8,), headers=self.request.headers).id for _ in range(2)]
            sent.extend(each)
        return f"{self.request.headers['trace']}: {key_now()}"

    with queue_of(app) as next_message:
        work.apply_async((7,), headers={"trace": "x"})
        deliver(work, 7, **next_message().headers)
        assert (sent[0], held_now()) == (sent[1], [own_key("unique:8")])
        deliver(work, 8, **next_message().headers)
        assert next_message() is None
    assert work.AsyncResult(sent[0]).get() == "x: lock:8"
    assert not held_now()


def test_serializer_of_another_task(app: Celery) -> None:
    """A retry is written as its own task was, whatever its sender's message was written by."""

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task("{number}")
    def work(self: Any, number: int) -> None:
        if number == 7:
            self.apply_async((8,), headers=self.request.headers)
        raise self.retry(countdown=0)

    with queue_of(app) as next_message:
        work.apply_async((7,), serializer="pickle")
        deliver(work, 7, **next_message().headers)
        sent, retried = next_message(), next_message()
        deliver(work, 8, **sent.headers)
        kinds = [each.content_type for each in (sent, retried, next_message())]
    assert kinds == ["application/json", "application/x-python-serialize", "application/json"]


def test_task_that_is_queued_again_shows_no_more_of_its_arguments(app: Celery) -> None:
    """Its sender may show something else instead of a secret."""

    @app.task(shared=False, base=LockedTask, acks_late=True)
    @locked_task("{number}")
    def work(number: int) -> None: ...

    lease = Later(distlock("7").acquire).result()
    shown = {"argsrepr": "(***)", "kwargsrepr": "<hidden>"}
    with queue_of(app) as next_message:
        work.apply_async((7,), **shown)
        deliver(work, 7, **next_message().headers)
        again = next_message().headers
    lease.release()
    assert {name: again[name] for name in shown} == shown


def test_options_of_celery_may_be_given_by_position(app: Celery) -> None:
    """In the order that Celery has them in."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(unique="{number}")
    def work(number: int) -> None: ...

    with queue_of(app) as next_message:
        work.apply_async((7,), {}, "an-id", None, work.s(8), None, "another name")
        message = next_message()
    assert (message.headers["id"], message.headers["shadow"]) == ("an-id", "another name")
    assert [each["args"] for each in message.payload[2]["callbacks"]] == [[8]]


def ended(error: Exception) -> type[Task]:
    """Return a base of tasks that fail before their bodies."""

    class Early(LockedTask):
        def before_start(self, *_: Any) -> None:
            raise error

    return Early


@pytest.mark.parametrize(
    ("base", "key", "is_queued"),
    [
        (ended(ValueError()), "{number}", False),
        (ended(Reject(requeue=False)), "{number}", False),
        (ended(Reject(requeue=True)), "{number}", True),
        (ended(ValueError()), lambda number: f"{number}", False),
        (LockedTask, "{number.real}", False),
    ],
    ids=["failed", "rejected", "queued again", "key of a function", "no key"],
)
def test_unique_key_ends_with_a_task_that_has_not_begun(
    app: Celery, base: type[Task], key: Any, *, is_queued: bool
) -> None:
    """So does its place in the backlog, unless its message comes again."""

    @app.task(shared=False, base=base)
    @locked_task("lock:{number}", unique=key, max_queued=3)
    def work(number: Any) -> None: ...

    with queue_of(app) as next_message:
        work.delay(7)
        # JSON may make a text of a value, which lacks its attributes.
        deliver(work, "7", **next_message().headers)
    assert len(held_now()) == (2 if is_queued else 0)


def test_unique_key_ends_with_a_task_that_celery_could_not_start(app: Celery) -> None:
    """The store of results did not take its state: the task has failed, and comes no more."""
    app.conf.task_track_started = True

    @app.task(shared=False, base=LockedTask)
    @locked_task("lock:{number}", unique="{number}", max_queued=3)
    def work(number: int) -> None: ...

    with queue_of(app) as next_message:
        result = work.delay(7)
        away = mock.patch.object(app.backend, "store_result", side_effect=[OSError, mock.DEFAULT])
        with away, pytest.warns(RuntimeWarning, match="outside body"):
            deliver(work, 7, **next_message().headers)
        assert not held_now()
        assert work.delay(7).id != result.id


@pytest.mark.parametrize("base", [LockedTask, ended(ValueError())], ids=["begun", "not begun"])
def test_unique_key_ends_with_a_task_whose_body_is_wrapped(app: Celery, base: type[Task]) -> None:
    """As with pydantic=True, whose arguments are others than those of the message."""

    def parsed(body: Callable[[int], None]) -> Callable[[str], None]:
        return functools.wraps(body)(lambda number: body(int(number)))

    @app.task(shared=False, base=base)
    @parsed
    @locked_task(True, unique=True, max_queued=3)
    def work(number: int) -> None:
        assert len(held_now()) == 2

    with queue_of(app) as next_message:
        work.delay("7")
        deliver(work, "7", **next_message().headers)
    assert not held_now()


def test_call_like_one_that_was_replaced_is_queued(app: Celery) -> None:
    """It would return the result of a task that does not run."""
    ran: list[str] = []

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task("lock", unique="{number}", max_queued=1, on_full="replace")
    def work(self: Any, number: int) -> None:
        ran.append(self.request.id)

    with queue_of(app) as next_message:
        first, _, last = (work.delay(number) for number in (7, 8, 7))
        assert first.id != last.id
        for number in (7, 8, 7):
            deliver(work, number, **next_message().headers)
    assert ran == [last.id]
    assert not held_now()


@pytest.mark.parametrize(
    "options", [{"task_id": "an-id"}, {"parent_id": "another"}], ids=["named", "follows"]
)
def test_duplicate_that_is_awaited_is_sent(app: Celery, options: dict[str, str]) -> None:
    """Whoever waits for its id gets a marker from the worker that skips it."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(unique="{number}")
    def work(number: int) -> None: ...

    with queue_of(app) as next_message:
        first = work.delay(7)
        awaited = work.apply_async((7,), **options)
        assert awaited.id != first.id
        assert next_message().headers["id"] == first.id
        assert deliver(work, 7, **next_message().headers) == awaited.id
    assert awaited.get()["holder"]["task_id"] == first.id


def test_awaited_call_without_a_place_has_no_unique_key(app: Celery) -> None:
    """A worker skips it, and a later call for its key is no duplicate of that."""
    ran: list[str] = []

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task("lock", unique="{number}", max_queued=1, on_full="drop")
    def work(self: Any, number: int) -> None:
        ran.append(self.request.id)

    with queue_of(app) as next_message:
        first = work.delay(7)
        awaited = work.apply_async((8,), task_id="id-without-a-place")
        deliver(work, 7, **next_message().headers)
        last = work.delay(8)
        for _ in range(2):
            deliver(work, 8, **next_message().headers)
    assert ran == [first.id, last.id]
    assert awaited.get()["why"] == "backlog_full"
    assert not held_now()


def test_result_of_a_duplicate_may_be_ignored(app: Celery) -> None:
    """As that of the first call: it is not stored, and `get()` would wait for it."""

    @app.task(shared=False, base=LockedTask, ignore_result=True)
    @locked_task(unique="{number}")
    def work(number: int) -> None: ...

    with queue_of(app):
        first, second = work.delay(7), work.delay(7)
    assert first.id == second.id
    assert first.get() is second.get(timeout=0.1) is None


def test_place_that_is_replaced_may_be_busy(app: Celery) -> None:
    """Whoever takes it over at the same moment is in the way for that moment."""

    @app.task(shared=False, base=LockedTask)
    @locked_task("lock", max_queued=1, on_full="replace")
    def work(number: int) -> None: ...

    store, busy = lock_backends["default"], [Contended(busy=True)]
    acquire = store.acquire

    def acquired(*args: Any, replace: str | None = None, **kwargs: Any) -> Any:
        return busy.pop() if replace and busy else acquire(*args, replace=replace, **kwargs)

    with queue_of(app), mock.patch.object(store, "acquire", acquired):
        work.delay(1)
        last = work.delay(2)
    assert not busy
    assert [each.holder.task_id for each in store.list().records] == [last.id]


def test_unique_key_of_models_is_that_of_their_message(app: Celery) -> None:
    """As with pydantic=True: Celery sends dictionaries, and a worker sees nothing else."""
    dumped = staticmethod(lambda args, kwargs: (tuple(map(str, args)), kwargs))

    @app.task(shared=False, base=LockedTask, _dump_pydantic_arguments=dumped)
    @locked_task(unique=True)
    def work(number: object) -> None: ...

    with queue_of(app) as next_message:
        work.delay(7)
        message = next_message()
        deliver(work, *message.payload[0], **message.headers)
    assert not held_now()


@pytest.mark.parametrize(
    "options",
    [
        {"unique": "{number[id]}", "unique_until": "start"},
        {"lock": "{number[id]}", "max_queued": 3},
        {"lock": "{number[id]}", "inherit": True},
    ],
    ids=["unique", "max_queued", "inherit"],
)
@pytest.mark.parametrize("is_called", [False, True], ids=["sent", "called"])
def test_keys_of_models_that_the_sender_makes_are_those_of_the_run(
    app: Celery, options: dict[str, Any], *, is_called: bool
) -> None:
    """As with pydantic=True, where the run has models and its sender dictionaries."""
    held: list[str] = []

    def dumped(args: Any, kwargs: Any) -> tuple[Any, Any]:
        return [{"id": each} if each == 7 else each for each in args], kwargs

    def parsed(body: Callable[[int], None]) -> Callable[[Any], None]:
        return functools.wraps(body)(lambda number: body(7))

    @app.task(shared=False, base=LockedTask, _dump_pydantic_arguments=staticmethod(dumped))
    @parsed
    @locked_task(**options)
    def work(number: int) -> None:
        held.append(key_now().removeprefix(RUNS_PREFIX))

    if is_called:
        work(7)
    else:
        work.delay(7)
    assert held == ["7"]
    assert not held_now()


@pytest.mark.parametrize("error", [Ignore(), Reject(requeue=False), ValueError(), None])
def test_keys_of_a_task_that_runs_without_its_lock(app: Celery, error: Exception | None) -> None:
    """It waits no more once it has begun, and may be called again however it ends."""
    held: list[list[str]] = []

    @app.task(shared=False, base=LockedTask)
    @locked_task("{number}", unique="{number}", max_queued=1, on_conflict="run")
    def work(number: int) -> None:
        held.append(held_now())
        if error is not None:
            raise error

    with queue_of(app) as next_message:
        work.delay(7)
        with hold("7"):
            deliver(work, 7, **next_message().headers)
    assert held == [["7", UNIQUE]]
    assert not held_now()


def test_unique_key_stays_with_a_retry_that_does_not_end_its_run(app: Celery) -> None:
    """The run succeeds, and the task is still queued."""

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task(unique="{number}")
    def work(self: Any, number: int) -> None:
        if not self.request.retries:
            self.retry(throw=False, countdown=60)

    with queue_of(app) as next_message:
        task_id = deliver(work, 7)
        assert work.AsyncResult(task_id).state == "SUCCESS"
        assert work.delay(7).id == task_id
        deliver(work, 7, **next_message().headers)
    assert not distlock(UNIQUE).locked()


def test_unique_key_stays_with_a_chain_that_replaces_its_run(app: Celery) -> None:
    """Its first task may come before the run has ended, and is no duplicate of that."""
    ran: list[int] = []

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task(unique="key")
    def work(self: Any, number: int) -> None:
        ran.append(number)
        if number == 7:
            try:
                self.replace(chain(work.si(8), work.si(9), app=app))
            finally:
                message = next_message()
                deliver(work, 8, **message.headers, chain=message.payload[2]["chain"])

    with queue_of(app) as next_message:
        deliver(work, 7)
        deliver(work, 9, **next_message().headers)
    assert ran == [7, 8, 9]
    assert not held_now()


def test_unique_key_ends_though_the_end_of_its_run_is_interrupted(app: Celery) -> None:
    """Celery ignores what a soft time limit raises there, and nobody would end the key."""

    @app.task(shared=False, base=LockedTask, acks_late=True)
    @locked_task(unique="{number}")
    def work(number: int) -> None: ...

    notes = type(lock_backends["default"].notes)
    with mock.patch.object(notes, "put", side_effect=SoftTimeLimitExceeded) as put:
        deliver(work, 7)
    put.assert_called_once()
    assert not distlock(UNIQUE).locked()


@pytest.mark.parametrize(
    "keys", [{"unique": "{number}"}, {"lock": "{number}", "max_queued": 1}], ids=["unique", "place"]
)
def test_claims_end_though_their_release_is_interrupted(app: Celery, keys: dict[str, Any]) -> None:
    """The soft time limit comes once, and what a task has is released behind it."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(**keys)
    def work(number: int) -> None: ...

    effects = [SoftTimeLimitExceeded, mock.DEFAULT]
    with queue_of(app) as next_message:
        work.delay(7)
        headers = next_message().headers
    wraps = leftovers.free
    with mock.patch.object(leftovers, "free", wraps=wraps, side_effect=effects) as free:
        deliver(work, 7, **headers)
    assert free.call_count == 2
    assert held_now() == []


def test_unique_key_ends_though_its_run_is_not_ended(app: Celery) -> None:
    """A soft time limit came before its end had begun, and its traceback keeps the run."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(unique="{number}")
    def work(number: int) -> None: ...

    with mock.patch.object(runs.Run, "end", side_effect=SoftTimeLimitExceeded) as end:
        deliver(work, 7)
    end.assert_called_once()
    assert eventually(lambda: not held_now())


def test_run_of_a_unique_task_leaves_no_block(app: Celery) -> None:
    """Each would keep its arguments, and a lost lease would be counted for ever."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(unique="{number}")
    def work(number: int) -> str:
        return key_now()

    @app.task(shared=False)
    @locked_task("{number}", inherit=True, on_conflict="raise")
    def child(number: int) -> str:
        return key_now()

    before = set(blocks.every)
    keys = [deliver(work, 7)]
    lease = Later(distlock("7").acquire).result()
    keys.append(deliver(child, 7, distlock_lease=lease.fence_token))
    lease.release()
    assert [app.AsyncResult(each).get() for each in keys] == [UNIQUE, "7"]
    assert set(blocks.every) == before


def test_task_under_the_lease_of_its_sender_fails_if_that_is_lost(app: Celery) -> None:
    """Also where both run in one process, and share the lease."""

    @app.task(shared=False)
    @locked_task("{number}", inherit=True, on_conflict="raise")
    def child(number: int) -> None:
        lease = current_lease()
        assert lease
        lock_backends["default"].force_release(f"{number}")
        with suppress(LockLost):
            lease.extend()

    sent = []

    @app.task(shared=False)
    @locked_task("{number}", on_conflict="raise")
    def parent(number: int) -> None:
        lease = current_lease()
        assert lease
        sent.append(deliver(child, number, distlock_lease=lease.fence_token))

    deliver(parent, 7)
    with pytest.raises(LockLost):
        app.AsyncResult(sent[0]).get()


def test_unique_key_ends_though_the_run_did_not_hear_of_its_grant(app: Celery) -> None:
    """Taken over from the queue, it is nobody's if a soft time limit comes before the answer."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(unique="{number}")
    def work(number: int) -> None: ...

    with queue_of(app) as next_message:
        work.delay(7)
        headers = next_message().headers
    store = lock_backends["default"]
    acquire = store.acquire
    granted: list[Any] = []

    def interrupted(*args: Any, **options: Any) -> None:
        granted.append(acquire(*args, **options))
        raise SoftTimeLimitExceeded

    with mock.patch.object(store, "acquire", interrupted):
        deliver(work, 7, **headers)
    assert [each.key for each in granted] == [UNIQUE]
    assert eventually(lambda: not held_now())


def test_unique_key_ends_though_its_sender_is_interrupted(app: Celery) -> None:
    """Let go of, it would keep others from being queued for an hour, and none is."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(unique="{number}")
    def work(number: int) -> None: ...

    let_go = Lease._let_go

    def interrupted(lease: Lease) -> None:
        let_go(lease)
        raise SoftTimeLimitExceeded

    with mock.patch.object(Lease, "_let_go", interrupted), pytest.raises(SoftTimeLimitExceeded):
        work.delay(7)
    assert held_now() == []


@pytest.mark.parametrize(
    "keys", [{"unique": "{number}"}, {"lock": "{number}", "max_queued": 1}], ids=["unique", "place"]
)
def test_claims_end_though_their_message_was_not_begun(app: Celery, keys: dict[str, Any]) -> None:
    """A soft time limit came between the grant and the message: nobody has the claim any more."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(**keys)
    def work(number: int) -> None: ...

    held: list[str] = []

    def interrupted(*_: Any) -> None:
        held.extend(held_now())
        raise SoftTimeLimitExceeded

    with (
        mock.patch.object(claims, "publish", interrupted),
        suppress(SoftTimeLimitExceeded),
    ):
        work.delay(7)
    assert len(held) == 1
    assert eventually(lambda: not held_now())


def test_task_that_is_revoked_is_free_when_its_state_is_seen(app: Celery) -> None:
    """Who sends it again at once does not get the result of what will never run."""

    @app.task(shared=False, base=LockedTask)
    @locked_task(unique="{number}")
    def work(number: int) -> None: ...

    endings.watch(sender=mock.Mock(app=app))
    held: list[list[str]] = []

    def stored(*_: Any, **__: Any) -> None:
        held.append(held_now())

    with queue_of(app) as next_message, mock.patch.object(app.backend, "mark_as_revoked", stored):
        work.apply_async((7,), expires=-1)
        message = next_message()
        request = symbol_by_name(work.Request)(message, app=app, task=work)
        assert request.revoked()
    assert held == [[]]


def test_retry_of_a_call_that_began_while_it_was_replaced(app: Celery) -> None:
    """It has begun, and its retry does not give way any more: half of its work would be lost."""

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task("{number}", max_queued=1, on_full="replace")
    def work(self: Any, number: int) -> str:
        return "done" if self.request.retries else self.retry(countdown=0)

    with queue_of(app) as next_message:
        work.delay(7)
        first = next_message().headers

        def begin(**_: Any) -> None:
            before_task_publish.disconnect(begin)
            deliver(work, 7, **first)

        before_task_publish.connect(begin)
        work.delay(7)
        task_id = deliver(work, 7, **next_message().headers)
    assert task_id == first["id"]
    assert work.AsyncResult(task_id).get() == "done"


def test_redelivery_beside_a_run_that_shares_its_key(app: Celery) -> None:
    """It waits for its own run, though whoever else has the key came first."""

    @app.task(shared=False, acks_late=True, bind=True)
    @locked_task("{number}", permits=2, on_conflict="raise")
    def work(self: Any, number: int) -> None:
        again = partial(deliver, work, 7, id=self.request.id)
        Later(again).result()

    with queue_of(app) as next_message, distlock("7", permits=2):
        task_id = Later(partial(deliver, work, 7)).result()
        assert next_message().headers["id"] == task_id
    assert work.AsyncResult(task_id).state == "SUCCESS"


def _text(pair: Any) -> str:
    return f"pair:{pair}"


@pytest.mark.parametrize(
    "terms",
    [
        {"unique": _text},
        {"unique": _text, "unique_until": "start"},
        {"lock": _text, "max_queued": 1},
    ],
    ids=["unique", "until start", "place"],
)
def test_claim_ends_though_the_worker_makes_another_key(app: Celery, terms: Any) -> None:
    """A tuple is a list in the message, and has another text there."""
    ran: list[Any] = []

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task(**terms)
    def work(self: Any, pair: Any) -> None:
        ran.append(pair)
        if not self.request.retries:
            raise self.retry(countdown=0)

    with queue_of(app) as next_message:
        for _ in range(2):
            work.delay((1, 2))
            while (message := next_message()) is not None:
                # As other brokers than one in memory do.
                headers = json.loads(json.dumps(message.headers))
                deliver(work, *message.payload[0], **headers)
    assert ran == [[1, 2]] * 4
    assert held_now() == []


def test_first_delivery_does_not_wait_for_the_note_of_another_task(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a holder it runs at once: nobody has written a note of its own run."""
    monkeypatch.setattr(runs, "_SETTLING", 60.0)
    ran: list[int] = []

    @app.task(shared=False, acks_late=True)
    @locked_task("{number}", on_conflict="wait")
    def work(number: int) -> None:
        ran.append(number)

    with queue_of(app), distlock("7"):
        waiting = Later(partial(deliver, work, 7))
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
    waiting.result(20)
    assert ran == [7]


@pytest.mark.parametrize("options", [{"permits": 2}, {"shared": True}], ids=["permits", "shared"])
def test_lease_of_the_sender_among_those_who_share_its_key(
    app: Celery, options: dict[str, Any]
) -> None:
    """Whoever else holds the key, the task works under that of its sender."""

    @app.task(shared=False)
    @locked_task("{number}", inherit=True, on_conflict="raise", **options)
    def work(number: int) -> int | None:
        return lease_now().fence

    leases = [Later(distlock("7", **options).acquire).result() for _ in range(2)]
    for lease in leases:
        task_id = deliver(work, 7, distlock_lease=lease.fence_token)
        assert work.AsyncResult(task_id).get() == lease.fence
        lease.release()


def test_message_that_is_sent_again_has_not_been_dead(app: Celery) -> None:
    """RabbitMQ throws a message away that says it has been in the queue that delays it."""

    @app.task(shared=False, base=LockedTask, bind=True)
    @locked_task("{number}", on_conflict="retry")
    def work(self: Any, number: int) -> None:
        self.retry(countdown=3)

    given = {"x-death": [{"queue": "celery_delayed_0"}], "x-first-death-queue": "", "x-trace": "7"}
    with queue_of(app) as next_message:
        deliver(work, 7, **given)
        with hold("7"):
            deliver(work, 7, **given)
        for _ in range(2):
            assert given.keys() & next_message().headers == {"x-trace"}


def test_task_that_goes_round_is_one_who_retries(key: str) -> None:
    """Between two deliveries it is seen as behind the first one; its run ends that."""

    def seen() -> list[Any]:
        waiting = lock_backends["default"].waiters.of(key)
        return [[each.holder.task_id, each.is_retrying] for each in waiting]

    broker, results = "memory://", "cache+memory://"
    with Celery("round", set_as_current=False, broker=broker, backend=results) as app:

        @app.task(shared=False)
        @locked_task("{key}", on_conflict="retry", ttl=60)
        def work(key: str) -> list[Any]:
            return seen()

        with queue_of(app) as next_message:
            with hold(key):
                task_id = deliver(work, key)
                for _ in range(2):
                    assert seen() == [[task_id, True]]
                    deliver(work, key, **next_message().headers)
                assert seen() == [[task_id, True]]
            deliver(work, key, **next_message().headers)
        assert work.AsyncResult(task_id).get() == seen() == []


@pytest.mark.parametrize("keys", [{"unique": "{number}"}, {"max_queued": 1}, {"max_queued": 2}])
def test_claims_are_extended_while_their_task_goes_round(
    app: Celery, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each refusal, but before they end; a store that fails is asked again by the next."""

    @app.task(shared=False, base=LockedTask)
    @locked_task("{number}", on_conflict="retry", unique_ttl=60, **keys)
    def work(number: int) -> None: ...

    store, now = lock_backends["default"], time.time

    def ends_at() -> list[Any]:
        return [each.expires_at for each in store.list().records if each.holder.is_queued]

    with queue_of(app) as next_message, hold("7"):
        work.delay(7)
        for ahead, error, is_extended in (
            (0, BackendUnavailable("away"), False),
            (0, None, True),
            (0, None, False),
            (40, None, True),
        ):
            before = ends_at()
            monkeypatch.setattr(time, "time", lambda ahead=ahead: now() + ahead)
            with mock.patch.object(store, "extend_many", wraps=store.extend_many) as extend:
                extend.side_effect = error
                deliver(work, 7, **next_message().headers)
            assert (ends_at() > before) == is_extended
            assert len(ends_at()) == 1


def test_task_that_is_acknowledged_late_outlasts_an_outage(app: Celery) -> None:
    """It goes back to its queue, and no retry of its own is burnt."""

    @app.task(shared=False, acks_late=True, bind=True, max_retries=0)
    @locked_task("{number}")
    def work(self: Any, number: int) -> tuple[str, int]:
        return key_now(), self.request.retries

    with queue_of(app) as next_message:
        with lose_connection():
            task_id = deliver(work, 7)
            assert work.AsyncResult(task_id).state == "RETRY"
            deliver(work, 7, **next_message().headers)
        assert deliver(work, 7, **next_message().headers) == task_id
    assert work.AsyncResult(task_id).get() == ["7", 0]


def test_message_that_cannot_be_sent_again(app: Celery) -> None:
    """To be delivered again would not help: the task fails."""

    @app.task(shared=False, acks_late=True)
    @locked_task("{number}", on_conflict="retry")
    def work(number: int, value: object) -> None: ...

    with queue_of(app), hold("7"):
        task_id = deliver(work, 7, object())
    assert work.AsyncResult(task_id).state == "FAILURE"


def test_task_that_cannot_be_queued_again_is_delivered_again(app: Celery) -> None:
    """Celery would try it again by itself, in vain, and throw the message away."""
    ends: list[Any] = []

    @app.task(shared=False, acks_late=True, autoretry_for=(Exception,))
    @locked_task("{number}")
    def work(number: int) -> None: ...

    def ended(retval: Any, **_: Any) -> None:
        ends.append(retval)

    task_postrun.connect(ended)
    away = mock.patch.object(app.amqp, "send_task_message", side_effect=OperationalError)
    with queue_of(app), hold("7"), away:
        deliver(work, 7)
    assert [each.requeue for each in ends] == [True]


def kept(task: Any) -> FailedTask:
    """Keep a task that an outage has ended before its body."""
    body = base64.b64encode(b"[[7], {}]").decode()
    return FailedTask.objects.create(
        task_id=uuid.uuid4().hex,
        task=task.name,
        backend="default",
        key="7",
        failed_at=timezone.now(),
        message={"type": "application/json", "encoding": "utf-8", "body": body},
    )


def test_failed_task_that_is_dropped_stays_listed(app: Celery) -> None:
    """To send it again was in vain where its backlog is full."""

    @app.task(shared=False, base=LockedTask)
    @locked_task("{number}", max_queued=1, on_full="drop")
    def work(number: int) -> None: ...

    row = kept(work)
    with queue_of(app):
        work.delay(7)
        with pytest.raises(LockNotAcquired, match="not queued: backlog_full"):
            failed.send(app, row)
    row.refresh_from_db()
    assert row.sent_at is None
    failed.drop(row)


def test_failed_task_that_another_operator_sends_meanwhile(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command has read the list before that, sends what is left, and says what was not."""

    @app.task(shared=False)
    def work(number: int) -> None: ...

    monkeypatch.setattr(_state._tls, "current_app", app)
    first, second = kept(work), kept(work)
    told = StringIO()

    def send(**_: Any) -> None:
        before_task_publish.disconnect(send)
        failed.send(app, second)

    with queue_of(app) as next_message:
        before_task_publish.connect(send)
        with pytest.raises(CommandError, match="could not be processed"):
            call_command("distlock_replay", send=[first.pk, second.pk], json=True, stdout=told)
        messages = [next_message() for _ in range(3)]
    document = json.loads(told.getvalue())
    assert [each["id"] for each in document["done"]] == [first.pk]
    assert [each["code"] for each in document["failures"]] == ["already_sent"]
    assert [each is None for each in messages] == [False, False, True]
    for row in (first, second):
        failed.drop(row)


def test_failed_task_that_cannot_be_sent_is_in_no_others_way(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release has changed the arguments of one. The command sends the others, and names it."""

    @app.task(shared=False)
    def work(number: int) -> None: ...

    @app.task(shared=False)
    def other() -> None: ...

    monkeypatch.setattr(_state._tls, "current_app", app)
    rows = [kept(work), kept(other), kept(work)]
    told = StringIO()
    ids = [each.pk for each in rows]
    with queue_of(app), pytest.raises(CommandError, match="could not be processed") as caught:
        call_command("distlock_replay", send=ids, json=True, stdout=told)
    document = json.loads(told.getvalue())
    assert caught.value.returncode == 1
    assert [each["id"] for each in document["done"]] == [rows[0].pk, rows[2].pk]
    (failure,) = document["failures"]
    assert failure["message"].startswith(f"{rows[1].pk}: TypeError: ")
    assert {each["id"] for each in document["failed"]} & {*ids} == {rows[1].pk}
    for row in rows:
        failed.drop(row)


def test_what_was_sent_before_the_list_went_away_is_said(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document has no list, and tells why."""

    @app.task(shared=False)
    def work(number: int) -> None: ...

    monkeypatch.setattr(_state._tls, "current_app", app)
    row, told, answers = kept(work), StringIO(), iter([failed.failed(sent=False)])

    def once(*, sent: bool) -> list[FailedTask]:
        if (answer := next(answers, None)) is None:
            raise BackendUnavailable("It is away.")
        return answer

    away = mock.patch.object(failed, "failed", once)
    with queue_of(app), away, pytest.raises(CommandError) as caught:
        call_command("distlock_replay", send=[row.pk], json=True, stdout=told)
    document = json.loads(told.getvalue())
    assert caught.value.returncode == 69
    assert [each["id"] for each in document["done"]] == [row.pk]
    assert [each["message"] for each in document["failures"]] == ["It is away."]
    failed.drop(row)


def test_import_before_the_apps_are_loaded(project: Callable[..., str]) -> None:
    """A project's Celery app may import it, as it does all else that names tasks."""
    code = """
from celery import Celery
from django_distlock.contrib.celery import LockedTask, locked_task
app = Celery('project')
@app.task(base=LockedTask)
@locked_task('{number}', unique='{number}')
def work(number): ...
print(app.tasks['project.work'].name)
"""
    assert project("-c", code) == "project.work\n"


# Checks


def told_of(app: Celery) -> list[CheckMessage]:
    """Run the checks of tasks, where this app is that of the project."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_state._tls, "current_app", app)
        return check_tasks(None)


def checked(app: Celery, **task: Any) -> list[str]:
    """Return what the checks say of a task: `Terms` as `terms`, and Celery's own options."""
    terms = task.pop("terms")

    @app.task(shared=False, name="checked", **task)
    @locked_task(**{"lock": "work:{number}", **terms})
    def work(number: int) -> None: ...

    return [str(each.id) for each in told_of(app) if "checked" in each.msg]


@pytest.mark.parametrize(
    ("task", "terms", "ids"),
    [
        ({}, {"unique": "{number}"}, ["distlock.E401"]),
        ({"base": LockedTask}, {"unique": "{number}"}, []),
        ({"time_limit": 60}, {"ttl": 30, "max_lifetime": 50}, ["distlock.E402"]),
        ({"time_limit": 60}, {"ttl": 30, "heartbeat": False}, ["distlock.E402"]),
        ({"time_limit": 60}, {"ttl": 30}, []),
        ({"acks_late": True, "time_limit": 60}, {"ttl": 30}, ["distlock.W401"]),
        ({"acks_late": True, "time_limit": 4}, {"ttl": 5}, []),
        ({"base": LockedTask}, {"unique": "{number}", "debounce": 11}, ["distlock.W401"]),
        ({"base": LockedTask}, {"unique": "{number}", "debounce": 9}, []),
        ({"time_limit": 60}, {"ttl": 30, "on_conflict": "skip"}, []),
        (
            {"acks_late": True, "reject_on_worker_lost": True},
            {"ttl": 5, "on_conflict": "skip"},
            ["distlock.W402"],
        ),
        ({"acks_late": True, "reject_on_worker_lost": True}, {"ttl": 5}, []),
        ({"acks_late": True}, {"ttl": 5, "on_conflict": "run"}, ["distlock.W403"]),
        ({}, {"ttl": 5, "on_conflict": "run"}, []),
        ({}, {"lock": "{number}"}, ["distlock.W007"]),
        ({"base": LockedTask}, {"lock": None, "unique": "{number}"}, []),
    ],
)
def test_checks(app: Celery, task: Any, terms: Any, ids: list[str]) -> None:
    """What Celery does with a task and its lock cannot do is told before it happens."""
    app.conf.update(
        broker_url="redis://localhost/0", broker_transport_options={"visibility_timeout": 10}
    )
    assert checked(app, terms=terms, **task) == ids


def test_attributes_without_their_base(app: Celery) -> None:
    """What only `LockedTask` reads is an error elsewhere, but not where a base knows it, too."""

    class Own(Task):  # type: ignore[misc]
        lock: Any = None

    class Capture(Task):  # type: ignore[misc]
        name = "described.class"
        lock = "described:{number}"

        def run(self, number: int) -> None: ...

    app.register_task(Capture())
    described: dict[str, dict[str, Any]] = {
        "described.lock": {"lock": "described:{number}"},
        "described.unique": {"unique": True},
        "described.options": {"lock_options": {"ttl": 5}},
        "described.right": {"lock": "described:{number}", "base": LockedTask},
        "described.otherwise": {"lock": "described:{number}", "base": Own},
    }
    for name, options in described.items():

        @app.task(shared=False, name=name, **options)
        def work(number: int) -> None: ...

    found = [each for each in told_of(app) if "described." in each.msg]
    assert [(each.id, each.msg.split(" says ")[0]) for each in found] == [
        ("distlock.E401", f"The task described.{name}")
        for name in ("class", "lock", "options", "unique")
    ]


# A project as Celery describes it: an app, and tasks that a worker finds


PROJECT = {
    "shop/__init__.py": "from .celery import app",
    "shop/celery.py": """
        from celery import Celery

        app = Celery("shop", broker="memory://")
        app.autodiscover_tasks()
    """,
    "shop/settings.py": """
        SECRET_KEY = "only for tests"
        INSTALLED_APPS = ["django_distlock", "billing", "broken"]
        DISTLOCK = {"default": {"BACKEND": "django_distlock.backends.memory.MemoryBackend"}}
    """,
    "billing/__init__.py": """
        from django.core import checks

        @checks.register
        def counted(app_configs, **_):
            print("checks are run")
            return []
    """,
    "billing/tasks.py": """
        from celery import shared_task
        from django_distlock.contrib.celery import locked_task

        @shared_task
        @locked_task(unique="{number}")
        def once(number): ...

        @shared_task(time_limit=60)
        @locked_task("{number}", ttl=5, max_lifetime=10)
        def long(number): ...
    """,
    "broken/__init__.py": "",
    "broken/tasks.py": "import no_such_module",
    "celeryconfig.py": "imports = ['loud']",
    "loud.py": "print('imported')",
}


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., str]:
    """Give what runs Python in the folder of a project."""
    for name, text in PROJECT.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(text))
    return partial(run_python, tmp_path, DJANGO_SETTINGS_MODULE="shop.settings")


def test_checks_find_the_tasks_that_a_worker_would(project: Callable[..., str]) -> None:
    """Nobody else has imported them; a module that fails is told of, and ends no command."""
    said = project("-m", "django", "check", status=1)
    assert "(distlock.E401) The task billing.tasks.once" in said
    assert "(distlock.E402) The task billing.tasks.long" in said
    assert "an import failed" in said
    assert "no_such_module" in said
    assert "Traceback" not in said
    assert said.count("checks are run") == 1


def test_checks_make_no_app(project: Callable[..., str]) -> None:
    """One that Celery makes for want of another would be the default; it imports nothing either."""
    code = """
from celery import _state
from django.conf import settings
settings.configure()
from django_distlock.contrib.celery.checks import check_tasks
check_tasks(None)
print(_state.default_app)
_state.get_current_app().conf.imports
check_tasks(None)
print(_state.default_app.conf.imports)
"""
    assert project("-c", code) == "None\n['loud']\n"


def test_unique_task_without_its_base_is_told_of(
    project: Callable[..., str], tmp_path: Path
) -> None:
    """Once where it is sent, and once where a worker starts."""
    (tmp_path / "broken/tasks.py").write_text("")
    begin = "import django; django.setup(); from shop import app\n"
    error = "The task billing.tasks.once is unique, but only LockedTask checks"
    send = "from billing.tasks import once\nfor _ in range(2): once.delay(7)\n"
    assert project("-c", begin + send).count(error) == 1
    assert project("-c", begin + "app.Worker(pool='solo')").count(error) == 1
