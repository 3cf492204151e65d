"""Appends to the warnings file of a run."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shared.runfiles import warnings
from shared.runfiles.warnings import WarningRecord

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class WarningFile:
    """`warnings.jsonl`, open for appending. Each line is appended in a single write, so a killed process leaves only
    whole lines."""

    def __init__(self, path: Path) -> None:
        """Open the file and remove an incomplete last line, which a full disk can cause. Raises OSError."""
        self.told = warnings.read(path)
        self._descriptor = os.open(path, _FLAGS, 0o644)
        data = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        os.ftruncate(self._descriptor, data.rfind(b"\n") + 1)

    def append(self, record: WarningRecord) -> None:
        """Append one line. Raises OSError."""
        line = msgspec.json.encode(record) + b"\n"
        if os.write(self._descriptor, line) != len(line):
            raise OSError("warnings.jsonl: a line was cut short; is the disk full?")

    def close(self) -> None:
        os.close(self._descriptor)
