"""Keeps the telemetry of a run as detectors see it: bounded windows of a few topics, and the memory trend of each
service."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

from proto.messages import TopicRow
from services.monitor.warnings.history import median
from shared.rundir import service_name

TOPICS = frozenset({"cluster/status", "cluster/services", "rollout", "reward", "store"})
BLOCKS = 100
"""Number of latest blocks that are kept."""
STORE_REPORTS = 15
MAX_SERVICES = 1000
"""Maximum number of stores, and also of processes whose memory is tracked."""
FAILURE_CHARS = 200

SETTLE_S = 300.0
"""For this many seconds after a process has started, its memory grows in any case, because caches and pools fill up and
kernels are compiled."""
POINT_S = 60.0
"""Seconds that one point of a trend covers. The point is the median of its samples."""
POINTS = 60
"""Number of latest points that are kept; they cover one hour."""
POINTS_NEEDED = 15
STEADY = 0.9
"""Fraction of the pairs of points between which the memory must have grown."""
SATURATING = 0.5
"""If the slope of the second half is less than this fraction of the first half's slope, a cache is filling up."""
MAX_BYTES = 1 << 60
"""Process memory at or above which a sample is ignored as implausible."""
GROWN_BYTES = 64 << 20
"""Growth of the memory over the window, in bytes, below which nothing is reported."""


@dataclass(frozen=True)
class Block:
    """A block of samples that a rollout has produced."""

    at: float
    seconds: float
    """Duration of the sampling."""


@dataclass(frozen=True)
class Scored:
    """The rewards of a block."""

    samples: float
    failed: float
    seconds: float


@dataclass(frozen=True)
class StoreReport:
    """The bytes that a store holds, its limit, its bytes on disk, and the number of puts that it has refused so far."""

    held: float
    limit: float
    spilled: float
    refused: float


@dataclass(frozen=True)
class Growth:
    bytes_per_s: float
    span_s: float
    last_bytes: float


class Trend:
    """The memory usage of one process, and its steady growth (Theil-Sen slope: the median slope of all pairs of
    points)."""

    def __init__(self) -> None:
        self._pid = 0.0
        self._since = 0.0
        self._points: deque[tuple[float, float]] = deque(maxlen=POINTS)
        self._samples: list[float] = []
        self._begun = 0.0
        self._growth: Growth | None = None

    def add(self, at: float, pid: float, rss_bytes: float) -> None:
        """Add a memory sample in bytes, taken at `at` seconds. A new process starts a new trend."""
        if pid != self._pid:
            self._pid, self._since, self._growth = pid, at, None
            self._points.clear()
            self._samples.clear()
        if at < self._since + SETTLE_S or not 0 < rss_bytes < MAX_BYTES:
            return
        if self._samples and at - self._begun >= POINT_S:
            self._points.append((self._begun, median(self._samples)))
            self._samples.clear()
            self._growth = self._measured()
        if not self._samples:
            self._begun = at
        self._samples.append(rss_bytes)

    def growth(self) -> Growth | None:
        """Return the steady growth of memory usage, or None if memory usage fluctuates, levels off or does not grow."""
        return self._growth

    def _measured(self) -> Growth | None:
        points = list(self._points)
        if len(points) < POINTS_NEEDED:
            return None
        slopes = _slopes(points)
        slope, span_s = median(slopes), points[-1][0] - points[0][0]
        half = len(points) // 2
        earlier, later = median(_slopes(points[:half])), median(_slopes(points[half:]))
        steady = sum(slope > 0 for slope in slopes) >= STEADY * len(slopes) and later >= SATURATING * earlier
        if not steady or slope * span_s < GROWN_BYTES:
            return None
        return Growth(slope, span_s, points[-1][1])


def _slopes(points: list[tuple[float, float]]) -> list[float]:
    return [(after - before) / (end - begin) for (begin, before), (end, after) in itertools.combinations(points, 2)]


class Live:
    """The latest telemetry that detectors use."""

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the newest telemetry, in seconds since 1970."""
        self.step = 0
        self.wait_share: float | None = None
        """Fraction of the latest steps' time that the trainer spent waiting, or None before there are enough steps."""
        self.remaining_s: float | None = None
        """Seconds until the last step at the present pace, if known."""
        self.available_bytes: float | None = None
        """Available memory of this machine, if known."""
        self.blocks: deque[Block] = deque(maxlen=BLOCKS)
        self.scored: deque[Scored] = deque(maxlen=BLOCKS)
        self.last_failure = ""
        self.stores: dict[str, deque[StoreReport]] = {}
        self.memory: dict[str, Trend] = {}

    def take(self, row: TopicRow) -> None:
        """Store new values of one of `TOPICS`. Other topics, and rows that lack the expected numbers, are ignored."""
        if row.topic not in TOPICS or not math.isfinite(row.at):
            return
        values = {
            name: value for name, value in row.values.items() if not isinstance(value, str) and math.isfinite(value)
        }
        self.now = max(self.now, row.at)
        try:
            match row.topic:
                case "cluster/status" if "step" in values:
                    self.step = int(values["step"])
                case "cluster/services":
                    self._take_memory(row.at, values)
                case "rollout":
                    self.blocks.append(Block(row.at, values["generate_s"]))
                case "reward":
                    self.scored.append(Scored(values["samples"], values["samples_failed"], values["seconds"]))
                    self.last_failure = str(row.values.get("last_failure", self.last_failure))[:FAILURE_CHARS]
                case "store":
                    self._take_store(service_name(row.service, row.instance), values)
        except KeyError:
            return

    def _take_memory(self, at: float, values: dict[str, float]) -> None:
        for key, rss_bytes in values.items():
            name, _, what = key.rpartition("/")
            if what == "rss_bytes" and (name in self.memory or len(self.memory) < MAX_SERVICES):
                self.memory.setdefault(name, Trend()).add(at, values.get(f"{name}/pid", 0.0), rss_bytes)

    def _take_store(self, name: str, values: dict[str, float]) -> None:
        if name in self.stores or len(self.stores) < MAX_SERVICES:
            report = StoreReport(values["bytes"], values["limit_bytes"], values["spilled_bytes"], values["busy"])
            self.stores.setdefault(name, deque(maxlen=STORE_REPORTS)).append(report)
