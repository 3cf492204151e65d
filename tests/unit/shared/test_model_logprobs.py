"""Log-probs of ragged sequences equal those of each sequence scored alone, in values and gradients, for several
models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shared.model import attention, linear, logprobs
from shared.model.load import allow
from shared.model.logprobs import token_logprobs
from shared.model.proof import prove
from tests.unit.tiny_models import make_model, plain_logprobs, ragged

ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3": ("qwen3", {"head_dim": 12}, "packed"),
    "qwen2": ("qwen2", {}, "packed"),
    "llama": ("llama", {"tie_word_embeddings": True}, "packed"),
    "mistral, sliding window": ("mistral", {"sliding_window": 4}, "packed"),
    "gemma2, soft caps": ("gemma2", {"head_dim": 12, "query_pre_attn_scalar": 12}, "padded"),
    "gpt2, learned positions": ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4}, "packed"),
    "mamba, no attention": ("mamba", {"state_size": 8, "time_step_rank": 4}, "padded"),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_and_gradients_equal_those_of_single_sequences(name: str) -> None:
    kind, options, sequences = ARCHITECTURES[name]
    model = make_model(kind, dtype=torch.float64, **options)
    verdict = prove(model.config)
    assert (verdict.sequences, verdict.head) == (sequences, "blocks")
    allow(model, verdict.passes)
    ids, lengths, mask = ragged()
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=len(ids)))

    expected = plain_logprobs(model, ids, lengths, mask, 0.7)
    (expected * weights).sum().backward()
    wanted = {key: each.grad.clone() for key, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    found, _ = token_logprobs(model, ids, lengths, mask, 0.7, 64)
    (found * weights).sum().backward()

    assert torch.allclose(found, expected, rtol=0, atol=1e-6 if kind == "mamba" else 1e-10)
    for key, parameter in model.named_parameters():
        if key in wanted:
            assert parameter.grad is not None
            error = (parameter.grad - wanted[key]).norm() / (wanted[key].norm() + 1e-12)
            assert error < (1e-4 if kind == "mamba" else 1e-9), key


def test_a_vocabulary_scored_in_blocks_gives_the_same_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3", dtype=torch.float64, head_dim=12)
    ids, lengths, mask = ragged()
    whole, whole_entropy = token_logprobs(model, ids, lengths, mask, 1.0, 4096, with_entropy=True)
    whole.sum().backward()
    wanted = model.get_input_embeddings().weight.grad.clone()
    model.zero_grad()
    monkeypatch.setattr(logprobs, "MAX_LOGITS", 61 * 7)
    parts, parts_entropy = token_logprobs(model, ids, lengths, mask, 1.0, 4096, with_entropy=True)
    parts.sum().backward()
    assert torch.allclose(whole, parts, rtol=0, atol=1e-12)
    assert whole_entropy is not None
    assert parts_entropy is not None
    assert torch.allclose(whole_entropy, parts_entropy, rtol=0, atol=1e-12)
    assert torch.allclose(model.get_input_embeddings().weight.grad, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("onednn", [False, True])
def test_a_pass_without_gradients_computes_the_bits_of_one_with_gradients(
    onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ratios of a first update are exactly 1."""
    monkeypatch.setattr(linear, "USES_ONEDNN", onednn)
    monkeypatch.setattr(linear, "MIN_PRODUCTS", 0)
    model = make_model("qwen3", head_dim=12)
    linear.accelerate(model)
    arguments = (*ragged(), 0.7, 64)
    trained, _ = token_logprobs(model, *arguments)
    assert trained.requires_grad
    with torch.no_grad():
        scored, _ = token_logprobs(model, *arguments)
    assert torch.equal(trained, scored)


def test_entropy_is_that_of_the_distribution_scaled_by_the_temperature() -> None:
    model = make_model("qwen3", dtype=torch.float64, head_dim=12)
    ids = np.array([5, 9, 11], np.int32)
    _, entropy = token_logprobs(model, ids, np.array([3]), np.array([0, 0, 1]), 2.0, 64, with_entropy=True)
    logits = model(input_ids=torch.tensor([[5, 9]])).logits[0, -1] / 2.0
    assert entropy is not None
    assert torch.allclose(entropy[2], torch.distributions.Categorical(logits=logits).entropy(), atol=1e-10)
    assert entropy[:2].tolist() == [0.0, 0.0]


def test_bfloat16_is_scored_in_float32_after_the_head() -> None:
    model = make_model("qwen3", dtype=torch.bfloat16, head_dim=12)
    ids, lengths, mask = ragged()
    found, _ = token_logprobs(model, ids, lengths, mask, 1.0, 4096)
    assert found.dtype == torch.float32
    exact, _ = token_logprobs(model.float(), ids, lengths, mask, 1.0, 4096)
    assert 0 < (found - exact).abs().max() < 0.5


def test_the_models_own_attention_is_restored_afterwards() -> None:
    model = make_model("qwen3", head_dim=12)
    before = model.config._attn_implementation
    token_logprobs(model, *ragged(), 1.0, 4096)
    assert model.config._attn_implementation == before != attention.NAME


def test_an_empty_mask_gives_zeros() -> None:
    model = make_model("qwen3", head_dim=12)
    found, entropy = token_logprobs(model, np.array([3, 4]), np.array([2]), np.zeros(2), 1.0, 64, with_entropy=True)
    assert found.tolist() == [0.0, 0.0]
    assert entropy is not None
    assert entropy.tolist() == [0.0, 0.0]


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature 0"):
        token_logprobs(make_model("qwen3", head_dim=12), np.array([3, 4]), np.array([2]), np.array([0, 1]), 0.0, 64)
