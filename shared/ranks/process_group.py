"""Opens the process group of ranks that have met. It uses the loopback interface only."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from shared.ranks.layout import Place


def open_group(file: Path, place: Place, device: str, *, deadline_s: float) -> None:
    """Join the group of all ranks, which meet through `file` (private to the run's owner). It blocks until all joined.

    A collective that takes longer than `deadline_s` raises RuntimeError.
    """
    for library in ("GLOO", "NCCL"):  # all ranks are on this host: loopback only
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    store = FileStore(str(file), place.layout.world_size)
    store.set_timeout(timedelta(seconds=deadline_s))
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=place.rank,
        world_size=place.layout.world_size,
        timeout=timedelta(seconds=deadline_s),
    )


def own_device(kind: str, rank: int) -> str:
    """Return the device of `rank` as torch names it (`cpu`, `cuda:0`) and make it torch's current device."""
    if kind != "cuda":
        return kind
    # The launcher shows a rank one GPU; a rank started by hand may see all of them.
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"
