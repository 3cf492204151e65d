"""Runs a real store and real workers that train the adapters of several clients in turns, as a server makes them do."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from proto.messages import (
    AdamW,
    AdapterSpec,
    BatchMeta,
    ErrorCode,
    ForwardBackwardDone,
    LossSpec,
    OptimStepDone,
    TaskHandle,
)
from proto.tensors import Array
from services.policy_trainer.dispatch import WorkersLost
from services.policy_trainer.models import Datum, Models, client_loss, logprobs_of, put_data, shards_of
from shared.batch import Batch
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from tests.integration.policy_trainer.test_trainer_worker import Bench, bench_of, made_run, processes
from tests.integration.policy_trainer.trainer_group import WorkerGroup, driver_of, group_of
from tests.integration.store_process import STORE

ALL = ["attention", "mlp", "unembed"]
ADAPTERS = {
    1: AdapterSpec(rank=4, alpha=32.0, seed=1, groups=["attention"]),
    2: AdapterSpec(rank=8, alpha=32.0, seed=2, groups=ALL),
    3: AdapterSpec(rank=32, alpha=8.0, seed=3, groups=["mlp", "unembed"]),
}
ALL_WEIGHTS = dict.fromkeys(ADAPTERS, AdapterSpec(rank=0, alpha=32.0, seed=0, groups=[]))
ADAM = AdamW(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.01, clip_norm=0.5)
LOSSES = {
    1: client_loss("cross_entropy", {}),
    2: client_loss("importance_sampling", {}),
    3: client_loss("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}),
}


def with_slots(run: RunDir) -> RunDir:
    """Give the run's model slots of rank 32 on all layers, as a server's topology does."""
    lora = "lora: {rank: 32, alpha: 32, target_modules: all-linear-and-head, export_merged: false}"
    run.topology.write_text(run.topology.read_text().replace("dtype: float32", f"dtype: float32, {lora}"))
    return run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    made = with_slots(made_run(tmp_path))
    yield made
    made.remove_volatile()


@pytest.fixture
def whole_run(tmp_path: Path) -> Iterator[RunDir]:
    """A run without slots, whose clients train all weights."""
    made = made_run(tmp_path)
    yield made
    made.remove_volatile()


def data_of(model: int, number: int) -> list[Datum]:
    """Return the data of a model's request `number`."""
    rng = np.random.default_rng(100 * model + number)
    made = []
    for size in rng.integers(3, 12, size=3):
        ids, targets = (rng.integers(4, 14, size=size).astype(np.int64) for _ in range(2))
        numbers = {"weights": rng.random(size).astype(np.float32)}
        if LOSSES[model].name != "cross_entropy":
            numbers = {"advantages": rng.normal(size=size).astype(np.float32)}
            numbers["logprobs"] = rng.normal(-2.5, 0.3, size=size).astype(np.float32)
        made.append(Datum(ids, targets, **numbers))
    return made


class Client:
    """Makes the calls of one model, and remembers its requests as a server's journal does."""

    def __init__(self, bench: Bench, models: Models, model: int, first: int) -> None:
        """`first` is the number of its first datum."""
        self.bench, self.models, self.model, self.first = bench, models, model, first
        self.since: list[tuple[Batch, LossSpec]] = []
        """The requests since the last step."""
        self.answered: list[BatchMeta] = []

    async def put(self, data: list[Datum]) -> Batch:
        shards = [shards_of(datum, LOSSES[self.model]) for datum in data]
        batch = await put_data(self.bench.data, STORE, self.model, self.first, shards)
        self.first += len(data)
        return batch

    async def accumulate(self, number: int) -> ForwardBackwardDone:
        batch = await self.put(data_of(self.model, number))
        self.since.append((batch, LOSSES[self.model]))
        done = await self.models.forward_backward(self.model, batch, LOSSES[self.model])
        assert done.meta is not None
        self.answered.append(done.meta)
        return done

    async def step(self) -> int:
        self.since = []
        return (await self.models.optim_step(self.model, ADAM)).step

    async def weights(self) -> dict[str, Array]:
        ref = await self.models.publish(self.model, store=STORE)
        assert (ref.lineage, ref.task_id) == (self.model, f"weights/{self.model}/{ref.step}")
        return {name: array.copy() for name, array in (await self.bench.weights(ref)).items()}


