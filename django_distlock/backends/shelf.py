"""Records in memory, found by the names of their leases, by tokens, and by a key that is shared.

Whoever uses a shelf has a mutex for it. Each step may be the last one, should a signal raise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace as changed
from datetime import datetime

from ..core.keys import place_name, whole_name
from ..core.records import Attempt, Record


class Shelf:
    """The records of a store, those that are over among them."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        #: What the lease of a token is called.
        self.names: dict[str, str] = {}
        #: Until when nobody joins those who share a key.
        self.doors: dict[str, datetime] = {}
        #: What the leases are called that share a key, by what that is called.
        self._places: dict[str, set[str]] = {}

    def live(self, name: str, now: datetime) -> Record | None:
        """Return the record of a lease while it is not over."""
        record = self.records.get(name)
        return record if record is not None and record.is_live(now) else None

    def owned(self, name: str, token: str | None, now: datetime) -> Record | None:
        """Return the record of a lease while the token holds it; None for a token: whichever."""
        record = self.records.get(name)
        return record if record is not None and record.is_owned(token, now) else None

    def sharing(self, name: str, now: datetime) -> list[Record]:
        """Return the records of all who share a key now."""
        live = filter(lambda each: self.live(each, now), self._places.get(name, ()))
        return [self.records[each] for each in live]

    def holders(self, name: str, now: datetime) -> list[Record]:
        """Return the records of all who hold a key now: of one alone, or of those who share it."""
        if (alone := self.live(name, now)) is not None:
            return [alone]
        return self.sharing(name, now) if name in self._places else []

    def over(self, attempt: Attempt, now: datetime) -> dict[str, Record]:
        """Return the leases of a key that are over, or replaced, by their names."""
        found = {each: self.records[each] for each in self._names_of(attempt.name)}
        return {
            name: each for name, each in found.items()
            if not each.is_live(now) or attempt.may_replace(each)
        }  # fmt: skip

    def mark(self, name: str, holders: Sequence[Record]) -> None:
        """Note that the end of these leases of a key wakes somebody."""
        for each in holders:
            place = place_name(name, each.token) if each.shared else name
            self.put(place, changed(each, wanted=True))

    def put(self, name: str, record: Record) -> None:
        """Keep a record, in the place of the one before."""
        before = self.records.get(name)
        if before is not None:
            self._forget_token(name, before)
        if record.shared:
            self._places.setdefault(whole_name(name), set()).add(name)
        self.records[name] = record
        self.names[record.token] = name

    def replace(self, over: Collection[str], name: str, record: Record) -> None:
        """Keep a record in the place of those of its key that are over."""
        key = whole_name(name) if self.doors else name
        if key in self.doors and len(over) == len(self._names_of(key)):
            del self.doors[key]
        self.put(name, record)
        for each in over:
            if each != name:
                self.drop(each)

    def drop(self, name: str) -> None:
        """Forget the record of a lease."""
        self._forget_token(name, self.records[name])
        del self.records[name]
        key = whole_name(name)
        if places := self._places.get(key):
            places.discard(name)
        if not places:
            self._places.pop(key, None)
            self.doors.pop(key, None)

    def _names_of(self, name: str) -> list[str]:
        # A signal may have left a place without its record.
        places = filter(self.records.__contains__, self._places.get(name, ()))
        return [name, *places] if name in self.records else [*places]

    def _forget_token(self, name: str, record: Record) -> None:
        if self.names.get(record.token) == name:
            del self.names[record.token]
