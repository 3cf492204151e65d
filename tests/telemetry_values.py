"""Provides the topics and values that docs/telemetry.md lists, for tests that compare them with what services send."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.metric_names import pattern_of
from tests.metric_names import undocumented as undocumented_metrics

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "telemetry.md"
STEP_VALUES = {"step", "lineage", "version"}
METRICS = {"train", "step", "eval", "cluster/metrics"}
"""Topics whose values are metrics."""


def undocumented(sent: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the pairs (topic, name of a value) that no row of the table covers."""
    table = DOCUMENT.read_text().split("## Values")[1]
    rows = re.findall(r"^\| (`[^|]+) \| (`[^|]+) \|", table, re.MULTILINE)
    known = [(_patterns(topics), _patterns(values)) for topics, values in rows]
    pairs = {(topic, value) for topic, value in sent if value not in STEP_VALUES}
    metrics = {value for topic, value in pairs if topic in METRICS}
    return {(topic, value) for topic, value in pairs if topic in METRICS and value in undocumented_metrics(metrics)} | {
        (topic, value)
        for topic, value in pairs
        if topic not in METRICS and not any(_has(topics, topic) and _has(values, value) for topics, values in known)
    }


def _patterns(cell: str) -> list[re.Pattern[str]]:
    return [pattern_of(name) for name in re.findall("`([^`]+)`", cell)]


def _has(patterns: list[re.Pattern[str]], name: str) -> bool:
    return any(each.fullmatch(name) for each in patterns)
