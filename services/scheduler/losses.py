"""Losses of training: dropped tasks, and samples without a reward, counted by reason. Pure.

Counts are kept by admission number until the batch to which the task belongs is formed, so the counts of a step do not
depend on when results arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from proto.messages import DropReason, LossReason, TaskResult

_DROPS = frozenset(DropReason)
_LOSSES = frozenset(LossReason)


def drop_reason(why: str) -> DropReason:
    """Return the reason that a peer gave, or OTHER if it is empty or of a later release."""
    return DropReason(why) if why in _DROPS else DropReason.OTHER


class Losses:
    """Total counts (`dropped`, `lost`) and those of the newest batch (`batch_drops`, `batch_lost`)."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.batch_drops: dict[str, int] = {}
        self.batch_lost: dict[str, int] = {}
        self._drops: dict[int, str] = {}
        self._samples: dict[int, dict[str, int]] = {}

    def drop(self, admission: int, reason: DropReason) -> None:
        """Count a dropped task."""
        self.dropped[reason] += 1
        self._drops[admission] = reason

    def lose(self, admission: int, result: TaskResult) -> None:
        """Count the lost samples, if any, of an accepted result."""
        counts: Counter[str] = Counter()
        for reason, count in result.lost.items():
            counts[reason if reason in _LOSSES else LossReason.OTHER] += count
        unknown = result.samples_failed - counts.total()
        if unknown > 0:
            counts[LossReason.OTHER] += unknown
        if counts:
            self.lost += counts
            self._samples[admission] = dict(counts)

    def batched(self, taken: Iterable[int], is_over: Callable[[int], bool]) -> None:
        """Count a batch of the tasks `taken` and the drops that `is_over` assigns to this or an earlier batch."""
        over = [admission for admission in self._drops if is_over(admission)]
        self.batch_drops = _ordered(Counter(self._drops.pop(admission) for admission in over))
        lost: Counter[str] = Counter()
        for admission in (*taken, *over):
            lost.update(self._samples.pop(admission, {}))
        self.batch_lost = _ordered(lost)

    def dump(self) -> dict[str, Any]:
        return {
            "totals": [self.dropped, self.lost],
            "batch": [self.batch_drops, self.batch_lost],
            "open": [list(self._drops.items()), list(self._samples.items())],
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> Losses:
        losses = cls()
        losses.dropped, losses.lost = map(Counter, data["totals"])
        losses.batch_drops, losses.batch_lost = data["batch"]
        losses._drops, losses._samples = map(dict, data["open"])
        return losses


def _ordered(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))
