"""Which faults the histories find, and within how many seeds: `python -m tests.simulation.mutants`.

Those of `tests.mutants` that the simulation can express, and others, in copies of the project.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory

from tests.mutants import COPIED, MUTANTS, ROOT, Mutant, mutated

#: Faults of `tests.mutants` in code that histories run through, and whose effect they look for.
EXPRESSED = (
    "counter deleted with the lock",
    "a waiter that gives up and strands the next",
    "a waiter whose time in line counts as silence",
    "a window that ends with its work",
    "a shortened lease whose key is free before its holder knows",
    "an extend without an answer that is forgotten",
    "a renewal that was cut short and counts in full",
    "an acquire without an answer that is forgotten",
    "a release without an answer that leaves the lease held",
    "an extend that asks behind the loss",
)


def _of(fault: str, file: str, old: str, new: str) -> Mutant:
    return Mutant(fault, "simulated", f"django_distlock/{file}", old=old, new=new, test="")


#: Faults of other packages, and of first drafts.
FURTHER = (
    _of(
        "a deadline that counts from the answer", "locks/attempts.py",
        r"self._sent_at \+ ttl", "self.backend.monotonic() + ttl",
    ),
    _of(
        "a renewal whose deadline counts from the answer", "locks/state.py",
        r"deadline = sent_at \+", "deadline = now +",
    ),
    _of(
        "a grant that came too late and is used", "core/acquiring.py",
        r"and reply.now >= sent_at \+ outcome.ttl", "and False",
    ),
    _of("a key without grace", "core/durations.py", r"GRACE(.*)= 1\.0", r"GRACE\1= 0.0"),
    _of("a shorter extend that counts when it is answered", "locks/state.py",
        "if deadline < self.deadline:", "if False:"),
    _of("a loss that nobody is told", "locks/state.py", r"alarms\.add\(self\)", "None"),
    _of("a record that its own token cannot take over", "locks/attempts.py",
        "self._token if unanswered else None", "None"),
    _of("an extend of whatever is there", "core/records.py",
        r"return self.token == token and self.is_live\(now\) and not self.is_settled",
        "return self.is_live(now)"),
    _of("an extend that resurrects", "core/records.py",
        r"self.token == token and self.is_live\(now\)", "self.token == token"),
    _of("a settled record that is extended", "core/records.py",
        r" and not self.is_settled\n", "\n"),
    _of("a release that wakes nobody", "backends/memory.py",
        r"self.queues.note_wanted\(name\)\n                self.queues.ring\(name\)", "pass"),
    _of("a mark that is not set", "backends/memory.py", "if attempt.wanted and not record.wanted:",
        "if False:"),
    _of("a waiter that is first and is not woken", "backends/queues.py",
        r"if self._remove\(turn\):", "if self._remove(turn) and False:"),
    _of("an extend that crosses a renewal", "locks/extending.py",
        "with holding.mutex:", "if True:"),
)  # fmt: skip


def copied(to: Path) -> None:
    """Copy what histories run through."""
    for name in COPIED[:2]:
        copytree(ROOT / name, to / name, ignore=ignore_patterns("__pycache__"))


def simulate(where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run histories of the package in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=where, env={**os.environ, "PYTHONPATH": str(where)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def _first(mutant: Mutant, copy: Path, seeds: int) -> str:
    with mutated(copy / mutant.file, mutant):
        run = simulate(copy, "--until-first", "--seeds", str(seeds))
    found = re.search(r"^seed (\d+): (.*)$", run.stdout, re.MULTILINE)
    if found is None:
        if run.returncode:
            raise RuntimeError(run.stdout + run.stderr)
        return f"| {mutant.fault} | not in {seeds:,} | |"
    return f"| {mutant.fault} | {int(found[1]) + 1:,} | {found[2].partition(', with')[0]} |"


def main() -> None:
    """Print a table of the faults, and what found them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("fault", nargs="?", default="", help="only faults with this in their name")
    arguments = parser.parse_args()
    named = {each.fault: each for each in reversed(MUTANTS) if each.fault in EXPRESSED}
    with ExitStack() as stack:
        copy = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        copied(copy)
        print("| fault | seeds | what it breaks |", "|---|---|---|", sep="\n")
        for mutant in (*(named[each] for each in EXPRESSED), *FURTHER):
            if arguments.fault in mutant.fault:
                print(_first(mutant, copy, arguments.seeds), flush=True)


if __name__ == "__main__":
    main()
