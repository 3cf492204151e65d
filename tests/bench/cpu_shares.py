"""Measures each process's share of the quickstart's CPU time.

    python -m tests.bench.cpu_shares [--steps 60] [--warm-up 10] [--turns 3]

The quickstart runs without its evaluations. A figure is a process's user and system time between two metrics rows,
divided by that of all processes of the run. "journal and supervision" is the launcher, its guard and the journal. The
journal's figure is the CPU time that the production class needs to write the events and rows of the run into a new
journal, with a commit wherever more than `BURST_S` lie between two events. It includes the encoding of the events, the
checksums, the mark and the WAL checkpoints, but no snapshots, which a journal of this size does not have yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil

from proto.messages import TaskState
from services.scheduler.events import SaveStep, WriteRow
from services.scheduler.journal import Journal
from services.scheduler.journal_files import reading
from tests.bench.cluster_run import Arrival, BenchError, run_cluster
from tests.bench.growth import name_of
from tests.bench.turns import TURNS, heading, order_line, spread

SUPERVISING = "launch."
JOURNAL = "the journal, within the scheduler"
BURST_S = 0.0002
"""Two events that are further apart than this many seconds count as two bursts, each with its own commit."""


class CpuTimes:
    """CPU seconds of the launcher and all its descendants, by pid, at the rows of two steps."""

    def __init__(self, first: int, last: int) -> None:
        self.names: dict[int, str] = {}
        self._steps = (first, last)
        self._taken: dict[int, dict[int, float]] = {}

    def look(self, launcher: int, arrivals: list[Arrival]) -> None:
        """Record the CPU seconds once the row of the first measured step has been written, and again once that of the
        last step has been written.
        """
        for step in self._steps:
            if len(arrivals) >= step and step not in self._taken:
                self._taken[step] = self._seconds(launcher)

    def _seconds(self, launcher: int) -> dict[int, float]:
        found: dict[int, float] = {}
        for process in (psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)):
            try:
                times = process.cpu_times()
                self.names[process.pid] = name_of(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            found[process.pid] = times.user + times.system
        return found

    def used(self) -> dict[str, float]:
        """Return the CPU seconds of each process by name. Raises BenchError if a process exited in the meantime."""
        early, late = (self._taken.get(step, {}) for step in self._steps)
        ended = sorted(self.names[pid] for pid in early.keys() - late.keys())
        if not late or ended:
            raise BenchError(f"processes ended between steps {self._steps[0]} and {self._steps[1]}: {ended}")
        used: defaultdict[str, float] = defaultdict(float)
        for pid in late:
            used[self.names[pid]] += late[pid] - early.get(pid, 0.0)
        return dict(used)


def journal_s(journal: Path, folder: Path) -> float:
    """Write the events and rows of a run's journal into a new one in `folder`. Return the CPU seconds that this
    takes.

    Raises BenchError if the journal has begun a snapshot, because its earlier events are gone.
    """
    with reading(journal) as recorded:
        if recorded.snapshot():
            raise BenchError(f"{journal}: has a snapshot, so some events are gone; use fewer --steps")
        events = list(recorded.events())
    with contextlib.closing(sqlite3.connect(journal)) as db:
        steps = db.execute("SELECT step, task_ids FROM steps ORDER BY step").fetchall()
        rows = db.execute("SELECT step, row FROM rows ORDER BY step").fetchall()
    batched = [SaveStep(step, TaskState.BATCHED, json.loads(ids)) for step, ids in steps]
    trained = [SaveStep(step, TaskState.TRAINED) for step, _ in steps]
    saves: list[SaveStep | WriteRow] = [*batched, *trained, *(WriteRow(step, json.loads(row)) for step, row in rows)]
    copy = Journal(folder / "journal.sqlite", "")
    begun_s = time.process_time()
    before_s = 0.0
    for at_s, event in events:
        if at_s - before_s > BURST_S:
            copy.commit()
        copy.append(event, at_s)
        before_s = at_s
    for save in saves:
        copy.commit()
        copy.save(save, before_s)
    copy.commit()
    copy.close()
    return time.process_time() - begun_s


def measure(steps: int, warm_up: int, limit_s: float) -> dict[str, float]:
    """Return the share of each process between the rows of two steps, and that of the journal. Raises BenchError."""
    times = CpuTimes(warm_up, steps)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        run_cluster(steps + 1, folder, limit_s, watch=times.look)
        used = times.used()
        total_s = sum(used.values())
        used[JOURNAL] = journal_s(folder / "run" / "journal.sqlite", folder) * (steps - warm_up) / (steps + 1)
    return {name: seconds / total_s for name, seconds in used.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Each process's share of the quickstart's CPU time.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=10, help="number of initial steps to leave out")
    parser.add_argument("--turns", type=int, default=TURNS, help="runs")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds after which a run counts as failed")
    args = parser.parse_args()
    if not 0 < args.warm_up < args.steps:
        parser.error(f"--warm-up {args.warm_up} must be above 0 and below --steps {args.steps}")
    print(heading())
    print(order_line(["the quickstart"], args.turns), flush=True)
    try:
        runs = [measure(args.steps, args.warm_up, args.limit_s) for _ in range(args.turns)]
    except BenchError as error:
        sys.exit(f"cpu_shares: {error}")
    for name in sorted(runs[0], key=lambda each: -runs[0][each]):
        print(f"{name:<40}{spread(100 * run.get(name, 0.0) for run in runs).text('.2f'):>26} %")
    supervising = (
        run[JOURNAL] + sum(part for name, part in run.items() if name.startswith(SUPERVISING)) for run in runs
    )
    print(f"{'journal and supervision':<40}{spread(100 * each for each in supervising).text('.2f'):>26} %")


if __name__ == "__main__":
    main()
