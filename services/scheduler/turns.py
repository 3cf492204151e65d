"""Which of several weighted sources gives the task at each position of a run. The module is pure.

After any n positions, a source whose weights add up to S(n) has had more than S(n) - 1 and fewer than S(n) + 1 tasks.
The sources take turns by the algorithm of R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32,
1980: of the sources that are due, the one whose deadline comes first has the next turn. It also covers weights that
change with the step. The turns depend on nothing but the weights, so they need no state in the journal.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Weights = tuple[tuple[int, float], ...]
"""Weights of a source, each with the first position that has it. The first position is 0."""
Numbers = npt.NDArray[np.int64]
BLOCK = 1 << 16
"""Number of positions whose turns are computed at a time."""
_ROUNDING = 1e-6
"""A source may be due this part of a task too early, because sums of weights are rounded."""


class SourceTurns:
    """The endless sequence of turns. It remembers the number of turns of each source before every block."""

    def __init__(self, weights: Sequence[Weights]) -> None:
        self._shares = [_Shares(own, weights) for own in weights]
        self._slack = 1.0 / max(2 * len(weights) - 2, 1)
        self._before = [np.zeros(len(weights), np.int64)]
        """For each block and for the one after the last, the number of turns of each source before it."""
        self._block = -1
        self._sources = self._tasks = np.zeros(0, np.int64)

    def some(self, position: int, count: int) -> tuple[Numbers, Numbers]:
        """Return, for `count` tasks from `position`, the index of the source and the number of its earlier tasks."""
        if len(self._shares) == 1:
            return np.zeros(count, np.int64), np.arange(position, position + count)
        parts = []
        while count > 0:
            block, offset = divmod(position, BLOCK)
            self._load(block)
            part = slice(offset, offset + count)
            parts.append((self._sources[part], self._tasks[part]))
            position, count = position + len(parts[-1][0]), count - len(parts[-1][0])
        empty = np.zeros(0, np.int64)
        sources, tasks = zip((empty, empty), *parts, strict=True)
        return np.concatenate(sources), np.concatenate(tasks)

    def _load(self, block: int) -> None:
        for number in range(min(block, len(self._before) - 1), block + 1):
            if number != self._block:
                self._block = number
                self._sources, self._tasks = self._turns(number * BLOCK, self._before[number])
            if number + 1 == len(self._before):
                more = np.bincount(self._sources, minlength=len(self._shares))
                self._before.append(self._before[number] + more)

    def _turns(self, first: int, before: Numbers) -> tuple[Numbers, Numbers]:
        """Return the sources and the tasks of the block that begins at position `first`."""
        tasks, sources, due, deadline = [], [], [], []
        for index, shares in enumerate(self._shares):
            most = int(shares.at(first + BLOCK) - self._slack + _ROUNDING) + 1
            own = np.arange(before[index], max(most, before[index]))
            tasks.append(own)
            sources.append(np.full(len(own), index))
            due.append(np.ceil(shares.when(own + (self._slack - _ROUNDING))))
            deadline.append(shares.when(own + (1.0 - self._slack)))
        source, task = np.concatenate(sources), np.concatenate(tasks)
        by_deadline = np.argsort(np.concatenate(deadline), kind="stable")
        rank = np.empty(len(task), np.int64)
        rank[by_deadline] = np.arange(len(task))
        slots = np.concatenate(due)
        by_slot = np.argsort(slots, kind="stable")
        chosen = by_deadline[_earliest(slots[by_slot].tolist(), rank[by_slot].tolist(), first)]
        return source[chosen], task[chosen]


def _earliest(slots: list[float], ranks: list[int], first: int) -> list[int]:
    """Return, for each position of a block, the lowest rank among the tasks that are due and have had no turn. Task i
    is due once `slots[i]` positions, its own among them, have passed; `slots` ascends."""
    waiting: list[int] = []
    chosen: list[int] = []
    at, tasks, push, pop = 0, len(slots), heapq.heappush, heapq.heappop
    for slot in range(first + 1, first + BLOCK + 1):
        while at < tasks and slots[at] <= slot:
            push(waiting, ranks[at])
            at += 1
        chosen.append(pop(waiting))
    return chosen


class _Shares:
    """The sum of one source's share of the weights over the positions of a run: piecewise linear, and never falling."""

    def __init__(self, own: Weights, every: Sequence[Weights]) -> None:
        starts = sorted({position for weights in every for position, _ in weights})
        total = sum(np.array([_weight(weights, start) for start in starts]) for weights in every)
        self._starts = np.array(starts, np.float64)
        self._slopes = np.array([_weight(own, start) for start in starts]) / total
        self._sums = np.concatenate([[0.0], np.cumsum(np.diff(self._starts) * self._slopes[:-1])])

    def at(self, position: float) -> float:
        """Return the sum over all positions before `position`."""
        part = int(np.searchsorted(self._starts, position, side="right")) - 1
        return float(self._sums[part] + (position - self._starts[part]) * self._slopes[part])

    def when(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the first positions at which the sum reaches `sums`; infinity where it never does."""
        part = np.maximum(np.searchsorted(self._sums, sums, side="left") - 1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self._starts[part] + (sums - self._sums[part]) / self._slopes[part])


def _weight(weights: Weights, position: int) -> float:
    return next(weight for start, weight in reversed(weights) if start <= position)
