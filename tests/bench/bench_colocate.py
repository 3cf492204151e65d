"""Measures what colocation saves and costs: the peak memory of the node and the seconds per step, compared with
separate placement.

    python -m tests.bench.bench_colocate [--turns 3]

The same run is repeated with each placement in turn on a model of about 63 million parameters: separate (every service
keeps everything) and colocated (policy, reference and engine take turns). Memory is the proportional set size
(`/proc/<pid>/smaps_rollup`), which counts a shared page once, summed over all processes of the run about ten times per
second; shared memory that no process has mapped is not counted. On a CPU, the device memory is the host's memory, so
this figure stands in for the memory of a GPU. In a small process, libraries take up most of the memory. A separate run
of the quickstart's 0.8M model measures them, and the ratio of the memory above that baseline compares the models alone.

All runs sample with the same versions and seeds, so their losses must be equal; this is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import psutil

from tests.bench.turns import TURNS, by_turns, heading, order_line, ratios, spread
from tests.integration.whole_cluster import Cluster, cluster

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "launch" / "topologies" / "quickstart.yaml"
TINY = ROOT / "launch" / "topologies" / "models" / "tiny-qwen3"
STEPS = 4
SIZES = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
OVERRIDES = [
    f"run.steps={STEPS}",
    "staleness=0",
    "data.eval={}",
    "algorithm.tasks_per_step=8",
    "algorithm.group_size=4",
    "algorithm.num_iterations=2",
    "services.policy-trainer.max_tokens_per_micro_batch=512",
    "services.reference.max_tokens_per_micro_batch=512",
    "services.batch-store.memory=2GiB",
    "checkpoint.every=100",
    "optimizer.lr=1e-5",
]
MODES = {"apart": [], "colocated": ["placement.colocate=[policy-trainer, reference, rollout]"]}
LOOK_EVERY_S = 0.1
LIMIT_S = 280.0
MIB = 1 << 20
FORM = "{:<52}{:>22}{:>22}{:>22}"


@dataclass
class Memory:
    """Proportional set sizes of a run's processes by service and wall-clock time."""

    looks: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def peak(self, until: float, since: float = 0.0) -> tuple[int, dict[str, int]]:
        """Return the peak number of bytes of all processes together, and the number of bytes of each process at that
        time."""
        within = [found for at, found in self.looks if since <= at <= until]
        most = max(within, key=lambda found: sum(found.values()))
        return sum(most.values()), most


@dataclass
class Result:
    memory: Memory
    rows: list[dict[str, float]]
    phases: list[tuple[float, str]]
    ready_at: float
    last_step_at: float
    """Time at which the last step but one was committed; the last checkpoint and the export follow."""


