"""What pages tell a newcomer to write, typed as printed and used: in a project, by its pytest.

`test_typed_pages.py` makes that project, with the apps "shop" and "bank".
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import dramatiq
import pytest
from celery import Celery, shared_task
from django.apps import apps
from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import AnonymousUser, User
from django.core import checks
from django.db import connection, transaction
from django.db.models import F
from django.db.models.signals import post_save
from django.http import HttpResponse, JsonResponse
from django.test import RequestFactory
from django.test.utils import override_settings
from dramatiq.brokers.stub import StubBroker
from rest_framework.test import APIRequestFactory

import django_distlock
from django_distlock import LockNotAcquired, distlock, leader, lock_backends
from django_distlock.contrib import prometheus
from django_distlock.contrib.celery import LockedTask, locked_task
from django_distlock.core.keys import new_token
from django_distlock.core.records import Grant, Holder
from django_distlock.inspection import get_by_key, own_key
from django_distlock.models import HeldLock
from django_distlock.scheduling import Skipped
from django_distlock.views import locked_view

from .newcomers import blocks, text_of

#: What uses the code of a page, by the page.
USES: dict[str, Callable[[str], None]] = {}
#: Where the pages say redis://127.0.0.1:6379.
REDIS = os.environ["TYPED_REDIS"].rpartition("/")[0]
REQUESTS = RequestFactory(SERVER_NAME="localhost")
#: Pages whose code is settings, in which Django's checks find nothing wrong.
SETTINGS = """
    bridge-a-deployment choose-a-database keep-fences-rising rename-tables use-redis
    use-session-locks wait-without-polling watch-locks
""".split()  # noqa: SIM905 - as a list it would be a page


class Page:
    """The code of a page, in a module of its own.

    Args:
        name: Of the page, such as "howto/lock-views".
        app: Whose module it is, for models.
        given: Names that the reader's project has.
    """

    def __init__(self, name: str, *, app: str = "shop", **given: Any):
        text = text_of(name).replace("redis://127.0.0.1:6379", REDIS)
        self.blocks = blocks("python", text)
        self._name = name
        self._module = ModuleType(f"{app}.{name.rpartition('/')[2].replace('-', '_').lower()}")
        sys.modules[self._module.__name__] = self._module
        vars(self._module).update(given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def type(self, *which: int) -> Page:
        """Run blocks, in the order of the page; without an argument, all of them."""
        for number in which or range(len(self.blocks)):
            code = compile(
                self.blocks[number],
                f"{self._name}, block {number}",
                "exec",
                flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
                dont_inherit=True,
            )
            answer = eval(code, vars(self._module))
            if inspect.iscoroutine(answer):
                asyncio.run(answer)
        return self

    def settings(self) -> dict[str, Any]:
        """Return what is a setting."""
        return {name: value for name, value in vars(self._module).items() if name.isupper()}


def uses(page: str) -> Callable[[Callable[[str], None]], None]:
    """Register what uses the code of a page, for that page."""

    def register(use: Callable[[str], None]) -> None:
        USES[page] = use

    return register


def model(name: str, app: str = "shop") -> Any:
    """Return a model of the project."""
    return apps.get_model(app, name)


@contextmanager
def elsewhere(key: str) -> Iterator[None]:
    """Let another process have a key."""
    store = lock_backends["default"]
    grant = store.acquire(key, new_token(), 60, Holder(host="other", process="other", pid=1))
    assert isinstance(grant, Grant)
    yield
    store.release(grant)


def is_refused(call: Callable[[], object], key: str) -> bool:
    """Return whether a call raises where another process has the key."""
    with elsewhere(key):
        try:
            call()
        except LockNotAcquired:
            return True
    return False


# The first pages, and the tutorial's neighbours


def quickstart(name: str) -> None:
    """Use the code that both front pages have."""
    assert Page(name).type().lease.fence >= 1


USES["README"] = USES["index"] = quickstart


@uses("howto/wait-and-retry")
def wait_and_retry(name: str) -> None:
    """A conflict is told, and a decorated function raises it."""
    import_customers = Mock()
    page = Page(name, import_customers=import_customers).type()
    assert import_customers.call_count == 1
    with elsewhere("import:customers"):
        page.type(0)
    assert import_customers.call_count == 1
    assert is_refused(page.make_report, "nightly-report")


@uses("howto/hold-for-long-work")
def hold_for_long_work(name: str) -> None:
    """Rows are saved, callbacks are taken, and the lease without a block is released."""
    save, import_customers = Mock(), Mock()
    given: dict[str, Any] = {"rows": [1, 2], "save": save, "import_customers": import_customers}
    page = Page(name, log=logging.getLogger("shop"), stop=threading.Event(), **given)
    page.type(0)
    assert save.call_count == 2
    with distlock("import:callbacks") as lease:
        vars(page._module)["lease"] = lease
        page.type(1)
    page.type(2)
    assert import_customers.call_count == 1
    assert get_by_key("import:customers") is None


@uses("howto/choose-a-mode")
def choose_a_mode(name: str) -> None:
    """The report's key stays held; the import is left out where somebody else has its key."""
    make_report = Mock()
    page = Page(name, distlock=distlock, make_report=make_report).type()
    assert make_report.call_count == 1
    assert distlock("nightly-report", wait=0).locked()
    with elsewhere("import"):
        page.import_feeds()
    page.import_feeds()


