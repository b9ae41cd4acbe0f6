"""The parts of a diagnosis: findings, which are messages as of system checks, and looks."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from django.core import checks

from ...checks.configured import Subject
from ...core.pages import DOCS_URL, page

_CHECKS: Final = page("reference/checks")
_PAGE = re.compile(re.escape(DOCS_URL) + r"[\w/-]+\.html")
_PAGES: Final = {
    "howto/wait-without-polling": "D008",
    "reference/checks": "D013",
    "reference/settings": "E001",
    "runbooks/clock-jump": "D001 D012",
    "runbooks/failover": "D006 D022 E105 W105 W108 W115 W202 W203 W204",
    "runbooks/held-past-expiry": "D004",
    "runbooks/lost-lease": "E402 W004",
    "runbooks/rejected-fence": "W109",
    "runbooks/store-unreachable": "D009 D010 D011 W102 W205 W302",
    "runbooks/stuck-lock": "D005 D007 D021",
    "runbooks/too-many-waiters": "D002 D003",
}
#: The page about an id. If an id is not here: the page that the hint names, or that of all checks.
ADDRESSES: Final = {
    f"distlock.{each}": page(name) for name, ids in _PAGES.items() for each in ids.split()
}


class Mark(enum.StrEnum):
    """The result of looking at something."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Something that was looked at, such as a "clock": the result, and what was seen."""

    backend: str | None = None
    what: str
    mark: Mark = Mark.OK
    text: str = ""


@dataclass(slots=True)
class Notes:
    """The notes about one backend, or about the project, which has no alias."""

    backend: str | None = None
    looks: list[Look] = field(default_factory=list)
    findings: list[checks.CheckMessage] = field(default_factory=list)
    is_silent: bool = False

    def look(self, what: str, text: str = "", mark: Mark = Mark.OK) -> None:
        """Note the result of looking at something."""
        self.looks.append(Look(backend=self.backend, what=what, mark=mark, text=text))

    def skip(self, what: str, text: str) -> None:
        """Note what was not looked at, and why."""
        self.look(what, text, Mark.SKIPPED)

    def find(
        self,
        id: str,  # noqa: A002 - as Django's checks call it
        what: str,
        text: str,
        hint: str,
        *,
        level: int = checks.WARNING,
        keys: Sequence[str] = (),
    ) -> None:
        """Note a finding of the diagnosis itself, by its id after `distlock.`."""
        about = Subject(() if self.backend is None else (self.backend,), tuple(keys))
        found = checks.CheckMessage(level, text, hint=hint, obj=about, id=f"distlock.{id}")
        self.findings.append(found)
        if found.is_silenced():
            self.skip(what, f"{found.id} is silenced")
        else:
            self.look(what, text, Mark(level_of(found)))


def level_of(message: checks.CheckMessage) -> str:
    """Return how bad a finding is.

    An error: locks are not granted, or do not exclude each other. A warning: they may not.
    """
    if message.level >= checks.ERROR:
        return "error"
    return "warning" if message.level >= checks.WARNING else "info"


def told(message: checks.CheckMessage) -> dict[str, Any]:
    """Return a finding as JSON can carry it, with the page of the documentation about it."""
    about = message.obj if isinstance(message.obj, Subject) else Subject()
    return {
        "id": str(message.id),
        "level": level_of(message),
        "backend": about.aliases[0] if len(about.aliases) == 1 else None,
        "message": message.msg,
        "hint": message.hint or "",
        "address": address(str(message.id), message.hint or ""),
        "keys": list(about.keys),
    }


def address(id: str, hint: str) -> str:  # noqa: A002 - see above
    """Return the page of the documentation that continues a hint."""
    named = [each for each in _PAGE.findall(hint) if each != _CHECKS]
    return ADDRESSES.get(id) or (named[0] if named else _CHECKS)
