"""Prometheus evaluates the alarm rules: each fires in its fault, none in an hour that is well."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import DECLARED
from tests.keeper import required

RULES = files("django_distlock.contrib.monitoring") / "alerts.yml"
ALARMS = [
    rule["alert"]
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
]
KEY = 'backend="default",prefix="invoice"'
BEAT = 'backend="default",prefix="〈celery-beat:shop"'
TICK = 'backend="default",prefix="〈schedule:nightly"'
TASK = 'backend="default",prefix="〈unique:report"'
HERE = 'backend="default",instance="web-1"'


def acquires(outcome: str, labels: str = KEY) -> str:
    """Name a series of `distlock_acquire_total`."""
    return f'distlock_acquire_total{{{labels},outcome="{outcome}",instance="web-1"}}'


def skips(reason: str, labels: str = KEY) -> str:
    """Name a series of `distlock_skipped_total`."""
    return f'distlock_skipped_total{{{labels},reason="{reason}",instance="web-1"}}'


def buckets(name: str, labels: str, counts: dict[str, str]) -> dict[str, str]:
    """Give the series of a histogram: values by upper bound."""
    found = {
        f'distlock_{name}_bucket{{{labels},instance="web-1",le="{le}"}}': values
        for le, values in counts.items()
    }
    return {**found, f'distlock_{name}_count{{{labels},instance="web-1"}}': counts["+Inf"]}


def brief(values: str, before: int = 40) -> str:
    """Begin with zeros: the fault comes ten minutes behind the first scrape."""
    return f"0x{before - 1} {values}"


#: An hour of a site in which all is well, by values that are 15 s apart: a node restarts its store,
#: a beat stands by, schedules skip on all nodes but one, and now and then somebody waits in vain.
HEALTHY = {
    f"distlock_store_up{{{HERE}}}": "1x39 0 0 1x198",
    f"distlock_heartbeat_lag_seconds{{{HERE}}}": "0x100 1.2x3 0x135",
    f"distlock_active_past_expiry{{{HERE}}}": "0x240",
    f"distlock_waiting{{{HERE}}}": "3x240",
    f"distlock_held_past_expiry{{{HERE}}}": "2x240",
    # Some work for an hour, and one schedule is late by less than a scrape of its first tick.
    f'distlock_oldest_holding_seconds{{{KEY},instance="web-1"}}': "0+15x240",
    f'distlock_schedule_overdue_seconds{{{TICK},instance="web-1"}}': "0x40 20 35 0x198",
    f'distlock_schedule_overdue_seconds{{{TICK},instance="web-2"}}': "0x40 20 35 0x198",
    acquires("acquired"): "0+20x240",
    acquires("conflict"): "0+5x240",
    acquires("timeout"): "0+1x240",
    acquires("unavailable"): "0x39 30 60x199",
    acquires("acquired", BEAT): "1x240",
    acquires("timeout", BEAT): "0x240",
    acquires("standby", BEAT): "0+3x240",
    f'distlock_lost_total{{{KEY},cause="deadline"}}': "0x240",
    f'distlock_lost_total{{{KEY},cause="gone"}}': "0x240",
    f'distlock_bypassed_total{{{KEY},reason="unavailable"}}': "0x240",
    skips("conflict", TICK): "0+2x240",
    # Two nodes skip a tick in the outage, and a third one runs it.
    skips("unavailable", TICK): "0x39 2x200",
    acquires("acquired", TICK): "0x41 1x198",
    skips("unavailable"): "0x240",
    skips("queued", TASK): "0+1x240",
    acquires("acquired", TASK): "0+1x240",
    f"distlock_fence_rejected_total{{{KEY}}}": "0x240",
    **buckets("wait_seconds", KEY, {"0.1": "0+20x240", "10.0": "0+26x240", "+Inf": "0+26x240"}),
    **buckets("blocked_by_seconds", KEY, {"900.0": "0+6x240", "+Inf": "0+6x240"}),
    **buckets(
        "renewal_slack_seconds", KEY, {"0.25": "0x240", "20.0": "0+5x240", "+Inf": "0+5x240"}
    ),
}
#: What is other than that in the fault of each alarm.
FAULTS: dict[str, dict[str, str]] = {
    "DistlockStoreDown": {f"distlock_store_up{{{HERE}}}": "1x39 0x200"},
    "DistlockStoreUnavailable": {acquires("unavailable"): brief("0+5x200")},
    "DistlockRunsWithoutLock": {
        f"distlock_bypassed_total{{{KEY},reason=\"unavailable\"}}": brief("0 1x200")
    },
    "DistlockTickMissed": {
        skips("unavailable", TICK): brief("0 1x200"),
        acquires("acquired", TICK): "0x240",
    },
    # On the nodes that are left: nothing starts it any more, so nothing else is counted.
    "DistlockScheduleOverdue": {
        f'distlock_schedule_overdue_seconds{{{TICK},instance="web-1"}}': brief("0+15x200"),
        f'distlock_schedule_overdue_seconds{{{TICK},instance="web-2"}}': "_x240",
    },
    "DistlockHeldForHours": {
        f'distlock_oldest_holding_seconds{{{KEY},instance="web-1"}}': "21000+15x240"
    },
    "DistlockWorkSkipped": {skips("unavailable"): brief("0 1x200")},
    "DistlockTasksSwallowed": {acquires("acquired", TASK): "9x240"},
    "DistlockLeaseLost": {f"distlock_lost_total{{{KEY},cause=\"deadline\"}}": brief("0 1x200")},
    "DistlockRenewalsLate": buckets(
        "renewal_slack_seconds", KEY, {"0.25": "0+2x240", "20.0": "0+5x240", "+Inf": "0+5x240"}
    ),
    # One stall; a minute later the gauge is back at 0.
    "DistlockHeartbeatLate": {f"distlock_heartbeat_lag_seconds{{{HERE}}}": "0x39 8x3 0x197"},
    "DistlockWorkPastExpiry": {f"distlock_active_past_expiry{{{HERE}}}": brief("1x200")},
    "DistlockFenceRejected": {f"distlock_fence_rejected_total{{{KEY}}}": brief("0 1x200")},
    "DistlockHeldPastExpiry": {f"distlock_held_past_expiry{{{HERE}}}": "20x240"},
    "DistlockStuck": {acquires("acquired"): "5x240"},
    # The prefix is busy, and one key of it is stuck.
    "DistlockKeyHeldLong": buckets(
        "blocked_by_seconds", KEY, {"900.0": "0+6x240", "+Inf": "0+7x240"}
    ),
    "DistlockTimeouts": {acquires("timeout"): "0+10x240"},
    "DistlockTooManyWaiters": {f"distlock_waiting{{{HERE}}}": brief("60x200")},
    "DistlockSlowAcquire": buckets(
        "wait_seconds", KEY, {"0.1": "0+20x240", "10.0": "0+20x240", "30.0": "0+26x240",
                              "+Inf": "0+26x240"},
    ),
    "DistlockManyLeasesOver": {
        f"distlock_lost_total{{{KEY},cause=\"deadline\"}}": brief("0 30x200")
    },
    "DistlockManyLeasesGone": {f"distlock_lost_total{{{KEY},cause=\"gone\"}}": brief("0 30x200")},
}  # fmt: skip
#: The minutes that are looked at, where it is not the 18th: see `Hour`.
MINUTES = {
    # Some minutes behind a late beat, the alarm is over.
    "DistlockHeartbeatLate": {12, *range(-59, -15)},
    "DistlockManyLeasesOver": {14},
    "DistlockHeldForHours": {30},
    "DistlockManyLeasesGone": {14},
    "DistlockStuck": {50},
    "DistlockTasksSwallowed": {50},
    "DistlockRenewalsLate": {40},
    "DistlockKeyHeldLong": {40},
    "DistlockSlowAcquire": {40},
    "DistlockTimeouts": {40},
}
#: Alarms that see the same fault.
BESIDE = {
    "DistlockStuck": {"DistlockTimeouts"},
    "DistlockManyLeasesOver": {"DistlockLeaseLost"},
    "DistlockManyLeasesGone": {"DistlockLeaseLost"},
}


#: The series of an hour, and the minutes in which each alarm fires, of those that are looked at. In
#: negative ones it does not, and in no minute does another one.
Hour = tuple[dict[str, str], dict[str, set[int]]]


def faulty(alarm: str, old: str = " ", new: str = " ") -> Hour:
    """Give the hour of a fault, in which something may have a new name in all series."""
    series = {**HEALTHY, **FAULTS[alarm]}
    fires = dict.fromkeys((alarm, *BESIDE.get(alarm, ())), MINUTES.get(alarm, {18}))
    return {name.replace(old, new): values for name, values in series.items()}, fires


HOURS = {
    **{alarm: faulty(alarm) for alarm in FAULTS},
    # Schedules whose names begin with a field, `{tenant}:report` say, all have one prefix.
    "field": faulty("DistlockTickMissed", "schedule:nightly", "schedule"),
    # A collector writes the bounds of buckets without a fraction, for Prometheus 2 as well.
    "collector": faulty("DistlockKeyHeldLong", '.0"', '"'),
    # Ten minutes without the store wake somebody, and not again when it has been back for two.
    "outage": (
        {**HEALTHY, acquires("unavailable"): brief("0+5x39 195x160")},
        {"DistlockStoreUnavailable": {18, *range(-59, -22)}},
    ),
}


@pytest.fixture
def promtool() -> str:
    """Give Prometheus' own tool."""
    found = shutil.which("promtool")
    if found is None:
        if required("prometheus"):
            pytest.fail("DISTLOCK_TEST_REQUIRE asks for prometheus: apt-get install prometheus")
        pytest.skip(f"{DECLARED}promtool is not there (apt-get install prometheus)")
    return found