@uses("howto/share-a-key")
def share_a_key(name: str) -> None:
    """Readers, permits, a view and a task: each of them has its limit."""
    Celery("shop", broker="memory://", set_as_current=True)
    page = Page(
        name, locked_view=locked_view, shared_task=shared_task, locked_task=locked_task,
        LockedTask=LockedTask,
    ).type()  # fmt: skip
    user = "ada"
    assert page.download(REQUESTS.get("/"), user=user) is None
    holders = [distlock(f"export:{user}", permits=2) for _ in range(2)]
    leases = [each.acquire() for each in holders]
    answer = page.download(REQUESTS.get("/"), user=user)
    assert (answer.status_code, "Retry-After" in answer) == (429, True)
    for each in leases:
        each.release()
    assert page.charge("acme", 1) is None


@uses("howto/lease-or-transaction")
def lease_or_transaction(name: str) -> None:
    """Keys are held until the commit."""
    page = Page(name).type()
    seats = [SimpleNamespace(pk=7), SimpleNamespace(pk=8)]
    page.order(SimpleNamespace(pk=1), seats)
    page.reserve(1, 2)
    assert is_refused(lambda: page.reserve(1, 2), "stock:1")


@uses("howto/lock-inside-a-transaction")
def lock_inside_a_transaction(name: str) -> None:
    """The lock is outside of the transaction."""
    Page(name, distlock=distlock, transaction=transaction, pk=1).type()
    assert get_by_key("invoice:1") is None


@uses("howto/fence-your-writes")
def fence_your_writes(name: str) -> None:
    """The row is captured once, under a fence; and a transaction keeps its key."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE till_payment (id integer PRIMARY KEY, fence bigint NOT NULL DEFAULT 0,"
            " status varchar(10) NOT NULL)"
        )
        cursor.execute("INSERT INTO till_payment VALUES (1, 0, 'open')")
    model("Account").objects.create(pk=1, balance=5)
    ask_the_provider = Mock()
    page = Page(
        name, app="till", pk=1, ask_the_provider=ask_the_provider, Account=model("Account"), F=F
    )
    page.type()
    page.type(1)
    assert ask_the_provider.call_count == 1
    payment = page.Payment.objects.get(pk=1)
    assert (payment.status, payment.fence) == ("captured", 1)
    assert model("Account").objects.get(pk=1).balance == 25


@uses("howto/compute-once")
def compute_once(name: str) -> None:
    """A value is computed once, whichever way it is asked for."""
    compute = Mock(return_value=7)
    objects = Mock()
    objects.filter.return_value.aggregate.return_value = {"total": 3}
    given: dict[str, Any] = {
        "pk": 5,
        "compute": lambda pk=None: compute(),
        "Invoice": Mock(objects=objects),
    }
    page = Page(name, single_flight=django_distlock.single_flight, **given)
    vars(page._module)["asingle_flight"] = django_distlock.asingle_flight
    page.type()
    assert page.value == 7
    assert [page.summary(1), page.summary(1)] == [{"total": 3}] * 2
    assert objects.filter.call_count == 1


@uses("howto/run-one-leader")
def run_one_leader(name: str) -> None:
    """Each leads until SIGTERM, and writes meanwhile."""

    def end(**_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    account = model("Account", "bank")
    account.objects.create(pk=1, value=0)
    moved = Mock(side_effect=lambda fence: end())
    post_save.connect(end, sender=account)
    Page(name, leader=leader, move_money=moved).type()
    assert account.objects.get(pk=1).value == 1
    assert moved.call_args[0][0] > account.objects.get(pk=1).fence


@uses("howto/async")
def locks_of_async_code(name: str) -> None:
    """One piece is sold."""
    product = model("Product")
    product.objects.create(pk=1, stock=3)
    page = Page(name, Product=product).type()
    asyncio.run(page.sell(None, 1))
    assert product.objects.get(pk=1).stock == 2


# Integrations


@uses("howto/lock-views")
def lock_views(name: str) -> None:
    """A function, a class and a viewset answer 409 with Retry-After to the second request."""
    page = Page(name).type()
    request = REQUESTS.post("/invoices/1/")
    assert page.send(request, pk=1) is None
    request.user = AnonymousUser()
    assert page.EditInvoice.as_view()(request, pk=1).status_code == 302
    request.user = User(username="ada")
    put = APIRequestFactory().put("/invoices/1/")
    views = [page.send, page.EditInvoice.as_view(), page.InvoiceViewSet.as_view({"put": "update"})]
    with elsewhere("invoice:1"):
        for view, asked in zip(views, [request, request, put], strict=True):
            answer = view(asked, pk=1)
            assert (answer.status_code, "Retry-After" in answer) == (409, True), view


@uses("howto/answer-requests-once")
def answer_requests_once(name: str) -> None:
    """The view runs once for a key; a stranger's key counts where a function tells clients."""
    charges = Mock()
    page = Page(name, Charge=Mock(objects=charges), JsonResponse=JsonResponse).type()
    user = User.objects.create(username="grace")
    answers = []
    for _ in range(2):
        request = REQUESTS.post("/charge/", headers={"Idempotency-Key": "one"})
        request.user = user
        answers.append(page.charge(request))
    assert [each.status_code for each in answers] == [201, 201]
    assert answers[1]["Idempotency-Replayed"] == "true"
    assert charges.create.call_count == 1
    assert login_required(page.hook)(_anonymous()).status_code == 302


