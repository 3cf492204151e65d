"""Opens the process group of ranks that have met."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from shared.ranks.layout import RankPlace
from shared.ranks.meeting import NCCL_INTERFACE, Meeting, exactly
from shared.ranks.store import open_store


def open_group(meeting: Meeting, place: RankPlace, device: str, *, deadline_s: float) -> None:
    """Join the group of all ranks, which meet at `meeting`. This blocks until all have joined.

    A collective that takes longer than `deadline_s` raises RuntimeError.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
    os.environ.setdefault(NCCL_INTERFACE, exactly(meeting.interface))
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=open_store(meeting, place.layout.world_size, timedelta(seconds=deadline_s)),
        rank=place.rank,
        world_size=place.layout.world_size,
        timeout=timedelta(seconds=deadline_s),
    )


def own_device(kind: str, rank: int) -> str:
    """Return the device of `rank` as torch names it (`cpu`, `cuda:0`) and make it torch's current device.

    Call it before the first computation of the process: it also selects torch's kernels.
    """
    if kind != "cuda":
        return kind
    # cuDNN's attention, which torch prefers on Hopper, builds a plan for every new shape, and every batch has new
    # shapes.
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    # The launcher makes only one GPU visible to a rank; a rank started by hand may see all of them.
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return f"cuda:{index}"
