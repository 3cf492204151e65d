"""`make bench-gpu`: measures speed on a GPU, each part in a process of its own, and prints one JSON line for each. It
asserts nothing. With `--device cpu`, small models run on the CPU in forks of one process, which shows only that every
part works.

    python -m tests.bench.bench_gpu [--device cuda|cpu] [--small] [--only PART ...]

mfu_06b               model FLOPs utilisation of forward + backward at the size of Qwen3-0.6B, in both conventions
                      (`model_flops`), with new lengths every round, and the tokens/s of a plain transformers loop
mfu_7b_slice          the same with the layers of Qwen2.5-7B, as many as fit on the GPU with their training state
rollout_transformers  tokens/s of the embedded engine at the size of Qwen3-0.6B
rollout_vllm          the same with vLLM, if it is installed
sync_shards           a policy version from the trainer through a real store into an engine (`weight_sync`), relative to
                      a copy from the device to the host
sync_device           a version from the trainer's memory into another process's: by CUDA IPC on a GPU, by gloo on a
                      CPU, relative to a copy on the device
update                forward + backward, and the whole update, at the size of Qwen3-0.6B: ours, a plain loop with a
                      transformers model under FSDP2 (`fully_shard`), and TRL's GRPOTrainer (forward + backward only),
                      with micro-batches of equally many tokens
step                  whole steps with rollout, reference and update, and TRL's; on fewer than three GPUs, our services
                      take turns on one

TRL runs in the environment of `make peers`, or in this one if it is installed here.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tests.bench import own_process
from tests.bench.own_process import ROOT, Measured, Missing, full_size

WHOLE_S = 2400.0
"""Maximum seconds for all parts together."""
LIMITS_S = {
    "mfu_06b": 300.0,
    "mfu_7b_slice": 400.0,
    "rollout_transformers": 300.0,
    "rollout_vllm": 400.0,
    "sync_shards": 400.0,
    "sync_device": 200.0,
    "update": 600.0,
    "step": 900.0,
}
"""The parts in order, each with its limit in seconds."""
GOALS = {
    "mfu_06b": "mfu >= 0.30",
    "mfu_7b_slice": "mfu >= 0.40",
    "sync_device": "of_copy >= 0.5",
}
MODULE = "tests.bench.bench_gpu"
SIDE_S = 300.0
NO_TRL = "not installed: trl with a torch build for this device"
SYNCS = 5
LINK_S = 60.0


# ---- training


def mfu_06b(device: str) -> Measured:
    from tests.bench.train_parts import against_plain

    return against_plain(device)


def mfu_7b_slice(device: str) -> Measured:
    from tests.bench.train_parts import SLICE_MICRO_BATCH, against_plain, slice_or_small

    return against_plain(device, slice_or_small, SLICE_MICRO_BATCH)


def update(device: str) -> Measured:
    """Measure forward, backward and update of all sides on the same lengths."""
    import numpy as np

    from tests.bench import train_parts
    from tests.bench.cluster_run import last_line
    from tests.bench.train_parts import new_lengths, qwen3_or_small, save_model

    lengths = np.sort(new_lengths(np.random.default_rng(0), device))[::-1].tolist()
    prompt, micro_batch = (256, 8192) if full_size(device) else (8, 256)
    found: Measured = {"tokens": sum(lengths), "micro_batch_tokens": micro_batch}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = Path(name)
        batch = folder / "batch.json"
        batch.write_text(json.dumps({"lengths": lengths, "prompt": prompt, "micro_batch": micro_batch}))
        for side in ("ours", "fsdp2"):
            if device == "cpu":
                found[side] = own_process.run_forked(partial(train_parts.update, side, batch, device), {}, SIDE_S)
                continue
            command = [sys.executable, "-m", "tests.bench.train_parts", "update", side, str(batch), device]
            found[side] = last_line(command, side, SIDE_S)
        python = trl_python(device)
        if python is None:
            return found | {"trl": NO_TRL}
        config = qwen3_or_small(device)
        save_model(config, folder / "model", device)
        copy_tokenizer(folder / "model")
        ids = np.random.default_rng(0).integers(4, config.vocab_size, sum(lengths)).tolist()
        ends = np.cumsum(lengths).tolist()
        sequences = [ids[end - length : end] for length, end in zip(lengths, ends, strict=True)]
        prompts, completions = [each[:prompt] for each in sequences], [each[prompt:] for each in sequences]
        batch.write_text(json.dumps({"prompts": prompts, "completions": completions}))
        script = ROOT / "tests" / "bench" / "peers" / "trl_update.py"
        command = [str(python), str(script), "--model", str(folder / "model"), "--batch", str(batch)]
        command += ["--max-tokens", str(micro_batch), "--device", device]
        command += ["--dtype", "bfloat16" if device == "cuda" else "float32"]
        found["trl"] = last_line(command, "TRL", SIDE_S)
    return found


def trl_python(device: str) -> Path | None:
    """Return a Python interpreter that can import TRL, with a torch build for the device, or None if there is none."""
    from tests.bench.against_trl import PEER_PYTHON

    if PEER_PYTHON.exists():
        build = "import sys, torch; sys.exit(torch.version.cuda is None)"
        if device == "cpu" or subprocess.run([PEER_PYTHON, "-c", build], check=False).returncode == 0:
            return PEER_PYTHON
    return Path(sys.executable) if importlib.util.find_spec("trl") is not None else None


def copy_tokenizer(folder: Path) -> None:
    """Give a random model the quickstart's tokenizer."""
    from tests.bench.cluster_run import MODEL
    from tests.bench.random_model import TOKENIZER

    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder / name)


