"""Follows `metrics.jsonl` while it is being written, and detects when a run that returns to an earlier step truncates
it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.followed_file import FollowedFile

PAGE_BYTES = 256 << 10
"""Maximum number of bytes that are read at once, so that a reader with an event loop can answer between two pages."""
Row = dict[str, float | None]
_decoder = msgspec.json.Decoder(Row)


@dataclass(frozen=True)
class NewRows:
    """The rows that one `poll` has read."""

    rows: list[Row]
    restarted: bool
    """Whether rows that were read before are gone, so that `rows` are the first rows of the file."""
    more: bool
    """Whether there may be further rows."""


class MetricsFollower:
    """Reads the complete lines of a metrics file, including lines that are added later."""

    def __init__(self, path: Path) -> None:
        self._file = FollowedFile(path, read_bytes=PAGE_BYTES)

    def poll(self) -> NewRows:
        """Return the next page of rows. A file that does not exist has no rows. Damaged lines are skipped."""
        lines, restarted = self._file.poll()
        rows = []
        for line in lines:
            try:
                rows.append(_decoder.decode(line))
            except msgspec.DecodeError:
                continue
        return NewRows(rows, restarted=restarted, more=bool(lines))
