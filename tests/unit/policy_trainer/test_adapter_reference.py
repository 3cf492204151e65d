"""Tests what the driver asks workers for if the reference is the trained model with the adapter off."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from proto.messages import Credit, Forward, ForwardBackward, ForwardDone
from proto.registry import Message, Request
from shared.stages import REFERENCE, ROLLOUT, task_stages, train_graph
from shared.topology import Topology, load, task_bytes
from shared.topology.capacity import unleased_token_bytes
from shared.topology.models import POLICY
from tests.unit.policy_trainer.test_two_models import PPO, STEPS, Log, answer, train
from tests.unit.shared.topology.small_topology import edited, make

LOGPROBS = "prox_logprobs"
BOTH = [LOGPROBS, *REFERENCE.makes]
LORA, TWICE = "policy.lora={rank: 4}", "algorithm.num_iterations=2"
IN_REWARD = "algorithm.kl={coef: 0.5, estimator: k1, in: reward}"
CRITIC = (PPO[4], PPO[5], "critic.warmup_steps=2")
KLS = np.arange(12, dtype=np.float32)
"""The KL of each sample of a step, as the workers answer it."""


def made(folder: Path, *overrides: str) -> Topology:
    folder.mkdir(exist_ok=True)
    return load(
        edited(make(folder), "  kl:\n    coef: 0.001\n", ""), [*PPO[:4], "services.batch-store.memory=2MiB", *overrides]
    )


def with_kl(_: str, request: Request) -> Message | None:
    if isinstance(request, Forward) and request.kl_estimator:
        done = answer(request)
        assert isinstance(done, ForwardDone)
        return structs.replace(done, meta=structs.replace(done.meta, scalars={"kl": KLS}))
    return None


def keys_of(request: ForwardBackward | Credit) -> set[str]:
    return {key for part in request.batch.parts for key in part.keys}


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ((LORA, "algorithm.kl={coef: 0.1}"), {(*REFERENCE.makes, ""): STEPS}),
        ((LORA, "algorithm.kl={coef: 0.1}", TWICE), {(*BOTH, ""): STEPS}),
        ((LORA, IN_REWARD), {(*REFERENCE.makes, "k1"): STEPS}),
        ((LORA, IN_REWARD, TWICE), {(*BOTH, "k1"): STEPS}),
        ((LORA, TWICE), {(LOGPROBS, ""): STEPS}),
        ((LORA,), {}),
        ((LORA, "algorithm.kl={coef: 0}"), {}),
        ((LORA, "algorithm.kl={coef: 0.1}", TWICE, "services.reference={}"), {(LOGPROBS, ""): STEPS}),
        (("algorithm.kl={coef: 0.1}",), {}),
        # While only the critic learns, the log-probs are needed only for the rewards from which it learns.
        ((LORA, "algorithm.kl={coef: 0.1}", *CRITIC), {(*REFERENCE.makes, ""): STEPS - 2}),
        ((LORA, IN_REWARD, TWICE, *CRITIC), {(*REFERENCE.makes, "k1"): 2, (*BOTH, "k1"): STEPS - 2}),
    ],
    ids=str,
)
def test_a_step_asks_for_the_log_probs_that_it_needs_in_one_pass(
    overrides: tuple[str, ...], passes: dict[tuple[str, ...], int], tmp_path: Path
) -> None:
    log = Log(with_kl)
    train(made(tmp_path, *overrides), log)
    asked = log.asked(POLICY, Forward)
    assert Counter((*request.keys, request.kl_estimator) for request in asked) == passes
    for request in log.asked(POLICY, ForwardBackward):
        assert {f"{key}:1-1" for forward in asked[-1:] for key in forward.keys} <= keys_of(request)
    if IN_REWARD in overrides:
        assert all("ref_logprobs:1-1" in keys_of(request) for request in log.asked(POLICY, Credit))


def test_rewards_are_shaped_after_the_pass_that_computes_their_kl(tmp_path: Path) -> None:
    """The group of a task has two samples, so that advantages are half the difference of their shaped rewards."""
    log = Log(with_kl)
    rows = train(made(tmp_path, LORA, IN_REWARD, "algorithm.advantage={name: dr_grpo}"), log)
    rewards = np.arange(12) % 2 - 0.5 * KLS
    expected = (rewards - rewards.reshape(6, 2).mean(1).repeat(2)).astype(np.float32)
    for request in log.asked(POLICY, ForwardBackward):
        np.testing.assert_array_equal(request.batch.scalars["advantages"], expected)
    assert all(row["reward/kl"] == KLS.mean() for row in rows)
    assert all(row["time/forward_backward"] == 0.25 for row in rows)


def test_the_trainer_runs_the_stage_of_the_reference_only_without_its_service(tmp_path: Path) -> None:
    with_service = made(tmp_path / "service", LORA, IN_REWARD, "services.reference={}")
    by_trainer = made(tmp_path / "trainer", LORA, IN_REWARD)
    assert [stage.name for stage in train_graph(with_service)] == [ROLLOUT.name, REFERENCE.name]
    assert [stage.name for stage in train_graph(by_trainer)] == [ROLLOUT.name]
    assert [stage.makes for stage in task_stages(by_trainer)] == [stage.makes for stage in task_stages(with_service)]
    assert unleased_token_bytes(by_trainer) == unleased_token_bytes(with_service) + 4
    assert task_bytes(by_trainer, 8) == task_bytes(with_service, 8)
