"""Tests that the samples of real runs agree with the metrics and that recording them leaves the results of training
bit-identical.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.samples.reader import read, splits, steps
from shared.samples.record import SampleRecord, SampleState
from tests.integration import parity_run as parity
from tests.integration.tiny.harness import QUICKSTART, ROOT, ctl, processes_of
from tests.integration.whole_cluster import cluster
from tests.telemetry_values import undocumented

STEPS, TASKS, GROUP, ROWS = 3, 8, 4, 16
SMALL = (
    f"run.steps={STEPS}",
    f"data.eval.heldout={{source: 'builtin:addition?split=test', every: {STEPS}, rows: {ROWS}, samples: 2, "
    "temperature: 1.0}",
    f"algorithm.tasks_per_step={TASKS}",
    f"algorithm.group_size={GROUP}",
    "algorithm.kl=null",
    "services.reference=null",
    "services.rollout.block_tasks=4",
    "staleness=0",
    f"monitor.samples.per_step={TASKS}",
)


def rows_of(path: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {int(row["step"]): row for row in rows}


def once(records: list[SampleRecord]) -> bool:
    return set(Counter((each.task, each.sample) for each in records).values()) <= {1}


def mismatch(records: list[SampleRecord]) -> float:
    """Return the largest difference between the engine's and the trainer's log-probs."""
    return max(
        float(np.abs(np.subtract(each.logprobs, each.train_logprobs or [np.inf])).max(initial=0)) for each in records
    )


@pytest.mark.timeout(300)
def test_a_run_records_what_it_trained_and_evaluated(tmp_path: Path) -> None:
    with cluster(QUICKSTART, tmp_path, *SMALL, limit_s=280) as run:
        run.wait_for("the monitor", lambda: run.pid("monitor"))
        monitor = [sys.executable, "-m", "launch.monitor", "--run", str(run.path), "--json"]
        with subprocess.Popen(monitor, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watching:
            sent, _ = watching.communicate(timeout=280)
        assert run.end() == 0, run.output()
    told = [json.loads(line) for line in sent.splitlines()]
    assert not any("reward/part/exact_match" in row for row in rows_of(run.path).values())  # it is reward/mean
    assert {"rollout", "engine", "weights", "store", "samples", "cluster/status"} <= {row["topic"] for row in told}
    assert undocumented((row["topic"], value) for row in told for value in row["values"]) == set()
    rows = rows_of(run.path)
    assert splits(run.path) == ["train", "eval/heldout"]
    assert steps(run.path) == [1, 2, 3]
    for step in range(1, STEPS + 1):
        records = read(run.path, step=step)
        assert len(records) == TASKS * GROUP
        assert once(records)
        assert {each.state for each in records} == {SampleState.TRAINED}
        assert all(each.rewards == {"exact_match": each.reward} for each in records)
        assert np.mean([each.reward for each in records]) == pytest.approx(rows[step]["reward/mean"], abs=1e-6)
        for task in {each.task for each in records}:
            assert sum(each.advantage or 0 for each in records if each.task == task) == pytest.approx(0, abs=1e-4)
        assert {version for each in records for version in each.versions} == {step - 1}
        assert mismatch(records) < 1e-3  # without staleness, both have the same weights
        for each in records:
            assert each.completion == "".join(each.pieces).removesuffix("<eos>")
            assert (each.reward == 1) == (each.completion == each.answer)
            assert each.length == len(each.token_ids)
    for version in (0, STEPS):
        records = read(run.path, split="eval/heldout", step=version)
        assert len(records) == 2 * ROWS
        assert once(records)
        assert {each.state for each in records} == {SampleState.SCORED}
        groups = [[each.reward for each in records if each.task == task] for task in {each.task for each in records}]
        assert np.mean(groups) == pytest.approx(rows[version]["eval/heldout/reward"])
        assert np.mean(np.max(groups, axis=1)) == pytest.approx(rows[version]["eval/heldout/pass@2"])
    shown = ctl(run.path, "samples", "--step", "2", "--worst", "3", "--json")
    assert len(json.loads(shown.stdout)["samples"]) == 3


JUDGED = """
def judged(sample):
    if int(sample.task_id.rsplit("/", 1)[1]) % 4 == 0 or sum(sample.token_ids) % 7 == 0:
        raise ValueError("cannot judge this")
    return {"short": 0.5, "form": 0.25, "found": sample.completion}
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_reward_function_is_recorded_by_name_and_failed_samples_with_their_text_and_failure(
    tmp_path: Path,
) -> None:
    (tmp_path / "my_judge.py").write_text(JUDGED)
    prompts = [f"{number}+7=" if number % 8 != 1 else f"{'0' * number}7=" for number in range(10, 90)]
    rows_file = tmp_path / "rows.jsonl"
    rows_file.write_text("".join(json.dumps({"prompt": each, "answer": "17"}) + "\n" for each in prompts))
    functions = "{function: 'builtin:exact_match'}, {function: 'my_judge:judged', weight: 2}"
    chosen = (
        *SMALL,
        "reward.function=null",
        f"reward.functions=[{functions}]",
        f"data.train.source=jsonl:{rows_file}",
        "data.train.max_prompt_tokens=8",
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    with cluster(QUICKSTART, tmp_path, *chosen, limit_s=280, environment={"PYTHONPATH": path}, calls=False) as run:
        assert run.end() == 0, run.output()
    rows = rows_of(run.path)
    every = [each for split in splits(run.path) for each in read(run.path, split=split)]
    assert once(every)
    fine = [each for each in every if each.reward is not None and each.sample >= 0]
    for each in fine:
        assert each.rewards == {"exact_match": float(each.completion == each.answer), "judged": 0.75} | {
            "short": 0.5,
            "form": 0.25,
        }
        assert each.reward == each.rewards["exact_match"] + 2 * 0.75
        assert (each.info, each.failure) == ({"found": each.completion}, "")
    failed = [each for each in every if each.reward is None]
    assert {each.state for each in failed} == {SampleState.TRAINED, SampleState.DROPPED, SampleState.SCORED}
    for each in failed:
        assert "my_judge:judged: raised ValueError: cannot judge this (at my_judge.py:4)" in each.failure
        assert (each.rewards, each.token_ids) == ({}, [])
        assert each.prompt
        assert each.length > 0
    assert any(each.completion for each in failed)
    judged = [each for each in every if each.state == SampleState.DROPPED and each.reason.startswith("reward_failed")]
    assert set(Counter(each.task for each in judged).values()) == {GROUP}
    long = [each for each in every if each.reason.startswith("too_long")]
    assert long
    assert {(each.sample, each.completion) for each in long} == {(-1, "")}
    assert all(isinstance(each.prompt, str) and len(each.prompt) > 8 and each.answer for each in long)
    for step in range(1, STEPS + 1):
        trained = [each for each in fine if (each.state, each.step) == (SampleState.TRAINED, step)]
        for name in ("exact_match", "judged", "short", "form"):
            assert rows[step][f"reward/part/{name}"] == pytest.approx(np.mean([each.rewards[name] for each in trained]))
        assert not any("found" in name for name in rows[step])
    for version in (0, STEPS):
        scored = read(run.path, split="eval/heldout", step=version)
        assert len(scored) == 2 * ROWS
        assert np.mean([each.reward or 0 for each in scored]) == pytest.approx(rows[version]["eval/heldout/reward"])
    shown = ctl(run.path, "samples", "--task", failed[0].task, "--split", failed[0].split)
    assert "cannot judge this" in shown.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
def test_recording_samples_leaves_results_bit_identical_and_a_killed_run_records_each_sample_once(
    tmp_path: Path,
) -> None:
    paths = []
    for name, override in (("without", "monitor.samples=null"), ("killed", "monitor.samples.per_step=16")):
        with parity.start(tmp_path / name, override) as run:
            if name == "killed":
                for step, services in (
                    (2, ["recorder", "rollout"]),
                    (4, ["scheduler"]),
                    (6, ["policy-trainer-worker"]),
                ):
                    run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
                    for service in services:
                        parity.kill(run, service)
            assert run.end() == 0, run.output()
        paths.append(run.path)
    assert parity.differences(*paths) == []
    assert not (paths[0] / "samples").exists()
    for step in range(1, parity.STEPS + 1):
        records = read(paths[1], step=step)
        assert len(records) == 16 * 4
        assert once(records)
    scores = read(paths[1], split="eval/heldout")
    assert len(scores) == len(steps(paths[1], "eval/heldout")) * 32
    assert once(scores)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_resume_sets_aside_the_samples_and_metrics_of_the_steps_that_it_rolls_back(tmp_path: Path) -> None:
    small = (*SMALL, "run.steps=6", "checkpoint.every=100", "checkpoint.memory_every=null")
    with cluster(QUICKSTART, tmp_path, *small, limit_s=280) as run:
        run.wait_for("samples of step 3", lambda: 3 in steps(run.path))
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        while processes_of(run.path):  # The recorder writes what it has while its service drains.
            time.sleep(0.05)
    before = {step: read(run.path, step=step) for step in steps(run.path)}
    with cluster(QUICKSTART, tmp_path, *small, limit_s=280, resume=True) as run:
        back = run.wait_for("the step to which it returns", lambda: re.search(r"back to step (\d+)", run.output()))
        assert run.end() == 0, run.output()
    saved = int(back[1])
    assert steps(run.path) == [1, 2, 3, 4, 5, 6]
    for step in range(1, 7):
        records = read(run.path, step=step)
        assert len(records) == TASKS * GROUP
        assert once(records)
        assert {each.lineage > 0 for each in records} == {step > saved}
    discarded = sorted(int(path.stem) for path in (run.path / "samples" / "discarded" / "0" / "train").iterdir())
    assert discarded == [step for step in before if step > saved] != []
    for step in discarded:
        lines = (run.path / "samples" / "discarded" / "0" / "train" / f"{step}.jsonl").read_bytes().splitlines()
        assert [msgspec.json.decode(line, type=SampleRecord) for line in lines] == before[step]
    rows = [json.loads(line) for line in (run.path / "metrics.discarded.jsonl").read_text().splitlines()]
    assert set(discarded) <= {row["step"] for row in rows}