# ---- rollout


def rollout_transformers(device: str) -> Measured:
    from services.rollout.engines.transformers_engine import TransformersEngine

    def make(model: Path, dtype: str) -> Any:
        return TransformersEngine(model=model, dtype=dtype, threads=1, deterministic=False, device=device)

    return asyncio.run(_rollout(make, device))


def rollout_vllm(device: str) -> Measured:
    if importlib.util.find_spec("vllm") is None:
        raise Missing("not installed: vllm")
    from services.rollout.engines.vllm_engine import VllmEngine

    arguments = {"max_model_len": 1024 if full_size(device) else 64}

    def make(model: Path, dtype: str) -> Any:
        return VllmEngine(model=model, dtype=dtype, threads=1, deterministic=False, engine_args=arguments)

    return asyncio.run(_rollout(make, device))


async def _rollout(make: Callable[[Path, str], Any], device: str) -> Measured:
    """Return tokens/s of an engine, after a first block that is not counted."""
    from services.rollout.engine import Prompt, SamplingParams
    from shared.ranks.process_group import own_device
    from tests.bench.train_parts import qwen3_or_small, save_model

    own_device(device, 0)
    prompts, samples, length, tokens = (32, 8, 128, 256) if full_size(device) else (4, 2, 8, 16)
    dtype = "bfloat16" if device == "cuda" else "float32"
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        model = Path(name) / "model"
        config = qwen3_or_small(device)
        save_model(config, model, device, getattr(torch, dtype))
        copy_tokenizer(model)
        engine = make(model, dtype)
        await engine.start()
        try:
            rng = torch.Generator().manual_seed(0)
            rates = []
            for block in range(2):
                ids = torch.randint(4, config.vocab_size, (prompts, length), generator=rng).tolist()
                given = [Prompt(f"{block}-{number}", each) for number, each in enumerate(ids)]
                params = SamplingParams(samples=samples, temperature=1.0, max_new_tokens=tokens, seed=block)
                began = time.perf_counter()
                groups = await engine.generate(given, params, threading.Event())
                made = sum(len(each.token_ids) for group in groups for each in group)
                rates.append(made / (time.perf_counter() - began))
        finally:
            await engine.stop()
    return {"sequences": prompts * samples, "tokens": made, "tokens_per_s": rates[-1]}


# ---- weights


def copy_rates(device: str, nbytes: int) -> dict[str, float]:
    """Return bytes/s of copies of at least 64 MiB on the device, and from the device to page-locked memory of the
    host."""
    on_gpu = device == "cuda"
    nbytes = max(nbytes, 64 << 20)
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=on_gpu)

    def rate(into: torch.Tensor) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            into.copy_(source, non_blocking=True)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return nbytes / min(times)

    return {"device_to_device_bytes_per_s": rate(target), "device_to_host_bytes_per_s": rate(host)}


