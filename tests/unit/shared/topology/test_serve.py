from __future__ import annotations

from pathlib import Path

import pytest

from launch.processes.plan import processes_at_home
from shared.topology import TopologyError, load, load_resolved, memory_plan, snapshot_bytes
from shared.topology.capacity import parameter_counts

ROOT = Path(__file__).resolve().parents[4]
SERVE = ROOT / "launch" / "topologies" / "recipes" / "serve.yaml"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(TopologyError) as error:
        load(SERVE, overrides)
    return [str(problem) for problem in error.value.problems]


def test_a_server_is_a_cluster_without_what_a_training_run_adds() -> None:
    topology = load(SERVE)
    assert topology.last_step == 0
    assert ("policy-trainer", 0) in processes_at_home(topology)
    assert not {"data", "reward", "algorithm", "optimizer"} & topology.document().keys()


def test_the_resolved_topology_of_a_server_is_read_back_equal(tmp_path: Path) -> None:
    topology = load(SERVE, ["serve.max_rank=8"])
    topology.dump_resolved(tmp_path / "topology.yaml")
    assert load_resolved(tmp_path / "topology.yaml") == topology


@pytest.mark.parametrize(
    "override",
    [
        "data={train: {source: builtin:addition}}",
        "optimizer.lr=1e-4",
        "algorithm.group_size=4",
        "sampling.max_new_tokens=8",
        "reward.function=builtin:exact_match",
        "run.steps=3",
        "staleness=1",
        "policy.lora={rank: 8}",
        "services.reference={}",
        "checkpoint.memory_every=null",
    ],
)
def test_keys_of_a_training_run_are_errors_that_say_so(override: str) -> None:
    key = override.partition("=")[0]
    if override.endswith("null"):
        load(SERVE, [override])  # what is not given is not misplaced
        return
    (problem,) = problems(override)
    assert f"--set {override}: " in problem
    assert key.split(".")[0] in problem
    assert "belongs to a training run" in problem


def test_the_keys_of_a_training_run_are_required_without_the_section() -> None:
    assert any("data: required, but missing" in problem for problem in problems("serve=null"))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("serve.listen=0.0.0.0:8787", "it needs keys"),
        ("serve.listen=127.0.0.1", "is not an address with a port"),
        ("serve.models={}", "serve.models"),
        ("serve.models={a: critic}", "serve.models"),
        ("serve.max_rank=513", "must be 512 or less"),
        ("serve.max_models=0", "must be 1 or more"),
        ("serve.port=1", "unknown key"),
        ("services.policy-trainer.backend=megatron", "megatron has no adapters"),
        ("services.rollout.engine=openai", "openai cannot prove"),
        ("services.rollout.weights=gloo", "gloo is for whole models"),
        ("placement.colocate=[policy-trainer, rollout]", "do not take turns"),
    ],
)
def test_what_a_server_cannot_do_is_refused(override: str, says: str) -> None:
    assert any(says in problem for problem in problems(override))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("services.policy-trainer.backend=megatron", "megatron cannot switch between clients' models; use torch"),
        ("services.rollout.engine=openai", "openai cannot prove that its server computes with the weights of a client"),
        ("services.rollout.weights=gloo", "gloo sends only the newest version of one model, but a server's clients"),
    ],
)
def test_refusals_of_a_server_that_trains_all_weights_do_not_speak_of_adapters(override: str, says: str) -> None:
    found = problems("serve.full_training=true", override)
    assert any(says in problem for problem in found)
    assert not any("adapter" in problem for problem in found)


def test_an_address_that_others_reach_is_accepted_with_keys(tmp_path: Path) -> None:
    topology = load(SERVE, ["serve.listen=0.0.0.0:8787", f"serve.keys={tmp_path / 'keys'}"])
    assert topology.serve is not None
    assert topology.serve.keys == str(tmp_path / "keys")


def test_the_memory_plan_counts_the_slots_of_all_models() -> None:
    few, many = (load(SERVE, [f"serve.max_models={count}"]) for count in (1, 8))
    assert 2 * snapshot_bytes(many) == 9 * snapshot_bytes(few)  # and one for the base at the start
    held = [
        next(
            use.nbytes
            for use in memory_plan.uses(one, parameter_counts(one), {})
            if use.what.startswith("gradients of")
        )
        for one in (few, many)
    ]
    assert held == [0, 7 * parameter_counts(many)["policy"].trained * 4]


def test_a_larger_rank_makes_larger_slots() -> None:
    small, large = (load(SERVE, [f"serve.max_rank={rank}"]) for rank in (8, 32))
    assert parameter_counts(large)["policy"].trained == 4 * parameter_counts(small)["policy"].trained
