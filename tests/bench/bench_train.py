"""`make bench-train`: the training step against its peer and its own limits, as a table. It asserts nothing.

Rows: forward + backward tokens/s of the torch backend and of TRL's trainer on the same samples, lengths spread 1:8
(each in its own process, per CPU second of one thread, alternating in one run); dividing 10,000 samples over 8 ranks;
the driver's share of a step's CPU beside 8 real workers; peak memory with the output layer in chunks against whole at a
vocabulary of 150,000; where CUDA exists, the model FLOPs utilisation of forward + backward (`model_flops`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from proto.messages import BatchMeta, TaskHandle
from services.policy_trainer.slicing import imbalance, slice_batch

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "launch" / "topologies" / "models" / "tiny-qwen3"
PEER = ROOT / ".venv-trl" / "bin" / "python"
SAMPLES, PROMPT, SHORTEST, LONGEST = 128, 8, 30, 240
TURNS = 2
LIMIT_S = 600


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-train-") as name:
        folder = Path(name)
        batch = folder / "batch.json"
        batch.write_text(json.dumps(_batch()))
        ours: list[float] = []
        theirs: list[float] = []
        for _ in range(TURNS):
            ours.append(_run([sys.executable, "-m", "tests.bench.train_parts", "speed", str(batch), str(MODEL)]))
            if PEER.exists():
                script = str(ROOT / "tests" / "bench" / "peers" / "trl_update.py")
                theirs.append(_run([str(PEER), script, "--model", str(MODEL), "--batch", str(batch)]))
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=False)]
        print("| what | value | limit |\n|---|---|---|")
        print(f"| forward + backward, torch backend | {statistics.median(ours):,.0f} tokens/s of CPU | |")
        if theirs:
            print(f"| the same, TRL's GRPOTrainer | {statistics.median(theirs):,.0f} tokens/s of CPU | |")
            worst = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"| ratio (median of {TURNS} turns; all: {worst}) | {statistics.median(ratios):.2f} | >= 1.5 |")
        else:
            print(f"| TRL | not measured: no {PEER.relative_to(ROOT)}, see tests/bench/peers/trl.txt | |")
        milliseconds, spread = _slicing()
        print(f"| 10,000 samples over 8 ranks (imbalance {spread:.4f}) | {milliseconds:.1f} ms | <= 50 ms |")
        driver = _found([sys.executable, "-m", "tests.bench.driver_share"])
        each = f"{1e3 * driver['driver_s']:.0f} ms of {driver['workers_s']:.1f} s of CPU a step"
        print(f"| the driver beside 8 ranks ({each}) | {100 * driver['share']:.2f} % | <= 2 % |")
        chunked = _run([sys.executable, "-m", "tests.bench.train_parts", "memory", "chunked"])
        whole = _run([sys.executable, "-m", "tests.bench.train_parts", "memory", "whole"])
        print(f"| peak memory, output layer in chunks | {chunked / 1e6:,.0f} MB | |")
        print(f"| the same, logits of all tokens at once | {whole / 1e6:,.0f} MB | |")
        print(f"| ratio | {chunked / whole:.2f} | <= 0.5 |")
        if torch.cuda.is_available():
            used = _found([sys.executable, "-m", "tests.bench.train_parts", "utilisation", "cuda"])
            share = f"{100 * used['mfu']:.1f} %" if used["mfu"] else "peak of this device not known"
            print(f"| forward + backward, 0.6B, bfloat16: {used['flops_per_s'] / 1e12:.0f} TFLOP/s | MFU {share} | |")
        else:
            print("| MFU | not measured: no CUDA device | |")


def _batch() -> dict[str, list[list[int]]]:
    """Samples that share nothing, so that no prefix is computed once instead of twice: lengths alone are compared."""
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
        slices = slice_batch(BatchMeta(tasks=tasks), 8)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times), imbalance(slices)


def _run(command: list[str]) -> float:
    """The one number in the JSON line that `command` prints last."""
    found = _found(command)
    return float(found["tokens_per_s"] if "tokens_per_s" in found else found["peak_bytes"])


def _found(command: list[str]) -> dict[str, float]:
    """The JSON line that `command` prints last."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
