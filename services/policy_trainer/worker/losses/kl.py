"""Provides per-token estimators of KL(policy || reference) from one sampled token, differentiable in `cur`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor


def k1(cur: Tensor, ref: Tensor) -> Tensor:
    """Return cur - ref, which is unbiased and can be negative.

    Source: Schulman, "Approximating KL divergence", 2020, estimator k1.
    """
    return cur - ref


def k2(cur: Tensor, ref: Tensor) -> Tensor:
    """Return (cur - ref)^2 / 2, which is biased, but whose gradient is that of the KL.

    Source: Schulman, "Approximating KL divergence", 2020, estimator k2.
    """
    return 0.5 * (cur - ref).square()


def k3(cur: Tensor, ref: Tensor) -> Tensor:
    """Return exp(ref - cur) - (ref - cur) - 1, which is unbiased and non-negative.

    Sources: Schulman, "Approximating KL divergence", 2020, estimator k3; GRPO (arXiv 2402.03300), equation 4.
    """
    delta = ref - cur
    return torch.expm1(delta) - delta


KL_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({"k2": k2, "k3": k3})
"""Estimators by name. k1 is absent, because its expected gradient in a loss is zero (E[grad log p] = 0)."""
