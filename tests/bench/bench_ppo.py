"""Measures what a critic costs: PPO's seconds per step over those of GRPO for the same samples, and the share of a step
that credit takes.

    python -m tests.bench.bench_ppo [--answers long|short] [--turns 3]

Both sides train on groups of 8 without a reference, at staleness 1, with one thread in each process; PPO adds the
critic, which has the policy's size. Answers are those of `against_trl`: up to 128 tokens of a random model, or up to 8.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.bench.against_trl import LONG, SHORT, Work
from tests.bench.cluster_run import BenchError, run_cluster
from tests.bench.plot_staleness import NO_REFERENCE
from tests.bench.random_model import save_random
from tests.bench.turns import TURNS, by_turns, heading, order_line, ratios, spread

WORKS = {"long": LONG, "short": SHORT}
SIDES = {
    "GRPO": (),
    "PPO": ("algorithm.advantage={name: gae, lam: 0.95}", "critic={optimizer: {lr: 1.0e-3}}"),
}
LIMIT_S = 500.0


def measure(work: Work, model: Path, more: tuple[str, ...]) -> tuple[float, float]:
    """Return the seconds per step after the warm-up, and the median share of a step that credit takes."""
    settings = ["staleness=1", *work.settings(model), *NO_REFERENCE, *more]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        arrivals = run_cluster(work.steps, Path(name), LIMIT_S, settings=settings)
    seconds = (arrivals[-1].at_s - arrivals[work.warm_up - 1].at_s) / (work.steps - work.warm_up)
    rows = [arrival.row for arrival in arrivals[work.warm_up :]]
    return seconds, statistics.median(row.get("time/credit", 0.0) / row["time/step"] for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--answers", choices=WORKS, default="long")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    work = WORKS[options.answers]
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model = Path(name) / "model"
        save_random(model)
        print(f"{work.name}\n{heading()}\n{order_line(SIDES, options.turns)}", flush=True)
        try:
            results = by_turns(
                {side: partial(measure, work, model, more) for side, more in SIDES.items()}, options.turns
            )
        except BenchError as error:
            print(error, file=sys.stderr)
            return 1
    seconds = {side: [one for one, _ in runs] for side, runs in results.items()}
    for side, values in seconds.items():
        print(f"{side:<24}{spread(values).text('.3f')} s/step")
    print(f"{'PPO over GRPO':<24}{ratios(seconds['PPO'], seconds['GRPO']).text()}")
    print(f"{'credit, share of a step':<24}{spread(share for _, share in results['PPO']).text('.3f')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
