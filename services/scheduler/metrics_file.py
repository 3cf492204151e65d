"""`metrics.jsonl`: one flat JSON object a line, each step's row exactly once, whatever was killed when.

The journal holds every row; this file follows it. At start a torn last line is cut off and missing rows are added.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

_NO_ROW = -1


class MetricsFile:
    """Appends complete lines with one write each."""

    def __init__(self, path: Path, missing_after: Callable[[int], Iterable[str]]) -> None:
        """Cut a torn last line, then append the journal's rows of later steps."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.step = self._mend()
        for row in missing_after(self.step):
            self.write(row)

    def write(self, row: str) -> None:
        """Append one row (JSON text); a row of a step that is there already is left out."""
        step = int(json.loads(row)["step"])
        if step > self.step:
            data = tidy(row).encode() + b"\n"
            written = os.write(self._fd, data)
            if written != len(data):
                raise OSError(f"metrics.jsonl: wrote {written} of {len(data)} bytes; is the disk full?")
            self.step = step

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
