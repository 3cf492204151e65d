"""Runs with an advantage for each token: rewards of turns reach a user's function, and kills do not change a bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration import parity_run as parity
from tests.integration.tiny.harness import QUICKSTART
from tests.integration.whole_cluster import cluster

pytestmark = pytest.mark.timeout(300)

MODULE = """
async def two_turns(row, llm, ctx):
    messages = [{"role": "user", "content": row["prompt"]}]
    first = await llm.chat(messages)
    second = await llm.chat([*messages, first.message, {"role": "tool", "content": "again"}])
    return llm.trajectory(reward=1.0, turn_rewards=[0.25, 0.5])


def credit(task, *, factor):
    # Each token gets what comes after it, so the last tokens of both turns and the rest are seen in the result.
    assert task.rewards.tolist() == [1.75] * len(task.rewards)
    later = task.token_rewards[::-1].cumsum()[::-1]
    ends = task.lengths.cumsum()
    after = later - later[ends - 1].repeat(task.lengths) + task.token_rewards[ends - 1].repeat(task.lengths)
    return factor * after
"""


def test_rewards_of_turns_become_advantages_of_their_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    overrides = (
        "run.steps=2",
        "data.eval={}",
        "algorithm.tasks_per_step=8",
        "algorithm.group_size=2",
        "algorithm.advantage={name: 'mine:credit', per: token, whiten: none, params: {factor: 2.0}}",
        "workflow={function: 'mine:two_turns'}",
        "services.batch-store.memory=256MiB",
        "services.monitor.samples={per_step: 8}",
    )
    with cluster(QUICKSTART, tmp_path, *overrides, limit_s=240) as run:
        assert run.end() == 0, run.output()
        rows = run.rows()
        records = [
            json.loads(line)
            for path in sorted((run.path / "samples" / "train").glob("*.jsonl"))
            for line in path.read_text().splitlines()
        ]
    assert rows[-1]["step"] == 2
    assert rows[-1]["reward/mean"] == 1.75
    assert rows[-1]["advantage/mean"] > 0
    assert records
    for record in records:
        sampled, advantages = record["sampled"], record["advantages"]
        trained = [advantage for advantage, mask in zip(advantages, sampled, strict=True) if mask]
        # 2 (0.25 + 0.5 + 1) up to the end of the first turn, then 2 (0.5 + 1)
        assert sorted(set(trained)) == [3.0, 3.5]
        assert trained == sorted(trained, reverse=True)
        assert not any(advantage for advantage, mask in zip(advantages, sampled, strict=True) if not mask)
        assert record["advantage"] == pytest.approx(sum(trained) / len(trained))


@pytest.mark.long
def test_kills_do_not_change_a_bit_of_a_run_with_advantages_of_tokens(tmp_path: Path) -> None:
    settings = (
        "algorithm.advantage={name: reinforce, gamma: 0.9, whiten: mini_batch}",
        "algorithm.kl={in: reward, coef: 0.01, estimator: k1}",
    )
    with parity.start(tmp_path / "undisturbed", *settings) as run:
        assert run.end() == 0, run.output()
        undisturbed = run.path
    kills = {2: ["policy-trainer-worker"], 4: ["batch-store"], 5: ["policy-trainer"], 7: ["rollout", "scheduler"]}
    with parity.start(tmp_path / "killed", *settings) as run:
        for step, services in kills.items():
            run.wait_for(f"step {step}", lambda step=step: parity.committed(run, step))
            for service in services:
                parity.kill(run, service)
        assert run.end() == 0, run.output()
        assert parity.differences(undisturbed, run.path) == []
