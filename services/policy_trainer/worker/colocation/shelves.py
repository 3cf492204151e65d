"""Moves the parts of a backend's state off the device and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from services.policy_trainer.worker.colocation.residency import PARTS, Part
from shared.colocation.shelf import Shelf


class PartShelves:
    """One shelf for each part of this rank's state. Use them only on the compute thread."""

    def __init__(self, folder: Path, tensors: Callable[[Part], list[Tensor]]) -> None:
        """`tensors` returns the current tensors of a part. Those on a CPU are written to files in `folder`."""
        self._tensors = tensors
        self._shelves = {part: Shelf(folder / f"{part}.bin") for part in PARTS}

    def offload(self, parts: frozenset[Part]) -> int:
        """Free the device memory of `parts`, keep their bits, and return the number of bytes freed. Repeated calls do
        nothing."""
        there = [part for part in sorted(parts) if not self._shelves[part].holds]
        return sum(self._shelves[part].put(self._tensors(part)) for part in there)

    def backload(self, parts: frozenset[Part] = PARTS) -> int:
        """Move `parts` back to the device and return the number of bytes moved. Repeated calls do nothing."""
        return sum(self._shelves[part].take() for part in sorted(parts))
