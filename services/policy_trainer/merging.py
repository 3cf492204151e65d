"""What the ranks' answers to one call say together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from proto import messages
from proto.messages import BatchMeta
from proto.registry import Message
from services.policy_trainer.sums import add_up

R = TypeVar("R", bound=Message)


def merged(answers: Sequence[R]) -> R:
    """One answer of all ranks: sums add up, parts of a batch come together, times are those of the slowest rank.

    Of any other answer rank 0's is everybody's. `answers` by rank, all of one type.
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
    """Tasks in the ranks' order."""
    meta = answers[0].meta
    tasks = [task for answer in answers for task in answer.meta.tasks]
    return messages.ForwardDone(
        meta=BatchMeta(tasks=tasks, parts=meta.parts, stores=meta.stores),
        seconds=max(answer.seconds for answer in answers),
    )