async def models_of(bench: Bench, incarnation: int) -> Models:
    models = Models(await bench.driver(incarnation))
    await models.take_over()
    return models


async def clients_of(
    bench: Bench, models: Models, *wanted: int, first: int = 0, specs: Mapping[int, AdapterSpec] = ADAPTERS
) -> list[Client]:
    for model in wanted:
        assert await models.open_model(model, specs[model]) == 0
    return [Client(bench, models, model, first) for model in wanted]


def same(first: dict[str, Array], second: dict[str, Array]) -> bool:
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


STEPS = 3


async def alone(
    bench: Bench, models: Models, model: int, specs: Mapping[int, AdapterSpec] = ADAPTERS
) -> dict[str, Array]:
    """Train a model by itself and return its weights."""
    (client,) = await clients_of(bench, models, model, first=1000, specs=specs)
    for step in range(STEPS):
        for part in range(2):
            await client.accumulate(2 * step + part)
        await client.step()
    weights = await client.weights()
    await models.close_model(model)
    return weights


def test_models_in_turns_and_after_a_kill_end_with_the_bits_that_each_has_alone(run: RunDir) -> None:
    async def scenario() -> None:
        async with bench_of(run) as bench:
            models = await models_of(bench, 5)
            expected = {model: await alone(bench, models, model) for model in ADAPTERS}
            clients = await clients_of(bench, models, *ADAPTERS)
            for step in range(STEPS):
                for client in clients:
                    await client.accumulate(2 * step)
                if step == 1:
                    worker.kill()
                    worker.start()
                    held = await models.take_over()
                    assert held == {1: 1, 2: 1, 3: 1}
                    with pytest.raises(RpcError, match="open it first"):
                        await models.optim_step(1, ADAM)
                    for client in clients:
                        assert await models.resume(client.model, ADAPTERS[client.model], held[client.model]) == 1
                        for batch, loss in client.since:
                            again = await models.forward_backward(client.model, batch, loss, repeated=True)
                            assert again.meta is None
                        # What the calls before the kill have answered can still be read.
                        assert len(await logprobs_of(bench.data, client.answered[-1])) == 3
                for client in reversed(clients):
                    await client.accumulate(2 * step + 1)
                for client in clients:
                    assert await client.step() == step + 1
            for client in clients:
                assert same(await client.weights(), expected[client.model])
            first = await clients_of(bench, models, 1)
            assert not same(await first[0].weights(), expected[1])

    with processes(run) as worker:
        asyncio.run(scenario())


