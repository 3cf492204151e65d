"""Exports one run to Weights & Biases. The tracker's step is the position in our run's history, which only grows. The
x-axis of the charts is our `step`, and `lineage` is an ordinary value.

The client passes rows to its own process, wandb-core, which writes or uploads them later. Whether a row has been stored
is therefore known only at the end of the run or at the next start, when the next step is looked up on the server, or in
the local files if there is no server.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

os.environ.setdefault("WANDB_SILENT", "true")  # `wandb.init` prints a line before it knows the setting `silent`

import wandb
from wandb.errors import AuthenticationError, CommError, UsageError
from wandb.proto.wandb_internal_pb2 import Record

from services.tracker.exporter import End, Note, Subject, Unusable
from services.tracker.history import Row
from services.tracker.samples import Table
from shared.topology.monitor import Wandb

INIT_S = 60.0
"""Maximum time, in seconds, that the server may take to answer at the start of a run."""
CORE_END_S = 10.0
"""Maximum time, in seconds, that the wandb-core of a killed tracker process may take to exit by itself. After that, it
is killed."""
_MAGIC_BYTES, _BLOCK_BYTES, _HEADER_BYTES = 7, 32768, 7
_FULL, _LAST = 1, 4
_KEY_REFUSED = re.compile(r"unauthori[sz]ed|\b401\b", re.IGNORECASE)
_PROJECT_REFUSED = re.compile(r"permission denied|not found|\b40[34]\b", re.IGNORECASE)
_KEY_REMEDY, _PROJECT_REMEDY = "WANDB_API_KEY, or `wandb login`", "services.monitor.wandb.entity and project"


class WandbExporter:
    """A run in a Weights & Biases project."""

    SURE = False

    def __init__(self, section: Wandb) -> None:
        self._section = section
        self.samples = section.samples
        self._run: wandb.Run
        self._tables: deque[wandb.Table] = deque()
        """Tables to send with the next rows, because nothing can be added to a row that has been sent."""

    def open(self, subject: Subject) -> int:
        _await_core_of(subject.predecessor)
        subject.folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_S,
            disable_code=True,
            disable_git=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        try:
            self._run = wandb.init(
                entity=self._section.entity,
                project=self._section.project,
                id=subject.id,
                name=subject.name,
                dir=subject.folder,
                mode=self._section.mode,
                resume="allow",
                settings=settings,
            )
        except (AuthenticationError, UsageError) as error:
            raise Unusable(f"{_line(error)} ({_KEY_REMEDY})") from None
        except CommError as error:
            if _KEY_REFUSED.search(str(error)):
                raise Unusable(f"{_line(error)} ({_KEY_REMEDY})") from None
            if _PROJECT_REFUSED.search(str(error)):
                raise Unusable(f"{_line(error)} ({_PROJECT_REMEDY})") from None
            raise
        self._run.config.update(dict(subject.configuration), allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._section.mode == "online":
            return int(self._run.step)
        paths = sorted(subject.folder.glob(f"wandb/offline-run-*-{subject.id}/*.wandb"))
        return max((1 + step for path in paths for step in history_steps(path)), default=0)

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            table = {"samples": self._tables.popleft()} if self._tables else {}
            self._run.log({**row.values, "lineage": row.lineage, **table}, step=row.position, commit=True)

    def annotate(self, note: Note) -> None:
        level = "WARN" if note.serious else "INFO"
        self._run.alert(note.title, f"step {note.step}: {note.text}", level=level, wait_duration=1)
        self._run.summary[f"notes/{note.key}"] = f"step {note.step}: {note.text}"

    def show(self, table: Table) -> None:
        columns = ["step", *table.columns]
        self._tables.append(wandb.Table(columns=columns, data=[[table.step, *cells] for cells in table.rows]))

    def close(self, end: End) -> None:
        if self._tables:
            self._run.summary["samples"] = self._tables[-1]
        self._run.finish(exit_code=0 if end.outcome in ("done", "stopped") else 1)


def make(section: Wandb) -> WandbExporter:
    return WandbExporter(section)


def history_steps(path: Path) -> Iterator[int]:
    """Yield the steps of the rows in a `.wandb` file, up to its end or a torn record."""
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            yield int(record.history.step.num)


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in the LevelDB log format: blocks of record pieces, each with a header."""
    position, record = _MAGIC_BYTES, b""
    while position + _HEADER_BYTES <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            position += left
            continue
        nbytes = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        begin = position + _HEADER_BYTES
        position = begin + nbytes
        if kind == 0 or position > len(data):
            return
        record += data[begin:position]
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def _await_core_of(pid: int) -> None:
    """Wait until the wandb-core that process `pid` started has exited, because it might still write rows that must be
    counted."""
    until = time.monotonic() + CORE_END_S
    while pid and pid != os.getpid():
        cores = [each for each in psutil.process_iter(["cmdline"]) if _is_core_of(each.info["cmdline"] or [], pid)]
        if not cores:
            return
        if time.monotonic() > until:
            for each in cores:
                each.kill()
        time.sleep(0.1)


def _is_core_of(command: Sequence[str], pid: int) -> bool:
    known = bool(command) and Path(command[0]).name == "wandb-core"
    return known and (("--pid", str(pid)) in itertools.pairwise(command))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
