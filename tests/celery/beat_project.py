"""A Celery app with a schedule: what beats and workers of the tests run. See `beat_processes`."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import schedstate, schedule

#: Where the tasks write, and tests and beats meet.
HOME = Path(os.environ.get("DISTLOCK_TEST_BEAT_HOME", "."))
#: Seconds between two ticks.
EVERY = float(os.environ.get("DISTLOCK_TEST_BEAT_EVERY", "3"))

# No process outlives its test by more, should the test itself be killed.
if "DISTLOCK_TEST_BEAT_LIFETIME" in os.environ:
    signal.alarm(int(os.environ["DISTLOCK_TEST_BEAT_LIFETIME"]))

if "FAKETIME" in os.environ:
    # libfaketime refuses the clock that `time.sleep` sleeps by.
    time.sleep = lambda seconds, /: (select.select([], [], [], float(seconds)), None)[1]

app = Celery("beats")
app.config_from_object("django.conf:settings", namespace="CELERY")


class Grid(schedule):  # type: ignore[misc]
    """Ticks that have numbers: tick n is due from n times the interval on, as minutes are."""

    def is_due(self, last_run_at: datetime) -> Any:
        """Return whether a tick has begun since then, and the seconds to the next one."""
        now = time.time()
        number = now // self.seconds
        left = (number + 1) * self.seconds - now
        return schedstate(number > last_run_at.timestamp() // self.seconds, left)


@app.task(name="beats.note")
def note(sent_at: float | None = None, name: str = "note") -> None:
    """Write down that a tick was run."""
    if sent_at is None:
        sent_at = time.time()
    line = json.dumps({"name": name, "tick": int(sent_at // EVERY), "sent_at": sent_at})
    descriptor = os.open(HOME / "ran", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        # One write to the end of a file is one line, whoever else writes.
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


if "DISTLOCK_TEST_BEAT_ONCE" in os.environ:
    # For rows of a database, which have neither numbers nor functions as arguments.
    from django_celery_beat.clockedschedule import clocked

    once = datetime.fromtimestamp(float(os.environ["DISTLOCK_TEST_BEAT_ONCE"]), UTC)
    app.conf.beat_schedule = {
        "note": {"task": "beats.note", "schedule": EVERY},
        "once": {
            "task": "beats.note",
            "schedule": clocked(once),
            "args": [None, "once"],
            "one_off": True,
        },
    }
else:
    app.conf.beat_schedule = {
        "note": {"task": "beats.note", "schedule": Grid(EVERY), "args": [BeatLazyFunc(time.time)]},
        # Something else on the heap, which is never due.
        "yearly": {"task": "beats.note", "schedule": 365 * 86400.0, "args": [0]},
    }
