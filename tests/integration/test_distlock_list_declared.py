"""`manage.py distlock_list --declared`, in a project whose modules nobody has imported yet."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from django_distlock.core.keys import OWN_MARKER
from tests.processes import BE_PYTHON, manage

from .operating import Ran
from .operating import run as run_here
from .projects import PATIENCE

#: The project's files. What is at the end of a line is the name that a test finds it by.
FILES = {
    "front/__init__.py": """
        from celery import Celery

        app = Celery("front")
        app.config_from_object("django.conf:settings", namespace="CELERY")
        app.autodiscover_tasks(related_name="jobs")
        """,
    "front/jobs.py": """
        from celery import shared_task

        from django_distlock.contrib.celery import LockedTask, locked_task


        @shared_task(acks_late=True)  # capture
        @locked_task("payment:{pk}", ttl=60, steal_if_dead=True)
        def capture(pk): ...


        @shared_task(base=LockedTask)  # mail
        @locked_task(unique="mail:{address}")
        def mail(address): ...
        """,
    "front/tasks.py": """
        from django_distlock.contrib.tasks import locked_task
        from django_distlock.scheduling import scheduled


        @locked_task("index:{pk}", on_conflict="skip", backend="redis")  # index
        def index(pk): ...


        @scheduled("nightly", expected=600, margin=300)  # nightly
        def nightly(): ...
        """,
    "front/views.py": """
        from django.http import HttpResponse
        from django.views import View

        from django_distlock import distlock
        from django_distlock.views import LockedViewMixin, locked_view


        class Page(LockedViewMixin, View):  # Page
            lock_key = "page:{pk}"

            def get(self, request, pk): ...


        @locked_view(lambda request: request.user.pk, wait=0)  # sell
        def sell(request): ...


        @distlock("stock:{pk}", hold=True, ttl=12, wait=None)  # count
        def count(pk): ...
        """,
    "front/urls.py": """
        from django.urls import path

        from front import views

        urlpatterns = [path("<int:pk>", views.Page.as_view()), path("sell", views.sell)]
        """,
    "front/management/__init__.py": "",
    "front/management/commands/__init__.py": "",
    "front/management/commands/export.py": """
        from django.core.management import BaseCommand

        from django_distlock.management.locked import LockedCommand


        class Command(LockedCommand, BaseCommand):  # Command
            lock_ttl = 90
            lock_wait = 3

            def handle(self, **options): ...
        """,
}
#: An app of which not all can be imported.
BROKEN = {
    # So that what is half imported is not gone by chance.
    "broken/__init__.py": "import gc; gc.disable()",
    "broken/tasks.py": """
        from django_distlock import distlock


        @distlock("ghost:{pk}")
        def ghost(pk): ...


        import not_installed
        """,
    "broken/management/__init__.py": "",
    "broken/management/commands/__init__.py": "",
    "broken/management/commands/again.py": "import broken.tasks",
    "broken/management/commands/leaves.py": "raise SystemExit(4)",
    "broken/management/commands/wrong.py": """
        from django.core.management import BaseCommand

        from django_distlock.management.locked import LockedCommand


        class Command(LockedCommand, BaseCommand):
            lock_ttl = -1
        """,
}
#: Settings of stores that do not answer: what is declared does not depend on what is held.
STORE = {"BACKEND": "django_distlock.backends.database.DatabaseBackend", "TTL": 20, "WAIT": 4}
SETTINGS: dict[str, Any] = {
    "DATABASES": {
        "default": {"ENGINE": "django.db.backends.postgresql", "HOST": "127.0.0.1", "PORT": "1"}
    },
    "INSTALLED_APPS": ["django_distlock", "front"],
    "ROOT_URLCONF": "front.urls",
    "DISTLOCK": {
        "default": STORE,
        "redis": {
            "BACKEND": "django_distlock.backends.redis.RedisBackend",
            "OPTIONS": {"url": "redis://127.0.0.1:1/0"},
            "TTL": 40,
        },
    },
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Give the folder of a project."""
    write(tmp_path, FILES)
    return tmp_path


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files as they would stand in a project."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = (line.removeprefix(" " * 8) for line in text.splitlines()[1:])
        file.write_text("\n".join(lines) + "\n" if "\n" in text else text)


def run(project: Path, *arguments: str, **settings: Any) -> Ran:
    """Run the command in a process of its own, from the project's folder."""
    environment = {
        **os.environ,
        "PYTHONDEVMODE": "",
        "DJANGO_SETTINGS_MODULE": "tests.integration.project",
        "DISTLOCK_TEST_PROJECT": json.dumps({**SETTINGS, **settings}),
    }
    errors = project / "errors"
    command = ["-m", "django", "distlock_list", "--declared", "--no-color", *arguments]
    out, status = manage([str(project), str(errors), *command], environment, PATIENCE, BE_PYTHON)
    return Ran(out, errors.read_text(), status)


def line_of(name: str) -> int:
    """Give the line that a comment at its end names."""
    lines = [
        number
        for text in FILES.values()
        # The first line of the text is not one of the file.
        for number, line in enumerate(text.splitlines())
        if line.endswith(f"# {name}")
    ]
    (only,) = lines
    return only


