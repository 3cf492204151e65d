"""Turns the monitor's last values into Prometheus metrics, following the Prometheus naming rules. It does no I/O.

A name begins with `rlbus_` and ends with its unit (`_seconds`, `_bytes`, `_ratio`); counters end with `_total`. The
variable parts of our names (`eval/<set>/reward`) become labels. Units and help texts are those in docs/metrics.md and
docs/telemetry.md (`names.json`). The number of series per metric is limited, because users choose some labels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from proto.messages import TopicRow
from shared.rundir import service_name

PREFIX = "rlbus"
MOST_SERIES = 200
"""Maximum number of series per metric. Further series are left out and counted."""
LABEL_CHARS = 100
UNITS = {
    "s": "seconds",
    "bytes": "bytes",
    "share": "ratio",
    "ratio": "ratio",
    "1/s": "per_second",
    "nats": "nats",
    "tokens": "tokens",
    "samples": "samples",
    "tasks": "tasks",
    "rows": "rows",
    "versions": "versions",
    "updates": "updates",
    "shards": "shards",
}
"""The unit at the end of a Prometheus name, by the unit in docs/metrics.md."""
COUNTERS = frozenset({"gc/tasks"})
"""Metrics in metrics.jsonl whose values never decrease."""
LIVE = frozenset({"step", "store/bytes", "store/shards", "policy/version"})
"""Metrics that are not exported from rows, because the live status contains them."""


@dataclass(frozen=True)
class Topic:
    """A service topic whose numbers are exported. The names of the numbers are chosen by the code, not by users."""

    prefix: str
    growing: frozenset[str] = frozenset()
    """The numbers that never decrease. If the set is empty, none of the numbers ever decreases."""


TOPICS = {
    "store": Topic("batch_store", frozenset({"puts", "clears", "busy", "lent"})),
    "streams": Topic("batch_store_streams", frozenset({"sent_bytes", "refused", "unknown", "turned_away", "evicted"})),
    "engine": Topic("engine"),
    "security": Topic("refused"),
}
_PLACEHOLDER = re.compile(r"<(\w+)>")
_VALUES = {"k": r"\d+", "set": r"[^/]+", "reason": r"[^/]+"}
Families = dict[str, GaugeMetricFamily | CounterMetricFamily]


@dataclass(frozen=True)
class Metric:
    """A documented metric of metrics.jsonl."""

    name: str
    unit: str
    help: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern that matches the metric's names, with a group for each label."""
        parts = _PLACEHOLDER.split(self.name)
        texts = (
            re.escape(part) if not index % 2 else f"(?P<{part}>{_VALUES.get(part, '.+')})"
            for index, part in enumerate(parts)
        )
        return re.compile("".join(texts), re.DOTALL)

    @cached_property
    def labels(self) -> list[str]:
        return _PLACEHOLDER.findall(self.name)

    @cached_property
    def family(self) -> str:
        """The metric's Prometheus name, without the suffix `_total` of counters."""
        return family_name(_PLACEHOLDER.sub("", self.name), self.unit)


def family_name(name: str, unit: str) -> str:
    """Return the Prometheus name of a metric: `time/step` in `s` becomes `rlbus_time_step_seconds`."""
    text = "_".join(filter(None, re.split(r"[^a-zA-Z0-9]+", name)))
    ending = UNITS.get(unit, "")
    for written in ("per_s", "fraction"):
        text = text.removesuffix(f"_{written}") if ending else text
    if ending and ending not in text.split("_"):
        text = f"{text}_{ending}"
    return f"{PREFIX}_{text}"


def _load_names() -> tuple[list[Metric], dict[str, str]]:
    document = json.loads(resources.files("services.exporter").joinpath("names.json").read_text(encoding="utf-8"))
    return [Metric(**metric) for metric in document["metrics"]], document["topics"]


METRICS, ABOUT = _load_names()


