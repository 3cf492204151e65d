"""The checks of `smoke_gpu`. `python -m tests.bench.smoke_checks NAME cuda|cpu` runs one and prints its measurements as
JSON. Each check imports only what it needs, because machines with GPUs may lack parts of the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.topology.passes import FASTEST
from tests.bench.own_process import ROOT, Measured, Missing, answer, full_size, not_installed

GIB = 1 << 30
PACKAGES = ("torch", "transformers", "triton", "vllm", "megatron-core", "pyzmq", "msgspec", "pydantic", "trl")
SHAPES = 8
ABORTS = 20
STEPS = 3
WAITS = 1
"""Maximum number of times that computing a gradient makes the host wait for the device: when the sums are read."""


def versions(device: str) -> Measured:
    """Return the versions and sizes on which the other results depend. On CUDA, an operation on the device must
    succeed.
    """
    found: Measured = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    shm = os.statvfs("/dev/shm")
    found |= {
        "shm_bytes": shm.f_bavail * shm.f_frsize,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info()
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "free_bytes": free}
        found |= {"device_bytes": total, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]
    assert float(torch.ones(8, device=device).sum()) == 8
    return found


# ---- attention


def attention(device: str) -> Measured:
    """Time attention and its gradient for new shapes, because with ragged batches almost every micro-batch has a new
    shape.

    Covers causal chains and masked trees, with shared and with repeated keys, with cuDNN's kernel preferred and with it
    switched off, and, on a GPU, packed chains. Returns the median time of the first and of the second call with each
    shape, in ms, the peak bytes, and the slowest kernel.
    """
    on_gpu = device.startswith("cuda")
    rows, heads, groups, dim, longest = (8, 28, 4, 128, 2048) if full_size(device) else (2, 4, 2, 16, 64)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    found: Measured = {}
    for masked in (False, True):
        for repeated in (False, True):
            for cudnn in (True, False) if on_gpu else (False,):
                with _cudnn_attention(allowed=cudnn, on_gpu=on_gpu):
                    first, again, peak = [], [], 0
                    for shape in range(SHAPES):
                        length = longest - 8 * shape - 4 * masked - 2 * repeated - cudnn
                        shared = heads if repeated else groups
                        sizes = [(rows, each, length, dim) for each in (heads, shared, shared)]
                        made = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for size in sizes]
                        mask = torch.ones(length, length, dtype=torch.bool, device=device).tril() if masked else None

                        call = functools.partial(_attend, made, mask)
                        if on_gpu:
                            torch.cuda.reset_peak_memory_stats()
                        first.append(_timed_ms(call, device))
                        again.append(_timed_ms(call, device))
                        peak = max(peak, torch.cuda.max_memory_allocated() if on_gpu else 0)
                        assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in made)
                    name = f"{'mask' if masked else 'chain'}, {'repeated' if repeated else 'shared'} keys"
                    name += f", cuDNN {'first' if cudnn else 'off'}" if on_gpu else ""
                    found[name] = {"first_ms": round(median(first), 3), "again_ms": round(median(again), 3)}
                    if on_gpu:
                        found[name] |= {"peak_bytes": peak, "kernel": _slowest_kernel(call)}
    if on_gpu:
        found["chain, packed"] = _packed_attention(rows, heads, groups, dim, longest, device)
    return found


def _packed_attention(rows: int, heads: int, groups: int, dim: int, longest: int, device: str) -> Measured:
    """Time attention over packed chains of different lengths, and its gradient, for new lengths each time."""
    from shared.model import attention as product
    from shared.model import tree

    first, again = [], []
    for shape in range(SHAPES):
        lengths = np.random.default_rng(shape).integers(longest // 2, longest, rows)
        mask = np.ones(lengths.sum(), np.uint8)
        mask[np.cumsum(lengths) - lengths] = 0
        ids = np.arange(lengths.sum())
        batch = tree.plan(ids, lengths, mask, max_tokens=len(ids), hidden_size=heads * dim)[0]
        trees = product.to_trees(batch, torch.device(device))
        assert all(block.packed is not None for block in trees.blocks)
        sizes = [(1, each, len(batch.token_ids), dim) for each in (heads, groups, groups)]
        made = [torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True) for size in sizes]

        def call(made: list[Tensor] = made, trees: product.Trees = trees) -> None:
            out, _ = product.attend_trees(torch.nn.Module(), *made, None, trees=trees)
            out.sum().backward()  # type: ignore[no-untyped-call]

        first.append(_timed_ms(call, device))
        again.append(_timed_ms(call, device))
        assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in made)
    return {"first_ms": round(median(first), 3), "again_ms": round(median(again), 3), "kernel": _slowest_kernel(call)}


def _attend(made: list[Tensor], mask: Tensor | None) -> None:
    """Compute attention and its gradients."""
    shared = made[0].shape[1] != made[1].shape[1]
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(*made, attn_mask=mask, is_causal=mask is None, enable_gqa=shared)
    out.sum().backward()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _cudnn_attention(*, allowed: bool, on_gpu: bool) -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled() if on_gpu else False
    if on_gpu:
        torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        if on_gpu:
            torch.backends.cuda.enable_cudnn_sdp(before)


def _slowest_kernel(call: Callable[[], None]) -> str:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    slowest = max(profiler.key_averages(), key=lambda each: each.device_time_total, default=None)
    return slowest.key[:120] if slowest is not None else ""


# ---- memory


def locked_memory(device: str) -> Measured:
    """Measure how much memory the optimizer's shelf takes up relative to its content, and how fast it is filled and
    emptied."""
    import psutil

    from shared.colocation.shelf import LockedMemory

    on_gpu = device.startswith("cuda")
    # Sizes just above powers of two, for which torch's own page-locked memory takes up almost twice as much.
    sizes = [(size << 20) + 4096 for size in ((513, 257, 1025, 129) if full_size(device) else (33, 17))]
    torch.zeros(1, device=device)  # The memory of the device's context is not counted.
    before = psutil.Process().memory_info().rss
    memory = LockedMemory(sizes, lock=on_gpu)
    there = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    for piece in memory.pieces:
        piece.zero_()
    held = psutil.Process().memory_info().rss - before - (0 if on_gpu else sum(sizes))

    def leave() -> None:
        for piece, tensor in zip(memory.pieces, there, strict=True):
            piece.copy_(tensor, non_blocking=True)

    def come_back() -> None:
        for piece, tensor in zip(memory.pieces, there, strict=True):
            tensor.copy_(piece, non_blocking=True)

    times = [min(_timed_ms(each, device) for _ in range(3)) / 1e3 for each in (leave, come_back)]
    assert held < 1.2 * sum(sizes), f"{held} bytes are held for {sum(sizes)} bytes of content"
    rates = {"out_bytes_per_s": sum(sizes) / times[0], "in_bytes_per_s": sum(sizes) / times[1]}
    return {"bytes": sum(sizes), "held_over_bytes": held / sum(sizes), **rates}


def digests(device: str) -> Measured:
    """Compare the digests of weights on the device with those on the CPU, and measure how fast the device reads."""
    from shared.weights.digests import digests_of

    generator = torch.Generator().manual_seed(0)
    shapes = [(1000, 1024), (17, 24), (3, 7), (5,), (), (2, 70_000), (40, 3, 5)]
    weights = {
        f"{shape} {dtype}": torch.randn(shape, generator=generator).to(dtype)
        for shape in shapes
        for dtype in (torch.float32, torch.bfloat16)
    }
    there = {name: tensor.to(device) for name, tensor in weights.items()}
    assert digests_of(there) == digests_of(weights)
    large = {"large": torch.ones((1 << 15, 1 << 14) if full_size(device) else (1 << 10, 1 << 10), device=device)}
    digests_of(large)  # the numbers that weigh the bytes are kept from here on
    seconds = min(_timed_ms(lambda: digests_of(large), device) for _ in range(3)) / 1e3
    return {"tensors": len(weights), "bytes_per_s": large["large"].nbytes / seconds}


def device_memory(device: str) -> Measured:
    """Export device memory to a reader that is killed before it opens the export. The memory must be freed."""
    from shared.weights.memory import exported, give_back, pack_into, room, withdraw

    nbytes = GIB if full_size(device) else GIB >> 8
    before = torch.cuda.memory_allocated()
    copy = room(nbytes, f"{device}:0")
    pack_into(copy, [torch.ones(nbytes // 4, dtype=torch.float32)])
    memory = exported(copy)
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as reader:
        reader.kill()
    del copy
    give_back()
    waiting = torch.cuda.memory_allocated() - before
    withdraw(memory)
    give_back()
    assert torch.cuda.memory_allocated() == before
    return {"bytes": nbytes, "bytes_until_withdrawn": waiting}


# ---- collectives


def nccl_one_rank(device: str) -> Measured:
    """Send 4 GiB of live weights to a communicator of one rank, then abandon joins that no peer answers.

    With one rank, NCCL's broadcast moves nothing. The rate is that of the copies which the trainer makes of its live
    weights, a chunk at a time, before NCCL sends them.
    """
    from services.policy_trainer.worker.weights.channels import LiveWeights, OutgoingWeights
    from services.policy_trainer.worker.weights.nccl import NcclGroup, new_unique_id
    from shared.ranks.meeting import LOOPBACK
    from shared.weights.gloo import TransferLost
    from shared.weights.weight_set import described

    size = GIB // 64 if full_size(device) else GIB >> 14
    weights = {f"{number}": torch.ones(size, dtype=torch.float32, device=device) for number in range(64)}
    live = LiveWeights()
    live.show((0, 0), weights)
    outgoing = OutgoingWeights(described(weights), dict, live, (0, 0))
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    group = NcclGroup(new_unique_id(LOOPBACK), 1, device=f"{device}:0", deadline_s=60.0)
    group.broadcast(outgoing.chunks(device))
    began = time.perf_counter()
    group.broadcast(outgoing.chunks(device))
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() - base
    group.abort()
    few = [next(iter(weights.values()))]
    for _ in range(ABORTS):
        lonely = NcclGroup(new_unique_id(LOOPBACK), 2, device=f"{device}:0", deadline_s=0.2)
        outcome = "joined"
        try:
            lonely.broadcast([few])
        except TransferLost as lost:
            outcome = str(lost)
        assert "not done within" in outcome, outcome
    nbytes = sum(each.nbytes for each in weights.values())
    return {"bytes": nbytes, "copy_bytes_per_s": nbytes / seconds, "peak_bytes": peak, "aborted_joins": ABORTS}


def megatron_one_rank(device: str) -> Measured:
    """Update a model with Megatron on one rank. Megatron's optimizer gathers device tensors, which gloo cannot do."""
    from services.policy_trainer.worker.megatron.backend import MegatronBackend

    return _updates(device, "float32", backend=MegatronBackend, large=False)