def _anonymous() -> Any:
    request = REQUESTS.post("/hook/", headers={"Idempotency-Key": "one", "X-Client": "acme"})
    request.user = AnonymousUser()
    return request


@uses("howto/lock-celery-tasks")
def lock_celery_tasks(name: str) -> None:
    """A run needs its key, and a unique task is queued once."""
    Celery("shop", broker="memory://", set_as_current=True)
    page = Page(name).type()
    assert page.capture.apply(args=[1]).successful()
    with elsewhere("invoice:1"):
        assert isinstance(page.capture.apply(args=[1]).result, LockNotAcquired)
    first, second = (page.report.delay("2026-05-01") for _ in range(2))
    assert first.id == second.id
    assert page.report.delay("2026-05-02").id != first.id


@uses("howto/lock-django-tasks")
def lock_django_tasks(name: str) -> None:
    """One that finds its key held fails, where tasks run at once."""
    page = Page(name)
    if not hasattr(settings, "TASKS"):
        page.blocks[0] = page.blocks[0].replace("from django.tasks ", "from django_tasks ")
    page.type()
    results = [page.send.enqueue(1)]
    with elsewhere("invoice:1"):
        results.append(page.send.enqueue(1))
    assert [each.status.name for each in results] == ["SUCCESSFUL", "FAILED"]
    assert results[1].errors[0].exception_class is LockNotAcquired


@uses("howto/lock-other-queues")
def lock_other_queues(name: str) -> None:
    """An actor of dramatiq runs, and is tried again later where its key is held.

    `test_other_queues.py` runs workers of all three.
    """
    dramatiq.set_broker(StubBroker())
    page = Page(name, dramatiq=dramatiq).type(0, 1, 2)
    assert page.send(1) is None
    with elsewhere("invoice:1"), pytest.raises(page.Retry) as caught:
        page.send(1)
    assert caught.value.delay == 5000
    page.type(3)
    assert page.again(5).intervals == [5]
    page.type(4)
    with pytest.raises(page.RetryTask):
        page.again(5)


@uses("howto/run-schedules")
def run_schedules(name: str) -> None:
    """The second node skips."""
    page = Page(name).type()
    assert page.make_report() is None
    skipped = page.make_report()
    assert isinstance(skipped, Skipped)
    assert skipped.key.startswith(own_key("schedule:nightly-report"))


# Operating


@uses("howto/end-a-stuck-lock")
def end_a_stuck_lock(name: str) -> None:
    """The holder is asked to stop, and its lease ends sooner; a paused key is granted again."""
    page = Page(name)
    with elsewhere("nightly-report-2"):
        page.blocks = [each.replace("nightly-report", "nightly-report-2") for each in page.blocks]
        page.type()
    held = get_by_key("nightly-report-2")
    assert held is None
    distlock("nightly-report-2", wait=0).acquire().release()


@uses("howto/take-over-from-the-dead")
def take_over_from_the_dead(name: str) -> None:
    """A block runs, and the setting is one."""
    page = Page(name)
    page.blocks[0] = page.blocks[0].replace("nightly-report", "nightly-report-3")
    page.type()
    settings_are_right(page)


