"""Runs one function on every rank of a real process group, with one process per rank. A single rank has no group,
unless the function opens one, as megatron's does.

A function is named `module:function`, takes (place, folder) and writes its results to `<folder>/rank-<r>/...`. Ranks
are forked from a server that has imported torch, transformers and megatron-core. This saves seven seconds per rank.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

import torch

from services.policy_trainer.metrics import add_up
from shared.ranks.layout import Layout

SUM = "sum/"
LIMIT_S = 240.0
COLLECTIVE_S = 60.0
# torch then counts GPUs without CUDA, which a fork of the server could not use after the server has.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def sums_of(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Return the sums over all ranks, as the driver computes them. `parts` has an entry per rank, in which sums are
    named `sum/<name>`."""
    totals: dict[str, float] = {}
    for part in parts:
        add_up(totals, {name.removeprefix(SUM): value for name, value in part.items() if name.startswith(SUM)})
    return totals


def run_group(function: str, layout: Layout, folder: Path, device: str = "cpu") -> None:
    """Start `layout.world_size` processes and wait for them. If a rank fails, the test fails with that rank's
    output."""
    folder.mkdir(parents=True)
    context = _server()
    processes = []
    for rank in range(layout.world_size):
        (folder / f"rank-{rank}").mkdir()
        degrees = (layout.world_size, layout.tp, layout.pp, layout.cp, layout.ep)
        process = context.Process(target=_rank, args=(function, str(folder), degrees, rank, device), daemon=True)
        process.start()
        processes.append(process)
    try:
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(10)
    for rank, process in enumerate(processes):
        said = (folder / f"rank-{rank}.txt").read_text()
        assert process.exitcode == 0, f"rank {rank} of {layout}:\n{said[-4000:]}"


def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.parity.preloaded"])
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def _rank(function: str, folder: str, degrees: tuple[int, int, int, int, int], rank: int, device: str) -> None:
    import torch.distributed as dist

    from shared.ranks.meeting import LOOPBACK, Meeting
    from shared.ranks.process_group import open_group

    with (Path(folder) / f"rank-{rank}.txt").open("wb", buffering=0) as output:
        os.dup2(output.fileno(), sys.__stdout__.fileno())
        os.dup2(output.fileno(), sys.__stderr__.fileno())
    code = 1
    try:
        torch.set_num_threads(1)
        place = Layout(*degrees).place(rank)
        module, _, name = function.partition(":")
        work = getattr(importlib.import_module(module), name)
        if place.layout.world_size > 1:  # as in `start.make_backend`
            open_group(Meeting(LOOPBACK, file=Path(folder) / "group"), place, device, deadline_s=COLLECTIVE_S)
        work(place, Path(folder))
        if place.layout.world_size > 1:
            dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # The worker exits in the same way, because gloo's threads can abort during interpreter shutdown.
