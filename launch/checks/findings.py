"""`Findings`: what the checks before a run report."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.data import Source
from shared.data.source import RowDigests


@dataclass
class Findings:
    """Findings of the checks, one line each. A run with errors does not start."""

    file: str = ""
    """The topology's name, which begins each line about the topology; empty on hosts that have only its text."""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows: dict[str, RowDigests] = field(default_factory=dict)
    """The rows of each data source, by the key that names it."""
    opened: dict[str, Source] = field(default_factory=dict)
    """The data sources that can be read, by key, while the checks run."""
    added: dict[str, int] = field(default_factory=dict)
    """The number of rows that each data source has beyond those with which the run began."""

    def error(self, *lines: str) -> None:
        """Add errors in the topology."""
        self.errors += map(self.in_file, lines)

    def warn(self, *lines: str) -> None:
        """Add warnings about the topology."""
        self.warnings += map(self.in_file, lines)

    def has_error(self, key: str) -> bool:
        """Return whether there is an error about the topology key `key`."""
        return any(line.startswith(self.in_file(f"{key}:")) for line in self.errors)

    def in_file(self, line: str) -> str:
        return f"{self.file}: {line}" if self.file else line
