"""Counts dropped training tasks and samples without a reward, by reason. The module is pure.

Counts are kept by admission number until the batch to which the task belongs is formed, so the counts of a step do not
depend on when results arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from proto.messages import DropReason, LossReason, TaskResult

_DROPS = frozenset(DropReason)
_LOSSES = frozenset(LossReason)


def drop_reason(why: str) -> DropReason:
    """Return the reason that a peer gave, or OTHER if the reason is empty or comes from a later release."""
    return DropReason(why) if why in _DROPS else DropReason.OTHER


@dataclass
class Filtered:
    """Counts of tasks and samples dropped because all rewards of a task were equal, and the sum of those rewards."""

    tasks: int = 0
    samples: int = 0
    reward_sum: float = 0.0

    def __add__(self, other: Filtered) -> Filtered:
        return Filtered(self.tasks + other.tasks, self.samples + other.samples, self.reward_sum + other.reward_sum)


@dataclass
class Losses:
    """Total counts (`dropped`, `lost`) and the counts of the newest batch (`batch_drops`, `batch_lost`)."""

    dropped: dict[str, int] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    counted_drops: dict[int, str] = field(default_factory=dict)
    """Reason of each drop that the newest batch has counted, by admission number."""
    counted_lost: dict[int, dict[str, int]] = field(default_factory=dict)
    """Lost samples that the newest batch has counted, by admission number."""
    open_drops: dict[int, str] = field(default_factory=dict)
    """Reason of each drop that no batch has counted, by admission number."""
    open_lost: dict[int, dict[str, int]] = field(default_factory=dict)
    """Lost samples that no batch has counted, by admission number."""
    filtered: Filtered = field(default_factory=Filtered)
    """Tasks that were filtered since the newest batch."""
    batch_filtered: Filtered = field(default_factory=Filtered)

    def drop(self, admission: int, reason: DropReason) -> None:
        """Count a dropped task."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        self.open_drops[admission] = reason

    def lose(self, admission: int, result: TaskResult) -> None:
        """Count the lost samples, if any, of an accepted result."""
        counts: Counter[str] = Counter()
        for reason, count in result.lost.items():
            counts[reason if reason in _LOSSES else LossReason.OTHER] += count
        unknown = result.samples_failed - counts.total()
        if unknown > 0:
            counts[LossReason.OTHER] += unknown
        if counts:
            self.lost = dict(Counter(self.lost) + counts)
            self.open_lost[admission] = dict(counts)

    def batched(self, taken: Iterable[int], is_over: Callable[[int], bool]) -> None:
        """Count the losses of a batch: the losses of the tasks `taken`, and the drops for which `is_over` is true.

        `is_over` returns whether a drop belongs to this batch or an earlier one.
        """
        over = [admission for admission in self.open_drops if is_over(admission)]
        self.counted_drops = {admission: self.open_drops.pop(admission) for admission in over}
        self.counted_lost = {
            admission: self.open_lost.pop(admission) for admission in (*taken, *over) if admission in self.open_lost
        }
        self.batch_filtered, self.filtered = self.filtered, Filtered()

    def put_back(self) -> None:
        """Undo `batched`: the next batch counts again everything that the newest batch has counted."""
        self.open_drops |= self.counted_drops
        self.open_lost |= self.counted_lost
        self.filtered += self.batch_filtered
        self.counted_drops, self.counted_lost, self.batch_filtered = {}, {}, Filtered()

    @property
    def batch_drops(self) -> dict[str, int]:
        """Number of drops that the newest batch has counted, by reason."""
        return dict(sorted(Counter(self.counted_drops.values()).items()))

    @property
    def batch_lost(self) -> dict[str, int]:
        """Number of lost samples that the newest batch has counted, by reason."""
        lost: Counter[str] = Counter()
        for counts in self.counted_lost.values():
            lost.update(counts)
        return dict(sorted(lost.items()))
