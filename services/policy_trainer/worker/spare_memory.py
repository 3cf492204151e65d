"""Decides whether a copy of the whole model has room on a GPU beside the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FULL = 0.9
"""Maximum fraction of a GPU's memory to use. The rest covers what the allocator loses to fragments."""


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one GPU in bytes: the most that this process has allocated so far, and all that it can have, which is
    everything that other processes do not use."""

    peak: int
    total: int


def memory_use(device: torch.device) -> MemoryUse:
    """Return the use of the memory of a GPU."""
    cuda: Any = torch.cuda  # torch.cuda is partly untyped
    free, _ = cuda.mem_get_info(device)
    return MemoryUse(cuda.max_memory_allocated(device), free + cuda.memory_reserved(device))


class SpareMemory:
    """The memory of one rank's device that training does not need. It is known once an update has been made."""

    def __init__(self, device: torch.device, use: Callable[[torch.device], MemoryUse] = memory_use) -> None:
        """`use` measures the memory of `device`."""
        self._device = device
        self._use = use
        self._trained = False
        self._granted = 0
        """Size of the largest copy that may be part of the peak."""

    def updated(self) -> None:
        """Record that the peak covers a whole update."""
        self._trained = True

    def place_for(self, nbytes: int) -> torch.device:
        """Return this device if a copy of `nbytes` can stay there while training continues, otherwise the CPU."""
        if self._device.type == "cpu" or not self._trained:
            return torch.device("cpu")
        use = self._use(self._device)
        if use.peak + max(0, nbytes - self._granted) > FULL * use.total:
            return torch.device("cpu")
        self._granted = max(self._granted, nbytes)
        return self._device
