"""System check of uWSGI without threads, asked inside of real servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from django.core import checks

from tests.setups.servers import served

SERVED = """
import json, uwsgi
import django
from django.core import checks

django.setup()

def application(environ, start_response):
    messages = [each for each in checks.run_checks(tags=["distlock"]) if not each.is_silenced()]
    found = {each.id: f"{each.msg} {each.hint}" for each in messages}
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps({"found": found, "threads": bool(uwsgi.has_threads)}).encode()]
"""

#: What releases before 2.0.27 say by themselves, where threads are off unless asked for.
WITHOUT = "import uwsgi; uwsgi.has_threads = 0"


def inside(home: Path, *arguments: str, before: str = "") -> tuple[Any, str]:
    """Run the checks in a worker of uWSGI; give what it answers, and what it has logged."""
    program = home / "program.py"
    program.write_text(before + SERVED)
    with served(
        home, "pyuwsgi", "--http-socket", "127.0.0.1:{port}", "--wsgi-file", str(program),
        "--need-app", "--die-on-term", *arguments,
    ) as site:  # fmt: skip
        return site.get("ready"), site.said()


def test_nothing_is_said_outside_of_uwsgi() -> None:
    """Elsewhere threads run."""
    assert "uwsgi" not in sys.modules
    messages = checks.run_checks(tags=["distlock"])
    assert [each.id for each in messages if not each.is_silenced()] == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["--master", "--processes", "2", "--lazy-apps"]],
    ids=lambda arguments: " ".join(arguments) or "default",
)
def test_threads_that_run_are_nothing_to_warn_of(tmp_path: Path, arguments: list[str]) -> None:
    """By option or by default: what counts is whether they run."""
    answer, said = inside(tmp_path, *arguments)
    assert answer["threads"] is True
    assert answer["found"] == {}
    assert "without threads" not in said


def test_missing_threads_are_a_warning(tmp_path: Path) -> None:
    """W001 says what does not work and what to set; the log of the server says so by itself."""
    answer, said = inside(tmp_path, "--master", before=WITHOUT)
    assert answer["threads"] is False
    assert list(answer["found"]) == ["distlock.W001"]
    assert "heartbeat" in answer["found"]["distlock.W001"]
    assert "enable-threads = true" in answer["found"]["distlock.W001"]
    # Nobody runs `manage.py check` inside of a web server.
    assert said.count("the heartbeat stops between requests") == 1