def looks(hours: dict[str, Hour]) -> Iterator[dict[str, Any]]:
    """Yield what is asked of the alarms that fire, and what the answer has to be."""
    known = ['ALERTS{backend="none"}']
    for name, (_, fires) in hours.items():
        for alarm, minutes in fires.items():
            which = f'ALERTS{{backend="{name}",alertname="{alarm}"'
            known.append(f"{which}}}")
            for minute in minutes:
                yield {
                    "expr": f'count({which},alertstate="firing"}}) or vector(0)',
                    "eval_time": f"{abs(minute)}m",
                    "exp_samples": [{"labels": "{}", "value": int(minute > 0)}],
                }
    others = f'ALERTS{{alertstate="firing"}} unless on (backend, alertname) ({" or ".join(known)})'
    for minute in range(1, 60):
        yield {"expr": others, "eval_time": f"{minute}m", "exp_samples": []}


def evaluate(promtool: str, folder: Path, hours: dict[str, Hour]) -> str:
    """Let Prometheus evaluate all rules over hours; return what was not as expected, or "".

    Each hour is that of a backend, so that all of them are evaluated at once.
    """
    series = {
        name.replace('"default"', f'"{hour}"'): values
        for hour, (found, _) in hours.items()
        for name, values in found.items()
    }
    document = {
        "rule_files": [str(RULES)],
        # As often as by default, and as it is looked at.
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": k, "values": v} for k, v in series.items()],
                "promql_expr_test": [*looks(hours)],
            }
        ],
    }
    (folder / "test.yml").write_text(json.dumps(document))
    done = subprocess.run(
        [promtool, "test", "rules", str(folder / "test.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_rules_are_sound(promtool: str) -> None:
    """Prometheus reads them."""
    subprocess.run([promtool, "check", "rules", str(RULES)], check=True, capture_output=True)


def test_each_alarm_has_its_fault() -> None:
    """No rule is left out here, and none is made up."""
    assert set(FAULTS) == set(ALARMS)


def test_no_alarm_in_a_healthy_hour(promtool: str, tmp_path: Path) -> None:
    """An outage of 30 s, and a beat that stands by, wake nobody."""
    assert evaluate(promtool, tmp_path, {"healthy": (HEALTHY, {})}) == ""


def test_alarms_fire_in_their_faults(promtool: str, tmp_path: Path) -> None:
    """And no other ones, but those that see the same."""
    assert evaluate(promtool, tmp_path, HOURS) == ""
