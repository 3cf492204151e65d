"""Tests what a topology says about the routers of a mixture of experts, and the faults that are found in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.policy_trainer.update import loss_spec
from shared.stages import PROX_ROUTES, PROXIMAL, ROLLOUT, ROUTES, with_keys_of
from shared.topology import Topology, load
from shared.topology.capacity import task_bytes, unleased_token_bytes, version_bytes, worst_case_bytes
from shared.topology.model_files import largest_layer, route_bytes
from tests.unit.shared.topology.small_topology import BASE, make, problems, write

MIXTURE = BASE.replace("memory: 1MiB", "memory: 16MiB")
REPLAY, TRAIN = "algorithm.router_replay=rollout", "algorithm.router_replay=train"
WHOLE = "services.rollout.partial_s=null"
BALANCE = "algorithm.load_balance={coef: 0.01}"
LAYERS, EXPERTS, CHOSEN = 3, 6, 2


def mixture(folder: Path, experts: int = EXPERTS, gate: str = "mlp.gate") -> None:
    """Make the small topology's model a mixture, whose first layer is dense."""
    model = folder / "model"
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": CHOSEN}
    (model / "config.json").write_text(json.dumps(config))
    tensors = {f"model.layers.{layer}.{gate}.weight": torch.zeros(experts, 4) for layer in range(1, LAYERS + 1)}
    tensors |= {f"model.layers.{layer}.mlp.shared_expert_gate.weight": torch.zeros(1, 4) for layer in range(LAYERS)}
    tensors |= {"model.layers.0.mlp.gate.weight": torch.zeros(9, 4)} if gate == "mlp.gate" else {}
    tensors |= {f"model.layers.2.mlp.experts.{expert}.up_proj.weight": torch.zeros(5, 4) for expert in range(experts)}
    save_file(tensors, model / "experts.safetensors")
    route_bytes.cache_clear()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    make(tmp_path)
    mixture(tmp_path)
    return tmp_path


def loaded(own: Path, *overrides: str) -> Topology:
    return load(write(own, MIXTURE), overrides)


@pytest.mark.parametrize(("experts", "gate", "size"), [(6, "mlp.gate", 6), (300, "block_sparse_moe.gate", 12)])
def test_routes_take_a_byte_for_each_choice_of_each_layer_with_experts(
    tmp_path: Path, experts: int, gate: str, size: int
) -> None:
    make(tmp_path)
    mixture(tmp_path, experts, gate)
    assert route_bytes(str(tmp_path / "model")) == size


def test_the_largest_layer_has_all_its_experts(own: Path) -> None:
    assert largest_layer(str(own / "model")) == EXPERTS * 5 * 4 + EXPERTS * 4 + 4


def test_routes_are_a_key_of_the_stage_that_records_them(own: Path) -> None:
    for overrides, rollout, proximal in (
        ((), False, False),
        ((REPLAY,), True, False),
        ((TRAIN,), False, True),
    ):
        topology = loaded(own, *overrides)
        for stage, name, there in ((ROLLOUT, ROUTES, rollout), (PROXIMAL, PROX_ROUTES, proximal)):
            keys = {key.name: key for key in with_keys_of(stage, topology).keys}
            assert (name in keys) == there
            assert not there or (keys[name].row, keys[name].nbytes) == ((LAYERS * CHOSEN,), LAYERS * CHOSEN)


def test_room_is_reserved_for_the_routes_of_every_token(own: Path) -> None:
    plain, replay, train = loaded(own), loaded(own, REPLAY), loaded(own, TRAIN)
    tokens = plain.algorithm.group_size * (32 + plain.sampling.max_new_tokens)
    assert task_bytes(replay, 32) - task_bytes(plain, 32) >= tokens * LAYERS * CHOSEN
    assert unleased_token_bytes(train) - unleased_token_bytes(plain) == LAYERS * CHOSEN
    size, more = (worst_case_bytes(each, 32, version_bytes(each.policy_model)) for each in (plain, replay))
    limit = f"services.batch-store.memory={size}"
    loaded(own, limit)
    [line] = problems(write(own, MIXTURE), REPLAY, limit)
    assert f"services.batch-store.memory: {size} bytes" in line
    assert f"set at least {more} (" in line


def test_the_loss_reads_the_routes_and_the_coefficient(own: Path) -> None:
    for overrides, key, coef in (((), "", 0.0), ((REPLAY, BALANCE), ROUTES, 0.01), ((TRAIN,), PROX_ROUTES, 0.0)):
        spec = loss_spec(loaded(own, *overrides))
        assert (spec.routes, spec.balance_coef) == (key, coef)


def test_a_sample_is_not_resumed_if_its_routes_are_replayed(own: Path) -> None:
    assert loaded(own).services.rollout.partial_s is not None
    assert loaded(own, REPLAY).services.rollout.partial_s is None


@pytest.mark.parametrize(
    ("said", "overrides"),
    [
        ("services.rollout.partial_s: 5: the routes of a resumed sample", (REPLAY, "services.rollout.partial_s=5.0")),
        ("algorithm.router_replay: rollout needs the routes of every token, which the API", (REPLAY, "openai")),
        ("algorithm.router_replay: rollout needs the routes of every token, which vLLM records only", (REPLAY, "vllm")),
        ("algorithm.router_replay: rollout is for backend torch; megatron has no such routers", (REPLAY, "megatron")),
        ("algorithm.router_replay: train is for backend torch; megatron has no such routers", (TRAIN, "megatron")),
        ("algorithm.load_balance.coef: 0.01 is for backend torch; megatron has no such routers", (BALANCE, "megatron")),
        ("algorithm.router_replay: rollout is for single answers", (REPLAY, "workflow={function: 'my:flow'}")),
        (
            "algorithm.router_replay: train has no effect with loss cross_entropy",
            (TRAIN, "algorithm.loss={name: cross_entropy}"),
        ),
        ("algorithm.load_balance.coef: 0.01 has no effect with loss dpo", (BALANCE, "algorithm.loss={name: dpo}")),
        ("algorithm.load_balance.coef: -1", ("algorithm.load_balance={coef: -1}",)),
    ],
)
def test_what_cannot_be_replayed_or_balanced_is_refused_by_name(
    own: Path, said: str, overrides: tuple[str, ...]
) -> None:
    settings = {
        "openai": "services.rollout={engine: openai, engine_args: {base_url: 'http://127.0.0.1:1', model: m}}",
        "vllm": "services.rollout.engine=vllm",
        "megatron": "services.policy-trainer.backend=megatron",
    }
    found = problems(write(own, MIXTURE), *(settings.get(each, each) for each in overrides))
    assert any(f": {said}" in line for line in found), found


@pytest.mark.parametrize("override", [REPLAY, TRAIN, BALANCE])
def test_a_dense_model_has_no_routers(tmp_path: Path, override: str) -> None:
    make(tmp_path)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "qwen3"}))
    [line] = problems(write(tmp_path, MIXTURE), override)
    assert "has no effect: the policy is no mixture of experts" in line
