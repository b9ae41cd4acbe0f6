"""What the first pages tell a newcomer to type works as printed: README, landing page, tutorial."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.contract.helpers import there
from tests.fork_server import fork
from tests.processes import BE_PYTHON, Process

from .newcomers import (
    PATIENCE,
    blocks,
    environment,
    outer,
    sh,
    start_project,
    text_of,
    the_block,
    typed,
)

FRONT = ("README", "index")
TUTORIAL = text_of("tutorial/first-lock")
#: Runs what is typed into a shell, block by block, and ends where something goes otherwise.
SHELL = """
import doctest, json, sys, django

django.setup()
names = {}
for line in sys.stdin:
    typed = doctest.DocTestParser().get_doctest(json.loads(line), {}, "typed", None, 0)
    typed.globs = names
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    if runner.run(typed, out=said.append, clear_globs=False).failed:
        sys.exit("".join(said))
    print("as printed", flush=True)
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


def shell(project: Path) -> Process:
    """Start a Python shell in the project."""
    (project / "shell.py").write_text(SHELL)
    variables = outer() | {"DJANGO_SETTINGS_MODULE": "project.settings"}
    what = [str(project), "", "shell.py"]
    return Process(lambda stdin, stdout: fork(BE_PYTHON, what, variables, stdin, stdout))


def show(shell: Process, block: str) -> None:
    """Type a block; the shell shows what the tutorial shows."""
    shell.send(json.dumps(block))
    shell.wait_for("as printed")


def test_first_code_of_the_pages_runs(project: Path) -> None:
    """The block of ten lines, which both front pages have, is granted its key."""
    code, same = (the_block("python", 'distlock("invoice:42"', text_of(p)) for p in FRONT)
    assert code == same
    setup = 'import os, django\nos.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"\n'
    (project / "first.py").write_text(f"{setup}django.setup()\n{code}")
    assert "held, fence 1\n" in sh(project, "python first.py")


def test_shells_of_the_tutorial_say_what_it_prints(project: Path) -> None:
    """One holds and one is refused; the fence grows; a killed holder is waited for."""
    take, refused, release, again, lost, die, wait = blocks("pycon", TUTORIAL)
    with shell(project) as first, shell(project) as second:
        # The seconds that are left are fewer where the machine is slow.
        show(first, take.replace("600.0 s", "... s"))
        show(second, refused)
        show(first, release)
        show(second, again)
        for each in (first, second):
            each.leave()
    with shell(project) as third:
        show(third, lost)
        third.send(json.dumps(die))
        assert third.popen.wait(PATIENCE) == 1
    with shell(project) as last:
        show(last, wait)
        last.leave()


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