# ---- training


def step_and_publish(device: str) -> Measured:
    """Update a random Qwen2 of 1.5B parameters in bfloat16 (a tiny one on a CPU) and copy its weights for a store.

    `gap_ms` is the longest time for which the worker's event loop would not have answered, `waits` is the number of
    times that computing a gradient made the host wait for the device, and `where` names the first lines that did.
    """
    from services.policy_trainer.worker.backend_torch import TorchBackend

    found = _updates(device, "bfloat16", backend=TorchBackend, large=full_size(device))
    assert found["waits"] <= WAITS, f"the host waits {found['waits']} times for a gradient: {found['where']}"
    return found


def _updates(device: str, dtype: str, *, backend: Any, large: bool) -> Measured:
    import numpy as np
    from transformers import AutoModelForCausalLM, Qwen2Config

    from services.policy_trainer.worker.backend import BackendOptions
    from services.policy_trainer.worker.weights.publish import Staging
    from shared.ranks.layout import Layout
    from shared.ranks.process_group import own_device
    from tests.bench.train_parts import round_s
    from tests.unit.policy_trainer.training import adamw

    sizes = (1536, 8960, 28, 12, 2, 151_936) if large else (64, 192, 2, 4, 2, 512)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = Qwen2Config(**dict(zip((*names, "vocab_size"), sizes, strict=True)), tie_word_embeddings=True)
    with tempfile.TemporaryDirectory(prefix="smoke-gpu-") as scratch:
        model = Path(scratch) / "model"
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(model)
        device = own_device(device, 0)
        options = BackendOptions(
            max_tokens=8192, threads=1, device=device, scratch=Path(scratch) / "offloaded", passes=FASTEST
        )
        made = backend(model, dtype, options, Layout(1).place(0))
        steps_s, waits = [], list[str]()
        for step in range(1, STEPS + 1):
            lengths = np.full(8, (512 if large else 16) + step, np.int32)
            with _counted_waits(device) as counted:
                gradient_s = round_s(made, lengths, config.vocab_size, device, keep=True)
            waits = [f"{each.filename}:{each.lineno}" for each in counted]
            steps_s.append(gradient_s + _timed_ms(lambda step=step: made.step(step, adamw(lr=1e-5)), device) / 1e3)
        found: Measured = {"parameters": made.parameters}
        found |= {"steps_s": [round(each, 3) for each in steps_s], "waits": len(waits), "where": waits[:8]}
        staging = Staging()
        weights = made.weights()
        for attempt in ("first", "again"):
            seconds, gap_s = asyncio.run(_beside_a_loop(lambda: staging.arrays(weights)))
            found |= {f"publish_{attempt}_s": round(seconds, 3), f"gap_{attempt}_ms": round(gap_s * 1e3, 1)}
        if device.startswith("cuda"):
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        return found


