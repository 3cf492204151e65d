"""The tasks that wait for one stage, oldest first, as admission numbers. It must never be the truth about a task: an
entry whose task no longer waits is skipped by whoever looks, and the whole line can be made anew from the table.
"""

from __future__ import annotations

import heapq


class WaitingLine:
    """Newly admitted tasks are a range, without an entry each; those that come later or again are a heap."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._fresh = range(0)

    def __len__(self) -> int:
        """Entries, those that no longer wait included."""
        return len(self._heap) + len(self._fresh)

    def admit(self, first: int, end: int) -> None:
        """Append the newest tasks, `[first, end)`; the numbers of all that are admitted follow one another."""
        self._fresh = range(self._fresh.start if self._fresh else first, end)

    def push(self, admission: int) -> None:
        heapq.heappush(self._heap, admission)

    def peek(self) -> int | None:
        """The lowest number, or None."""
        if self._heap and (not self._fresh or self._heap[0] <= self._fresh.start):
            return self._heap[0]
        return self._fresh.start if self._fresh else None

    def pop(self) -> int:
        """Remove and return the lowest number; there must be one."""
        if self._heap and (not self._fresh or self._heap[0] <= self._fresh.start):
            return heapq.heappop(self._heap)
        first = self._fresh.start
        self._fresh = self._fresh[1:]
        return first

    def fill(self, waiting: list[int]) -> None:
        """Begin anew with these numbers, in order: the run at the end is kept as a range."""
        cut = len(waiting)
        while cut > 0 and waiting[cut - 1] == waiting[-1] - (len(waiting) - cut):
            cut -= 1
        self._heap = waiting[:cut]
        self._fresh = range(waiting[cut], waiting[-1] + 1) if cut < len(waiting) else range(0)
