"""Turns rows and telemetry into warnings, without I/O or a clock.

Warnings about rows depend on the rows alone. After the monitor restarts, or after the run returns to an earlier step,
all rows are read again, and earlier warnings are not repeated. Telemetry is not repeated, so conditions that it showed
before a restart count as ongoing until they are observed to be absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from proto.messages import TopicRow
from services.monitor.warnings import learning, pipeline
from services.monitor.warnings.episodes import Episodes, Sighting
from services.monitor.warnings.facts import Facts
from services.monitor.warnings.history import RowHistory, median
from services.monitor.warnings.live import Live
from shared.runfiles.warnings import WarningRecord
from shared.topology.monitor import WarningKind

ROWS_OVER = 20
"""If a condition is absent for this many rows, its episode is over. A warning is also not repeated within this many
steps. Detectors use medians of ten rows, so a condition must be absent for at least as many rows."""
SECONDS_OVER = 120
"""If a condition is absent for this many telemetry observations (one a second), its episode is over."""
MAX_OF_KIND = 20
"""Maximum number of warnings of one kind about one subject in a run."""
TEXT_CHARS = 1000
"""Maximum length, in characters, of a text, which may contain names and error messages from user code."""

RowDetector = Callable[[RowHistory, Facts, Collection[str]], Iterator[Sighting]]
LiveDetector = Callable[[Live, Facts, Collection[str]], Iterator[Sighting]]
OF_ROWS: Mapping[WarningKind, RowDetector] = MappingProxyType(
    {
        WarningKind.ZERO_VARIANCE: learning.zero_variance,
        WarningKind.REWARD_FLAT: learning.reward_flat,
        WarningKind.REWARD_FALLING: learning.reward_falling,
        WarningKind.ENTROPY_COLLAPSE: learning.entropy_collapse,
        WarningKind.KL_BLOW_UP: learning.kl_blow_up,
        WarningKind.MISMATCH: learning.mismatch,
        WarningKind.TRUNCATION: learning.truncation,
        WarningKind.LENGTH_HACKING: learning.length_hacking,
        WarningKind.GRADIENT: learning.gradient,
        WarningKind.LEARNING_RATE: learning.learning_rate,
        WarningKind.OVERFITTING: learning.overfitting,
        WarningKind.EXPLAINED_VARIANCE: learning.explained_variance,
        WarningKind.STALENESS: pipeline.staleness,
        WarningKind.TRAINER_STARVED: pipeline.trainer_starved,
    }
)
OF_TELEMETRY: Mapping[WarningKind, LiveDetector] = MappingProxyType(
    {
        WarningKind.ROLLOUTS_STARVED: pipeline.rollouts_starved,
        WarningKind.STORE_FULL: pipeline.store_full,
        WarningKind.MEMORY_TREND: pipeline.memory_trend,
        WarningKind.REWARD_SLOW: pipeline.reward_slow,
        WarningKind.REWARD_FAILING: pipeline.reward_failing,
    }
)


class Watch:
    """The detectors of a run and their episodes."""

    def __init__(self, facts: Facts, told: Sequence[WarningRecord] = (), *, off: Collection[str] = ()) -> None:
        """`told` contains the run's warnings so far, and `off` contains the kinds that are disabled."""
        self._facts = facts
        self._off = frozenset(off)
        self._told = list(told)
        self._live = Live()
        self._live_episodes = Episodes(SECONDS_OVER)
        for record in told:
            if record.kind in OF_TELEMETRY:
                self._live_episodes.begin(record.kind, record.about)
        self.start_over()

    def start_over(self) -> None:
        """Forget all rows, because they will be read again from the first one."""
        self._history = RowHistory()
        self._row_episodes = Episodes(ROWS_OVER)

    def take_row(self, row: Mapping[str, float | None], at: float) -> list[WarningRecord]:
        """Add the next row of metrics.jsonl and return the warnings that it causes. `at` is in seconds since 1970."""
        self._history.add(row)
        if "time/step" in row:
            self._note_pace()
        warnings: list[WarningRecord] = []
        for kind, detect in OF_ROWS.items():
            sightings = detect(self._history, self._facts, self._row_episodes.lasting(kind))
            begun = self._row_episodes.observe(kind, sightings)
            warnings += self._given(kind, begun, self._history.step, at)
        return warnings

    def take_topic(self, row: TopicRow) -> None:
        """Store new values of a topic for the detectors."""
        self._live.take(row)

    def tick(self, now: float, available_bytes: float | None) -> list[WarningRecord]:
        """Return the warnings that the telemetry received so far causes. This must be called once a second.

        `now` is in seconds since 1970, and `available_bytes` is the available memory of this machine, if known.
        """
        self._live.now = max(self._live.now, now)
        self._live.available_bytes = available_bytes
        step = max(self._history.step, self._live.step)
        warnings: list[WarningRecord] = []
        for kind, detect in OF_TELEMETRY.items():
            sightings = detect(self._live, self._facts, self._live_episodes.lasting(kind))
            begun = self._live_episodes.observe(kind, sightings)
            warnings += self._given(kind, begun, step, now)
        return warnings

    def _note_pace(self) -> None:
        waits, steps = (self._history.last(name, pipeline.ROWS) for name in ("time/wait_batch", "time/step"))
        if waits and steps:
            self._live.wait_share = sum(waits) / max(sum(steps), 1e-9)
            self._live.remaining_s = max(self._facts.steps - self._history.step, 0) * median(steps)

    def _given(self, kind: WarningKind, begun: list[Sighting], step: int, at: float) -> Iterator[WarningRecord]:
        """Yield the warnings about episodes that have begun, except warnings that were already given."""
        for sighting in begun:
            before = [told.step for told in self._told if (told.kind, told.about) == (kind, sighting.about)]
            again = kind in OF_ROWS and any(earlier > step - ROWS_OVER for earlier in before)
            if kind in self._off or again or len(before) >= MAX_OF_KIND:
                continue
            text, remedy = _plain(sighting.text), _plain(sighting.remedy)
            record = WarningRecord(at, step, str(kind), text, remedy, sighting.about)
            self._told.append(record)
            yield record


def _plain(text: str) -> str:
    """Return `text` as one line of at most `TEXT_CHARS` printable characters."""
    line = " ".join(text.split())[:TEXT_CHARS]
    return "".join(character if character.isprintable() else "?" for character in line)
