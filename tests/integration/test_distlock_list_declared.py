"""`manage.py distlock_list --declared`, in a project whose modules nobody has imported yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from django_distlock.core.keys import OWN_MARKER

from .operating import Ran
from .operating import run as run_here
from .projects import PATIENCE, ROOT

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


        class Page(LockedViewMixin, View):  # page
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


        class Command(LockedCommand, BaseCommand):  # export
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
    "broken/management/commands/leaves.py": "raise SystemExit(4)",
    "broken/management/commands/wrong.py": """
        from django.core.management import BaseCommand

        from django_distlock.management.locked import LockedCommand


        class Command(LockedCommand, BaseCommand):
            lock_ttl = -1
        """,
}
#: Settings of stores that do not answer: what is declared does not depend on what is held.
STORE = {
    "BACKEND": "django_distlock.backends.database.DatabaseBackend",
    "TTL": 20,
    "WAIT": 4,
}
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
    done = subprocess.run(
        [sys.executable, "-m", "django", "distlock_list", "--declared", "--no-color", *arguments],
        cwd=project,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONDEVMODE": "",
            "DJANGO_SETTINGS_MODULE": "tests.integration.project",
            "DISTLOCK_TEST_PROJECT": json.dumps({**SETTINGS, **settings}),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return Ran(done.stdout, done.stderr, done.returncode)


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


def in_one(declared: dict[str, Any]) -> tuple[object, ...]:
    """Give what most lines are about."""
    names = ("kind", "mode", "ttl", "wait", "on_conflict", "backend")
    return tuple(declared[each] for each in names)


BEATS = ["heartbeat"]
EXPECTED = {
    "payment:{pk}": (
        "celery_lock", [*BEATS, "steal_if_dead"], 60, 0, "retry", "default",
    ),
    OWN_MARKER + "unique:mail:{address}": ("celery_unique", BEATS, 20, 0, "skip", "default"),
    "index:{pk}": ("django_task", BEATS, 40, 0, "skip", "redis"),
    OWN_MARKER + "schedule:nightly": (
        "schedule", [*BEATS, "hold", "require_global"], 900, 0, "skip", "default",
    ),
    "page:{pk}": ("view", BEATS, 20, 4, "skip", "default"),
    "callable front.views.<lambda>": ("view", BEATS, 20, 0, "skip", "default"),
    "stock:{pk}": ("function", [*BEATS, "hold"], 12, None, "raise", "default"),
    "export": ("command", BEATS, 90, 3, "skip", "default"),
}  # fmt: skip


def test_json_tells_of_every_door(project: Path) -> None:
    """What workers, servers and schedules import is imported, and no store is asked."""
    ran = run(project, "--json")
    assert (ran.status, ran.err) == (0, "")
    document = ran.json
    assert {each["key"]: in_one(each) for each in document["declared"]} == EXPECTED
    assert [each["key"] for each in document["declared"]] == sorted(EXPECTED)
    assert [each["key"] for each in document["declared"] if not each["is_template"]] == [
        "callable front.views.<lambda>"
    ]
    assert document["failures"] == []


def test_json_tells_where_each_stands(project: Path) -> None:
    """File, line of the first decorator, and dotted name."""
    places = {
        each["name"]: (each["file"], each["line"])
        for each in run(project, "--json").json["declared"]
    }
    front = project / "front"
    for name, file in (
        ("jobs.capture", "jobs.py"),
        ("jobs.mail", "jobs.py"),
        ("tasks.index", "tasks.py"),
        ("tasks.nightly", "tasks.py"),
        ("views.sell", "views.py"),
        ("views.count", "views.py"),
    ):
        line = line_of(name.partition(".")[2])
        assert places[f"front.{name}"] == (str(front / file), line), name
    # Before Python 3.13 a class begins with its first method, as far as one knows.
    commands = "management.commands.export.Command"
    for name, comment, way in (("views.Page", "page", 3), (commands, "export", 4)):
        file, line = places[f"front.{name}"]
        assert 0 <= line - line_of(comment) <= way, name
        assert Path(file).is_relative_to(front)


def test_table_shows_the_place_as_an_editor_opens_it(project: Path) -> None:
    """From the folder of whoever asks; a line for each key below the headings."""
    ran = run(project)
    head, *lines = ran.out.splitlines()
    assert " ".join(head.split()) == "KEY KIND MODE TTL WAIT ON CONFLICT BACKEND PLACE"
    (capture,) = [line for line in lines if line.startswith("payment:")]
    assert capture.split("  ")[0] == "payment:{pk}"
    assert "celery lock" in capture
    assert "heartbeat, steal_if_dead" in capture
    assert capture.endswith(f"front/jobs.py:{line_of('capture')} front.jobs.capture")
    (count,) = [line for line in lines if line.startswith("stock:")]
    assert "12.0 s" in count
    assert "for ever" in count
    assert len(lines) == len(EXPECTED)
    assert (ran.status, ran.err) == (0, "")


def test_prefix_and_backend_narrow_the_list(project: Path) -> None:
    """A whole key leads to its template; what code makes may be any key, and stays."""
    document = run(project, "--json", "--prefix", "payment:4711").json
    made = "callable front.views.<lambda>"
    assert [each["key"] for each in document["declared"]] == [made, "payment:{pk}"]
    document = run(project, "--json", "--backend", "redis").json
    assert [each["key"] for each in document["declared"]] == ["index:{pk}"]
    ran = run(project, "--backend", "rediss")
    assert (ran.status, ran.out) == (1, "")
    assert "'rediss' is not configured" in ran.err
    # Who declares a key on a backend that is missing is found by its name.
    settings = {"DISTLOCK": {"default": STORE}}
    (line,) = run(project, "--backend", "redis", **settings).out.splitlines()[1:]
    assert "redis (not configured)" in line


def test_what_cannot_be_imported_is_named_and_hides_nothing(project: Path) -> None:
    """The rest is printed; the exit code says that it may not be all."""
    write(project, BROKEN)
    apps = ["django_distlock", "broken", "front"]
    ran = run(project, "--json", INSTALLED_APPS=apps)
    assert ran.status == 1
    assert {each["key"]: in_one(each) for each in ran.json["declared"]} == EXPECTED
    failures = {each["what"]: each["message"] for each in ran.json["failures"]}
    assert failures.keys() == {"broken.tasks", "the command leaves", "the command wrong"}
    assert "not_installed" in failures["broken.tasks"]
    # Where it is written, and not where Python imports.
    assert failures["broken.tasks"].endswith(f"({project / 'broken' / 'tasks.py'}:8)")
    assert "SystemExit" in failures["the command leaves"]
    assert "-1" in failures["the command wrong"]
    for what in failures:
        assert f"{what}: {failures[what]}" in ran.err
    assert "Not all could be imported" in ran.err.splitlines()[-1]


def test_module_that_is_broken_for_a_worker_alone_is_named(project: Path) -> None:
    """One that only Celery imports, and a URLconf; a module that two ways lead to is named once."""
    write(project, {"late/__init__.py": "", "late/jobs.py": "1 / 0"})
    apps = ["django_distlock", "late", "front"]
    ran = run(project, INSTALLED_APPS=apps, ROOT_URLCONF="late.jobs")
    assert ran.status == 1
    named = [line for line in ran.err.splitlines() if "ZeroDivisionError" in line]
    assert len(named) == 1
    assert named[0].startswith("late.jobs: ")
    assert named[0].endswith("late/jobs.py:1)")
    ran = run(project, INSTALLED_APPS=apps)
    assert ran.status == 1
    assert "what Celery discovers: ZeroDivisionError" in ran.err
    assert "page:{pk}" in ran.out


def test_project_that_declares_nothing_is_told_so(project: Path) -> None:
    """An empty table would leave the reader wondering."""
    ran = run(project, INSTALLED_APPS=["django_distlock"], ROOT_URLCONF=None)
    assert (ran.status, ran.out, ran.err) == (0, "No keys are declared.\n", "")
    document = run(project, "--json", INSTALLED_APPS=["django_distlock"], ROOT_URLCONF=None).json
    assert document == {"declared": [], "failures": []}


@pytest.mark.parametrize(
    "argument", ["--host=h", "--task=t", "--held-longer-than=0", "--limit=5", "--cursor=c", "--all"]
)
def test_arguments_about_held_keys_are_refused(argument: str) -> None:
    """They would be silently without effect."""
    ran = run_here("distlock_list", "--declared", argument)
    assert (ran.status, ran.out) == (2, "")
    assert f"leave out {argument.partition('=')[0]}." in ran.err