@contextlib.contextmanager
def _counted_waits(device: str) -> Iterator[list[Any]]:
    """Collect the places where the host waits for the device. On a CPU, there are none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.startswith("cuda"):
            torch.cuda.set_sync_debug_mode("warn")
        found: list[Any] = []
        try:
            yield found
        finally:
            if device.startswith("cuda"):
                torch.cuda.set_sync_debug_mode("default")
            found += [each for each in caught if "synchroniz" in str(each.message)]


async def _beside_a_loop(work: Callable[[], object]) -> tuple[float, float]:
    """Run `work` on a thread. Return its duration and the longest gap between two turns of the loop, in seconds."""
    loop = asyncio.get_running_loop()
    began = last = loop.time()
    gap = 0.0
    running = loop.run_in_executor(None, work)
    while not running.done():
        await asyncio.sleep(0.001)
        now = loop.time()
        gap, last = max(gap, now - last), now
    await running
    return loop.time() - began, gap


def utilisation(device: str) -> Measured:
    """Return the MFU over rounds with new lengths, and the tokens/s of a plain transformers loop over the same
    lengths."""
    from tests.bench.train_parts import against_plain

    return against_plain(device)


# ---- whole


def colocated_run(device: str) -> Measured:
    """Train three steps with policy, reference and engine on one GPU. One process is killed, and the run continues."""
    import psutil

    from shared.topology import load

    topology = ROOT / "launch" / "topologies" / "colocate.yaml"
    with tempfile.TemporaryDirectory(prefix="smoke-gpu-") as folder:
        path = Path(folder) / "run"
        sets = [f"run.steps={STEPS}", "policy.dtype=bfloat16"]
        sets += [f"services.{name}.gpus=1" for name in load(topology).placement.colocate]
        command = [sys.executable, "-m", "launch.cluster", str(topology), "--run-dir", str(path)]
        command += [word for each in sets for word in ("--set", each)]
        began = time.monotonic()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            metrics = path / "metrics.jsonl"
            while run.poll() is None and not (metrics.exists() and '"step": 1' in metrics.read_text()):
                time.sleep(0.2)
            killed = 0
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(run.pid).children():
                    if "services.rollout" in process.cmdline():
                        process.kill()
                        killed += 1
            output = run.communicate()[0]
        if name := not_installed(output):
            raise Missing(f"not installed: {name}")
        assert killed == 1, "the run ended before a process could be killed"
        assert run.returncode == 0, output.strip().splitlines()[-1]
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert rows[-1]["step"] == STEPS
        return {"run_s": round(time.monotonic() - began, 1), "steps_s": [row.get("time/step") for row in rows[1:]]}


def gpu_tests(device: str) -> Measured:
    """Run the tests that are marked `gpu`."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return run_tests([str(each) for each in files if "mark.gpu" in each.read_text()])


