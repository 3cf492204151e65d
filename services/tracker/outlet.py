"""Delivers a run to one tracker, from the files in the run directory: rows in commit order, samples and warnings.

A thread of its own calls the tracker's library, and nothing waits for it. While a tracker refuses calls, the rows wait
in the run directory. A tracker whose library exceeds the deadline of a call receives no more; the other trackers go on.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog

from services.tracker import ledger
from services.tracker.exporter import (
    LINE_CHARS,
    REMEDY,
    End,
    Exporter,
    Note,
    Subject,
    TrackerRefused,
    make,
    missing,
)
from services.tracker.redaction import without_secrets
from services.tracker.samples import is_due, is_evaluated, table_of
from shared.rundir import RunDir
from shared.runfiles.lines import FollowedFile
from shared.runfiles.logs import shorten
from shared.runfiles.metrics import CommittedRow, CommittedRows
from shared.runfiles.outcome import read_outcome
from shared.runfiles.warnings import parse
from shared.topology import Topology

BATCH_ROWS = 50
POLL_S = 1.0
FIRST_RETRY_S, RETRY_S = 1.0, 30.0
"""Seconds between attempts to reach a tracker: the initial and the longest interval."""
SLOW_S = 30.0
"""Seconds without an answer after which a tracker is reported."""
CALL_S = 300.0
"""Maximum time, in seconds, of one call to a tracker's library."""
CHECK_S = 0.5
"""Seconds between two checks of that time."""
RECORDED_S = 5.0
"""Seconds after a step within which its samples are written to the run directory, if they are written at all."""


