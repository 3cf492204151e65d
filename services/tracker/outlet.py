"""Delivers a run to one tracker: a queue, and a thread that empties it.

The thread calls the tracker's library, and nothing waits for it. While a tracker refuses calls, its queue is full, and
later rows wait in the run directory. A tracker whose library exceeds the deadline of a call receives no more; the other
trackers go on.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from services.tracker import ledger
from services.tracker.exporter import End, Exporter, Note, Subject, TrackerRefused, make, missing
from services.tracker.redaction import without_secrets
from services.tracker.samples import SampleTable, is_due, is_evaluated, table_of
from shared.rundir import RunDir
from shared.runfiles.lines import FollowedFile
from shared.runfiles.metrics import CommittedRow, CommittedRows
from shared.runfiles.warnings import parse
from shared.topology import Topology

BATCH_ROWS = 50
QUEUED = 20
"""Number of parcels in a queue beyond which no page of rows is added."""
IDLE_S = 0.5
FIRST_RETRY_S, RETRY_S = 1.0, 30.0
"""Seconds between attempts to reach a tracker: the initial and the longest interval."""
SLOW_S = 30.0
"""Seconds without an answer after which a tracker is reported."""
CALL_S = 300.0
"""Maximum time, in seconds, of one call to a tracker's library."""
RECORDED_S = 5.0
"""Seconds after a step within which its samples are written to the run directory, if they are written at all."""
LINE_CHARS = 300


@dataclass
class Parcel:
    """A call to the tracker's library, and what the tracker has once it is done."""

    call: Callable[[Exporter], None]
    sent: int = 0
    """Number of rows."""
    step: int = 0
    lineage: int = 0
    """Lineage of the last row."""
    warnings: int = 0
    """Number of lines of warnings.jsonl."""
    ended: str = ""
    """The outcome of the run, if this is the last parcel."""


