"""The signals of the tests strike where they are expected, or not at all."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.interrupting import interrupt_after
from tests.tiers import ROOT

#: A process whose main thread does not take the signal. Another one is given it, 50 ms late.
ANOTHER_THREAD = """
import signal, threading, time
from tests.interrupting import Interrupted, alarms

def take_it():
    time.sleep(0.05)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    time.sleep(0.05)

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
with alarms() as arm:
    arm(0.001)
    threading.Thread(target=take_it).start()
    time.sleep(0.01)
    try:
        arm(0)
    except Interrupted:
        print("in time", end="")
"""


def test_signal_that_another_thread_was_given_is_waited_for() -> None:
    """The main thread learns of it late, and no later than it says that it wants no more."""
    command = [sys.executable, "-c", ANOTHER_THREAD]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("in time", "")


def test_signal_that_comes_in_time_or_never() -> None:
    """It ends the work, or the work ends it."""
    assert interrupt_after(0.001, lambda: time.sleep(10))
    assert not interrupt_after(10, lambda: None)