#: Kind, what is done if somebody else has the key, the file, and the function or class.
EXPECTED = {
    "payment:{pk}": ("celery_lock", "retry", "front/jobs.py", "capture"),
    OWN_MARKER + "unique:mail:{address}": ("celery_unique", "skip", "front/jobs.py", "mail"),
    "index:{pk}": ("django_task", "skip", "front/tasks.py", "index"),
    OWN_MARKER + "schedule:nightly": ("schedule", "skip", "front/tasks.py", "nightly"),
    "page:{pk}": ("view", "skip", "front/views.py", "Page"),
    "callable front.views.<lambda>": ("view", "skip", "front/views.py", "sell"),
    "stock:{pk}": ("function", "raise", "front/views.py", "count"),
    "export": ("command", "skip", "front/management/commands/export.py", "Command"),
}
#: What else is told of one key.
CAPTURE = {
    "is_template": True, "mode": ["heartbeat", "steal_if_dead"], "ttl": 60, "wait": 0,
    "min_hold": 0, "max_lifetime": None, "backend": "default", "is_configured": True,
}  # fmt: skip


def check_declared(project: Path, found: list[dict[str, Any]]) -> None:
    """See that everything is told, with its place, and in order."""
    assert [each["key"] for each in found] == sorted(EXPECTED)
    names = ("kind", "on_conflict", "file", "line", "name")
    for each in found:
        kind, policy, file, name = EXPECTED[each["key"]]
        dotted = f"{file.removesuffix('.py').replace('/', '.')}.{name}"
        stands = (kind, policy, str(project / file), line_of(name), dotted)
        assert tuple(each[name] for name in names) == stands
        if name == "capture":
            assert {key: each[key] for key in each if key not in ("key", *names)} == CAPTURE


def test_json_tells_of_every_door(project: Path) -> None:
    """What workers, servers and schedules import is imported, and no store is asked."""
    ran = run(project, "--json")
    assert (ran.status, ran.err, ran.json["failures"]) == (0, "", [])
    check_declared(project, ran.json["declared"])


def test_table_shows_the_place_as_an_editor_opens_it(project: Path) -> None:
    """From the folder of whoever asks; a line for each key below the headings."""
    ran = run(project, DISTLOCK={"default": STORE})
    head, *lines = ran.out.splitlines()
    assert " ".join(head.split()) == "KEY KIND MODE TTL WAIT ON CONFLICT BACKEND PLACE"
    told = {line.split("  ")[0]: " ".join(line.split()) for line in lines}
    where = f"front/jobs.py:{line_of('capture')} front.jobs.capture"
    assert told["payment:{pk}"] == (
        f"payment:{{pk}} celery lock heartbeat, steal_if_dead 1 min 0 s 0.0 s retry default {where}"
    )
    assert "12.0 s for ever" in told["stock:{pk}"]
    assert "redis (not configured)" in told["index:{pk}"]
    assert len(lines) == len(EXPECTED)
    assert (ran.status, ran.err) == (0, "")


def test_what_cannot_be_imported_is_named_and_hides_nothing(project: Path) -> None:
    """Once, with its place; the rest is printed, and the exit code says that it may not be all."""
    write(project, BROKEN)
    ran = run(project, "--json", INSTALLED_APPS=["django_distlock", "broken", "front"])
    assert ran.status == 1
    check_declared(project, ran.json["declared"])
    failures = {each["what"]: each["message"] for each in ran.json["failures"]}
    assert failures.keys() == {"broken.tasks", "the command leaves", "the command wrong"}
    assert "not_installed" in failures["broken.tasks"]
    # Where it is written, and not where Python imports.
    assert failures["broken.tasks"].endswith(f"({project / 'broken' / 'tasks.py'}:8)")
    assert "SystemExit" in failures["the command leaves"]
    assert "-1" in failures["the command wrong"]
    for what in failures:
        assert f"{what}: {failures[what]}" in ran.err
    assert "These modules could not be imported" in ran.err.splitlines()[-1]


def test_module_that_is_broken_for_a_worker_alone_is_named(project: Path) -> None:
    """One that only Celery imports, and a URLconf."""
    write(project, {"late/__init__.py": "", "late/jobs.py": "1 / 0", "late/urls.py": "0 + ''"})
    apps = ["django_distlock", "late", "front"]
    ran = run(project, INSTALLED_APPS=apps, ROOT_URLCONF="late.urls")
    assert ran.status == 1
    assert "late.urls: TypeError" in ran.err
    assert "what Celery discovers: ZeroDivisionError" in ran.err
    assert "index:{pk}" in ran.out


def test_project_that_declares_nothing_is_told_so(project: Path) -> None:
    """An empty table would leave the reader wondering."""
    ran = run(project, INSTALLED_APPS=["django_distlock"], ROOT_URLCONF=None)
    assert (ran.status, ran.out, ran.err) == (0, "No keys are declared.\n", "")
    ran = run(project, "--prefix=invoice", INSTALLED_APPS=["django_distlock"], ROOT_URLCONF=None)
    assert (ran.status, ran.out, ran.err) == (0, "No declared key matches.\n", "")


def test_arguments_about_held_keys_are_refused() -> None:
    """They would be silently without effect."""
    for argument in (
        "--host=h", "--task=t", "--held-longer-than=0", "--limit=5", "--cursor=c", "--all"
    ):  # fmt: skip
        ran = run_here("distlock_list", "--declared", argument)
        assert (ran.status, ran.out) == (2, "")
        assert f"remove {argument.partition('=')[0]}." in ran.err
