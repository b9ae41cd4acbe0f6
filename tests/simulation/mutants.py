"""Which faults the histories find, and within how many seeds: `python -m tests.simulation.mutants`.

Those of `tests.mutants` that the simulation can express, and others, in copies of the project. Each
is found by the test that is named for it, too, which is mostly one of the contract.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from shutil import copytree, ignore_patterns
from tempfile import TemporaryDirectory

from tests.mutants import COPIED, MUTANTS, ROOT, Mutant, mutated

#: Faults of `tests.mutants` in code that histories run through, and whose effect they look for.
EXPRESSED = (
    "the fence counter is deleted with the lock",
    "a waiter that gives up does not wake the next one",
    "the time in the queue counts as silence of the store",
    "the minimum holding time ends with the work",
    "a shortened lease is free before its holder knows",
    "an extend without an answer is forgotten",
    "a renewal that was cut short counts in full",
    "an acquire without an answer is forgotten",
    "a release without an answer leaves the lease held",
    "an extend asks the store after the lease is lost",
    "a late answer of an acquire ends the minimum holding time",
    "a lease is handed over twice",
    "a loss is reported twice",
    "each statement of a call gets the whole time limit of the call",
    "noting a waiter costs it the rest of its waiting time",
    "`now <= free_at` instead of `now < free_at`",
    "renewals that fail are never given up",
    "polling ignores how long the key has been held",
    "a key is taken again at once, although others wait for it",
    "a lease is renewed after its block was interrupted",
    "a lease that was dropped without release is renewed for ever",
    "a closed block is ended again",
    "a key stays taken by an acquire whose answer came late",
    "the minimum holding time of a dead holder is cut short",
)


#: What finds them in the contract, where `tests.mutants` names a quicker test of another kind.
_TURNS = "tests/contract/test_waiting_in_turn.py"
_FOUND_BY = {
    EXPRESSED[1]: f"{_TURNS}::test_cancelled_waiter_strands_nobody",
    EXPRESSED[2]: f"{_TURNS}::test_silence_counts_from_the_front",
}


def _expressed() -> Iterator[Mutant]:
    for name in EXPRESSED:
        found = next(each for each in MUTANTS if each.fault == name)
        yield replace(found, test=_FOUND_BY.get(name, found.test))


def _of(fault: str, file: str, old: str, new: str, *, test: str) -> Mutant:
    return Mutant(
        fault, "simulated", f"django_distlock/{file}", old=old, new=new,
        test=f"tests/contract/test_{test}",
    )  # fmt: skip


#: Faults of other packages, and of first drafts.
_FURTHER = (
    _of(
        "a deadline that counts from the answer", "locks/attempts.py",
        r"self._sent_at \+ ttl", "self.backend.monotonic() + ttl",
        test="lock_trouble.py::test_slow_reply_shortens_the_lease",
    ),
    _of(
        "a renewal whose deadline counts from the answer", "locks/state.py",
        r"deadline = sent_at \+", "deadline = now +",
        test="promises_of_holding.py::test_deadline_of_a_renewal_counts_from_before_it",
    ),
    _of(
        "a grant that came too late and is used", "core/acquiring.py",
        r"and reply.now >= sent_at \+ outcome.ttl", "and False",
        test="lock_trouble.py::test_grant_whose_reply_came_too_late_is_given_back",
    ),
    _of(
        "a key without grace", "core/durations.py", r"GRACE(.*)= 1\.0", r"GRACE\1= 0.0",
        test="grants.py::TestBackend::test_holder_is_honoured_in_the_grace",
    ),
    _of(
        "a shorter extend that counts when it is answered", "locks/state.py",
        "if deadline < self.deadline:", "if False:",
        test="late_questions.py::test_extend_does_not_ask_behind_the_loss",
    ),
    _of(
        "a loss that nobody is told", "locks/state.py", r"alarms\.add\(self\)", "None",
        test="lost_leases.py::test_callback_of_a_lease_that_gets_an_end_later",
    ),
    _of(
        "a record that its own token cannot take over", "locks/attempts.py",
        "self._token if unanswered else None", "None",
        test="lock_trouble.py::test_grant_whose_reply_was_lost_is_taken_over",
    ),
    _of(
        "an extend of whatever is there", "core/records.py",
        r"return self.token == token and self.is_live\(now\) and not self.is_settled",
        "return self.is_live(now)",
        test="grants.py::TestBackend::test_other_token_changes_nothing",
    ),
    _of(
        "an extend that resurrects", "core/records.py",
        r"self.token == token and self.is_live\(now\)", "self.token == token",
        test="grants.py::TestBackend::test_lease_is_gone_behind_the_grace",
    ),
    _of(
        "a settled record that is extended", "core/records.py",
        r" and not self.is_settled\n", "\n",
        test="grants.py::TestBackend::test_settle_ends_the_lease",
    ),
    _of(
        "a release that wakes nobody", "backends/memory.py",
        r"self.queues.note_wanted\(name\)\n                self.queues.ring\(name\)", "pass",
        test="wakeups.py::test_end_of_a_grant_wakes_who_waits_for_it",
    ),
    _of(
        "a mark that is not set", "backends/memory.py",
        "if kept is not None and attempt.wanted:", "if False:",
        test="wakeups.py::test_end_of_a_grant_wakes_who_waits_for_it",
    ),
    _of(
        "a waiter that is first and is not woken", "backends/queues.py",
        r"if self._remove\(turn\):", "if self._remove(turn) and False:",
        test="waiting_in_turn.py::test_cancelled_waiter_strands_nobody",
    ),
    _of(
        "an extend that crosses a renewal", "locks/state.py", "with self.mutex:", "if True:",
        test="late_questions.py::test_renewal_does_not_cross_an_extend",
    ),
)  # fmt: skip
FAULTS = (*_expressed(), *_FURTHER)


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
        said = f"not in {seeds:,} | "
    else:
        said = f"{int(found[1]) + 1:,} | {found[2].partition(', with')[0]}"
    return f"| {mutant.fault} | {said} | `{mutant.test}` |"


def main() -> None:
    """Print a table of the faults, and what found them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2000)
    parser.add_argument("fault", nargs="?", default="", help="only faults with this in their name")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        copy = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        copied(copy)
        print("| fault | seeds | what it breaks | also found by |", "|---|---|---|---|", sep="\n")
        for mutant in FAULTS:
            if arguments.fault in mutant.fault:
                print(_first(mutant, copy, arguments.seeds), flush=True)


if __name__ == "__main__":
    main()
