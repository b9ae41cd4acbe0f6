"""`python -m tests.chaos`: take locks in many processes while everything around them fails.

It starts servers of its own, ends by itself, prints what was counted, and exits with 1 and the
lines of the history where something must never be.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import django
from django.core.management import call_command

from tests.keeper import folder

from .crew import FAKETIME
from .history import Findings
from .servers import Ground, Killable, has_disks, pooler, started
from .summary import FAULTS, LOSING, hollow, summary, text, versions

#: By the alias of a lock backend: the environment's name for its server's address.
STORES = {
    "postgres": "DISTLOCK_TEST_POSTGRES_URL",
    "postgres_orm": "DISTLOCK_TEST_POSTGRES_URL",
    "mariadb": "DISTLOCK_TEST_MYSQL_URL",
    "mariadb_orm": "DISTLOCK_TEST_MYSQL_URL",
    "redis": "DISTLOCK_TEST_REDIS_URL",
    "redis_cluster": "DISTLOCK_TEST_REDIS_CLUSTER_URL",
    "advisory": "DISTLOCK_TEST_POSTGRES_URL",
    "sqlite": "",
    "sqlite_orm": "",
    "memory": "",
}
_SERVED = {"crashes", "disks", "poolers", "timeouts", *LOSING}
#: What a store does not promise to stand, as the guarantees say, or does not have.
WITHOUT = {
    "postgres": {"losses"},
    "postgres_orm": {"losses"},
    "mariadb": {"poolers", *LOSING},
    "mariadb_orm": {"poolers", *LOSING},
    "redis": {"poolers", "timeouts", "restores"},
    # Its clients find the nodes by themselves, behind any wire.
    "redis_cluster": {"sessions", "wires", *_SERVED},
    "advisory": {"sessions", "wires", "expire_soon", *_SERVED},
    # Its leases end by the clock of the host.
    "sqlite": {"sessions", "wires", "clocks", *_SERVED},
    "sqlite_orm": {"sessions", "wires", "clocks", *_SERVED},
    "memory": {"sessions", "wires", "expire_soon", "operators", *_SERVED},
}
#: Seconds of a round. Behind each one nobody has a lock, and what is left is a leak.
ROUND = 120.0


def main() -> int:
    """Run the stores one after another."""
    options = _options()
    broken = False
    with ExitStack() as stack:
        scratch = options.keep or stack.enter_context(folder())
        servers = _start(stack, options)
        # Models are there behind Django's setup.
        from .rounds import Plan, run

        bouncer = None
        if "poolers" in options.faults and {"postgres", "postgres_orm"} & set(options.store):
            bouncer = stack.enter_context(pooler())
        told: dict[str, Any] = {}
        for alias in options.store:
            chance = random.Random(f"{options.seed} {alias}")
            faults = set(options.faults) - WITHOUT[alias]
            ground = Ground(servers.get(STORES[alias]), bouncer if "poolers" in faults else None)
            plan = Plan(
                alias=alias, variable=STORES[alias], faults=faults, workers=options.workers,
                threads=options.threads, keys=options.keys, rest=options.rest, ground=ground,
                until_first=options.until_first,
            )  # fmt: skip
            found = Findings()
            for number in range(math.ceil(options.seconds / ROUND)):
                place = scratch / f"{alias}-{options.seed}-{number}"
                place.mkdir(parents=True)
                seconds = min(ROUND, options.seconds - number * ROUND)
                found = found.with_more(run(plan, seconds, chance, place))
                if options.until_first and found.broken:
                    break
            rows = bool(plan.variable)
            lacks = hollow(found.counted, faults, rows=rows, least=options.minimum)
            told[alias] = summary(found, faults, lacks)
            print(found.table(f"{alias}, {options.seconds:g} s, seed {options.seed}"))
            print(text(told[alias]), flush=True)
            broken = broken or bool(found.broken or lacks)
        if options.json:
            about = versions() | {
                store: servers[variable].facts.version
                for store, variable in STORES.items() if variable in servers
            }  # fmt: skip
            options.json.write_text(json.dumps(
                {"seed": options.seed, "seconds": options.seconds, "workers": options.workers,
                 "threads": options.threads, "versions": about, "stores": told}, indent=1,
            ))  # fmt: skip
    return int(broken)


def _start(stack: ExitStack, options: argparse.Namespace) -> dict[str, Killable]:
    """Start what servers are needed, and make the tables."""
    # Events, and the rows beside locks in Redis, are in PostgreSQL.
    needed = {STORES[each] for each in options.store} - {""}
    needed |= {STORES["postgres"]} if needed else set()
    durable = bool({"crashes", "disks", *LOSING} & set(options.faults))
    disks = "disks" in options.faults
    servers = stack.enter_context(started(needed, durable=durable, disks=disks))
    os.environ["DISTLOCK_TEST_SCRATCH"] = str(stack.enter_context(folder()))
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    django.setup()
    used = {"default": STORES["postgres"] in needed, "mariadb": STORES["mariadb"] in needed}
    used["sqlite"] = bool({"sqlite", "sqlite_orm"} & set(options.store))
    for using, is_used in used.items():
        if is_used:
            call_command("migrate", database=using, run_syncdb=True, verbosity=0)
    return servers


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--store", action="append", choices=STORES, help="may be given again")
    parser.add_argument("--seconds", type=float, default=60, help="for each store")
    parser.add_argument("--seed", type=int, help="of the choices; by default any")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=4, help="of each worker")
    parser.add_argument("--keys", type=int, default=6, help="how many keys the workers take")
    parser.add_argument("--rest", type=float, default=0.25, help="mean seconds between two faults")
    parser.add_argument(
        "--until-first", action="store_true", help="end with the first thing that must never be"
    )
    parser.add_argument("--keep", type=Path, help="a folder for the histories")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument(
        "--minimum", type=int, default=1, help="of each fault, or it proves nothing"
    )
    for name, what in FAULTS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=what)
    options = parser.parse_args()
    options.store = options.store or ["postgres", "mariadb", "redis"]
    missing = _missing()
    if wrong := [name for name in missing if getattr(options, name)]:
        parser.error(f"not on this machine: {', '.join(wrong)}")
    left_out = LOSING | missing
    options.faults = [
        name for name in FAULTS
        if getattr(options, name) or (getattr(options, name) is None and name not in left_out)
    ]  # fmt: skip
    options.seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {options.seed}; faults: {', '.join(options.faults) or 'none'}", flush=True)
    if missing:
        print(f"not on this machine: {', '.join(sorted(missing))}", flush=True)
    return options


def _missing() -> set[str]:
    """Return the faults for which this machine has no program."""
    path = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
    there = {
        "clocks": FAKETIME is not None, "poolers": bool(shutil.which("pgbouncer", path=path)),
        "disks": has_disks(),
    }  # fmt: skip
    return {name for name, is_there in there.items() if not is_there}


if __name__ == "__main__":
    sys.exit(main())
