"""The start-up drill's arithmetic: the perturbed copy and the canary that trainer and engines must agree on.

Must never depend on a framework, a thread count or the time: the same name, values and seed give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from proto.tensors import Array

TABLE_SIZE = 65537  # prime, so that no row length of a matrix repeats with it
RELATIVE_SCALE = 0.05
ZERO_SCALE = 0.01
CANARY_TOKENS = 32
LONG_CANARY_TOKENS = 64
"""Of weights of 16 bits, which are judged by a quantile of the differences: it needs enough of them."""
SHORT_CANARY_TOKENS = 8
SHORT_CANARY_BYTES = 256 << 20
"""Of float32 weights: from here on a canary costs the reading of the weights, and more tokens add to every sync. Every
layer, every row of the output and the attention between positions still take part, and float32's tolerance is narrow:
one parameter of the quickstart's model that was left behind in the drill shows as ten times the tolerance at least,
with 4 tokens as 1.2 times. The drill itself keeps all tokens."""


@functools.lru_cache(maxsize=4)
def _noise(seed: int) -> Array:
    table = np.random.Generator(np.random.Philox(seed)).standard_normal(TABLE_SIZE, dtype=np.float32)
    table.flags.writeable = False
    return table


def perturb(name: str, values: Array, seed: int, factor: float = 1.0) -> Array:
    """`values` plus noise, same shape and dtype, a new array: what the parameter `name` holds in the drill.

    The noise is `noise_scale` times `factor` times standard normals. Sums in float32, cast back to the dtype.
    Integers (a counter among the buffers) stay as they are.
    """
    if values.dtype.kind in "biu" or values.size == 0:
        return values.copy()
    flat = values.reshape(-1).astype(np.float32)
    flat += np.float32(noise_scale(values) * factor) * noise(name, flat.size, seed)
    return flat.astype(values.dtype).reshape(values.shape)


def noise_scale(values: Array) -> float:
    """Standard deviation of the drill's noise on `values`: 0.05 * mean|values|.

    0.01 where they are all zero: a fresh bias must move too.
    """
    mean = float(np.abs(values.reshape(-1).astype(np.float32)).mean(dtype=np.float64))
    return RELATIVE_SCALE * mean if mean > 0 else ZERO_SCALE


def noise(name: str, size: int, seed: int) -> Array:
    """float32 [size]: standard normals, read from a table at an offset that follows from the name."""
    offset = xxhash.xxh3_64_intdigest(name.encode()) % TABLE_SIZE
    return np.resize(np.roll(_noise(seed), -offset), size)


def noise_factors(names: Iterable[str], factors: Sequence[float]) -> dict[str, float]:
    """`perturb`'s factor of each parameter, from `WeightsRef.drill_factors`: of the sorted names; 1 if it is empty.

    Raises ValueError when they are of another model.
    """
    ordered = sorted(names)
    if factors and len(factors) != len(ordered):
        raise ValueError(f"the drill has {len(factors)} noise factors for {len(ordered)} parameters; set policy.model")
    return dict(zip(ordered, factors or [1.0] * len(ordered), strict=True))


def canary_error(logprobs: Array, scores: Array, quantile: float) -> float:
    """The `quantile` of |scores - logprobs|, 1 for the largest; NaN when any of them is no number."""
    differences = np.abs(scores.astype(np.float64) - logprobs)
    return float(np.quantile(differences, quantile, method="higher"))


def canary_tokens(vocab_size: int, seed: int, length: int = CANARY_TOKENS) -> Array:
    """int32 [length]: the fixed sequence, uniform over the vocabulary."""
    return np.random.Generator(np.random.Philox(seed)).integers(0, vocab_size, length, dtype=np.int32)


def canary_length(parameters: int, dtype: str) -> int:
    """Tokens of the canary of a model with so many parameters of `dtype`."""
    if dtype != "float32":
        return LONG_CANARY_TOKENS
    return SHORT_CANARY_TOKENS if 4 * parameters >= SHORT_CANARY_BYTES else CANARY_TOKENS
