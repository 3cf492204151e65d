"""Tests what a topology with a teacher contains, and the faults that are found in it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.policy_trainer.update import credit_spec, loss_spec
from shared.stages import TEACHER as STAGE
from shared.stages import Per, task_stages, train_graph
from shared.topology import Topology, TopologyError, load
from shared.topology.capacity import task_bytes
from shared.topology.models import POLICY, REFERENCE, TEACHER
from tests.unit.shared.topology.small_topology import BASE, problems, write

DISTILL = BASE.replace("  loss:", "  distill: {kl: reverse}\n  loss:").replace("memory: 1MiB", "memory: 16MiB")
DISTILL += "teacher: {model: ./larger}\n"
NONE = "algorithm.advantage={name: none}"
WITHOUT = ("teacher=null", "algorithm.distill=null")
NO_REWARD = ("reward=null", "data.eval={}")


@pytest.fixture
def own(folder: Path) -> Path:
    """The folder of the small topology, with a second model."""
    shutil.copytree(folder / "model", folder / "larger")
    return folder


def loaded(own: Path, *overrides: str) -> Topology:
    return load(write(own, DISTILL), overrides)


def refused(said: str, own: Path, *overrides: str) -> bool:
    """Return whether the only problem of a topology begins with the key and the words `said`."""
    [line] = problems(write(own, DISTILL), *overrides)
    return f": {said}" in line


def test_a_teacher_is_a_second_frozen_model_with_the_policys_values(own: Path) -> None:
    topology = loaded(own, "sampling.temperature=0.5")
    reference, teacher = topology.frozen
    assert (reference.name, reference.section, reference.stage) == (REFERENCE, POLICY, REFERENCE)
    assert (teacher.name, teacher.service, teacher.section, teacher.stage) == (TEACHER,) * 4
    assert (teacher.folder, teacher.dtype, teacher.temperature) == (own / "larger", "bfloat16", 0.5)
    assert not teacher.refreshed
    assert topology.model_folders() == {str(own / "model"): [POLICY], str(own / "larger"): [TEACHER]}
    given = loaded(own, "teacher={model: ./larger, temperature: 2.0, dtype: float32}", "algorithm.kl=null")
    (teacher,) = given.frozen
    assert (teacher.temperature, teacher.dtype) == (2.0, "float32")


def test_the_stage_of_the_teacher_is_leased_beside_that_of_the_reference(own: Path) -> None:
    topology = loaded(own)
    assert [stage.name for stage in train_graph(topology)] == ["rollout", "reference", "teacher"]
    assert STAGE.name not in {stage.name for stage in task_stages(load(write(own)))}
    without = loaded(own, "teacher=null", "algorithm.distill=null", "services.teacher=null")
    tokens = topology.algorithm.group_size * (32 + topology.sampling.max_new_tokens)
    assert task_bytes(topology, 32) - task_bytes(without, 32) > 4 * tokens


def test_a_teachers_top_k_is_reserved_for_the_tokens_that_are_trained_on(own: Path) -> None:
    topology = loaded(own, "algorithm.distill={kl: forward}")
    assert topology.algorithm.distill is not None
    assert topology.algorithm.distill.top_k == 64
    (stage,) = (stage for stage in task_stages(topology) if stage.name == TEACHER)
    assert [(key.name, key.per, key.row, key.nbytes) for key in stage.keys] == [
        ("teacher_ids", Per.TRAINED, (64,), 256),
        ("teacher_topk", Per.TRAINED, (64,), 256),
    ]
    trained = topology.algorithm.group_size * topology.sampling.max_new_tokens
    small = loaded(own, "algorithm.distill={kl: forward, top_k: 1}")
    assert task_bytes(topology, 32) - task_bytes(small, 32) == trained * 63 * 8
    assert task_bytes(topology, 64) - task_bytes(topology, 32) == task_bytes(small, 64) - task_bytes(small, 32)


def test_a_store_that_cannot_hold_the_top_k_is_refused_with_the_size_that_can(own: Path) -> None:
    loaded(own, "algorithm.distill={kl: forward, top_k: 8}")
    forward = "algorithm.distill={kl: forward, top_k: 4096}"
    assert refused("services.batch-store.memory: ", own, forward)


def test_a_top_k_beyond_the_vocabulary_is_refused(own: Path) -> None:
    (own / "larger" / "config.json").write_text(json.dumps({"vocab_size": 61}))
    forward = "algorithm.distill={kl: forward, top_k: 62}"
    assert refused("algorithm.distill.top_k: 62: the vocabulary has 61 tokens", own, forward)


@pytest.mark.parametrize(("kl", "in_rewards", "in_loss"), [("reverse", 1.0, 0.0), ("forward", 0.0, 1.0)])
def test_with_advantages_per_token_reverse_kl_is_part_of_the_rewards_and_forward_kl_of_the_loss(
    own: Path, kl: str, in_rewards: float, in_loss: float
) -> None:
    topology = loaded(own, f"algorithm.distill={{kl: {kl}}}", "algorithm.advantage={name: reinforce}")
    assert credit_spec(topology, 1.0).distill_coef == in_rewards
    assert loss_spec(topology).distill_coef == in_loss
    assert loss_spec(topology).distill_top_k == (64 if in_loss else 0)


def test_a_resolved_topology_with_a_teacher_can_be_loaded_again(own: Path) -> None:
    topology = loaded(own, NONE, *NO_REWARD)
    topology.dump_resolved(own / "t.yaml")
    assert load(own / "t.yaml") == topology


def test_a_reward_may_be_left_out_if_nothing_learns_from_it_or_is_measured_with_it(own: Path) -> None:
    topology = loaded(own, NONE, *NO_REWARD)
    assert [term.function for term in topology.reward.terms] == ["builtin:none"]
    with pytest.raises(TopologyError, match="reward"):
        loaded(own, *NO_REWARD)
    assert refused("data.eval.held: needs a reward that tells good answers from bad ones", own, NONE, "reward=null")
    zero = "reward={function: 'builtin:none'}"
    assert refused("reward.function: builtin:none gives every sample 0, so advantage grpo", own, zero, "data.eval={}")
    assert loaded(own, NONE).reward.function == "builtin:exact_match"


@pytest.mark.parametrize(
    ("said", "overrides"),
    [
        ("teacher: has no effect without algorithm.distill", ("algorithm.distill=null",)),
        ("services.teacher: has no effect without a teacher", (*WITHOUT, "services.teacher={}")),
        ("algorithm.distill: needs a teacher", ("teacher=null",)),
        (
            "algorithm.distill: has no effect with loss cross_entropy",
            ("algorithm.loss={name: cross_entropy}", "algorithm.group_size=1"),
        ),
        ("algorithm.advantage.name: none teaches nothing without a teacher", (NONE, *WITHOUT)),
        ("algorithm.kl.in: reward has no effect with advantage none", (NONE, "algorithm.kl={coef: 0.1, in: reward}")),
        ("algorithm.filter_zero_variance: has no effect with", (NONE, "algorithm.filter_zero_variance={}")),
        ("algorithm.overlong_penalty: has no effect with", (NONE, "algorithm.overlong_penalty={tokens: 4}")),
        ("algorithm.normalise_rewards: has no effect with", (NONE, "algorithm.normalise_rewards=batch")),
        (
            "placement.colocate.1: no teacher is started without the section teacher",
            (*WITHOUT, "placement.colocate=[policy-trainer, teacher]"),
        ),
        ("algorithm.distill.coef: 0", ("algorithm.distill={coef: 0}",)),
        ("algorithm.distill.kl: ", ("algorithm.distill={kl: sideways}",)),
        ("algorithm.distill.top_k: 4 has no effect with kl reverse", ("algorithm.distill={top_k: 4}",)),
        ("algorithm.distill.top_k: 0", ("algorithm.distill={kl: forward, top_k: 0}",)),
        (
            "services.teacher.backend: megatron does not support algorithm.distill.kl forward",
            ("algorithm.distill={kl: forward}", "services.teacher={backend: megatron}"),
        ),
        ("teacher.temperature: ", ("teacher={model: ./larger, temperature: 0}",)),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused_by_name(said: str, overrides: tuple[str, ...], own: Path) -> None:
    assert refused(said, own, *overrides)


SERVED = (
    "teacher={}",
    "services.teacher={backend: server, server: {base_url: 'http://t'}}",
    "sampling.temperature=1.0",
    "run.deterministic=false",
)


def test_a_teacher_on_a_server_is_asked_about_the_policys_tokens(own: Path) -> None:
    teacher = loaded(own, *SERVED).frozen[-1]
    assert teacher.folder == own / "model"
    assert teacher.server is not None
    assert (teacher.server.base_url, teacher.server.model) == ("http://t", None)


@pytest.mark.parametrize(
    ("said", "overrides"),
    [
        ("services.teacher.backend: server needs services.teacher.server", ("services.teacher={backend: server}",)),
        (
            "services.teacher.server: has no effect with backend torch",
            ("services.teacher.backend=torch", "teacher.model=./larger"),
        ),
        ("services.teacher.server.base_url: 't' is not an http", ("services.teacher.server.base_url=t",)),
        ("teacher.temperature: 0.5: a server returns", ("sampling.temperature=0.5",)),
        ("teacher.model: ", ("teacher.model=./larger",)),
        ("services.teacher.gpus: has no effect with backend server", ("services.teacher.gpus=1",)),
    ],
)
def test_what_a_server_cannot_do_is_refused(said: str, overrides: tuple[str, ...], own: Path) -> None:
    assert refused(said, own, *SERVED, *overrides)


def test_nothing_about_a_server_is_deterministic(own: Path) -> None:
    lines = problems(write(own, DISTILL), *SERVED, "run.deterministic=true")
    assert any("services.teacher.backend: server is not proved to give bit-identical results" in line for line in lines)


def test_a_teacher_needs_as_many_positions_as_the_longest_sample(own: Path) -> None:
    (own / "larger" / "config.json").write_text(json.dumps({"max_position_embeddings": 39}))
    assert refused("teacher.model: 32 prompt tokens (data.train.max_prompt_tokens) and 8 new", own)


def test_the_teachers_folder_must_hold_a_model(own: Path) -> None:
    assert refused(f"teacher.model: no folder {own}/none", own, "teacher.model=./none")
