"""Computes float32 linear layers on a CPU with oneDNN, which is part of torch, if they are large enough.

torch 2.13 computes float32 products with MKL. On one core of an AMD EPYC of the fifth generation, MKL reaches 115
GFLOP/s and oneDNN 260; a forward and backward pass of the quickstart's model takes 86 ms instead of 118. MKL also
copies the whole weight into another layout first, even for eight rows of input, as in a canary. oneDNN adds in a
different order, which changes the last bits.

oneDNN prepares a kernel for each number of rows, of which ragged batches have many. Preparation takes 0.1 to 0.4 ms,
so only a few kernels are kept (`shared.model.cpu.set_up`). Blocks of 1,024 rows, which need fewer kernels, were slower:
their results have to be copied together.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

MIN_PRODUCTS = 1 << 20
"""Minimum number of multiplications of a layer for which oneDNN is used. Below it, launching oneDNN costs more than it
saves."""


def accelerate(model: nn.Module) -> None:
    """Make the `nn.Linear` modules of `model` compute with `linear`."""
    for each in model.modules():
        if type(each) is nn.Linear:
            cast(Any, each).forward = MethodType(_forward, each)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of `functional.linear`, up to rounding, for rows [..., in], weight [out, in] and bias [out]."""
    if not suits(rows, weight):
        return functional.linear(rows, weight, bias)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (rows, weight, bias)):
        return cast(Tensor, cast(Any, _Linear).apply(rows, weight, bias))
    return _product(rows, weight, bias)


def suits(rows: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` uses oneDNN. It does for large products of plain float32 tensors on a CPU."""
    return (
        rows.numel() * len(weight) >= MIN_PRODUCTS
        and weight.dtype == rows.dtype == torch.float32
        and weight.device.type == "cpu"
        and type(weight) in (Tensor, nn.Parameter)  # a DTensor is only one rank's part
        and type(rows) is Tensor
        and weight.is_contiguous()
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


class _Linear(torch.autograd.Function):
    """A linear layer whose gradients are computed with oneDNN, too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        grad = grads[0]
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        grad_NO, rows_NI = grad.flatten(0, -2), rows.flatten(0, -2)
        return (
            _product(grad, weight.t()) if needs_rows else None,
            _product(grad_NO.t(), rows_NI.t()) if needs_weight else None,
            grad_NO.sum(0) if needs_bias else None,
        )


def _forward(module: nn.Linear, rows: Tensor) -> Tensor:
    return linear(rows, module.weight, module.bias)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product
