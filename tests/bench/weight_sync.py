"""Measures the sync of a policy version from the trainer's memory into an engine's, over a real store and real
messages. Only syncs whose canary matched are timed.

    python -m tests.bench.weight_sync MODEL --engine transformers|vllm --dtype DTYPE --times N --threads N

prints JSON. With `--device cuda`, trainer and engine share a GPU, and the version passes through the host's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from launch.processes.programs import child_environment
from proto.messages import Ack, Clear, Publish, PutTask, WeightsRef
from services.policy_trainer.worker.backend import BackendOptions
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.weights.publish import Canaries, Staging, put_weights, weights_ref
from services.rollout.engine import Engine
from services.rollout.engines.transformers_engine import TransformersEngine
from services.rollout.engines.vllm_engine import VllmEngine
from services.rollout.weights.sync import WeightsSync
from shared.batch import weights_meta
from shared.dataplane.client import DataClient
from shared.ranks.layout import Layout
from shared.ranks.process_group import own_device
from shared.topology.passes import FASTEST
from tests.bench.cluster_run import BenchError
from tests.integration.store_process import REPOSITORY, STORE, Peer, StoreProcess, make_run, peer_of

SEED = 5
WARM_UP = 5
"""Number of warm-up syncs. The first includes the drill; from the fourth on, pages of collected versions are reused."""
PARTS = ("canary of the trainer", "put and digests (beside it)", "map", "set", "verify", "canary of the engine")
MODULE = "tests.bench.weight_sync"
LIMIT_S = 600.0
T = TypeVar("T")


@dataclass(frozen=True)
class One:
    """Duration in seconds of each part of a sync, and of the whole sync from the start of its first part to the end of
    its last."""

    parts: tuple[float, ...]
    total: float


@dataclass
class Measured:
    """Syncs of `nbytes` bytes, and the duration in seconds of a one-thread copy of as many bytes before each sync."""

    nbytes: int
    largest_error: float = 0.0
    """Largest error of the engine's canaries."""
    tolerance: float = 0.0
    """Tolerance of the last canary."""
    syncs: list[One] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)

    def fastest(self) -> One:
        return min(self.syncs, key=lambda one: one.total)

    def median_verify_s(self) -> float:
        """Return the median duration of the part "verify", in seconds."""
        return statistics.median(one.parts[PARTS.index("verify")] for one in self.syncs)

    def median_ratio(self) -> float:
        return statistics.median(self.copies) / statistics.median(one.total for one in self.syncs)


class Trainer:
    """The worker's backend and canaries, on a compute thread as in the worker."""

    def __init__(
        self, folder: Path, model: Path, dtype: str, threads: int, *, with_digests: bool, device: str = "cpu"
    ) -> None:
        options = BackendOptions(
            max_tokens=4096, threads=threads, device=device, scratch=folder / "scratch", passes=FASTEST
        )
        self.backend = TorchBackend(model, dtype, options, Layout(1).place(0))
        self.canaries = Canaries(self.backend, model, dtype, SEED, with_digests=with_digests)
        self._signs = np.random.default_rng(SEED)
        self._staging = Staging()
        self._compute = ThreadPoolExecutor(1, "compute")
        self._compute.submit(torch.set_num_threads, threads).result()

    @torch.no_grad()
    def change(self) -> None:
        """Create a new version by taking one step of a random walk. In bfloat16, most weights stay the same."""
        for value in self.backend.weights().values():
            value.add_(float(self._signs.choice([-1e-4, 1e-4])))

    async def publish(self, data: DataClient, request: Publish) -> tuple[WeightsRef, float, float]:
        """Publish as the worker does. Also return how long the canary and the put took, in seconds. They overlap."""
        began = time.perf_counter()

        async def timed(work: Awaitable[T]) -> tuple[T, float]:
            return await work, time.perf_counter() - began

        weights = self.backend.published()
        proof = asyncio.get_running_loop().run_in_executor(self._compute, self.canaries.current)
        record = asyncio.to_thread(self.canaries.weight_set, weights)
        (receipt, put_s), (weight_set, digests_s), (canary, canary_s) = await asyncio.gather(
            timed(put_weights(data, weights, request, self._staging)), timed(record), timed(proof)
        )
        ref = weights_ref(receipt, self.canaries, canary, weight_set, request)
        return ref, canary_s, max(put_s, digests_s)


