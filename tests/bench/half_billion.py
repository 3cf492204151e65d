"""Measures the memory and time of whole runs with half a billion parameters: a random Qwen2 of the 0.5B shape in
bfloat16.

    python -m tests.bench.half_billion [--engine transformers] [--placement apart]

Each run trains all parameters for three steps, publishes every version, saves a checkpoint and exports the model. By
default there are four runs: with the engines transformers and vllm, and with the services apart and colocated. Memory
is the proportional set size, as in `bench_colocate`, divided by the number of parameters. The training state alone is
16 bytes a parameter: weights (2), float32 masters (4), two moments (8) and gradients (2), as the plan in
`shared/topology/model_memory.py` counts it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.bench.bench_colocate import MODES, QUICKSTART, Memory, watching
from tests.bench.random_model import save_random_qwen2
from tests.bench.turns import heading
from tests.integration.whole_cluster import cluster

PARAMETERS = 494_032_768
STEPS = 3
ENGINES = ("transformers", "vllm")
SETTINGS = (
    f"run.steps={STEPS}",
    "policy.dtype=bfloat16",
    "staleness=0",
    "data.eval={}",
    "sampling.max_new_tokens=16",
    "algorithm.tasks_per_step=8",
    "algorithm.group_size=4",
    "optimizer.lr=1e-5",
    "services.policy-trainer.max_tokens_per_micro_batch=512",
    "services.reference.max_tokens_per_micro_batch=512",
    "services.batch-store.memory=3GiB",
    "checkpoint.memory_every=null",
)
MIB = 1 << 20


@dataclass
class Run:
    """The figures of one run."""

    memory: Memory
    rows: list[dict[str, float]]
    begun: float
    stepped: float
    """Time at which the first step was committed."""
    trained: float
    """Time at which the last step was committed."""
    ended: float


def measure(model: Path, folder: Path, settings: list[str], limit_s: float) -> Run:
    """Run to the end. If the run fails, exit with its output."""
    begun = time.time()
    given = [*SETTINGS, f"policy.model={model}", *settings]
    with cluster(QUICKSTART, folder, *given, limit_s=limit_s) as run, watching(run) as memory:
        run.wait_for("the first step", lambda: len(run.rows()) >= 1)
        stepped = time.time()
        run.wait_for("the last step", lambda: len(run.rows()) >= STEPS)
        trained = time.time()
        if run.end():
            sys.exit(run.output())
        return Run(memory, run.rows(), begun, stepped, trained, time.time())


def show(name: str, run: Run) -> None:
    """Print the run's times and, separately for its start, its steps and its end, the peak memory of all processes and
    of the four services that used the most memory at the peak."""
    seconds = ", ".join(f"{row['time/step']:.0f}" for row in run.rows)
    start, end = run.stepped - run.begun, run.ended - run.trained
    print(f"\n{name}: first step after {start:.0f} s, steps {seconds} s, end {end:.0f} s")
    parts = (
        ("start and first step", run.begun, run.stepped),
        ("steps", run.stepped, run.trained),
        ("end", run.trained, run.ended),
    )
    for part, since, until in parts:
        total, found = run.memory.peak(until, since)
        print(f"  {part:<24}{'all processes':<26}{total / MIB:>8.0f} MiB{total / PARAMETERS:>8.1f} bytes a parameter")
        for service, nbytes in sorted(found.items(), key=lambda item: -item[1])[:4]:
            print(f"  {'':<24}{service:<26}{nbytes / MIB:>8.0f} MiB{nbytes / PARAMETERS:>8.1f}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of whole runs with half a billion parameters.")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="this engine only")
    parser.add_argument("--placement", choices=list(MODES), action="append", help="this placement only")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds after which a run counts as failed")
    args = parser.parse_args()
    print(heading())
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        (folder / "model").mkdir()
        save_random_qwen2(folder / "model")
        for engine, placement in itertools.product(args.engine or ENGINES, args.placement or MODES):
            settings = [f"services.rollout.engine={engine}", *MODES[placement]]
            show(
                f"{engine}, {placement}",
                measure(folder / "model", folder / f"{engine}-{placement}", settings, args.limit_s),
            )


if __name__ == "__main__":
    main()
