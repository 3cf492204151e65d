"""Tests that real workers refuse, by name, the calls that concern another model than theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from proto.messages import AdapterSpec, ErrorCode, LossSpec
from services.policy_trainer.dispatch import WorkerDispatch
from services.policy_trainer.models import Models
from services.policy_trainer.update import value_spec
from shared.batch import Batch
from shared.rpc.errors import RpcError
from tests.integration.policy_trainer.test_trainer_worker import (
    ROLLOUT_ANCHOR,
    WORKER,
    bench_of,
    made_run,
    store_and_worker,
)
from tests.integration.store_process import STORE
from tests.unit.policy_trainer.training import adamw

Refused = tuple[str, Callable[[WorkerDispatch, Batch], Awaitable[object]]]
PPO = "critic: {optimizer: {lr: 1.0e-3}}\nalgorithm: {advantage: {name: gae}, "


def gradient(loss: LossSpec) -> Callable[[WorkerDispatch, Batch], Awaitable[object]]:
    return lambda workers, batch: workers.forward_backward(batch, loss)


CALLS: dict[str, tuple[Refused, ...]] = {
    "critic": (
        (
            "publish critic: no engine samples with this model",
            lambda workers, _: workers.publish_weights(0, 0, store=STORE),
        ),
        (
            "forward for prox_logprobs: only values can be computed",
            lambda workers, batch: workers.forward(batch, ["prox_logprobs"]),
        ),
        ("loss ppo_clip: critic computes values; send it to the model that has this loss", gradient(ROLLOUT_ANCHOR)),
    ),
    "policy": (
        (
            "forward for values: only prox_logprobs, prox_routes can be computed",
            lambda workers, batch: workers.forward(batch, ["values"]),
        ),
        (
            "forward of policy with ends: only a critic has them",
            lambda workers, batch: workers.forward(batch, ["prox_logprobs"], ends=True),
        ),
        (
            "loss value: policy computes prox_logprobs; send it to the model that has this loss",
            gradient(value_spec(clip=0.2)),
        ),
    ),
}


@pytest.mark.parametrize(("model", "key"), [("critic", "values"), ("policy", "prox_logprobs")])
def test_a_worker_refuses_calls_for_another_model_and_answers_its_own(model: str, key: str, tmp_path: Path) -> None:
    run = made_run(tmp_path)
    run.topology.write_text(run.topology.read_text().replace("algorithm: {", PPO))

    async def scenario() -> None:
        async with bench_of(run, "critic/0" if model == "critic" else WORKER) as bench:
            workers = await bench.driver(5)
            await workers.init_model()
            batch = await bench.batch(1)
            for text, call in CALLS[model]:
                update = asyncio.ensure_future(_update(workers, call(workers, batch)))
                with pytest.raises(RpcError) as refused:
                    await update
                assert refused.value.code == ErrorCode.BAD_REQUEST
                assert text in str(refused.value)
                state = await workers.take_over()
                assert (state.step, state.dirty) == (0, False)
            with pytest.raises(RpcError, match=f"{model} is in training; start a server for clients"):
                await Models(workers).open_model(1, AdapterSpec(rank=1, alpha=1.0, seed=0, groups=["mlp"]))
            done = await workers.forward(batch, [key])
            assert [name.partition(":")[0] for name in done.meta.parts[0].keys] == [key]
            if model == "critic":
                ends = (await workers.forward(batch, [key], ends=True)).meta.scalars["value_after"]
                assert ends.shape == (batch.samples,)

    try:
        with store_and_worker(run, words=["--model", model]):
            asyncio.run(scenario())
    finally:
        run.remove_volatile()


async def _update(workers: WorkerDispatch, refused: Awaitable[object]) -> None:
    """Await a call that is refused. An update that was sent right after it is not made."""
    update = asyncio.ensure_future(workers.optim_step(adamw()))
    try:
        await refused
    finally:
        with pytest.raises(RpcError):
            await update
