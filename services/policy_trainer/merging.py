"""Merges the results of micro-batches, ranks and calls without normalising them. The functions are stateless."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import SupportsFloat, TypeVar, cast

from proto import messages
from proto.registry import Message
from shared.batch import Batch

R = TypeVar("R", bound=Message)
LARGEST = "_max"
"""Suffix of names whose values are combined by taking the maximum instead of the sum."""


def add_up(totals: dict[str, float], part: Mapping[str, SupportsFloat]) -> None:
    """Add `part`, which covers different tokens, to `totals`. For names that end in `_max`, keep the larger value."""
    for name, value in part.items():
        if name.endswith(LARGEST):
            totals[name] = max(totals.get(name, 0.0), float(value))
        else:
            totals[name] = totals.get(name, 0.0) + float(value)


def merged(answers: Sequence[R]) -> R:
    """Merge the answers of all ranks: add up sums, join the parts of a batch, and take the times of the slowest rank.

    For other reply types, return rank 0's answer. `answers` are in rank order and have the same type.
    """
    first = answers[0]
    if isinstance(first, messages.ForwardBackwardDone):
        return cast(R, _gradient(cast(Sequence[messages.ForwardBackwardDone], answers)))
    if isinstance(first, messages.ForwardDone):
        parts = cast(Sequence[messages.ForwardDone], answers)
        meta = Batch.concat([Batch(part.meta) for part in parts]).meta
        return cast(R, messages.ForwardDone(meta=meta, seconds=max(part.seconds for part in parts)))
    if isinstance(first, messages.Moved):
        moves = cast(Sequence[messages.Moved], answers)
        total = sum(move.nbytes for move in moves)
        return cast(R, messages.Moved(nbytes=total, seconds=max(move.seconds for move in moves)))
    return first


def _gradient(answers: Sequence[messages.ForwardBackwardDone]) -> messages.ForwardBackwardDone:
    sums: dict[str, float] = {}
    for answer in answers:
        add_up(sums, answer.sums)
    return messages.ForwardBackwardDone(
        sums=sums,
        seconds=max(answer.seconds for answer in answers),
        imbalance=max(answer.imbalance for answer in answers),
    )
