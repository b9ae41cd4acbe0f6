"""What `python -m django_distlock.audit` reads, prints and returns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from django_distlock.audit.__main__ import main
from django_distlock.audit.rules import RULES

WRONG = 'from django.core.cache import cache\ncache.add("job-lock", 1)\n'
IGNORED = "the result of `cache.add('job-lock', 1)` is not checked"
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/audit-lock-code.md").read_text()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with a file that is wrong, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs.py").write_text(WRONG)
    return tmp_path


def audit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command in this process."""
    code = main(arguments)
    return code, capsys.readouterr().out


def documented(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return what the command prints as JSON."""
    return json.loads(audit(capsys, "--format", "json", *arguments)[1])


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str, int]]:
    """Return the files and lines that the command finds."""
    found = documented(capsys, *arguments)["findings"]
    return [(each["path"], each["line"]) for each in found]


def test_command_runs_where_there_is_no_django(project: Path) -> None:
    """It imports the standard library alone, and no setting is needed."""
    program = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "django":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
before = {*sys.modules}
sys.argv = ["audit", "jobs.py"]
try:
    runpy.run_module("django_distlock.audit", run_name="__main__")
except SystemExit as ended:
    print("exit", ended.code)
new = {*sys.modules} - before
new = {name for name in new if name.partition(".")[0] not in sys.stdlib_module_names}
print(sorted(name for name in new if not name.startswith("django_distlock.audit")))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=project,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
    )
    assert "jobs.py:2: acquire-ignored: " in done.stdout
    assert done.stdout.endswith("exit 1\n['django_distlock']\n")


def test_nothing_of_the_project_is_imported(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that would raise is read as any other."""
    (project / "jobs.py").write_text(f"raise SystemExit(9)\n{WRONG}")
    assert audit(capsys, "jobs.py")[0] == 1


def test_text_names_place_reason_and_remedy(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in a line, and a sum below."""
    code, text = audit(capsys, ".")
    assert code == 1
    assert text.splitlines() == [
        f"jobs.py:2: acquire-ignored: {IGNORED}",
        f"    why: {RULES['acquire-ignored'][0]}",
        f"    remedy: {RULES['acquire-ignored'][1]}",
        "1 found in 1 files, 0 not read",
    ]


def test_json(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One document has what the text has."""
    (project / "broken.py").write_text("def")
    assert documented(capsys, ".") == {
        "files": 2,
        "findings": [
            {
                "path": "jobs.py",
                "line": 2,
                "rule": "acquire-ignored",
                "message": IGNORED,
                "why": RULES["acquire-ignored"][0],
                "remedy": RULES["acquire-ignored"][1],
            }
        ],
        "not_read": [{"path": "broken.py", "reason": "line 1: invalid syntax"}],
    }


def test_sarif_has_what_the_standard_requires(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The required properties of SARIF 2.1.0, and what code hosts read."""
    (project / "a b.py").write_text(WRONG)
    (project / "broken.py").write_text("def")
    outside = project.parent / f"{project.name} outside.py"
    outside.write_text(WRONG)
    code, text = audit(capsys, "--format", "sarif", ".", str(outside))
    log = json.loads(text)
    assert (code, log["version"]) == (1, "2.1.0")
    assert "sarif" in log["$schema"]
    (run,) = log["runs"]
    assert run["tool"]["driver"]["name"] == "django_distlock.audit"
    rules = run["tool"]["driver"]["rules"]
    assert [each["id"] for each in rules] == [*RULES]
    uris = []
    for result in run["results"]:
        assert result["ruleId"] == "acquire-ignored"
        assert result["message"]["text"]
        place = result["locations"][0]["physicalLocation"]
        assert place["region"] == {"startLine": 2}
        uris.append(place["artifactLocation"]["uri"])
    assert sorted(uris) == sorted(["a%20b.py", "jobs.py", outside.as_uri()])
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is True
    (note,) = invocation["toolExecutionNotifications"]
    assert note["message"]["text"] == "line 1: invalid syntax"


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({"fine.py": "x = 1"}, 0),
        ({"jobs.py": WRONG}, 1),
        ({"broken.py": "def"}, 3),
        ({"jobs.py": WRONG, "broken.py": "def"}, 1),
        ({}, 0),
    ],
)
def test_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], code: int
) -> None:
    """What was found counts for more than what could not be read."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert audit(capsys, str(tmp_path))[0] == code


def test_output_that_cannot_be_written_is_no_finding(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was closed, before or meanwhile, is missed by nobody; a full disk is told."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody, Path("/dev/full").open("w") as full:
        for out in (None, nobody):
            monkeypatch.setattr(sys, "stdout", out)
            assert main(["jobs.py"]) == 1
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as raised:
            main(["jobs.py"])
    assert raised.value.code == 4
    assert "could not be written: [Errno 28]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [[], ["nowhere"], [".", "--select", "no-rule"], [".", "--format", "xml"]]
)
def test_wrong_arguments_are_refused(
    project: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """The exit code is 2, and the message names the value."""
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert (arguments or ["PATH"])[-1] in capsys.readouterr().err


def test_help_and_page_name_each_rule_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` says all that the command does."""
    with pytest.raises(SystemExit) as raised:
        main(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    for rule in RULES:
        assert f"\n  {rule}\n" in text
        assert f"\n| `{rule}` | " in PAGE
    for code in (0, 1, 2, 3, 4):
        assert f"\n  {code}  " in text
        assert f"\n| {code} | " in PAGE
    for option in re.findall(r"^  (--[\w-]+)", text, re.MULTILINE):
        assert f"`{option} " in PAGE


ODD = {
    "syntax.py": (b"def f(:\n", "line 1: "),
    "unknown_encoding.py": (b"# coding: klingon\n", "unknown encoding"),
    "no_utf8.py": (b"x = '\xe9'\n", "line 1: "),
    "null.py": (b"x = 1\0\n", "null bytes"),
    "utf16.py": ("x = 1\n".encode("utf-16"), ""),
    "two_encodings.py": (b"\xef\xbb\xbf# coding: latin-1\n", ""),
    "nested.py": (b"x = " + b"(" * 3000 + b")" * 3000, ""),
    "long_sum.py": (b"x = " + b"+".join([b"1"] * 50_000), ""),
    "long_key.py": (b"cache.get(" + b"+".join([b"x"] * 2_000) + b")", ""),
    "long_setting.py": (b"DATABASES = " + b"+".join([b"'a'"] * 900), ""),
}


@pytest.mark.parametrize("name", ODD)
def test_file_that_cannot_be_read_is_named(
    project: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """And nothing else is lost."""
    raw, reason = ODD[name]
    (project / name).write_bytes(raw)
    document = documented(capsys, ".")
    assert [each["path"] for each in document["not_read"]] == [name]
    assert reason in document["not_read"][0]["reason"]
    assert "None" not in document["not_read"][0]["reason"]
    assert [each["path"] for each in document["findings"]] == ["jobs.py"]


def test_what_is_no_file_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link that leads nowhere, and a pipe, on which nobody waits."""
    (project / "gone.py").symlink_to("nowhere")
    os.mkfifo(project / "pipe.py")
    document = documented(capsys, ".")
    assert [each["path"] for each in document["not_read"]] == ["gone.py", "pipe.py"]
    assert [each["path"] for each in document["findings"]] == ["jobs.py"]


def test_notebook_is_not_read(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is JSON, which is an expression of Python as well, in which nothing would be wrong."""
    source = {"cell_type": "code", "outputs": [], "source": WRONG}
    (project / "some.ipynb").write_text(json.dumps({"cells": [source]}))
    assert audit(capsys, "some.ipynb")[0] == 3
    (unread,) = documented(capsys, "some.ipynb")["not_read"]
    assert unread["path"] == "some.ipynb"


def test_folder_that_cannot_be_read_is_named(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even root enters one whose path is too long. Nothing else is lost."""
    upper, lower = (project / part / Path(*["d" * 250] * 9) for part in ("upper", "lower"))
    for each in (upper, lower):
        each.mkdir(parents=True)
    (project / "lower").rename(upper / "lower")
    document = documented(capsys, ".")
    # What removes the folder of the test could not enter it either.
    (upper / "lower").rename(project / "lower")
    (unread,) = document["not_read"]
    assert unread["path"].startswith("upper/ddd")
    assert unread["reason"] == "File name too long"
    assert [each["path"] for each in document["findings"]] == ["jobs.py"]


def test_name_that_is_no_text_is_told(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In each format, also where it cannot be printed as it is."""
    (project / "jobs.py").rename(os.fsdecode(b"\xff.py"))
    assert "\\udcff.py:2: acquire-ignored" in audit(capsys, ".")[1]
    assert lines(capsys, ".") == [("\udcff.py", 2)]
    assert '"uri": "%FF.py"' in audit(capsys, ".", "--format", "sarif")[1]


@pytest.mark.parametrize(
    "raw",
    [
        WRONG.encode("utf-8-sig"),
        f"# -*- coding: latin-1 -*-\n# é\n{WRONG}".encode("latin-1"),
        WRONG.replace("\n", "\r\n").encode(),
        WRONG.replace("\n", "\r").encode(),
        b"x = '\\d'\n" + WRONG.encode(),  # an escape that Python warns of
    ],
)
def test_other_encodings_and_line_ends_are_read(
    project: Path, capsys: pytest.CaptureFixture[str], raw: bytes
) -> None:
    """Those that Python itself reads; comments are where Python sees them."""
    (project / "jobs.py").write_bytes(raw)
    assert len(lines(capsys, ".")) == 1
    wrong, right = b"1)", b"1)  # distlock: ignore[acquire-ignored]"
    (project / "jobs.py").write_bytes(raw.replace(wrong, right))
    assert documented(capsys, ".") == {"files": 1, "findings": [], "not_read": []}


@pytest.mark.parametrize(
    ("comment", "found"),
    [
        ("# distlock: ignore[acquire-ignored]", 0),
        ("#distlock:ignore[ acquire-ignored , get-then-set ]", 0),
        ("# noqa  # distlock: ignore[acquire-ignored] a default value", 0),
        ("# distlock: ignore[get-then-set]", 1),
        ("# distlock: ignore", 1),
        ("# distlock: ignore[]", 1),
    ],
)
def test_comment_dismisses_the_rules_that_it_names(
    project: Path, capsys: pytest.CaptureFixture[str], comment: str, found: int
) -> None:
    """And no others."""
    (project / "jobs.py").write_text(WRONG.replace("1)", f"1)  {comment}"))
    assert len(lines(capsys, ".")) == found


def test_comment_in_any_line_of_a_call(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A call that is broken over lines has the comment where it fits; one below is of no use."""
    broken = 'cache.add(\n    "some-lock",\n    1,  # distlock: ignore[acquire-ignored]\n)\n'
    behind = 'cache.add("other-lock", 1)\n# distlock: ignore[acquire-ignored]\n'
    (project / "jobs.py").write_text(WRONG + broken + behind)
    assert lines(capsys, ".") == [("jobs.py", 2), ("jobs.py", 7)]


def test_select_and_ignore_choose_rules(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both can be repeated."""
    (project / "jobs.py").write_text(f'{WRONG}cache.delete("job-lock")\n')
    assert lines(capsys, ".") == [("jobs.py", 2), ("jobs.py", 3)]
    assert lines(capsys, ".", "--select", "acquire-ignored") == [("jobs.py", 2)]
    assert lines(capsys, ".", "--ignore", "acquire-ignored") == [("jobs.py", 3)]
    both = ["--ignore", "acquire-ignored", "--ignore", "delete-without-token"]
    assert lines(capsys, ".", *both) == []


def test_number_that_python_does_not_print(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file may have one, and is audited all the same."""
    (project / "primes.py").write_text(f"PRIME = 0x{'f' * 4000}\n{WRONG}")
    assert lines(capsys, ".") == [("jobs.py", 2), ("primes.py", 3)]


def test_folders_that_are_not_the_projects_are_left_out(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Virtual environments, hidden folders and the like; unless they are named."""
    for name in (".git", "venv", "node_modules", "shop", "shop/migrations"):
        (project / name).mkdir()
        (project / name / "some.py").write_text(WRONG)
    (project / "venv/pyvenv.cfg").touch()
    (project / "notes.txt").write_text(WRONG)
    expected = [("jobs.py", 2), ("shop/migrations/some.py", 2), ("shop/some.py", 2)]
    assert lines(capsys, ".") == expected
    assert lines(capsys, "venv") == [("venv/some.py", 2)]
    assert lines(capsys, ".", "jobs.py", "--exclude", "migrations") == [expected[0], expected[2]]
    for pattern in ("shop/*", "shop/", "./shop"):
        assert lines(capsys, ".", "--exclude", pattern) == [expected[0]]
    assert lines(capsys, "notes.txt") == [("notes.txt", 2)]