def sync_shards(device: str) -> Measured:
    from tests.bench import weight_sync
    from tests.bench.train_parts import qwen3_or_small, save_model

    engines = ["transformers"]
    if device == "cuda" and importlib.util.find_spec("vllm") is not None:
        engines.append("vllm")
    dtype = "bfloat16" if device == "cuda" else "float32"
    found: Measured = {}
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        model = Path(name) / "model"
        save_model(qwen3_or_small(device), model, device, getattr(torch, dtype))
        copy_tokenizer(model)
        for engine in engines:
            if device == "cpu":
                measured = weight_sync.measure_here(engine, model, SYNCS, 2, dtype, device)
            else:
                measured = weight_sync.measure_alone(engine, model, SYNCS, 2, dtype, SIDE_S, device)
            rates = copy_rates(device, measured.nbytes)
            rate = measured.nbytes / median(each.total for each in measured.syncs)
            of_copy = rate / rates["device_to_host_bytes_per_s"]
            found[engine] = {"bytes": measured.nbytes, "bytes_per_s": rate, "of_copy": of_copy, **rates}
            parts = zip(*(each.parts for each in measured.syncs), strict=True)
            found[engine]["parts_s"] = dict(zip(weight_sync.PARTS, map(median, parts), strict=True))
    return found


def sync_device(device: str) -> Measured:
    """Send versions to another process with the trainer's own channels. What the engine does with them is left out."""
    from msgspec.msgpack import encode

    from proto.messages import TransferOffer
    from services.policy_trainer.worker.weights.channels import LiveWeights, OutgoingWeights, open_channel
    from shared.ranks.meeting import LOOPBACK, Meeting
    from shared.weights.weight_set import described, in_parts

    on_gpu = device == "cuda"
    size = (64 << 20) if full_size(device) else (64 << 10)
    weights = {f"weight-{number}": torch.zeros(size, dtype=torch.bfloat16, device=device) for number in range(32)}
    nbytes = sum(each.nbytes for each in weights.values())
    live = LiveWeights(device)
    times = []
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        channel = open_channel(
            "ipc" if on_gpu else "gloo",
            Meeting(LOOPBACK, file=Path(name) / "meeting"),
            2,
            device=f"{device}:0" if on_gpu else device,
            deadline_s=LINK_S,
        )
        command = [sys.executable, "-m", MODULE, "--device", device, "--receive", name]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        with subprocess.Popen(command, **pipes) as receiver:
            assert receiver.stdin is not None
            assert receiver.stdout is not None
            receiver.stdout.readline()  # it is ready
            for number in range(1, SYNCS + 2):
                for each in weights.values():
                    each.fill_(number)
                if on_gpu:
                    torch.cuda.synchronize()
                live.show((0, number), weights)
                outgoing = OutgoingWeights(described(weights), lambda: weights, live, (0, number))
                table = outgoing.parameters
                began = time.perf_counter()
                for part in in_parts(table, channel.part_bytes):
                    offer = TransferOffer(
                        communicator=1,
                        number=number,
                        deadline_s=LINK_S,
                        parameters=table,
                        first=part.start,
                        left=len(table) - part.stop,
                    )
                    carried = replace(outgoing, parameters=table[part])
                    offer = channel.announce(offer, carried)
                    receiver.stdin.write(base64.b64encode(encode(offer)).decode() + "\n")
                    receiver.stdin.flush()
                    channel.send(carried)
                    arrived = json.loads(receiver.stdout.readline())
                    channel.ended()
                    assert arrived == [number] * 2, f"version {number} arrived as {arrived}"
                times.append(time.perf_counter() - began)
            channel.close()
            receiver.stdin.close()
    rates = copy_rates(device, nbytes)
    rate = nbytes / median(times[1:])
    of_copy = rate / rates["device_to_device_bytes_per_s"]
    return {"bytes": nbytes, "bytes_per_s": rate, "of_copy": of_copy, **rates}


def receive(device: str, folder: Path) -> None:
    """Receive the versions of `sync_device`, whose offers are lines of the standard input, into tensors of this
    process."""
    from msgspec.msgpack import decode
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from proto.messages import TransferOffer
    from shared.ranks.meeting import LOOPBACK, Meeting
    from shared.weights.gloo import GlooGroup
    from shared.weights.memory import opening
    from shared.weights.weight_set import room_for

    mine: list[torch.Tensor] = []
    memory: torch.Tensor | None = None
    group: GlooGroup | None = None
    torch.zeros(1, device=device)
    print("ready", flush=True)
    for line in sys.stdin:
        offer = decode(base64.b64decode(line), type=TransferOffer)
        mine = mine or [each.to(device) for each in room_for(offer.parameters).values()]
        if offer.memory is None:
            if group is None:
                meeting = Meeting(LOOPBACK, file=folder / offer.meeting)
                group = GlooGroup(meeting, 1, 2, deadline_s=LINK_S)
            carried = mine
            group.broadcast(carried)
        else:
            carried, end = mine[offer.first : len(mine) - offer.left], 0
            memory = rebuild_cuda_tensor(*opening(offer.memory)) if memory is None else memory
            for each in carried:
                begin, end = end, end + each.nbytes
                each.copy_(memory[begin:end].view(each.dtype).view(each.shape))
            torch.cuda.synchronize()
            memory = memory if offer.left else None
        print(json.dumps([int(carried[0][0]), int(carried[-1][-1])]), flush=True)


