"""Tests that a key that is declared in one place is reserved, announced, put, checked, fetched and handed to a loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from proto.messages import BatchMeta, ErrorCode, ForwardBackward, LossSpec, TaskHandle
from services.policy_trainer.worker.batch_reader import BatchReader
from services.policy_trainer.worker.loss import BatchLoss
from services.policy_trainer.worker.losses.policy import user_loss
from services.policy_trainer.worker.losses.tokens import TokenData
from services.rollout.results.finish import task_shards
from services.rollout.sampling.trajectory import SequenceTokens
from shared import stages
from shared.dataplane.client import TaskShards
from shared.model.logprobs import Scores
from shared.rpc.errors import RpcError
from shared.stages import GRAPH, ROLLOUT, Key, Per, train_graph
from shared.topology import load_resolved, task_bytes
from tests.integration.store_process import STORE, StoreProcess, ending, make_run, peer_of
from tests.unit.scheduler.bench import Bench, plan

ROUTES = Key(
    "own_routes",
    "int32",
    Per.TOKEN,
    "three experts for each token",
    width=3,
    in_loss=lambda loss: loss.name == "own:loss",
)
LOSS = LossSpec(name="own:loss", clip_low=0.0, clip_high=0.0, anchor="rollout", temperature=1.0)
OTHER_LOSS = msgspec.structs.replace(LOSS, name="ppo_clip")
TASKS = ("train/0/0", "train/0/1")
LENGTHS = (3, 4)


def sample(length: int, first: int) -> list[SequenceTokens]:
    """Return a sample of one sequence. The routes of token n are n, n + 1 and n + 2, counted from `first`."""
    arrays = np.arange(length, dtype=np.int32), np.ones(length, np.uint8), np.full(length, -1.0, np.float32)
    routes = (np.arange(first, first + length)[:, None] + np.arange(3)).astype(np.int32)
    return [SequenceTokens(*arrays, np.zeros(length, np.int32), {"own_routes": routes})]


def test_a_key_of_width_three_is_declared_in_one_place_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, memory=64 << 20)
    topology = load_resolved(run.topology)
    before = task_bytes(topology, max_prompt_tokens=8)
    declared = replace(ROLLOUT, keys=(*ROLLOUT.keys, ROUTES))
    monkeypatch.setattr(stages, "GRAPH", (declared, *GRAPH[1:]))

    tokens = topology.algorithm.group_size * (8 + topology.sampling.max_new_tokens)
    assert task_bytes(topology, max_prompt_tokens=8) - before >= tokens * 3 * 4
    batch = Bench(plan(stages=train_graph(topology))).start().step(1).batch
    assert "own_routes" in batch.parts[0].keys

    made = [task_shards([sample(length, 10 * length) for length in LENGTHS]) for _ in TASKS]
    assert made[0]["own_routes"].shape == (sum(LENGTHS), 3)
    wrong = {**made[1], "own_routes": made[1]["own_routes"].ravel()}
    handles = [TaskHandle(task, 1, 2, sum(LENGTHS), 0, [0]) for task in TASKS]
    meta = BatchMeta(tasks=handles, parts=batch.parts, stores=[STORE])

    async def read() -> dict[str, np.ndarray]:
        """Put the shards of two tasks, read them as a worker does, and have a third, malformed task refused."""
        async with asyncio.timeout(60), peer_of(run) as peer:
            shards = [TaskShards(task, 1, arrays) for task, arrays in zip(TASKS, made, strict=True)]
            await peer.data.put([*shards, TaskShards("train/0/9", 1, wrong)], store=STORE, deadline_s=20)
            reader = BatchReader(peer.data, patience_s=20, on_wait=lambda *_: None)
            bad = BatchMeta(tasks=[TaskHandle("train/0/9", 1, 2, 7, 0, [0])], parts=batch.parts, stores=[STORE])
            with pytest.raises(RpcError, match=r"own_routes has shape \[21\], but its lengths say \[7, 3\]") as refused:
                await reader.tokens(ForwardBackward(driver=1, order=0, batch=bad, loss=LOSS))
            assert (refused.value.code, refused.value.names) == (ErrorCode.BAD_DATA, ["train/0/9"])
            without = await reader.tokens(ForwardBackward(driver=1, order=1, batch=meta, loss=OTHER_LOSS))
            assert "own_routes" not in without.flat
            return (await reader.tokens(ForwardBackward(driver=1, order=2, batch=meta, loss=LOSS))).flat

    with ending(StoreProcess(run)) as store:
        store.start()
        flat = asyncio.run(read())

    seen: list[Tensor] = []

    def own(cur: Tensor, _: Tensor, data: TokenData) -> Tensor:
        seen.append(data.shards["own_routes"])
        return -cur

    ones = np.ones(len(flat["loss_mask"]), np.float32)
    loss = BatchLoss(LOSS, flat, ones, ones, "cpu", user_loss(own, {}))
    scores = Scores(torch.tensor([1, 9]), torch.zeros(2, requires_grad=True), None)
    loss(scores, lambda sums: sums)
    assert [routes.tolist() for routes in seen] == [[[31, 32, 33], [32, 33, 34]]]
