"""The tasks that wait for one stage, as admission numbers, oldest first.

The task table is authoritative: readers skip entries whose task no longer waits, and the line can be rebuilt from the
table.
"""

from __future__ import annotations

import heapq


class WaitingLine:
    """A range of newly admitted tasks, which takes no entry per task, and a heap of those that are added singly."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._fresh = range(0)

    def __len__(self) -> int:
        """Return the number of entries, including tasks that no longer wait."""
        return len(self._heap) + len(self._fresh)

    def admit(self, first: int, end: int) -> None:
        """Append the newly admitted tasks `[first, end)`. Admission numbers are consecutive."""
        self._fresh = range(self._fresh.start if self._fresh else first, end)

    def push(self, admission: int) -> None:
        heapq.heappush(self._heap, admission)

    def peek(self) -> int | None:
        """Return the lowest number, or None."""
        if self._heap and (not self._fresh or self._heap[0] <= self._fresh.start):
            return self._heap[0]
        return self._fresh.start if self._fresh else None

    def pop(self) -> int:
        """Remove and return the lowest number. The line must not be empty."""
        if self._heap and (not self._fresh or self._heap[0] <= self._fresh.start):
            return heapq.heappop(self._heap)
        first = self._fresh.start
        self._fresh = self._fresh[1:]
        return first

    def fill(self, waiting: list[int]) -> None:
        """Replace the content with these sorted numbers. The consecutive run at the end is kept as a range."""
        cut = len(waiting)
        while cut > 0 and waiting[cut - 1] == waiting[-1] - (len(waiting) - cut):
            cut -= 1
        self._heap = waiting[:cut]
        self._fresh = range(waiting[cut], waiting[-1] + 1) if cut < len(waiting) else range(0)
