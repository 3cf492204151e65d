"""Measures each process's share of the quickstart's CPU time.

    python -m tests.bench.cpu_shares [--steps 60] [--warm-up 10] [--turns 3]

The quickstart runs without its evaluations. A figure is a process's user and system time between two metrics rows,
divided by that of all processes of the run. "journal and supervision" is an upper bound, because it covers the
launcher, its guard and the whole scheduler, which does more than write its journal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil

from tests.bench.cluster_run import Arrival, BenchError, run_cluster
from tests.bench.growth import name_of
from tests.bench.turns import TURNS, heading, order_line, spread

SUPERVISING = ("launch.", "services.scheduler")


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

    def shares(self) -> dict[str, float]:
        """Return the share of each process by name. Raises BenchError if a process exited in the meantime."""
        used = self.used()
        return {name: seconds / sum(used.values()) for name, seconds in used.items()}

    def used(self) -> dict[str, float]:
        """Return the CPU seconds of each process by name. Raises BenchError if a process exited in the meantime."""
        early, late = (self._taken.get(step, {}) for step in self._steps)
        ended = sorted(self.names[pid] for pid in early.keys() - late.keys())
        if not late or ended:
            raise BenchError(f"processes ended between steps {self._steps[0]} and {self._steps[1]}: {ended}")
        used: Counter[str] = Counter()
        for pid in late:
            used[self.names[pid]] += late[pid] - early.get(pid, 0.0)
        return dict(used)


def measure(steps: int, warm_up: int, limit_s: float) -> dict[str, float]:
    """Return the share of each process between the rows of two steps. Raises BenchError."""
    times = CpuTimes(warm_up, steps)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        run_cluster(steps + 1, Path(name), limit_s, watch=times.look)
    return times.shares()


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
    supervising = (sum(part for name, part in run.items() if name.startswith(SUPERVISING)) for run in runs)
    print(f"{'journal and supervision':<40}{spread(100 * each for each in supervising).text('.2f'):>26} %")


if __name__ == "__main__":
    main()
