"""What was found, as text, JSON or SARIF 2.1.0."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from .rules import RULES, Finding

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_text(findings: list[Finding], unread: Mapping[str, str], files: int) -> str:
    """Return three lines for each finding, and a sum."""
    lines = []
    for path, line, rule, message in findings:
        why, remedy = RULES[rule]
        lines += [f"{path}:{line}: {rule}: {message}", f"    why: {why}", f"    remedy: {remedy}"]
    lines += [f"{path}: not read: {reason}" for path, reason in unread.items()]
    return "\n".join([*lines, f"{len(findings)} found in {files} files, {len(unread)} not read"])


def as_json(findings: list[Finding], unread: Mapping[str, str], files: int) -> str:
    """Return one document."""
    texts = {rule: {"why": why, "remedy": remedy} for rule, (why, remedy) in RULES.items()}
    found = [each._asdict() | texts[each.rule] for each in findings]
    not_read = [{"path": path, "reason": reason} for path, reason in unread.items()]
    return json.dumps({"files": files, "findings": found, "not_read": not_read}, indent=2)


def as_sarif(findings: list[Finding], unread: Mapping[str, str], files: int) -> str:
    """Return a log file of static analysis.

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
