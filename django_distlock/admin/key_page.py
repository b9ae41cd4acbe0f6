"""The content of a key's page: all that is known about the key."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from django.utils.functional import Promise
from django.utils.translation import gettext_lazy as _

from ..core.records import Holder, known_holder
from ..core.wording import is_seen
from ..inspection import KeyView, Operation
from ..inspection.history import times_of
from ..models import LockEvent
from .addresses import Pages, Target
from .charts import Chart, lasted, of_releases
from .dashboard_rows import Row, row_of


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened to a key, or will happen."""

    at: datetime
    what: str | Promise
    fence: int | None = None
    by: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """A past hold of a key: when it was released, how long it took, and its holder."""

    at: datetime
    held: str
    waited: str
    holder: Holder
    fence: int | None


@dataclass(frozen=True, slots=True)
class KeyPage:
    """The content of the page; events and past holders are shown only if `tells_who`."""

    view: KeyView
    target: Target
    pages: Pages
    tells_who: bool = False

    @property
    def row(self) -> Row | None:
        """The lock as a row of the dashboard; None: nobody holds the key."""
        held = self.view.held
        return None if held is None else row_of(held, self.pages)

    @property
    def all_rows(self) -> list[Row]:
        """The rows of all holders."""
        held = () if self.view.held is None else (self.view.held,)
        return [row_of(each, self.pages) for each in self.view.sharing or held]

    @property
    def rows(self) -> list[Row]:
        """The rows of the holders that the target names; all rows, if it names none."""
        fences = self.target.fences
        return [each for each in self.all_rows if not fences or each.lock.fence in fences]

    @property
    def others(self) -> int:
        """The number of holders that are not in `rows`."""
        return len(self.all_rows) - len(self.rows)

    def chain(self) -> list[tuple[str, str, Holder | None]]:
        """Return the keys in `KeyView.chain()`, each with its page and its holder."""
        return [
            (each.key, self.pages.key(Target(self.target.backend, each.key)), each.holder)
            for each in self.view.chain()
        ]

    @property
    def releases(self) -> list[Release]:
        """Past holds of the key, the latest first."""
        return [
            Release(each.at, lasted(held), lasted(waited), known_holder(each.holder), each.fence)
            for each, (held, waited) in self._releases()
        ]

    @property
    def chart(self) -> Chart | None:
        """The chart of hold and wait times; None: there is no release to show."""
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
        """Whether an operation can have an effect on the key now."""
        if self.is_unknown:
            return False
        paused = self.view.paused_until is not None
        if operation in (Operation.PAUSE, Operation.RESUME):
            return paused == (operation is Operation.RESUME)
        if operation is Operation.EXPIRE_SOON:
            return any(each.lock.expires_at is not None for each in self.rows)
        return self.view.held is not None

    @property
    def fence_after(self) -> int:
        """The lowest fence that the next holder can have after a force-release."""
        return self.view.fence + 1

    @property
    def moments(self) -> list[Moment]:
        """The events, and the grant and the end of the lease, sorted with the latest first."""
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
        """Commands that do the same in a shell, each with its label."""
        named = f"--backend {shlex.quote(self.target.backend)} {_quoted(self.target.key)}"
        return [
            (_("Show"), f"python manage.py distlock_show {named}"),
            (_("Force-release"), f"python manage.py distlock_release {named}"),
        ]

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """The holder's metadata; as text, because pages would localise numbers."""
        told = {} if self.view.held is None else self.view.held.holder.metadata
        return sorted(
            (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for name, value in told.items()
        )

    @property
    def seen(self) -> str:
        """The text by which a form names the key and the holders that the page showed."""
        found = tuple(each.lock.fence for each in self.rows)
        fences = self.target.fences or found or (self.view.fence,)
        return replace(self.target, fences=fences).text


def _quoted(key: str) -> str:
    """Return a key quoted for a shell, with invisible characters escaped."""
    text = shlex.quote(key) if is_seen(key) else f"$'{''.join(map(_escaped, key))}'"
    # Without `--`, the key would be read as an option.
    return f"-- {text}" if key.startswith("-") else text


def _escaped(character: str) -> str:
    if is_seen(character):
        return f"\\{character}" if character in "\\'" else character
    # Not `\xHH`, which is a byte in a shell.
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
