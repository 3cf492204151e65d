"""`make bench-train`: prints a table that compares the training step with its peer and its own limits. It asserts
nothing.

    python -m tests.bench.bench_train                (needs `make peers`)
    python -m tests.bench.bench_train --sweep        find TRL's fastest micro-batch and record it

Rows: forward + backward tokens/s of the torch backend and of TRL's trainer on the same samples with lengths spread 1:8
(in separate processes, per CPU second of one thread, alternating); the trainer's matrix products, and oneDNN alone on
the same shapes; a step that trains an adapter compared with one that trains all weights, in turn in one process;
dividing 10,000 samples among 8 ranks; peak memory with the output layer computed in chunks compared
with computing it as a whole, with a vocabulary of 150,000 (both are this project's code: the baseline computes all
logits at once, as most trainers do); with CUDA, the model FLOPs utilisation of forward + backward, in both conventions
(`model_flops`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from proto.messages import BatchMeta, TaskHandle
from services.policy_trainer.dispatch import imbalance
from shared.batch import Batch
from tests.bench.against_trl import PEER_ENVIRONMENT, PEER_PYTHON, RECORD
from tests.bench.cluster_run import MODEL, BenchError, last_line
from tests.bench.peer_sweep import recorded_best, save, search, text
from tests.bench.random_model import save_random_of
from tests.bench.turns import TURNS, by_turns, heading, order_line, ratios, spread, versions

PEER = Path(__file__).parent / "peers" / "trl_update.py"
SAMPLES, PROMPT, SHORTEST, LONGEST = 128, 8, 30, 240
AXES = {"micro_batch": (1, SAMPLES)}
START_MICRO_BATCHES = (2, 8, 32, 128)
RECORDED_AS = "forward and backward"
PARTS = [sys.executable, "-m", "tests.bench.train_parts"]
LIMIT_S = 600.0
MIB_62M = 240
"""MiB of the float32 weights of a model with 62 million parameters."""


@dataclass(frozen=True)
class UpdateSettings:
    """TRL's number of samples per forward and backward pass."""

    micro_batch: int


def our_speed(batch: Path) -> float:
    """Return our tokens per CPU second. Raises BenchError."""
    return float(last_line([*PARTS, "speed", str(batch), str(MODEL)], "forward + backward", LIMIT_S)["tokens_per_s"])


def trl_speed(batch: Path, micro_batch: int) -> float:
    """Return TRL's tokens per CPU second. Raises BenchError."""
    command = [str(PEER_PYTHON), str(PEER), "--model", str(MODEL), "--batch", str(batch)]
    return float(last_line([*command, "--micro-batch", str(micro_batch)], "TRL", LIMIT_S)["tokens_per_s"])


def peak_bytes(how: str) -> float:
    """Return the peak memory of forward and backward with the output layer `chunked` or `whole`. Raises BenchError."""
    return float(last_line([*PARTS, "memory", how], f"memory {how}", LIMIT_S)["peak_bytes"])


def sweep(batch: Path) -> None:
    """Find TRL's fastest micro-batch and record what was measured."""
    measured = search(
        map(UpdateSettings, START_MICRO_BATCHES),
        AXES,
        lambda each: trl_speed(batch, each.micro_batch),
        show=lambda each, run: print(f"{text(each)}: {run.rate:,.0f} tokens/s of CPU", flush=True),
    )
    software = versions(("trl", "torch", "transformers"), PEER_ENVIRONMENT)
    save(RECORD, RECORDED_AS, measured, software, unit="tokens/s of CPU")
    print(recorded_best(RECORD, RECORDED_AS, UpdateSettings, AXES)[1])


