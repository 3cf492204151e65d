"""Tests rewards and workflows inside the real rollout service, with a real scheduler and a real store."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from proto.messages import TroubleKind
from shared.actor.service import UNUSABLE_STATUS
from shared.stages import REFERENCE
from tests.integration.rollout.rollout_run import TOPOLOGY, Processes, cluster
from tests.keys import SAMPLED
from tests.unit.rollout.test_rewards_judge import judge

MIXED = """
import ctypes, pathlib, time

def is_first(sample, folder):
    file = pathlib.Path(folder) / sample.task_id.replace("/", "-")
    try:
        with file.open("x") as first:
            first.write(str(sample.token_ids))
            return True
    except FileExistsError:  # the first sample may be scored again
        return file.read_text() == str(sample.token_ids)

def fine(sample, *, worth=1.0):
    return worth

def mixed(sample, *, folder):
    kind = {0: "hang", 1: "crash", 2: "eat", 3: "raise"}.get(int(sample.task_id.split("/")[2]) % 13)
    some = kind and is_first(sample, folder)  # only one sample of a group, and those with the same tokens
    if some and kind == "hang":
        time.sleep(600)
    if some and kind == "crash":
        ctypes.string_at(0)
    if some and kind == "eat":
        held = [bytearray(1 << 24) for _ in range(1000)]
    if some and kind == "raise":
        raise ValueError("cannot score this")
    return {"sum": 0.25}
"""
TWO_TURNS = """
import json, time, urllib.request
from shared.workflow import ContextFull

def ask(base_url, messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    head = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, head)) as answer:
        return json.load(answer)["choices"][0]["message"]

async def workflow(row, llm, ctx, *, hint):
    messages = [{"role": "user", "content": row["prompt"]}]
    if ctx.sample == 1:                          # only over HTTP
        messages += [await ctx.call(ask, ctx.base_url, messages), {"role": "tool", "content": hint}]
        await ctx.call(ask, ctx.base_url, messages)
        return llm.trajectory()
    turn = await llm.chat(messages)
    if ctx.sample == 2:                          # a request longer than the context costs nothing
        try:
            await llm.chat([{"role": "user", "content": "1+" * 300}])
            raise ValueError("it was not refused")
        except ContextFull as error:
            assert "the model's context of 512" in str(error)
    if ctx.sample == 3:
        await ctx.call(time.sleep, 600)          # a tool that never answers
    messages += [turn.message, {"role": "tool", "content": hint}]
    answer = await llm.chat(messages)
    return llm.trajectory(reward=None if ctx.sample else {"own": 0.5}, metrics={"length": len(answer.text)})
"""


def log_of(processes: Processes, event: str) -> list[dict[str, Any]]:
    lines = (processes.run.path / "logs" / "rollout-0.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


def user_processes(processes: Processes, kind: str) -> list[psutil.Process]:
    """Return the processes that run user code; the service's direct children are their keepers."""
    service = psutil.Process(processes.running["rollout"].pid)
    command = {"services.rollout.user_code.process", kind}
    keepers = [each for each in service.children() if command <= set(each.cmdline())]
    return [child for keeper in keepers for child in keeper.children()]


async def until_there(processes: Processes, kind: str, count: int) -> None:
    """Wait until there are `count` user processes; broken ones are replaced."""
    async with asyncio.timeout(60):
        while len(user_processes(processes, kind)) < count:
            await asyncio.sleep(0.05)


def check_killed_with_the_service(processes: Processes) -> None:
    children = psutil.Process(processes.running["rollout"].pid).children(recursive=True)
    processes.end("rollout", 9)
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert len(gone) == len(children)


