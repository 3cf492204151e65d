"""Compares the quickstart's speed with that of TRL's GRPOTrainer, in alternating runs on this machine. The
quickstart runs without its evaluations; its staleness and number of steps are chosen, and at staleness 0 the numbers of
threads and rollouts (`against_trl`).

    python -m tests.bench.bench_quickstart                (needs `make peers`)
    python -m tests.bench.bench_quickstart --sweep        find TRL's fastest settings and record them
    python -m tests.bench.bench_quickstart --start-up     seconds from the command to the first training row

Both sides train the quickstart's model on the same rows with 512 samples per step. The cluster also saves its
checkpoints; TRL does not. If samples in a group share a prefix, the cluster computes it only once
(`shared.model.tree`); TRL pads every sample. The ratios therefore hold only for work of this kind: short answers that
are similar within a group. `against_trl` describes how both sides are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

from tests.bench.against_trl import PEER_PYTHON, QUICKSTART, Work, compare, run_sweep
from tests.bench.cluster_run import BenchError, run_cluster
from tests.bench.turns import TURNS, heading, order_line, spread

SWEEP_STEPS, SWEEP_WARM_UP = 12, 2


def start_up_s(limit_s: float) -> float:
    """Return the seconds from the command to the first training row. Raises BenchError as `run_cluster` does."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        return run_cluster(3, Path(name), limit_s, enough=bool)[0].at_s


def run(work: Work, args: argparse.Namespace) -> None:
    if args.start_up:
        print(heading())
        print(order_line(["the quickstart"], args.turns))
        seconds = spread(start_up_s(args.limit_s) for _ in range(args.turns))
        print(f"command to first training row  {seconds.text('.1f')} s")
    elif args.sweep:
        shorter = dataclasses.replace(work, steps=SWEEP_STEPS, warm_up=SWEEP_WARM_UP)
        run_sweep(shorter, len(os.sched_getaffinity(0)), args.limit_s)
    else:
        compare(work, args.turns, args.limit_s, args.only)


def main() -> None:
    parser = argparse.ArgumentParser(description="The quickstart against TRL's GRPOTrainer, in samples per second.")
    parser.add_argument("--steps", type=int, default=QUICKSTART.steps, help="steps of each run, warm-up included")
    parser.add_argument("--warm-up", type=int, default=QUICKSTART.warm_up, help="number of initial steps to leave out")
    parser.add_argument("--turns", type=int, default=TURNS, help="runs of each side")
    parser.add_argument("--only", choices=("cluster", "trl"), help="measure one side only, without a ratio")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds after which a run counts as failed")
    parser.add_argument("--sweep", action="store_true", help="find TRL's fastest settings and record them")
    parser.add_argument("--start-up", action="store_true", help="measure only the seconds to the cluster's first row")
    args = parser.parse_args()
    if not 1 <= args.warm_up < args.steps:
        parser.error(f"--warm-up {args.warm_up} must be at least 1 and below --steps {args.steps}")
    if args.only != "cluster" and not args.start_up and not PEER_PYTHON.exists():
        sys.exit("bench_quickstart: .venv-trl is missing; run `make peers` first")
    try:
        run(dataclasses.replace(QUICKSTART, steps=args.steps, warm_up=args.warm_up), args)
    except BenchError as error:
        sys.exit(f"bench_quickstart: {error}")


if __name__ == "__main__":
    main()
