"""Tests what a topology with an adapter contains, the faults that are found in it, and that its size is known without
the model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from shared.model.adapter import AdapterStart, adapt, targets_of, trained_weights
from shared.model.load import empty_model
from shared.topology import Topology, distribution, load, weight_bytes
from shared.topology.lora import CONFIG, TENSORS, WITH_HEAD, Lora, read_adapter_config
from shared.topology.model_files import adapted_layers, version_shapes
from tests.unit.shared.topology.small_topology import BASE, problems, write
from tests.unit.tiny_models import make_model

TOPOLOGIES = Path(__file__).resolve().parents[4] / "launch" / "topologies"
QUICKSTART = TOPOLOGIES / "quickstart.yaml"
LORA = BASE.replace("  dtype: bfloat16", "  dtype: bfloat16\n  lora: {rank: 32}")
PLAIN = {"peft_type": "LORA", "r": 32, "lora_alpha": 32, "bias": "none", "lora_dropout": 0.0, "use_rslora": False}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12},
    "llama": {"attention_bias": True, "tie_word_embeddings": False},
    "mistral": {},
    "gemma2": {"head_dim": 12, "query_pre_attn_scalar": 12},
    "phi3": {},
    "gpt_neox": {},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 8},
    "recurrent_gemma": {"lru_width": 48, "num_hidden_layers": 3, "head_dim": 12},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "gpt_oss": {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 12, **MIXTURE},
    "qwen3_next": MIXTURE,
    "mixtral": {"num_local_experts": 4},
}


def loaded(folder: Path, *overrides: str) -> Topology:
    return load(write(folder, LORA), overrides)


def refused(folder: Path, *overrides: str) -> str:
    """Return the only problem of a topology with an adapter, without the name of the file."""
    [line] = problems(write(folder, LORA.replace("memory: 1MiB", "memory: 16MiB")), *overrides)
    return line.partition(": ")[2]


def adapter(folder: Path, **config: Any) -> Path:
    """Write an adapter with this configuration, and return its folder. Its tensors are only read when it is loaded."""
    made = folder / "adapter"
    made.mkdir()
    (made / CONFIG).write_text(json.dumps(PLAIN | config))
    save_file({"a": np.zeros(8, np.float32)}, made / TENSORS)
    return made


def test_the_trainer_is_the_reference_of_an_adapter_unless_a_service_is_written(folder: Path) -> None:
    topology = loaded(folder)
    assert topology.reference_by_trainer
    assert topology.services.reference is None
    assert topology.frozen == ()
    assert "reference" not in {spec.service for spec in topology.services_plan()}
    assert loaded(folder, "services.reference=null").reference_by_trainer
    written = loaded(folder, "services.reference={}")
    assert not written.reference_by_trainer
    assert len(written.frozen) == 1
    assert not loaded(folder, "algorithm.kl=null").reference_by_trainer
    assert not load(write(folder)).reference_by_trainer


def test_a_resolved_topology_with_an_adapter_is_read_back_unchanged(folder: Path) -> None:
    topology, path = loaded(folder, f"policy.lora.adapter_path={adapter(folder)}"), folder / "resolved.yaml"
    topology.dump_resolved(path)
    assert load(path) == topology


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("services.policy-trainer={backend: megatron}",),
            "services.policy-trainer.backend: megatron has no adapters (policy.lora); use torch, or remove policy.lora",
        ),
        (
            ("services.rollout={engine: openai, engine_args: {base_url: 'http://a:1'}}",),
            "services.rollout.engine: openai cannot prove that its server computes with an adapter (policy.lora); use "
            "transformers or vllm, or remove policy.lora",
        ),
        (
            ("services.rollout.weights=gloo", "services.rollout.engine=transformers"),
            "services.rollout.weights: gloo is for whole models, but a version is an adapter (policy.lora); use shards",
        ),
        (
            ("algorithm.kl={coef: 0.1, refresh_every: 5}", "checkpoint.every=5", "run.steps=20"),
            "algorithm.kl.refresh_every: 5: the reference is the trainer with its adapter off, which never changes; "
            "add services.reference: {}, or remove it",
        ),
        (
            ("placement.colocate=[policy-trainer, reference]",),
            "placement.colocate.1: with policy.lora, the trainer is the reference, and none is started; leave it out, "
            "or add services.reference: {}",
        ),
        (
            ("policy.lora.rank=513",),
            "policy.lora.rank: 513 is out of range: it must be 512 or less (columns of every adapter's A and B, from 1 "
            "to 512; 32 suits most runs)",
        ),
        (
            ("policy.lora.dropout=0.1",),
            "policy.lora.dropout: not a key: it would have no counterpart in the engines, which have no dropout; "
            "remove it",
        ),
        (
            ("critic={optimizer: {lr: 1.0e-3}, lora: {rank: 8}}", "algorithm.advantage={name: gae}"),
            "critic.lora: not a key: it is not supported: all weights of a critic are trained, also with policy.lora; "
            "remove it",
        ),
    ],
)
def test_what_does_not_compute_an_adapter_is_refused_by_name(
    overrides: tuple[str, ...], said: str, folder: Path
) -> None:
    assert said in refused(folder, *overrides)


def test_supervised_training_a_critic_and_a_refreshed_reference_process_work_with_an_adapter(folder: Path) -> None:
    loss = ("algorithm.loss={name: cross_entropy, aggregation: token_mean}", "algorithm.group_size=1")
    assert loaded(folder, *loss, "algorithm.kl=null").policy_model.lora is not None
    refreshed = ("algorithm.kl={coef: 0.1, refresh_every: 5}", "checkpoint.every=5", "run.steps=20")
    assert loaded(folder, *refreshed, "services.reference={}").frozen[0].refreshed
    critic = ("critic={optimizer: {lr: 1.0e-3}}", "algorithm.advantage={name: gae}", "services.batch-store.memory=8MiB")
    assert [model.lora is None for model in loaded(folder, *critic).trained] == [False, True]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', but only LORA is supported"),
        ({"use_rslora": True}, "use_rslora is True, but its product is scaled by alpha / sqrt(rank)"),
        ({"use_dora": True}, "use_dora is True, but magnitudes are not computed here"),
        ({"bias": "all"}, "bias is 'all', but the biases of the base do not change here"),
        ({"lora_bias": True}, "lora_bias is True, but adapters have no bias here"),
        ({"lora_dropout": 0.05}, "lora_dropout is 0.05, but engines have no dropout"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head'], but only adapters are trained here"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is {'q_proj': 4}, but all layers have one rank here"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is {'q_proj': 4}, but all layers have one alpha here"),
        ({"target_parameters": ["experts"]}, "target_parameters is ['experts'], but adapters belong to linear layers"),
        (
            {"init_lora_weights": "pissa"},
            "init_lora_weights is 'pissa', but such an adapter belongs to changed weights",
        ),
        ({"r": 0}, "r is 0 and lora_alpha is 32, but an adapter has a rank from 1 to 512 and an alpha above 0"),
    ],
)
def test_an_adapter_that_computes_something_else_is_refused_by_name(
    config: Mapping[str, Any], said: str, folder: Path
) -> None:
    path = adapter(folder, **config)
    line = refused(folder, f"policy.lora.adapter_path={path}")
    assert line.startswith(f"policy.lora.adapter_path: {path}/{CONFIG}: {said}")
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        read_adapter_config(str(path))


def test_files_that_are_missing_or_damaged_are_named(folder: Path) -> None:
    path = adapter(folder)
    (path / CONFIG).write_text("[1")
    assert "adapter_config.json is not JSON" in refused(folder, f"policy.lora.adapter_path={path}")
    for name in (TENSORS, CONFIG):
        (path / name).unlink()
        assert f"adapter has no {name}, which every adapter has" in refused(folder, f"policy.lora.adapter_path={path}")


def test_an_adapter_of_another_rank_or_alpha_is_refused_with_both_values(folder: Path) -> None:
    path = adapter(folder, r=16, init_lora_weights="gaussian", base_model_name_or_path="a/b")
    assert read_adapter_config(str(path)).base == "a/b"
    given = f"policy.lora.adapter_path={path}"
    assert f"policy.lora.rank: 32, but the adapter in {path} has 16; use that" in refused(folder, given)
    assert loaded(folder, given, "policy.lora.rank=16").policy.lora is not None
    line = refused(folder, given, "policy.lora.rank=16", "policy.lora.alpha=8.0")
    assert f"policy.lora.alpha: 8, but the adapter in {path} has 32; use that" in line


@pytest.mark.parametrize(("size", "text"), [(5, "is not a safetensors file: unreadable header"), (80, "has 80 bytes")])
def test_an_adapter_that_was_cut_off_is_refused_before_a_start(folder: Path, size: int, text: str) -> None:
    path = adapter(folder)
    os.truncate(path / TENSORS, size)
    line = refused(folder, f"policy.lora.adapter_path={path}")
    assert f"policy.lora.adapter_path: {path / TENSORS} {text}" in line
    assert line.endswith("; save the adapter again")


def test_other_hosts_fetch_the_adapter_with_which_training_begins(folder: Path, tmp_path: Path) -> None:
    topology = loaded(folder, f"policy.lora.adapter_path={adapter(folder)}")
    names = {file.path.partition("/")[2]: place for file, place in distribution.files(topology.document())}
    assert {f"adapter/{CONFIG}", f"adapter/{TENSORS}", "model/config.json"} <= names.keys()
    moved = distribution.relocated(topology.document(), tmp_path / "there")
    number = next(file.path for file, _ in distribution.files(topology.document()) if "adapter/" in file.path)
    assert moved["policy"]["lora"]["adapter_path"] == str(tmp_path / "there" / number.rpartition("/")[0])
    assert "/adapter" not in str([file.path for file, _ in distribution.files(loaded(folder).document())])


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_adapted_layers_are_known_from_the_files_alone(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, **FAMILIES[kind])
    model.save_pretrained(tmp_path)
    ends = {name.rpartition(".")[2] for name in targets_of(model, Lora(rank=4)).chosen}
    some = sorted(ends)[0]
    for lora in (
        Lora(rank=4),
        Lora(rank=4, exclude_modules=(some,)),
        Lora(rank=4, target_modules=(some,)),
        *([Lora(rank=4, target_modules=("lm_head", some))] if hasattr(model, "lm_head") else []),
        *([Lora(rank=4, target_modules=WITH_HEAD)] if hasattr(model, "lm_head") else []),
    ):
        if lora.exclude_modules and len(ends) == 1:
            continue
        chosen = targets_of(model, lora).chosen
        found = adapted_layers(str(tmp_path), lora)
        assert sorted(found.values()) == sorted(list(layer.weight.shape) for layer in chosen.values())
        assert {name.rpartition(".")[2] for name in found} == {name.rpartition(".")[2] for name in chosen}


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-tools"])
def test_the_tensors_of_a_version_are_those_of_the_adapted_model(name: str) -> None:
    folder = TOPOLOGIES / "models" / name
    topology = load(QUICKSTART, ["policy.lora.rank=8", f"policy.model={folder}"])
    shapes = version_shapes(topology.policy_model)
    model = empty_model(folder, "float32")
    lora = topology.policy.lora
    assert lora is not None
    trained = [each for each in adapt(model, AdapterStart(lora, 0)).named_parameters() if each[1].requires_grad]
    assert shapes == {name: list(parameter.shape) for name, parameter in trained}
    assert 0 < weight_bytes(topology.policy_model) - 4 * sum(map(math.prod, shapes.values())) < 1 << 16


def test_the_scale_of_an_adapter_is_alpha_over_rank() -> None:
    models = [make_model("qwen3", head_dim=12) for _ in range(2)]
    for model, alpha in zip(models, (8.0, 16.0), strict=True):
        lora = Lora(rank=4, alpha=alpha)
        assert lora.scale == alpha / 4
        adapt(model, AdapterStart(lora, 0))
        for name, tensor in trained_weights(model).items():
            if name.endswith("lora_B"):
                tensor.fill_(0.01 * 8.0 / alpha)
    ids = torch.arange(5, 12)[None]
    assert torch.equal(*(model(input_ids=ids).logits for model in models))
