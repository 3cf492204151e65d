"""`metrics.jsonl`: one flat JSON object a line, each step's row exactly once, whatever was killed when.

The journal holds every row; this file always holds the first of them, and all of them when nothing is under way. At
start a torn last line is cut off and missing rows are added. When the run goes back, the rows of the steps that are
taken back move to `metrics.discarded.jsonl`, each with the lineage of weights that ended then: they are durable there
before they leave here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_NO_ROW = -1
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class MetricsFile:
    """Appends complete lines with one write each."""

    def __init__(self, path: Path, missing_after: Callable[[int], Iterable[str]], last: int, lineage: int) -> None:
        """Cut a torn last line, then append the journal's rows of later steps.

        `last`: step of the journal's last row. Later rows (a power cut took the end of the journal) are discarded under
        `lineage`.
        """
        self._discarded = path.with_name("metrics.discarded.jsonl")
        self._fd = os.open(path, _FLAGS, 0o644)
        self.step = self._mend()
        if self.step > last:
            self.discard(lineage, last, {})
        for row in missing_after(self.step):
            self.write(row)

    def write(self, row: str) -> None:
        """Append one row (JSON text); a row of a step that is there already is left out."""
        step = int(json.loads(row)["step"])
        if step > self.step:
            _append(self._fd, tidy(row))
            self.step = step

    def discard(self, lineage: int, after: int, waiting: Mapping[int, Mapping[str, float]]) -> None:
        """Move the rows of all steps after `after` to the other file, and `waiting` ones that were not written here.

        A row that is there already (a kill came between) is not added again.
        """
        size = os.fstat(self._fd).st_size
        lines = os.pread(self._fd, size, 0).splitlines(keepends=True)
        found: list[dict[str, Any]] = []
        while lines and (row := _parsed(lines[-1])).get("step", after + 1) > after:
            found += [row] if row else []
            size -= len(lines.pop())
        unwritten = [json.loads(tidy(json.dumps({**row, "step": step}))) for step, row in sorted(waiting.items())]
        self._keep(lineage, [*reversed(found), *unwritten])
        os.ftruncate(self._fd, size)
        self.step = int(json.loads(lines[-1])["step"]) if lines else _NO_ROW

    def _keep(self, lineage: int, rows: list[dict[str, Any]]) -> None:
        """Make the discarded rows durable."""
        if not rows:
            return
        descriptor = os.open(self._discarded, _FLAGS, 0o644)
        try:
            known = set(_known(descriptor))
            for row in rows:
                if (lineage, row["step"]) not in known:
                    _append(descriptor, json.dumps({"lineage": lineage, "step": row["step"], **row}))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        os.close(self._fd)

    def _mend(self) -> int:
        """Truncate after the last complete line; returns its step."""
        size = os.fstat(self._fd).st_size
        end, tail = size, b""
        while end > 0:
            start = max(end - 65536, 0)
            tail = os.pread(self._fd, end - start, start) + tail
            end = start
            complete = tail[: tail.rfind(b"\n") + 1]
            previous = complete.rfind(b"\n", 0, -1)
            if complete and (previous >= 0 or start == 0):
                try:
                    step = int(json.loads(complete[previous + 1 :])["step"])
                except (ValueError, KeyError, TypeError, OverflowError):
                    break  # the journal has every row
                os.ftruncate(self._fd, start + len(complete))
                return step
        os.ftruncate(self._fd, 0)
        return _NO_ROW


def _parsed(line: bytes) -> dict[str, Any]:
    """The row of a line; {} for a line that somebody has damaged."""
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


def _known(descriptor: int) -> Iterator[tuple[int, int]]:
    """Lineage and step of each discarded row; a torn last line is cut off."""
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    whole = data.rfind(b"\n") + 1
    os.ftruncate(descriptor, whole)
    for line in data[:whole].splitlines():
        row = json.loads(line)
        yield row["lineage"], row["step"]


def tidy(row: str) -> str:
    """The row with whole numbers as integers where they count something, and no NaN (JSON has none)."""
    values: dict[str, float] = json.loads(row)
    out: dict[str, float | int | None] = {}
    for name, value in values.items():
        if not math.isfinite(value):
            out[name] = None
        else:
            out[name] = int(value) if name in _COUNTS else value
    return json.dumps(out)


_COUNTS = frozenset({"step", "policy/version", "gc/tasks", "store/bytes", "store/shards"})
