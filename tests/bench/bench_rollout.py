"""What the rollout side costs, in ratios of one run on this machine: running ahead, weight sync, the whole system
against TRL on long and short answers. Must never compare sides that did not do the same work.

    python -m tests.bench.bench_rollout                (TRL needs `make peers`)
    python -m tests.bench.bench_rollout --only ahead|sync|trl

ahead  the quickstart without its reference, one process that samples and one that trains, a thread each:
       samples/s with staleness 1 over samples/s with staleness 0.
sync   a version of --sync-mib from the trainer's memory into the engine's: put into a real store, mapped, set, proved
       by its canary, over real messages. The ratio is the seconds of one copy of as many bytes, over those of a sync,
       the fastest of each; target 0.25 at 1 GiB. Then into a vLLM engine, which copies and packs them.
trl    GRPO on answers of up to 128 tokens whose lengths spread widely: a random model of the quickstart's shape ends
       an answer with one token in 64 or so, hence lengths are nearly geometric. KL to the reference on both sides, two
       threads for TRL and two processes of a thread (and the reference's) for the cluster. The learning rate is so low
       that lengths stay what they are. Then the same with answers of up to 8 tokens, nearly all of which are cut there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shared.data import open_source
from tests.bench import weight_sync
from tests.bench.bench_quickstart import (
    PEER,
    PEER_PYTHON,
    SAMPLES_PER_STEP,
    BenchError,
    failed,
    machine,
    measured_cores,
    run_cluster,
    running,
)
from tests.bench.plot_staleness import NO_REFERENCE
from tests.bench.random_model import save_random, save_random_of

FORM = "{:<34}{:>14}{:>10}{:>26}"
COOL_DOWN = 3
GROUP_SIZE = 8


@dataclass(frozen=True)
class Answers:
    """Work for both sides: tasks a step, of GROUP_SIZE answers of up to `tokens`; `target`: ours over TRL."""

    tokens: int
    tasks: int
    target: float

    @property
    def samples(self) -> int:
        return self.tasks * GROUP_SIZE


LONG, SHORT = Answers(128, 16, 3.0), Answers(8, 64, 1.0)


def line(what: str, figure: str, ratio: str = "", note: str = "") -> None:
    print(FORM.format(what, figure, ratio, note).rstrip(), flush=True)


def cluster_rate(
    settings: tuple[str, ...], steps: int, warm_up: int, samples: int, limit_s: float
) -> tuple[float, float]:
    """Samples/s between the rows of steps `warm_up` and `steps`, and cores that others used. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, measured_cores() as cores:
        rows = run_cluster(steps + COOL_DOWN, Path(name), limit_s, enough=lambda _: False, more=settings)[:steps]
    seconds = rows[-1].at_s - rows[warm_up - 1].at_s
    return samples * (steps - warm_up) / seconds, cores.others


# --------------------------------------------------------------------------------------------------- running ahead


def ahead(steps: int, warm_up: int, limit_s: float) -> None:
    rates = []
    for staleness in (0, 1):
        settings = (*NO_REFERENCE, f"staleness={staleness}")
        rate, others = cluster_rate(settings, steps, warm_up, SAMPLES_PER_STEP, limit_s)
        rates.append(rate)
        line(f"staleness {staleness}", f"{rate:.0f} /s", "", f"others' cores {others:.2f}")
    line("staleness 1 over 0", "", f"{rates[1] / rates[0]:.2f}", "target 1.25")


# ----------------------------------------------------------------------------------------------------- weight sync


def sync(mib: int, times: int, threads: int) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model = Path(name) / "large"
        save_random_of(model, mib)
        for dtype in ("float32", "bfloat16"):
            of = "" if dtype == "float32" else f", {dtype}"
            show_syncs(f"sync{of}", weight_sync.measure_alone("transformers", model, times, threads, dtype))
            if importlib.util.find_spec("vllm") is None:
                line("sync into vLLM", "", "", "vLLM is not installed")
            else:
                show_syncs(f"sync into vLLM{of}", weight_sync.measure_alone("vllm", model, times, threads, dtype))


