"""Tests what a topology with a critic contains, and the faults that are found in it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from shared.topology import Topology, load
from shared.topology.models import CRITIC, POLICY
from shared.topology.passes import FASTEST, Passes
from tests.unit.shared.topology.small_topology import BASE, problems, write

PPO = BASE.replace("  loss:", "  advantage: {name: gae}\n  loss:").replace("memory: 1MiB", "memory: 16MiB")
PPO += "critic: {optimizer: {lr: 1e-4}}\n"
HOSTS = ("placement.hosts={a: {}, b: {}}", "transport.listen=10.0.0.1")
OWN = "algorithm.advantage={name: 'a:b', per: token}"


def critic_folder(folder: Path, **config: object) -> str:
    """Create another model in `folder` and return the override that makes it the critic's."""
    model = folder / "value"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    save_file({"w": np.zeros((10, 50), np.float32)}, model / "model.safetensors")
    return "critic.model=./value"


def loaded(folder: Path, *overrides: str) -> Topology:
    return load(write(folder, PPO), overrides)


def refused(said: str, folder: Path, *overrides: str) -> bool:
    """Return whether the only problem of a topology begins with the key and the words `said`."""
    [line] = problems(write(folder, PPO), *overrides)
    return f": {said}" in line


def test_a_critic_is_a_second_trained_model_with_the_policys_values(folder: Path) -> None:
    topology = loaded(folder, "services.policy-trainer={workers: 2, threads: 3}", "algorithm.mini_batch_tasks=2")
    policy, critic = topology.trained
    assert (critic.name, critic.service, critic.head, critic.publishes) == ("critic", "critic", "value", None)
    assert (critic.folder, critic.dtype, critic.settings) == (policy.folder, policy.dtype, policy.settings)
    assert (critic.mini_batch_tasks, critic.num_iterations, critic.optimizer.lr) == (2, 1, 1e-4)
    assert topology.ranks["critic"] == 2
    assert [spec.instance for spec in topology.services_plan() if spec.service == "critic"] == [0, 1]
    advantage = topology.algorithm.advantage
    assert (advantage.gamma, advantage.lam, advantage.lam_value, advantage.truncated) == (1.0, 1.0, 1.0, "end")
    assert loaded(folder, "algorithm.advantage.lam=0.9").algorithm.advantage.lam_value == 0.9


def test_keys_of_services_critic_that_are_left_out_are_those_of_the_trainer(folder: Path) -> None:
    topology = loaded(folder, "services.policy-trainer={workers: 2, threads: 3}", "services.critic={threads: 5}")
    settings = topology.services.trainers[CRITIC]
    assert (settings.workers, settings.threads) == (2, 5)
    assert loaded(folder, "services.policy-trainer.workers=2", "services.critic.workers=null").ranks["critic"] == 1


def test_a_resolved_topology_with_a_critic_is_read_back_unchanged(folder: Path) -> None:
    topology = loaded(folder, "critic.num_iterations=3", "services.critic.threads=2")
    path = folder / "resolved.yaml"
    topology.dump_resolved(path)
    assert load(path) == topology


def test_passes_are_set_by_model(folder: Path) -> None:
    topology = loaded(folder)
    changed = topology.with_passes({CRITIC: FASTEST, POLICY: Passes()})
    assert [model.passes for model in changed.trained] == [Passes(), FASTEST]
    assert load(write(folder)).with_passes({CRITIC: FASTEST}).critic is None


def test_models_in_one_folder_are_named_together(folder: Path) -> None:
    model = str(folder / "model")
    assert loaded(folder).model_folders() == {model: [POLICY, CRITIC]}
    own = loaded(folder, critic_folder(folder)).model_folders()
    assert own == {model: [POLICY], str(folder / "value"): [CRITIC]}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["algorithm.advantage={name: grpo}"],
            "critic: advantage grpo does not use its values; remove it, or set algorithm.advantage.name to gae or to a "
            "function of yours with per: token",
        ),
        (["algorithm.advantage={name: reinforce}"], "critic: advantage reinforce does not use its values; remove it"),
        (
            ["critic=null"],
            "algorithm.advantage.name: gae needs the values of a critic; add critic with optimizer.lr, or use reinf",
        ),
        ([OWN, "algorithm.advantage.lam=0.9"], "algorithm.advantage.lam: 0.9 has no effect with advantage a:b; remove"),
        (
            [OWN, "algorithm.advantage.lam_value=0.5"],
            "algorithm.advantage.lam_value: 0.5 has no effect with advantage a:b; remove it, or use gae",
        ),
        (
            [OWN, "algorithm.advantage.truncated=bootstrap"],
            "algorithm.advantage.truncated: bootstrap has no effect with advantage a:b",
        ),
        (
            [
                "algorithm.advantage.truncated=bootstrap",
                "workflow={function: 'builtin:calculator'}",
                "services.rollout.partial_s=null",
            ],
            "algorithm.advantage.truncated: bootstrap needs to know which sequence was cut, but a workflow's sample "
            "says only whether one was; use end",
        ),
        (
            ["critic.mini_batch_tasks=4"],
            "critic.mini_batch_tasks: 4 does not divide algorithm.tasks_per_step (6); use a divisor",
        ),
        (
            ["critic.warmup_steps=4"],
            "critic.warmup_steps: 4 is more than run.steps (3), so the policy would never learn; use less",
        ),
        (
            ["critic=null", "algorithm.advantage={name: reinforce}", "services.critic={}"],
            "services.critic: has no effect without a critic; remove it, or add critic with optimizer.lr",
        ),
        (["critic.model=./none"], "critic.model: no folder "),
        (
            ["critic.model=no/such"],
            "critic.model: no/such is not in the local Hugging Face cache ",
        ),
        (
            [*HOSTS, "services.policy-trainer.host=a", "services.critic.host=b"],
            "services.critic.host: begins with b, but the critic's first rank writes its checkpoints on a; name that "
            "host first",
        ),
        (
            ["services.critic={backend: torch, parallel: {tp: 2}}"],
            "services.critic.parallel.tp: 2 splits layers, which backend torch does not support",
        ),
        (
            ["services.critic={backend: megatron, recompute: selective}", "services.policy-trainer.backend=torch"],
            "services.critic.recompute: selective is for backend torch; use layers, or set backend to torch",
        ),
        (
            ["services.critic={backend: megatron}", "critic.dtype=float16"],
            "critic.dtype: float16: backend megatron supports float32 and bfloat16",
        ),
        (
            ["services.critic={parallel: {cp: 2}, workers: 3}"],
            "services.critic.workers: 3 is not a multiple of tp*pp*cp = 2; use 4",
        ),
        (
            ["services.critic={gpus: 1, workers: 1}"],
            "services.critic.workers: 1 has no effect with 1 gpus: one rank runs on each; set it to null",
        ),
        (
            ["services.critic.max_tokens_per_micro_batch=39"],
            "services.critic.max_tokens_per_micro_batch: 39 is less than one sample",
        ),
        (
            ["critic=null", "algorithm.advantage={name: reinforce}", "placement.colocate=[policy-trainer, critic]"],
            "placement.colocate.1: no critic is started without the section critic; leave it out",
        ),
    ],
)
def test_a_fault_of_a_critic_is_named_with_its_remedy(overrides: list[str], said: str, folder: Path) -> None:
    assert refused(said, folder, *overrides)


