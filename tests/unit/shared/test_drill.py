"""The noise of the drill is reproducible, changes every parameter, and differs between parameters."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from shared.weights.drill import (
    CANARY_TOKENS,
    LONG_CANARY_TOKENS,
    SHORT_CANARY_BYTES,
    SHORT_CANARY_TOKENS,
    ZERO_SCALE,
    canary_error,
    canary_length,
    canary_tokens,
    noise_factors,
    perturb,
)

MODEL = Path(__file__).parents[3] / "launch" / "topologies" / "models" / "tiny-qwen3"


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_noise_is_reproducible_and_keeps_shape_and_dtype(dtype: type) -> None:
    values = np.linspace(-1, 1, 3 * 70001).reshape(3, 70001).astype(dtype)
    before = values.copy()
    first, second = perturb("a.weight", values, 3), perturb("a.weight", values, 3)
    assert first.dtype == values.dtype
    assert first.shape == values.shape
    assert first.tobytes() == second.tobytes()
    assert values.tobytes() == before.tobytes()


def test_noise_has_the_stated_scale() -> None:
    values = np.full(60000, -2.0, np.float32)
    noise = perturb("w", values, 0) - values
    assert noise.std() == pytest.approx(0.05 * 2.0, rel=0.02)
    assert abs(noise.mean()) < 0.002


def test_noise_depends_on_name_and_seed() -> None:
    values = np.ones(1000, np.float32)
    one = perturb("a", values, 0)
    assert not np.array_equal(one, perturb("b", values, 0))
    assert not np.array_equal(one, perturb("a", values, 1))


def test_a_parameter_of_zeros_also_changes() -> None:
    moved = perturb("bias", np.zeros(5000, np.float32), 0)
    assert moved.std() == pytest.approx(ZERO_SCALE, rel=0.1)


def test_integers_are_unchanged() -> None:
    assert perturb("steps", np.arange(4), 0).tolist() == [0, 1, 2, 3]


def test_canary_tokens_are_fixed_and_inside_the_vocabulary() -> None:
    tokens = canary_tokens(64, 5)
    assert tokens.dtype == np.int32
    assert tokens.shape == (32,)
    assert np.array_equal(tokens, canary_tokens(64, 5))
    assert not np.array_equal(tokens, canary_tokens(64, 6))
    assert 0 <= tokens.min() <= tokens.max() < 64


def test_only_canaries_of_large_float32_weights_are_short() -> None:
    large = SHORT_CANARY_BYTES // 4
    assert canary_length(large, "float32") == SHORT_CANARY_TOKENS
    assert canary_length(large - 1, "float32") == CANARY_TOKENS
    assert canary_length(100 * large, "bfloat16") == LONG_CANARY_TOKENS  # A median needs many tokens.


def test_the_noise_of_each_parameter_is_scaled_by_its_factor() -> None:
    values = np.full(60000, -2.0, np.float32)
    one, three = perturb("w", values, 0) - values, perturb("w", values, 0, 3.0) - values
    assert np.allclose(three, 3 * one, atol=1e-5)
    # Factors are in the order of the sorted names.
    assert noise_factors(["b", "a"], [1.0, 3.0]) == {"a": 1.0, "b": 3.0}
    assert noise_factors(["b", "a"], []) == {"a": 1.0, "b": 1.0}
    with pytest.raises(ValueError, match="3 noise factors for 2 parameters"):
        noise_factors(["b", "a"], [1.0, 3.0, 1.0])


def test_the_error_of_a_canary_is_a_quantile_and_nan_is_a_mismatch() -> None:
    expected, scores = np.zeros(5, np.float32), np.array([0.1, -0.3, 0.0, 0.2, 9.0], np.float32)
    assert canary_error(expected, scores, 1.0) == 9.0
    assert canary_error(expected, scores, 0.5) == pytest.approx(0.2)
    scores[2] = np.nan
    for quantile in (0.0, 0.5, 1.0):
        assert np.isnan(canary_error(expected, scores, quantile))


def test_canary_errors_are_relative_to_log_probs_beyond_16_nats() -> None:
    small, large = np.array([-16.0, -1.0], np.float32), np.array([-160.0, -1.0], np.float32)
    assert canary_error(small, small + np.float32(2**-10), 1.0) == pytest.approx(2**-10)
    assert canary_error(large, large + np.float32(2**-10), 1.0) == pytest.approx(2**-10 / 10)
    assert not canary_error(large, np.array([np.nan, -1.0]), 1.0) <= 1e6


def test_the_passes_of_a_peaked_model_agree_but_not_those_of_another_version() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(32)
    ids = torch.from_numpy(canary_tokens(model.config.vocab_size, 0).astype(np.int64))

    def scored(*, cached: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        cache = DynamicCache(config=model.config)
        parts = ids[:, None, None] if cached else ids[None, None]
        with torch.no_grad():
            logits = torch.cat([model(part, past_key_values=cache).logits[0] for part in parts])[:-1]
        return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()

    whole = scored(cached=False)
    steps = scored(cached=True)
    assert np.abs(whole - steps).max() > 1e-4
    assert canary_error(whole, steps, 1.0) <= 0.5e-4
    for name, weight in model.named_parameters():
        before = weight.detach().clone()
        with torch.no_grad():
            weight.copy_(torch.from_numpy(perturb(name, before.numpy(), 0)))
        assert canary_error(whole, scored(cached=False), 1.0) > 10e-4, name
        with torch.no_grad():
            weight.copy_(before)
