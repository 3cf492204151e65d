"""The timeline of a run: when each process worked, on what, and for which process it waited."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

MAX_SPANS = 512
"""Maximum number of spans kept per process."""
MAX_LANES = 512
"""Maximum number of processes with a lane."""


@dataclass(frozen=True)
class Span:
    """Something that a process did from `begin` to `end`, in seconds since 1970."""

    what: str
    begin: float
    end: float
    of: str = ""
    """The process or service that was waited for. Empty if the span is work."""

    @property
    def waits(self) -> bool:
        return bool(self.of)


@dataclass(frozen=True)
class Lane:
    """The spans of one process in a window of time, in order of their end times. Spans may overlap."""

    name: str
    spans: tuple[Span, ...]
    working_s: float
    """Seconds of the window that are covered by work."""
    waiting_s: float
    """Seconds of the window that are covered by waits but not by work."""


class Timeline:
    """The newest spans of each process."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Span]] = {}

    def add(self, name: str, span: Span) -> None:
        """Add a span for process `name`. Adding the same span again changes nothing."""
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                return
            lane = self._lanes[name] = deque(maxlen=MAX_SPANS)
        if span not in lane:
            lane.append(span)

    @property
    def end(self) -> float:
        """The end of the newest span, in seconds since 1970, or 0."""
        return max((lane[-1].end for lane in self._lanes.values() if lane), default=0.0)

    def lanes(self, begin: float, end: float) -> list[Lane]:
        """Return a lane for each process with a span between `begin` and `end`. Spans are clipped to these times."""
        found = []
        for name, lane in sorted(self._lanes.items()):
            spans = tuple(
                Span(each.what, max(each.begin, begin), min(each.end, end), each.of)
                for each in lane
                if each.end > begin and each.begin < end
            )
            if spans:
                work_s = covered_s((each.begin, each.end) for each in spans if not each.waits)
                all_s = covered_s((each.begin, each.end) for each in spans)
                found.append(Lane(name, spans, work_s, all_s - work_s))
        return found


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
