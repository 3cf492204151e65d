"""Tests that several real ranks behind one dispatch train as a single rank does, even after ranks die or shards are
missing.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from proto.messages import TaskHandle
from proto.tensors import Array
from services.policy_trainer.dispatch import WorkerDispatch, WorkersLost
from shared.actor.service import PEER_LOST_STATUS
from shared.batch import Batch
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from tests.integration.policy_trainer.test_trainer_worker import (
    GROUP,
    PROXIMAL_ANCHOR,
    ROLLOUT_ANCHOR,
    Bench,
    bench_of,
    run,
)
from tests.integration.policy_trainer.trainer_group import WorkerGroup, driver_of, group_of
from tests.integration.store_process import STORE
from tests.unit.policy_trainer.training import adamw

__all__ = ["run"]
RECOVERY_S = 120.0


def play(scenario: Callable[[Bench, WorkerGroup], Awaitable[None]], run: RunDir, ranks: int, *options: str) -> None:
    async def scene(group: WorkerGroup) -> None:
        alive = asyncio.create_task(group.keep_alive())
        try:
            async with bench_of(run) as bench:
                await scenario(bench, group)
        finally:
            alive.cancel()
            with suppress(asyncio.CancelledError):
                await alive

    with group_of(run, ranks, *options) as group:
        asyncio.run(scene(group))


async def weights(bench: Bench, workers: WorkerDispatch, step: int, fence: int = 1) -> dict[str, Array]:
    return await bench.weights(await workers.publish_weights(0, step, store=STORE, fence=fence))


async def recovered(workers: WorkerDispatch, step: int) -> None:
    """Keep trying to take over and load, as the driver does, until the group has formed again."""
    give_up = time.monotonic() + RECOVERY_S
    while True:
        try:
            await workers.take_over()
            await workers.load_checkpoint(step)
            return
        except WorkersLost:
            assert time.monotonic() < give_up


def assert_same_training(one: dict[str, Array], two: dict[str, Array]) -> None:
    """Compare weights after updates that differ only in the order of their sums.

    AdamW divides by the size of the gradient, so where the gradient is nearly zero, rounding alone moves a weight by a
    fraction of the learning rate (1e-3). On one processor, rounding moved 4 of 796,032 weights by more than 1e-5; on
    another, none. Taken together, the weights moved by about 1 (Euclidean norm).
    """
    difference = np.concatenate([np.abs(value - two[name]).ravel() for name, value in one.items()])
    assert np.linalg.norm(difference) <= 2e-4
    assert np.quantile(difference, 0.9999) <= 5e-6
    assert difference.max() <= 5e-5


def test_two_ranks_train_like_one_and_a_killed_rank_does_not_change_a_bit(run: RunDir) -> None:
    found: dict[str, dict[str, Array]] = {}

    async def two(bench: Bench, group: WorkerGroup) -> None:
        workers = await driver_of(bench, Layout(2), 5)
        await workers.init_model()
        await bench.train(workers, 1)
        await workers.save_checkpoint(1)
        await bench.train(workers, 2)
        found["two"] = {name: value.copy() for name, value in (await weights(bench, workers, 2)).items()}
        group.kill(1)
        with pytest.raises(WorkersLost):
            await bench.train(workers, 3)
        await recovered(workers, 1)
        await bench.train(workers, 2)
        again = await weights(bench, workers, 2, fence=2)
        assert all(again[name].tobytes() == value.tobytes() for name, value in found["two"].items())
        sums = await bench.train(workers, 3, PROXIMAL_ANCHOR)
        assert sums["clipped"] == 0  # Each rank put its own tasks' proximal log-probs into the store.
        assert group.restarts[0] >= 1
        assert group.restarts[1] >= 1
        assert set(group.statuses[0]) == {PEER_LOST_STATUS}  # The rank exited because it lost its peer.
        assert set(group.statuses[1]) <= {-signal.SIGKILL, PEER_LOST_STATUS}

    async def one(bench: Bench, _: WorkerGroup) -> None:
        workers = await driver_of(bench, Layout(1), 5)
        await workers.init_model()
        await bench.train(workers, 1)
        await bench.train(workers, 2)
        found["one"] = await weights(bench, workers, 2, fence=3)
        assert_same_training(found["one"], found["two"])
        # One rank loads the checkpoint that two ranks saved.
        await workers.load_checkpoint(1)
        await bench.train(workers, 2)
        loaded = await weights(bench, workers, 2, fence=4)
        assert_same_training(loaded, found["two"])

    play(two, run, 2)
    play(one, run, 1)


def test_shards_missing_on_one_rank_fail_the_call_on_all_ranks_and_the_group_survives(run: RunDir) -> None:
    async def scenario(bench: Bench, group: WorkerGroup) -> None:
        workers = await driver_of(bench, Layout(2), 5)
        await workers.init_model()
        before = {name: value.copy() for name, value in (await weights(bench, workers, 0)).items()}
        batch = await bench.batch(1)
        gone = TaskHandle("train/9/9", 1, GROUP, 24, 0, [0])
        broken = Batch(msgspec.structs.replace(batch.meta, tasks=[gone, *batch.tasks[1:]]))
        calls = (
            workers.forward_backward(broken, ROLLOUT_ANCHOR),
            workers.optim_step(adamw()),
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, WorkersLost) for result in results)
        assert "train/9/9" in str(results[0])
        state = await workers.take_over()
        assert (state.step, state.dirty) == (0, False)
        after = await weights(bench, workers, 0, fence=2)
        assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())
        # This batch leaves one rank without a task.
        single = batch.take([0])
        done, update = await asyncio.gather(
            workers.forward_backward(single, ROLLOUT_ANCHOR), workers.optim_step(adamw())
        )
        assert done.imbalance == 2.0
        assert update.grad_norm > 0
        assert group.restarts == [0, 0]

    play(scenario, run, 2)


def test_a_rank_that_hangs_is_named_and_the_others_restart(run: RunDir) -> None:
    async def scenario(bench: Bench, group: WorkerGroup) -> None:
        workers = await driver_of(bench, Layout(2), 5)
        await workers.init_model()
        await workers.save_checkpoint(0)
        group.stop(1)
        with pytest.raises(RpcError):  # from rank 0, or from its next life if the machine is busy
            await bench.train(workers, 1)
        assert "policy-trainer-worker/1 did not join within 6 s" in run.log_file("policy-trainer-worker", 0).read_text()
        group.kill(1)
        await recovered(workers, 0)
        assert (await bench.train(workers, 1))["tokens"] > 0

    play(scenario, run, 2, "collective_s: 6")


def test_offload_between_gradient_and_update_does_not_change_a_bit(run: RunDir) -> None:
    async def scenario(bench: Bench, _: WorkerGroup) -> None:
        workers = await driver_of(bench, Layout(2), 5)
        await workers.init_model()
        await bench.train(workers, 1)
        await workers.save_checkpoint(1)
        await bench.train(workers, 2)
        undisturbed = {name: value.copy() for name, value in (await weights(bench, workers, 2)).items()}
        await workers.load_checkpoint(1)
        batch = await bench.batch(2)
        await workers.forward_backward(batch, ROLLOUT_ANCHOR)
        moved = await workers.move(["parameters", "gradients", "optimizer"], to="host")
        model_bytes = sum(value.nbytes for value in undisturbed.values())
        assert moved.nbytes > 3.9 * model_bytes
        assert (await workers.move(["parameters"], to="host")).nbytes == 0
        await workers.optim_step(adamw())
        after = await weights(bench, workers, 2, fence=2)
        assert all(after[name].tobytes() == value.tobytes() for name, value in undisturbed.items())

    play(scenario, run, 2)
