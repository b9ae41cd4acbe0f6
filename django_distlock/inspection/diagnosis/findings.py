"""What a diagnosis consists of."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from django.conf import settings

_RUNBOOKS: Final = "docs/runbooks"

STUCK_LOCK: Final = f"{_RUNBOOKS}/stuck-lock.md"
LOST_LEASE: Final = f"{_RUNBOOKS}/lost-lease.md"
REJECTED_FENCE: Final = f"{_RUNBOOKS}/rejected-fence.md"
HELD_PAST_EXPIRY: Final = f"{_RUNBOOKS}/held-past-expiry.md"
STORE_UNREACHABLE: Final = f"{_RUNBOOKS}/store-unreachable.md"
FAILOVER: Final = f"{_RUNBOOKS}/failover.md"
CLOCK_JUMP: Final = f"{_RUNBOOKS}/clock-jump.md"
TOO_MANY_WAITERS: Final = f"{_RUNBOOKS}/too-many-waiters.md"

_CHECKS: Final = "docs/reference/checks.md"
_PAGE = re.compile(r"docs/[\w/-]+\.md")

#: Where to read on. What is not here: the page that the hint names, or that of all checks.
ADDRESSES: Final = {
    "distlock.D001": CLOCK_JUMP,
    "distlock.D002": TOO_MANY_WAITERS,
    "distlock.D003": TOO_MANY_WAITERS,
    "distlock.D004": HELD_PAST_EXPIRY,
    "distlock.D005": STUCK_LOCK,
    "distlock.D006": FAILOVER,
    "distlock.D007": STUCK_LOCK,
    "distlock.D008": "docs/howto/wait-without-polling.md",
    "distlock.D009": STORE_UNREACHABLE,
    "distlock.D010": STORE_UNREACHABLE,
    "distlock.D011": STORE_UNREACHABLE,
    "distlock.D012": CLOCK_JUMP,
    "distlock.D013": _CHECKS,
    "distlock.D021": STUCK_LOCK,
    "distlock.D022": FAILOVER,
    "distlock.E001": "docs/reference/settings.md",
    "distlock.E102": FAILOVER,
    "distlock.E105": FAILOVER,
    "distlock.E402": LOST_LEASE,
    "distlock.W004": LOST_LEASE,
    "distlock.W102": STORE_UNREACHABLE,
    "distlock.W105": FAILOVER,
    "distlock.W108": FAILOVER,
    "distlock.W109": REJECTED_FENCE,
    "distlock.W202": FAILOVER,
    "distlock.W203": FAILOVER,
    "distlock.W204": FAILOVER,
    "distlock.W205": STORE_UNREACHABLE,
    "distlock.W302": STORE_UNREACHABLE,
}


class Level(enum.StrEnum):
    """How bad it is. An error: locks are not taken, or not kept apart; a warning: they may be."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    def is_at_least(self, other: Level) -> bool:
        """Whether this is as bad as another one, or worse."""
        order = list(Level)
        return order.index(self) <= order.index(other)


class Mark(enum.StrEnum):
    """What came of looking at something."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that somebody should know.

    Attributes:
        id: `distlock.D…` of a diagnosis, or that of a system check.
        level: How bad it is.
        message: What was seen, with figures.
        hint: What to do.
        address: The page of the documentation to go on with, by its path in the repository.
        backend: The alias that it is about; None: the project.
        keys: Some of the keys that it is about, three at most.
    """

    id: str
    level: Level
    message: str
    hint: str
    address: str
    backend: str | None = None
    keys: tuple[str, ...] = ()

    @property
    def is_silenced(self) -> bool:
        """Whether the project does not want to hear of it (`SILENCED_SYSTEM_CHECKS`)."""
        return self.id in settings.SILENCED_SYSTEM_CHECKS

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            "id": self.id,
            "level": self.level.value,
            "backend": self.backend,
            "message": self.message,
            "hint": self.hint,
            "address": self.address,
            "keys": list(self.keys),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Something that was looked at.

    Attributes:
        what: Such as "clock".
        mark: What came of it.
        text: What was seen, with figures; "": nothing else to say.
        backend: The alias; None: the project.
    """

    what: str
    mark: Mark
    text: str = ""
    backend: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what JSON can carry."""
        return {
            "backend": self.backend,
            "what": self.what,
            "mark": self.mark.value,
            "text": self.text,
        }


@dataclass(slots=True)
class Notes:
    """What is being written down about one backend, or about the project.

    Attributes:
        backend: The alias; None: the project.
        is_silent: Whether its store did not answer.
    """

    backend: str | None = None
    looks: list[Look] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    is_silent: bool = False

    def look(self, what: str, text: str = "", *, skipped: bool = False) -> None:
        """Note that there was nothing to find, or that it was not looked for."""
        mark = Mark.SKIPPED if skipped else Mark.OK
        self.looks.append(Look(what=what, mark=mark, text=text, backend=self.backend))

    def find(
        self,
        id: str,  # noqa: A002 - as Django's checks call it
        what: str,
        text: str,
        hint: str,
        *,
        level: Level = Level.WARNING,
        keys: Sequence[str] = (),
    ) -> None:
        """Note a finding of the diagnosis itself.

        Args:
            id: Behind `distlock.`.
            what: What was looked at.
            text: What was seen.
        """
        mark = Mark.ERROR if level is Level.ERROR else Mark.WARNING
        finding = Finding(
            id=f"distlock.{id}",
            level=level,
            backend=self.backend,
            message=text,
            hint=hint,
            address=address(f"distlock.{id}", hint),
            keys=tuple(keys),
        )
        if finding.is_silenced:
            mark, text = Mark.SKIPPED, f"{finding.id} is silenced"
        self.findings.append(finding)
        self.looks.append(Look(what=what, mark=mark, text=text, backend=self.backend))


def address(id: str, hint: str) -> str:  # noqa: A002 - see above
    """Return the page of the documentation that goes on where a hint ends."""
    if id in ADDRESSES:
        return ADDRESSES[id]
    named = [page for page in _PAGE.findall(hint) if page != _CHECKS]
    return named[0] if named else _CHECKS
