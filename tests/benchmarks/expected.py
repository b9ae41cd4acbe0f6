"""The figures that a quick run has, whatever else is installed."""

from __future__ import annotations

import re
from itertools import product


def every(*patterns: str) -> list[str]:
    """Return all names that patterns such as `{a,b}/c` stand for, as a shell does."""
    names = []
    for pattern in patterns:
        pieces = [piece.split(",") for piece in re.split(r"\{(.+?)\}", pattern)[1::2]]
        text = re.sub(r"\{.+?\}", "{}", pattern)
        names += [text.format(*each) for each in product(*pieces)]
    return names


STEPS = "{acquire,release,pair,extend,lose}"
AMONG = "keys_{50,200}/{pair,acquire,new-pair,extend,lose,read}"
OPERATIONS = "{acquire,extend,lose,release}"
FIGURES = {
    "latency": every(
        "{functions,orm,sqlite,memory}/{backend,lock}/" + STEPS,
        "{functions,orm,sqlite,memory}/block/pair",
        "floor/{driver,prepared,django}/{upsert,trip,pair,read}",
        "sqlite-floor/driver/{upsert,trip,pair,read}",
    ),
    "roundtrips": every("{functions,orm}/backend/" + OPERATIONS),
    "sizes": every("{lock,counter}/{heap,pkey,total}"),
    "scale": every(AMONG),
    "throughput": every(
        "{floor,functions,orm}/{own keys,hot key}/2", "functions, driver/own keys/2"
    ),
    "redis/latency": every(
        "redis/{backend,lock}/" + STEPS,
        "{redis-async/backend,redis.asyncio/lock}/" + STEPS,
        "{redis-py,django-redis}/lock/" + STEPS,
        "{redis,redis-py,django-redis}/block/pair",
        "redis-floor/{client,connection}/{trip,second-trip,pair}",
    ),
    "redis/roundtrips": every("{redis/backend,redis-py/lock}/" + OPERATIONS),
    "redis/sizes": every("lock/{record,token,total}", "{counter,redis-py}/total"),
    "redis/scale": every(AMONG, "keys_{50,200}/list"),
    "redis/throughput": every("{redis-floor,redis,redis-py}/{own keys,hot key}/2"),
    "advisory": every(
        "advisory/{backend,lock}/" + STEPS,
        "advisory/block/pair",
        "advisory/fresh/{acquire,release,close}",
        "floor/{driver,django}/{trip,second-trip,pair}",
        "floor/connect/open",
    ),
    "handoff": every(
        "{functions,orm,redis,redis-py,pg_advisory_lock,pg-polling}/processes",
        "pg_advisory_lock, durable/processes",
    ),
    "fairness": every("{functions,redis,pg_advisory_lock,redis-py}"),
    "beats": every("{functions,redis}/{extend,1/beat,20/beat}"),
    "operators": every(
        "{operators,sqlite,redis}/{50,200}/{first page of 50,every page,summary,statistics}",
        "{operators,sqlite,redis}/{50,200}/dashboard",
        "{operators,sqlite,redis}/{50,200}/dashboard, a refresh",
        "{operators,sqlite,redis}/{50,200}/process: distlock_list --all --json",
    ),
    "fencing": every("{default,sqlite}/{plain,fenced}/{update,update_many,save,get}"),
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
