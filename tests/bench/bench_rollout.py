"""Measures the performance of the rollout side as ratios, with one command on this machine: running ahead, weight sync,
and the whole system against TRL on long and short answers. Both sides of a ratio do the same work.

    python -m tests.bench.bench_rollout                (TRL needs `make peers`)
    python -m tests.bench.bench_rollout --only ahead|sync|trl
    python -m tests.bench.bench_rollout --only trl --answers long|short
    python -m tests.bench.bench_rollout --sweep --answers long|short      find TRL's fastest settings for these answers

ahead  the quickstart without its reference, with one sampling and one training process of one thread each:
       samples/s with staleness 1 over samples/s with staleness 0.
sync   a version of --sync-mib from the trainer's memory into the engine's: put into a real store, mapped, loaded and
       verified by its canary, over real messages. The ratio is the time of one copy of the same number of bytes
       divided by the time of a sync, taking the fastest of each; the target is 0.25 at 1 GiB. The same is measured with
       a vLLM engine, which copies and packs the weights.
trl    GRPO on answers of up to 128 tokens with widely spread lengths: a random model of the quickstart's shape ends an
       answer after about 64 tokens, so lengths are nearly geometric. Both sides compute the KL to the reference; the
       cluster has two processes, plus the reference, with one thread each (but see `against_trl`). The learning rate
       is so low that lengths do not change. The same is measured with answers of up to 8 tokens, nearly all of which
       are truncated.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.bench import weight_sync
from tests.bench.against_trl import LONG, PEER_PYTHON, SHORT, compare, run_sweep
from tests.bench.cluster_run import SAMPLES_PER_STEP, BenchError, measured_cores, run_cluster
from tests.bench.plot_staleness import NO_REFERENCE
from tests.bench.random_model import save_random_of
from tests.bench.turns import TURNS, by_turns, heading, order_line, ratios, spread

FORM = "{:<34}{:>24}{:>20}{:>26}"
COOL_DOWN = 3
WORKS = {"long": LONG, "short": SHORT}
SWEEP_STEPS, SWEEP_WARM_UP = {"long": 6, "short": 12}, 2


def line(what: str, figure: str, ratio: str = "", note: str = "") -> None:
    print(FORM.format(what, figure, ratio, note).rstrip(), flush=True)


# --------------------------------------------------------------------------------------------------- running ahead


def ahead_rate(staleness: int, steps: int, warm_up: int, limit_s: float) -> tuple[float, float]:
    """Return samples/s between the rows of steps `warm_up` and `steps`, and the cores that other programs used.

    Raises BenchError.
    """
    settings = (*NO_REFERENCE, f"staleness={staleness}")
    with tempfile.TemporaryDirectory(prefix="bench-") as name, measured_cores() as cores:
        rows = run_cluster(steps + COOL_DOWN, Path(name), limit_s, settings=settings)[:steps]
    seconds = rows[-1].at_s - rows[warm_up - 1].at_s
    return SAMPLES_PER_STEP * (steps - warm_up) / seconds, cores.others


def ahead(steps: int, warm_up: int, turns: int, limit_s: float) -> None:
    sides = {f"staleness {each}": partial(ahead_rate, each, steps, warm_up, limit_s) for each in (0, 1)}
    print(f"running ahead\n{heading()}\n{order_line(sides, turns)}")
    results = by_turns(sides, turns)
    rates = {side: spread(rate for rate, _ in runs) for side, runs in results.items()}
    for side, found in rates.items():
        others = max(each for _, each in results[side])
        line(side, f"{found.text('.0f')} /s", "", f"others' cores {others:.2f}")
    found = ratios(rates["staleness 1"].values, rates["staleness 0"].values)
    line("staleness 1 over 0", "", found.text(), "target 1.25")


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Running ahead, weight sync and TRL, in ratios.")
    parser.add_argument("--only", choices=("ahead", "sync", "trl"))
    parser.add_argument("--answers", choices=tuple(WORKS), nargs="+", default=list(WORKS), help="answers of trl")
    parser.add_argument(
        "--steps",
        type=int,
        default=SHORT.steps,
        help="steps of each run of ahead and of short answers, warm-up included",
    )
    parser.add_argument(
        "--long-steps", type=int, default=LONG.steps, help="steps of each run of trl on long answers, warm-up included"
    )
    parser.add_argument("--warm-up", type=int, default=LONG.warm_up, help="number of initial steps to leave out")
    parser.add_argument("--turns", type=int, default=TURNS, help="runs of each side of ahead and trl")
    parser.add_argument("--sync-mib", type=int, nargs="+", default=[104, 512, 1024])
    parser.add_argument("--syncs", type=int, default=8, help="syncs of each size, each after a copy of as many bytes")
    parser.add_argument("--threads", type=int, default=2, help="threads of trainer and engine in sync")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds after which a run counts as failed")
    parser.add_argument("--sweep", action="store_true", help="find TRL's fastest settings and record them")
    args = parser.parse_args()
    if (args.sweep or args.only in (None, "trl")) and not PEER_PYTHON.exists():
        sys.exit("bench_rollout: .venv-trl is missing; run `make peers` first, or use --only")
    try:
        if args.sweep:
            for each in args.answers:
                shorter = dataclasses.replace(WORKS[each], steps=SWEEP_STEPS[each], warm_up=SWEEP_WARM_UP)
                run_sweep(shorter, len(os.sched_getaffinity(0)), args.limit_s)
            return
        if args.only in (None, "ahead"):
            ahead(args.steps, args.warm_up, args.turns, args.limit_s)
        if args.only in (None, "sync"):
            print(f"weight sync\n{heading()}\norder     {args.syncs} syncs, a copy of as many bytes before each")
            for mib in args.sync_mib:
                sync(mib, args.syncs, args.threads)
        if args.only in (None, "trl"):
            steps = {"long": args.long_steps, "short": args.steps}
            for each in args.answers:
                work = dataclasses.replace(WORKS[each], steps=steps[each], warm_up=args.warm_up)
                compare(work, args.turns, args.limit_s)
    except BenchError as error:
        sys.exit(f"bench_rollout: {error}")


if __name__ == "__main__":
    main()
