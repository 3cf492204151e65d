"""Builds the records of a task from its shards. The functions are pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from proto.messages import EndedTask
from proto.tensors import Array
from shared.samples.record import Record, SampleState, split_of
from shared.samples.text import SampleText, TaskText, unpack
from shared.stages import ADVANTAGES, TEXT, TRAIN_LOGPROBS

DECIMALS = 4
"""Number of decimals of log-probs."""
LIMIT = float(np.finfo(np.float32).max)
"""Replaces an infinite number, which JSON cannot represent. NaN becomes 0, or is left out of `rewards` and
`metrics`."""


def bare(ended: EndedTask, at: float) -> Record:
    """Return the single record of a task that ended without samples, or whose shards cannot be read."""
    return Record(
        task=ended.task_id,
        sample=-1,
        split=split_of(ended.task_id),
        step=ended.step,
        lineage=ended.lineage,
        state=SampleState(ended.state),
        reason=ended.reason,
        at=at,
    )


def records(ended: EndedTask, shards: Mapping[str, Array], at: float) -> list[Record]:
    """Return the records of all samples of a task. `shards` holds those of its rollout, and possibly the trainer's.

    Raises ValueError, KeyError, IndexError or msgspec.DecodeError if the shards do not fit together.
    """
    text = unpack(shards[TEXT]) if TEXT in shards else TaskText("", [])
    ends = np.cumsum(shards["lengths"])
    rewards = [float(_bounded(each.reward)) for each in text.samples]
    group = msgspec.structs.replace(
        bare(ended, at),
        samples=ended.samples,
        prompt=text.prompt,
        answer=text.answer,
        group_mean=round(fmean(rewards), 6) if rewards else None,
        group_best=max(rewards, default=None),
        cut=text.cut,
    )
    return [_record(group, shards, text, number, ends) for number in range(ended.samples)]


def _record(group: Record, shards: Mapping[str, Array], text: TaskText, number: int, ends: Array) -> Record:
    """Return the record of one sample, including the fields of `group`, which all samples of the task share."""
    tokens = _places(shards, number, ends)
    mask = shards["loss_mask"][tokens]
    said = text.samples[number] if number < len(text.samples) else SampleText("", "", 0.0)
    trained = shards[TRAIN_LOGPROBS][tokens] if TRAIN_LOGPROBS in shards else np.zeros(0)
    versions = np.unique(shards["versions"][tokens][mask == 1])
    advantages = shards.get(ADVANTAGES)
    return msgspec.structs.replace(
        group,
        sample=number,
        completion=said.completion,
        messages=said.messages,
        pieces=said.pieces if len(said.pieces) == len(tokens) else [],
        token_ids=shards["token_ids"][tokens].tolist(),
        logprobs=_rounded(shards["rollout_logprobs"][tokens]),
        train_logprobs=_rounded(trained) if trained.any() else None,
        sampled=None if mask.all() else mask.tolist(),
        reward=float(_bounded(said.reward)),
        rewards=_finite(said.rewards),
        metrics=_finite(said.metrics),
        advantage=None if advantages is None else round(float(_bounded(advantages[number])), 6),
        length=int(mask.sum()),
        finish_reason=said.finish_reason,
        versions=versions.tolist(),
        turns=said.turns,
        tool_calls=said.tool_calls,
    )


def _places(shards: Mapping[str, Array], number: int, ends: Array) -> Array:
    """Return the positions of a sample's tokens, int64.

    Each sequence contributes its tokens from the first sampled one on.
    """
    found = []
    for at in np.flatnonzero(shards["sample_index"] == number):
        first, end = int(ends[at] - shards["lengths"][at]), int(ends[at])
        found.append(np.arange(first + int(np.argmax(shards["loss_mask"][first:end])), end))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _rounded(values: Array) -> Any:
    return np.round(_bounded(values), DECIMALS).tolist()


def _bounded(values: Any) -> Any:
    return np.nan_to_num(np.asarray(values, np.float64), nan=0.0, posinf=LIMIT, neginf=-LIMIT)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(_bounded(value)) for name, value in values.items() if not math.isnan(value)}
