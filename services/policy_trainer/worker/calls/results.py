"""Puts what a call has computed for each token of its tasks into the stores, as shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proto.ids import REVISION
from proto.messages import BatchMeta, BatchPart, Credit, Forward, ForwardBackwardModel, TaskHandle
from proto.tensors import Array
from services.policy_trainer.worker.rank import Rank
from shared.dataplane.client import TaskShards

PUT_S = 120.0


async def put_results(
    rank: Rank,
    request: Forward | Credit | ForwardBackwardModel,
    stage: str,
    keys: Sequence[str],
    pieces: Sequence[Mapping[str, Array]],
) -> BatchMeta:
    """Put the results of a call as `keys` of `stage`. `pieces` holds those of each task of its batch. Return their
    description.

    If several ranks have the same results, only one of them puts shards. The others return a batch without tasks.
    """
    made = list(zip(request.batch.tasks, pieces, strict=True)) if rank.place.leads else []
    # The keys are unique to this call: an earlier life may have put different bits for these tasks and fences.
    revisions = {key: f"{key}{REVISION}{request.driver:x}-{request.order}" for key in keys}
    stores = [""]  # of a rank that has put nothing
    if made:
        stores = [await rank.own_store()]
        shards = [
            TaskShards(task.task_id, task.fence, {revisions[key]: piece[key] for key in keys}) for task, piece in made
        ]
        await rank.data.put(shards, store=stores[0], deadline_s=PUT_S)
    handles = [
        TaskHandle(
            task.task_id, task.fence, task.samples, task.tokens, sum(array.nbytes for array in piece.values()), [0]
        )
        for task, piece in made
    ]
    return BatchMeta(tasks=handles, parts=[BatchPart(stage, list(revisions.values()))], stores=stores)
