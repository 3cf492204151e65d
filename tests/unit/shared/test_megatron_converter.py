"""The converter between Hugging Face and megatron-core is exact in both directions, for every family and split."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from shared.megatron import architecture
from shared.megatron.converter import Converter, Weight
from shared.megatron.files import ModelFiles, write
from shared.model.load import named_weights
from shared.model.stored import StoredNames
from shared.ranks.layout import Layout
from shared.rpc.errors import RpcError
from tests.unit.tiny_models import SIZES, make_model

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 12, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "llama-biased": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 12, "num_experts": 4, "moe_intermediate_size": 20, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def config(kind: str, **options: Any) -> Any:
    return AutoConfig.for_model(kind.split("-")[0], **{**SIZES, **KINDS.get(kind, {}), **options})


@pytest.mark.parametrize(("kind", "tp", "pp"), list(itertools.product(KINDS, (1, 2), (1, 2))))
def test_every_weight_is_converted_back_bit_for_bit(kind: str, tp: int, pp: int) -> None:
    model = make_model(kind.split("-")[0], **KINDS[kind])
    weights = named_weights(model)
    converter = Converter(architecture.read(model.config), tp, pp)
    assert converter.shapes == {name: tuple(each.shape) for name, each in weights.items()}
    assert converter.elements == sum(each.numel() for each in weights.values())
    assert {each.stage for each in converter.weights} == set(range(pp))
    for weight in converter.weights:
        parts = [weights[name] for name in weight.parts]
        shards = converter.split(weight, parts)
        assert len(shards) == tp
        for original, back in zip(parts, converter.join(weight, shards), strict=True):
            assert torch.equal(original, back), weight.name


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("ep", [1, 2])
def test_experts_are_read_from_a_checkpoint_divided_and_written_as_they_were(
    kind: str, ep: int, tmp_path: Path
) -> None:
    model = make_model(kind, **MIXTURES[kind])
    model.save_pretrained(tmp_path / "stored")
    stored = StoredNames(model.config)
    converter = Converter(architecture.read(model.config), 1, 1, ep)
    weights, files = named_weights(model), ModelFiles(tmp_path / "stored", converter.shapes, stored)
    assert converter.shapes.keys() == weights.keys()
    assert all(torch.equal(files(name), value) for name, value in weights.items())
    for weight in converter.weights:
        parts = [weights[name] for name in weight.parts]
        shards = converter.split(weight, parts)
        assert len(shards) == (ep if weight.rule == "experts" else 1)
        assert all(map(torch.equal, converter.join(weight, shards), parts))
    write(tmp_path / "written", model.config, weights, torch.float32, stored)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("stored", "written"))
    assert any(".experts.0." in name for name in before)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], value) for name, value in after.items())


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"mlp_only_layers": [0]}, "a mixture with layers without experts"),
        ({"decoder_sparse_step": 2}, "a mixture with layers without experts"),
        ({"sliding_window": 8, "use_sliding_window": True}, "a mixture with sliding_window 8"),
    ],
)
def test_mixtures_that_megatron_would_not_reproduce_are_refused(options: dict[str, Any], refused: str) -> None:
    with pytest.raises(RpcError, match=refused):
        architecture.read(config("qwen3_moe", **MIXTURES["qwen3_moe"], **options))


@pytest.mark.parametrize(
    ("kind", "layout", "refused"),
    [
        ("llama", Layout(2, ep=2), "ep 2: the model has no experts; use 1"),
        ("mixtral", Layout(3, ep=3), "ep 3 does not divide the model's 4 experts; use a divisor"),
        ("mixtral", Layout(2, tp=2), "tp 2, cp 1: not available for a mixture of experts; use ep and pp"),
    ],
)
def test_degrees_that_do_not_suit_the_experts_are_refused(kind: str, layout: Layout, refused: str) -> None:
    with pytest.raises(ValueError, match=refused):
        architecture.read(config(kind, **MIXTURES.get(kind, {}))).check(layout)


def weight_named(converter: Converter, end: str) -> Weight:
    return next(each for each in converter.weights if each.name.endswith(end))


def test_a_rank_holds_whole_groups_of_queries_beside_their_key_and_value() -> None:
    # There are 4 heads and 2 key-value heads, with 12 elements each.
    converter = Converter(architecture.read(config("llama")), 2, 1)
    weight = weight_named(converter, "linear_qkv.weight")
    q, k, v = (torch.arange(rows * 48.0).view(rows, 48) + start for rows, start in ((48, 0), (24, 1e5), (24, 2e5)))
    first, second = converter.split(weight, [q, k, v])
    assert torch.equal(first, torch.cat([q[:24], k[:12], v[:12]]))
    assert torch.equal(second, torch.cat([q[24:], k[12:], v[12:]]))


def test_a_rank_holds_its_gate_before_its_up_projection() -> None:
    converter = Converter(architecture.read(config("llama")), 2, 1)
    gate, up = torch.zeros(64, 48) + torch.arange(64)[:, None], torch.zeros(64, 48) - torch.arange(64)[:, None]
    second = converter.split(weight_named(converter, "linear_fc1.weight"), [gate, up])[1]
    assert torch.equal(second, torch.cat([gate[32:], up[32:]]))


def test_vocabulary_padding_is_zero_and_stripped_on_the_way_back() -> None:
    converter = Converter(architecture.read(config("qwen3")), 2, 1)
    table = torch.randn(61, 48)
    shards = converter.split(converter.weights[0], [table])
    assert [len(each) for each in shards] == [32, 32]
    assert not shards[1][29:].any()
    assert torch.equal(converter.join(converter.weights[0], shards)[0], table)


def test_a_tied_table_is_exported_once_and_loaded_at_both_ends_of_the_pipeline() -> None:
    converter = Converter(architecture.read(config("qwen3")), 1, 2)
    assert "lm_head.weight" not in converter.shapes
    [copy] = converter.copies
    assert (copy.stage, copy.name, copy.parts) == (1, "output_layer.weight", ("model.embed_tokens.weight",))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (Layout(4, tp=4), "tp 4 does not divide the model's 2 key-value heads"),
        (Layout(3, pp=3), "pp 3 does not divide the model's 2 layers"),
    ],
)
def test_degrees_that_do_not_divide_the_model_are_refused(layout: Layout, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        architecture.read(config("qwen3")).check(layout)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("gpt2", {}, "model_type 'gpt2'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias True with mlp_bias False"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type 'dynamic'",
        ),
    ],
)
def test_a_model_that_cannot_be_reproduced_is_refused(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RpcError, match=said):
        architecture.read(config(kind, **options))


def test_rotary_frequencies_equal_those_of_the_hugging_face_model() -> None:
    scaled: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    given: list[dict[str, Any]] = [{}, {"rope_parameters": scaled}]
    for options in given:
        model = make_model("llama", **options)
        found = architecture.rotary_frequencies(model.config, architecture.read(model.config))
        assert torch.equal(found, model.model.rotary_emb.inv_freq)
