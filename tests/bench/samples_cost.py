"""Measures the CPU time of the quickstart, or of a run with longer answers, with and without recorded samples.

    python -m tests.bench.samples_cost [--long] [--steps 60] [--warm-up 10] [--turns 3] [--set KEY=VALUE]...

A figure is the user and system time of a process between two metrics rows, per step. "more with samples" is the CPU
time of all processes with samples divided by that without them, minus 1. The recorder's own share is exact. What
samples cost in the other processes is less than the noise of a busy machine, so compare several turns. The monitor's
share is the cost of telemetry.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.bench.against_trl import LONG, QUICKSTART, model_of
from tests.bench.cluster_run import BenchError, run_cluster
from tests.bench.cpu_shares import CpuTimes
from tests.bench.turns import TURNS, by_turns, heading, order_line, ratios, spread

WITHOUT, WITH = "without samples", "with samples"
RECORDER, MONITOR = "services.recorder", "services.monitor"


def measure(steps: int, warm_up: int, limit_s: float, settings: list[str]) -> dict[str, float]:
    """Return the CPU seconds per step of each process. Raises BenchError."""
    times = CpuTimes(warm_up, steps)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        run_cluster(steps + 1, Path(name), limit_s, settings=settings, watch=times.look)
    return {name: seconds / (steps - warm_up) for name, seconds in times.used().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of the quickstart with and without recorded samples.")
    parser.add_argument("--long", action="store_true", help="answers of up to 128 tokens, by a random model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=10, help="number of initial steps to leave out")
    parser.add_argument("--turns", type=int, default=TURNS, help="runs of each side")
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds after which a run counts as failed")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="a setting of the runs with samples"
    )
    args = parser.parse_args()
    if not 0 < args.warm_up < args.steps:
        parser.error(f"--warm-up {args.warm_up} must be above 0 and below --steps {args.steps}")
    print(heading())
    print(order_line([WITHOUT, WITH], args.turns), flush=True)
    run = partial(measure, args.steps, args.warm_up, args.limit_s)
    work = LONG if args.long else QUICKSTART
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        settings = work.settings(model_of(work, Path(folder)))
        sides = {
            WITHOUT: partial(run, [*settings, "monitor.samples=null"]),
            WITH: partial(run, [*settings, *args.settings]),
        }
        try:
            found = by_turns(sides, args.turns)
        except BenchError as error:
            sys.exit(f"samples_cost: {error}")
    print(f"{'CPU ms per step':<40}{WITHOUT:>26}{WITH:>26}")
    for name in sorted({each for side in found.values() for each in side[0]}):
        cells = [spread(1000 * each.get(name, 0.0) for each in found[side]).text(".1f") for side in (WITHOUT, WITH)]
        print(f"{name:<40}{cells[0]:>26}{cells[1]:>26}")
    totals = {side: [sum(each.values()) for each in runs] for side, runs in found.items()}
    cells = [spread(1000 * each for each in totals[side]).text(".1f") for side in (WITHOUT, WITH)]
    print(f"{'all processes':<40}{cells[0]:>26}{cells[1]:>26}")
    more = spread(100 * (each - 1) for each in ratios(totals[WITH], totals[WITHOUT]).values)
    print(f"{'more with samples':<40}{more.text('+.2f'):>52} %")
    for label, prefix in (("share of the recorder", RECORDER), ("share of the monitor", MONITOR)):
        shares = (
            100 * sum(seconds for name, seconds in each.items() if name.startswith(prefix)) / sum(each.values())
            for each in found[WITH]
        )
        print(f"{label:<40}{spread(shares).text('.2f'):>52} %")


if __name__ == "__main__":
    main()