def test_a_failed_call_costs_no_other_model_a_call_and_fails_the_next_step_of_its_own(run: RunDir) -> None:
    async def scenario() -> None:
        async with bench_of(run) as bench:
            models = await models_of(bench, 5)
            expected = {model: await alone(bench, models, model) for model in (1, 2)}
            good, bad = await clients_of(bench, models, 2, 1)
            ids = np.array([5, 6, 7])
            for step in range(STEPS):
                await good.accumulate(2 * step)
                await bad.accumulate(50)
                wrong = await bad.put([Datum(ids, ids), Datum(ids, np.array([5, 1 << 30, 6]))])
                # All calls are made before the first has failed, as a client makes them.
                failed = models.forward_backward(1, wrong, LOSSES[1])
                after = models.forward_backward(1, await bad.put(data_of(1, 51)), LOSSES[1])
                refused = models.optim_step(1, ADAM)
                second = models.forward_backward(2, await good.put(data_of(2, 2 * step + 1)), LOSSES[2])
                done = models.optim_step(2, ADAM)
                results = await asyncio.gather(failed, after, refused, second, done, return_exceptions=True)
                text = rf"{wrong.task_ids[1]}: target_tokens has {1 << 30}, but the model has the tokens 0 to \d+"
                assert isinstance(results[0], RpcError)
                assert re.fullmatch(text, str(results[0]))
                assert (results[0].code, list(results[0].names)) == (ErrorCode.BAD_DATA, [wrong.task_ids[1]])
                assert isinstance(results[1], ForwardBackwardDone)
                assert isinstance(results[2], RpcError)
                assert results[2].code == ErrorCode.BAD_DATA
                assert re.search(f"no step taken, weights unchanged: .* has failed .{text}", str(results[2]))
                assert isinstance(results[3], ForwardBackwardDone)
                assert isinstance(results[4], OptimStepDone)
                assert results[4].step == step + 1
            assert same(await good.weights(), expected[2])
            # The failed steps have left nothing behind.
            for step in range(STEPS):
                await bad.accumulate(2 * step)
                nothing = models.forward_backward(1, wrong, LOSSES[1], forward_only=True)  # which fails no step
                await asyncio.gather(nothing, return_exceptions=True)
                await bad.accumulate(2 * step + 1)
                with pytest.raises(RpcError, match=r"eps is 0\.0: it must be above 0") as caught:
                    await models.optim_step(1, msgspec.structs.replace(ADAM, eps=0.0))
                assert caught.value.code == ErrorCode.BAD_REQUEST
                assert await bad.step() == step + 1
            assert same(await bad.weights(), expected[1])
            # A gradient that is not finite.
            huge = [Datum(np.array([5]), np.array([6]), weights=np.array([3e38], np.float32))] * 2
            await models.forward_backward(1, await bad.put(huge), LOSSES[1])
            with pytest.raises(RpcError, match="step 4 refused, weights untouched: gradient norm is") as caught:
                await models.optim_step(1, ADAM)
            assert caught.value.code == ErrorCode.BAD_DATA
            assert same(await bad.weights(), expected[1])
            missing = Batch(msgspec.structs.replace(wrong.meta, tasks=[TaskHandle("api/1/999", 1, 1, 3, 9, [0])]))
            with pytest.raises(RpcError) as caught:
                await models.forward_backward(1, missing, LOSSES[1])
            assert caught.value.code == ErrorCode.MISSING
            assert not isinstance(caught.value, WorkersLost)

    with processes(run):
        asyncio.run(scenario())


def test_a_saved_model_continues_with_the_same_bits_and_another_one_is_refused(run: RunDir, tmp_path: Path) -> None:
    state, weights = run.path / "models" / "1" / "state", run.path / "models" / "1" / "only"

    async def scenario() -> None:
        async with bench_of(run) as bench:
            workers = await bench.driver(5)
            models = Models(workers)
            (client,) = await clients_of(bench, models, 1)
            await client.accumulate(0)
            await client.step()
            at_one = await client.weights()
            await client.accumulate(1)  # which is not saved
            assert (await models.save(1, state, with_optimizer=True)).path == str(state)
            await models.save(1, weights, with_optimizer=False)
            await client.step()
            expected = await client.weights()
            parked = models.close_model(1)
            assert await models.load(1, ADAPTERS[1], state, with_optimizer=True, step=1) == 1
            await parked
            assert same(await client.weights(), at_one)
            await client.accumulate(1)
            assert await client.step() == 2
            assert same(await client.weights(), expected)
            # Loading into a model that is open drops its gradient and counts as a change.
            await client.accumulate(7)
            assert await models.load(1, ADAPTERS[1], weights, with_optimizer=False) == 3
            assert same(await client.weights(), at_one)
            await client.accumulate(1)
            await client.step()
            assert not same(await client.weights(), expected)  # the moments were lost
            assert await models.take_over() == {1: 4}
            for adapter, folder, optimizer, code, text in (
                (ADAPTERS[2], state, True, ErrorCode.CONFLICT, "has rank 4, but the model has 8"),
                (ADAPTERS[1], weights, True, ErrorCode.MISSING, "saved without optimizer state"),
                (ADAPTERS[1], tmp_path, False, ErrorCode.MISSING, "no saved model is there"),
                (AdapterSpec(rank=33, alpha=1.0, seed=0, groups=ALL), None, False, ErrorCode.BAD_REQUEST, "1 to 32"),
                (AdapterSpec(rank=3, alpha=1.0, seed=0, groups=["x"]), None, False, ErrorCode.BAD_REQUEST, "group x:"),
            ):
                opened = (
                    models.open_model(9, adapter)
                    if folder is None
                    else models.load(9, adapter, folder, with_optimizer=optimizer)
                )
                with pytest.raises(RpcError, match=text) as caught:
                    await opened
                assert (caught.value.code, isinstance(caught.value, WorkersLost)) == (code, False)
            for number in (0, -1):
                with pytest.raises(RpcError, match="it is not open"):
                    await models.publish(number, store=STORE)
                with pytest.raises(RpcError, match="numbers of clients' models begin at 1"):
                    await models.open_model(number, ADAPTERS[1])
                await models.close_model(number)
            config = json.loads((state / "adapter_config.json").read_text())
            modules = ["k_proj", "o_proj", "q_proj", "v_proj"]
            assert (config["r"], config["lora_alpha"], config["target_modules"]) == (4, 32, modules)
            # A model that failed before a loss fails its next step afterwards.
            await models.resume(1, ADAPTERS[1], 4, failed="datum 3 is bad")
            with pytest.raises(RpcError, match="datum 3 is bad"):
                await models.optim_step(1, ADAM)
            file = state / "adapter_model.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"x")
            with pytest.raises(RpcError, match="is not what was written"):
                await models.load(1, ADAPTERS[1], state, with_optimizer=True)
            await client.accumulate(2)  # the model is as it was
            assert await client.step() == 5
            with pytest.raises(RpcError, match="SaveCheckpoint refused: these workers train the models of a server"):
                await workers.save_checkpoint(0)

    async def training() -> None:
        async with bench_of(run) as bench:
            workers = await bench.driver(9)
            await workers.init_model()
            with pytest.raises(RpcError, match="policy is in training; start a server for clients"):
                await Models(workers).open_model(1, ADAPTERS[1])

    with processes(run):
        asyncio.run(scenario())
        asyncio.run(training())


