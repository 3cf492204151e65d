"""Computes the token weights in the loss: one number per sample, derived from the whole optimizer batch before it is
split.

The weight W of a token is its sample's number times the token's mask. Every rank sums W * loss over its tokens, and
nothing is normalised afterwards. Gradients thus do not depend on ranks or micro-batches (docs/architecture.md,
promise 7).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from proto.tensors import Array


def trained_tokens(overlong: str, scalars: Mapping[str, Array]) -> Array:
    """Return int [N]: for each sample, the number of its tokens that count in the loss.

    It is 0 for truncated samples if `overlong` is "mask". Such samples are masked before sum(n) and B of
    `sample_weights` are computed, so that they do not dilute the other samples. Source: overlong filtering in DAPO
    (arXiv 2503.14476), section 3.4.
    """
    tokens = scalars["loss_tokens"]
    return np.where(scalars["truncated"] != 0, 0, tokens) if overlong == "mask" else tokens


def sample_weights(aggregation: str, loss_tokens: Array, *, max_new_tokens: int) -> Array:
    """Return token weights, float32 [N], for the N samples of an optimizer batch.

    `loss_tokens` int [N] is the number of tokens of each sample that count in the loss.

    With n_i = loss_tokens, B = number of samples with n_i > 0, M = number of all samples, L = `max_new_tokens`:

    | aggregation | weight of a token of sample i |
    |---|---|
    | token_mean | 1 / sum(n) (DAPO, arXiv 2503.14476, equation 12) |
    | seq_mean_token_mean | 1 / (n_i B) (DeepSeekMath, arXiv 2402.03300, equation 3) |
    | seq_mean_token_sum | 1 / B |
    | dr_grpo | 1 / (M L) (arXiv 2503.20783, section 3.2) |

    Raises ValueError for any other name.
    """
    counts = loss_tokens.astype(np.float64)
    filled = counts > 0
    sequences = max(int(filled.sum()), 1)
    if aggregation == "token_mean":
        weights = filled / max(counts.sum(), 1.0)
    elif aggregation == "seq_mean_token_mean":
        weights = filled / (np.maximum(counts, 1.0) * sequences)
    elif aggregation == "seq_mean_token_sum":
        weights = filled / sequences
    elif aggregation == "dr_grpo":
        weights = filled / (max(len(counts), 1) * max_new_tokens)
    else:
        raise ValueError(
            f"aggregation {aggregation!r}: use token_mean, seq_mean_token_mean, seq_mean_token_sum or dr_grpo"
        )
    return np.asarray(weights, dtype=np.float32)
