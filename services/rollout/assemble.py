"""From generations and scores to shards and results of a lease block: pure functions, no I/O and no waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from proto.messages import Outcome, TaskHandle, TaskResult
from proto.tensors import Array
from services.rollout.engine import Generation
from services.rollout.rewards.scoring import Score
from services.rollout.tasks import ReadyTask, drop
from shared.dataplane.client import Receipt
from shared.stages import ROLLOUT


@dataclass(frozen=True)
class Assembled:
    """What a block comes to. `shards[i]` belongs to `results[i]`, which still lacks its store and hash; `dropped`
    have none. `scalars`: per sample, in the order of `results`."""

    results: list[TaskResult]
    shards: list[dict[str, Array]]
    dropped: list[TaskResult]
    scalars: dict[str, Array]


@dataclass
class _Columns:
    reward: list[float] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)


def assemble(
    tasks: Sequence[ReadyTask],
    generations: Sequence[Sequence[Generation]],
    scores: Sequence[Sequence[Score]],
    *,
    version: int,
    min_survivors: int,
) -> Assembled:
    """Leave out failed samples; drop tasks with fewer than `min_survivors` left.

    Every token of a block was sampled by policy `version`.
    """
    columns = _Columns()
    results: list[TaskResult] = []
    shards: list[dict[str, Array]] = []
    dropped: list[TaskResult] = []
    for task, group, group_scores in zip(tasks, generations, scores, strict=True):
        alive = [
            (each, score.value) for each, score in zip(group, group_scores, strict=True) if score.value is not None
        ]
        failed = len(group) - len(alive)
        if len(alive) < min_survivors:
            why = next((score.failure for score in group_scores if score.value is None), "no samples")
            reason = f"{failed} of {len(group)} samples failed, {min_survivors} must be left: {why}"
            dropped.append(drop(task.handle, f"{task.handle.task_id}: {reason}", failed))
            continue
        made = task_shards(task.prompt_ids, [each for each, _ in alive], version)
        shards.append(made)
        results.append(_done(task.handle, made, len(alive), failed))
        for each, value in alive:
            columns.reward.append(value)
            columns.length.append(len(each.token_ids))
            columns.truncated.append(each.finish_reason == "length")
    return Assembled(results, shards, dropped, _scalars(columns, version))


def task_shards(prompt_ids: Sequence[int], generations: Sequence[Generation], version: int) -> dict[str, Array]:
    """The rollout stage's shards of one task (see `shared.stages`), in the order of the stage's keys."""
    prompt = np.asarray(prompt_ids, np.int32)
    p = len(prompt)
    lengths = np.array([p + len(each.token_ids) for each in generations], np.int32)
    total = int(lengths.sum())
    token_ids = np.empty(total, np.int32)
    loss_mask = np.zeros(total, np.uint8)
    logprobs = np.zeros(total, np.float32)
    versions = np.full(total, -1, np.int32)
    at = 0
    for each in generations:
        first, end = at + p, at + p + len(each.token_ids)
        token_ids[at:first] = prompt
        token_ids[first:end] = each.token_ids
        loss_mask[first:end] = 1
        logprobs[first:end] = each.logprobs
        versions[first:end] = version
        at = end
    made: dict[str, Array] = {
        "token_ids": token_ids,
        "lengths": lengths,
        "sample_index": np.arange(len(generations), dtype=np.int32),
        "loss_mask": loss_mask,
        "rollout_logprobs": logprobs,
        "versions": versions,
    }
    return {key: made[key] for key in ROLLOUT.makes}


def with_receipt(result: TaskResult, receipt: Receipt) -> TaskResult:
    """`result` with where its shards lie."""
    return msgspec.structs.replace(
        result, store=receipt.store, content_hash=receipt.content_hash, nbytes=receipt.nbytes
    )


def _done(handle: TaskHandle, shards: dict[str, Array], samples: int, failed: int) -> TaskResult:
    return TaskResult(
        task_id=handle.task_id,
        fence=handle.fence,
        outcome=Outcome.DONE,
        samples=samples,
        tokens=len(shards["token_ids"]),
        samples_failed=failed,
    )


def _scalars(columns: _Columns, version: int) -> dict[str, Array]:
    samples = len(columns.reward)
    length = np.array(columns.length, np.int32)
    return {
        "reward": np.array(columns.reward, np.float32),
        "length": length,
        "loss_tokens": length.copy(),
        "truncated": np.array(columns.truncated, np.uint8),
        "version_min": np.full(samples, version, np.int32),
        "version_max": np.full(samples, version, np.int32),
    }
