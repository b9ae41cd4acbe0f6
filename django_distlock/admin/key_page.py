"""All that is known about a key, as its page shows it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from ..core.holders import Holder
from ..core.records import known_holder
from ..core.wording import is_seen
from ..inspection import KeyView, Operation
from ..inspection.history import times_of
from ..models import LockEvent
from .addresses import Pages, Target
from .charts import Chart, lasted, of_releases
from .dashboard_rows import Row, row_of


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a key, or will."""

    at: datetime
    what: str | Promise
    fence: int | None = None
    by: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """How somebody held a key."""

    at: datetime
    held: str
    waited: str
    holder: Holder
    fence: int | None


@dataclass(frozen=True, slots=True)
class KeyPage:
    """What the page of a key shows: events and past holders only where it `tells_who`."""

    view: KeyView
    target: Target
    pages: Pages
    tells_who: bool = False

    @property
    def row(self) -> Row | None:
        """The lock, as the dashboard shows it; None: nobody holds it."""
        held = self.view.held
        return None if held is None else row_of(held, self.pages)

    @property
    def all_rows(self) -> list[Row]:
        """Everybody who holds it."""
        held = () if self.view.held is None else (self.view.held,)
        return [row_of(each, self.pages) for each in self.view.sharing or held]

    @property
    def rows(self) -> list[Row]:
        """Those of them whom the target names: all, where it names none."""
        fences = self.target.fences
        return [each for each in self.all_rows if not fences or each.lock.fence in fences]

    @property
    def others(self) -> int:
        """How many hold it beside those."""
        return len(self.all_rows) - len(self.rows)

    def chain(self) -> list[tuple[str, str, Holder | None]]:
        """What its holder waits for, and so on: each key, its page and its holder."""
        return [
            (each.key, self.pages.key(Target(self.target.backend, each.key)), each.holder)
            for each in self.view.chain()
        ]

    @property
    def releases(self) -> list[Release]:
        """How it was held before, the last time first."""
        return [
            Release(each.at, lasted(held), lasted(waited), known_holder(each.holder), each.fence)
            for each, (held, waited) in self._releases()
        ]

    @property
    def chart(self) -> Chart | None:
        """How long it was held and waited for; None: no release is to be shown."""
        found = self._releases()
        return of_releases([(event.at, *times) for event, times in found]) if found else None

    def _releases(self) -> list[tuple[LockEvent, tuple[float, float]]]:
        events = (self.view.releases if self.tells_who else None) or ()
        found = ((each, times_of(each.details)) for each in events)
        return [(event, times) for event, times in found if times is not None]

    @property
    def is_unknown(self) -> bool:
        """Whether the store and the events know nothing of the key."""
        view = self.view
        found = (view.held, view.expired, view.counter)
        past = (view.waiters, view.events, view.releases)
        return view.knows_fence and all(each is None for each in found) and not any(past)

    def fits(self, operation: Operation) -> bool:
        """Whether there is something now that it could be done to."""
        if self.is_unknown:
            return False
        paused = self.view.paused_until is not None
        if operation in (Operation.PAUSE, Operation.RESUME):
            return paused == (operation is Operation.RESUME)
        return self.view.held is not None

    @property
    def fence_after(self) -> int:
        """The least fence of whoever gets the key after a forced release."""
        return self.view.fence + 1

    @property
    def moments(self) -> list[Moment]:
        """What happened, the last first, with the grant and the end of the lease among it."""
        found = [
            Moment(each.at, each.get_kind_display(), each.fence, each.actor, each.reason)
            for each in (self.view.events if self.tells_who else None) or ()
        ]
        return sorted([*found, *self._of_lock()], key=lambda each: each.at, reverse=True)

    def _of_lock(self) -> Iterator[Moment]:
        held = self.view.held
        if held is None:
            return
        yield Moment(held.acquired_at, _("acquired"), held.fence)
        if held.renewed_at != held.acquired_at:
            yield Moment(held.renewed_at, _("last renewed"), held.fence)
        if held.stop_requested_at is not None:
            yield Moment(held.stop_requested_at, _("stop requested"), held.fence)
        if held.expires_at is not None:
            yield Moment(held.expires_at, _("expires unless renewed"), held.fence)

    @property
    def commands(self) -> list[tuple[Promise, str]]:
        """What an operator may type instead, ready for a shell."""
        named = f"--backend {shlex.quote(self.target.backend)} {_quoted(self.target.key)}"
        return [
            (_("Show"), f"python manage.py distlock_show {named}"),
            (_("Force-release"), f"python manage.py distlock_release {named}"),
        ]

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What the holder added about itself; as text, or pages would localise the numbers."""
        told = {} if self.view.held is None else self.view.held.holder.metadata
        return sorted(
            (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for name, value in told.items()
        )

    @property
    def seen(self) -> str:
        """What a form sends to name the key and whom it was seen with."""
        found = tuple(each.lock.fence for each in self.rows)
        fences = self.target.fences or found or (self.view.fence,)
        return replace(self.target, fences=fences).text


def _quoted(key: str) -> str:
    """Return a key as a shell takes it, with nothing in it that changes how a page shows it."""
    text = shlex.quote(key) if is_seen(key) else f"$'{''.join(map(_escaped, key))}'"
    # Else an option begins here.
    return f"-- {text}" if key.startswith("-") else text


def _escaped(character: str) -> str:
    if is_seen(character):
        return f"\\{character}" if character in "\\'" else character
    # Not `\xHH`, which is a byte there.
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