def show_syncs(what: str, measured: weight_sync.Measured) -> None:
    best, copied = measured.fastest(), min(measured.copies)
    line(f"{measured.nbytes / 2**20:.0f} MiB: one memcpy", f"{copied:.3f} s", "", "fastest of both")
    for part, seconds in zip(weight_sync.PARTS, best.parts, strict=True):
        line(f"  {part}", f"{seconds:.3f} s")
    ratio = f"{copied / best.total:.2f}"
    line(f"{what}, of memcpy", f"{best.total:.3f} s", ratio, f"medians {measured.median_ratio():.2f}")
    verify = measured.median_verify_s()
    share = verify / statistics.median(one.total for one in measured.syncs)
    line("  its verification", f"{verify:.3f} s", f"{share:.0%}", "of the sync, medians")


# ------------------------------------------------------------------------------------------------------------- TRL


def trl_rate(
    work: Answers, model: Path, folder: Path, steps: int, warm_up: int, threads: int, limit_s: float
) -> tuple[float, float]:
    """Samples/s of GRPOTrainer and its mean length. Raises BenchError."""
    rows, output = folder / "train.jsonl", folder / "trl.out"
    source = open_source("builtin:addition", where="bench_rollout")
    rows.write_text("".join(json.dumps(source.row(index)) + "\n" for index in range(len(source))))
    command = [str(PEER_PYTHON), str(PEER), "--rows", str(rows), "--model", str(model), "--threads", str(threads)]
    command += ["--steps", str(steps), "--warm-up", str(warm_up), "--samples", str(work.samples)]
    command += ["--micro-batch", str(work.samples), "--max-new-tokens", str(work.tokens), "--learning-rate", "1e-7"]
    with running(command, output) as process:
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise failed(f"TRL: not done after {limit_s:g} s (--limit-s)", output) from None
    if status:
        raise failed(f"TRL: exit {status}", output)
    result = json.loads(output.read_text().splitlines()[-1])
    return result["samples_per_s"], statistics.fmean(result["length_mean"])


def answers(work: Answers, steps: int, warm_up: int, threads: int, limit_s: float) -> None:
    settings = (
        f"algorithm.tasks_per_step={work.tasks}",
        f"sampling.max_new_tokens={work.tokens}",
        "optimizer.lr=1.0e-7",
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model = Path(name) / "model"
        save_random(model)
        ours, others = cluster_rate((*settings, f"policy.model={model}"), steps, warm_up, work.samples, limit_s)
        line(f"rlbus, up to {work.tokens} tokens", f"{ours:.1f} /s", "", f"others' cores {others:.2f}")
        theirs, length = trl_rate(work, model, Path(name), steps, warm_up, threads, limit_s)
    line("TRL GRPOTrainer", f"{theirs:.1f} /s", "", f"mean length {length:.1f}")
    line("rlbus over TRL", "", f"{ours / theirs:.2f}", f"target {work.target:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Running ahead, weight sync and TRL, in ratios.")
    parser.add_argument("--only", choices=("ahead", "sync", "trl"))
    parser.add_argument(
        "--steps", type=int, default=40, help="of each run of ahead and of short answers, warm-up included"
    )
    parser.add_argument(
        "--long-steps", type=int, default=14, help="of each side of trl on long answers, warm-up included"
    )
    parser.add_argument("--warm-up", type=int, default=4, help="first steps, left out")
    parser.add_argument("--sync-mib", type=int, nargs="+", default=[104, 512, 1024])
    parser.add_argument("--syncs", type=int, default=8, help="of each size, a copy of as many bytes before each")
    parser.add_argument("--threads", type=int, default=2, help="of TRL, and of trainer and engine in sync")
    parser.add_argument("--limit-s", type=float, default=600.0, help="a side that takes longer has failed")
    args = parser.parse_args()
    if args.only in (None, "trl") and not PEER_PYTHON.exists():
        sys.exit("bench_rollout: .venv-trl is missing; run `make peers` first, or use --only")
    print(machine())
    line("", "figure", "ratio", "")
    try:
        if args.only in (None, "ahead"):
            ahead(args.steps, args.warm_up, args.limit_s)
        if args.only in (None, "sync"):
            for mib in args.sync_mib:
                sync(mib, args.syncs, args.threads)
        if args.only in (None, "trl"):
            answers(LONG, args.long_steps, args.warm_up, args.threads, args.limit_s)
            answers(SHORT, args.steps, args.warm_up, args.threads, args.limit_s)
    except BenchError as error:
        sys.exit(f"bench_rollout: {error}")


if __name__ == "__main__":
    main()