def run_tests(files: list[str]) -> Measured:
    """Run the tests in `files` that are marked `gpu`. Tests that need a package that is not installed are left out, and
    the package is named."""
    import pytest

    outcomes: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    lacking: set[str] = set()

    class Reports:
        """A pytest plugin that collects the outcomes."""

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if name := not_installed(report.longreprtext) if report.failed else "":
                lacking.add(name)
            elif report.failed:
                outcomes["failed"].append(f"{report.nodeid}: {report.longreprtext.strip().splitlines()[-1]}")

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if name := not_installed(report.longreprtext) if report.failed else "":
                lacking.add(name)
            elif report.when == "call" or not report.passed:
                outcomes[report.outcome].append(report.nodeid)

    # conftest.py and the settings in pyproject.toml need packages that may not be installed either.
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-W", "ignore"]
    options.append("--noconftest")
    os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach the network
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main([*options, "-o", "addopts=--import-mode=importlib", *files], plugins=[Reports()])
    assert not outcomes["failed"], "; ".join(outcomes["failed"][:10])
    if not outcomes["passed"] and lacking:
        raise Missing(f"not installed: {', '.join(sorted(lacking))}")
    assert outcomes["passed"], "no test ran"
    return {"passed": len(outcomes["passed"]), "skipped": len(outcomes["skipped"]), "not_installed": sorted(lacking)}


def _timed_ms(call: Callable[[], object], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


CHECKS: dict[str, Callable[[str], Measured]] = {
    check.__name__: check
    for check in (
        *(versions, attention, locked_memory, digests, device_memory, nccl_one_rank, megatron_one_rank),
        *(step_and_publish, utilisation, colocated_run, gpu_tests),
    )
}


if __name__ == "__main__":
    answer(CHECKS, sys.argv[1], sys.argv[2])