@uses("howto/monitor")
def monitor(name: str) -> None:
    """An app of the project installs the metrics; the addresses of the endpoints are there."""
    page = Page(name).type(0)
    sys.modules["shop"].__file__ = __file__
    page.ShopConfig("shop", sys.modules["shop"]).ready()
    prometheus.uninstall()
    vars(page._module)["prometheus"] = prometheus
    page.type(1, 2)
    prometheus.uninstall()
    assert [str(each.pattern) for each in page.urlpatterns] == ["locks/"]


@uses("howto/production")
def production(name: str) -> None:
    """No connection is open behind it."""
    connection.ensure_connection()
    Page(name).type()
    assert connection.connection is None


@uses("howto/fence-writes-to-other-stores")
def fence_writes_to_other_stores(name: str) -> None:
    """A value in Redis adds up; a request carries its fence, which the other service reads."""
    requests = Mock()
    page = Page(name, MIDDLEWARE=[], requests=requests, pk=1, Payment=model("Payment"))
    vars(page._module)["HttpResponse"] = HttpResponse
    page.type(0)
    page.client.delete("stock:typed")
    page.restock("typed", 2)
    page.restock("typed", 3)
    page.type(2)
    model("Payment").objects.create(pk=1)
    secrets = {name: value for name, value in page.settings().items() if name != "MIDDLEWARE"}
    with override_settings(**secrets):
        page.type(1, 3)
        headers = requests.put.call_args[1]["headers"]
        middleware = page.MIDDLEWARE[-1].rpartition(".")
        fenced = getattr(sys.modules[middleware[0]], middleware[2])(
            lambda request: page.payment(request, pk=1)
        )
        assert fenced(REQUESTS.put("/payments/1", headers=headers)).status_code == 204
        assert fenced(REQUESTS.put("/payments/1")).status_code == 428
    assert model("Payment").objects.get(pk=1).state == "captured"


@uses("howto/replace-other-locks")
def replace_other_locks(name: str) -> None:
    """Behind the change, the same call is queued once."""
    Celery("shop", broker="memory://", set_as_current=True)

    class QueueOnce(LockedTask):
        once: Any

    given: dict[str, Any] = {
        "shared_task": shared_task, "QueueOnce": QueueOnce, "LockedTask": LockedTask,
        "locked_task": locked_task,
    }  # fmt: skip
    # Two tasks of one name would be one.
    old, page = Page(name, **given), Page(name, app="bank", **given)
    for each, part in zip((old, page), page.blocks[0].split("# after\n"), strict=True):
        each.blocks = [part]
        each.type()
    first, second = page.capture.delay(1), page.capture.delay(1, note="again")
    assert first.id == second.id


# Explanations and reference


@uses("explanation/how-it-works")
def how_it_works(name: str) -> None:
    """The row has the fence of its writer."""
    payment = model("Payment")
    payment.objects.all().delete()
    payment.objects.create(pk=9)
    Page(name, distlock=distlock, Payment=payment, pk=9).type()
    assert payment.objects.get(pk=9).status == "captured"
    assert payment.objects.get(pk=9).fence >= 1


@uses("reference/api")
def api(name: str) -> None:
    """The block and the decorator are granted their keys."""
    page = Page(name, distlock=distlock).type()
    assert page.lease.is_released
    assert is_refused(lambda: page.send(1), "invoice:1")


@uses("reference/signals")
def signals(name: str) -> None:
    """The receiver is called."""
    page = Page(name).type()
    assert is_refused(lambda: distlock("refused", wait=0).acquire(), "refused")
    page.lock_not_acquired.disconnect(page.count_refusals)


@uses("reference/enforce-fence")
def enforce_fence(name: str) -> None:
    """The migration names an operation of the model."""
    (operation,) = Page(name).type().Migration.operations
    assert operation.describe()


def settings_are_right(page: Page) -> None:
    """Make the backends of the settings on a page; Django's checks find no error."""
    given = {name: value for name, value in page.settings().items() if name != "DATABASES"}
    with override_settings(**given):
        assert [*lock_backends.all()]
        wrong = [each for each in checks.run_checks() if each.level >= checks.ERROR]
        assert wrong == []


@uses("reference/settings")
def settings_of_the_reference(name: str) -> None:
    """As on the pages below."""
    settings_are_right(Page(name).type())


def settings_page(name: str) -> None:
    """Type settings, and use what else a page has."""
    page = Page(name, DATABASES={}, BASE_DIR=Path()).type()
    if router := getattr(page._module, "LocksRouter", None):
        sys.modules["project.routers"] = page._module
        assert router().db_for_write(HeldLock) == "locks"
        assert router().allow_migrate("default", "django_distlock") is False
    settings_are_right(page)


USES |= {f"howto/{each}": settings_page for each in SETTINGS}