@pytest.mark.timeout(240)
def test_rewards_that_hang_crash_raise_or_use_too_much_memory_lose_only_their_samples(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(MIXED)
    lines = (
        f'[{{function: "my_rewards:mixed", weight: 2, params: {{folder: "{tmp_path}"}}}}, '
        '{function: "my_rewards:fine", params: {worth: 0.125}}]'
    )
    topology = TOPOLOGY.replace(
        '{function: "builtin:exact_match"}', f"{{functions: {lines}, timeout_s: 4, memory: 64MiB}}"
    ).replace('"builtin:addition"', '"builtin:addition", shuffle: false')  # The first step has tasks of all four kinds.
    topology += "lease: {lease_s: 3}\n"  # Computing a reward may take longer than a lease lasts.

    async def scenario() -> None:
        async with cluster(tmp_path, topology) as (processes, driver):
            processes.start("rollout")
            processes.start("reference")
            info = await driver.begin()
            await driver.publish(info.lineage, 0)
            samples = 0
            for step in (1,):
                batch = await driver.batch(step, deadline_s=120)
                assert len(batch.batch.tasks) == 8
                assert set(batch.scalars["reward"].tolist()) == {2 * 0.25 + 0.125}
                samples += len(batch.scalars["reward"])
            assert samples >= 16
            failed = log_of(processes, "samples failed")
            kinds = {int(line["task_id"].split("/")[2]) % 13 for line in failed}
            assert kinds == {0, 1, 2, 3}
            for line in failed:
                kind = int(line["task_id"].split("/")[2]) % 13
                says = ["no answer within 4 s", "died of SIGSEGV", "more memory", "ValueError: cannot score this"]
                assert kind < 4
                assert says[kind] in line["first"]
            await until_there(processes, "reward", 2)
            check_killed_with_the_service(processes)

    asyncio.run(scenario())


@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.long)])
def test_a_workflow_of_two_turns_passes_through_the_whole_service(engine: str, tmp_path: Path) -> None:
    (tmp_path / "my_flow.py").write_text(TWO_TURNS)
    flow = 'workflow: {function: "my_flow:workflow", params: {hint: "12"}, timeout_s: 2, max_tokens: 100}\n'

    async def scenario() -> None:
        topology = TOPOLOGY.replace("block_tasks: 4", f"block_tasks: 4, engine: {engine}") + flow
        async with cluster(tmp_path, topology) as (processes, driver):
            processes.start("rollout")
            processes.start("reference")
            info = await driver.begin()
            await driver.publish(info.lineage, 0)
            batch = await driver.batch(1, deadline_s=300)
            assert [task.samples for task in batch.batch.tasks] == [3] * 8
            tasks = await driver.data.fetch(batch.batch, (*SAMPLED, *REFERENCE.makes), deadline_s=20)
            for task in tasks:
                mask = task["loss_mask"] == 1
                assert task["sample_index"].tolist() == [0, 1, 2]
                assert np.abs(driver.logprobs(task) - task["rollout_logprobs"]).max() < 1e-4
                assert np.abs(driver.logprobs(task) - task["ref_logprobs"]).max() < 1e-4
                starts = np.cumsum(task["lengths"]) - task["lengths"]
                for start, length in zip(starts, task["lengths"], strict=True):
                    part = mask[start : start + length].astype(int)
                    assert (np.diff(part) == 1).sum() == 2
            assert batch.scalars["reward"].reshape(8, 3)[:, 0].tolist() == [0.5] * 8
            assert set(batch.scalars["reward"].reshape(8, 3)[:, 1:].ravel().tolist()) <= {0.0, 1.0}
            failed = log_of(processes, "samples failed")
            assert len(failed) >= 8
            # The tool's wait ends at the sample's time limit; either timer might fire first.
            assert all(
                "no trajectory within 2 s" in line["first"] or "gave no answer within" in line["first"]
                for line in failed
            )
            assert all(line["count"] == 1 for line in failed)
            await until_there(processes, "workflow", 2)
            check_killed_with_the_service(processes)

    asyncio.run(scenario())


JUDGED = """
import urllib.request

def judged(sample, *, url):
    with urllib.request.urlopen(url, timeout=2) as answer:
        return {"verdict": float(answer.read())}
"""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_rewards_wait_for_an_absent_judge_and_no_task_is_lost(tmp_path: Path) -> None:
    (tmp_path / "my_judge.py").write_text(JUDGED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reward = f'{{function: "my_judge:judged", params: {{url: "http://127.0.0.1:{port}"}}, retry: {{backoff_s: 0.1}}}}'
    topology = TOPOLOGY.replace('{function: "builtin:exact_match"}', reward) + "lease: {lease_s: 2, attempts: 1}\n"

    async def scenario() -> None:
        async with cluster(tmp_path, topology) as (processes, driver):
            processes.start("rollout")
            processes.start("reference")
            info = await driver.begin()
            await driver.publish(info.lineage, 0)
            async with asyncio.timeout(90):
                while not (status := await driver.status()).troubles:
                    await asyncio.sleep(0.1)
            [told] = status.troubles
            assert (told.service, told.instance, told.kind) == ("rollout", 0, TroubleKind.JUDGE)
            assert "Connection refused" in told.text
            assert "my_judge.py:5" in told.text
            waiting = asyncio.create_task(driver.batch(1, deadline_s=60))
            done, _ = await asyncio.wait({waiting}, timeout=4)  # A lease lasts 2 s, and a task has one attempt.
            assert not done
            assert (await driver.status()).tasks["LEASED"] > 0
            with judge(port):
                batch = await waiting
                async with asyncio.timeout(20):
                    while (status := await driver.status()).troubles:
                        await asyncio.sleep(0.1)
            assert set(batch.scalars["reward/part/verdict"].tolist()) == {1.0}
            assert {task.fence for task in batch.batch.tasks} == {1}
            assert (status.dropped, status.lost, batch.lost) == ({}, {}, {})
            log = log_of(processes, "judge does not answer")
            assert "Traceback" in log[0]["exception"]

    asyncio.run(scenario())


def test_a_workflow_that_cannot_be_imported_makes_startup_fail_with_one_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with cluster(tmp_path, TOPOLOGY + 'workflow: {function: "no_such:workflow"}\n') as (processes, _):
            processes.start("rollout")
            process = processes.running.pop("rollout")
            _, errors = await asyncio.to_thread(process.communicate, timeout=60)
            assert process.returncode == UNUSABLE_STATUS
            assert "workflow 'no_such:workflow': cannot be imported" in errors.decode().splitlines()[-1]

    asyncio.run(scenario())
