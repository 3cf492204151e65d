"""`metrics.jsonl`: one flat JSON object per line, with each step's row exactly once, even if processes are killed.

The journal holds every row until it forgets the oldest ones, after they have been synced here (`ForgetSteps`). This
file always holds a prefix of all rows, and holds all of them when no write is in progress. At start-up, incomplete and
damaged lines at its end are removed and missing rows are added. When the run returns to an earlier step, the rows of
the steps that were rolled back are moved to `metrics.discarded.jsonl`, each with the lineage of weights that ended at
that point. The rows are durable there before they are removed here.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_NO_ROW = -1
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def traces(path: Path, rows: Iterable[str]) -> tuple[int, int]:
    """Compare the file with all rows in the journal (JSON), and change neither.

    Return two steps: the last step up to which no row in the file contradicts the journal (which may be beyond the last
    row of both), and the newest step in the file. Incomplete and damaged lines count as absent.
    """
    expected: dict[int, dict[str, Any]] = {row["step"]: row for row in map(json.loads, map(tidy, rows))}
    agreed, newest = sys.maxsize, 0
    for line in path.read_bytes().splitlines() if path.exists() else ():
        row = _parsed(line)
        step = row.get("step")
        if isinstance(step, int):
            newest = max(newest, step)
            if expected.get(step, row) != row:
                agreed = min(agreed, step - 1)
    return max(agreed, 0), newest


class MetricsFile:
    """An open metrics file. Each line is appended with a single write."""

    def __init__(self, path: Path, missing_after: Callable[[int], Iterable[str]], last: int, lineage: int) -> None:
        """Remove incomplete and damaged lines at the end, then append the missing rows from the journal.

        `last` is the step of the journal's last row. Rows of steps after `last`, which exist if a power cut removed the
        end of the journal, are discarded under `lineage`.
        """
        self._discarded = path.with_name("metrics.discarded.jsonl")
        self._fd = os.open(path, _FLAGS, 0o644)
        self.step = self.found = self._cut_damaged_lines()
        """The step of the last row in the file; `found` is that of the last row before any were added."""
        if self.step > last:
            self.discard(lineage, last, {})
        for row in missing_after(self.step):
            self.write(row)

    def write(self, row: str) -> None:
        """Append one row (JSON text), unless the file already has a row for that step or a later one."""
        step = int(json.loads(row)["step"])
        if step > self.step:
            _append(self._fd, tidy(row))
            self.step = step

    def discard(self, lineage: int, after: int, waiting: Mapping[int, Mapping[str, float]]) -> None:
        """Move the rows of all steps after `after`, and the unwritten rows in `waiting`, to `metrics.discarded.jsonl`.

        A row that a killed process has already moved is not added again.
        """
        size = os.fstat(self._fd).st_size
        lines = os.pread(self._fd, size, 0).splitlines(keepends=True)
        found: list[dict[str, Any]] = []
        while lines and (row := _parsed(lines[-1])).get("step", after + 1) > after:
            found += [row] if row else []
            size -= len(lines.pop())
        unwritten = [json.loads(tidy(json.dumps({**row, "step": step}))) for step, row in sorted(waiting.items())]
        self._save_discarded(lineage, [*reversed(found), *unwritten])
        os.ftruncate(self._fd, size)
        self.step = int(json.loads(lines[-1])["step"]) if lines else _NO_ROW

    def _save_discarded(self, lineage: int, rows: list[dict[str, Any]]) -> None:
        """Append the discarded rows to `metrics.discarded.jsonl` and make them durable."""
        if not rows:
            return
        descriptor = os.open(self._discarded, _FLAGS, 0o644)
        try:
            known = set(_discarded_keys(descriptor))
            for row in rows:
                if (lineage, row["step"]) not in known:
                    _append(descriptor, json.dumps({"lineage": lineage, "step": row["step"], **row}))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Make all rows durable. Any thread may call this. Raises OSError."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _cut_damaged_lines(self) -> int:
        """Truncate the file after the last line that is a row, and return its step."""
        start, tail = os.fstat(self._fd).st_size, b""
        while start > 0:
            end, start = start, max(start - 65536, 0)
            tail = os.pread(self._fd, end - start, start) + tail
            while b"\n" in tail:
                tail = tail[: tail.rindex(b"\n") + 1]
                begin = tail.rfind(b"\n", 0, -1) + 1
                if begin == 0 and start > 0:
                    break  # the beginning of the line has not been read yet
                step = _parsed(tail[begin:]).get("step")
                if isinstance(step, int):
                    os.ftruncate(self._fd, start + len(tail))
                    return step
                tail = tail[:begin]
        os.ftruncate(self._fd, 0)
        return _NO_ROW


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the row in a line, or {} if the line is damaged."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _append(descriptor: int, line: str) -> None:
    data = line.encode() + b"\n"
    written = os.write(descriptor, data)
    if written != len(data):
        raise OSError(f"metrics.jsonl: wrote {written} of {len(data)} bytes; is the disk full?")


def _discarded_keys(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield the lineage and step of each discarded row, after removing an incomplete last line."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    whole = data.rfind(b"\n") + 1
    os.ftruncate(descriptor, whole)
    for line in data[:whole].splitlines():
        row = _parsed(line)
        if "lineage" in row and "step" in row:
            yield row["lineage"], row["step"]


def tidy(row: str) -> str:
    """Return the row with counts as integers, and with null for NaN and infinities, which JSON cannot represent."""
    values: dict[str, float] = json.loads(row)
    out: dict[str, float | int | None] = {}
    for name, value in values.items():
        if not math.isfinite(value):
            out[name] = None
        else:
            out[name] = int(value) if name in _COUNTS else value
    return json.dumps(out)


_COUNTS = frozenset({"step", "policy/version", "gc/tasks", "store/bytes", "store/shards"})