def test_two_ranks_fail_together_and_replay_a_step_after_one_of_them_dies(run: RunDir) -> None:
    two_ranks_replay(run, ADAPTERS)


def test_two_ranks_that_divide_whole_models_replay_a_step_after_one_of_them_dies(whole_run: RunDir) -> None:
    two_ranks_replay(whole_run, ALL_WEIGHTS)


def two_ranks_replay(run: RunDir, specs: Mapping[int, AdapterSpec]) -> None:
    async def scenario(group: WorkerGroup) -> None:
        async with bench_of(run) as bench:
            alive = asyncio.create_task(group.keep_alive())
            models = Models(await driver_of(bench, Layout(2), 5))
            await models.take_over()
            expected = await alone(bench, models, 2, specs)
            first, other = await clients_of(bench, models, 2, 1, specs=specs)
            ids = np.array([5, 6, 7])
            for step in range(STEPS):
                await first.accumulate(2 * step)
                wrong = await other.put([Datum(ids, np.array([5, 1 << 30, 6]))])  # one rank has it, the other none
                with pytest.raises(RpcError, match="target_tokens has") as caught:
                    await models.forward_backward(1, wrong, LOSSES[1])
                assert caught.value.code == ErrorCode.BAD_DATA
                if step == 1:
                    group.kill(1)
                    with pytest.raises(WorkersLost):
                        await models.optim_step(2, ADAM)
                    held = await taken_over(models)
                    assert held == {1: 0, 2: 1}
                    await models.resume(2, specs[2], 1)
                    await models.resume(1, specs[1], 0)
                    for batch, loss in first.since:
                        await models.forward_backward(2, batch, loss)
                await first.accumulate(2 * step + 1)
                logprobs = await logprobs_of(bench.data, first.answered[-1])
                assert [len(each) for each in logprobs] == [len(datum.targets) for datum in data_of(2, 2 * step + 1)]
                assert await first.step() == step + 1
            assert same(await first.weights(), expected)
            alive.cancel()

    with group_of(run, 2) as group:
        asyncio.run(scenario(group))


async def taken_over(models: Models) -> dict[int, int]:
    """Take the workers over as soon as all of them are back."""
    while True:
        try:
            return await models.take_over()
        except WorkersLost:
            await asyncio.sleep(0.1)  # The supervisor's restart is not announced.
