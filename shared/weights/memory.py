"""Shares GPU memory with another process on the same GPU through CUDA IPC, described by a message instead of a pickle.

`torch.multiprocessing` sends the same numbers pickled. The memory must stay allocated until the other process has
finished with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from proto.messages import DeviceMemory


def packed(tensors: Mapping[str, Tensor], device: str) -> Tensor:
    """Return uint8 [total bytes] on `device`: the bytes of all tensors in order, without padding."""
    sizes = [each.nbytes for each in tensors.values()]
    copy = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    for part, each in zip(torch.split(copy, sizes), tensors.values(), strict=True):
        part.copy_(each.detach().contiguous().reshape(-1).view(torch.uint8))
    torch.cuda.synchronize(device)
    return copy


def exported(memory: Tensor) -> DeviceMemory:
    """Return the message with which another process opens `memory`, uint8 [n] on a GPU. It can be opened once."""
    from torch.multiprocessing import reductions

    untyped: Any = reductions
    (*_, index, handle, storage_bytes, storage_offset, _, counter, counter_offset, event, event_sync) = (
        untyped.reduce_tensor(memory)[1]
    )
    return DeviceMemory(
        gpu=str(torch.cuda.get_device_properties(index).uuid),
        nbytes=memory.numel(),
        handle=handle,
        storage_bytes=storage_bytes,
        storage_offset=storage_offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        event_sync=event_sync,
    )


def opening(memory: DeviceMemory) -> tuple[Any, ...]:
    """Return the arguments of torch's `rebuild_cuda_tensor` that open `memory` on GPU 0 of this process."""
    return (
        torch.Tensor,
        torch.Size([memory.nbytes]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        0,
        memory.handle,
        memory.storage_bytes,
        memory.storage_offset,
        False,
        memory.counter,
        memory.counter_offset,
        memory.event,
        memory.event_sync,
    )


def give_back() -> None:
    """Release GPU memory that no process uses."""
    cuda: Any = torch.cuda  # torch.cuda is partly untyped
    cuda.ipc_collect()
    cuda.empty_cache()
