"""Tests that two ranks write the same metrics as one rank over thirty steps on the same batches and that a checkpoint
can be loaded in every layout.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from proto.messages import LossSpec
from services.policy_trainer.dispatch import WorkerDispatch
from shared.ranks.layout import Layout
from shared.rundir import RunDir
from tests.integration.policy_trainer.test_trainer_worker import Bench, bench_of, run
from tests.integration.policy_trainer.trainer_group import driver_of, group_of
from tests.integration.store_process import STORE
from tests.unit.policy_trainer.training import adamw

__all__ = ["run"]
STEPS = 30
LIMIT = 1e-4
LR = 3e-4
"""The quickstart's learning rate. Adam's first updates are of that size however small the gradient is, so with 1e-3,
rounding alone would drive two runs apart by more than the limit within ten steps."""
WEIGHTED = ("policy", "kl", "loss")
"""Names of sums that the token weights have already turned into means."""


async def rows(bench: Bench, layout: Layout) -> list[dict[str, float]]:
    """Train and return the values behind the metrics of each step; batches depend only on the step."""
    workers = await driver_of(bench, layout, 5)
    await workers.init_model()
    found = []
    for step in range(1, STEPS + 1):
        batch = await bench.batch(step)
        gradient = workers.forward_backward(batch, ROLLOUT)
        done, update = await asyncio.gather(gradient, workers.optim_step(adamw(lr=LR)))
        tokens = done.sums["tokens"]
        means = {name: value if name in WEIGHTED else value / tokens for name, value in done.sums.items()}
        found.append({**means, "tokens": tokens, "grad_norm": update.grad_norm, "lr": update.lr})
    return found


ROLLOUT = LossSpec(name="ppo_clip", clip_low=0.2, clip_high=0.2, anchor="rollout", temperature=1.0, entropy_coef=0.01)


@pytest.mark.parametrize(
    ("layout", "options"),
    [pytest.param(Layout(2), (), marks=pytest.mark.long), (Layout(2, cp=2), ("parallel: {cp: 2}",))],
)
def test_two_ranks_write_the_same_metrics_as_one(run: RunDir, layout: Layout, options: tuple[str, ...]) -> None:
    async def scene(of: Layout) -> list[dict[str, float]]:
        async with bench_of(run) as bench:
            return await rows(bench, of)

    with group_of(run, 2, *options):
        two = asyncio.run(scene(layout))
    with group_of(run, 1):
        one = asyncio.run(scene(Layout(1)))
    assert len(one) == STEPS
    assert one[0]["entropy"] != one[-1]["entropy"]
    for step, (wanted, row) in enumerate(zip(one, two, strict=True), 1):
        for name, value in wanted.items():
            assert row[name] == pytest.approx(value, rel=LIMIT, abs=LIMIT), f"step {step} {name}"


@pytest.mark.timeout(300)
def test_a_checkpoint_passes_through_other_backends_and_world_sizes_without_losing_a_bit(run: RunDir) -> None:
    """Two tensor-parallel megatron ranks load and save the checkpoint of one torch rank, and torch continues from the
    result."""
    found: dict[str, dict[str, bytes]] = {}

    async def weights(bench: Bench, workers: WorkerDispatch, lineage: int, step: int) -> dict[str, bytes]:
        return await bench.weight_bytes(await workers.publish_weights(lineage, step, store=STORE))

    async def begin(of: Layout) -> None:
        async with bench_of(run) as bench:
            workers = await driver_of(bench, of, 5)
            await workers.init_model()
            for step in (1, 2):
                await bench.train(workers, step)
            await workers.save_checkpoint(2)
            found["2"] = await weights(bench, workers, 0, 2)
            await bench.train(workers, 3)
            found["3"] = await weights(bench, workers, 0, 3)

    async def pass_on(of: Layout, lineage: int) -> None:
        async with bench_of(run) as bench:
            workers = await driver_of(bench, of, 5)
            assert (await workers.load_checkpoint(2)).step == 2
            assert await weights(bench, workers, lineage, 2) == found["2"]
            await workers.save_checkpoint(2)  # The optimizer state is in this backend's layout.
            await bench.train(workers, 3)
            mine = await weights(bench, workers, lineage, 3)
            if of.world_size == 1:
                assert mine == found["3"]
            moved = [
                np.abs(np.frombuffer(value, np.float32) - np.frombuffer(mine[name], np.float32)).max()
                for name, value in found["3"].items()
            ]
            assert max(moved) <= 1e-5

    with group_of(run, 1):
        asyncio.run(begin(Layout(1)))
    for lineage, (layout, options) in enumerate(
        [
            (Layout(2, tp=2), ("backend: megatron", "parallel: {tp: 2}")),
            (Layout(2), ()),
            (Layout(1), ()),
        ],
        1,
    ):
        with group_of(run, layout.world_size, *options):
            asyncio.run(pass_on(layout, lineage))
