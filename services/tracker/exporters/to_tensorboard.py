"""Exports a run to TensorBoard event files, in one folder per lineage, so that steps that were rolled back stay visible
as a separate curve.

TensorBoard has one step axis per folder, which is our step. Each process writes its own files, because TensorBoard
ignores what follows a torn record in a file. At its start, a process counts the rows in the files of earlier processes,
since one that was killed may have written rows that it had not recorded yet.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from services.tracker.exporter import End, Note, Subject
from services.tracker.redaction import flat
from services.tracker.samples import Cell, SampleTable
from shared.runfiles.metrics import CommittedRow
from shared.topology.monitor import Tensorboard

LINEAGE = "lineage"
"""A scalar that every row has."""


class TensorboardExporter:
    """Event files in `directory`, or in `tensorboard` in the run directory."""

    SURE = True

    def __init__(self, section: Tensorboard) -> None:
        self._directory = section.directory
        self.see = ""
        self._folder: Path
        self._id = ""
        self._files: dict[int, EventFileWriter] = {}
        """The event files, by lineage."""
        self._lineage = 0

    def open(self, subject: Subject) -> int:
        parent = subject.path / "tensorboard" if self._directory is None else Path(self._directory) / subject.name
        self._folder, self._id = parent, subject.id
        self.see = f"tensorboard --logdir {shlex.quote(str(parent))}"
        lineages = [int(folder.name.removeprefix("lineage-")) for folder in parent.glob("lineage-*")]
        self._lineage = max(lineages, default=0)
        if not lineages:
            table = "".join(f"| {name} | {value} |\n" for name, value in flat(subject.configuration).items())
            self._write(0, 0, _text("configuration", f"| key | value |\n|---|---|\n{table}"))
        return max(subject.sent, self._rows_written())

    def send(self, rows: Sequence[CommittedRow]) -> None:
        for row in rows:
            values = {**row.values, LINEAGE: float(row.lineage)}
            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            self._write(row.lineage, row.step, *scalars)
            self._lineage = row.lineage

    def annotate(self, note: Note) -> None:
        self._write(self._lineage, note.step, _text(f"notes/{note.title}", note.text))

    def show(self, table: SampleTable) -> None:
        lines = [table.columns, ("---",) * len(table.columns), *table.rows]
        text = "\n".join("|" + "|".join(map(_cell, cells)) + "|" for cells in lines)
        self._write(self._lineage, table.step, _text("samples", text))

    def close(self, end: End) -> None:
        """Close the event files. A TensorBoard run has no state; a note records the end of the run."""
        for file in self._files.values():
            file.close()

    def _rows_written(self) -> int:
        """Return the number of rows that the event files of this run hold."""
        rows: set[tuple[str, int]] = set()
        for path in self._folder.glob(f"lineage-*/events.*.{self._id}"):
            for event in LegacyEventFileLoader(str(path)).Load():
                if any(value.tag == LINEAGE for value in event.summary.value):
                    rows.add((path.parent.name, event.step))
        return len(rows)

    def _write(self, lineage: int, step: int, *values: Summary.Value) -> None:
        if lineage not in self._files:
            folder = self._folder / f"lineage-{lineage}"
            self._files[lineage] = EventFileWriter(str(folder), filename_suffix=f".{self._id}")
        file = self._files[lineage]
        file.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        file.flush()


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
