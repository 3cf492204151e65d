"""Measures how a run's processes grow: the ratio of their resident memory late in a run of the quickstart to that early
in the run.

    python -m tests.bench.growth [--steps 300] [--from 100] [--turns 1]

The quickstart runs without its evaluations, and each process is sampled several times a second. Each figure is the
median over WINDOW steps: the steps after `--from`, or the last steps of the run. WINDOW is the interval between
checkpoints, during which a store fills up and is emptied again. Resident memory (RSS) includes shared memory that a
process has mapped and touched.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.cluster_run import Arrival, BenchError, run_cluster
from tests.bench.turns import heading, order_line, spread

MIB = 1 << 20
WINDOW = 20
"""Number of steps in a median: `checkpoint.every` of the quickstart."""
SPARE = "shared.actor.spare"


@dataclass(frozen=True)
class Growth:
    """Median resident bytes of one process early and late in the run."""

    early: float
    late: float

    @property
    def share(self) -> float:
        return self.late / self.early - 1


class Watch:
    """Resident bytes by pid of the launcher and all its descendants, at every sample.

    Spares are excluded, because on a busy machine they may be importing at any step.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.looks: list[tuple[int, dict[int, int]]] = []

    def look(self, launcher: int, arrivals: list[Arrival]) -> None:
        """Record the current memory of all processes, after as many steps as `arrivals` contains."""
        found: dict[int, int] = {}
        try:
            processes = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                command = process.cmdline()
                if SPARE in command:
                    continue
                found[process.pid] = process.memory_info().rss
                if command:  # A child has its parent's command line until it executes its program.
                    self.names[process.pid] = name_of(command)
            except psutil.NoSuchProcess:
                continue
        self.looks.append((len(arrivals), found))

    def growth(self, first: int, last: int) -> dict[str, Growth]:
        """Return the growth of every process from the WINDOW steps after `first` to the WINDOW steps before `last`.

        Raises BenchError if a process of the run was replaced in the meantime, because its growth cannot be measured.
        """
        early = medians(self.looks, first, first + WINDOW)
        late = medians(self.looks, last - WINDOW, last)
        if early.keys() != late.keys():
            changed = sorted({self.names.get(pid, str(pid)) for pid in early.keys() ^ late.keys()})
            raise BenchError(f"processes came or went between steps {first} and {last}: {', '.join(changed)}")
        if not early:
            raise BenchError(f"no process was sampled between steps {first} and {first + WINDOW}")
        return {self.names[pid]: Growth(early[pid], late[pid]) for pid in early}


def name_of(command: list[str]) -> str:
    """Return a name such as `services.rollout/0`, or the name of the script or program if the process is not a
    service."""
    module = next((part for part in command if part.startswith(("services.", "launch."))), "")
    script = next((Path(part).name for part in command if part.endswith(".py")), "")
    instance = command[command.index("--instance") + 1] if "--instance" in command else ""
    return "/".join(part for part in (module or script or " ".join(command[:1]), instance) if part)


def medians(looks: list[tuple[int, dict[int, int]]], after: int, upto: int) -> dict[int, float]:
    """Return the median size of each process that exists in all samples of steps `after` < step <= `upto`, by pid."""
    within = [found for step, found in looks if after < step <= upto]
    by_pid: Mapping[int, list[int]] = defaultdict(list)
    for found in within:
        for pid, size in found.items():
            by_pid[pid].append(size)
    return {pid: statistics.median(sizes) for pid, sizes in by_pid.items() if len(sizes) == len(within)}


def measure(steps: int, first: int, limit_s: float) -> dict[str, Growth]:
    """Return the growth of each process by name over the steps from `first` to `steps`. Raises BenchError."""
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        run_cluster(steps + 1, Path(name), limit_s, watch=watch.look)
    return watch.growth(first, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="Growth of the processes of a run of the quickstart.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--from", dest="first", type=int, default=100, help="step from which growth is measured")
    parser.add_argument("--turns", type=int, default=1, help="runs")
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which a run counts as failed")
    args = parser.parse_args()
    if not 0 < args.first <= args.steps - 2 * WINDOW:
        parser.error(f"--from {args.first} must be above 0 and {2 * WINDOW} steps below --steps {args.steps}")
    print(heading())
    print(order_line(["the quickstart"], args.turns), flush=True)
    try:
        runs = [measure(args.steps, args.first, args.limit_s) for _ in range(args.turns)]
    except BenchError as error:
        sys.exit(f"growth: {error}")
    print(f"{f'MiB resident, steps {args.first} to {args.steps}':<40}{'early':>26}{'late':>26}{'growth, %':>24}")
    for name in sorted(runs[0]):
        mine = [run[name] for run in runs]
        early, late, share = (
            spread(each.early / MIB for each in mine),
            spread(each.late / MIB for each in mine),
            spread(100 * each.share for each in mine),
        )
        print(f"{name:<40}{early.text('.1f'):>26}{late.text('.1f'):>26}{share.text('.1f'):>24}")
    print(f"{'maximum':<92}{spread(100 * max(each.share for each in run.values()) for run in runs).text('.1f'):>24}")


if __name__ == "__main__":
    main()
