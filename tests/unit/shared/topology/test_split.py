"""Parallel degrees that do not fit the backend or the model of a trainer or reference are refused before the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.topology import load
from tests.unit.shared.topology.small_topology import problems, write

PARALLEL = "services.policy-trainer.parallel"
MEGATRON = "services.policy-trainer.backend=megatron"
QWEN = {
    "model_type": "qwen3",
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "max_position_embeddings": 64,
}


def model(folder: Path, **changes: object) -> Path:
    (folder / "model" / "config.json").write_text(json.dumps(QWEN | changes))
    return write(folder)


@pytest.mark.parametrize("degrees", ["{tp: 4}", "{pp: 3}", "{tp: 2, pp: 6}", "{cp: 5}"])
def test_megatron_accepts_degrees_that_divide_the_model(folder: Path, degrees: str) -> None:
    topology = load(model(folder), [MEGATRON, f"{PARALLEL}={degrees}"])
    trainer = topology.services.policy_trainer
    assert trainer.world_size == trainer.parallel.model_ranks


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        ("{tp: 6}", "parallel.tp: 6 does not divide the model's 4 key-value heads; use a divisor"),
        ("{pp: 4}", "parallel.pp: 4 does not divide the model's 6 layers; use a divisor"),
    ],
)
def test_degrees_that_do_not_divide_the_model_are_refused(folder: Path, degrees: str, said: str) -> None:
    [line] = problems(model(folder), MEGATRON, f"{PARALLEL}={degrees}")
    assert line.endswith(said)


def test_only_torch_recomputes_selectively(folder: Path) -> None:
    selective = "services.policy-trainer.recompute=selective"
    [line] = problems(model(folder), MEGATRON, selective)
    assert line.endswith("recompute: selective is for backend torch; use layers, or set backend to torch")
    assert load(model(folder), [selective]).services.policy_trainer.recompute == "selective"


@pytest.mark.parametrize(("degree", "what"), [("tp", "layers"), ("pp", "layers"), ("ep", "experts")])
def test_torch_does_not_split_layers_or_experts(folder: Path, degree: str, what: str) -> None:
    [line] = problems(model(folder), f"{PARALLEL}.{degree}=2")
    assert line.endswith(
        f"parallel.{degree}: 2 splits {what}, which backend torch does not support; set backend to megatron, or use 1"
    )


@pytest.mark.parametrize(("degree", "what"), [("tp", "layers"), ("pp", "layers"), ("cp", "sequences here")])
def test_a_torch_reference_is_not_divided_and_a_megatron_reference_accepts_divisors(
    folder: Path, degree: str, what: str
) -> None:
    reference, known = "services.reference", model(folder)
    [line] = problems(known, f"{reference}.parallel.{degree}=2")
    assert f"{reference}.parallel.{degree}: 2 splits {what}, which backend torch does not support" in line
    loaded = load(known, [f"{reference}.backend=megatron", f"{reference}.parallel.{degree}=2"])
    assert [each.name for each in loaded.services_plan() if each.service == "reference"] == [
        "reference/0",
        "reference/1",
    ]
    if degree != "cp":
        line = problems(known, f"{reference}.backend=megatron", f"{reference}.parallel.{degree}=5")[0]
        assert f"{reference}.parallel.{degree}: 5 does not divide" in line


def test_the_number_of_ranks_must_be_a_multiple_of_the_product_of_the_degrees(folder: Path) -> None:
    [line] = problems(model(folder), MEGATRON, f"{PARALLEL}.tp=2", "services.policy-trainer.workers=3")
    assert "services.policy-trainer.workers: 3 is not a multiple of tp*pp*cp = 2; use 4" in line


def test_a_model_that_megatron_does_not_know_is_refused(folder: Path) -> None:
    [line] = problems(model(folder, model_type="gemma3"), MEGATRON)
    assert line.endswith(
        "backend: megatron supports llama, qwen2, qwen3, qwen3_moe, mixtral, but the model is a gemma3; use torch"
    )


MIXTURE = {"model_type": "mixtral", "num_local_experts": 4}


@pytest.mark.parametrize(
    ("config", "given", "why"),
    [
        ({}, [f"{PARALLEL}.ep=2"], "parallel.ep: 2: the model has no experts; use 1"),
        (MIXTURE, [f"{PARALLEL}.ep=3"], "parallel.ep: 3 does not divide the model's 4 experts; use a divisor"),
        (
            MIXTURE,
            [f"{PARALLEL}.ep=2", "services.policy-trainer.workers=3"],
            "parallel.ep: 2 does not divide the 3 copies of the model that share experts; use 2 ranks or a multiple of "
            "that (workers, or gpus)",
        ),
        (MIXTURE, [f"{PARALLEL}.tp=2"], "parallel.tp: 2: not available for a mixture of experts; use ep and pp"),
        (MIXTURE, [f"{PARALLEL}.cp=2"], "parallel.cp: 2: not available for a mixture of experts; use ep and pp"),
    ],
)
def test_degrees_that_do_not_suit_the_experts_are_refused(
    folder: Path, config: dict[str, Any], given: list[str], why: str
) -> None:
    [line] = problems(model(folder, **config), MEGATRON, *given)
    assert line.endswith(why)


def test_the_ranks_of_a_mixture_are_by_default_as_many_as_share_its_experts(folder: Path) -> None:
    known = model(folder, **MIXTURE)
    assert load(known, [MEGATRON, f"{PARALLEL}.ep=4"]).services.policy_trainer.world_size == 4
    assert load(known, [MEGATRON, f"{PARALLEL}={{ep: 2, pp: 2}}"]).services.policy_trainer.world_size == 4


def test_megatron_does_not_train_in_float16(folder: Path) -> None:
    [line] = problems(model(folder), MEGATRON, "policy.dtype=float16")
    assert "policy.dtype" in line
