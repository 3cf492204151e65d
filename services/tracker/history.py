"""Reads every row that a run has committed, in commit order, from `metrics.jsonl` and `metrics.discarded.jsonl`.

`metrics.jsonl` contains only the rows that still count, because a return to an earlier step moves rows to the other
file. Together, the two files contain the whole history, which only grows: the rows before the first return, then the
rows after it, and so on. The position of a row in the history therefore never changes, and no two rows share a
position.

Rows before the first return have lineage 0. After a return, the lineage of new rows is one more than the lineage that
was last rolled back.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS, DISCARDED = "metrics.jsonl", "metrics.discarded.jsonl"


@dataclass(frozen=True)
class Row:
    """One committed row. `values` omits values that are not finite."""

    position: int
    lineage: int
    step: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Line:
    """The position of a row in its file, so that the rows of long runs need not be kept in memory."""

    file: str
    offset: int
    nbytes: int
    step: int
    lineage: int = 0


class History:
    """The rows of the run in `folder`. Call `refresh` to see new ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[_Line] = []
        """The lines from position `_first` on."""
        self._first = 0
        self._read_to = 0
        """Number of bytes of `metrics.jsonl` whose lines are in `_lines`."""
        self._discarded_bytes = 0
        """Size of `metrics.discarded.jsonl` when both files were read. This file grows before `metrics.jsonl` is
        truncated."""
        self._pending = False
        """Whether `metrics.jsonl` still contained discarded rows when both files were read."""
        self._lineage = 0

    def __len__(self) -> int:
        return self._first + len(self._lines)

    def refresh(self) -> None:
        """Read the new lines of `metrics.jsonl`. After a return to an earlier step, read both files from the start."""
        if self._pending or self._is_outdated() or _size(self._folder / METRICS) < self._read_to:
            self._rebuild()
            return
        new, self._read_to = self._scan(METRICS, self._read_to)
        self._lines += [_labelled(line, self._lineage) for line in new]

    def rows(self, first: int, most: int) -> list[Row]:
        """Return up to `most` rows, starting at position `first`.

        The places of earlier rows are forgotten. If they are needed again, the files are read from the start.
        """
        self._reach(first)
        found = self._rows(first, most)
        while self._is_outdated():  # the lines may have been cut off and rewritten while they were being read
            self._rebuild()
            found = self._rows(first, most)
        done = min(first - self._first, len(self._lines))
        del self._lines[:done]
        self._first += done
        return found

    def _reach(self, position: int) -> None:
        if position < self._first:
            self._rebuild()

    def _rows(self, first: int, most: int) -> list[Row]:
        found: list[Row] = []
        begin = first - self._first
        for position, line in enumerate(self._lines[begin : begin + most], first):
            values = self._read(line)
            if values.get("step") != line.step:
                break
            finite = {name: value for name, value in values.items() if value is not None and name != "lineage"}
            found.append(Row(position, line.lineage, line.step, finite))
        return found

    def _is_outdated(self) -> bool:
        return _size(self._folder / DISCARDED) != self._discarded_bytes

    def step(self, position: int) -> int:
        """Return the step of the row at `position`."""
        self._reach(position)
        return self._lines[position - self._first].step

    def _rebuild(self) -> None:
        discarded_bytes = _size(self._folder / DISCARDED)
        discarded, _ = self._scan(DISCARDED, 0)
        present, read_to = self._scan(METRICS, 0)
        self._discarded_bytes, self._read_to = discarded_bytes, read_to
        groups: dict[int, list[_Line]] = {}
        for line in discarded:
            groups.setdefault(line.lineage, []).append(line)
        last = next(reversed(groups.values()), [])
        self._pending = self._is_pending(last, present)
        if self._pending:
            first = min(line.step for line in last)
            present = [line for line in present if line.step < first]
        self._lineage = max(groups, default=-1) + 1
        self._lines, self._first = _in_order(groups, present), 0

    def _is_pending(self, group: list[_Line], present: list[_Line]) -> bool:
        """Return whether the rows of `group` are in both files, as they are until `metrics.jsonl` is truncated."""
        known = {line.step: line for line in present}
        for line in group:
            if line.step in known:
                kept = {name: value for name, value in self._read(line).items() if name != "lineage"}
                return kept == self._read(known[line.step])
        return False

    def _read(self, line: _Line) -> dict[str, Any]:
        """Return the row stored on a line, or {} if the line is no longer there."""
        try:
            with (self._folder / line.file).open("rb") as file:
                row = json.loads(os.pread(file.fileno(), line.nbytes, line.offset))
        except (OSError, ValueError):
            return {}
        return row if isinstance(row, dict) else {}

    def _scan(self, name: str, start: int) -> tuple[list[_Line], int]:
        """Return the complete lines of a file from byte `start` on, and the byte offset after them.

        A missing file has no lines. Raises OSError.
        """
        found: list[_Line] = []
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(start)
                for data in file:
                    if not data.endswith(b"\n"):
                        break
                    row = _parsed(data)
                    if isinstance(row.get("step"), int):
                        lineage = int(row.get("lineage", 0)) if name == DISCARDED else 0
                        found.append(_Line(name, start, len(data), row["step"], lineage))
                    start += len(data)
        except FileNotFoundError:
            pass
        return found, start


def _in_order(groups: dict[int, list[_Line]], present: list[_Line]) -> list[_Line]:
    """Return all lines in commit order.

    The state of the file before a return consists of the rows that the return kept and the rows that it rolled back.
    The kept rows are also in the state before the next return, so the states are built from the last to the first.
    """
    states = [present]
    for group in reversed(groups.values()):
        first = min(line.step for line in group)
        states.append([line for line in states[-1] if line.step < first] + group)
    states.reverse()
    lineages = [0, *(lineage + 1 for lineage in groups)]
    begins = [0, *(min(line.step for line in group) for group in groups.values())]
    return [
        _labelled(line, lineage)
        for state, lineage, begin in zip(states, lineages, begins, strict=True)
        for line in state
        if line.step >= begin
    ]


def _labelled(line: _Line, lineage: int) -> _Line:
    return _Line(line.file, line.offset, line.nbytes, line.step, lineage)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        row = json.loads(data)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
