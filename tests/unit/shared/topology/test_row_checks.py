"""Tests the checks of runs that learn from rows with a chosen and a rejected answer, and of the output layer."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.topology import Topology, load
from shared.topology.models import POLICY, REFERENCE
from tests.unit.shared.topology.small_topology import make, problems, write

PAIRS = """\
run: {name: pairs, steps: 3}
policy: {model: ./model}
data: {train: {source: "jsonl:rows.jsonl", max_prompt_tokens: 32}}
sampling: {max_new_tokens: 8}
algorithm: {tasks_per_step: 6, loss: {name: dpo}}
optimizer: {lr: 1.0e-3}
services: {batch-store: {memory: 8MiB}}
"""
EVALUATED = ("data.eval.held={source: builtin:addition}", "reward.function=builtin:exact_match")
LOSS, HEAD = "algorithm.loss", "policy.head"
REWARD_MODEL = ("policy.head=value", "algorithm.loss.name=bradley_terry")


def loaded(folder: Path, *overrides: str) -> Topology:
    return load(write(make(folder), PAIRS), list(overrides))


def problems_of(folder: Path, *overrides: str) -> list[str]:
    return problems(write(make(folder), PAIRS), *overrides)


@pytest.mark.parametrize(("name", "beta", "margin"), [("dpo", 0.1, None), ("ipo", 0.1, None), ("simpo", 2.0, 0.5)])
def test_a_loss_of_pairs_needs_only_its_name(tmp_path: Path, name: str, beta: float, margin: float | None) -> None:
    topology = loaded(tmp_path, f"{LOSS}.name={name}")
    loss = topology.algorithm.loss
    assert (loss.beta, loss.margin, loss.anchor) == (beta, margin, "rollout")
    assert topology.algorithm.group_size == 2
    assert [model.name for model in topology.frozen] == ([] if name == "simpo" else [REFERENCE])
    assert all(model.sums for model in topology.frozen)
    assert topology.services.rollout.partial_s is None
    assert topology.reward.function == "builtin:none"


def test_an_engine_is_started_only_if_an_evaluation_set_needs_one(tmp_path: Path) -> None:
    topology = loaded(tmp_path)
    assert not topology.samples
    (policy,) = topology.trained
    assert policy.publishes is not None
    assert not policy.publishes.sampled
    assert load(tmp_path / "t.yaml", [*EVALUATED]).samples


def test_an_evaluation_alone_starts_no_reference(tmp_path: Path) -> None:
    topology = loaded(tmp_path, *EVALUATED, "run.evaluate=true")
    assert not topology.frozen
    assert not topology.needs_reference


def test_with_an_adapter_the_trainer_is_the_reference(tmp_path: Path) -> None:
    topology = loaded(tmp_path, "policy.lora={rank: 4}")
    assert topology.reference_by_trainer
    assert not topology.frozen


def test_a_reward_model_has_a_value_head_and_no_reference(tmp_path: Path) -> None:
    topology = loaded(tmp_path, *REWARD_MODEL)
    (policy,) = topology.trained
    assert (policy.name, policy.head) == (POLICY, "value")
    assert not topology.frozen


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{LOSS}.beta=0"], "beta: 0"),
        ([f"{LOSS}.margin=0.5"], f"{LOSS}.margin: 0.5 has no effect with loss dpo; remove it, or use simpo"),
        ([*REWARD_MODEL, f"{LOSS}.beta=0.1"], f"{LOSS}.beta: 0.1 has no effect with loss bradley_terry; remove it"),
        (["algorithm.group_size=4"], "algorithm.group_size: 4: loss dpo compares the two answers of a row; use 2"),
        (
            ["algorithm.tasks_per_step=4097"],
            "algorithm.tasks_per_step: 4097 tasks of 2 samples: a step has at most 8192",
        ),
        (["algorithm.num_iterations=2"], "algorithm.num_iterations: 2 makes 2 updates per step"),
        (["algorithm.mini_batch_tasks=3"], "algorithm.mini_batch_tasks: 3 makes 2 updates per step"),
        ([f"{LOSS}.aggregation=dr_grpo"], f"{LOSS}.aggregation: dr_grpo has no effect with loss dpo"),
        ([f"{LOSS}.anchor=proximal"], f"{LOSS}.anchor: proximal has no effect with loss dpo"),
        ([f"{LOSS}.clip=[0.2, 0.2]"], f"{LOSS}.clip: [0.2, 0.2] has no effect with loss dpo"),
        ([f"{LOSS}.tis_cap=2.0"], f"{LOSS}.tis_cap: 2.0 has no effect"),
        (["algorithm.entropy_coef=0.1"], "algorithm.entropy_coef: 0.1 has no effect with loss dpo"),
        (["algorithm.kl={coef: 0.1}"], "algorithm.kl: has no effect with loss dpo, which compares with the reference"),
        (["algorithm.kl={coef: 0.1, in: reward}"], "algorithm.kl.in: reward has no effect with loss dpo"),
        (["algorithm.overlong=mask"], "algorithm.overlong: has no effect with loss dpo, which does not cut answers"),
        (["algorithm.advantage.name=rloo"], "algorithm.advantage.name: rloo has no effect with loss dpo"),
        (["algorithm.filter_zero_variance={}"], "algorithm.filter_zero_variance: has no effect with loss dpo"),
        (["sampling.temperature=0.7"], "sampling.temperature: 0.7 has no effect with loss dpo"),
        (["sampling.stop=[a]"], "sampling.stop: ['a'] has no effect without data.eval"),
        (["critic={optimizer: {lr: 1.0e-3}}"], "critic: has no effect with loss dpo"),
        (["teacher={model: ./model}", "algorithm.distill={}"], "algorithm.distill: has no effect with loss dpo"),
        (["workflow.function=builtin:calculator"], "workflow: has no effect with loss dpo"),
        (["services.rollout.engine=vllm"], "services.rollout.engine: vllm has no effect: no engine is started"),
        (["services.rollout.gpus=1"], "services.rollout.gpus: 1 has no effect: no engine is started"),
        (["services.rollout.weights=gloo"], "services.rollout.weights: gloo has no effect: no engine is started"),
        (["services.rollout.in_flight=keep"], "services.rollout.in_flight: keep has no effect: no engine is started"),
        (["services.rollout.partial_s=5"], "services.rollout.partial_s: 5 has no effect with loss dpo"),
        (["placement.colocate=[policy-trainer, rollout]"], "placement.colocate.1: rollout has no devices"),
        ([f"{LOSS}.name=simpo", "services.reference={}"], "services.reference: has no effect"),
        ([EVALUATED[0]], "data.eval.held: needs a reward that tells good answers from bad ones"),
        ([f"{LOSS}.name=bradley_terry"], f"{HEAD}: language has no value at the end of an answer"),
        ([f"{HEAD}=value"], f"{HEAD}: value is for loss bradley_terry, but the loss is dpo"),
        ([*REWARD_MODEL, *EVALUATED], "data.eval.held: samples from the policy, but a model with a value head"),
        ([*REWARD_MODEL, "policy.lora={rank: 4}"], "policy.lora: has no value head"),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused_by_name(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    assert any(message in line for line in problems_of(tmp_path, *overrides))


def test_supervised_fine_tuning_without_an_evaluation_set_starts_no_engine_either(tmp_path: Path) -> None:
    topology = loaded(tmp_path, f"{LOSS}.name=cross_entropy", "algorithm.group_size=1", "reward.function=builtin:none")
    assert not topology.samples
