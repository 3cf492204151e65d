"""Feeds one tracker from the files in the run directory: rows in commit order, then warnings.

Everything in this module can block, so it runs on a thread, or in a process, that nothing waits for. Rows wait in the
run directory until the tracker accepts them. If this process is killed, the next process continues after the rows that
the tracker holds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import structlog

from services.tracker import ledger
from services.tracker.exporter import End, Exporter, Note, Subject, Unusable, make
from services.tracker.history import History, Row
from services.tracker.samples import is_due, is_evaluated, table_of
from shared.redaction import without_secrets
from shared.rundir import RunDir
from shared.topology import Topology
from shared.warnings import parse

BATCH_ROWS = 50
POLL_S = 1.0
FIRST_RETRY_S, RETRY_S = 1.0, 30.0
"""Seconds between attempts to reach a tracker: the initial and the longest interval."""
RECORDED_S = 5.0
"""Seconds after a step within which its samples are written to the run directory, if they are written at all."""
LINE_CHARS = 300
T = TypeVar("T")


class Feeder:
    """Feeds one run to one tracker. `run` runs on its own thread; the other members may be used from any thread."""

    def __init__(self, run: RunDir, topology: Topology, name: str) -> None:
        self.name = name
        self.problem = ""
        """The reason why rows are waiting, in one line, or an empty string if none are waiting."""
        self.refused = ""
        """Why the tracker will never accept this run, in one line; empty if it may accept the run."""
        self.busy_since: float | None = None
        """Monotonic time at which the current call to the tracker library began, or None if no call is in progress."""
        self.rows_sent = 0
        self.done = threading.Event()
        """Set once `run` has returned."""
        self._run = run
        self._topology = topology
        self._history = History(run.path)
        self._ledger = ledger.read(run.path, name)
        self._exporter: Exporter | None = None
        self._pause_s = FIRST_RETRY_S
        self._section = topology.services.monitor.trackers[name]
        recorded = topology.services.monitor.samples
        self._recorded = recorded.every if recorded is not None else 1
        """Only steps that are multiples of this number have recorded training samples."""
        self._due: deque[tuple[float, Row]] = deque()
        """Rows that have been sent and whose samples have not, with the times (time.monotonic) of sending."""
        self._end: End | None = None
        self._ending = threading.Event()
        self._log = structlog.get_logger("tracker")

    def end(self, end: End) -> None:
        """Make `run` send the remaining rows, tell the tracker how the run ended, and return."""
        self._end = end
        self._ending.set()

    def run(self) -> None:
        """Feed the tracker until `end` is called or the tracker refuses the run."""
        try:
            self._feed_for_good()
        finally:
            self.done.set()

    def _feed_for_good(self) -> None:
        while True:
            last = self._ending.is_set()
            try:
                self._feed()
                return
            except Unusable as error:
                self.refused = self._told(f"{self.name}: {error}")
                return
            except Exception as error:  # whatever a library raises, the run continues and rows wait
                self._log.warning("the tracker does not accept the run", tracker=self.name, exc_info=error)
                waiting = f"the steps after {self._ledger.step} wait" if self._ledger.sent else "all steps wait"
                self.problem = self._told(f"{self.name}: {describe(error)}; {waiting} in metrics.jsonl")
            finally:
                self.busy_since = None
            if last:
                return
            self._ending.wait(self._pause_s)
            self._pause_s = min(2 * self._pause_s, RETRY_S)

    def _feed(self) -> None:
        if self._exporter is None:
            self._exporter = self._call(lambda: make(self.name, self._section))
        exporter = self._exporter
        self._open(exporter)
        self._pause_s = FIRST_RETRY_S
        while not self._ending.is_set():
            self._send(exporter)
            self._ending.wait(POLL_S)
        self._send(exporter)
        self._close(exporter)

    def _open(self, exporter: Exporter) -> None:
        kept = self._ledger
        predecessor = kept.pid
        kept.id, kept.pid, kept.ended = kept.id or secrets.token_hex(8), os.getpid(), ""
        self._save()  # the tracker never has a run whose id is not in the run directory
        subject = Subject(
            id=kept.id,
            name=self._run.name,
            path=self._run.path,
            folder=self._run.path / ledger.FOLDER / self.name,
            configuration=without_secrets(self._topology.document()),
            sent=kept.sent,
            predecessor=predecessor,
        )
        held = self._call(lambda: exporter.open(subject))
        kept.sent = kept.sure = held
        kept.warnings = kept.warnings_sure
        self._save()
        self.problem = ""

    def _send(self, exporter: Exporter) -> None:
        """Send all new rows, and then all new warnings."""
        self._history.refresh()
        while rows := self._history.rows(self._ledger.sent, BATCH_ROWS):
            lineage = rows[0].lineage
            if lineage != self._ledger.lineage:
                self._annotate(exporter, self._rewound(rows[0]))
            self._show(exporter)
            rows = [row for row in rows if row.lineage == lineage]
            # A row with samples is the last of its batch, so that a tracker can send each table with the next row.
            rows = rows[: next((n for n, row in enumerate(rows, 1) if self._has_table(exporter, row)), None)]
            self._call(functools.partial(exporter.send, rows))
            if self._has_table(exporter, rows[-1]):
                self._due.append((time.monotonic(), rows[-1]))
            self._ledger.sent, self._ledger.step = rows[-1].position + 1, rows[-1].step
            self._ledger.lineage = lineage
            self._ledger.sure = self._ledger.sent if exporter.SURE else self._ledger.sure
            self._save()
            self.rows_sent = self._ledger.sent
        self._show(exporter)
        for warning in self._new_warnings():
            self._annotate(exporter, warning)
            self._ledger.warnings += 1
            self._ledger.warnings_sure = self._ledger.warnings if exporter.SURE else self._ledger.warnings_sure
            self._save()
        if self._ledger.problem:
            self.problem = self._told("")

    def _close(self, exporter: Exporter) -> None:
        self._show(exporter)
        end = self._end or End("killed")
        text = f"{end.outcome} ({end.cause})" if end.cause else end.outcome
        self._annotate(exporter, self._note(f"end-{self._ledger.sent}", "end", f"the run ended: {text}", serious=False))
        self._call(lambda: exporter.close(end))
        self._ledger.ended, self._ledger.problem = end.outcome, ""
        self._ledger.sure, self._ledger.warnings_sure = self._ledger.sent, self._ledger.warnings
        self._save()

    def _show(self, exporter: Exporter) -> None:
        """Send the samples that are due and have been written. At the end of the run, all of them have been."""
        while self._due and (self._ending.is_set() or time.monotonic() - self._due[0][0] > RECORDED_S):
            if table := table_of(self._run.path, self._due[0][1], exporter.samples):
                self._call(functools.partial(exporter.show, table))
            self._due.popleft()

    def _has_table(self, exporter: Exporter, row: Row) -> bool:
        due = is_evaluated(row) or is_due(row, self._section.samples_every, self._recorded)
        return due and exporter.samples > 0

    def _rewound(self, row: Row) -> Note:
        before, last = row.step - 1, self._ledger.step
        text = f"back to step {before}: steps {row.step}-{last} were rolled back; lineage {row.lineage} begins"
        return self._note(f"rewind-{row.lineage}", "rewind", text, step=row.step)

    def _new_warnings(self) -> list[Note]:
        try:
            lines = self._run.warnings.read_bytes().splitlines(keepends=True)
        except OSError:
            return []
        found = []
        for number, line in enumerate(lines[self._ledger.warnings :], self._ledger.warnings):
            if not line.endswith(b"\n"):
                break
            key, record = f"warning-{number}", parse(line)
            found.append(
                self._note(key, record.kind, f"{record.text}; {record.remedy}".strip("; "), step=record.step)
                if record is not None
                else self._note(key, "warning", "")
            )
        return found

    def _note(self, key: str, title: str, text: str, *, step: int | None = None, serious: bool = True) -> Note:
        kept = self._ledger
        at = kept.step if step is None else step
        return Note(key=key, title=title, text=text, step=at, position=max(kept.sent - 1, 0), serious=serious)

    def _annotate(self, exporter: Exporter, note: Note) -> None:
        self._call(lambda: exporter.annotate(note))

    def _call(self, work: Callable[[], T]) -> T:
        """Run `work`, which calls the tracker library, and return its result.

        During the call, `busy_since` is the call's start time.
        """
        self.busy_since = time.monotonic()
        try:
            return work()
        finally:
            self.busy_since = None

    def _told(self, problem: str) -> str:
        """Save the problem, so that it can still be read after the run has ended, and return it."""
        self._ledger.problem = problem.partition("; ")[0].removeprefix(f"{self.name}: ")
        with contextlib.suppress(OSError):  # the problem itself may be a full disk
            self._save()
        return problem

    def _save(self) -> None:
        ledger.write(self._run.path, self.name, self._ledger)


def describe(error: BaseException) -> str:
    """Return a library error as one short line."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return line if len(line) <= LINE_CHARS else f"{line[: LINE_CHARS - 1]}…"


def start(feeder: Feeder) -> threading.Thread:
    """Run `feeder` on a daemon thread, which the process does not wait for when it exits."""
    thread = threading.Thread(target=feeder.run, name=f"tracker-{feeder.name}", daemon=True)
    thread.start()
    return thread


def end_of(run: RunDir) -> End:
    """Return how the run ended, as recorded by its supervisor when the run began to shut down."""
    try:
        found = json.loads(run.outcome.read_bytes())
        return End(str(found["outcome"]), str(found["cause"]))
    except (OSError, ValueError, KeyError, TypeError):
        return End("killed")
