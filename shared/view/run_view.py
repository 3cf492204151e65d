"""`RunView` receives the rows of a live run and returns the data to display. docs/telemetry.md lists the topics."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from proto.messages import History, TaskState, TopicRow
from shared.runfiles.warnings import TOPIC, WarningRecord, of_topic
from shared.view.curves import Curves
from shared.view.notices import MAX_WARNINGS, LogTail, Rewind, TroubleView
from shared.view.services import ServiceBook, ServiceView
from shared.view.timeline import MAX_HISTORY, Lane, Span, StepEnd, Timeline

MAX_REWINDS = 100
_STAGE = "stage/"


@dataclass(frozen=True)
class Progress:
    """The progress of the run. Unknown values are None."""

    run: str
    reachable: bool
    """Whether the scheduler answered the monitor's last request; True if this is unknown."""
    step: int | None
    steps: int | None
    version: int | None
    lineage: int | None
    step_s: float | None
    """Mean duration of the latest steps, in seconds."""
    eta_s: float | None
    """Seconds until the last step at this pace."""
    values: Mapping[str, float]
    """The newest row of metrics."""


@dataclass(frozen=True)
class StoreView:
    """One batch store."""

    name: str
    bytes: float
    limit_bytes: float
    shards: float
    spilled_bytes: float
    busy: float
    """Number of times that a producer has had to wait for room since this store started."""


@dataclass(frozen=True)
class Pipeline:
    """The current tasks, leases and stores of the run."""

    tasks: Mapping[str, int]
    """Number of tasks in each state, in the order of a task's life."""
    leases: int
    """Number of live leases."""
    leases_by_stage: Mapping[str, int]
    waiting: int
    """Number of workers that are waiting for a lease."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Number of samples of the newest batch by the staleness of their oldest token, in versions."""
    staleness_step: int | None = None
    """The step of that batch."""
    stores: tuple[StoreView, ...] = ()
    clears_pending: int = 0
    """Number of tasks whose bytes a store has yet to free."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of tasks dropped so far, by reason."""
    lost: Mapping[str, int] = field(default_factory=dict)
    """Number of samples lost so far, by reason."""

    @property
    def busy(self) -> float:
        """Number of times that a producer had to wait for room in any store."""
        return sum(store.busy for store in self.stores)


