"""Records in memory, by the name of the lease, by token, and by shared key.

The caller holds a mutex. A signal's exception may end any method after any step.
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
        #: The name of the lease, by token.
        self.names: dict[str, str] = {}
        #: For keys that a waiter wants exclusively: until when nobody is granted them shared.
        self.doors: dict[str, datetime] = {}
        #: The names of the leases that share a key, by the name of the key.
        self._places: dict[str, set[str]] = {}

    def live(self, name: str, now: datetime) -> Record | None:
        """Return the record of a lease that is not over."""
        record = self.records.get(name)
        return record if record is not None and record.is_live(now) else None

    def owned(self, name: str, token: str | None, now: datetime) -> Record | None:
        """Return the record of a lease if the token holds it; `token=None`: any."""
        record = self.records.get(name)
        return record if record is not None and record.is_owned(token, now) else None

    def sharing(self, name: str, now: datetime) -> list[Record]:
        """Return the records of all that share a key now."""
        live = filter(lambda each: self.live(each, now), self._places.get(name, ()))
        return [self.records[each] for each in live]

    def holders(self, name: str, now: datetime) -> list[Record]:
        """Return the records of all holders of a key: the exclusive one, or those that share it."""
        if (alone := self.live(name, now)) is not None:
            return [alone]
        return self.sharing(name, now) if name in self._places else []

    def over(self, attempt: Attempt, now: datetime) -> dict[str, Record]:
        """Return the leases of a key that are over or replaced, by name."""
        found = {each: self.records[each] for each in self._names_of(attempt.name)}
        return {
            name: each for name, each in found.items()
            if not each.is_live(now) or attempt.may_replace(each)
        }  # fmt: skip

    def mark(self, name: str, holders: Sequence[Record]) -> None:
        """Mark these leases of a key: their end wakes a waiter."""
        for each in holders:
            place = place_name(name, each.token) if each.shared else name
            self.put(place, changed(each, wanted=True))

    def put(self, name: str, record: Record) -> None:
        """Store a record, replacing an earlier one."""
        before = self.records.get(name)
        if before is not None:
            self._forget_token(name, before)
        if record.shared:
            self._places.setdefault(whole_name(name), set()).add(name)
        self.records[name] = record
        self.names[record.token] = name

    def replace(self, over: Collection[str], name: str, record: Record) -> None:
        """Store a record, replacing those of its key that are over."""
        if not record.shared:
            self.doors.pop(name, None)
        self.put(name, record)
        for each in over:
            if each != name:
                self.drop(each)

    def open_doors(self, until: datetime) -> None:
        """Forget the doors that were closed until then at most."""
        for name, closed_until in [*self.doors.items()]:
            if closed_until <= until:
                del self.doors[name]

    def drop(self, name: str) -> None:
        """Remove the record of a lease."""
        self._forget_token(name, self.records[name])
        del self.records[name]
        key = whole_name(name)
        if places := self._places.get(key):
            places.discard(name)
        if not places:
            self._places.pop(key, None)

    def _names_of(self, name: str) -> list[str]:
        # A signal's exception may have left a name without its record.
        places = filter(self.records.__contains__, self._places.get(name, ()))
        return [name, *places] if name in self.records else [*places]

    def _forget_token(self, name: str, record: Record) -> None:
        if self.names.get(record.token) == name:
            del self.names[record.token]
