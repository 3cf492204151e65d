"""Reads `metrics.jsonl`, possibly while it is being written.

A run that returns to an earlier step removes the rows after that step from the file, so that the file has one row per
step. Every reader follows the same rule: rows that are removed no longer count, and `MetricsFollower` then returns the
file from its first row. `CommittedRows` is for readers that report what happened instead of what counts. It adds the
removed rows, which `metrics.discarded.jsonl` keeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.runfiles.lines import FollowedFile

METRICS, DISCARDED = "metrics.jsonl", "metrics.discarded.jsonl"
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
        """Return the next page of rows. A file that does not exist has none.

        Damaged lines, and rows without a step, are skipped.
        """
        lines, restarted = self._file.poll()
        return NewRows(list(_parsed(lines)), restarted=restarted, more=bool(lines))


@dataclass(frozen=True)
class CommittedRow:
    """A row that was committed, whether or not its step was rolled back later."""

    position: int
    """Number of rows that were committed before it. It never changes, and no two rows share it."""
    lineage: int
    """0 before the first return. After a return, new rows have the lineage that was last rolled back, plus one."""
    step: int
    values: dict[str, float]
    """The finite values."""


class CommittedRows:
    """Every row that the run in `folder` has ever committed, in commit order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        """Number of rows that were returned."""
        self._last = (0, -1)
        """Lineage and step of the last row that was returned. Rows are committed in the order of these pairs."""
        self._present = MetricsFollower(folder / METRICS)
        self._discarded: deque[tuple[tuple[int, int], Row]] = deque()
        """The discarded rows that have not been returned, in order."""
        self._discarded_bytes = 0
        """Size of `metrics.discarded.jsonl` when it was read. The file grows before `metrics.jsonl` is truncated."""
        self._returns: dict[int, int] = {}
        """For each lineage that was rolled back, the first step that was rolled back."""
        self._first_back: Row = {}
        """The first row that the last return rolled back."""
        self._in_both = False
        """Whether the rows of the last return are still in both files."""

    def poll(self) -> tuple[list[CommittedRow], bool]:
        """Return the next rows, and whether there may be more."""
        if self._nbytes() != self._discarded_bytes:
            self._read_discarded()
        new = self._present.poll()
        if self._nbytes() != self._discarded_bytes:  # the page may mix rows from before and after a return
            return [], True
        new_rows = [pair for pair in self._merged(new) if pair[0] > self._last]
        rows = [CommittedRow(at, *key, _finite(row)) for at, (key, row) in enumerate(new_rows, self._count)]
        if new_rows:
            self._last = new_rows[-1][0]
            self._count += len(new_rows)
        return rows, new.more

    def _merged(self, new: NewRows) -> Iterator[tuple[tuple[int, int], Row]]:
        """Yield the rows of a page, each after the discarded rows that were committed before it."""
        self._in_both = self._in_both and not new.restarted
        for row in new.rows:
            key = self._key(row)
            self._in_both = self._in_both or row == self._first_back
            if self._in_both and key[1] >= next(reversed(self._returns.values())):
                continue
            while self._discarded and self._discarded[0][0] < key:
                yield self._discarded.popleft()
            yield key, row
        while self._discarded and not new.more:
            yield self._discarded.popleft()

    def _read_discarded(self) -> None:
        """Read `metrics.discarded.jsonl`, and begin again at the first row of `metrics.jsonl`."""
        self._discarded_bytes = self._nbytes()
        self._present = MetricsFollower(self._folder / METRICS)
        self._returns, self._first_back, self._in_both = {}, {}, False
        by_lineage: dict[int, list[Row]] = {}
        follower = MetricsFollower(self._folder / DISCARDED)
        while (new := follower.poll()).more:
            for row in new.rows:
                by_lineage.setdefault(int(row.pop("lineage", 0) or 0), []).append(row)
        discarded: list[tuple[tuple[int, int], Row]] = []
        for lineage, rows in sorted(by_lineage.items()):
            group = [(self._key(row), row) for row in rows]
            discarded += [pair for pair in group if pair[0] > self._last]
            (_, self._returns[lineage]), self._first_back = min(group, key=lambda pair: pair[0][1])
        self._discarded = deque(sorted(discarded, key=lambda pair: pair[0]))

    def _key(self, row: Row) -> tuple[int, int]:
        """Return the lineage in which a row was committed, according to the returns that are known, and its step."""
        step = int(row["step"] or 0)
        return max((lineage + 1 for lineage, first in self._returns.items() if first <= step), default=0), step

    def _nbytes(self) -> int:
        try:
            return (self._folder / DISCARDED).stat().st_size
        except OSError:
            return 0


def _parsed(lines: Iterable[bytes]) -> Iterator[Row]:
    for line in lines:
        try:
            row = _decoder.decode(line)
        except msgspec.DecodeError:
            continue
        if row.get("step") is not None:
            yield row


def _finite(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if value is not None}