# ---- whole


def step(device: str) -> Measured:
    """Measure whole steps of a run and of TRL, with as many tokens in a micro-batch."""
    from tests.bench.against_trl import Settings, Work, measure_cluster, measure_trl
    from tests.bench.cluster_run import MODEL
    from tests.bench.train_parts import qwen3_or_small, save_model

    on_gpu = device == "cuda"
    tokens, tasks, micro_batch = (128, 16, 32) if full_size(device) else (8, 8, 64)
    work = Work("step", tokens, tasks, steps=8 if full_size(device) else 4, warm_up=2, trained=False)
    limit = micro_batch * (tokens + 16)
    settings = [f"services.{name}.max_tokens_per_micro_batch={limit}" for name in ("policy-trainer", "reference")]
    apart = not on_gpu or torch.cuda.device_count() >= 3
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        model = MODEL
        if on_gpu:
            model = Path(name) / "model"
            save_model(qwen3_or_small(device), model, device)
            copy_tokenizer(model)
            settings += ["policy.dtype=bfloat16", "services.batch-store.memory=16GiB", "checkpoint.memory_every=null"]
            settings += [f"services.{each}.gpus=1" for each in ("policy-trainer", "reference", "rollout")]
        if not apart:
            settings.append("placement.colocate=[policy-trainer, reference, rollout]")
        staleness = 1 if apart else 0
        ours = measure_cluster(work, model, staleness, SIDE_S, settings)
        found: Measured = {
            "samples": work.samples,
            "max_new_tokens": tokens,
            "micro_batch_tokens": limit,
            "staleness": staleness,
            "apart": apart,
            "samples_per_s": ours.samples_per_s,
        }
        python = trl_python(device)
        if python is None:
            return found | {"trl": NO_TRL}
        options = ["--device", device, "--dtype", "bfloat16" if on_gpu else "float32"]
        trl = Settings(threads=2, micro_batch=min(micro_batch, work.samples), generation_batch=work.samples)
        theirs = measure_trl(work, model, trl, SIDE_S, python=python, options=options)
    ratio = ours.samples_per_s / theirs.samples_per_s
    return found | {"trl_samples_per_s": theirs.samples_per_s, "of_trl": ratio}


# ---- the command

PARTS: Mapping[str, Callable[[str], Measured]] = {
    part.__name__: part
    for part in (
        *(mfu_06b, mfu_7b_slice, rollout_transformers, rollout_vllm),
        *(sync_shards, sync_device, update, step),
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", choices=tuple(PARTS), nargs="+", default=tuple(PARTS), metavar="PART")
    parser.add_argument("--part", choices=tuple(PARTS), help="measure this part in this process")
    parser.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="give a GPU as little work as a CPU")
    given = parser.parse_args()
    if given.small:
        os.environ[own_process.SMALL] = "1"
    if given.receive is not None:
        receive(given.device, given.receive)
        return 0
    if given.part is not None:
        own_process.answer(PARTS, given.part, given.device)
        return 0

    def run_one(name: str, line: Measured, limit_s: float) -> Measured:
        if given.device == "cpu":
            import tests.bench.train_parts
            import tests.bench.weight_sync  # noqa: F401  # the forks inherit what these import

            return own_process.run_forked(partial(PARTS[name], "cpu"), line, limit_s)
        command = [sys.executable, "-m", MODULE, "--device", given.device, "--part", name]
        return own_process.run(command, line, limit_s)

    chosen = {name: limit_s for name, limit_s in LIMITS_S.items() if name in given.only}
    return own_process.run_all("part", chosen, run_one, WHOLE_S, GOALS)


if __name__ == "__main__":
    sys.exit(main())
