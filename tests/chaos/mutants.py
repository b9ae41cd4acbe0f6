"""Which faults of `tests.mutants` the histories find: `python -m tests.chaos.mutants`."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants import MUTANTS, Mutant, mutated
from tests.simulation.mutants import copied

from .summary import FAULTS

#: What the runs have in common: few keys, so that holders meet.
COMMON = ("--until-first", "--minimum", "0", "--workers", "4", "--keys", "3")
#: By what goes wrong beside it: faults, by their backends and names.
EXPRESSED = {
    "": "one holder more than|those who share its key|a transaction lock ignores leases"
    "|beside the (transaction|guard)|a guard does not lock|an extend loses the place"
    "|postgres: the key is released before|a fence refuses the second write of its own"
    "|the fence counter is deleted|are on several servers|(memory|sqlite): the row is not"
    "|memory: the minimum holding time ends with",
    "pauses": "(postgres|mariadb): (the row is not|extend does not lock)|does not check again"
    "|the token is not|overlooks an extend in flight",
    "kills": "the minimum holding time of a dead",
    "wires": "(extend|acquire) without an answer|a renewal that was cut|a command is sent twice"
    "|asks the store after the lease|_orm: (the row is not|extend does not lock)",
    "signals": "two connections are mixed|its block was interrupted|that a signal interrupted"
    "|a closed block is|a session lock is missed",
    "losses": "redis: fences forget their floor",
    "expire_soon": "a shortened lease is free before",
    "operators": "a force-release applies|does not compare the fence|ends the session of the next",
}


def chosen() -> list[tuple[Mutant, str, str]]:
    """Return each fault, the store that runs through it, and what goes wrong there."""
    return [
        # What is every backend's has its effect where there is a server.
        (each, "redis" if each.backend in unfit else each.backend, beside)
        for beside, pattern in EXPRESSED.items()
        for unfit in [{"all", "memory"} if beside in ("pauses", "kills", "wires") else {"all"}]
        for each in MUTANTS
        if re.search(pattern, f"{each.backend}: {each.fault}")
    ]


def row(mutant: Mutant, store: str, beside: str, copy: Path, seconds: str) -> str:
    """Return what a history of so many seconds shows of a fault."""
    told = copy / "told.json"
    told.unlink(missing_ok=True)
    flags = [f"--{'' if each == beside else 'no-'}{each.replace('_', '-')}" for each in FAULTS]
    command = [sys.executable, "-m", "tests.chaos", "--store", store, "--seconds", seconds]
    with mutated(copy / mutant.file, mutant):
        run = subprocess.run(
            [*command, *COMMON, *flags, "--json", str(told)],
            cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if not told.exists():
        raise RuntimeError(run.stdout + run.stderr)
    found = json.loads(told.read_text())["stores"][store]
    broke = ", ".join(found["violations"]) or f"not in {seconds} s"
    return f"| {mutant.fault} | {store} | {beside} | {found['acquisitions']:,} | {broke} |"


def main() -> None:
    """Print a table of the faults, and what a history shows of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", default="40")
    parser.add_argument("fault", nargs="?", default="", help="only faults with this in their name")
    arguments = parser.parse_args()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        copied(Path(folder))
        print("| fault | store | beside | acquisitions | what it breaks |")
        print("|---|---|---|---|---|")
        for mutant, store, beside in chosen():
            if arguments.fault in mutant.fault:
                print(row(mutant, store, beside, Path(folder), arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
