"""Tests that real workers compute the reference's log-probs with the adapter off, on one rank and on two."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from proto.messages import ErrorCode, ForwardDone
from proto.tensors import Array
from services.policy_trainer.dispatch import WorkerDispatch, WorkersLost
from shared.batch import Batch
from shared.credit import KL_KEYS, kl_sums
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from shared.rundir import RunDir
from shared.stages import PROXIMAL, REFERENCE
from tests.integration.policy_trainer.test_trainer_group import play, recovered
from tests.integration.policy_trainer.test_trainer_worker import GROUP, Bench, run
from tests.integration.policy_trainer.trainer_group import WorkerGroup, driver_of

__all__ = ["run"]
PROX, REF = PROXIMAL.makes[0], REFERENCE.makes[0]
PACKED = "{sequences: packed, head: blocks, decoder: written-out}"
ALONE = "{sequences: single, head: whole, decoder: modules}"
"""Passes whose results do not depend on the other sequences of the rank."""


async def shards_of(bench: Bench, done: ForwardDone, *keys: str) -> list[dict[str, Array]]:
    """Return the shards that a call has put, by key, of each task."""
    stored = {key.partition(":")[0]: key for part in done.meta.parts for key in part.keys}
    assert set(stored) == set(keys)
    local = await Batch(done.meta, bench.data).fetch(list(stored.values()))
    columns = {key: local[stored[key]] for key in keys}
    return [{key: columns[key][task] for key in keys} for task in range(len(local))]


async def kls(batch: Batch, ref: list[dict[str, Array]]) -> Array:
    """Return the KL of each sample of `batch` by the k3 estimator."""
    needed = (*KL_KEYS, "lengths", "loss_mask")
    local = await batch.fetch(needed)
    tasks: list[Mapping[str, Array]] = [{key: local[key][task] for key in needed} for task in range(len(batch))]
    return np.concatenate([kl_sums("k3", task, made[REF], GROUP) for task, made in zip(tasks, ref, strict=True)])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reference_is_the_model_with_its_adapter_off(ranks: int, run: RunDir) -> None:
    text = run.topology.read_text().replace(PACKED, f"{ALONE}, lora: {{rank: 4, alpha: 6.0}}")
    run.topology.write_text(text)
    of_base: list[bytes] = []

    async def scenario(bench: Bench, group: WorkerGroup) -> None:
        workers = await driver_of(bench, Layout(ranks), 5)
        await workers.init_model()
        batch = await bench.batch(9)
        first = await workers.forward(batch, [PROX, REF], kl_estimator="k3")
        made = await shards_of(bench, first, PROX, REF)
        # The adapter is zero.
        assert all(task[PROX].tobytes() == task[REF].tobytes() and task[REF].any() for task in made)
        assert first.meta.scalars["kl"].tobytes() == (await kls(batch, made)).tobytes()
        await bench.train(workers, 1)
        await bench.train(workers, 2)
        await workers.save_checkpoint(2)
        trained = await workers.forward(batch, [REF, PROX])
        assert not trained.meta.scalars
        again = await shards_of(bench, trained, REF, PROX)
        for task, before in zip(again, made, strict=True):
            assert task[REF].tobytes() == before[REF].tobytes()
            assert np.abs(task[PROX] - before[PROX]).max() > 1e-3
        group.kill(0)
        with pytest.raises(WorkersLost):
            await workers.forward(batch, [REF])
        await recovered(workers, 2)
        replayed = await shards_of(bench, await workers.forward(batch, [REF, PROX]), REF, PROX)
        assert [task[key].tobytes() for task in replayed for key in (REF, PROX)] == [
            task[key].tobytes() for task in again for key in (REF, PROX)
        ]
        of_base.extend(task[REF].tobytes() for task in made)

    play(scenario, run, ranks)
    if ranks > 1:  # two ranks give the bits of one

        async def one(bench: Bench, _: WorkerGroup) -> None:
            workers = await driver_of(bench, Layout(1), 5)
            await workers.init_model()
            made = await shards_of(bench, await workers.forward(await bench.batch(9), [REF]), REF)
            assert [task[REF].tobytes() for task in made] == of_base

        play(one, run, 1)


def test_a_pass_with_the_adapter_off_needs_an_adapter_and_what_a_kl_reads(run: RunDir) -> None:
    plain_keys, adapted_keys = f"only {PROX}, prox_routes can", f"only {PROX}, prox_routes, {REF} can"
    without = (
        ([REF], "", f"forward for {REF}: {plain_keys} be computed, because policy has no adapter (policy.lora)"),
        ([PROX], "k3", f"forward for {PROX} with kl_estimator k3: it needs {REF}"),
        ([], "", f"forward for nothing: {plain_keys} be computed"),
    )
    adapted = (
        ([REF], "k4", "forward with kl_estimator k4: use k1, k2, k3"),
        ([REF, REF], "", f"forward for {REF}, {REF}: {adapted_keys} be computed"),
        (["values"], "", f"forward for values: {adapted_keys} be computed"),
    )

    async def refused(workers: WorkerDispatch, batch: Batch, calls: tuple[tuple[list[str], str, str], ...]) -> None:
        for keys, estimator, text in calls:
            with pytest.raises(RpcError) as raised:
                await workers.forward(batch, keys, kl_estimator=estimator)
            assert raised.value.code == ErrorCode.BAD_REQUEST
            assert text in str(raised.value)
            await workers.take_over()

    async def plain(bench: Bench, _: WorkerGroup) -> None:
        workers = await driver_of(bench, Layout(1), 5)
        await workers.init_model()
        await refused(workers, await bench.batch(9), without)

    async def with_adapter(bench: Bench, _: WorkerGroup) -> None:
        workers = await driver_of(bench, Layout(1), 5)
        await workers.init_model()
        await refused(workers, await bench.batch(9), adapted)

    play(plain, run, 1)
    run.topology.write_text(run.topology.read_text().replace(PACKED, f"{PACKED}, lora: {{rank: 4}}"))
    play(with_adapter, run, 1)