def copier(nbytes: int) -> Callable[[], float]:
    """Return a function that times a one-thread copy of `nbytes` bytes between existing pages."""
    source, target = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)

    def seconds() -> float:
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    return seconds


async def measure(
    folder: Path, model: Path, dtype: str, engine: Engine, times: int, threads: int, device: str = "cpu"
) -> Measured:
    """Measure the PARTS of `times` syncs from a trainer into `engine` after the warm-up."""
    mapped = isinstance(engine, TransformersEngine) and device == "cpu"
    trainer = Trainer(folder, model, dtype, threads, with_digests=not mapped, device=device)
    measured = Measured(sum(value.nbytes for value in trainer.backend.weights().values()))
    run = make_run(folder, memory=4 * measured.nbytes)
    store = StoreProcess(run)
    store.start()
    copy = copier(measured.nbytes)
    try:
        await engine.start()
        sync = WeightsSync(engine, "bench", lambda topic, values: None)
        async with peer_of(run) as peer:
            for step in range(WARM_UP + times):
                trainer.change()
                copy_s, one = copy(), await _sync(trainer, sync, peer, step)
                if step >= WARM_UP:
                    measured.copies.append(copy_s)
                    measured.syncs.append(one)
                assert sync.last is not None
                measured.largest_error = max(measured.largest_error, sync.last.canary_error)
                measured.tolerance = sync.last.tolerance
    finally:
        await engine.stop()
        store.stop()
        run.remove_volatile()
    return measured


async def _sync(trainer: Trainer, sync: WeightsSync, peer: Peer, step: int) -> One:
    began = time.perf_counter()
    request = Publish(driver=1, order=step + 1, step=step, lineage=0, store=STORE, fence=1)
    ref, canary_s, put_s = await trainer.publish(peer.data, request)
    published = time.perf_counter()
    (weights,) = await peer.data.fetch(weights_meta(ref), (), deadline_s=60)
    mapped = time.perf_counter()
    await sync.place(ref, weights)
    placed = time.perf_counter()
    verify_s = (await sync.prove()).verify_s
    ended = time.perf_counter()
    del weights
    if step:  # The scheduler does the same with a version that leases can no longer refer to.
        await peer.store.call(Clear(tasks=[PutTask(f"weights/0/{step - 1}", 1)]), Ack, deadline_s=60)
    parts = (canary_s, put_s, mapped - published, placed - mapped, verify_s, ended - placed - verify_s)
    return One(parts, ended - began)


def measure_alone(
    name: str,
    model: Path,
    times: int,
    threads: int,
    dtype: str = "float32",
    limit_s: float = LIMIT_S,
    device: str = "cpu",
) -> Measured:
    """Measure syncs into engine `name` in a separate process (vLLM patches its environment) with the launcher's
    environment for services. Raises BenchError."""
    command = [sys.executable, "-m", MODULE, str(model), "--engine", name]
    command += ["--dtype", dtype, "--times", str(times), "--threads", str(threads), "--device", device]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=child_environment(threads),
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    if done.returncode:
        raise BenchError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    syncs = [One(tuple(one["parts"]), one["total"]) for one in answer["syncs"]]
    return Measured(**{**answer, "syncs": syncs})


def measure_here(name: str, model: Path, times: int, threads: int, dtype: str, device: str) -> Measured:
    """Measure syncs into engine `name` in this process."""
    own_device(device, 0)
    engine = _engine(name, model, dtype, threads, device)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        return asyncio.run(measure(Path(folder), model, dtype, engine, times, threads, device))


def _engine(name: str, model: Path, dtype: str, threads: int, device: str) -> Engine:
    if name == "transformers":
        return TransformersEngine(
            model=model, dtype=dtype, threads=threads, deterministic=False, device=device, passes=FASTEST
        )
    arguments: dict[str, float] = {"max_model_len": 128, "max_num_seqs": 8}
    if device == "cuda":
        arguments["gpu_memory_utilization"] = 0.4  # the trainer is on the same GPU
    return VllmEngine(model=model, dtype=dtype, threads=threads, deterministic=False, engine_args=arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description="Syncs into an engine, as JSON.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", choices=("transformers", "vllm"), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--times", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    measured = measure_here(args.engine, args.model, args.times, args.threads, args.dtype, args.device)
    print(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main()
