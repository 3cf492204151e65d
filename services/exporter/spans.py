"""Turns rows of the monitor's stream into spans of traces. It does no I/O and has no clock.

Each task has a trace, and so does each step. Every process reports its own part of the work, so the spans of a trace
arrive in any order, and some may be missing because telemetry may be dropped. The names and parents of spans follow
from the rows alone, and their ids are hashes of what identifies them, so that no message carries a trace context. The
ids have the sizes of W3C Trace Context: 16 bytes for a trace, 8 for a span.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import xxhash

from proto.messages import TopicRow
from shared.actor.telemetry import MAX_TASKS, PART, SPAN
from shared.rundir import service_name

TOPICS = (SPAN, PART, "weights")
"""The topics that report intervals. Subscriptions are prefixes, so rows of other topics must be filtered out."""
LEASE, TRAIN, COLLECT, STEP, TASK = "lease", "train", "collect", "step", "task"
MAX_OPEN = 20_000
"""Maximum number of traced tasks whose start time is remembered until they are collected."""
MAX_TEXT = 120
MAX_SECONDS = 7 * 86400.0
MAX_AT = 1e10
"""The latest time, in seconds since 1970, that fits a trace: in the year 2286."""


@dataclass(frozen=True)
class Interval:
    """Something that a process did from `begin` to `end`, which are in seconds since 1970 by that process's clock."""

    process: str
    what: str
    begin: float
    end: float
    tasks: tuple[str, ...] = ()
    """The traced tasks that the interval belongs to."""
    lease: int | None = None
    stage: str = ""
    step: int | None = None
    facts: Mapping[str, float | str] = field(default_factory=dict)
    """Other values, for human readers."""

    @property
    def waits_for(self) -> str:
        """The process or service that this process waited for, or an empty string if this process was working."""
        return str(self.facts.get("of", ""))


@dataclass(frozen=True)
class TraceSpan:
    """A span as OpenTelemetry defines it. Ids have the sizes that W3C Trace Context requires."""

    trace: bytes
    id: bytes
    parent: bytes
    name: str
    interval: Interval
    subject: str
    """The task id, or `step/<step>`."""
    link: bytes = b""
    """The trace to which this span is linked, or empty bytes."""


def intervals(row: TopicRow) -> Iterator[Interval]:
    """Yield the intervals that a row reports. A row with unexpected values yields no interval."""
    process, values = service_name(row.service, row.instance), row.values
    if not 0 <= row.at <= MAX_AT:
        return
    if row.topic in (SPAN, PART):
        seconds, tasks = _seconds(values, "seconds"), str(values.get("tasks", "")).split()[:MAX_TASKS]
        facts = {key: value for key, value in values.items() if key not in _KNOWN}
        if seconds is not None:
            yield Interval(
                process, str(values.get("what", ""))[:MAX_TEXT], max(row.at - seconds, 0.0), row.at, tuple(tasks),
                _whole(values, "lease"), str(values.get("stage", "")), _whole(values, "step"), facts,
            )  # fmt: skip
    elif row.topic == "weights":
        seconds, step = _seconds(values, "seconds"), _whole(values, "step")
        if seconds is not None and step is not None:
            facts = {key: values[key] for key in ("bytes", "route", "canary_error") if key in values}
            yield Interval(process, "sync", max(row.at - seconds, 0.0), row.at, step=step, facts=facts)


class Tracer:
    """Assigns intervals to traces, and ends a task's trace once the task's shards are collected."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._open: OrderedDict[str, float] = OrderedDict()
        """The earliest known start time of each traced task that has not been collected yet."""

    def spans(self, interval: Interval) -> Iterator[TraceSpan]:
        """Yield the spans of an interval: one for each of its tasks, or one for its step."""
        for task_id in interval.tasks:
            yield from self._of_task(task_id, interval)
        if interval.step is not None and not interval.tasks:
            subject = f"step/{interval.step}"
            trace = trace_id(self._run, subject)
            root = span_id(trace, STEP)
            if interval.what == STEP:
                yield TraceSpan(trace, root, b"", STEP, interval, subject)
            else:
                yield TraceSpan(trace, self._leaf(trace, interval), root, interval.what, interval, subject)

    def _of_task(self, task_id: str, interval: Interval) -> Iterator[TraceSpan]:
        trace = trace_id(self._run, task_id)
        root = span_id(trace, TASK)
        begin = min(interval.begin, self._open.pop(task_id, interval.begin))
        if interval.what == COLLECT:
            whole = Interval("scheduler/0", TASK, begin, interval.end)
            yield TraceSpan(trace, root, b"", TASK, whole, task_id)
        else:
            self._open[task_id] = begin
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        if interval.lease is None:
            link = trace_id(self._run, f"step/{interval.step}") if interval.step is not None else b""
            yield TraceSpan(trace, self._leaf(trace, interval), root, interval.what, interval, task_id, link)
            return
        lease = span_id(trace, LEASE, interval.lease)
        if interval.what == LEASE:
            yield TraceSpan(trace, lease, root, f"{LEASE} {interval.stage}", interval, task_id)
        else:
            yield TraceSpan(trace, self._leaf(trace, interval), lease, interval.what, interval, task_id)

    def _leaf(self, trace: bytes, interval: Interval) -> bytes:
        return span_id(trace, interval.process, interval.what, round(interval.end * 1e6))


_KNOWN = frozenset({"what", "seconds", "tasks", "lease", "stage", "step"})


def _seconds(values: Mapping[str, float | str], key: str) -> float | None:
    value = values.get(key)
    return value if isinstance(value, int | float) and 0 <= value <= MAX_SECONDS else None


def _whole(values: Mapping[str, float | str], key: str) -> int | None:
    value = values.get(key)
    return int(value) if isinstance(value, int | float) and 0 <= value < 1 << 63 else None


def trace_id(run: str, subject: str) -> bytes:
    """Return the trace id for `subject`: a task id, or `step/<step>`."""
    return xxhash.xxh3_128_digest(f"{run}\0{subject}".encode())


def span_id(trace: bytes, *parts: str | int) -> bytes:
    """Return the id of a span within a trace, from the parts that identify it."""
    return xxhash.xxh3_64_digest(trace + "\0".join(map(str, parts)).encode())
