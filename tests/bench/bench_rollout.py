"""What the rollout side costs, in ratios of one run on this machine: running ahead, weight sync, the whole system
against TRL on long answers. Must never compare sides that did not do the same work.

    python -m tests.bench.bench_rollout                (TRL needs `make peers`)
    python -m tests.bench.bench_rollout --only ahead|sync|trl

ahead  the quickstart without its reference, one process that samples and one that trains, a thread each:
       samples/s with staleness 1 over samples/s with staleness 0.
sync   a version of --sync-mib from the trainer's memory into the engine's: put into a real store, mapped, set, proved
       by its canary, over real messages. The ratio is the seconds of one copy of as many bytes, over those of a sync.
trl    GRPO on answers of up to 128 tokens whose lengths spread widely: a random model of the quickstart's shape ends
       an answer with one token in 64 or so, hence lengths are nearly geometric. KL to the reference on both sides, two
       threads for TRL and two processes of a thread (and the reference's) for the cluster. The learning rate is so low
       that lengths stay what they are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from proto.messages import Ack, Canary, Clear, PutTask, WeightsRef
from proto.tensors import Array
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.weights_sync import WeightsSync, weights_meta
from shared.data import open_source
from shared.dataplane.client import TaskShards
from shared.drill import canary_tokens, perturb
from shared.model.load import load_model, named_weights
from shared.model.logprobs import token_logprobs
from shared.tensors_torch import to_numpy
from tests.bench.bench_quickstart import (
    MODEL,
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
from tests.integration.store_process import STORE, StoreProcess, make_run, peer_of

FORM = "{:<34}{:>14}{:>10}{:>26}"
COOL_DOWN = 3
LONG_TOKENS, LONG_TASKS, GROUP_SIZE = 128, 16, 8
SEED = 5
TOLERANCE = 1e-4
WARM_UP_SYNCS = 3
"""The first has the drill; then shared memory is used again, as in a run: fresh pages of a virtual machine are slow."""
SYNC_PARTS = ("canary of the trainer", "put", "map", "set and proof")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


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


def save_random(folder: Path, **sizes: int) -> None:
    """A model of the quickstart's architecture with random weights, float32."""
    torch.manual_seed(SEED)
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(MODEL)
    for name, size in sizes.items():
        setattr(config, name, size)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder / name)


class Trainer:
    """What a trainer has of a version: its weights, and the log-probs that prove them."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model(folder, "float32").eval().requires_grad_(False)
        self.named = named_weights(self.model)
        self.tokens = canary_tokens(64, SEED)

    def canary(self) -> Canary:
        mask = np.ones(len(self.tokens), np.uint8)
        mask[0] = 0
        lengths = np.array([len(self.tokens)], np.int32)
        with torch.inference_mode():
            scores, _ = token_logprobs(self.model, self.tokens, lengths, mask, 1.0, len(self.tokens))
        return Canary(token_ids=self.tokens, logprobs=to_numpy(scores)[1:].copy(), tolerance=TOLERANCE)

    def shards(self) -> dict[str, Array]:
        return {name: to_numpy(value) for name, value in self.named.items()}

    def drill(self) -> Canary:
        """Of the perturbed weights; this model is what it was afterwards."""
        kept = {name: value.clone() for name, value in self.named.items()}
        for name, value in self.named.items():
            value.copy_(torch.from_numpy(perturb(name, to_numpy(value), SEED)))
        canary = self.canary()
        for name, value in self.named.items():
            value.copy_(kept[name])
        return canary


def copy_s(nbytes: int, times: int = 5) -> float:
    """The fastest copy of as many bytes by one thread, pages of the target already there."""
    source, target = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


async def sync_s(folder: Path, model: Path, times: int, threads: int) -> tuple[list[tuple[float, ...]], int]:
    """Seconds of each sync's SYNC_PARTS, and the bytes of a version."""
    torch.set_num_threads(threads)
    trainer = Trainer(model)
    nbytes = sum(value.nbytes for value in trainer.shards().values())
    drill = trainer.drill()
    run = make_run(folder, memory=4 * nbytes)
    store = StoreProcess(run)
    store.start()
    engine = TransformersEngine(model=model, dtype="float32", threads=threads, deterministic=False)
    parts: list[tuple[float, ...]] = []
    try:
        await engine.start()
        sync = WeightsSync(engine, "bench", lambda topic, values: None)
        async with peer_of(run) as peer:
            for step in range(times + WARM_UP_SYNCS):
                for value in trainer.named.values():
                    value.add_(1e-4)  # another version
                canary_began = time.perf_counter()
                canary = trainer.canary()
                began = time.perf_counter()
                task_id = f"weights/0/{step}"
                (receipt,) = await peer.data.put([TaskShards(task_id, 1, trainer.shards())], store=STORE, deadline_s=60)
                ref = WeightsRef(
                    lineage=0,
                    step=step,
                    task_id=task_id,
                    fence=1,
                    store=STORE,
                    nbytes=receipt.nbytes,
                    canary=canary,
                    drill=drill,
                    drill_seed=SEED,
                )
                published = time.perf_counter()
                (weights,) = await peer.data.fetch(weights_meta(ref), (), deadline_s=60)
                mapped = time.perf_counter()
                await sync.load(ref, weights)
                del weights
                if step:  # as the scheduler does with a version that no one can name any more
                    old = [PutTask(f"weights/0/{step - 1}", 1)]
                    await peer.store.call(Clear(tasks=old), Ack, deadline_s=60)
                parts.append(
                    (began - canary_began, published - began, mapped - published, time.perf_counter() - mapped)
                )
    finally:
        await engine.stop()
        store.stop()
        run.remove_volatile()
    return parts[WARM_UP_SYNCS:], nbytes


