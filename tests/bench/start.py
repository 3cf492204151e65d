"""Measures the time, CPU time and memory of the quickstart's start, with and without spare processes.

    python -m tests.bench.start [--turns 3]

A start is complete when the row of the first training step is written. CPU time and memory are those of all processes
of the run at that moment. Memory is the proportional set size, which counts a page only once even if several processes
share it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from tests.bench.cluster_run import Arrival, BenchError, run_cluster
from tests.bench.turns import TURNS, by_turns, heading, order_line, spread

ENOUGH_STEPS = 1000
WITH, WITHOUT = "with spares", "without"


@dataclass
class Start:
    """The cost of one start."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    mebibytes: float = 0.0

    def look(self, launcher: int, arrivals: list[Arrival]) -> None:
        """Record the figures when the first row has arrived."""
        if not arrivals or self.seconds:
            return
        self.seconds = arrivals[0].at_s
        for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
            times = process.cpu_times()
            self.cpu_seconds += times.user + times.system
            self.mebibytes += process.memory_full_info().pss / 2**20


def measure(setting: str, limit_s: float) -> Start:
    """Start the quickstart with `setting` and stop it after its first step. Raises BenchError."""
    start = Start()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        run_cluster(
            ENOUGH_STEPS,
            Path(name),
            limit_s,
            settings=[setting],
            watch=start.look,
            enough=lambda _: start.seconds > 0,
        )
    return start


def main() -> None:
    parser = argparse.ArgumentParser(description="The quickstart's start, with and without spare processes.")
    parser.add_argument("--turns", type=int, default=TURNS, help="starts of each side")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds after which a start counts as failed")
    args = parser.parse_args()
    print(heading())
    print(order_line([WITH, WITHOUT], args.turns), flush=True)
    sides = {
        WITH: partial(measure, "run.spares=true", args.limit_s),
        WITHOUT: partial(measure, "run.spares=false", args.limit_s),
    }
    try:
        found = by_turns(sides, args.turns)
    except BenchError as error:
        sys.exit(f"start: {error}")
    print(f"{'':<32}{WITH:>24}{WITHOUT:>24}")
    for label, name, form in (
        ("first step, s", "seconds", ".1f"),
        ("CPU time until then, s", "cpu_seconds", ".1f"),
        ("memory (PSS), MiB", "mebibytes", ".0f"),
    ):
        cells = [spread(getattr(each, name) for each in found[side]).text(form) for side in (WITH, WITHOUT)]
        print(f"{label:<32}{cells[0]:>24}{cells[1]:>24}")


if __name__ == "__main__":
    main()
