"""Builds the shards and results of a lease block from samples and scores. The functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from proto.messages import DropReason, Outcome, TaskHandle, TaskResult
from proto.tensors import Array
from services.rollout.results.trajectory import Rolled
from services.rollout.rewards.score import WORKFLOW, Score
from services.rollout.sampling.tasks import ReadyTask, drop
from shared.dataplane.client import Receipt
from shared.stages import declared

_NO_MASK, _NO_VERSIONS = np.zeros(0, np.uint8), np.zeros(0, np.int32)
_NEWEST = np.int32(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class Assembled:
    """The outcome of a block. `shards[i]` belongs to `results[i]`, which still lacks its store and hash; `dropped`
    tasks have no shards. `scalars` and `named` (further values by name) are per sample, in the order of `results`."""

    results: list[TaskResult]
    shards: list[dict[str, Array]]
    dropped: list[TaskResult]
    scalars: dict[str, Array]
    named: list[Mapping[str, float]] = field(default_factory=list)


def assemble(
    tasks: Sequence[ReadyTask],
    samples: Sequence[Sequence[Rolled]],
    scores: Sequence[Sequence[Score]],
    *,
    min_survivors: int,
    named: Sequence[Sequence[Mapping[str, float]]] | None = None,
) -> Assembled:
    """Leave out failed samples, and drop tasks that have fewer than `min_survivors` samples left. For `named`, see
    `Assembled`."""
    survivors: list[tuple[Rolled, float]] = []
    results: list[TaskResult] = []
    shards: list[dict[str, Array]] = []
    dropped: list[TaskResult] = []
    kept: list[Mapping[str, float]] = []
    for number, (task, group, group_scores) in enumerate(zip(tasks, samples, scores, strict=True)):
        alive = [
            (sample, score.value) for sample, score in zip(group, group_scores, strict=True) if score.value is not None
        ]
        failed = len(group) - len(alive)
        lost = dict(Counter(str(score.kind) for score in group_scores if score.value is None))
        if len(alive) < min_survivors:
            first = next((score for score in group_scores if score.value is None), Score(None, "no samples"))
            why = DropReason.WORKFLOW_FAILED if first.kind == WORKFLOW else DropReason.REWARD_FAILED
            reason = f"{failed} of {len(group)} samples failed; at least {min_survivors} must succeed: {first.failure}"
            dropped.append(drop(task.handle, why, f"{task.handle.task_id}: {reason}", failed, lost))
            continue
        made = task_shards([sample for sample, _ in alive])
        shards.append(made)
        results.append(_done(task.handle, made, len(alive), failed, lost))
        survivors += alive
        if named is not None:
            pairs = zip(named[number], group_scores, strict=True)
            kept += [values for values, score in pairs if score.value is not None]
    return Assembled(results, shards, dropped, _scalars(survivors, shards), kept)


def task_shards(samples: Sequence[Rolled]) -> dict[str, Array]:
    """Return the rollout stage's shards for one task, in the order in which `shared.stages` declares their keys.

    Raises ValueError if a key is not declared.
    """
    sequences = [sequence for sample in samples for sequence in sample.sequences]
    by_key = [sequence.by_key() for sequence in sequences]
    made = {name: np.concatenate([arrays[name] for arrays in by_key]) for name in by_key[0]}
    made["lengths"] = np.array([len(sequence.token_ids) for sequence in sequences], np.int32)
    made["sample_index"] = np.repeat(np.arange(len(samples), dtype=np.int32), [len(s.sequences) for s in samples])
    keys = list(declared())
    return {name: made[name] for name in sorted(made, key=keys.index)}


def in_files(block: Assembled, *, filters: bool) -> list[list[int]]:
    """Return positions in `block.results`, grouped by put. Each put writes one file; by default a block is one put.

    If `filters` is true (`algorithm.filter_zero_variance`), tasks whose rewards are all equal are put separately. The
    scheduler may drop these tasks at once, but a file is freed only when its last task is cleared. In a file with live
    tasks, dropped tasks would occupy space that admission has already given to others.
    """
    if not filters:
        return [list(range(len(block.results)))]
    ends = np.cumsum([result.samples for result in block.results])
    files: tuple[list[int], list[int]] = ([], [])
    for position, group in enumerate(np.split(block.scalars["reward"], ends)[: len(ends)]):
        files[bool((group == group[0]).all())].append(position)
    return [file for file in files if file]


def with_receipt(result: TaskResult, receipt: Receipt) -> TaskResult:
    """Return `result` with the location of its shards."""
    return msgspec.structs.replace(
        result, store=receipt.store, content_hash=receipt.content_hash, nbytes=receipt.nbytes
    )


def _done(handle: TaskHandle, shards: dict[str, Array], samples: int, failed: int, lost: dict[str, int]) -> TaskResult:
    return TaskResult(
        task_id=handle.task_id,
        fence=handle.fence,
        outcome=Outcome.DONE,
        samples=samples,
        tokens=len(shards["token_ids"]),
        samples_failed=failed,
        lost=lost,
    )


def _scalars(samples: Sequence[tuple[Rolled, float]], shards: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Return the scalars of `samples`, whose tokens follow one another in `shards`."""
    # All samples at once: a block has hundreds, and for each one a numpy call takes longer than its work.
    tokens = [sum(len(sequence.token_ids) for sequence in sample.sequences) for sample, _ in samples]
    begins = np.cumsum([0, *tokens], dtype=np.intp)[:-1]
    mask = np.concatenate([_NO_MASK, *(arrays["loss_mask"] for arrays in shards)])
    versions = np.concatenate([_NO_VERSIONS, *(arrays["versions"] for arrays in shards)])
    length = np.add.reduceat(mask, begins, dtype=np.int32)
    return {
        "reward": np.array([reward for _, reward in samples], np.float32),
        "length": length,
        "loss_tokens": length.copy(),
        "truncated": np.array([sample.truncated for sample, _ in samples], np.uint8),
        "version_min": np.minimum.reduceat(np.where(mask == 1, versions, _NEWEST), begins),
        "version_max": np.maximum.reduceat(np.where(mask == 1, versions, -1), begins),
    }