def test_a_critic_has_no_effect_without_advantages(folder: Path) -> None:
    supervised = [
        "algorithm={tasks_per_step: 6, group_size: 1, loss: {name: cross_entropy}}",
        "reward={function: 'builtin:numeric'}",
        "data.train.max_prompt_tokens=null",
        "services.reference=null",
    ]
    lines = problems(write(folder, PPO), *supervised)
    assert any(
        line.endswith("critic: has no effect with loss cross_entropy, which does not use advantages; remove it")
        for line in lines
    )


def test_a_critic_without_a_learning_rate_is_refused(folder: Path) -> None:
    assert refused("critic.optimizer: required, but missing", folder, "critic={}")
    assert refused("critic.optimizer.lr: required, but missing", folder, "critic={optimizer: {}}")


@pytest.mark.parametrize(
    ("missing", "said"), [("config.json", "has no config.json"), ("model.safetensors", "has no *.safetensors")]
)
def test_the_files_of_the_critics_folder_are_checked_like_the_policys(missing: str, said: str, folder: Path) -> None:
    override = critic_folder(folder, max_position_embeddings=64)
    (folder / "value" / missing).unlink()
    assert refused(f"critic.model: {folder / 'value'} {said}", folder, override)


def test_an_unreadable_critic_is_named(folder: Path) -> None:
    override = critic_folder(folder, max_position_embeddings=64)
    (folder / "value" / "model.safetensors").write_bytes(b"\0" * 4)
    assert refused(f"critic.model: {folder / 'value' / 'model.safetensors'}", folder, override)


@pytest.mark.parametrize(
    ("positions", "overrides", "said"),
    [
        (39, [], "32 prompt tokens (data.train.max_prompt_tokens) and 8 new (sampling.max_new_tokens) exceed"),
        (63, ["data.train.max_prompt_tokens=null"], "sequences of up to 64 tokens exceed the critic's 63 positions"),
        (
            63,
            ["workflow={function: 'builtin:calculator', max_tokens: 100}", "services.rollout.partial_s=null"],
            "sequences of up to 64 tokens exceed the critic's 63 positions; lower workflow.max_tokens",
        ),
        (7, ["data.train.max_prompt_tokens=null"], "8 new tokens (sampling.max_new_tokens) exceed"),
    ],
)
def test_a_critic_needs_a_position_for_each_token_of_the_longest_sequence(
    positions: int, overrides: list[str], said: str, folder: Path
) -> None:
    small = critic_folder(folder, max_position_embeddings=positions)
    assert refused(f"critic.model: {said}", folder, small, *overrides)
    (folder / "value" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    loaded(folder, small, *overrides)


def test_the_degrees_of_a_critic_are_those_of_its_own_model(folder: Path) -> None:
    small = critic_folder(folder, model_type="gpt2", max_position_embeddings=64)
    said = "services.critic.backend: megatron supports llama, qwen2, qwen3, qwen3_moe, mixtral, but the model is a gpt2"
    assert refused(said, folder, small, "services.critic={backend: megatron}")
    heads = {"num_attention_heads": 3, "num_key_value_heads": 2}
    (folder / "value" / "config.json").write_text(json.dumps({"model_type": "qwen3", **heads}))
    said = "services.critic.parallel.tp: 2 does not divide the model's 3 attention heads"
    assert refused(said, folder, small, "services.critic={backend: megatron, parallel: {tp: 2}}")


def test_a_fault_of_a_section_that_gives_its_values_to_the_critic_is_said_once(folder: Path) -> None:
    assert refused("services.policy-trainer.gpu: unknown key", folder, "services.policy-trainer={gpu: 1}")
    said = "services.policy-trainer.max_tokens_per_micro_batch: 39 is less than one sample"
    assert refused(said, folder, "services.policy-trainer.max_tokens_per_micro_batch=39")
