"""Shares GPU memory with another process on the same GPU through CUDA IPC. The memory is described by a message, not by
a pickle.

`torch.multiprocessing` sends the same numbers as a pickle. The memory must stay allocated until the other process has
finished with it. torch keeps it until its only reader has closed it, or forever if that reader is gone (see
`withdraw`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from proto.messages import DeviceMemory


def room(nbytes: int, device: str) -> Tensor:
    """Return uninitialised memory, uint8 [nbytes], on `device`."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def pack_into(memory: Tensor, tensors: Iterable[Tensor]) -> int:
    """Copy the bytes of `tensors` to the beginning of `memory`, uint8 [n], on the current stream. Return the number of
    bytes once the copy is complete."""
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        memory[begin:end].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    if memory.device.type == "cuda":
        torch.cuda.current_stream(memory.device).synchronize()
    return end


def exported(memory: Tensor) -> DeviceMemory:
    """Return the message that another process needs to open `memory`, uint8 [n] on a GPU. The memory can be opened
    once."""
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


def withdraw(memory: DeviceMemory) -> None:
    """Stop waiting for the reader of `memory`. The reader either is gone or has not opened the memory; it must not open
    the memory after this call.

    `give_back` then frees the memory. A reader that closes it later does no harm, because memory is kept only while its
    count is above 0.
    """
    storage: Any = torch.UntypedStorage
    storage._release_ipc_counter_cuda(memory.counter, memory.counter_offset)


def give_back() -> None:
    """Release GPU memory that no process uses."""
    cuda: Any = torch.cuda  # torch.cuda is partly untyped
    cuda.ipc_collect()
    cuda.empty_cache()
