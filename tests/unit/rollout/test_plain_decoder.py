"""Compares the plain decoder with the model's own modules, for every architecture that it supports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from services.rollout.engines.passes import ModelPasses, PlainPasses, make_passes
from shared.model import linear
from shared.model.adapter import AdapterStart, adapt, adapters_of, adapters_off
from shared.model.linear import MIN_PRODUCTS
from shared.model.load import allow
from shared.model.plain_decoder import PlainDecoder, is_plain
from shared.topology.lora import Lora
from shared.topology.passes import FASTEST, Passes

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "qwen2": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
}


def model_of(kind: str, **settings: Any) -> Any:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **settings), dtype=torch.float32)
    for parameter in model.parameters():  # Norms and biases then differ from those of a fresh model.
        parameter.data += 0.2 * torch.randn_like(parameter)
    allow(model, FASTEST)
    return model.eval().requires_grad_(False)


def with_adapters(model: Any, *, scaled: bool) -> Any:
    """Give every linear layer of `model`, the head included, an adapter that is not zero."""
    layers = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    adapt(model, AdapterStart(Lora(rank=3, alpha=5.0, target_modules=layers), 1), scaled=scaled)
    for layer in adapters_of(model).values():
        layer.lora_B.data.normal_(std=0.1)
    return model.requires_grad_(False)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("lengths", [[6, 6, 6], [3, 6, 1]])
@pytest.mark.parametrize("adapted", [False, True])
@torch.inference_mode()
def test_every_pass_gives_the_logits_of_the_models_own_modules(kind: str, lengths: list[int], adapted: bool) -> None:
    model = model_of(kind, **MODELS[kind])
    if adapted:
        with_adapters(model, scaled=True)
    assert is_plain(model)
    ids = torch.randint(0, 60, (3, 6))
    sides = [passes(model, 6 + 20) for passes in (ModelPasses, PlainPasses)]
    torch.testing.assert_close(*(side.begin(ids, lengths) for side in sides), atol=2e-5, rtol=0)
    twice = torch.arange(3).repeat_interleave(2)
    sides = [type(side).gathered(model, [(side, twice)], 20) for side in sides]
    rows = 6
    for step in range(12):
        if step in (3, 7):
            kept = torch.arange(rows)[step % 2 :: 2]
            rows = len(kept)
            for side in sides:
                side.keep(kept)
        nexts = torch.randint(0, 60, (rows,))
        torch.testing.assert_close(*(side.go_on(nexts) for side in sides), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
@torch.inference_mode()
def test_an_adapter_that_is_off_leaves_the_bits_of_the_base(kind: str) -> None:
    model, ids = model_of(kind, **MODELS[kind]), torch.randint(0, 60, (20,))
    base = PlainDecoder(model).logprobs(ids)
    with_adapters(model, scaled=False)
    assert float((PlainDecoder(model).logprobs(ids) - base).abs().max()) > 0.1
    with adapters_off(model):
        assert torch.equal(PlainDecoder(model).logprobs(ids), base)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("min_products", [MIN_PRODUCTS, 0])
@torch.inference_mode()
def test_logprobs_of_a_text_equal_those_of_the_models_own_modules(
    kind: str, min_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "USES_ONEDNN", True)
    monkeypatch.setattr(linear, "MIN_PRODUCTS", min_products)
    model = model_of(kind, **MODELS[kind])
    ids = torch.randint(0, 60, (30,))
    wanted = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)[torch.arange(29), ids[1:]]
    torch.testing.assert_close(PlainDecoder(model).logprobs(ids), wanted, atol=2e-5, rtol=0)


@torch.inference_mode()
def test_replaced_weights_take_effect_in_the_next_pass() -> None:
    model, other = model_of("qwen3", **MODELS["qwen3"]), model_of("qwen3", **MODELS["qwen3"])
    for parameter in other.parameters():
        parameter.data = parameter.data * 1.1
    ids = torch.randint(0, 60, (2, 5))
    before, wanted = (PlainPasses(each, 8).begin(ids, [5, 5]) for each in (model, other))
    for mine, given in zip(model.parameters(), other.parameters(), strict=True):
        mine.data = given.data
    found = PlainPasses(model, 8).begin(ids, [5, 5])
    assert torch.equal(found, wanted)
    assert not torch.equal(found, before)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {"hidden_act": "gelu"}),
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("gemma2", {}),
    ],
)
def test_a_model_that_computes_differently_is_left_to_its_own_modules(kind: str, settings: dict[str, Any]) -> None:
    assert not is_plain(model_of(kind, **settings))


def test_other_precisions_are_left_to_the_models_own_modules() -> None:
    assert not is_plain(model_of("qwen3").to(torch.bfloat16))


class Adapted(nn.Module):
    """An adapter around a layer, whose attributes it forwards, as adapter libraries do."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.added = layer, nn.Linear(layer.in_features, layer.out_features)
        self.out_features = layer.out_features

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.layer.bias

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows) + self.added(rows)


def adapted(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.q_proj = Adapted(attention.q_proj)


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, made: 2 * made)


def recomputed(model: Any) -> None:
    layer = model.model.layers[0]
    layer.forward = layer.forward


@torch.inference_mode()
def test_a_layer_that_an_adapter_wraps_is_not_left_out() -> None:
    model = model_of("qwen3", **MODELS["qwen3"])
    adapted(model)
    ids = torch.randint(0, 60, (1, 9))
    wanted = model(input_ids=ids).logits[:, -1]
    torch.testing.assert_close(make_passes(model, 12).begin(ids, [9]), wanted, atol=2e-5, rtol=0)
    computed = PlainDecoder(model).begin(ids, *(each[:9] for each in PlainDecoder(model).angles(9)), None)[0][:, -1]
    assert float((PlainDecoder(model).logits(computed) - wanted).abs().max()) > 0.01  # what would be left out


@pytest.mark.parametrize("change", [adapted, hooked, recomputed])
def test_a_model_with_a_changed_module_is_left_to_its_own_modules(change: Callable[[Any], None]) -> None:
    model = model_of("qwen3", **MODELS["qwen3"])
    assert is_plain(model)
    change(model)
    assert not is_plain(model)


def test_a_model_runs_its_own_modules_unless_its_passes_allow_the_decoder() -> None:
    model = model_of("qwen3", **MODELS["qwen3"])
    allow(model, Passes(sequences="packed", head="blocks"))
    assert not is_plain(model)
