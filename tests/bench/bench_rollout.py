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
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from proto.messages import Ack, Clear, Publish, PutTask, WeightsRef
from services.policy_trainer.layout import Layout
from services.policy_trainer.worker.backend import BackendOptions
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.publish import Canaries, put_weights, weights_ref
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.weights_sync import WeightsSync
from shared.batch import weights_meta
from shared.data import open_source
from shared.dataplane.client import DataClient
from shared.topology.algorithm import Optimizer
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
WARM_UP_SYNCS = 5
"""The first has the drill; from the fourth on the pages of collected versions are used again, as in a run."""
SYNC_PARTS = ("canary of the trainer", "put (beside it)", "map", "set and proof")
T = TypeVar("T")
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
    """The worker's own backend and canaries, on a compute thread as in the worker."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        options = BackendOptions(max_tokens=4096, threads=threads, device="cpu", scratch=folder / "scratch")
        self.backend = TorchBackend(model, "float32", Optimizer(lr=1e-4), options, Layout(1).place(0))
        self.canaries = Canaries(self.backend, model, "float32", SEED)
        self._compute = ThreadPoolExecutor(1, "compute")
        self._compute.submit(torch.set_num_threads, threads).result()

    @torch.no_grad()
    def change(self) -> None:
        """Another version."""
        for value in self.backend.weights().values():
            value.add_(1e-4)

    async def publish(self, data: DataClient, request: Publish) -> tuple[WeightsRef, float, float]:
        """As the worker's call does; and the seconds of the canary and of the put, which overlap."""
        began = time.perf_counter()

        async def timed(work: Awaitable[T]) -> tuple[T, float]:
            return await work, time.perf_counter() - began

        weights = self.backend.weights()
        proof = asyncio.get_running_loop().run_in_executor(self._compute, self.canaries.current)
        (receipt, put_s), (canary, canary_s) = await asyncio.gather(
            timed(put_weights(data, weights, request)), timed(proof)
        )
        return weights_ref(receipt, self.canaries, canary, request), canary_s, put_s


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
    """Seconds of each sync's SYNC_PARTS and of all of it, and the bytes of a version."""
    trainer = Trainer(folder, model, threads)
    nbytes = sum(value.nbytes for value in trainer.backend.weights().values())
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
                trainer.change()
                began = time.perf_counter()
                request = Publish(driver=1, order=step + 1, step=step, lineage=0, store=STORE, fence=1)
                ref, canary_s, put_s = await trainer.publish(peer.data, request)
                published = time.perf_counter()
                (weights,) = await peer.data.fetch(weights_meta(ref), (), deadline_s=60)
                mapped = time.perf_counter()
                await sync.load(ref, weights)
                ended = time.perf_counter()
                del weights
                if step:  # as the scheduler does with a version that no one can name any more
                    old = [PutTask(f"weights/0/{step - 1}", 1)]
                    await peer.store.call(Clear(tasks=old), Ack, deadline_s=60)
                parts.append((canary_s, put_s, mapped - published, ended - mapped, ended - began))
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
    *fastest, total = min(syncs, key=lambda parts: parts[-1])
    copied = copy_s(nbytes)
    line(f"memcpy of {nbytes / 2**20:.0f} MiB", f"{copied:.3f} s", "", f"{nbytes / copied / 2**30:.2f} GiB/s")
    for part, seconds in zip(SYNC_PARTS, fastest, strict=True):
        line(f"  {part}", f"{seconds:.3f} s")
    note = f"target 0.25; median {copied / statistics.median(parts[-1] for parts in syncs):.2f}"
    line("weight sync, of memcpy", f"{total:.3f} s", f"{copied / total:.2f}", note)


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
