"""Run histories: `python -m tests.simulation --seeds 2000`, or one of them: `--seed 7`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

import django


def main() -> None:
    """Run what is asked for; exit with 1 where something happened that must never happen."""
    parser = argparse.ArgumentParser(prog="tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", help="to print, and shrunk if it fails")
    parser.add_argument("--seeds", type=int, default=2000, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--until-first", action="store_true", help="stop at the first failure")
    arguments = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from .histories import run, shrunk, simulated

    failed = 0
    with simulated():
        if arguments.seed is not None:
            for seed in arguments.seed:
                history, violation = run(seed)
                failed += violation is not None
                if violation is not None:
                    history, _ = run(shrunk(history.plan, violation))
                print(history.plan, *history.world.history, history.digest, sep="\n")
            sys.exit(failed > 0)
        began = time.monotonic()
        counts: Counter[str] = Counter()
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            history, violation = run(seed)
            counts.update(history.counts, faults=len(history.plan.faults))
            counts["events"] += len(history.world.history)
            if violation is not None:
                failed += 1
                if failed <= 10:
                    print(f"seed {seed}: {violation}", flush=True)
                if arguments.until_first:
                    break
        took = time.monotonic() - began
        print(f"{arguments.seeds} seeds in {took:.1f} s: {failed} violations; {dict(counts)}")
        sys.exit(failed > 0)


if __name__ == "__main__":
    main()