def make_model(folder: Path) -> int:
    """Create a Qwen3 model with the dimensions in `SIZES` and the quickstart's tokenizer. Return the model's number of
    parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(TINY, folder)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["full_attention"] * SIZES["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, **SIZES}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))
    model.save_pretrained(folder)
    return sum(each.numel() for each in model.parameters())


def service_of(command: Sequence[str]) -> str:
    """Return the service that a command line starts, such as `policy_trainer.worker`, or `other`."""
    return next((each for each in command if each.startswith("services.")), "other").removeprefix("services.")


@contextlib.contextmanager
def watching(run: Cluster, name_of: Callable[[Sequence[str]], str] = service_of) -> Iterator[Memory]:
    """Sample the memory of the run's processes, by the names of their command lines, on a thread until the end of the
    block."""
    memory, over = Memory(), threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY_S):
            found: dict[str, int] = defaultdict(int)
            processes: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):
                processes = psutil.Process(run.process.pid).children(recursive=True)
            for process in processes:
                with contextlib.suppress(psutil.Error, OSError, StopIteration):
                    found[name_of(process.cmdline())] += _pss_bytes(process.pid)
            if found:
                memory.looks.append((time.time(), dict(found)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield memory
    finally:
        over.set()
        thread.join()


def _pss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure(model: Path, folder: Path, extra: list[str]) -> Result:
    """Measure one run from start to end."""
    with (
        cluster(QUICKSTART, folder, *OVERRIDES, f"policy.model={model}", *extra, limit_s=LIMIT_S) as run,
        watching(run) as memory,
    ):
        run.wait_for("the first step", lambda: len(run.rows()) >= 1)
        ready_at = time.time()
        run.wait_for("the last step but one", lambda: len(run.rows()) >= STEPS - 1)
        last_step_at = time.time()
        status = run.end()
        if status:
            sys.exit(run.output())
        phases = [(_seconds(line["timestamp"]), line["phase"]) for line in run.log("scheduler") if "phase" in line]
        return Result(memory, run.rows(), phases, ready_at, last_step_at)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def by_phase(result: Result) -> dict[str, dict[str, int]]:
    """Return the number of bytes of each service at the peak of each phase, between the first step and the last but
    one. The start and the end of a run, when memory also changes, are left out."""
    peaks: dict[str, dict[str, int]] = {}
    for at, found in result.memory.looks:
        if result.ready_at <= at <= result.last_step_at:
            phase = next((name for since, name in reversed(result.phases) if since <= at), "")
            if sum(found.values()) > sum(peaks.get(phase, {}).values()):
                peaks[phase] = found
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Memory and time of a colocated run, compared with separate placement."
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="runs of each placement")
    args = parser.parse_args()
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        parameters = make_model(folder / "model")
        print(heading())
        print(f"model     {parameters / 1e6:.0f} M parameters, {parameters * 4 / MIB:.0f} MiB of float32")
        print(order_line(MODES, args.turns), flush=True)
        sides = {
            name: lambda extra=extra: measure(folder / "model", folder / f"run-{next(numbers)}", extra)
            for name, extra in MODES.items()
        }
        results = by_turns(sides, args.turns)
        tiny = measure(TINY, folder / "tiny", MODES["apart"])
    apart, colocated = results["apart"], results["colocated"]
    end = float("inf")
    print(FORM.format("peak MiB, all processes", "apart", "colocated", "ratio"))
    line(
        "whole run, with last checkpoint and export",
        *([each.memory.peak(end)[0] for each in side] for side in results.values()),
    )
    steps = [[each.memory.peak(each.last_step_at, each.ready_at) for each in side] for side in results.values()]
    line("between the first step and the last but one", *([peak for peak, _ in side] for side in steps))
    floor = tiny.memory.peak(tiny.last_step_at, tiny.ready_at)[0]
    line("  the same, above a run of the 0.8M model", *([peak - floor for peak, _ in side] for side in steps))
    for name in sorted({name for side in steps for _, found in side for name in found}):
        line(f"  of which, at that moment: {name}", *([found.get(name, 0) for _, found in side] for side in steps))
    large = ("policy_trainer.worker", "reference", "rollout")
    first = "colocated, first turn, peak MiB while the phase is"
    print(f"\n{first:<52}{'all':>9}" + "".join(f"{name:>24}" for name in large))
    for phase, found in sorted(by_phase(colocated[0]).items(), key=lambda item: -sum(item[1].values())):
        each = "".join(f"{found.get(name, 0) / MIB:>24.0f}" for name in large)
        print(f"  {phase:<50}{sum(found.values()) / MIB:>9.0f}{each}")
    seconds = [
        spread(statistics.median(row["time/step"] for row in each.rows[1:]) for each in side)
        for side in results.values()
    ]
    found_ratio = ratios(seconds[1].values, seconds[0].values).text()
    print(
        "\n"
        + FORM.format("seconds per step (median from the second on)", seconds[0].text(), seconds[1].text(), found_ratio)
    )
    keys = ("reward/mean", "loss/policy", "policy/grad_norm")
    runs = [[[row[key] for key in keys] for row in each.rows] for each in (*apart, *colocated)]
    same = "equal" if all(run == runs[0] for run in runs) else "DIFFERENT"
    print(f"rewards, losses and gradient norms of all {STEPS} steps of {len(runs)} runs are {same}")


def line(what: str, apart: list[int], colocated: list[int]) -> None:
    """Print a row of the table: the MiB that the runs of each placement use, and the ratio of the two in each turn."""
    columns = [spread(peak / MIB for peak in side).text(".0f") for side in (apart, colocated)]
    ratio = ratios(colocated, apart).text() if all(apart) else ""
    print(FORM.format(what, *columns, ratio).rstrip())


if __name__ == "__main__":
    main()
