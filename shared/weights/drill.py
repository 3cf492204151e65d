"""Arithmetic of the start-up drill: the perturbed copy, and the canary on which trainer and engines must agree.

It does not depend on a framework, the number of threads or the time: equal names, values and seeds yield
bit-identical results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from proto.tensors import Array

TABLE_SIZE = 65537  # a prime, so that the noise does not repeat with the row length of a matrix
RELATIVE_SCALE = 0.05
ZERO_SCALE = 0.01
CANARY_TOKENS = 32
LONG_CANARY_TOKENS = 64
"""Number of canary tokens for 16-bit weights. Their differences are judged by a quantile, so there must be enough
tokens."""
SHORT_CANARY_TOKENS = 8
SHORT_CANARY_BYTES = 256 << 20
"""Size of float32 weights, in bytes, from which `SHORT_CANARY_TOKENS` tokens are used. From this size on, reading the
weights dominates the cost of a canary, and more tokens slow down every sync. A short canary still involves every layer,
every row of the output and the attention between positions, and the float32 tolerance is narrow: in the drill, one
stale parameter of the quickstart model moves a log-prob by at least ten tolerances, but with 4 tokens by only 1.2
tolerances. The drill itself keeps all tokens."""

USUAL_NATS = 16.0
"""Size of a log-prob up to which canary errors are not divided. In the shipped model the canary's largest is 11.5. With
logits 16 times as large, after thousands of steps, the passes of one model differ by 1.8e-4 instead of 1e-5."""


@functools.lru_cache(maxsize=4)
def _noise(seed: int) -> Array:
    table = np.random.Generator(np.random.Philox(seed)).standard_normal(TABLE_SIZE, dtype=np.float32)
    table.flags.writeable = False
    return table


def perturb(name: str, values: Array, seed: int, factor: float = 1.0) -> Array:
    """Return a new array of the same shape and dtype: the values that parameter `name` has in the drill.

    The noise added to `values` is `noise_scale` times `factor` times standard normals. The sums are computed in float32
    and cast back. Integers, such as a counter among the buffers, are not changed.
    """
    if values.dtype.kind in "biu" or values.size == 0:
        return values.copy()
    flat = values.reshape(-1).astype(np.float32)
    flat += np.float32(noise_scale(values) * factor) * noise(name, flat.size, seed)
    return flat.astype(values.dtype).reshape(values.shape)


def noise_scale(values: Array) -> float:
    """Return the standard deviation of the drill's noise on `values`: 0.05 * mean|values|.

    It is 0.01 if all values are zero, so that a freshly initialised bias also changes.
    """
    mean = float(np.abs(values.reshape(-1).astype(np.float32)).mean(dtype=np.float64))
    return RELATIVE_SCALE * mean if mean > 0 else ZERO_SCALE


def noise(name: str, size: int, seed: int) -> Array:
    """Return standard normals, float32 [size], read from a table at an offset derived from the name."""
    offset = xxhash.xxh3_64_intdigest(name.encode()) % TABLE_SIZE
    return np.resize(np.roll(_noise(seed), -offset), size)


def noise_factors(names: Iterable[str], factors: Sequence[float]) -> dict[str, float]:
    """Return the `factor` of each parameter for `perturb`. `factors` is `WeightsRef.drill_factors`.

    The sequence holds one factor for each name, in sorted order, or none, in which case all factors are 1. Raises
    ValueError for any other number.
    """
    ordered = sorted(names)
    if factors and len(factors) != len(ordered):
        raise ValueError(f"the drill has {len(factors)} noise factors for {len(ordered)} parameters; set policy.model")
    return dict(zip(ordered, factors or [1.0] * len(ordered), strict=True))


def canary_error(logprobs: Array, scores: Array, quantile: float) -> float:
    """Return the `quantile` of |scores - logprobs| (1 is the maximum), or NaN if any difference is NaN.

    If the trainer's `logprobs` [N] reach beyond `USUAL_NATS`, the differences are divided by that excess. Training
    makes logits grow without end, and the rounding error of all log-probs grows with the largest of them.
    """
    differences = np.abs(scores.astype(np.float64) - logprobs)
    scale = max(1.0, float(np.abs(logprobs).max()) / USUAL_NATS)
    return float(np.quantile(differences, quantile, method="higher")) / scale


def canary_tokens(vocab_size: int, seed: int, length: int = CANARY_TOKENS) -> Array:
    """Return a fixed token sequence, int32 [length], uniform over the vocabulary."""
    return np.random.Generator(np.random.Philox(seed)).integers(0, vocab_size, length, dtype=np.int32)


def canary_length(parameters: int, dtype: str) -> int:
    """Return the number of canary tokens for a model with `parameters` parameters of `dtype`."""
    if dtype != "float32":
        return LONG_CANARY_TOKENS
    return SHORT_CANARY_TOKENS if 4 * parameters >= SHORT_CANARY_BYTES else CANARY_TOKENS
