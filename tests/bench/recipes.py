"""Runs recipes as they are, one after the other, and prints how much reward they gain (docs/recipes.md).

    python -m tests.bench.recipes grpo tools                 recipes by name; `sft` and `colocate` count as recipes
    python -m tests.bench.recipes tools --steps 20

The reward is the mean of the first and of the last WINDOW steps; the held-out reward is that of the first and last
evaluation. Minutes count from the command to its end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.cluster_run import ROOT, BenchError, failed, running
from tests.bench.turns import heading

TOPOLOGIES = ROOT / "launch" / "topologies"
WINDOW = 5
COLUMNS = ("recipe", "steps", "reward", "held-out reward", "truncated", "minutes")


def topology(name: str) -> Path:
    """Return the file of a recipe. Raises BenchError."""
    files = [folder / f"{name}.yaml" for folder in (TOPOLOGIES / "recipes", TOPOLOGIES)]
    for file in files:
        if file.is_file():
            return file
    raise BenchError(f"{name}: no recipe: {files[0].relative_to(ROOT)} does not exist")


def measured(name: str, settings: list[str], limit_s: float) -> str:
    """Run a recipe and return its line of the table. Raises BenchError."""
    file = topology(name)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run, output = Path(folder) / "run", Path(folder) / "run.out"
        command = [sys.executable, "-m", "launch.cluster", str(file), "--run-dir", str(run)]
        command += [word for setting in settings for word in ("--set", setting)]
        began = time.monotonic()
        with running(command, output) as process:
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise failed(f"{name}: not done after {limit_s:g} s (--limit-s)", output) from None
            if status:
                raise failed(f"{name}: exit {status}", output)
        minutes = (time.monotonic() - began) / 60
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]

    def ends(values: list[float]) -> str:
        if not values:
            return ""
        window = min(WINDOW, len(values))
        return f"{statistics.fmean(values[:window]):.2f} → {statistics.fmean(values[-window:]):.2f}"

    def of(key: str) -> list[float]:
        return [row[key] for row in steps if key in row]

    scores = [row[key] for row in rows for key in row if key.startswith("eval/") and key.endswith("/reward")]
    held_out = f"{scores[0]:.2f} → {scores[-1]:.2f}" if scores else ""
    cells = (name, f"{len(steps)}", ends(of("reward/mean")), held_out, ends(of("rollout/truncated_fraction")))
    return f"| {' | '.join(cells)} | {minutes:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="How much reward recipes gain with their own steps.")
    parser.add_argument("recipes", nargs="+", metavar="NAME")
    parser.add_argument("--steps", type=int, help="number of steps instead of the recipe's own")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds after which a run counts as failed")
    args = parser.parse_args()
    print(f"{heading()}\n\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    try:
        for name in args.recipes:
            print(measured(name, [f"run.steps={args.steps}"] if args.steps else [], args.limit_s), flush=True)
    except BenchError as error:
        sys.exit(f"recipes: {error}")


if __name__ == "__main__":
    main()
