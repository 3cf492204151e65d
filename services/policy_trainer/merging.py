"""Merges the ranks' answers to one call. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from proto import messages
from proto.messages import BatchMeta
from proto.registry import Message
from services.policy_trainer.sums import add_up

R = TypeVar("R", bound=Message)


def merged(answers: Sequence[R]) -> R:
    """Merge the answers of all ranks: add up sums, join the parts of a batch, and take the times of the slowest rank.

    For all other replies, return rank 0's. `answers` are ordered by rank and have the same type.
    """
    first = answers[0]
    if isinstance(first, messages.ForwardBackwardDone):
        return cast(R, _gradient(cast(Sequence[messages.ForwardBackwardDone], answers)))
    if isinstance(first, messages.ForwardDone):
        return cast(R, _forward(cast(Sequence[messages.ForwardDone], answers)))
    if isinstance(first, messages.Moved):
        moves = cast(Sequence[messages.Moved], answers)
        total = sum(each.nbytes for each in moves)
        return cast(R, messages.Moved(nbytes=total, seconds=max(each.seconds for each in moves)))
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


def _forward(answers: Sequence[messages.ForwardDone]) -> messages.ForwardDone:
    """Concatenate the tasks in the order of the ranks."""
    meta = answers[0].meta
    tasks = [task for answer in answers for task in answer.meta.tasks]
    return messages.ForwardDone(
        meta=BatchMeta(tasks=tasks, parts=meta.parts, stores=meta.stores),
        seconds=max(answer.seconds for answer in answers),
    )