def table(batch: Path, turns: int) -> None:
    """Print all rows. Raises BenchError."""
    best, line = recorded_best(RECORD, RECORDED_AS, UpdateSettings, AXES)
    sides = {"rlbus": partial(our_speed, batch), "TRL": partial(trl_speed, batch, best.micro_batch)}
    print(heading(f"{versions(('torch', 'transformers'))}; {versions(('trl', 'torch'), PEER_ENVIRONMENT)}"))
    print(order_line(sides, turns))
    print(f"TRL       {line}", flush=True)
    speeds = {side: spread(runs) for side, runs in by_turns(sides, turns).items()}
    print("| what | value | limit |\n|---|---|---|")
    print(f"| forward + backward, torch backend | {speeds['rlbus'].text(',.0f')} tokens/s of CPU | |")
    print(f"| the same, TRL's GRPOTrainer | {speeds['TRL'].text(',.0f')} tokens/s of CPU | |")
    print(f"| ratio | {ratios(speeds['rlbus'].values, speeds['TRL'].values).text()} | >= 1.5 |", flush=True)
    found = [last_line([*PARTS, "products", str(batch), str(MODEL)], "products", LIMIT_S) for _ in range(turns)]
    speeds = {key: spread(each[key] / 1e9 for each in found) for key in ("flops_per_s", "alone_flops_per_s")}
    print(f"| matrix products in the trainer | {speeds['flops_per_s'].text('.0f')} GFLOP/s | |")
    print(f"| oneDNN alone, the same shapes | {speeds['alone_flops_per_s'].text('.0f')} GFLOP/s | |")
    print(f"| ratio | {spread(each['ratio'] for each in found).text()} | >= 0.5 |")
    for what, key in (("matrix products", "products_share"), ("attention", "attention_share")):
        print(
            f"| share of {what} in the time of the pass | {spread(each[key] for each in found).text()} | |", flush=True
        )
    for name, model, rank in (
        ("quickstart's", MODEL, 8),
        ("quickstart's", MODEL, 32),
        ("a 62M", batch.parent / "62m", 32),
    ):
        if not model.exists():
            save_random_of(model, MIB_62M)
        steps = last_line([*PARTS, "adapter", str(batch), str(model), str(rank)], "adapter", LIMIT_S)
        what = (
            f"CPU seconds of a step that trains an adapter of rank {rank} of {name} model, relative to all its weights"
        )
        print(f"| {what} | {ratios(steps['adapter'], steps['full']).text()} | <= 1 |", flush=True)
    milliseconds, uneven = _slicing()
    print(
        f"| 10,000 samples divided among 8 ranks (imbalance {uneven:.4f}), median of 7 | {milliseconds:.1f} ms | <= "
        "50 ms |"
    )
    peaks = by_turns({how: partial(peak_bytes, how) for how in ("chunked", "whole")}, turns)
    megabytes = {how: spread(peak / 1e6 for peak in found) for how, found in peaks.items()}
    print(f"| peak memory, output layer in chunks | {megabytes['chunked'].text(',.0f')} MB | |")
    print(f"| our own code with the logits of all tokens at once | {megabytes['whole'].text(',.0f')} MB | |")
    print(f"| ratio, ours to ours | {ratios(peaks['chunked'], peaks['whole']).text()} | <= 0.5 |")
    if torch.cuda.is_available():
        used = last_line([*PARTS, "utilisation", "cuda"], "utilisation", LIMIT_S)
        for how, rate in used["flops_per_s"].items():
            share = f"{100 * used['mfu'][how]:.1f} %" if used["mfu"] else "peak of this device not known"
            row = f"forward + backward, 0.6B, bfloat16, new lengths every round, {how} attention counted"
            print(f"| {row}: {rate / 1e12:.0f} TFLOP/s | MFU {share} | |")
    else:
        print("| MFU | not measured: no CUDA device | |")


def _batch() -> dict[str, list[list[int]]]:
    """Return samples without shared prefixes, so that prefix sharing does not affect the comparison."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(SHORTEST, LONGEST + 1, size=SAMPLES)
    prompts = [rng.integers(4, 14, size=PROMPT).tolist() for _ in range(SAMPLES)]
    return {"prompts": prompts, "completions": [rng.integers(4, 14, size=size).tolist() for size in lengths]}


def _slicing() -> tuple[float, float]:
    rng = np.random.default_rng(0)
    tasks = [TaskHandle(f"train/0/{i}", 1, 1, int(n), 0, [0]) for i, n in enumerate(rng.integers(100, 8000, 10_000))]
    times = []
    for _ in range(7):
        began = time.perf_counter()
        chunks = Batch(BatchMeta(tasks=tasks)).chunk(8)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times), imbalance(chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description="The training step against its peer and its own limits.")
    parser.add_argument("--turns", type=int, default=TURNS, help="runs of each side")
    parser.add_argument("--sweep", action="store_true", help="find TRL's fastest micro-batch and record it")
    args = parser.parse_args()
    if not PEER_PYTHON.exists():
        sys.exit("bench_train: .venv-trl is missing; run `make peers` first")
    with tempfile.TemporaryDirectory(prefix="bench-train-") as name:
        batch = Path(name) / "batch.json"
        batch.write_text(json.dumps(_batch()))
        try:
            if args.sweep:
                sweep(batch)
            else:
                table(batch, args.turns)
        except BenchError as error:
            sys.exit(f"bench_train: {error}")


if __name__ == "__main__":
    main()