class Outlet:
    """What tracker `name` receives. `fill` and `check` belong to the feeder's thread."""

    def __init__(self, run: RunDir, topology: Topology, name: str) -> None:
        self.name = name
        self.given_up = ""
        """Why the tracker receives no more, in one line; empty while it may."""
        self.done = threading.Event()
        """Set once nothing more will be delivered."""
        self._run = run
        self._configuration = without_secrets(topology.document())
        self._section = topology.services.monitor.trackers[name]
        recorded = topology.services.monitor.samples
        self._recorded = recorded.every if recorded is not None else 1
        """Only steps that are multiples of this number have recorded training samples."""
        self._ledger = ledger.read(run.path, name)
        self._problem = ""
        self._busy_since: float | None = None
        """Time (time.monotonic) at which the current call to the tracker's library began."""
        self._exporter: Exporter | None = None
        self._ending = threading.Event()
        self._log = structlog.get_logger("tracker")
        self._queue: queue.Queue[Parcel] = queue.Queue()
        self._failed: Parcel | None = None
        """The parcel whose call failed, and which is delivered next."""
        self._filling = threading.Lock()
        """Guards the attributes below, which say what has been queued."""
        self._rows: CommittedRows | None = None
        """The rows of the run, once the tracker is open."""
        self._held = 0
        """Number of rows that the tracker had when it was opened."""
        self._queued = Parcel(_nothing)
        """The newest parcel in the queue."""
        self._due: deque[tuple[float, CommittedRow]] = deque()
        """Rows whose samples are to be shown, with the times (time.monotonic) at which they were read."""
        self._warnings = FollowedFile(run.warnings)
        self._read_warnings = 0

    def start(self) -> None:
        """Start delivering on a daemon thread, for which the process does not wait when it exits."""
        threading.Thread(target=self._deliver, name=f"tracker-{self.name}", daemon=True).start()

    @property
    def sent(self) -> int:
        """Number of rows that were handed over."""
        return self._ledger.sent

    @property
    def problem(self) -> str:
        """Return why rows are waiting, in one line, or an empty string if none are waiting."""
        if self.given_up or self._problem:
            return self.given_up or self._problem
        slow = self._busy_s() > SLOW_S
        return f"{self.name}: no answer; rows are waiting in metrics.jsonl" if slow else ""

    def check(self) -> None:
        """Give the tracker up if its library blocks."""
        if not self.done.is_set() and self._busy_s() > CALL_S:
            self._give_up(f"no answer for {CALL_S:g} s")

    # ---- on the feeder's thread

    def fill(self, end: End | None) -> None:
        """Queue the new rows, samples and warnings while there is room, and then, if the run has ended, its end."""
        if end is not None:
            self._ending.set()
        with self._filling:
            if self._rows is not None and not self.done.is_set() and not self._queued.ended:
                self._fill(self._rows, end)

    def _fill(self, rows: CommittedRows, end: End | None) -> None:
        more = True
        while more and self._queue.qsize() < QUEUED:
            page, more = rows.poll()
            self._put_rows(page, ended=end is not None)
        if more:
            return
        self._put_tables(every=end is not None)
        self._put_warnings()
        if end is not None:
            text = f"the run ended: {end.outcome} ({end.cause})" if end.cause else f"the run ended: {end.outcome}"
            self._put_note(f"end-{self._queued.sent}", "end", text, self._queued.step, serious=False)
            self._put(lambda exporter: exporter.close(end), ended=end.outcome)

    def _put(self, call: Callable[[Exporter], None], **changes: Any) -> None:
        """Queue a parcel whose other fields, except for `changes`, are those of the parcel before."""
        self._queued = replace(self._queued, call=call, **changes)
        self._queue.put(self._queued)

    def _put_rows(self, rows: list[CommittedRow], *, ended: bool) -> None:
        for row in rows:
            if row.position < self._held:
                self._queued.step, self._queued.lineage = row.step, row.lineage
        rows = [row for row in rows if row.position >= self._held]
        while rows:
            self._put_tables(every=ended)
            first = rows[0]
            if self._queued.sent and first.lineage != self._queued.lineage:
                text = f"back to step {first.step - 1}: steps {first.step}-{self._queued.step} were rolled back; "
                text += f"lineage {first.lineage} begins"
                self._put_note(f"rewind-{first.lineage}", "rewind", text, first.step)
            batch = [row for row in rows[:BATCH_ROWS] if row.lineage == first.lineage]
            # A row with samples is the last of its batch, so that a tracker can send each table with the next row.
            batch = batch[: next((count for count, row in enumerate(batch, 1) if self._has_table(row)), None)]
            rows, last = rows[len(batch) :], batch[-1]
            call = partial(_send, rows=batch)
            self._put(call, sent=last.position + 1, step=last.step, lineage=last.lineage)
            if self._has_table(last):
                self._due.append((time.monotonic(), last))

    def _has_table(self, row: CommittedRow) -> bool:
        due = is_evaluated(row) or is_due(row, self._section.samples_every, self._recorded)
        return due and self._section.samples > 0

    def _put_tables(self, *, every: bool) -> None:
        """Queue the samples that have been written. At the end of the run, all of them have been."""
        while self._due and (every or time.monotonic() - self._due[0][0] > RECORDED_S):
            if table := table_of(self._run.path, self._due.popleft()[1], self._section.samples):
                self._put(partial(_show, table=table))

    def _put_warnings(self) -> None:
        while lines := self._warnings.poll()[0]:
            for number, line in enumerate(lines, self._read_warnings):
                if number >= self._queued.warnings and (record := parse(line)):
                    text = f"{record.text}; {record.remedy}".strip("; ")
                    self._put_note(f"warning-{number}", record.kind, text, record.step, warnings=number + 1)
            self._read_warnings += len(lines)

    def _put_note(self, key: str, title: str, text: str, step: int, *, serious: bool = True, **changes: Any) -> None:
        position = max(self._queued.sent - 1, 0)
        note = Note(key=key, title=title, text=text, step=step, position=position, serious=serious)
        self._put(lambda exporter: exporter.annotate(note), **changes)

    # ---- on the delivering thread

    def _deliver(self) -> None:
        """Deliver the parcels until the last one. A failed call is repeated, with growing pauses in between."""
        pause_s = FIRST_RETRY_S
        while not self.done.is_set():
            last = self._ending.is_set()
            try:
                self._deliver_next()
                pause_s = FIRST_RETRY_S
            except TrackerRefused as error:
                self._give_up(str(error))
            except Exception as error:  # whatever a library raises, the run continues and rows wait
                self._take_back(error)
                if last:
                    self.done.set()
                self._ending.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_S)
            finally:
                self._busy_since = None

    def _deliver_next(self) -> None:
        exporter = self._exporter = self._exporter or self._opened()
        try:
            parcel = self._failed or self._queue.get(timeout=IDLE_S)
        except queue.Empty:
            return
        self._failed = parcel
        self._busy_since = time.monotonic()
        parcel.call(exporter)
        self._busy_since, self._failed = None, None
        if self.done.is_set():  # the call took so long that the tracker was given up
            return
        kept = self._ledger
        kept.sent, kept.step, kept.warnings, kept.ended = parcel.sent, parcel.step, parcel.warnings, parcel.ended
        if exporter.SURE or parcel.ended:
            kept.sure, kept.warnings_sure = parcel.sent, parcel.warnings
        self._problem = kept.problem = ""
        self._save()
        if parcel.ended:
            self.done.set()

    def _opened(self) -> Exporter:
        """Open the run in the tracker, and make the feeder begin with the rows that the tracker lacks."""
        if lacking := missing(self.name):
            raise TrackerRefused(f"{', '.join(lacking)} not installed in this environment; run `make setup-trackers`")
        kept = self._ledger
        kept.id, kept.pid, kept.ended = kept.id or secrets.token_hex(8), os.getpid(), ""
        self._save()  # the tracker never has a run whose id is not in the run directory
        subject = Subject(
            id=kept.id,
            name=self._run.name,
            path=self._run.path,
            folder=self._run.path / ledger.FOLDER / self.name,
            configuration=self._configuration,
            sent=kept.sure,
        )
        self._busy_since = time.monotonic()
        exporter = make(self.name, self._section)
        rows = exporter.open(subject)
        self._busy_since = None
        self._tell("")
        with self._filling:
            if self._rows is None or not exporter.SURE:
                self._held = rows
                self._queue, self._failed = queue.Queue(), None
                self._rows, self._due = CommittedRows(self._run.path), deque()
                self._queued = Parcel(_nothing, rows, warnings=kept.warnings_sure)
                self._warnings, self._read_warnings = FollowedFile(self._run.warnings), 0
        return exporter

    def _take_back(self, error: Exception) -> None:
        """Note that the tracker does not accept the run at present."""
        self._log.warning("the tracker does not accept the run", tracker=self.name, exc_info=error)
        waiting = f"the steps after {self._ledger.step} wait" if self._ledger.sent else "all steps wait"
        self._exporter = None
        self._tell(f"{self.name}: {describe(error)}; {waiting} in metrics.jsonl")

    def _give_up(self, why: str) -> None:
        self.given_up = f"{self.name}: {why}"
        self._log.warning("the tracker receives no further steps", tracker=self.name, cause=why)
        self._tell(self.given_up)
        self.done.set()

    def _tell(self, problem: str) -> None:
        """Save the problem, so that it can still be read after the run has ended."""
        self._problem = problem
        saved = problem.partition("; ")[0].removeprefix(f"{self.name}: ")
        if saved != self._ledger.problem:
            self._ledger.problem = saved
            with contextlib.suppress(OSError):  # the problem itself may be a full disk
                self._save()

    def _save(self) -> None:
        ledger.write(self._run.path, self.name, self._ledger)

    def _busy_s(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since


def _nothing(exporter: Exporter) -> None:
    """Deliver nothing."""


def _send(exporter: Exporter, rows: list[CommittedRow]) -> None:
    exporter.send(rows)


def _show(exporter: Exporter, table: SampleTable) -> None:
    exporter.show(table)


def describe(error: BaseException) -> str:
    """Return a library error as one short line."""
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return line if len(line) <= LINE_CHARS else f"{line[: LINE_CHARS - 1]}…"
