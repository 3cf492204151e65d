"""Finishes a sampled lease: scores the samples, builds their shards, results and columns, puts the shards into the
store, completes the lease and reports it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import structlog

from proto.messages import DropReason, Outcome, TaskResult
from proto.tensors import Array
from services.rollout.results.sample_texts import SampleTexts
from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.score import WORKFLOW, Score
from services.rollout.sampling.tasks import PreparedTasks, ReadyTask, drop
from services.rollout.sampling.trajectory import Made, SequenceTokens, with_turn_rewards
from services.rollout.weights.sync import SyncReport
from shared.actor.service import Service
from shared.dataplane.client import DataClient, Receipt, TaskShards
from shared.dataplane.stream import OnProgress
from shared.lease import Lease, LeaseBook
from shared.stages import REWARD_PART, TEXT, TRAIN, declared, stage_named
from shared.topology.models import REWARD_MODEL

DATA_CALL_S = 30.0
_NO_MASK, _NO_VERSIONS = np.zeros(0, np.uint8), np.zeros(0, np.int32)
_NEWEST = np.int32(np.iinfo(np.int32).max)
_METRIC, _SOURCE = "workflow/", "reward/source/"
MOST_NAMES = 64
"""Maximum number of names per process. Each name adds a column to every later task."""
NAME_CHARS = 64


@dataclass(frozen=True)
class Sampled:
    """A lease's samples (grouped by task), the policy version at their start, and how long sampling took in seconds."""

    made: list[list[Made]]
    version: int
    seconds: float
    sync: SyncReport | None
    """The sync that brought the weights, or the last such sync if the weights changed during sampling."""
    lost_processes: int | None = None
    """Number of processes lost so far by the workflow that made the samples; None: they are single answers."""


