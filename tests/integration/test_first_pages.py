"""What the first pages tell a newcomer to type works as printed: README, landing page, tutorial."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contract.helpers import there

from .newcomers import PATIENCE, blocks, environment, sh, start_project, text_of, the_block, typed

TUTORIAL = text_of("tutorial/first-lock")
#: Runs what is typed into a shell, block by block, and answers how many lines went otherwise.
SHELL = """
import doctest, json, sys, django

django.setup()
names = {}
for line in sys.stdin:
    typed = doctest.DocTestParser().get_doctest(json.loads(line), {}, "typed", None, 0)
    typed.globs = names
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    print(runner.run(typed, out=sys.stderr.write, clear_globs=False).failed, flush=True)
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the project of the tutorial, with its tables."""
    folder = tmp_path_factory.mktemp("started")
    start_project(folder)
    sh(folder, typed(blocks("console", TUTORIAL)[1]))
    return folder


@pytest.fixture
def project(started: Path, tmp_path: Path) -> Path:
    """Give a copy of it."""
    return Path(shutil.copytree(started, tmp_path, dirs_exist_ok=True))


class Shell:
    """A Python shell in the project."""

    def __init__(self, project: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SHELL],
            cwd=project,
            env=environment(project) | {"DJANGO_SETTINGS_MODULE": "project.settings"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def send(self, block: str) -> str:
        """Type a block; return what the shell answers, nothing if it died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(block) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def leave(self) -> str:
        """End the shell; return what went otherwise."""
        return self.process.communicate(timeout=PATIENCE)[1]


@contextmanager
def shell(project: Path) -> Iterator[Shell]:
    """Give a shell that has shown what the tutorial shows."""
    found = Shell(project)
    try:
        yield found
    finally:
        told = found.leave()
    assert "Failed example" not in told, told


@pytest.mark.parametrize("page", ["README", "index"])
def test_first_code_of_a_page_runs(project: Path, page: str) -> None:
    """The block of ten lines is granted its key."""
    code = the_block("python", 'distlock("invoice:42"', text_of(page))
    setup = 'import os, django\nos.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"\n'
    (project / "first.py").write_text(f"{setup}django.setup()\n{code}")
    assert "held, fence 1\n" in sh(project, "python first.py")


def test_shells_of_the_tutorial_say_what_it_prints(project: Path) -> None:
    """One holds and one is refused; the fence grows; a killed holder is waited for."""
    take, refused, release, again, lost, die, wait = blocks("pycon", TUTORIAL)
    with shell(project) as first, shell(project) as second:
        # The seconds that are left are fewer where the machine is slow.
        assert first.send(take.replace("600.0 s", "... s")) == "0"
        assert second.send(refused) == "0"
        assert first.send(release) == "0"
        assert second.send(again) == "0"
    with shell(project) as third:
        assert third.send(lost) == "0"
        assert third.send(die) == ""
    assert third.process.returncode == 1
    with shell(project) as last:
        assert last.send(wait) == "0"


def test_counter_of_the_tutorial_counts_to_sixty(project: Path) -> None:
    """Three processes add under the lock, and none is lost."""
    (project / "count.py").write_text(the_block("python", "counter.txt", TUTORIAL))
    block = the_block("console", "--lock", TUTORIAL)
    assert sh(project, typed(block)).split()[-1] == block.split()[-1] == "60"


def test_report_of_the_tutorial_is_renewed_and_lost_by_a_pause(project: Path) -> None:
    """It outlasts its ttl, and raises where its process stood still for longer than that."""
    (project / "jobs.py").write_text(the_block("python", "make_report", TUTORIAL))
    block = the_block("console", "make_report", TUTORIAL)
    shown = [re.sub(r"[\d.]+ s", "… s", line) for line in block.splitlines()[1:]]
    told = sh(project, typed(block)).splitlines()
    assert [re.sub(r"[\d.]+ s", "… s", line) for line in told][-len(shown) :] == shown

    with subprocess.Popen(
        ["bash", "-ec", f"exec {typed(block)}"],
        cwd=project,
        env=environment(project),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as paused:
        try:
            assert any(line.startswith("step 0") for line in there(paused.stdout))
            paused.send_signal(signal.SIGSTOP)
            ttl = re.search(r"ttl=(\d+)", the_block("python", "make_report", TUTORIAL))
            assert ttl
            time.sleep(int(ttl[1]) + 0.5)
        finally:
            paused.send_signal(signal.SIGCONT)
        _, errors = paused.communicate(timeout=PATIENCE)
    assert "django_distlock.core.errors.LockLost: " in errors
