"""The code on each page of the documentation runs as printed: typed into a project, and used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .databases import new_database
from .newcomers import PATIENCE, ROOT, blocks, environment, sh, start_project, text_of, the_block

#: Pages whose code other tests type, and these tests.
ELSEWHERE = {
    "tutorial/first-lock": "integration/test_first_pages.py",
    "howto/lock-commands": "integration/test_typed_pages.py",
    "howto/test-code-that-locks": "integration/test_testing_kit_projects.py",
    "howto/write-a-backend": "integration/test_write_a_backend.py",
    "runbooks/stuck-lock": "runbooks/test_stuck_lock.py",
}
PAGES = sorted(
    name
    for name in ["README", *(
        each.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for each in (ROOT / "docs").rglob("*.md")
    )]
    if not name.startswith("decisions/") and blocks("python", text_of(name))
)  # fmt: skip
#: The app that most pages take for granted.
SHOP = """
from django.db import models
from django_distlock.fencing import FencedModel


class Account(models.Model):
    balance = models.IntegerField()


class Product(models.Model):
    stock = models.IntegerField()


class Payment(FencedModel):
    fence_key = "payment:{pk}"
    status = models.CharField(max_length=10, default="open")
    state = models.CharField(max_length=10, default="open")
"""
BANK = """
from django.db import models
from django_distlock.fencing import FencedModel


class Account(FencedModel):
    value = models.IntegerField()
"""
#: In Django's words, the databases of that project.
DATABASES = """
INSTALLED_APPS += ["shop", "bank", "till"]
DATABASES = {{
    name: {{"ENGINE": "django.db.backends.postgresql", **{server!r}}}
    for name in ("default", "locks", "direct")
}}
"""
TEST = """
import django
django.setup()
import pytest
from tests.integration.typed_pages import USES

@pytest.mark.parametrize("page", USES)
def test_page(page):
    USES[page](page)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the project of somebody who reads on after the tutorial, with PostgreSQL."""
    folder = tmp_path_factory.mktemp("newcomer")
    start_project(folder)
    for app, models in {"shop": SHOP, "bank": BANK, "till": ""}.items():
        (folder / app).mkdir()
        (folder / app / "__init__.py").touch()
        (folder / app / "models.py").write_text(models)
    with new_database() as name:
        server = _parts_of(os.environ["DISTLOCK_TEST_POSTGRES_URL"]) | {"NAME": name}
        with (folder / "project/settings.py").open("a") as settings:
            settings.write(DATABASES.format(server=server))
        sh(folder, "python manage.py makemigrations -v 0 shop bank && python manage.py migrate")
        yield folder


def _parts_of(url: str) -> dict[str, str]:
    """Return a server as Django's settings have it."""
    from psycopg.conninfo import conninfo_to_dict

    names = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD"}
    parts = conninfo_to_dict(url)
    return {names[each]: str(parts[each]) for each in names if parts.get(each) is not None}


def test_code_of_pages_runs_as_printed(project: Path) -> None:
    """Each block, in the order of its page; and what it defines does what the page says."""
    (project / "test_typed.py").write_text(TEST)
    without = ("asyncio", "cacheprovider", "django", "django_distlock", "randomly", "xdist")
    options = ["-q", "-rA", *(f"-pno:{name}" for name in without)]
    told = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_typed.py"],
        cwd=project,
        env={
            **environment(project),
            "DJANGO_SETTINGS_MODULE": "project.settings",
            "TYPED_REDIS": os.environ["DISTLOCK_TEST_REDIS_URL"],
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3 * PATIENCE,
        check=False,
    ).stdout
    pages = {each for each in PAGES if each not in ELSEWHERE}
    passed = set(re.findall(r"^PASSED test_typed\.py::test_page\[(.+)\]$", told, re.MULTILINE))
    assert passed >= pages, told


def test_code_of_other_pages_has_tests_of_its_own() -> None:
    """Which read these pages."""
    for page, test in ELSEWHERE.items():
        assert page.rpartition("/")[2] in (ROOT / "tests" / test).read_text(encoding="utf-8")


def test_commands_of_a_project_run_under_their_locks(project: Path) -> None:
    """As typed: a migration, a job that may be skipped, and a command of the project's own."""
    page = text_of("howto/lock-commands")
    assert "No migrations to apply." in sh(project, blocks("console", page)[0].lstrip("$ "))
    (job,) = blocks("sh", page)
    (project / "nightly").write_text("#!/bin/sh\necho it worked\n")
    (project / "nightly").chmod(0o755)
    job = job.replace("/usr/local/bin/nightly", str(project / "nightly"))
    # The key stays held: the second time, nothing is done, and all is well.
    assert ["it worked" in sh(project, job) for _ in range(2)] == [True, False]

    commands = project / "shop/management/commands"
    commands.mkdir(parents=True)
    given = "shops = lambda: [1, 2]\ncount = lambda shop, day: print('shop', shop, day)\n"
    (commands / "report.py").write_text(given + the_block("python", "LockedCommand", page))
    run = "./manage.py report monday"
    assert sh(project, run) == "shop 1 monday\nshop 2 monday\n"
    assert "report:monday" in sh(project, run, status=75)


def test_beat_of_the_page_leads(project: Path) -> None:
    """Started as typed, it holds the key of the leader until SIGTERM."""
    (start,) = blocks("console", text_of("howto/run-celery-beat"))
    (project / "shop/celery.py").write_text(
        'import celery, django\ndjango.setup()\napp = celery.Celery("shop", broker="memory://")\n'
    )
    look = "python manage.py distlock_show '\u2329celery-beat:shop'"
    with subprocess.Popen(
        ["bash", "-ec", f"exec {start.removeprefix('$ ').strip()} --loglevel=INFO"],
        cwd=project,
        env={**environment(project), "DJANGO_SETTINGS_MODULE": "project.settings"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as beat:
        try:
            assert beat.stdout is not None
            lines = []
            for line in beat.stdout:
                lines.append(line)
                if "leads" in line:
                    break
            else:
                raise AssertionError("".join(lines))
            assert str(beat.pid) in sh(project, look)
        finally:
            beat.terminate()
            beat.communicate(timeout=PATIENCE)
