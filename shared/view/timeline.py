"""The timeline of a run: when each process worked, on what, for which process it waited, and where steps ended."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

KEPT_S = 600.0
"""Seconds for which spans are kept. No view shows a longer window."""
MAX_SPANS = 100_000
"""Maximum number of spans kept for all processes together. Each process has an equal share of it."""
MAX_LANES = 512
"""Maximum number of processes with a lane."""
MAX_HISTORY = 2000
"""Maximum number of spans in the monitor's answer to `GetHistory`."""
SPAN = "span"
"""The topic of spans."""
STEP = "step"
"""The work of the process that completes a training step when it ends."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a process did from `begin` to `end`, in seconds since 1970."""

    what: str
    begin: float
    end: float
    of: str = ""
    """The process or service that was waited for. Empty if the span is work."""
    step: int | None = None
    """The training step that the span belongs to, if it was reported."""

    @property
    def waits(self) -> bool:
        return bool(self.of)

    def clipped(self, begin: float, end: float) -> Span:
        """Return the part of the span between two times."""
        if begin <= self.begin and self.end <= end:
            return self
        return Span(self.what, max(self.begin, begin), min(self.end, end), self.of, self.step)


@dataclass(frozen=True)
class Wait:
    """The time that a process spent in one kind of wait."""

    what: str
    of: str
    seconds: float
    """Seconds that are covered by these waits but not by work."""


@dataclass(frozen=True)
class Lane:
    """The spans of one process in a window of time, in order of their end times. Spans may overlap."""

    name: str
    spans: tuple[Span, ...]
    known_s: float
    """Seconds at the end of the window in which all spans of the process are known. The times below refer to them."""
    working_s: float
    """Seconds that are covered by work."""
    waiting_s: float
    """Seconds that are covered by waits but not by work."""
    waits: tuple[Wait, ...]
    """The kinds of waits, longest first."""


@dataclass(frozen=True)
class StepEnd:
    """The end of a training step, in seconds since 1970."""

    at: float
    step: int | None
    """Number of the step, or None if it is not known."""


class Timeline:
    """The newest spans of each process."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Spans] = {}
        self._known_since: float | None = None

    def add(self, name: str, span: Span) -> None:
        """Add a span for process `name`. Adding the same span again changes nothing."""
        lane = self._lanes.get(name)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                return
            lane = self._lanes[name] = _Spans()
        lane.add(span, limit=MAX_SPANS // len(self._lanes))

    def begin(self, known_since: float) -> None:
        """Note that spans that ended before `known_since` may be missing. Only the first call has an effect."""
        if self._known_since is None:
            self._known_since = known_since

    @property
    def end(self) -> float | None:
        """The end of the newest span, in seconds since 1970, or None if there is no span."""
        return max((lane.spans[-1].end for lane in self._lanes.values()), default=None)

    def lanes(self, begin: float, end: float) -> list[Lane]:
        """Return a lane for each process with a span between `begin` and `end`. Spans are clipped to these times."""
        lanes = []
        for name, lane in sorted(self._lanes.items()):
            known = max(begin, lane.known_since, self._known_since or begin)
            spans = lane.between(begin, end)
            if spans and known < end:
                lanes.append(_lane(name, tuple(span.clipped(begin, end) for span in spans), known, end))
        return lanes

    def step_ends(self, begin: float, end: float) -> list[StepEnd]:
        """Return the training steps that ended between `begin` and `end`, oldest first."""
        steps = [step for lane in self._lanes.values() if lane.trains for step in lane.step_ends()]
        return sorted((step for step in steps if begin < step.at <= end), key=lambda step: step.at)


class _Spans:
    """The newest spans of one process, in order of their end times."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.known_since = float("-inf")
        """No span that ended after this time has been forgotten."""
        self.trains = False
        """Whether the process completes training steps."""

    def add(self, span: Span, *, limit: int) -> None:
        spans = self.spans
        at = bisect_right(spans, span.end, key=_end)
        if span.end <= self.known_since or span in spans[bisect_left(spans, span.end, key=_end) : at]:
            return
        spans.insert(at, span)
        self.trains = self.trains or _is_step(span)
        excess = max(len(spans) - limit, bisect_left(spans, span.end - KEPT_S, key=_end))
        if excess > 0:
            self.known_since = spans[excess - 1].end
            del spans[:excess]

    def between(self, begin: float, end: float) -> list[Span]:
        first = bisect_right(self.spans, begin, key=_end)
        return [span for span in self.spans[first:] if span.begin < end]

    def step_ends(self) -> Iterator[StepEnd]:
        """Yield the ends of steps. The wait for a step's batch, which comes first, reports the number of the step."""
        step = None
        for span in self.spans:
            if _is_step(span):
                yield StepEnd(span.end, step)
            elif span.step is not None:
                step = span.step


def thinned(spans: Iterable[Span], gap_s: float) -> list[tuple[Span, int]]:
    """Join spans of the same kind that are at most `gap_s` apart. Return each result with its number of spans."""
    open_at: dict[tuple[str, str], int] = {}
    joined: list[tuple[Span, int]] = []
    for span in spans:
        at = open_at.get((span.what, span.of))
        if at is not None and span.begin - joined[at][0].end <= gap_s:
            last, count = joined[at]
            joined[at] = (Span(span.what, min(last.begin, span.begin), span.end, span.of), count + 1)
        else:
            open_at[span.what, span.of] = len(joined)
            joined.append((span, 1))
    return joined


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _end(span: Span) -> float:
    return span.end


def _is_step(span: Span) -> bool:
    return span.what == STEP and not span.waits


def _lane(name: str, spans: tuple[Span, ...], known: float, end: float) -> Lane:
    """Return the lane of a process whose spans are complete since `known`."""
    counted = [span.clipped(known, end) for span in spans if span.end > known]
    work = _intervals(span for span in counted if not span.waits)
    work_s = covered_s(work)
    waits = []
    for what, of in sorted({(span.what, span.of) for span in counted if span.waits}):
        these = _intervals(span for span in counted if (span.what, span.of) == (what, of))
        waits.append(Wait(what, of, covered_s([*work, *these]) - work_s))
    waits.sort(key=lambda span: -span.seconds)
    waiting_s = covered_s(_intervals(counted)) - work_s
    return Lane(name, spans, end - known, work_s, waiting_s, tuple(waits))


def _intervals(spans: Iterable[Span]) -> Sequence[tuple[float, float]]:
    return [(span.begin, span.end) for span in spans]
