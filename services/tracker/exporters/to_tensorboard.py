"""Exports a run to TensorBoard event files, in one folder per lineage, so that steps that were rolled back stay visible
as a separate curve.

TensorBoard has one step axis per folder, which is our step. A row is one record of the event file, written with one
system call, so the file itself shows which rows it contains. A torn record at the end of the file is cut off.
"""

from __future__ import annotations

import io
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from services.tracker.exporter import End, Note, Subject
from services.tracker.history import Row
from services.tracker.samples import Cell, Table
from shared.redaction import flat
from shared.topology.monitor import Tensorboard

_HEADER, _FOOTER = 12, 4
"""Number of bytes before and after the data of a record: the length with its checksum, and the checksum of the data."""


class TensorboardExporter:
    """Event files in `directory`, or in `tensorboard` in the run directory."""

    SURE = True

    def __init__(self, section: Tensorboard) -> None:
        self._directory = section.directory
        self.samples = section.samples
        self._folder: Path
        self._files: dict[int, int] = {}
        """Descriptors of the event files, by lineage."""
        self._lineage = 0

    def open(self, subject: Subject) -> int:
        parent = subject.path / "tensorboard" if self._directory is None else Path(self._directory) / subject.name
        self._folder = parent
        rows = 0
        self._release()
        for folder in sorted(parent.glob("lineage-*")):
            number = folder.name.removeprefix("lineage-")
            for path in folder.glob("events.out.tfevents.*"):
                rows += _repair(path)
                self._lineage = max(self._lineage, int(number))
                self._files[int(number)] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if not self._files:
            table = "".join(f"| {name} | {value} |\n" for name, value in flat(subject.configuration).items())
            self._write(0, 0, _text("configuration", f"| key | value |\n|---|---|\n{table}"))
        return rows

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = {**row.values, "lineage": float(row.lineage)}
            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._write(row.lineage, row.step, *scalars)
            self._lineage = row.lineage

    def annotate(self, note: Note) -> None:
        self._write(self._lineage, note.step, _text(f"notes/{note.title}", note.text))

    def show(self, table: Table) -> None:
        lines = [table.columns, ("---",) * len(table.columns), *table.rows]
        text = "\n".join("|" + "|".join(map(_cell, cells)) + "|" for cells in lines)
        self._write(self._lineage, table.step, _text("samples", text))

    def close(self, end: End) -> None:
        """Close the event files. A TensorBoard run has no state; a note records the end of the run."""
        self._release()

    def _release(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _write(self, lineage: int, step: int, *values: Summary.Value) -> None:
        records = b""
        if lineage not in self._files:
            folder = self._folder / f"lineage-{lineage}"
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard recognizes event files by this name, and reads files in the order of the times in their names.
            path = folder / f"events.out.tfevents.{int(time.time()):010d}.rlbus"
            self._files[lineage] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            records = _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        records += _record(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        written = os.write(self._files[lineage], records)
        if written != len(records):
            raise OSError(f"tensorboard: wrote {written} of {len(records)} bytes; is the disk full?")


def make(section: Tensorboard) -> TensorboardExporter:
    return TensorboardExporter(section)


def _cell(value: Cell) -> str:
    """Return a value as a Markdown table cell, without newlines or unescaped bars, which would end the cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def _text(tag: str, text: str) -> Summary.Value:
    tensor = TensorProto(
        dtype=DT_STRING,
        string_val=[text.encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    return Summary.Value(tag=tag, tensor=tensor, metadata=create_summary_metadata(tag, ""))


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def _repair(path: Path) -> int:
    """Cut off an incomplete last record, and return the number of rows in the file."""
    data, position, rows = path.read_bytes(), 0, 0
    while position + _HEADER <= len(data):
        (nbytes,) = struct.unpack_from("<Q", data, position)
        end = position + _HEADER + nbytes + _FOOTER
        if end > len(data):
            break
        event = Event.FromString(data[position + _HEADER : position + _HEADER + nbytes])
        rows += any(value.tag == "step" for value in event.summary.value)
        position = end
    os.truncate(path, position)
    return rows
