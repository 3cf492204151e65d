"""Puts the advantages and the trainer's log-probs of recorded samples into the stores as shards, in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import numpy as np
import structlog

from proto.errors import WireError
from proto.messages import BatchMeta
from proto.tensors import Array
from services.policy_trainer.update import ADVANTAGES
from services.policy_trainer.worker.samples import PROX_KEY, BatchTokens, sample_means
from shared.dataplane.client import DataClient, TaskShards
from shared.rpc.errors import RpcError
from shared.samples.text import Choice
from shared.stages import SAMPLE_ADVANTAGES, TRAIN_ADVANTAGES, TRAIN_LOGPROBS

if TYPE_CHECKING:
    from services.policy_trainer.worker.loss import BatchLoss

PUT_S = 5.0


class SampleRecords:
    """Puts the values of recorded samples. Use it only on the event loop of `data`.

    Nothing waits for a put, and if a put fails, only its values are lost.
    """

    def __init__(self, choice: Choice | None, data: DataClient, store: Callable[[], Awaitable[str]]) -> None:
        """`store` returns the name of the store on this rank's host."""
        self._choice = choice
        self._data = data
        self._store = store
        self._step = -1
        self._put: set[tuple[str, int]] = set()
        """The tasks of `_step` whose values have been put, with their fences."""
        self._jobs: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("worker")

    def wanted(self, batch: BatchMeta, step: int) -> list[int]:
        """Return the positions of the call's tasks that are recorded and have not been put in this step before.

        A task's log-probs thus come from the first call of the step that contains the task, before any update on it.
        """
        choice = self._choice
        if choice is None:
            return []
        if step != self._step:
            self._step, self._put = step, set()
        tasks = enumerate(batch.tasks)
        return [at for at, task in tasks if choice.takes(task.task_id) and (task.task_id, task.fence) not in self._put]

    def put(self, batch: BatchMeta, wanted: list[int], tokens: BatchTokens, loss: BatchLoss) -> None:
        """Put the shards of the `wanted` tasks in the background."""
        self._put.update((batch.tasks[at].task_id, batch.tasks[at].fence) for at in wanted)
        job = asyncio.create_task(self._put_all(batch, wanted, tokens, loss))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def close(self) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    async def _put_all(self, batch: BatchMeta, wanted: list[int], tokens: BatchTokens, loss: BatchLoss) -> None:
        try:
            shards = await asyncio.to_thread(_shards, batch, wanted, tokens, loss)
            await self._data.put(shards, store=await self._store(), deadline_s=PUT_S)
        except (RpcError, WireError) as error:
            # A replayed step may compute different bits for the same fences. The first ones are kept.
            self._log.info(
                "the trainer's values of some recorded samples were not stored; training is not affected",
                tasks=len(wanted),
                error=str(error)[:200],
            )


def _shards(batch: BatchMeta, wanted: list[int], tokens: BatchTokens, loss: BatchLoss) -> list[TaskShards]:
    """Return the shards of the `wanted` tasks. All log-probs are 0 if this rank has not computed every one of them."""
    logprobs = tokens.flat[PROX_KEY] if PROX_KEY in tokens.flat else loss.kept_logprobs()
    ends = np.cumsum(tokens.tokens_of_task)
    last = np.cumsum([task.samples for task in batch.tasks])
    advantages, of_token = batch.scalars[ADVANTAGES], tokens.flat.get(TRAIN_ADVANTAGES)
    if of_token is not None:
        counts = [task.samples for task in batch.tasks]
        advantages = sample_means(tokens, counts, of_token)
    made: list[TaskShards] = []
    for at in wanted:
        task, end, size = batch.tasks[at], ends[at], tokens.tokens_of_task[at]
        values: dict[str, Array] = {SAMPLE_ADVANTAGES: np.asarray(advantages[last[at] - task.samples : last[at]], "f4")}
        values[TRAIN_LOGPROBS] = logprobs[end - size : end].copy()
        if of_token is not None:
            values[TRAIN_ADVANTAGES] = of_token[end - size : end].copy()
        made.append(TaskShards(task.task_id, task.fence, values))
    return made
