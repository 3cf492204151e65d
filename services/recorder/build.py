"""Builds the records of a task from its shards. The functions are pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from proto.messages import EndedTask
from proto.tensors import Array
from shared.samples.record import SampleRecord, SampleState, split_of
from shared.samples.text import SampleText, TaskText, unpack
from shared.stages import (
    MODEL_PART,
    REWARD,
    REWARD_PART,
    SAMPLE_ADVANTAGES,
    TEXT,
    TRAIN_ADVANTAGES,
    TRAIN_LOGPROBS,
    Per,
    declared,
)

DECIMALS = 4
"""Number of decimal places of log-probs."""
LIMIT = float(np.finfo(np.float32).max)
"""Replaces an infinite number, which JSON cannot represent. NaN becomes 0, or is left out of `rewards` and
`metrics`."""


def bare(ended: EndedTask, at: float) -> SampleRecord:
    """Return the record of a task whose shards cannot be read, or that has none."""
    return SampleRecord(
        task=ended.task_id,
        sample=-1,
        split=split_of(ended.task_id),
        step=ended.step,
        lineage=ended.lineage,
        state=SampleState(ended.state),
        reason=ended.reason,
        at=at,
    )


def records(ended: EndedTask, shards: Mapping[str, Array], at: float) -> list[SampleRecord]:
    """Return the records of all samples of a task, the failed ones last, or a single one if it was not sampled.

    `shards` holds those of its rollout, and possibly the trainer's. Without samples that did not fail, there is only
    the text.

    Raises ValueError, KeyError, IndexError or msgspec.DecodeError if the shards are inconsistent.
    """
    text = unpack(shards[TEXT]) if TEXT in shards else TaskText("", [])
    _add_rewards(text.samples, ended.rewards)
    rewards = [_bounded(sample.reward) for sample in text.samples if sample.reward is not None]
    group = msgspec.structs.replace(
        bare(ended, at),
        samples=max(ended.samples + len(text.failed), 1),
        prompt=text.prompt,
        answer=text.answer,
        group_mean=round(fmean(rewards), 6) if rewards else None,
        group_best=max(rewards, default=None),
        cut=text.cut,
    )
    alive = _alive(group, text, shards, ended.samples) if ended.samples else []
    failed = [_failed(group, ended.samples + number, said) for number, said in enumerate(text.failed)]
    return [*alive, *failed] or [group]


def _add_rewards(samples: Sequence[SampleText], later: Mapping[str, Sequence[float]]) -> None:
    """Write the rewards that exist only after the rollout into the texts of the samples. NaN is no reward."""
    for name, values in later.items():
        for sample, value in zip(samples, values, strict=False):
            if name == REWARD:
                sample.reward = None if math.isnan(value) else value
                sample.rewards.pop(MODEL_PART, None)  # the rollout did not know it
            else:
                sample.rewards[name.removeprefix(REWARD_PART)] = value


def _alive(group: SampleRecord, text: TaskText, shards: Mapping[str, Array], samples: int) -> list[SampleRecord]:
    """Return the records of the samples that did not fail, including the fields of `group`, which all samples of the
    task share."""
    # The arrays of a task are converted at once: for short samples, one numpy call takes as long as a whole record.
    recorded = [key for key in declared().values() if key.recorded and key.per is Per.TOKEN and key.name in shards]
    columns = {key.name: _listed(shards[key.name]) for key in recorded}
    spans = _spans(shards["sample_index"].tolist(), shards["lengths"].tolist(), columns["loss_mask"])
    if {len(column) for column in columns.values()} != {int(shards["lengths"].sum())}:
        raise ValueError(f"lengths sum to {int(shards['lengths'].sum())}, but the columns have other lengths")
    advantages = shards[SAMPLE_ADVANTAGES].tolist() if SAMPLE_ADVANTAGES in shards else None
    made = []
    for number in range(samples):
        said = text.samples[number] if number < len(text.samples) else SampleText("", "", 0.0)
        advantage = None if advantages is None else round(_bounded(advantages[number]), 6)
        tokens = {
            key: [value for at, end in spans[number] for value in column[at:end]] for key, column in columns.items()
        }
        made.append(_record(group, number, said, advantage, tokens))
    return made


def _record(
    group: SampleRecord, number: int, said: SampleText, advantage: float | None, tokens: Mapping[str, list[Any]]
) -> SampleRecord:
    """Return the record of one sample."""
    mask, trained = tokens["loss_mask"], tokens.get(TRAIN_LOGPROBS, [])
    return msgspec.structs.replace(
        _spoken(group, number, said),
        pieces=said.pieces if len(said.pieces) == len(mask) else [],
        token_ids=tokens["token_ids"],
        logprobs=tokens["rollout_logprobs"],
        train_logprobs=trained if any(trained) else None,
        advantages=tokens.get(TRAIN_ADVANTAGES),
        sampled=None if all(mask) else mask,
        reward=None if said.reward is None else _bounded(said.reward),
        rewards=_finite(said.rewards),
        info=said.info,
        metrics=_finite(said.metrics),
        advantage=advantage,
        length=sum(mask),
        versions=sorted({version for version, sampled in zip(tokens["versions"], mask, strict=True) if sampled}),
    )


def _failed(group: SampleRecord, number: int, said: SampleText) -> SampleRecord:
    """Return the record of a sample without a reward. Its tokens are not in the store."""
    spoken = _spoken(group, number, said)
    return msgspec.structs.replace(spoken, reward=None, failure=said.failure, length=said.length)


def _spoken(group: SampleRecord, number: int, said: SampleText) -> SampleRecord:
    """Return a record with the fields that every sample has."""
    return msgspec.structs.replace(
        group,
        sample=number,
        completion=said.completion,
        messages=said.messages,
        finish_reason=said.finish_reason,
        turns=said.turns,
        tool_calls=said.tool_calls,
    )


def _spans(samples: list[int], lengths: list[int], mask: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Return the start and end positions (the end is exclusive) of each sequence by sample, starting at its first
    sampled token."""
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for sample, length, end in zip(samples, lengths, accumulate(lengths), strict=True):
        given = mask[end - length : end]
        spans[sample].append((end - length + (given.index(1) if 1 in given else 0), end))
    return spans


def _listed(values: Array) -> list[Any]:
    """Return `values` as a list. Fractions are rounded to `DECIMALS` places, and bounded."""
    if values.dtype.kind != "f":
        listed: list[Any] = values.tolist()
        return listed
    bounded = np.nan_to_num(np.asarray(values, np.float64), nan=0.0, posinf=LIMIT, neginf=-LIMIT)
    rounded: list[Any] = np.round(bounded, DECIMALS).tolist()
    return rounded


def _bounded(value: float) -> float:
    if math.isfinite(value):
        return float(value)
    return 0.0 if math.isnan(value) else math.copysign(LIMIT, value)


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: _bounded(value) for name, value in values.items() if not math.isnan(value)}
