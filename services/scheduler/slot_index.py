"""An index from the name of a live task to its slot. It takes four bytes per row of every epoch with a live task."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

NO_SLOT: Final = -1
_NUMBER = "I"
_GROWTH = 1024


class SlotIndex:
    """(split, epoch, row index) -> slot. The size of an epoch is its highest row; it is freed with its last task."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[int, int], array[int]] = {}
        """(split, epoch) -> the slot + 1 of each row, or 0."""
        self._live: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return sum(self._live.values())

    def get(self, split: int, epoch: int, row: int) -> int:
        """Return the slot of a row, or NO_SLOT."""
        rows = self._epochs.get((split, epoch))
        return rows[row] - 1 if rows is not None and 0 <= row < len(rows) else NO_SLOT

    def add(self, split: int, epoch: int, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Add rows that have no slot yet, each with its slot."""
        if not rows:
            return
        cells = self._epochs.setdefault((split, epoch), array(_NUMBER))
        missing = max(rows) + 1 - len(cells)
        if missing > 0:
            cells.frombytes(bytes(cells.itemsize * (missing + _GROWTH + len(cells) // 4)))
        for row, slot in zip(rows, slots, strict=True):
            cells[row] = slot + 1
        self._live[split, epoch] = self._live.get((split, epoch), 0) + len(rows)

    def remove(self, split: int, epoch: int, row: int) -> None:
        """Remove a row that has a slot."""
        key = (split, epoch)
        self._epochs[key][row] = 0
        self._live[key] -= 1
        if not self._live[key]:
            del self._live[key], self._epochs[key]
