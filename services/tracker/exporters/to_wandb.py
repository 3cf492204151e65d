"""Exports one run to Weights & Biases. The tracker's step is the position in our run's history, which only grows. The
x-axis of the charts is our `step`, and `lineage` is an ordinary value.

The client passes rows to its own process, wandb-core, which writes or uploads them later. After a kill, the next row
is looked up on the server. Offline, nobody knows what wandb-core has written, so all rows since the last close are
reported again, under the same numbers.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import deque
from collections.abc import Sequence

os.environ.setdefault("WANDB_SILENT", "true")  # `wandb.init` prints a line before it knows the setting `silent`

import wandb
from wandb.errors import AuthenticationError, CommError, UsageError

from services.tracker.exporter import LINE_CHARS, End, Note, Subject, TrackerRefused
from services.tracker.samples import SampleTable
from shared.runfiles.logs import shorten
from shared.runfiles.metrics import CommittedRow
from shared.topology.monitor import Wandb

INIT_S = 60.0
"""Maximum time, in seconds, that the server may take to answer at the start of a run."""
_KEY_REFUSED = re.compile(r"unauthori[sz]ed|\b401\b", re.IGNORECASE)
_PROJECT_REFUSED = re.compile(r"permission denied|not found|\b40[34]\b", re.IGNORECASE)
_KEY_REMEDY, _PROJECT_REMEDY = "WANDB_API_KEY, or `wandb login`", "monitor.wandb.entity and project"


class WandbExporter:
    """A run in a Weights & Biases project."""

    SURE = False

    def __init__(self, section: Wandb) -> None:
        self._section = section
        self.see = ""
        self._run: wandb.Run
        self._tables: deque[wandb.Table] = deque()
        """Tables to send with the next rows, because nothing can be added to a row that has been sent."""

    def open(self, subject: Subject) -> int:
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
            raise TrackerRefused(f"{shorten(str(error), LINE_CHARS)} ({_KEY_REMEDY})") from None
        except CommError as error:
            if _KEY_REFUSED.search(str(error)):
                raise TrackerRefused(f"{shorten(str(error), LINE_CHARS)} ({_KEY_REMEDY})") from None
            if _PROJECT_REFUSED.search(str(error)):
                raise TrackerRefused(f"{shorten(str(error), LINE_CHARS)} ({_PROJECT_REMEDY})") from None
            raise
        self._run.config.update(dict(subject.configuration), allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._section.mode == "online":
            self.see = self._run.url or ""
            return int(self._run.step)
        # Each process writes a folder of its own.
        self.see = f"wandb sync {shlex.quote(str(subject.folder / 'wandb'))}/offline-run-*-{subject.id}"
        return subject.sent

    def send(self, rows: Sequence[CommittedRow]) -> None:
        for row in rows:
            table = {"samples": self._tables.popleft()} if self._tables else {}
            self._run.log({**row.values, "lineage": row.lineage, **table}, step=row.position, commit=True)

    def annotate(self, note: Note) -> None:
        level = "WARN" if note.serious else "INFO"
        self._run.alert(note.title, f"step {note.step}: {note.text}", level=level, wait_duration=1)
        self._run.summary[f"notes/{note.key}"] = f"step {note.step}: {note.text}"

    def show(self, table: SampleTable) -> None:
        columns = ["step", *table.columns]
        self._tables.append(wandb.Table(columns=columns, data=[[table.step, *cells] for cells in table.rows]))

    def close(self, end: End) -> None:
        if self._tables:
            self._run.summary["samples"] = self._tables[-1]
        self._run.finish(exit_code=0 if end.outcome in ("done", "stopped") else 1)
