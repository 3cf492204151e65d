"""Opens the process group of ranks that have met, and the key-value store through which its ranks find each other."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from shared.ranks.layout import RankPlace
from shared.ranks.meeting import NCCL_INTERFACE, Meeting, exactly


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


def open_store(meeting: Meeting, ranks: int, limit: timedelta) -> Store:
    """Return the store for `ranks` ranks. A wait that takes longer than `limit` raises RuntimeError."""
    if meeting.file is not None:
        store = FileStore(str(meeting.file), ranks)
        store.set_timeout(limit)
        return store
    host, _, port = meeting.store.rpartition(":")
    listener = meeting.listener.detach() if meeting.listener is not None else None
    return TCPStore(
        host,
        int(port),
        ranks,
        listener is not None,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener,
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
