"""Tests the rollout and reference services as real processes, with a real scheduler and a real store."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import numpy as np
import pytest

from shared.actor.service import UNUSABLE_STATUS
from shared.stages import REFERENCE
from tests.integration.rollout.rollout_run import MODEL, TOPOLOGY, Driver, cluster
from tests.integration.stream_line import IN_CLEAR, tapped
from tests.keys import SAMPLED

LEASE_S = 3


async def check_batch(driver: Driver, step: int) -> None:
    """Check that the batch of `step` is whole and that its log-probs are the model's."""
    batch = await driver.batch(step)
    assert len(batch.batch.tasks) == 8
    tasks = await driver.data.fetch(batch.batch, (*SAMPLED, *REFERENCE.makes), deadline_s=20)
    lengths: list[int] = []
    for task in tasks:
        mask = task["loss_mask"] == 1
        assert task["lengths"].sum() == len(task["token_ids"])
        assert np.abs(driver.logprobs(task) - task["rollout_logprobs"]).max() < 1e-4
        assert np.abs(driver.logprobs(task) - task["ref_logprobs"]).max() < 1e-4
        assert set(task["versions"][mask]) == {0}
        ends = np.cumsum(task["lengths"])
        lengths += [int(part.sum()) for part in np.split(mask, ends[:-1])]
    assert batch.scalars["length"].tolist() == lengths
    assert batch.scalars["loss_tokens"].tolist() == lengths
    assert set(batch.scalars["reward"].tolist()) <= {0.0, 1.0}
    assert batch.scalars["version_max"].tolist() == [0] * len(lengths)


def log_of(folder: Path, service: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "run" / "logs" / f"{service}-0.jsonl").read_text().splitlines()]


@pytest.mark.timeout(300)  # The test imports torch four times, possibly on only a few cores.
def test_tasks_are_sampled_and_scored_and_survive_kills(tmp_path: Path) -> None:
    """All reads are streamed without encryption, as the topology specifies."""

    def far(module: str) -> tuple[str, str]:
        return "tests.integration.far_reader", module

    async def scenario() -> None:
        async with cluster(tmp_path, f"{TOPOLOGY}{IN_CLEAR}", *store) as (processes, driver):
            processes.start("rollout", *far("rollout"))
            processes.start("reference", *far("reference"))
            info = await driver.begin()
            await driver.publish(info.lineage, 0)
            await check_batch(driver, 1)
            # The tasks of two more steps are admitted; the restarted services repeat those that were under way.
            processes.end("rollout", signal.SIGKILL)
            processes.end("reference", signal.SIGKILL)
            processes.start("rollout", *far("rollout"))
            processes.start("reference", *far("reference"))
            await driver.until(processes.running["rollout"].pid, "READY")
            await driver.until(processes.running["reference"].pid, "READY")
            status, errors, seconds = processes.end("rollout")
            assert (status, errors.count("Traceback")) == (0, 0)
            assert seconds < 8
            status, errors, seconds = processes.end("reference")
            assert (status, errors.count("Traceback")) == (0, 0)
            assert seconds < 8

    with tapped() as (tap, store):
        asyncio.run(scenario())
    assert tap.clear_bytes > (MODEL / "model.safetensors").stat().st_size > 0 == tap.sealed_bytes


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_rollout_waits_for_a_dead_store_longer_than_a_lease_lasts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, TOPOLOGY + f"lease: {{lease_s: {LEASE_S}}}\n") as (processes, driver):
            info = await driver.begin()
            await driver.publish(info.lineage, 0)
            processes.end("batch_store", signal.SIGKILL)
            processes.start("rollout")
            processes.start("reference")
            async with asyncio.timeout(90):
                while not (await driver.status()).tasks.get("LEASED"):
                    await asyncio.sleep(0.1)
            await asyncio.sleep(2.5 * LEASE_S)  # The service holds a lease but has no weights.
            assert not [line for line in log_of(tmp_path, "rollout") if line["event"] == "lease lost"]
            processes.start("batch_store")
            await check_batch(driver, 1)

    asyncio.run(scenario())


