"""Runs the dispatch as a separate process, through which a bus client trains the group as if it were one worker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from proto.messages import ErrorCode, ForwardBackward, ForwardBackwardDone, Ping, Pong
from services.policy_trainer.dispatch import WorkerDispatch
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from tests.integration.policy_trainer.test_trainer_worker import PROXIMAL_ANCHOR, ROLLOUT_ANCHOR, Bench, bench_of, run
from tests.integration.policy_trainer.trainer_group import driver_of, group_of
from tests.integration.store_process import REPOSITORY, STORE
from tests.unit.policy_trainer.training import adamw

__all__ = ["run"]
DISPATCH = "policy-trainer/0"


@contextmanager
def dispatch_process(run: RunDir) -> Iterator[None]:
    command = [sys.executable, "-m", "services.policy_trainer.dispatch_service", "--run", str(run.path)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


async def caller(bench: Bench, incarnation: int) -> WorkerDispatch:
    """Return a caller that knows only the name of the dispatch."""
    await bench.client(DISPATCH).call(Ping(), Pong, deadline_s=60)
    workers = WorkerDispatch([bench.client(DISPATCH)], Layout(1), incarnation)
    await workers.take_over()
    return workers


def test_a_bus_client_trains_the_group_through_the_dispatch_as_the_driver_does(run: RunDir) -> None:
    async def scenario() -> None:
        async with bench_of(run) as bench:
            direct = await driver_of(bench, Layout(2), 5)
            await direct.init_model()
            for step in (1, 2):
                await bench.train(direct, step, PROXIMAL_ANCHOR)
            expected = {
                name: value.copy()
                for name, value in (await bench.weights(await direct.publish_weights(0, 2, store=STORE))).items()
            }
            outside = await caller(bench, 7)
            state = await outside.take_over()
            assert (state.step, state.dirty) == (2, False)
            batches = [await bench.batch(step) for step in (1, 2, 3)]
            with pytest.raises(RpcError) as caught:  # The dispatch has taken the ranks over from the driver.
                await direct.forward_backward(batches[0], ROLLOUT_ANCHOR)
            assert caught.value.code == ErrorCode.CONFLICT
            # All calls are made before the first is awaited, and they are awaited in reverse order.
            started = outside.init_model()
            sums = await bench.train(outside, 1, PROXIMAL_ANCHOR)
            assert sums["clipped"] == 0
            await bench.train(outside, 2, PROXIMAL_ANCHOR)
            published = outside.publish_weights(1, 2, store=STORE)
            gradient = outside.forward_backward(batches[2], ROLLOUT_ANCHOR)
            update = outside.optim_step(adamw())
            saved = outside.save_checkpoint(3)
            assert (await saved).path.endswith("/step-3")
            assert (await update).grad_norm > 0
            assert (await gradient).imbalance >= 1.0
            found = await bench.weights(await published)
            assert (await started).step == 0
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[name], value) for name, value in expected.items())
            moved = await outside.move(["parameters", "optimizer"], to="host")
            assert moved.nbytes > 2.9 * sum(value.nbytes for value in expected.values())
            # After a failed call, all calls fail until the caller takes over again.
            lost = outside.publish_weights(1, 9, store=STORE)
            after = outside.optim_step(adamw())
            results = await asyncio.gather(lost, after, return_exceptions=True)
            assert "is at step 3" in str(results[0])
            assert isinstance(results[1], RpcError)
            other = await caller(bench, 8)
            with pytest.raises(RpcError, match="has taken over"):
                await outside.optim_step(adamw())
            state = await other.take_over()
            twice = msgspec.structs.replace(batches[0].meta, tasks=batches[0].meta.tasks[:1] * 2)
            request = ForwardBackward(driver=8, order=state.order + 1, batch=twice, loss=ROLLOUT_ANCHOR)
            with pytest.raises(RpcError, match="a task occurs twice"):
                await bench.client(DISPATCH).call(request, ForwardBackwardDone, deadline_s=60)
            await other.take_over()
            assert (await other.load_checkpoint(3)).step == 3

    with group_of(run, 2), dispatch_process(run):
        asyncio.run(scenario())
