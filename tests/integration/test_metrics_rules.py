"""Alarm rules and dashboard speak of metrics, labels and pages that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from django.conf import settings
from django.test import override_settings
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from django_distlock import LockNotAcquired, distlock
from django_distlock.contrib import prometheus
from django_distlock.contrib.metrics.instruments import INSTRUMENTS
from django_distlock.core.declarations import declared
from django_distlock.core.pages import page
from django_distlock.scheduling import scheduled
from tests.contract.helpers import Later

ROOT = Path(__file__).parents[2]
SHIPPED = files("django_distlock.contrib.monitoring")
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load(SHIPPED.joinpath("alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads(SHIPPED.joinpath("grafana.json").read_text())
#: What Prometheus adds to whatever it scrapes.
ADDED = {"instance", "job"}
#: What Grafana puts in for its own variables.
VARIABLES = {"$__rate_interval": "5m", "$backend": ".*", "$prefix": ".*"}


@cache
def scraped() -> dict[str, list[dict[str, str]]]:
    """Scrape what real locks have left; give the labels of all series, by name."""
    registry = CollectorRegistry()
    prometheus.install(registry)
    lock = distlock("scraped:1", backend="memory", ttl=60)
    every = scheduled("every", expected=1, every=60, backend="sqlite")(lambda: None)
    assert every in declared
    # Stores are asked anew.
    with override_settings(DISTLOCK=settings.DISTLOCK), lock as lease:
        lease.extend()
        scheduled("scraped", expected=1, backend="memory")(lambda: None)()
        with suppress(LockNotAcquired):
            Later(replace(lock, wait=0).acquire).result()
        text = generate_latest(registry).decode()
    prometheus.uninstall(registry)
    found: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def parsed(expression: str) -> Any:
    """Parse what Grafana would send."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return promql_parser.parse(expression)


def parts(tree: Any) -> Iterator[Any]:
    """Yield a tree and all that it is made of."""
    yield tree
    for name in ("lhs", "rhs", "expr", "param", "vector_selector"):
        if (below := getattr(tree, name, None)) is not None:
            yield from parts(below)
    for each in getattr(tree, "args", None) or ():
        yield from parts(each)


def selectors(tree: Any) -> list[Any]:
    """Return what a tree asks of the store of series."""
    return [each for each in parts(tree) if isinstance(each, promql_parser.VectorSelector)]


def wrong(expression: str) -> list[str]:
    """Return what an expression says that no scrape has."""
    found: list[str] = []
    tree = parsed(expression)
    series = scraped()
    labels: set[str] = set(ADDED)
    for each in selectors(tree):
        known = series.get(each.name, [])
        if not known:
            found.append(f"no metric {each.name}")
            continue
        labels |= set(known[0])
        for matcher in each.matchers.matchers:
            if matcher.name not in {*known[0], *ADDED}:
                found.append(f"no label {matcher.name} of {each.name}")
            elif not any(_matches(matcher, one[matcher.name]) for one in known):
                found.append(f"no {matcher.name} {matcher.value} of {each.name}")
    for each in parts(tree):
        modifier = getattr(each, "modifier", None)
        if isinstance(each, promql_parser.AggregateExpr) and modifier is not None:
            found += [f"no label {name}" for name in modifier.labels if name not in labels]
    return found


def _matches(matcher: Any, value: str) -> bool:
    # Of several, each has to be there.
    wanted = matcher.value.split("|")
    if len(wanted) > 1:
        return value in wanted
    return re.fullmatch(matcher.value, value) is not None


def metrics(expression: str) -> set[str]:
    """Return the metrics of an expression."""
    return {each.name for each in selectors(parsed(expression))}


def kept(expression: str) -> set[str]:
    """Return the labels that are left of an expression."""
    return {
        name
        for each in parts(parsed(expression))
        if isinstance(each, promql_parser.AggregateExpr) and each.modifier is not None
        for name in each.modifier.labels
    }


def test_alarms_ask_for_what_is_scraped() -> None:
    """Metrics, labels and each of their values; each alarm speaks of labels that it has."""
    series = scraped()
    for rule in RULES:
        alarm, asked = rule["alert"], rule["expr"]
        assert metrics(asked), alarm
        assert wrong(asked) == [], alarm
        told = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert told <= kept(asked), alarm
        assert rule["labels"]["severity"] in ("warning", "critical"), alarm
        for each in selectors(parsed(asked)):
            for matcher in each.matchers.matchers:
                values = {one[matcher.name] for one in series[each.name]}
                for value in matcher.value.split("|"):
                    assert any(re.fullmatch(value, each) for each in values), (alarm, value)


def test_every_runbook_has_an_alarm() -> None:
    """Whoever is woken is led to a page that there is; and somebody is led to each."""
    pages = {each.stem for each in (ROOT / "docs/runbooks").glob("*.md")} - {"index"}
    assert {rule["annotations"]["runbook_url"] for rule in RULES} == {
        page(f"runbooks/{each}") for each in pages
    }


def test_dashboard_asks_for_what_is_scraped() -> None:
    """Its legends have the labels that are left, and nothing is measured that nobody sees."""
    shown = set()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = metrics(target["expr"])
            assert names, panel["title"]
            assert wrong(target["expr"]) == [], panel["title"]
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= kept(target["expr"]), panel["title"]
            shown |= {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in names}
    assert shown == {each.prometheus_name for each in INSTRUMENTS}
    for each in DASHBOARD["templating"]["list"][1:]:
        asked = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", each["query"]["query"])
        assert asked
        assert asked[2] in scraped()[asked[1]][0]


def test_mistake_would_be_seen() -> None:
    """These tests find a wrong name, label and value."""
    expected = {
        "rate(distlock_losses_total[5m])": "no metric distlock_losses_total",
        "sum by (key) (distlock_active)": "no label key",
        'distlock_lost_total{reason="gone"}': "no label reason of distlock_lost_total",
        'distlock_lost_total{cause="stolen"}': "no cause stolen of distlock_lost_total",
    }
    assert {each: wrong(each) for each in expected} == {k: [v] for k, v in expected.items()}


def test_runbooks_ask_for_what_is_scraped() -> None:
    """The questions that stand in their text: with a label's value, or a time."""
    asked = [
        " ".join(each.split())
        for page in (ROOT / "docs" / "runbooks").glob("*.md")
        for each in re.findall(r"`([^`]*distlock_[^`]*(?:=\"|\[5m\])[^`]*)`", page.read_text())
    ]
    assert len(asked) > 5
    assert {each: found for each in asked if (found := wrong(each))} == {}
