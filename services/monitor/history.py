"""Keeps the history that a new observer has missed: the run's metric curves, and the newest spans of its timeline."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np

from proto.messages import History, TopicRow
from services.monitor.state import row_bytes
from shared.runfiles.metrics import MetricsFollower
from shared.view.curves import Curves
from shared.view.timeline import MAX_HISTORY

SPAN = "span"
MAX_SPAN_BYTES = 512
"""Maximum encoded size of a span that is kept, in bytes. The spans (`MAX_HISTORY`) and the curves must fit in one 8 MiB
message."""
MAX_POINTS = 3 << 17
"""Maximum total number of curve points in one answer. A point takes 16 bytes."""


class MonitorHistory:
    """The part of the metrics file that has been read, and the newest spans."""

    def __init__(self, metrics: Path) -> None:
        self._follower = MetricsFollower(metrics)
        self._curves = Curves()
        self._spans: deque[TopicRow] = deque(maxlen=MAX_HISTORY)

    def note(self, row: TopicRow) -> None:
        """Keep the row if it is a span."""
        if row.topic == SPAN and row_bytes(row) <= MAX_SPAN_BYTES:
            self._spans.append(row)

    def read(self) -> None:
        """Read the new rows of the metrics file. Call this method from one thread at a time."""
        more = True
        while more:
            new = self._follower.poll()
            if new.restarted:
                self._curves = Curves()
            for row in new.rows:
                self._curves.add(row)
            more = new.more

    def answer(self) -> History:
        """Return the part of the history that has been read."""
        columns = self._curves.columns(points=MAX_POINTS)
        return History(
            newest=self._curves.last,
            steps={name: np.asarray(steps) for name, (steps, _) in columns.items()},
            values={name: np.asarray(values) for name, (_, values) in columns.items()},
            spans=list(self._spans),
        )
