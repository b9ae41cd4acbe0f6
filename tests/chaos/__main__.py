"""`python -m tests.chaos`: take locks in many processes while everything around them fails.

It starts servers of its own, ends by itself, prints what was counted, and exits with 1 and the
lines of the history where something must never be.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
from contextlib import ExitStack
from pathlib import Path

import django
from django.core.management import call_command

from tests.keeper import folder
from tests.services import private_mariadb, private_postgres, private_redis

#: By the alias of a lock backend: the environment's name for its server's address.
STORES = {
    "postgres": "DISTLOCK_TEST_POSTGRES_URL",
    "mariadb": "DISTLOCK_TEST_MYSQL_URL",
    "redis": "DISTLOCK_TEST_REDIS_URL",
    "advisory": "DISTLOCK_TEST_POSTGRES_URL",
    "memory": "",
}
SERVERS = {
    "DISTLOCK_TEST_POSTGRES_URL": private_postgres,
    "DISTLOCK_TEST_MYSQL_URL": private_mariadb,
    "DISTLOCK_TEST_REDIS_URL": private_redis,
}
FAULTS = {
    "sessions": "end a session on the server",
    "signals": "raise in workers from a signal's handler, every 50 ms",
    "pauses": "stop a worker, and let it go on, also past the ttl",
    "kills": "kill a worker and start another one",
    "wires": "cut, hold back or delay what goes between a worker and the store",
    "expire_soon": "let an operator shorten a lease",
    "operators": "let an operator force-release, pause, resume, or ask a holder to stop",
    "clocks": "shift the wall clock of a worker, where there is libfaketime",
}
#: What a store does not promise to stand, as the guarantees say, or does not have.
WITHOUT = {
    "advisory": {"sessions", "wires", "expire_soon"},
    "memory": {"sessions", "wires", "expire_soon", "operators"},
}
#: Seconds of a round. Behind each one nobody has a lock, and what is left is a leak.
ROUND = 120.0


def main() -> int:
    """Run the stores one after another."""
    options = _options()
    broken = False
    with ExitStack() as stack:
        scratch = options.keep or stack.enter_context(folder())
        _start(stack, {STORES[each] for each in options.store} - {""})
        # Models are there behind Django's setup.
        from .history import Findings
        from .rounds import run

        for alias in options.store:
            chance = random.Random(f"{options.seed} {alias}")
            faults = set(options.faults) - WITHOUT.get(alias, set())
            found = Findings()
            for number in range(math.ceil(options.seconds / ROUND)):
                place = scratch / f"{alias}-{options.seed}-{number}"
                place.mkdir(parents=True)
                seconds = min(ROUND, options.seconds - number * ROUND)
                more = run(
                    alias, faults, STORES[alias], options.workers, options.threads, seconds,
                    chance, place,
                )  # fmt: skip
                found = found.with_more(more)
            print(found.table(f"{alias}, {options.seconds:g} s, seed {options.seed}"), flush=True)
            broken = broken or bool(found.broken)
    return int(broken)


def _start(stack: ExitStack, variables: set[str]) -> None:
    """Start what servers are needed, and make the tables."""
    # Events, and the rows beside locks in Redis, are in PostgreSQL.
    needed = variables and {*variables, "DISTLOCK_TEST_POSTGRES_URL"}
    for variable, start in SERVERS.items():
        os.environ.pop(variable, None)
        if variable in needed:
            os.environ[variable] = stack.enter_context(start()).url
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    for variable, using in ((STORES["postgres"], "default"), (STORES["mariadb"], "mariadb")):
        if variable in needed:
            call_command("migrate", database=using, run_syncdb=True, verbosity=0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--store", action="append", choices=STORES, help="may be given again")
    parser.add_argument("--seconds", type=float, default=60, help="for each store")
    parser.add_argument("--seed", type=int, help="of the choices; by default any")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=4, help="of each worker")
    parser.add_argument("--keep", type=Path, help="a folder for the histories")
    for name, what in FAULTS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=True, help=what)
    options = parser.parse_args()
    options.store = options.store or ["postgres", "mariadb", "redis"]
    options.faults = [name for name in FAULTS if getattr(options, name)]
    options.seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {options.seed}; faults: {', '.join(options.faults) or 'none'}", flush=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
