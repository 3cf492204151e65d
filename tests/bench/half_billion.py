"""Measures the memory and time of whole runs with half a billion parameters: a random Qwen2 of the 0.5B shape in
bfloat16.

    python -m tests.bench.half_billion [--engine transformers] [--placement apart]

Each run trains all parameters for three steps, publishes every version, saves a checkpoint and exports the model. By
default there are four runs: with the engines transformers and vllm, and with the services apart and colocated. Memory
is the proportional set size, as in `bench_colocate`, divided by the number of parameters: the peak of every process
while the run loads, publishes its first version, trains, saves and exports, beside the number of the plan
(`shared/topology/memory_plan.py`). The training state alone is 18 bytes a parameter: weights (2), float32 masters (4),
float32 gradients (4) and two moments (8).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from shared.rundir import RunDir, checkpoint_steps
from shared.topology import load
from shared.topology.capacity import Parameters
from shared.topology.memory_plan import ALWAYS, Phase, Use, uses
from shared.topology.model_files import parameter_count
from tests.bench.bench_colocate import MODES, QUICKSTART, Memory, service_of, watching
from tests.bench.random_model import save_random_qwen2
from tests.bench.turns import heading
from tests.integration.whole_cluster import cluster

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
ALL = "all processes"
WINDOWS = ("load", "publish", "steps", "checkpoint", "export")
PROCESS = "{:<28}" + "{:>20}" * len(WINDOWS)


@dataclass
class Run:
    """The figures of one run."""

    memory: Memory
    rows: list[dict[str, float]]
    times: Sequence[float]
    """Times at which the windows begin, and the end of the run."""
    planned: dict[str, dict[str, int]]
    parameters: int


def process_of(command: Sequence[str]) -> str:
    """Return the process that a command line starts, such as `policy_trainer.worker/0`."""
    instance = command[command.index("--instance") + 1] if "--instance" in command else ""
    return f"{service_of(command)}/{instance}".removesuffix("/")


def planned(found: Iterable[Use]) -> dict[str, dict[str, int]]:
    """Return the bytes in the memory of hosts that the plan has for each process in each window.

    The first version is published before the first step, so there are neither gradients nor moments yet. Nothing is
    planned for the export.
    """
    plan: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(WINDOWS, 0))
    for use in found:
        if use.place.gpu:
            continue
        process = f"{use.key[0].replace('policy-trainer-', 'policy_trainer.')}/{use.key[1]}"
        windows = {
            "load": Phase.START in use.phases,
            "publish": use.phases == ALWAYS or use.what == "publishing",
            "steps": Phase.STEPS in use.phases,
            "checkpoint": Phase.CHECKPOINTS in use.phases,
        }
        for window, there in windows.items():
            plan[process][window] += use.nbytes if there else 0
    return dict(plan)


def measure(model: Path, folder: Path, settings: list[str], limit_s: float) -> Run:
    """Run to the end. If the run fails, exit with its output."""
    begun = time.time()
    given = [*SETTINGS, f"policy.model={model}", *settings]
    with cluster(QUICKSTART, folder, *given, limit_s=limit_s) as run, watching(run, process_of) as memory:
        run.wait_for("the first step", lambda: len(run.rows()) >= 1)
        first = run.rows()[0]
        trained_first = time.time() - (first["time/step"] - first["time/wait_batch"])
        run.wait_for("the last step", lambda: len(run.rows()) >= STEPS)
        trained = time.time()
        run.wait_for("the checkpoint", lambda: STEPS in checkpoint_steps(run.run.checkpoints))
        saved = time.time()
        if run.end():
            sys.exit(run.output())
        loaded = _loaded(run.run)
        topology, elements = load(run.run.topology), parameter_count(str(model))
        times = (begun, loaded, trained_first, trained, saved, time.time())
        return Run(memory, run.rows(), times, planned(uses(topology, {"policy": Parameters(elements)}, {})), elements)


def _loaded(run: RunDir) -> float:
    """Return the time at which all ranks of the trainer had loaded the model."""
    lines = map(json.loads, run.log_file("policy-trainer", 0).read_text().splitlines())
    return next(
        datetime.fromisoformat(line["timestamp"]).timestamp() for line in lines if line["event"] == "workers loaded"
    )


def show(name: str, run: Run) -> None:
    """Print the run's times, and the peaks of every process and of all together in every window, in bytes a parameter,
    with the plan's number in brackets."""
    begun, *_, ended = run.times
    seconds = ", ".join(f"{row['time/step']:.0f}" for row in run.rows)
    print(f"\n{name}: {run.parameters:,} parameters; steps {seconds} s, all {ended - begun:.0f} s")
    print(PROCESS.format("bytes a parameter (plan)", *WINDOWS))
    windows = list(zip(WINDOWS, itertools.pairwise(run.times), strict=True))
    for process in (ALL, *sorted({each for _, found in run.memory.looks for each in found})):
        plan = run.planned.get(process)
        cells = []
        for window, (since, until) in windows:
            most = peak_bytes(run.memory, process, since, until)
            cell = "-" if most is None else f"{most / run.parameters:.1f}"
            cells.append(cell + (f" ({plan[window] / run.parameters:.1f})" if plan is not None else ""))
        print(PROCESS.format(process, *cells))
    sys.stdout.flush()


def peak_bytes(memory: Memory, process: str, since: float, until: float) -> int | None:
    """Return the peak of one process, or of ALL together, or None if memory was not read in that time."""
    looks = [found for at, found in memory.looks if since <= at <= until]
    return max((sum(each.values()) if process == ALL else each.get(process, 0) for each in looks), default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of whole runs with half a billion parameters.")
    parser.add_argument("--engine", choices=ENGINES, action="append", help="this engine only")
    parser.add_argument("--placement", choices=list(MODES), action="append", help="this placement only")
    parser.add_argument("--model", type=Path, help="a model folder instead of the random model")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds after which a run counts as failed")
    args = parser.parse_args()
    print(heading())
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        model = args.model.absolute() if args.model is not None else folder / "model"
        if args.model is None:
            model.mkdir()
            save_random_qwen2(model)
        for engine, placement in itertools.product(args.engine or ENGINES, args.placement or MODES):
            settings = [f"services.rollout.engine={engine}", *MODES[placement]]
            show(
                f"{engine}, {placement}",
                measure(model, folder / f"{engine}-{placement}", settings, args.limit_s),
            )


if __name__ == "__main__":
    main()