def test_weights_that_fail_the_canary_end_the_service_with_a_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as (processes, driver):
            processes.start("rollout")
            info = await driver.begin()
            await driver.publish(info.lineage, 0, spoil="model.layers.1.mlp.up_proj.weight")
            process = processes.running.pop("rollout")
            _, errors = await asyncio.to_thread(process.communicate, timeout=60)
            assert process.returncode == 1
            last = errors.decode().strip().splitlines()[-1]
            assert "rollout/0: canary mismatch after version 0" in last
            assert "46 parameters" in last
            assert "tolerance 0.0001" in last

    asyncio.run(scenario())


def test_an_engine_that_hangs_ends_its_process_with_a_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, TOPOLOGY + "lease: {lease_s: 2}\n") as (processes, driver):
            processes.start("rollout", "tests.integration.rollout.hanging_rollout")
            info = await driver.begin()
            await driver.publish(info.lineage, 0)
            process = processes.running["rollout"]
            assert process.stderr is not None
            ends = b"2 s later (lease.lease_s) its computation has neither stopped nor advanced: it is hanging"
            lines = process.stderr
            said = await asyncio.to_thread(lambda: next(each for each in lines if each.startswith(b"rollout/0: ")))
            # The process is killed below, because it would wait for the hanging thread before it exits.
            assert ends in said

    asyncio.run(scenario())


def test_a_reward_that_cannot_be_imported_makes_startup_fail_with_one_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        topology = TOPOLOGY.replace("builtin:exact_match", "no_such_module:reward")
        async with cluster(tmp_path, topology) as (processes, _):
            processes.start("rollout")
            process = processes.running.pop("rollout")
            _, errors = await asyncio.to_thread(process.communicate, timeout=60)
            assert process.returncode == UNUSABLE_STATUS
            assert "reward function 'no_such_module:reward': cannot be imported" in errors.decode().splitlines()[-1]

    asyncio.run(scenario())


def test_tasks_with_bad_rows_or_failing_rewards_are_dropped_and_others_fill_the_step(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(
        "def reward(sample):\n"
        "    if sample.row['kind'] == 'raise':\n"
        "        raise ValueError('cannot score this')\n"
        "    return {'length': len(sample.completion), 'one': 1}\n"
    )
    rows = []
    for number in range(64):
        kind = {5: "raise", 6: "long", 7: "bad"}.get(number % 8, "good")
        row = {"prompt": "1+1=" * (40 if kind == "long" else 1), "kind": kind}
        rows.append(json.dumps({"kind": kind} if kind == "bad" else row))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    topology = (
        TOPOLOGY.replace("builtin:exact_match", "my_reward:reward")
        .replace('"builtin:addition"', f'"jsonl:{tmp_path / "rows.jsonl"}", max_prompt_tokens: 100')
        .replace("memory: 64MiB", "memory: 256MiB")
    )

    async def scenario() -> None:
        async with cluster(tmp_path, topology) as (processes, driver):
            processes.start("rollout")
            processes.start("reference")
            info = await driver.begin()
            await driver.publish(info.lineage, 0)
            batch = await driver.batch(1)
            assert len(batch.batch.tasks) == 8
            assert all(int(task.task_id.split("/")[2]) % 8 < 5 for task in batch.batch.tasks)
            assert (batch.scalars["reward"] >= 1).all()
            dropped = {
                str(line["task_id"]): str(line["reason"])
                for line in log_of(tmp_path, "rollout")
                if line["event"] == "task dropped"
            }
            for task_id, reason in dropped.items():
                kind = int(task_id.split("/")[2]) % 8
                assert task_id in reason
                assert {5: "cannot score this", 6: "prompt of 160 tokens", 7: "has no prompt"}[kind] in reason

    asyncio.run(scenario())


@pytest.mark.parametrize("module", ["rollout", "reference"])
def test_the_mailbox_answers_long_before_the_model_is_loaded(tmp_path: Path, module: str) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path) as (processes, driver):
            await driver.begin()
            processes.start(module)
            await driver.until(processes.running[module].pid, "STARTING", deadline_s=10)

    asyncio.run(scenario())
