"""Selects the samples to show: those of a step or of a task, in an order, with the number of samples left out."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from shared.samples.reader import every
from shared.samples.record import SampleRecord, rank


class Order(StrEnum):
    """The samples that are shown first."""

    WORST = "worst"
    BEST = "best"
    LONGEST = "longest"


_KEYS: dict[Order | None, Callable[[SampleRecord], float]] = {
    None: lambda record: 0.0,
    Order.WORST: rank,
    Order.BEST: lambda record: -rank(record),
    Order.LONGEST: lambda record: -record.length,
}


@dataclass(frozen=True)
class SampleSelection:
    """The first samples in some order."""

    records: list[SampleRecord]
    total: int
    """Number of samples that match, including those beyond the limit."""

    @property
    def shown(self) -> str:
        """How many samples are shown: `3 samples`, or `the first 3 of 7 samples`."""
        count, total = len(self.records), f"{self.total:,} sample{'' if self.total == 1 else 's'}"
        return total if count == self.total else f"the first {count:,} of {total}"


def select(
    run: Path,
    *,
    split: str,
    step: int | None = None,
    task: str | None = None,
    order: Order | None = None,
    limit: int | None = None,
) -> SampleSelection:
    """Return the first `limit` samples of one step or all steps, and of one task or all tasks.

    All matching samples are put in order before the limit applies. No more than `limit` of them are held in memory. If
    `order` is None, they stay in the order in which they were written. Otherwise, the records of tasks that ended
    without samples are left out.
    """
    total = 0

    def matching() -> Iterator[SampleRecord]:
        nonlocal total
        for record in every(run, step=step, task=task, split=split):
            if order is None or record.sample >= 0:
                total += 1
                yield record

    # Equal keys keep their order.
    chosen = heapq.nsmallest(sys.maxsize if limit is None else limit, matching(), key=_KEYS[order])
    return SampleSelection(chosen, total)
