"""Handles a run's warnings in the monitor process: reads rows, receives telemetry, and stores and returns the warnings.

A failure in this module must not end the monitor, because a service that fails too often ends its run. The failure is
therefore logged with its traceback, and the monitor issues no more warnings until it restarts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import psutil

from proto.messages import TopicRow
from services.monitor.state import SOURCE
from services.monitor.warnings.facts import Facts
from services.monitor.warnings.watch import Watch
from shared.rundir import RunDir
from shared.runfiles import warnings
from shared.runfiles.metrics import MetricsFollower
from shared.runfiles.warnings import TOPIC, WarningRecord
from shared.topology import TopologyError, load_resolved

MEMORY_EVERY_S = 10.0
"""Seconds between two checks of this machine's available memory."""
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


class WarningDesk:
    """The `Watch` of a run, with its files."""

    def __init__(self, run: RunDir, watch: Watch, file: WarningFile, log: Any) -> None:
        self._watch = watch
        self._file = file
        self._rows = MetricsFollower(run.metrics)
        self._log = log
        self._available_bytes: float | None = None
        self._looked_at = 0.0
        self._failed = False

    @classmethod
    def open(cls, run: RunDir, log: Any) -> WarningDesk | None:
        """Open a run's files and return its desk, or None if the topology or the warnings file cannot be used."""
        if not run.topology.exists():
            return None
        try:
            topology = load_resolved(run.topology)
            file = WarningFile(run.warnings)
        except (OSError, TopologyError) as error:
            log.warning("no warnings will be given", error=str(error))
            return None
        off = topology.monitor.warnings.off
        return cls(run, Watch(Facts.of(topology), file.told, off=off), file, log)

    def close(self) -> None:
        self._file.close()

    def newest(self) -> list[TopicRow]:
        """Return the newest warning of each kind, as topics for a new monitor to publish."""
        return [_topic(record) for record in {record.kind: record for record in self._file.told}.values()]

    def take(self, row: TopicRow) -> None:
        """Pass new values of a topic to the detectors."""
        self._watch.take_topic(row)

    def read(self, now: float) -> tuple[list[TopicRow], bool]:
        """Read a page of metrics.jsonl. Return the topics of new warnings, and whether there may be more rows.

        `now` is in seconds since 1970. The telemetry is checked when all rows have been read.
        """
        if self._failed:
            return [], False
        try:
            begun, more = self._found(now)
        except Exception as error:
            self._failed = True
            self._log.error("no more warnings will be given: a detector failed", exc_info=error)
            return [], False
        for record in begun:
            self._keep(record)
        return [_topic(record) for record in begun], more

    def _found(self, now: float) -> tuple[list[WarningRecord], bool]:
        new = self._rows.poll()
        if new.restarted:
            self._watch.start_over()
        begun = [record for row in new.rows for record in self._watch.take_row(row, now)]
        if new.more:
            return begun, True
        if now - self._looked_at >= MEMORY_EVERY_S:
            self._looked_at, self._available_bytes = now, float(psutil.virtual_memory().available)
        return [*begun, *self._watch.tick(now, self._available_bytes)], False

    def _keep(self, record: WarningRecord) -> None:
        self._log.warning("warning", kind=record.kind, about=record.about, step=record.step, text=record.text,
                          remedy=record.remedy)  # fmt: skip
        try:
            self._file.append(record)
        except OSError as error:
            self._log.error("a warning was not saved", error=str(error))


def _topic(record: WarningRecord) -> TopicRow:
    return TopicRow(
        service=SOURCE, instance=0, topic=f"{TOPIC}{record.kind}", at=record.at, values=msgspec.structs.asdict(record)
    )
