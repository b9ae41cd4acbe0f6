"""The figures that a quick run has, whatever else is installed."""

from __future__ import annotations

BACKEND_STEPS = ("acquire", "release", "pair", "extend", "lose")
LEVELS = {"backend": BACKEND_STEPS, "lock": BACKEND_STEPS, "block": ("pair",)}
FIGURES = {
    "latency": [
        *(
            f"{name}/{level}/{step}"
            for name in ("functions", "orm", "sqlite", "memory")
            for level, steps in LEVELS.items()
            for step in steps
        ),
        *(
            f"floor/{way}/{step}"
            for way in ("driver", "prepared", "django")
            for step in ("upsert", "trip", "pair", "read")
        ),
        *(f"sqlite-floor/driver/{step}" for step in ("upsert", "trip", "pair", "read")),
    ],
    "roundtrips": [
        f"{name}/backend/{operation}"
        for name in ("functions", "orm")
        for operation in ("acquire", "extend", "lose", "release")
    ],
    "sizes": [
        f"{what}/{part}" for what in ("lock", "counter") for part in ("heap", "pkey", "total")
    ],
    "scale": [
        f"keys_{keys}/{operation}"
        for keys in (50, 200)
        for operation in ("pair", "acquire", "new-pair", "extend", "lose", "read")
    ],
    "throughput": [
        f"{name}/{mode}/{clients}"
        for name in ("floor", "floor, prepared", "functions", "orm")
        for mode in ("own keys", "hot key")
        for clients in (2,)
    ],
    "redis/latency": [
        *(f"redis/{level}/{step}" for level, steps in LEVELS.items() for step in steps),
        *(f"redis-async/backend/{step}" for step in BACKEND_STEPS),
        *(f"redis-async/lock/{step}" for step in ("acquire", "release", "pair")),
        "redis-async/block/pair",
        *(
            f"{peer}/{figure}"
            for peer in ("redis-py", "django-redis", "redis.asyncio")
            for figure in (*(f"lock/{step}" for step in BACKEND_STEPS), "block/pair")
        ),
        *(
            f"redis-floor/{way}/{step}"
            for way in ("client", "connection")
            for step in ("trip", "second-trip", "pair")
        ),
    ],
    "redis/roundtrips": [
        f"{name}/{operation}"
        for name in ("redis/backend", "redis-py/lock")
        for operation in ("acquire", "extend", "lose", "release")
    ],
    "redis/sizes": ["lock/record", "lock/token", "lock/total", "counter/total", "redis-py/total"],
    "redis/scale": [
        f"keys_{keys}/{operation}"
        for keys in (50, 200)
        for operation in ("pair", "acquire", "new-pair", "extend", "lose", "read", "list")
    ],
    "redis/throughput": [
        f"{name}/{mode}/2"
        for name in ("redis-floor", "redis", "redis-py")
        for mode in ("own keys", "hot key")
    ],
    "advisory": [
        *(f"advisory/{level}/{step}" for level, steps in LEVELS.items() for step in steps),
        *(f"advisory/fresh/{step}" for step in ("acquire", "release", "close")),
        *(
            f"floor/{way}/{step}"
            for way in ("driver", "django")
            for step in ("trip", "second-trip", "pair")
        ),
        "floor/connect/open",
    ],
    "handoff": [
        *(
            f"{name}/processes"
            for name in (
                "functions",
                "orm",
                "redis",
                "pg_advisory_lock",
                "pg_advisory_lock, durable",
                "pg-polling",
                "redis-py",
            )
        ),
        *(
            f"{name}/{where}"
            for name in ("functions", "orm", "redis")
            for where in ("threads", "tasks")
        ),
    ],
    "fairness": ["functions", "redis", "pg_advisory_lock", "redis-py"],
    "beats": [
        f"{place}/{part}"
        for place in ("functions", "redis")
        for part in ("extend", *(f"{leases}/beat" for leases in (1, 20)))
    ],
    "operators": [
        f"{store}/{locks}/{question}"
        for store in ("operators", "sqlite", "redis")
        for locks in (50, 200)
        for question in (
            "first page of 50",
            "every page",
            "summary",
            "statistics",
            "process: distlock_list --all --json",
            "dashboard",
            "dashboard, a refresh",
        )
    ],
    "fencing": [
        f"{using}/{who}/{step}"
        for using in ("default", "sqlite")
        for who in ("plain", "fenced")
        for step in ("update", "update_many", "save", "get")
    ],
}
#: What is run at once. The tests share the work, and each sees that its part needs no other.
TOGETHER = (
    ("latency", "roundtrips", "sizes", "scale", "throughput"),
    ("redis", "advisory"),
    ("handoff", "fairness", "beats", "fencing"),
    ("operators",),
)
#: Peers that the tests' own environment need not have.
PEERS = {"pglock", "python-redis-lock"}
#: Of a figure, what is measured, once in all and once a round.
MEASURED = {
    "latency": ("median_us", "round_medians_us"),
    "scale": ("median_us", "round_medians_us"),
    "throughput": ("per_second", "rounds_per_second"),
    "redis/latency": ("median_us", "round_medians_us"),
    "redis/scale": ("median_us", "round_medians_us"),
    "redis/throughput": ("per_second", "rounds_per_second"),
    "advisory": ("median_us", "round_medians_us"),
    "handoff": ("median_us", "round_medians_us"),
    "beats": ("median_us", "round_medians_us"),
    "fencing": ("median_us", "round_medians_us"),
}