class RunView:
    """The current view of one run."""

    def __init__(self, *, metrics_from_stream: bool = False) -> None:
        """With `metrics_from_stream`, rows of the topic `step` extend the curves; otherwise, the caller adds them.

        A stream may lose rows, so an observer that can read metrics.jsonl reads that file instead.
        """
        self._metrics_from_stream = metrics_from_stream
        self._status: dict[str, float | str] = {}
        self._tasks: Mapping[str, float | str] = {}
        self._leases: Mapping[str, float | str] = {}
        self._gc: Mapping[str, float | str] = {}
        self._staleness: Mapping[str, float | str] = {}
        self._losses: Mapping[str, float | str] = {}
        self._stores: dict[str, Mapping[str, float | str]] = {}
        self._services = ServiceBook()
        self.curves = Curves()
        """The rows of metrics.jsonl."""
        self._timeline = Timeline()
        self._warnings: dict[tuple[str, str, int], WarningRecord] = {}
        self.warnings_left_out = 0
        """Number of old warnings that are no longer kept."""
        self._rewinds: deque[Rewind] = deque(maxlen=MAX_REWINDS)
        self.log = LogTail()
        self.newest_at = 0.0
        """Time of the newest row of the stream, in seconds since 1970, or 0."""
        self.history_is_old = False
        """Whether the stream showed that the curves lack rows, or have rows of steps that were rolled back."""

    # ---- in

    def apply(self, row: TopicRow) -> None:
        """Apply a row from the monitor's stream or snapshot."""
        name, values = f"{row.service}/{row.instance}", row.values
        self.newest_at = max(self.newest_at, row.at)
        match row.topic:
            case "cluster/status":
                self._status |= values
            case "cluster/losses":
                self._losses = values
            case "cluster/process":
                self._services.supervised(name, row.at, values)
            case "process":
                self._services.own(name, row.at, values)
            case "service":
                self._services.state(name, row.at, values)
            case "span":
                self._take_span(name, row.at, values)
            case "store":
                self._stores[name] = values
            case "scheduler/leases":
                self._leases = values
            case "scheduler/tasks":
                self._tasks = values
            case "scheduler/gc":
                self._gc = {**self._gc, **values}
            case "staleness":
                self._staleness = values
            case "step":
                self._take_step({key: value for key, value in values.items() if isinstance(value, (int, float))})
            case "scheduler/rewound":
                self._take_rewind(Rewind(row.at, _integer(values, "step") or 0, _integer(values, "committed") or 0))
            case topic if topic.startswith(TOPIC):
                if warning := of_topic(values):
                    self.add_warning(warning)
            case _:
                pass

    def load_history(self, history: History) -> None:
        """Load the monitor's answer to `GetHistory`. If the metrics come from the stream, replace all curves with those
        in the answer.

        This drops a row that arrived while the answer was on its way. The next row reveals the gap.
        """
        for row in history.spans:
            self.apply(row)
        self._timeline.begin(history.spans[0].at if len(history.spans) >= MAX_HISTORY else 0.0)
        self.history_is_old = False
        if not self._metrics_from_stream:
            return
        columns = {name: (steps.tolist(), history.values[name].tolist()) for name, steps in history.steps.items()}
        self.curves = Curves.of_columns(history.newest, columns)

    def add_warning(self, warning: WarningRecord) -> None:
        """Add a line from warnings.jsonl, or the same record from the stream. Each warning is kept once."""
        self._warnings[(warning.kind, warning.about, warning.step)] = warning
        while len(self._warnings) > MAX_WARNINGS:
            self._warnings.pop(next(iter(self._warnings)))
            self.warnings_left_out += 1

    # ---- out

    def progress(self) -> Progress:
        """Return the progress of the run."""
        status, last = self._status, self.curves.last
        step, steps = _integer(status, "step"), _integer(status, "steps")
        if step is None and "step" in last:
            step = int(last["step"])
        step_s = self.curves.step_s()
        left = max(steps - step, 0) if step is not None and steps is not None else None
        return Progress(
            run=str(status.get("run", "")),
            reachable=bool(status.get("reachable", 1.0)),
            step=step,
            steps=steps,
            version=_integer(status, "version"),
            lineage=_integer(status, "lineage"),
            step_s=step_s,
            eta_s=left * step_s if left is not None and step_s is not None else None,
            values=last,
        )

    def services(self, now: float) -> list[ServiceView]:
        """Return the processes of the run. `now` is in seconds since 1970."""
        return self._services.views(now)

    def pipeline(self) -> Pipeline:
        """Return the current tasks, leases and stores of the run."""
        counts = {str(state): _integer(self._tasks, state) for state in TaskState}
        if not any(count is not None for count in counts.values()):
            counts = {str(state): _integer(self._status, f"tasks/{state}") for state in TaskState}
        losses, histogram = self._losses, self._staleness
        return Pipeline(
            tasks={state: count for state, count in counts.items() if count is not None},
            leases=_integer(self._leases, "live") or 0,
            leases_by_stage=_below(self._leases, _STAGE),
            waiting=_integer(self._leases, "waiting") or 0,
            staleness={int(key): int(value) for key, value in sorted(histogram.items()) if key.isdecimal()},
            staleness_step=_integer(histogram, "step"),
            stores=tuple(_store(name, values) for name, values in sorted(self._stores.items())),
            clears_pending=_integer(self._gc, "pending") or 0,
            dropped=_below(losses, "dropped/"),
            lost=_below(losses, "lost/"),
        )

    @property
    def timeline_end(self) -> float | None:
        """The end of the newest span, in seconds since 1970, or None if no process has reported any."""
        return self._timeline.end

    def timeline(self, now: float, seconds: float) -> list[Lane]:
        """Return the spans of each process in the `seconds` before `now`."""
        return self._timeline.lanes(now - seconds, now)

    def step_ends(self, now: float, seconds: float) -> list[StepEnd]:
        """Return the training steps that ended in the `seconds` before `now`, oldest first."""
        return self._timeline.step_ends(now - seconds, now)

    def warnings(self) -> list[WarningRecord]:
        """Return the newest warnings, oldest first."""
        return sorted(self._warnings.values(), key=lambda warning: warning.at)

    def troubles(self) -> list[TroubleView]:
        """Return the current problems of processes."""
        troubles = []
        for key, value in self._losses.items():
            service, _, kind = key.rpartition("/")
            if isinstance(value, str):
                troubles.append(TroubleView(service, kind, value))
        return troubles

    def rewinds(self) -> list[Rewind]:
        """Return the rewinds to earlier steps, oldest first."""
        return list(self._rewinds)

    # ---- rows

    def _take_span(self, name: str, at: float, values: Mapping[str, float | str]) -> None:
        seconds = values.get("seconds")
        if isinstance(seconds, (int, float)):
            what, of = str(values.get("what", "")), str(values.get("of", ""))
            self._timeline.add(name, Span(what, at - float(seconds), at, of, _integer(values, "step")))

    def _take_step(self, values: Mapping[str, float]) -> None:
        if not self._metrics_from_stream or "step" not in values:
            return
        last = self.curves.last.get("step")
        if last is None or values["step"] > last + 1:
            self.history_is_old = True
        if last is None or values["step"] > last:
            self.curves.add(values)

    def _take_rewind(self, rewind: Rewind) -> None:
        if rewind not in self._rewinds:
            self._rewinds.append(rewind)
            self.history_is_old = True


def _integer(values: Mapping[str, float | str], name: str) -> int | None:
    value = values.get(name)
    return int(value) if isinstance(value, (int, float)) else None


def _below(values: Mapping[str, float | str], prefix: str) -> dict[str, int]:
    """Return the numbers whose names begin with `prefix`, under their names without the prefix."""
    numbers = {key: value for key, value in values.items() if isinstance(value, (int, float))}
    return {key.removeprefix(prefix): int(value) for key, value in sorted(numbers.items()) if key.startswith(prefix)}


def _store(name: str, values: Mapping[str, float | str]) -> StoreView:
    numbers = {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}
    fields = ("bytes", "limit_bytes", "shards", "spilled_bytes", "busy")
    return StoreView(name, *(numbers.get(field, 0.0) for field in fields))