class Outlet:
    """What tracker `name` receives."""

    def __init__(self, run: RunDir, topology: Topology, name: str) -> None:
        self.name = name
        self.given_up = ""
        """Why the tracker receives no more, in one line; empty while it may."""
        self.done = threading.Event()
        """Set once nothing more will be delivered."""
        self._run = run
        self._configuration = without_secrets(topology.document())
        self._section = topology.monitor.trackers[name]
        recorded = topology.monitor.samples
        self._recorded = recorded.every if recorded is not None else 1
        """Only steps that are multiples of this number have recorded training samples."""
        self._ledger = ledger.read(run.path, name)
        self._problem = ""
        self._busy_since = math.inf
        """Time (time.monotonic) at which the current call to the tracker's library began, or infinity."""
        self._exporter: Exporter | None = None
        self._end: End | None = None
        self._ending = threading.Event()
        self._log = structlog.get_logger("tracker")
        self._rows = CommittedRows(run.path)
        self._held = 0
        """Number of rows that the tracker had when it was opened."""
        self._last: CommittedRow | None = None
        """The newest row that the tracker has."""
        self._due: deque[tuple[float, CommittedRow]] = deque()
        """Rows whose samples are to be shown, with the times (time.monotonic) at which they were sent."""
        self._warnings = FollowedFile(run.warnings)
        self._read_warnings = 0

    def start(self, end: End | None = None) -> None:
        """Start delivering on a daemon thread, for which the process does not wait when it exits.

        With `end`, the run has ended, and a failed call is not repeated.
        """
        self._end = end
        threading.Thread(target=self._deliver, name=f"tracker-{self.name}", daemon=True).start()

    def end(self, end: End) -> None:
        """Deliver what remains, and tell the tracker how the run ended."""
        self._end = end
        self._ending.set()

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

    def _busy_s(self) -> float:
        return time.monotonic() - self._busy_since

    # ---- on the delivering thread

    def _deliver(self) -> None:
        """Deliver until the end of the run. After a failed call, deliver again what the tracker may lack, with growing
        pauses in between."""
        pause_s = FIRST_RETRY_S
        while not self.done.is_set():
            end = self._end
            try:
                self._deliver_new(self._exporter or self._opened(), end)
                pause_s = FIRST_RETRY_S
                self._ending.wait(POLL_S)
            except TrackerRefused as error:
                self._give_up(str(error))
            except Exception as error:  # whatever a library raises, the run continues and rows wait
                if self.done.is_set():  # the call took so long that the tracker was given up
                    return
                self._take_back(error)
                if end is not None:
                    self.done.set()
                self._ending.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_S)

    def _opened(self) -> Exporter:
        """Open the run in the tracker, and begin with the rows that the tracker lacks."""
        if lacking := missing(self.name):
            raise TrackerRefused(f"{', '.join(lacking)} not installed in this environment; {REMEDY}")
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
        with self._busy():
            exporter = make(self.name, self._section)
            self._held = exporter.open(subject)
        kept.see = exporter.see
        self._save()
        self._tell("")
        kept.sent, kept.warnings = self._held, kept.warnings_sure
        self._rows, self._last = CommittedRows(self._run.path), None
        self._due = deque(due for due in self._due if due[1].position < self._held)
        self._warnings, self._read_warnings = FollowedFile(self._run.warnings), 0
        self._exporter = exporter
        return exporter

    def _deliver_new(self, exporter: Exporter, end: End | None) -> None:
        """Deliver the new rows, samples and warnings, and then, if the run has ended, its end."""
        more = True
        while more:
            page, more = self._rows.poll()
            self._send(exporter, page, ended=end is not None)
        self._show_tables(exporter, every=end is not None)
        self._send_warnings(exporter)
        if end is not None:
            text = f"the run ended: {end.outcome} ({end.cause})" if end.cause else f"the run ended: {end.outcome}"
            step = self._last.step if self._last is not None else 0
            self._annotate(exporter, f"end-{self.sent}", "end", text, step, serious=False)
            self._call(exporter, partial(exporter.close, end), ended=end.outcome)
            self.done.set()

    def _send(self, exporter: Exporter, rows: Sequence[CommittedRow], *, ended: bool) -> None:
        for row in rows:
            if row.position < self._held:
                self._last = row
        rows = [row for row in rows if row.position >= self._held]
        while rows:
            self._show_tables(exporter, every=ended)
            first, last = rows[0], self._last
            if last is not None and first.lineage != last.lineage:
                text = f"back to step {first.step - 1}: steps {first.step}-{last.step} were rolled back; "
                text += f"lineage {first.lineage} begins"
                self._annotate(exporter, f"rewind-{first.lineage}", "rewind", text, first.step)
            batch = [row for row in rows[:BATCH_ROWS] if row.lineage == first.lineage]
            # A row with samples is the last of its batch, so that a tracker can send each table with the next row.
            batch = batch[: next((count for count, row in enumerate(batch, 1) if self._has_table(row)), None)]
            rows, last = rows[len(batch) :], batch[-1]
            self._call(exporter, partial(exporter.send, batch), sent=last.position + 1, step=last.step)
            self._last = last
            if self._has_table(last):
                self._due.append((time.monotonic(), last))

    def _has_table(self, row: CommittedRow) -> bool:
        due = is_evaluated(row) or is_due(row, self._section.samples_every, self._recorded)
        return due and self._section.samples > 0

    def _show_tables(self, exporter: Exporter, *, every: bool) -> None:
        """Show the samples that have been written. At the end of the run, all of them have been."""
        while self._due and (every or time.monotonic() - self._due[0][0] > RECORDED_S):
            if table := table_of(self._run.path, self._due[0][1], self._section.samples):
                self._call(exporter, partial(exporter.show, table))
            self._due.popleft()

    def _send_warnings(self, exporter: Exporter) -> None:
        while lines := self._warnings.poll()[0]:
            for number, line in enumerate(lines, self._read_warnings):
                if number >= self._ledger.warnings and (record := parse(line)):
                    text = f"{record.text}; {record.remedy}".strip("; ")
                    self._annotate(exporter, f"warning-{number}", record.kind, text, record.step, warnings=number + 1)
            self._read_warnings += len(lines)

    def _annotate(
        self, exporter: Exporter, key: str, title: str, text: str, step: int, *, serious: bool = True, **changes: Any
    ) -> None:
        position = self._last.position if self._last is not None else 0
        note = Note(key=key, title=title, text=text, step=step, position=position, serious=serious)
        self._call(exporter, partial(exporter.annotate, note), **changes)

    def _call(self, exporter: Exporter, call: Callable[[], None], **changes: Any) -> None:
        """Call the tracker's library, then record what the tracker has: `changes` of the ledger."""
        with self._busy():
            call()
        if self.done.is_set():
            raise TimeoutError("the call took so long that the tracker was given up")
        kept = self._ledger = msgspec.structs.replace(self._ledger, problem="", **changes)
        if exporter.SURE or kept.ended:
            kept.sure, kept.warnings_sure = kept.sent, kept.warnings
        self._problem = ""
        self._save()

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = math.inf

    def _take_back(self, error: Exception) -> None:
        """Note that the tracker does not accept the run at present."""
        self._log.warning("the tracker does not accept the run", tracker=self.name, exc_info=error)
        waiting = f"the steps after {self._ledger.step} wait" if self._ledger.sent else "all steps wait"
        self._exporter = None
        what = shorten(f"{type(error).__name__}: {error}", LINE_CHARS)
        self._tell(what, f"; {waiting} in metrics.jsonl")

    def _give_up(self, why: str) -> None:
        self.given_up = f"{self.name}: {why}"
        self._log.warning("the tracker receives no further steps", tracker=self.name, cause=why)
        self._tell(why)
        self.done.set()

    def _tell(self, problem: str, now: str = "") -> None:
        """Report a problem, or that there is none, and save it, so that it can still be read after the run has ended.
        `now` is what is true only until then."""
        self._problem = f"{self.name}: {problem}{now}" if problem else ""
        if problem != self._ledger.problem:
            self._ledger.problem = problem
            with contextlib.suppress(OSError):  # the problem itself may be a full disk
                self._save()

    def _save(self) -> None:
        ledger.write(self._run.path, self.name, self._ledger)


def finish(outlets: Sequence[Outlet], end: End, limit_s: float = math.inf) -> None:
    """Deliver what remains to all trackers and tell them how the run ended, for at most `limit_s` seconds."""
    for outlet in outlets:
        outlet.end(end)
    until = time.monotonic() + limit_s
    for outlet in outlets:
        while not outlet.done.wait(min(CHECK_S, max(0.0, until - time.monotonic()))) and time.monotonic() < until:
            outlet.check()


def end_of(run: RunDir) -> End:
    """Return how the run ended, as recorded by its supervisor when the run began to shut down."""
    recorded = read_outcome(run.path)
    return End(recorded.outcome, recorded.cause) if recorded is not None else End("killed")
