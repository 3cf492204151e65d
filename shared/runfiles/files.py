"""Keeps a `RunView` up to date from the files of a run: metrics, warnings and logs, and what was known at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from proto.messages import History
from shared.runfiles.last import LAST, new_rows
from shared.runfiles.lines import FollowedFile
from shared.runfiles.logs import parsed
from shared.runfiles.metrics import METRICS, MetricsFollower
from shared.runfiles.warnings import new_warnings
from shared.view import RunView
from shared.view.curves import Curves
from shared.view.timeline import SPAN

LOG_BYTES = 128 << 10
"""Number of bytes that are initially read from the end of each log."""
PAGES = 8
"""Maximum number of metrics pages that are read at once. Reading them takes about 0.1 s."""
MAX_LOG_TEXT = 4000
"""Maximum number of characters in a log line."""
MAX_NAME = 200
"""Maximum number of characters in a metric name. Metrics with longer names are not shown."""


class RunFiles:
    """The files of the run in `path`."""

    def __init__(self, path: Path, view: RunView | None = None) -> None:
        self.path = path
        self.view = view or RunView()
        self.epoch = 0
        """Number of times that rows have been rolled back. Rows of different epochs must not be combined."""
        self.last_step = -1.0
        self._metrics = MetricsFollower(path / METRICS)
        self._warnings = FollowedFile(path / "warnings.jsonl")
        self._last = FollowedFile(path / LAST)
        self._logs: dict[Path, FollowedFile] = {}

    def read(self) -> bool:
        """Read new metrics and warnings, up to a few megabytes. Return whether there may be more to read."""
        for warning in new_warnings(self._warnings):
            self.view.add_warning(warning)
        for _ in range(PAGES):
            new = self._metrics.poll()
            if new.restarted:
                self.epoch += 1
                self.view.curves = Curves()
            for row in new.rows:
                self.view.curves.add(row)
                step = row.get("step")
                self.last_step = step if step is not None else self.last_step
            if not new.more:
                return False
        return True

    async def read_all(self) -> None:
        """Read all new metrics and warnings. Other tasks of the event loop run in between."""
        more = True
        while more:
            more = self.read()
            await asyncio.sleep(0)

    def read_last(self) -> None:
        """Read what was known about the run when it ended. During a run, the monitor's stream has newer values."""
        rows = list(new_rows(self._last))
        for row in rows:
            self.view.apply(row)
        if spans := [row for row in rows if row.topic == SPAN]:
            self.view.load_history(History(newest={}, steps={}, values={}, spans=spans))

    def read_logs(self) -> None:
        """Read what was added to the logs."""
        for path in sorted((self.path / "logs").glob("*.jsonl")):
            if path not in self._logs:
                self._logs[path] = FollowedFile(path, last_bytes=LOG_BYTES)
        lines = (parsed(line, MAX_LOG_TEXT) for follower in self._logs.values() for line in follower.new_lines())
        self.view.log.add(line for line in lines if line is not None)

    def points(self, names: Iterable[str], after: float) -> dict[str, list[tuple[float, float]]]:
        """Return, by metric name, the points of these metrics at steps after `after`."""
        return {name: [point for point in self.view.curves.points(name) if point[0] > after] for name in names}

    def names(self) -> list[str]:
        """Return the names of the metrics that have values."""
        return [name for name in self.view.curves.names if len(name) <= MAX_NAME]
