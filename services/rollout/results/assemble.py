"""Builds the shards, results and columns of a lease block from samples and scores. The functions are pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import structlog

from proto.messages import DropReason, Outcome, TaskResult
from proto.tensors import Array
from services.rollout.rewards.score import WORKFLOW, Score
from services.rollout.sampling.tasks import ReadyTask, drop
from services.rollout.sampling.trajectory import Made, SequenceTokens
from shared.dataplane.client import Receipt
from shared.stages import declared

_NO_MASK, _NO_VERSIONS = np.zeros(0, np.uint8), np.zeros(0, np.int32)
_NEWEST = np.int32(np.iinfo(np.int32).max)
_PART, _METRIC = "reward/part/", "workflow/"
MOST_NAMES = 64
"""Maximum number of names per process. Each name adds a column to every later task."""
NAME_CHARS = 64


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
    made: Sequence[Sequence[Made]],
    scores: Sequence[Sequence[Score]],
    *,
    min_survivors: int,
) -> Assembled:
    """Leave out failed samples, and drop tasks that have fewer than `min_survivors` samples left."""
    survivors: list[tuple[Made, Score]] = []
    results: list[TaskResult] = []
    shards: list[dict[str, Array]] = []
    dropped: list[TaskResult] = []
    for task, group, group_scores in zip(tasks, made, scores, strict=True):
        alive = [(sample, score) for sample, score in zip(group, group_scores, strict=True) if score.value is not None]
        failed = len(group) - len(alive)
        lost = dict(Counter(str(score.kind) for score in group_scores if score.value is None))
        if len(alive) < min_survivors:
            first = next((score for score in group_scores if score.value is None), Score(None, "no samples"))
            why = DropReason.WORKFLOW_FAILED if first.kind == WORKFLOW else DropReason.REWARD_FAILED
            reason = f"{failed} of {len(group)} samples failed; at least {min_survivors} must succeed: {first.failure}"
            dropped.append(drop(task.handle, why, f"{task.handle.task_id}: {reason}", failed, lost))
            continue
        shards.append(task_shards([sample.sequences for sample, _ in alive]))
        results.append(
            TaskResult(
                task_id=task.handle.task_id,
                fence=task.handle.fence,
                outcome=Outcome.DONE,
                samples=len(alive),
                tokens=len(shards[-1]["token_ids"]),
                samples_failed=failed,
                lost=lost,
            )
        )
        survivors += alive
    return Assembled(results, shards, dropped, _scalars(survivors, shards), [_named(*pair) for pair in survivors])


def task_shards(samples: Sequence[Sequence[SequenceTokens]]) -> dict[str, Array]:
    """Return the rollout stage's shards for the samples of one task, each of which is a list of sequences. The keys are
    in the order in which `shared.stages` declares them.

    Raises ValueError if a key is not declared.
    """
    sequences = [sequence for sample in samples for sequence in sample]
    by_key = [sequence.by_key() for sequence in sequences]
    made = {name: np.concatenate([arrays[name] for arrays in by_key]) for name in by_key[0]}
    made["lengths"] = np.array([len(sequence.token_ids) for sequence in sequences], np.int32)
    made["sample_index"] = np.repeat(np.arange(len(samples), dtype=np.int32), [len(sample) for sample in samples])
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


def _scalars(samples: Sequence[tuple[Made, Score]], shards: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Return the scalars of `samples`, whose tokens follow one another in `shards`."""
    # All samples at once: a block has hundreds, and for each one a numpy call takes longer than its work.
    tokens = [sum(len(sequence.token_ids) for sequence in sample.sequences) for sample, _ in samples]
    begins = np.cumsum([0, *tokens], dtype=np.intp)[:-1]
    mask = np.concatenate([_NO_MASK, *(arrays["loss_mask"] for arrays in shards)])
    versions = np.concatenate([_NO_VERSIONS, *(arrays["versions"] for arrays in shards)])
    length = np.add.reduceat(mask, begins, dtype=np.int32)
    return {
        "reward": np.array([score.value for _, score in samples], np.float32),
        "length": length,
        "loss_tokens": length.copy(),
        "truncated": np.array([sample.truncated for sample, _ in samples], np.uint8),
        "version_min": np.minimum.reduceat(np.where(mask == 1, versions, _NEWEST), begins),
        "version_max": np.maximum.reduceat(np.where(mask == 1, versions, -1), begins),
    }


class NamedValues:
    """Collects the names seen so far, so that all leases of a process get the same columns in the same order."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._refused = False
        self._log = structlog.get_logger("rollout")

    def columns(self, samples: Sequence[Mapping[str, float]]) -> dict[str, Array]:
        """Return a float32 [samples] column per name, with NaN for samples without a finite value of that name."""
        for values in samples:
            for name in values:
                self._learn(name)
        if not samples:
            return {}
        with np.errstate(over="ignore"):
            columns = {
                name: np.array([values.get(name, np.nan) for values in samples], np.float64).astype(np.float32)
                for name in self._names
            }
        return {name: np.where(np.isfinite(column), column, np.float32(np.nan)) for name, column in columns.items()}

    def _learn(self, name: str) -> None:
        if name in self._names:
            return
        if len(self._names) < MOST_NAMES and len(name) <= NAME_CHARS:
            self._names[name] = None
        elif not self._refused:
            self._refused = True
            limits = f"{MOST_NAMES} names of at most {NAME_CHARS} characters"
            self._log.warning("a name is left out of metrics.jsonl", name=name[:NAME_CHARS], limits=limits)


def _named(sample: Made, score: Score) -> dict[str, float]:
    """Return one sample's values under their names in metrics.jsonl."""
    return {f"{_PART}{name}": value for name, value in score.parts.items()} | {
        f"{_METRIC}{name}": value for name, value in sample.metrics.items()
    }
