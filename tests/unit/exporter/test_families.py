"""Tests the Prometheus metrics, and the dashboard and the alerts that use them."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from proto.messages import TopicRow
from services.exporter.families import METRICS, MOST_SERIES, TOPICS, UNITS, Collected, collect
from tests.golden.metric_help import DOCUMENT, text
from tests.integration.tiny.harness import ROOT
from tests.unit.test_metric_names import everything

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Registry:
    def __init__(self, found: Collected) -> None:
        self.collect = found.__iter__


def registry(found: Collected) -> CollectorRegistry:
    return cast("CollectorRegistry", Registry(found))


def row(topic: str, values: dict[str, float | str], service: str = "monitor", instance: int = 0) -> TopicRow:
    return TopicRow(service=service, instance=instance, topic=topic, at=1.0, values=values)


def series(*rows: TopicRow) -> Series:
    """Return the series that a scraper reads, with their values."""
    shown = generate_latest(registry(collect(rows))).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
    }


def test_documented_names_are_exactly_those_that_the_exporter_uses() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == text(), "run python -m tests.golden.metric_help"


def test_every_metric_of_a_row_is_exported_with_its_documented_help_text() -> None:
    names = everything() - {"step", "policy/version", "store/bytes", "store/shards"}
    found = collect([row("cluster/metrics", dict.fromkeys(names, 1.0))])
    assert sum(len(family.samples) for family in found) == len(names)
    assert all(len(family.documentation) > 10 for family in found)


def test_names_follow_the_rules_of_prometheus() -> None:
    families = [metric.family for metric in METRICS]
    assert len(set(families)) == len(families)
    for metric in METRICS:
        assert re.fullmatch(r"rlbus(_[a-z0-9]+)+", metric.family)
        if metric.unit in ("s", "bytes", "share"):
            assert metric.family.endswith(f"_{UNITS[metric.unit]}")
        assert not metric.family.endswith("_total")
        assert metric.unit in UNITS or metric.unit == "", f"{metric.name}: give {metric.unit!r} a name in UNITS"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("time/step", ("rlbus_time_step_seconds", ())),
        ("policy/clip_fraction", ("rlbus_policy_clip_ratio", ())),
        ("throughput/tokens_per_s", ("rlbus_throughput_tokens_per_second", ())),
        ("sync/bytes", ("rlbus_sync_bytes", ())),
        ("gc/tasks", ("rlbus_gc_tasks_total", ())),
        ("eval/held-out/accuracy", ("rlbus_eval_accuracy", (("set", "held-out"),))),
        ("eval/held-out/pass@4", ("rlbus_eval_pass", (("k", "4"), ("set", "held-out")))),
        ("reward/part/any name/", ("rlbus_reward_part", (("name", "any name/"),))),
        ("rollout/dropped/stale", ("rlbus_rollout_dropped_tasks", (("reason", "stale"),))),
    ],
)
def test_a_metric_has_its_unit_and_labels(name: str, expected: tuple[str, tuple[tuple[str, str], ...]]) -> None:
    assert series(row("cluster/metrics", {name: 0.25})) == {expected: 0.25}


def test_the_live_status_is_exported() -> None:
    status: dict[str, float | str] = {"reachable": 1.0, "run": "r", "step": 7.0, "store/bytes": 9.0, "tasks/READY": 3.0}
    found = series(
        row("cluster/status", status),
        row("cluster/services", {"rollout/0/state": "READY", "rollout/0/pid": 9.0, "rollout/0/rss_bytes": 1e9}),
        row("cluster/losses", {"dropped/stale": 2.0, "lost/raised": 1.0, "rollout/1/judge": "does not answer"}),
        row("cluster/metrics", {"step": 6.0, "store/bytes": 8.0}),
        row("engine", {"generated_tokens": 5.0, "generate_s": 2.0}, "rollout", 1),
        row("store", {"bytes": 4.0, "puts": 6.0, "memory_bytes": 4.0}, "batch-store"),
        row("workflow", {"anything": 1.0}, "rollout"),
    )
    process = (("process", "rollout/1"), ("service", "rollout"))
    assert found["rlbus_step", ()] == 7.0
    assert found["rlbus_store_bytes", ()] == 9.0
    assert found["rlbus_tasks", (("state", "READY"),)] == 3.0
    assert found["rlbus_run_info", (("run", "r"),)] == 1.0
    assert found["rlbus_service_ready", (("process", "rollout/0"), ("service", "rollout"))] == 1.0
    assert found["rlbus_dropped_tasks_total", (("reason", "stale"),)] == 2.0
    assert found["rlbus_trouble", (("kind", "judge"), *process)] == 1.0
    assert found["rlbus_engine_generated_tokens_total", process] == 5.0
    assert found["rlbus_engine_generate_seconds_total", process] == 2.0
    assert found["rlbus_batch_store_puts_total", (("process", "batch-store/0"), ("service", "batch-store"))] == 6.0
    assert not any("anything" in name for name, _ in found)


def test_hostile_names_become_label_values_and_their_number_is_limited() -> None:
    hostile = 'reward/part/"}\n# HELP rlbus_x\nrlbus_x 1 \u202e\\'
    values: dict[str, float | str] = {hostile: 1.0} | {f"reward/part/{n}" * 30: 1.0 for n in range(10_000)}
    collected = collect([row("cluster/metrics", values)])
    assert collected.left_out == 10_001 - MOST_SERIES
    shown = generate_latest(registry(collected)).decode()
    assert len(shown) < 100 << 10
    found = list(text_string_to_metric_families(shown))
    assert [family.name for family in found] == ["rlbus_reward_part"]
    assert found[0].samples[0].labels == {"name": hostile.removeprefix("reward/part/")}


def test_the_openmetrics_output_is_also_valid() -> None:
    rows = [
        row("cluster/metrics", dict.fromkeys(everything(), 1.0)),
        row("engine", {"generated_tokens": 1.0}, "rollout"),
    ]
    shown = generate_openmetrics(registry(collect(rows))).decode()
    assert len(list(parse_openmetrics(shown))) > 40


def test_live_values_and_rows_never_share_a_family_name() -> None:
    live = collect(
        [
            row(
                "cluster/status", {"reachable": 1.0, "step": 1.0, "steps": 1.0, "tasks/READY": 1.0, "store/bytes": 1.0}
            ),
            row("cluster/losses", {"dropped/stale": 1.0, "lost/raised": 1.0, "rollout/0/judge": "x"}),
            row("cluster/services", {"rollout/0/state": "READY", "rollout/0/rss_bytes": 1.0}),
        ]
    )
    shown = {metric.family for metric in METRICS if metric.name not in ("step", "store/bytes", "store/shards")}
    assert not shown & set(live.families)
    assert json.loads(DOCUMENT.read_text(encoding="utf-8"))["topics"]["engine"]


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
