"""Computes losses that compare the two answers of each row, from one score per sample, and their derivatives.

The score s of a sample is the sum of the model's outputs over its trained tokens: the log-prob of the answer or, with a
value head, the value at its end. For any such loss L, the gradient is the sum of dL/ds grad s. So the driver computes
A = -dL/ds, and workers add up the gradient of -A s (`worker.loss.linear_token_loss`): the answers of a row need not
meet in a micro-batch or on a rank. Scores belong to the weights of one update, so a step has a single update.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from proto.tensors import Array
from shared.topology.algorithm import REFERENCED, Loss

PAIR_SAMPLES = 2
LENGTH_NORMALISED = ("ipo", "simpo")
"""The losses that divide a score by the number of tokens of its answer."""


@dataclass(frozen=True)
class Compared:
    """The comparison of P pairs. `advantages` float64 [2 P] are -dL/ds, in the order of the samples."""

    loss: float
    margin: float
    """Mean of the difference of the implicit rewards, or for bradley_terry of the values, of chosen and rejected."""
    accuracy: float
    """Fraction of the pairs whose difference is above 0."""
    advantages: Array


def compare(options: Loss, scores: Array, reference: Array | None, tokens: Array) -> Compared:
    """Return the mean loss over the pairs, whose samples follow one another: chosen, rejected, chosen and so on.

    `scores` and `reference`, those of the reference model, are float64 [2 P]; `tokens` int [2 P] counts the trained
    tokens. With sigma the logistic function, and n tokens per answer, the loss of a pair is

    | loss | of a pair | h |
    |---|---|---|
    | dpo | -log sigma(beta h) | difference of s - s_ref (arXiv 2305.18290, equation 7) |
    | ipo | (h - 1 / (2 beta))^2 | difference of (s - s_ref) / n (arXiv 2310.12036, equation 17; n as in TRL) |
    | simpo | -log sigma(beta h - margin) | difference of s / n (arXiv 2405.14734, equation 6) |
    | bradley_terry | -log sigma(h) | difference of s |

    Raises ValueError if the samples are not pairs, or a score is missing.
    """
    if len(scores) % 2:
        raise ValueError(f"loss {options.name} compares two answers of each row, but there are {len(scores)} samples")
    if options.name in REFERENCED:
        if reference is None:
            raise ValueError(f"loss {options.name} needs the scores of the reference, which sent none")
        scores = scores - reference
    beta = options.beta or 1.0
    factors = np.ones(len(scores))
    if options.name in LENGTH_NORMALISED:
        factors = factors / tokens
    weighted = (scores * factors).reshape(-1, 2)
    h = weighted[:, 0] - weighted[:, 1]
    if options.name == "ipo":
        away = h - 1.0 / (2.0 * beta)
        losses, slopes = away**2, 2.0 * away
    else:
        z = beta * h - (options.margin or 0.0)
        losses, slopes = np.logaddexp(0.0, -z), -beta * np.exp(-np.logaddexp(0.0, z))
    pairs = max(len(h), 1)
    derivatives = np.stack([slopes, -slopes], axis=1).reshape(-1) * factors / pairs
    return Compared(
        loss=float(losses.sum() / pairs),
        margin=float(beta * h.sum() / pairs),
        accuracy=float((h > 0).sum() / pairs),
        advantages=-derivatives,
    )