def sync(mib: int, times: int, threads: int) -> None:
    width = 1024
    layer_mib = (2 * width * 16 * 64 + 2 * width * 4 * 64 + 3 * width * 4 * width) * 4 / 2**20
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model = Path(name) / "large"
        save_random(
            model,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            num_hidden_layers=max(round(mib / layer_mib), 1),
        )
        syncs, nbytes = asyncio.run(sync_s(Path(name), model, times, threads))
    fastest = min(syncs, key=sum)
    copied = copy_s(nbytes)
    line(f"memcpy of {nbytes / 2**20:.0f} MiB", f"{copied:.3f} s", "", f"{nbytes / copied / 2**30:.2f} GiB/s")
    for part, seconds in zip(SYNC_PARTS, fastest, strict=True):
        line(f"  {part}", f"{seconds:.3f} s")
    note = f"target 0.25; median {copied / statistics.median(map(sum, syncs)):.2f}"
    line("weight sync, of memcpy", f"{sum(fastest):.3f} s", f"{copied / sum(fastest):.2f}", note)


# ------------------------------------------------------------------------------------------------------------- TRL


def trl_rate(model: Path, folder: Path, steps: int, warm_up: int, threads: int, limit_s: float) -> tuple[float, float]:
    """Samples/s of GRPOTrainer and its mean length. Raises BenchError."""
    rows, output = folder / "train.jsonl", folder / "trl.out"
    source = open_source("builtin:addition", where="bench_rollout")
    rows.write_text("".join(json.dumps(source.row(index)) + "\n" for index in range(len(source))))
    samples = LONG_TASKS * GROUP_SIZE
    command = [str(PEER_PYTHON), str(PEER), "--rows", str(rows), "--model", str(model), "--threads", str(threads)]
    command += ["--steps", str(steps), "--warm-up", str(warm_up), "--samples", str(samples)]
    command += ["--micro-batch", str(samples), "--max-new-tokens", str(LONG_TOKENS), "--learning-rate", "1e-7"]
    with running(command, output) as process:
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise failed(f"TRL: not done after {limit_s:g} s (--limit-s)", output) from None
    if status:
        raise failed(f"TRL: exit {status}", output)
    result = json.loads(output.read_text().splitlines()[-1])
    return result["samples_per_s"], statistics.fmean(result["length_mean"])


def long_answers(steps: int, warm_up: int, threads: int, limit_s: float) -> None:
    settings = (
        f"algorithm.tasks_per_step={LONG_TASKS}",
        f"sampling.max_new_tokens={LONG_TOKENS}",
        "optimizer.lr=1.0e-7",
    )
    samples = LONG_TASKS * GROUP_SIZE
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        model = Path(name) / "model"
        save_random(model)
        ours, others = cluster_rate((*settings, f"policy.model={model}"), steps, warm_up, samples, limit_s)
        line(f"rlbus, up to {LONG_TOKENS} tokens", f"{ours:.1f} /s", "", f"others' cores {others:.2f}")
        theirs, length = trl_rate(model, Path(name), steps, warm_up, threads, limit_s)
    line("TRL GRPOTrainer", f"{theirs:.1f} /s", "", f"mean length {length:.1f}")
    line("rlbus over TRL", "", f"{ours / theirs:.2f}", "target 3")


def main() -> None:
    parser = argparse.ArgumentParser(description="Running ahead, weight sync and long answers, in ratios.")
    parser.add_argument("--only", choices=("ahead", "sync", "trl"))
    parser.add_argument("--steps", type=int, default=40, help="of each run of ahead, warm-up included")
    parser.add_argument("--long-steps", type=int, default=14, help="of each side of trl, warm-up included")
    parser.add_argument("--warm-up", type=int, default=4, help="first steps, left out")
    parser.add_argument("--sync-mib", type=int, default=1024)
    parser.add_argument("--syncs", type=int, default=4)
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
            sync(args.sync_mib, args.syncs, args.threads)
        if args.only in (None, "trl"):
            long_answers(args.long_steps, args.warm_up, args.threads, args.limit_s)
    except BenchError as error:
        sys.exit(f"bench_rollout: {error}")


if __name__ == "__main__":
    main()
