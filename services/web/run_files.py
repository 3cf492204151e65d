"""Holds the contents of the run files: metrics, warnings and logs, in the same model that the terminal view uses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from proto.messages import TopicRow
from shared.followed_file import FollowedFile
from shared.metrics_follower import MetricsFollower
from shared.rundir import service_name
from shared.view import RunView
from shared.view.notices import LogLine
from shared.warnings import parse

LOG_BYTES = 64 << 10
"""Size, in bytes, of the part at the end of each log file whose lines are shown."""
MAX_NAME = 200
"""Maximum number of characters in a metric name. Metrics with longer names are not shown."""
MAX_LOG_TEXT = 4000
"""Maximum number of characters in a log line."""
_NOT_SHOWN = frozenset({"timestamp", "level", "event", "service", "instance", "incarnation", "run"})

_object = msgspec.json.Decoder(dict[str, Any])


class RunFiles:
    """One run directory."""

    def __init__(self, path: Path, *, metrics_only: bool = False) -> None:
        self.path = path
        self.view = RunView()
        self.epoch = 0
        """Number of times that rows have been rolled back. Rows of different epochs must not be combined."""
        self.last_step = -1.0
        self._metrics = MetricsFollower(path / "metrics.jsonl")
        self._warnings = FollowedFile(path / "warnings.jsonl")
        self._logs: dict[Path, FollowedFile] = {}
        self._metrics_only = metrics_only

    async def poll(self) -> None:
        """Read the new lines of the files. The event loop can do other work between pages of metrics."""
        more = True
        while more:
            more = self._poll_metrics()
            await asyncio.sleep(0)
        if self._metrics_only:
            return
        while lines := self._warnings.poll()[0]:
            for line in lines:
                if warning := parse(line):
                    self.view.add_warning(warning)
        self.view.add_log(self._new_log_lines())

    def apply(self, row: TopicRow) -> None:
        """Apply a row of the monitor's stream."""
        self.view.apply(row)

    def points(self, names: Iterable[str], after: float) -> dict[str, list[tuple[float, float]]]:
        """Return, by metric name, the points of these metrics at steps after `after`."""
        return {
            name: [point for point in points if point[0] > after] for name, points in self.view.curves(names).items()
        }

    def names(self) -> list[str]:
        """Return the names of the metrics that have values."""
        return [name for name in self.view.metric_names() if len(name) <= MAX_NAME]

    def _poll_metrics(self) -> bool:
        """Read a page of metrics. Return whether there may be more pages."""
        new = self._metrics.poll()
        if new.restarted:
            self.epoch += 1
            self.view.load_metrics([])
        for row in new.rows:
            self.view.add_metrics(row)
            step = row.get("step")
            self.last_step = step if step is not None else self.last_step
        return new.more

    def _new_log_lines(self) -> Iterator[LogLine]:
        for path in (self.path / "logs").glob("*.jsonl"):
            if path not in self._logs:
                self._logs[path] = FollowedFile(path, last_bytes=LOG_BYTES)
            for line in self._logs[path].poll()[0]:
                with contextlib.suppress(msgspec.DecodeError):
                    yield _log_line(_object.decode(line))


def _log_line(entry: dict[str, Any]) -> LogLine:
    fields = " ".join(
        f"{key}={value}" for key, value in entry.items() if key not in _NOT_SHOWN and value not in ("", None)
    )
    instance = entry.get("instance")
    return LogLine(
        at=str(entry.get("timestamp", "")),
        level=str(entry.get("level", "")),
        service=service_name(str(entry.get("service", "?")), instance if isinstance(instance, int) else 0),
        text=f"{entry.get('event', '')} {fields}".rstrip()[:MAX_LOG_TEXT],
    )
