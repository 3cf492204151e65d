"""A faster way through linear layers for a handful of rows on a CPU: a canary, which multiplies all weights by them.
Must never be used where a gradient is wanted, nor where bits must equal those of a plain pass.

torch 2.13 gives float32 matrix products to MKL, which copies the whole weight into another layout first, also for eight
rows. oneDNN, which is part of torch, does not: 1 GiB in 0.12 s instead of 0.16 s on a core that copies it in 0.08 s and
reads it in 0.04 s. The sums come in another order, hence differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

MAX_ROWS = 8


class FewRows(TorchFunctionMode):
    """While entered (on this thread): linear layers of plain float32 weights on the CPU go through oneDNN."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and not kwargs and _suits(*args):
            return _linear(*args)
        return func(*args, **(kwargs or {}))


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`, for few rows through oneDNN: for who writes products himself, and saves what the mode costs
    at every other operation."""
    return _linear(rows, weight, bias) if _suits(rows, weight, bias) else functional.linear(rows, weight, bias)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


def _suits(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype == rows.dtype == torch.float32
        and weight.is_contiguous()
        and 0 < rows.numel() <= MAX_ROWS * rows.shape[-1]
        and not torch.is_grad_enabled()
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )
