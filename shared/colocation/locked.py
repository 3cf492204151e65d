"""Page-locked host memory. Copies between it and a GPU are fast and can overlap with other work."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGN = 512
"""Alignment of the pieces in bytes, as in torch's own GPU allocations."""


class LockedMemory:
    """One range of page-locked memory, divided into pieces. It stays allocated and locked as long as the object lives.

    `torch.empty(pin_memory=True)` rounds each allocation up to a power of two, which takes 1.9 times the bytes for the
    optimizer of a 7B-parameter model. Locking also costs more than a copy, so a range is worth keeping.
    """

    def __init__(self, sizes: Sequence[int], *, lock: bool = True) -> None:
        """`sizes` are in bytes. Without CUDA, `lock` must be false. Raises RuntimeError if locking fails."""
        self.sizes = list(sizes)
        self.nbytes = sum(map(_aligned, sizes))
        self._memory = mmap.mmap(-1, max(self.nbytes, 1))
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        if lock:
            status = _runtime().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
            if int(status) != 0:
                raise RuntimeError(f"{self.nbytes} bytes of host memory cannot be page-locked: {status}")
            # The range must be unlocked while it is still mapped, so the finalizer keeps a reference to it.
            weakref.finalize(self, _unlock, whole)
        self.pieces: list[Tensor] = []
        """uint8 tensors of `sizes` bytes."""
        offset = 0
        for size in sizes:
            self.pieces.append(whole[offset : offset + size])
            offset += _aligned(size)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _unlock(whole: Tensor) -> None:
    _runtime().cudaHostUnregister(whole.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
