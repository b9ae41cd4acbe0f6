"""The command: reads the arguments, audits the files, prints what was found."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from .regions import Regions
from .rules import REQUEST, RULES, Finding, Found
from .sources import Source, Unreadable, files
from .stores import Stores
from .transactions import Transactions, conditions

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_EPILOG = """
rules:
{}

A finding is dismissed by `# distlock: ignore[RULE]` in its line, or `ignore[RULE, RULE]`.

exit codes:
  0  nothing was found, and all files were read
  1  something was found
  2  the arguments break a rule, or a path does not exist
  3  nothing was found, but files could not be read (they are named)
  4  the output could not be written
"""


class Audit:
    """The findings in files that are read one after the other."""

    def __init__(self) -> None:
        self.files = 0
        self.unread: dict[str, str] = {}
        self._found: list[tuple[str, Found]] = []
        self._conditions: set[str] = set()

    def read(self, path: Path) -> None:
        """Audit a file. If it cannot be read, note that: the findings of other files remain."""
        self.files += 1
        try:
            source = Source(path)
            stores = Stores(source)
            regions = Regions(source, stores)
            parts = stores, regions, Transactions(source, regions)
            found = [each for part in parts for each in part.findings()]
            said = {*conditions(source)}
        except (Unreadable, RecursionError, ValueError) as error:
            # A number may have more digits than Python prints.
            self.unread[str(path)] = str(error)
            return
        self._conditions |= said
        for each in found:
            lines = range(each.node.lineno, (each.node.end_lineno or 0) + 1)
            if not any(each.rule in source.ignored.get(line, ()) for line in lines):
                self._found.append((str(path), each))

    def skip(self, error: OSError) -> None:
        """Note a folder that cannot be read."""
        self.unread[str(Path(error.filename))] = error.strerror or str(error)

    def findings(self, rules: Collection[str] = RULES) -> list[Finding]:
        """Return the findings of rules, by file and line. All files must have been read before."""
        counting = {"", *self._conditions} ^ {REQUEST}
        return sorted(
            {
                Finding(path, each.node.lineno, each.rule, each.message)
                for path, each in self._found
                if each.rule in rules and each.condition in counting
            }
        )


def as_text(findings: list[Finding], unread: Mapping[str, str], files: int) -> str:
    """Return three lines for each finding, and a summary line."""
    lines = []
    for path, line, rule, message in findings:
        why, remedy = RULES[rule]
        lines += [f"{path}:{line}: {rule}: {message}", f"    why: {why}", f"    remedy: {remedy}"]
    lines += [f"{path}: not read: {reason}" for path, reason in unread.items()]
    return "\n".join([*lines, f"{len(findings)} found in {files} files, {len(unread)} not read"])


def as_json(findings: list[Finding], unread: Mapping[str, str], files: int) -> str:
    """Return one JSON document."""
    texts = {rule: {"why": why, "remedy": remedy} for rule, (why, remedy) in RULES.items()}
    found = [each._asdict() | texts[each.rule] for each in findings]
    not_read = [{"path": path, "reason": reason} for path, reason in unread.items()]
    return json.dumps({"files": files, "findings": found, "not_read": not_read}, indent=2)


def as_sarif(findings: list[Finding], unread: Mapping[str, str], files: int) -> str:
    """Return a SARIF log.

    Source: OASIS, Static Analysis Results Interchange Format (SARIF) Version 2.1.0.
    """
    rules = [
        {"id": rule, "shortDescription": {"text": why}, "help": {"text": remedy}}
        for rule, (why, remedy) in RULES.items()
    ]
    results = []
    for path, line, rule, message in findings:
        text = f"{message}. {' Remedy: '.join(RULES[rule])}"
        results.append({"ruleId": rule, "level": "warning"} | _place(path, line, text))
    notes = [{"level": "error"} | _place(path, 1, reason) for path, reason in unread.items()]
    run = {
        "tool": {"driver": {"name": "django_distlock.audit", "rules": rules}},
        "invocations": [{"executionSuccessful": True, "toolExecutionNotifications": notes}],
        "results": results,
        "properties": {"files": files},
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _place(name: str, line: int, text: str) -> dict[str, object]:
    path = Path(name)
    uri = path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))
    place = {"artifactLocation": {"uri": uri}, "region": {"startLine": line}}
    return {"message": {"text": text}, "locations": [{"physicalLocation": place}]}


FORMATS = {"text": as_text, "json": as_json, "sarif": as_sarif}


def _print(text: str) -> OSError | None:
    """Print a text. Return why it could not be written; None: it was, or nobody reads it."""
    if sys.stdout is None:  # It was closed before we began.
        return None
    encoding = sys.stdout.encoding
    try:
        # The name of a file may have bytes that are no text.
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except OSError as error:
        # The interpreter writes buffered texts at its end, which would fail as well.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return None if isinstance(error, BrokenPipeError) else error
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit what the arguments name, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m django_distlock.audit",
        description="Read Python source and report lock code that is wrong. Nothing is imported.",
        epilog=_EPILOG.format(
            "\n".join(f"  {rule}\n      {why}" for rule, (why, _) in RULES.items())
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a folder and all below it")
    add("--format", choices=FORMATS, default="text", help="text (default), json or sarif (2.1.0)")
    for name, does in (("select", "only this rule"), ("ignore", "all but this rule")):
        add(f"--{name}", action="append", choices=RULES, metavar="RULE", help=f"{does}; repeatable")
    text = "leave out files and folders of this name or path (* is anything); repeatable"
    add("--exclude", action="append", default=[], metavar="PATTERN", help=text)
    options = parser.parse_args(arguments)
    if missing := [str(path) for path in options.paths if not os.access(path, os.F_OK)]:
        parser.error(f"no such path: {', '.join(missing)}")
    audit = Audit()
    for path in dict.fromkeys(files(options.paths, options.exclude, audit.skip)):
        audit.read(path)
    found = audit.findings({*(options.select or RULES)} - {*(options.ignore or ())})
    if error := _print(FORMATS[options.format](found, audit.unread, audit.files)):
        parser.exit(4, f"{parser.prog}: the output could not be written: {error}\n")
    return 1 if found else 3 if audit.unread else 0


if __name__ == "__main__":
    sys.exit(main())