class LeaseResults:
    """The results of one engine's leases. It is used only on the service's loop."""

    def __init__(
        self,
        service: Service,
        leases: LeaseBook,
        *,
        rewards: RewardPool,
        texts: SampleTexts,
        data: DataClient,
        store: str,
        filters: bool,
        per_token: bool = False,
        scored_later: bool = False,
    ) -> None:
        """`store` is the store for shards (`batch-store/0`). `filters` says whether the scheduler drops tasks whose
        rewards are all equal, `per_token` whether the trainer reads rewards of turns, and `scored_later` whether a
        reward model adds to the rewards."""
        self._service = service
        self._leases = leases
        self._rewards = rewards
        self._texts = texts
        self._data = data
        self._store = store
        self._filters = filters
        self._per_token = per_token
        self._scored_later = scored_later
        self._names = NamedValues()

    @property
    def may_score(self) -> asyncio.Event:
        """Event that is set while the reward functions can score."""
        return self._rewards.reachable

    async def finish(self, lease: Lease, tasks: PreparedTasks, sampled: Sampled) -> None:
        """Score the samples, put the shards into the store and complete the lease. Raises LeaseLost."""
        made = sampled.made
        if sampled.lost_processes is None:
            await self._texts.write(lease, tasks.sampling, made)
        with self._leases.part(lease, "reward"):
            scores = await self._scores(lease, made)
        made, scores = await self._texts.read(lease, *self._with_turn_rewards(made, scores))
        block = assemble(tasks.ready, made, scores, min_survivors=tasks.min_survivors)
        dropped = [*block.dropped, *tasks.dropped]
        task_ids = [result.task_id for result in (*block.results, *dropped)]
        texts = await self._texts.recorded(lease, tasks, made, scores, task_ids)
        results = await self._put(lease, block, dropped, texts)
        of_sync = sampled.sync.scalars(len(block.scalars["reward"])) if sampled.sync is not None else {}
        scalars = block.scalars | of_sync | self._names.columns(block.named)
        await self._leases.complete(lease, results, scalars)
        self._report(lease.grant.split, tasks, sampled, block, scores)
        if sampled.lost_processes is not None:
            self._report_workflow(made, sampled.lost_processes)

    async def _scores(self, lease: Lease, made: list[list[Made]]) -> list[list[Score]]:
        """Return each sample's own score or, if it has none, the reward functions' score. Raises LeaseLost."""
        unscored = [[sample.sample for sample in group if sample.score is None] for group in made]

        def advance() -> None:
            lease.advance()
            # Whatever ends the lease in the meantime, its tasks are not to blame for a judge that does not answer.
            lease.untouched = not self._rewards.reachable.is_set()

        scored = await lease.while_held(self._rewards.score(unscored, advance))
        lease.untouched = False
        given = [iter(group) for group in scored]
        return [[sample.score or next(scores) for sample in group] for group, scores in zip(made, given, strict=True)]

    def _with_turn_rewards(
        self, made: list[list[Made]], scores: list[list[Score]]
    ) -> tuple[list[list[Made]], list[list[Score]]]:
        """Return the samples and their scores with the rewards of turns."""
        pairs = [
            [with_turn_rewards(*pair, per_token=self._per_token) for pair in zip(group, of_group, strict=True)]
            for group, of_group in zip(made, scores, strict=True)
        ]
        return [[one for one, _ in group] for group in pairs], [[score for _, score in group] for group in pairs]

    async def _put(
        self, lease: Lease, block: Assembled, dropped: list[TaskResult], texts: dict[str, Array]
    ) -> list[TaskResult]:
        """Put the shards of a block into the store, each task's text with its shards, and return the results of all
        tasks with the locations of their shards.

        The texts of dropped tasks are put separately, because a file is freed only when its last task is cleared.
        """
        results = [*block.results, *dropped]
        shards = [*block.shards, *(dict[str, Array]() for _ in dropped)]
        for result, of_task in zip(results, shards, strict=True):
            if result.task_id in texts:
                of_task[TEXT] = texts[result.task_id]
        files = in_files(block, filters=self._filters, scored_later=self._scored_later) if block.results else []
        files.append([i for i in range(len(block.results), len(results)) if shards[i]])
        for file in filter(None, files):
            puts = [TaskShards(results[i].task_id, results[i].fence, shards[i]) for i in file]

            async def attempt(_: OnProgress, puts: list[TaskShards] = puts) -> list[Receipt]:
                return await self._data.put(puts, store=self._store, deadline_s=DATA_CALL_S)

            receipts = await self._leases.persist(lease, "put", attempt, DATA_CALL_S)
            for i, receipt in zip(file, receipts, strict=True):
                results[i] = with_receipt(results[i], receipt)
        return results

    def _report(
        self,
        split: str,
        tasks: PreparedTasks,
        sampled: Sampled,
        block: Assembled,
        scores: Sequence[Sequence[Score]],
    ) -> None:
        """Log dropped tasks and failed samples, and emit the lease's numbers."""
        log = self._service.log
        dropped = [*block.dropped, *tasks.dropped]
        for result in dropped:
            log.warning("task dropped", task_id=result.task_id, reason=result.reason)
        flat = [score for group in scores for score in group]
        for task, group in zip(tasks.ready, scores, strict=True):
            lost = [score.failure for score in group if score.value is None]
            if lost:
                log.warning("samples failed", task_id=task.handle.task_id, count=len(lost), first=lost[0])
        rewards, lengths = block.scalars["reward"], block.scalars["length"]
        values: dict[str, float | str] = {
            "version": sampled.version,
            "tasks": len(block.results),
            "samples": len(rewards),
            "samples_failed": sum(score.value is None for score in flat),
            "dropped": len(dropped),
            "generate_s": sampled.seconds,
            "tokens_per_s": float(lengths.sum()) / max(sampled.seconds, 1e-9),
        }
        if len(rewards) and not self._scored_later:
            values["reward_mean"] = float(rewards.mean())
        if len(lengths):
            values["length_mean"] = float(lengths.mean())
        for name in sorted({name for score in flat for name in score.parts}):
            values[f"reward/{name}"] = float(np.mean([score.parts[name] for score in flat if name in score.parts]))
        self._service.telemetry.emit("rollout" if split == TRAIN else f"rollout/{split}", values)

    def _report_workflow(self, made: Sequence[Sequence[Made]], lost_processes: int) -> None:
        """Emit the numbers for a lease whose samples a workflow produced."""
        flat = [sample for group in made for sample in group]
        lost = [sample.score.failure for sample in flat if sample.score is not None and sample.score.kind == WORKFLOW]
        values: dict[str, float | str] = {
            "samples": len(flat),
            "samples_failed": len(lost),
            "total/processes_lost": lost_processes,
        }
        if lost:
            values["last_failure"] = lost[-1]
        complete = [sample for sample in flat if sample.sequences]
        if complete:
            values["turns_mean"] = float(np.mean([sample.sample.turns for sample in complete]))
            values["sequences_mean"] = float(np.mean([len(sample.sequences) for sample in complete]))
        for name in sorted({name for sample in complete for name in sample.metrics}):
            metrics = [sample.metrics[name] for sample in complete if name in sample.metrics]
            values[f"metric/{name}"] = float(np.mean(metrics))
        self._service.telemetry.emit("workflow", values)


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
        shards.append(task_shards([sample.sequences for sample, _ in alive]) | _read([sample for sample, _ in alive]))
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


def _read(samples: Sequence[Made]) -> dict[str, Array]:
    """Return the shards with the texts of a task as a reward model reads them, if there is one."""
    texts = [sample.read for sample in samples if sample.read is not None]
    if not texts:
        return {}
    tokens, lengths = stage_named(REWARD_MODEL).needs
    return {tokens: np.concatenate(texts), lengths: np.array(list(map(len, texts)), np.int32)}


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


def in_files(block: Assembled, *, filters: bool, scored_later: bool = False) -> list[list[int]]:
    """Return positions in `block.results`, grouped by put. Each put writes one file; by default a block is one put.

    If `filters` is true (`algorithm.filter_zero_variance`), tasks whose rewards are all equal are put separately. The
    scheduler may drop these tasks at once, but a file is freed only when its last task is cleared. In a file with live
    tasks, dropped tasks would occupy space that admission has already given to others. If the rewards do not exist yet
    (`scored_later`), each task is put separately.
    """
    if not filters:
        return [list(range(len(block.results)))]
    if scored_later:
        return [[position] for position in range(len(block.results))]
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
    source = sample.sample.source
    return (
        ({f"{_SOURCE}{source}": score.value} if source and score.value is not None else {})
        | {f"{REWARD_PART}{name}": value for name, value in score.parts.items()}
        | {f"{_METRIC}{name}": value for name, value in sample.metrics.items()}
    )
