"""The start-up drill's arithmetic: the perturbed copy and the canary that trainer and engines must agree on.

Must never depend on a framework, a thread count or the time: the same name, values and seed give the same bits.
"""

from __future__ import annotations

import functools

import numpy as np
import xxhash

from proto.tensors import Array

TABLE_SIZE = 65537  # prime, so that no row length of a matrix repeats with it
RELATIVE_SCALE = 0.05
ZERO_SCALE = 0.01
CANARY_TOKENS = 32
SHORT_CANARY_TOKENS = 8
SHORT_CANARY_BYTES = 256 << 20
"""Of float32 weights: from here on a canary costs the reading of the weights, and more tokens add to every sync. Every
layer, every row of the output and the attention between positions still take part, and float32's tolerance is narrow:
one parameter of the quickstart's model that was left behind in the drill shows as ten times the tolerance at least,
with 4 tokens as 1.2 times. Wider tolerances keep all tokens, and so does the drill itself."""


@functools.lru_cache(maxsize=4)
def _noise(seed: int) -> Array:
    table = np.random.Generator(np.random.Philox(seed)).standard_normal(TABLE_SIZE, dtype=np.float32)
    table.flags.writeable = False
    return table


def perturb(name: str, values: Array, seed: int) -> Array:
    """`values` plus noise, same shape and dtype, a new array: what the parameter `name` holds in the drill.

    The noise is 0.05 * mean|values| (0.01 where they are all zero: a fresh bias must move too) times standard
    normals, read from a table at an offset that follows from the name. Sums in float32, cast back to the dtype.
    Integers (a counter among the buffers) stay as they are.
    """
    if values.dtype.kind in "biu":
        return values.copy()
    flat = values.reshape(-1).astype(np.float32)
    if flat.size == 0:
        return values.copy()
    mean = float(np.abs(flat).mean(dtype=np.float64))
    scale = np.float32(RELATIVE_SCALE * mean if mean > 0 else ZERO_SCALE)
    offset = xxhash.xxh3_64_intdigest(name.encode()) % TABLE_SIZE
    flat += scale * np.resize(np.roll(_noise(seed), -offset), flat.size)
    return flat.astype(values.dtype).reshape(values.shape)


def canary_tokens(vocab_size: int, seed: int, length: int = CANARY_TOKENS) -> Array:
    """int32 [length]: the fixed sequence, uniform over the vocabulary."""
    return np.random.Generator(np.random.Philox(seed)).integers(0, vocab_size, length, dtype=np.int32)


def canary_length(parameters: int, dtype: str) -> int:
    """Tokens of the canary of a model with so many parameters of `dtype`."""
    short = dtype == "float32" and 4 * parameters >= SHORT_CANARY_BYTES
    return SHORT_CANARY_TOKENS if short else CANARY_TOKENS
