"""Locks in a folder, for the processes of one host: see docs/howto/write-a-backend.md."""

import fcntl
import json
import os
import time
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path

from django_distlock import BackendUnavailable, Holder
from django_distlock.backends.base import BaseLockBackend
from django_distlock.core.records import UNKNOWN, Contended, Counter, Page, Record, next_fence

BUSY = Contended(busy=True)


class FolderBackend(BaseLockBackend):
    """Two files for each key: one to lock, and one with the fence and the record."""

    distributed = True  # processes see each other's locks, on one host
    time_authority = "client"  # whose clock all of them share

    def __init__(self, config, *, folder, **unknown):
        super().__init__(config, **unknown)
        self.folder = Path(folder)

    def _acquire(self, attempt):
        def decide(now, last, record):
            if record and record.is_live(now) and not attempt.may_replace(record):
                return record.contended(now), last, record
            fence = next_fence(attempt.key, last, now if self.config.fence_floor else None)
            record = attempt.record(fence, now)
            return record.grant, fence, record

        return self._change(attempt.name, attempt.bound, decide, BUSY)

    def _extend(self, name, grant, ttl, *, bound):
        def decide(now, last, record):
            owned = record and record.is_owned(grant.token, now)
            extended = record.extended(now, ttl) if owned else None
            if extended is None:
                return None, last, record
            stop = extended.stop_requested_at is not None
            return replace(extended.grant, stop_requested=stop), last, extended

        return self._change(name, bound, decide, UNKNOWN)

    def _release(self, name, grant, held, *, bound):
        def decide(now, last, record):
            if not record or not record.is_owned(grant.token, now):
                return False, last, record
            until = now if held is None else record.acquired_at + timedelta(seconds=held)
            settled = replace(record, expires_at=until, free_at=until)
            return True, last, settled if settled.is_live(now) else None

        return self._change(name, bound, decide, UNKNOWN)

    def _read(self, name):
        record = self._load(self._path(name))[1]
        return record if record and record.is_live(self._time()) else None

    # What it can do beside

    def _counter(self, name):
        fence = self._load(self._path(name))[0]
        return Counter(fence) if fence else None

    def _list(self, prefix, cursor, *, host, task_id, limit):
        now, found = self._time(), []
        for path in sorted(self.folder.glob("*.json")):
            record = self._load(path)[1] if path.stem > (cursor or "") else None
            if (
                record
                and record.is_live(now)
                and path == self._path(self._name(record.key))  # not of another KEY_PREFIX
                and record.key.startswith(prefix)
                and host in (None, record.holder.host)
                and task_id in (None, record.holder.task_id)
            ):
                found.append((path.stem, record))
        page = found[:limit]
        return Page(tuple(each for _, each in page), page[-1][0] if found[limit:] else None)

    def _force_release(self, name, key, fence, *, bound):
        def decide(now, last, record):
            if not record or not record.is_live(now) or not record.is_seen(fence):
                return None, last, record
            # Nobody was granted this fence: the holder's writes are refused from here on.
            return record, next_fence(key, last, None), None

        return self._change(name, bound, decide, BUSY)

    def _request_stop(self, name, within, token, fence, *, bound):
        def decide(now, last, record):
            if not record or not record.is_owned(token, now) or not record.is_seen(fence):
                return None, last, record
            asked = record.asked_to_stop(now, within)
            return asked, last, asked

        return self._change(name, bound, decide, BUSY)

    # Files

    def _change(self, name, bound, decide, busy):
        """Let `decide` say the answer, the fence and the record, while nobody else does."""
        path = self._path(name)
        with self._unavailable(), self._locked(path.with_suffix(".lock"), bound) as is_mine:
            if not is_mine:
                return busy
            before = self._load(path)
            answer, *after = decide(self._time(), *before)
            if tuple(after) != before:
                self._save(path, *after)
            return answer

    @contextmanager
    def _unavailable(self):
        try:
            yield
        except OSError as error:
            raise BackendUnavailable(f"The folder of the locks: {error}") from error

    @contextmanager
    def _locked(self, path, bound):
        give_up = time.monotonic() + bound
        self.folder.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            while not (is_mine := _flock(file)) and time.monotonic() < give_up:
                time.sleep(0.001)
            try:
                yield is_mine
            finally:
                # A child that was forked meanwhile has the file open as well.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _path(self, name):
        return self.folder / f"{sha256(name.encode()).hexdigest()}.json"

    def _load(self, path):
        """Return the last fence, and the record or None."""
        with self._unavailable():
            if not path.exists():
                return 0, None
            fence, values = json.loads(path.read_text())
        if values is None:
            return fence, None
        times = [each for each in values if each.endswith(("_at", "_until"))]
        for name in filter(values.get, times):
            values[name] = datetime.fromisoformat(values[name])
        return fence, Record(**{**values, "holder": Holder.from_json(values["holder"])})

    def _save(self, path, fence, record):
        values = record and {each.name: getattr(record, each.name) for each in fields(record)}
        new = path.with_suffix(".new")
        with new.open("w") as file:
            json.dump([fence, values], file, default=_as_json)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
        folder = os.open(self.folder, os.O_RDONLY)
        os.fsync(folder)  # the rename as well outlives a crash
        os.close(folder)


def _as_json(value):
    return value.as_json() if isinstance(value, Holder) else value.isoformat()


def _flock(file):
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