class Collected:
    """The metrics of one scrape."""

    def __init__(self) -> None:
        self.families: Families = {}
        self.left_out = 0
        """Number of series beyond `MOST_SERIES`."""

    def add(
        self, family: str, about: str, value: float, labels: Mapping[str, str] | None = None, *, counter: bool = False
    ) -> None:
        """Add a series. The labels of a family are those of its first series."""
        given = labels or {}
        made = self.families.get(family)
        if made is None:
            text = f"{about[:1].upper()}{about[1:]}."
            if counter:
                made = CounterMetricFamily(family, text, labels=list(given))
            else:
                made = GaugeMetricFamily(family, text, labels=list(given))
            self.families[family] = made
        if len(made.samples) >= MOST_SERIES:
            self.left_out += 1
            return
        made.add_metric([text[:LABEL_CHARS] for text in given.values()], value)

    def __iter__(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        return iter(self.families.values())


def collect(rows: Iterable[TopicRow]) -> Collected:
    """Return the monitor's last values as Prometheus metrics."""
    collected = Collected()
    for row in rows:
        match row.topic:
            case "cluster/metrics":
                _add_metrics(collected, row.values)
            case "cluster/status":
                _add_status(collected, row.values)
            case "cluster/services":
                _add_services(collected, row.values)
            case "cluster/losses":
                _add_losses(collected, row.values)
            case "monitor/subscriptions":
                _add_monitor(collected, row.values)
            case _ if row.topic in TOPICS:
                _add_topic(collected, row)
    return collected


def _add_metrics(collected: Collected, values: Mapping[str, float | str]) -> None:
    """Add the newest row of metrics.jsonl."""
    for name, value in values.items():
        if name in LIVE or not isinstance(value, int | float):
            continue
        for metric in METRICS:
            matching = metric.pattern.fullmatch(name)
            if matching is not None:
                labels = {label: matching[label] for label in metric.labels}
                collected.add(metric.family, metric.help, value, labels, counter=metric.name in COUNTERS)
                break


def _add_status(collected: Collected, values: Mapping[str, float | str]) -> None:
    for key, family, about in _STATUS:
        value = values.get(key)
        if isinstance(value, int | float):
            collected.add(f"{PREFIX}_{family}", about, value)
    if isinstance(run := values.get("run"), str):
        collected.add(f"{PREFIX}_run_info", "the run, named by its label", 1.0, {"run": run})
    for key, value in values.items():
        kind, _, state = key.partition("/")
        if kind == "tasks" and isinstance(value, int | float):
            collected.add(f"{PREFIX}_tasks", "live and collected tasks by state", value, {"state": state})


_STATUS = (
    ("reachable", "scheduler_up", "whether the scheduler answers the monitor, 1 or 0"),
    ("step", "step", "the newest committed training step"),
    ("steps", "planned_steps", "training steps of the run"),
    ("lineage", "weights_lineage", "lineage of the current weights, which grows with each reload"),
    ("version", "weights_version", "newest published policy version"),
    ("store/bytes", "store_bytes", "bytes held by all stores"),
    ("store/limit_bytes", "store_limit_bytes", "sum of the limits of all stores"),
    ("store/shards", "store_shards", "shards held by all stores"),
)


def _add_services(collected: Collected, values: Mapping[str, float | str]) -> None:
    for key, value in values.items():
        name, _, what = key.rpartition("/")
        service = name.rpartition("/")[0]
        labels = {"service": service, "process": name}
        if what == "state":
            about = "whether a registered service is READY, 1 or 0"
            collected.add(f"{PREFIX}_service_ready", about, float(value == "READY"), labels)
        elif what == "rss_bytes" and isinstance(value, int | float):
            collected.add(f"{PREFIX}_service_resident_memory_bytes", "resident memory of a process", value, labels)


def _add_losses(collected: Collected, values: Mapping[str, float | str]) -> None:
    for key, value in values.items():
        kind, _, rest = key.partition("/")
        if isinstance(value, str):
            process, _, trouble = key.rpartition("/")
            about = "a current trouble of a service, whose text ctl doctor shows"
            labels = {"service": process.rpartition("/")[0], "process": process, "kind": trouble}
            collected.add(f"{PREFIX}_trouble", about, 1.0, labels)
        elif kind == "dropped":
            about = "training tasks dropped so far"
            collected.add(f"{PREFIX}_dropped_tasks", about, value, {"reason": rest}, counter=True)
        elif kind == "lost":
            about = "samples of training tasks lost so far"
            collected.add(f"{PREFIX}_lost_samples", about, value, {"reason": rest}, counter=True)


def _add_monitor(collected: Collected, values: Mapping[str, float | str]) -> None:
    for key, family, about, counter in (
        ("subscriptions", "monitor_subscriptions", "subscriptions to the monitor's stream", False),
        ("dropped", "telemetry_dropped_messages", "telemetry messages that services dropped", True),
        ("refused", "telemetry_refused_rows", "telemetry that the monitor had no room for", True),
    ):
        value = values.get(key)
        if isinstance(value, int | float):
            collected.add(f"{PREFIX}_{family}", about, value, counter=counter)


def _add_topic(collected: Collected, row: TopicRow) -> None:
    topic, about = TOPICS[row.topic], ABOUT[row.topic]
    labels = {"service": row.service, "process": service_name(row.service, row.instance)}
    for key, value in row.values.items():
        if not isinstance(value, int | float):
            continue
        name, _, unit = key.rpartition("_")
        seconds = unit == "s" and bool(name)
        family = family_name(f"{topic.prefix}/{name if seconds else key}", "s" if seconds else "")
        grows = key in topic.growing or not topic.growing
        collected.add(family, f"{key} of the topic {row.topic} ({about})", value, labels, counter=grows)
