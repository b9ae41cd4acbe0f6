"""A newcomer: types what a page says into an empty folder, as the page has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

from django.core.management import execute_from_command_line

ROOT = Path(__file__).parents[2]
#: For a machine with much else to do.
PATIENCE = 300.0


def text_of(page: str) -> str:
    """Return a page by its name, such as "howto/lock-views" or "README"."""
    file = ROOT / ("README.md" if page == "README" else f"docs/{page}.md")
    return file.read_text(encoding="utf-8")


def blocks(language: str, page: str) -> list[str]:
    """Return the blocks of code in the text of a page, of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def the_block(language: str, word: str, page: str) -> str:
    """Return the only block in which a word stands."""
    (found,) = (each for each in blocks(language, page) if word in each)
    return found


def typed(block: str) -> str:
    """Return what is typed in a block of the console."""
    return "\n".join(re.findall(r"^\$ (.*)$", block, re.MULTILINE))


def outer() -> dict[str, str]:
    """Return the environment without the settings of tests."""
    mine = ("PYTEST_", "DJANGO_", "DISTLOCK_")
    found = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    return found | {"PYTHONDEVMODE": ""}


def environment(project: Path) -> dict[str, str]:
    """Return an environment in which `python` is this one, and no test's setting is known."""
    return outer() | {
        "PATH": f"{project / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{project}:{ROOT}",
        "PYTHONUNBUFFERED": "1",
    }


def sh(project: Path, commands: str, *, status: int = 0) -> str:
    """Type commands in the folder of the project; return what they printed."""
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=project,
        env=environment(project),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def start_project(folder: Path) -> None:
    """Make the project of the tutorial, as it says; the package is there without pip."""
    (folder / "bin").mkdir()
    programs = {"python": "", "celery": "-m celery"}
    for name, arguments in programs.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        program.chmod(0o755)
    tutorial = text_of("tutorial/first-lock")
    (start,) = (
        line
        for line in typed(blocks("console", tutorial)[0]).splitlines()
        if "startproject" in line
    )
    with chdir(folder):
        execute_from_command_line(start.split())
    settings = folder / "project/settings.py"
    (app,) = (
        line for line in blocks("python", tutorial)[0].splitlines() if "django_distlock" in line
    )
    text = settings.read_text().replace("INSTALLED_APPS = [", f"INSTALLED_APPS = [\n{app}", 1)
    settings.write_text(text)
