"""Tests that the Grafana dashboard queries metrics that the exporter has and that its structure follows Grafana's
schema.
"""

from __future__ import annotations

import json
import re
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from proto.messages import TopicRow
from services.exporter.families import METRICS, TOPICS, collect
from tests.integration.tiny.harness import ROOT

DASHBOARD = ROOT / "launch" / "dashboards" / "grafana.json"
OWN = {"rlbus_monitor_up", "rlbus_exporter_left_out_series"}
"""Metrics of the exporter itself."""


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def expressions() -> list[str]:
    """Return the queries with the variables replaced."""
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [each.replace("$instance", ".*").replace("$__rate_interval", "1m") for each in queries]


def exported() -> set[str]:
    """Return the names of all series that a run can export."""
    status = ("reachable", "step", "steps", "lineage", "version", "store/bytes", "store/limit_bytes", "store/shards")
    topics = {"engine": ("generated_tokens", "decode_steps", "generate_s")}
    assert set(topics) <= set(TOPICS)
    rows: list[tuple[str, dict[str, float | str]]] = [
        ("cluster/status", {**dict.fromkeys(status, 1.0), "run": "r", "tasks/READY": 1.0}),
        ("cluster/services", {"rollout/0/state": "READY", "rollout/0/rss_bytes": 1.0}),
        ("cluster/losses", {"dropped/stale": 1.0, "lost/raised": 1.0, "rollout/0/judge": "away"}),
        ("cluster/metrics", {re.sub(r"<\w+>", "1", metric.name): 1.0 for metric in METRICS}),
        ("monitor/subscriptions", dict.fromkeys(("subscriptions", "dropped", "refused"), 1.0)),
        *((topic, dict.fromkeys(keys, 1.0)) for topic, keys in topics.items()),
    ]
    found = collect(TopicRow(service="rollout", instance=0, topic=topic, at=1.0, values=given) for topic, given in rows)
    return {sample.name for family in found for sample in family.samples} | OWN


def test_every_query_names_metrics_that_are_exported() -> None:
    named = {name for query in expressions() for name in re.findall(r"rlbus_\w+", query)}
    assert len(named) > 30
    assert named - exported() == set()
    assert {query for query in expressions() if "rlbus_" not in query} == {'up{instance=~".*"}'}


def test_counters_are_shown_as_rates_and_gauges_are_not() -> None:
    for query in expressions():
        assert ("_total" in query) == ("rate(" in query or "increase(" in query), query


def test_the_dashboard_has_the_structure_of_grafanas_schema() -> None:
    plugins.register_default_plugins()
    given = dashboard()
    read_back = json.loads(json.dumps(Dashboard.from_json(given), cls=JSONEncoder))
    assert _within(given, read_back)
    assert not _within({**given, "panels": [{"kindness": 1}]}, read_back)
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in given["panels"]]
    assert len(set(places)) == len(given["panels"]) == len({panel["id"] for panel in given["panels"]})


def _within(given: Any, read_back: Any) -> bool:
    """Return whether the typed model has kept every value of `given`."""
    if isinstance(given, dict):
        return all(key in read_back and _within(value, read_back[key]) for key, value in given.items())
    if isinstance(given, list):
        return len(given) == len(read_back) and all(map(_within, given, read_back))
    return bool(given == read_back)
