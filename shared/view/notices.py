"""The log lines of a run, and the events that its user should know about: problems and rewinds to an earlier step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

MAX_WARNINGS = 200
"""Maximum number of warnings that are kept. warnings.jsonl has all of them."""
MAX_LOG_LINES = 2000
LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class TroubleView:
    """A condition of a process that currently needs the user's attention."""

    service: str
    kind: str
    text: str


@dataclass(frozen=True)
class Rewind:
    """A return to an earlier step. The steps after it are trained again."""

    at: float
    step: int
    committed: int


@dataclass(frozen=True)
class LogLine:
    """One line of a process's log."""

    at: str
    """Time as ISO 8601 text."""
    level: str
    service: str
    text: str


class LogTail:
    """The newest log lines from all processes."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque(maxlen=MAX_LOG_LINES)
        self.count = 0
        """Number of lines added so far."""

    def add(self, lines: Iterable[LogLine]) -> None:
        """Add lines. Lines that arrive together are sorted by time."""
        for line in sorted(lines, key=lambda entry: entry.at):
            self._lines.append(line)
            self.count += 1

    def lines(self, *, level: str = "debug", containing: str = "") -> list[LogLine]:
        """Return the lines of at least `level` whose service or text contains `containing`, oldest first."""
        least = LEVELS.index(level) if level in LEVELS else 0
        wanted = containing.lower()
        return [
            line
            for line in self._lines
            if (LEVELS.index(line.level) if line.level in LEVELS else len(LEVELS)) >= least
            and (not wanted or wanted in f"{line.service} {line.text}".lower())
        ]
