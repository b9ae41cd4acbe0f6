"""Records of the log have the same fields, whichever module they come from."""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest

from django_distlock.core.errors import LockNotAcquired
from django_distlock.core.logs import FIELDS, log_fields
from django_distlock.core.records import Holder

ROOT = Path(__file__).parents[2]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
MODULES = sorted((ROOT / "django_distlock").rglob("*.py"))


def calls(module: Path) -> list[ast.Call]:
    """Return what a module logs."""
    return [
        node
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LEVELS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "logger"
    ]


def test_whatever_is_logged_has_its_fields() -> None:
    """Every call of the logger says what happened, in a word for programs."""
    found = {module: calls(module) for module in MODULES}
    assert sum(map(len, found.values())) > 40
    without = [
        f"{module.relative_to(ROOT)}:{call.lineno}"
        for module, each in found.items()
        for call in each
        if not any(keyword.arg == "extra" for keyword in call.keywords)
    ]
    assert without == []


def words(module: Path) -> set[str]:
    """Return the events that a module names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            is_event = name in ("log_fields", "_fields", "_warn", "Words")
            if is_event and isinstance(node.args[0], ast.Constant):
                found.add(str(node.args[0].value))
    return found


def test_page_lists_the_words() -> None:
    """Each event that the code names has a row, and each row an event."""
    named = set().union(*map(words, MODULES))
    section = (ROOT / "docs/howto/monitor.md").read_text().partition("### Words\n")[2]
    first = re.findall(r"^\| (`.*?`) \|", section.partition("\n#")[0], re.MULTILINE)
    listed = {word for cell in first[1:] for word in re.findall(r"`(\w+)`", cell)}
    of_leaders = {word for word in listed if word.startswith(("beat_", "leader_"))}
    assert listed - of_leaders == named
    assert len(of_leaders) == 8


def test_other_records_of_the_logger_have_empty_fields(caplog: pytest.LogCaptureFixture) -> None:
    """A format may name all fields, whoever logs."""
    logging.getLogger("django_distlock").warning("A project's own line")
    (record,) = [each for each in caplog.records if each.getMessage() == "A project's own line"]
    assert {name: getattr(record, name) for name in FIELDS} == dict.fromkeys(FIELDS)


def test_error_tells_what_it_knows() -> None:
    """Its code, its key and who holds that, where the call does not say."""
    holder = Holder(host="web-1", pid=7)
    error = LockNotAcquired("It was taken.", key="a:1", holder=holder)
    said = log_fields("skipped", backend="default", error=error)
    assert tuple(said) == FIELDS
    assert said["distlock_key"] == "a:1"
    assert said["distlock_code"] == "acquisition_timeout"
    assert said["distlock_holder"]["host"] == "web-1"
    assert log_fields("skipped", key="b:2", error=error)["distlock_key"] == "b:2"


def test_key_forges_no_line(caplog: pytest.LogCaptureFixture) -> None:
    """A format that names the key, the task and an error writes one line, whatever is in them."""
    logger = logging.getLogger("django_distlock")
    extra = log_fields("lost", key="a\nWARNING forged: b", task="1\r2")
    logger.warning("%r failed: %s", "a\nb", OSError("refused\n\tIs it up?\u2028"), extra=extra)
    layout = logging.Formatter("%(levelname)s %(distlock_key)s %(distlock_task)s: %(message)s")
    (line,) = [layout.format(each) for each in caplog.records if "failed: " in each.msg]
    assert line == (r"WARNING a\nWARNING forged: b 1\r2: 'a\nb' failed: refused\n\tIs it up?\u2028")
