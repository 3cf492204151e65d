"""Computes large float32 linear layers with oneDNN, which is part of torch, on CPUs for which MKL has no fast kernels.

torch 2.13 computes float32 products with MKL. On one core of a fifth-generation AMD EPYC, MKL reaches 115
GFLOP/s and oneDNN 260; a forward and backward pass of the quickstart's model takes 86 ms instead of 118. MKL also
copies the whole weight into another layout first, even for eight rows of input, as in a canary. oneDNN adds in a
different order, which changes the last bits. On a sixth-generation Intel Xeon, MKL is faster: it reaches 200 GFLOP/s,
oneDNN 185, and only 130 for gradients of weights, so a pass over answers of up to 128 tokens takes 684 ms with MKL
instead of 812. The maker of the CPU decides, not a measurement, because every start must compute the same bits.

oneDNN prepares a separate kernel for each number of rows, and ragged batches have many different numbers of rows.
Preparation takes 0.1 to 0.4 ms, so only a few kernels are kept (`shared.model.cpu.set_up`). Blocks of 1,024 rows, which
need fewer kernels, were slower, because their results have to be copied into one tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

MIN_PRODUCTS = 1 << 22
"""Minimum number of multiplications in a layer that is computed with oneDNN. Of the powers of two from 2^20 to 2^24,
this one was fastest or nearly so for passes of the trainer and of the engine, in which every number of rows is new. For
smaller products, preparing a kernel takes longer than the product itself with MKL."""


def has_slow_mkl(cpuinfo: str) -> bool:
    """Return whether `cpuinfo` (/proc/cpuinfo) describes a CPU that Intel did not make. MKL has no fast kernels for
    those."""
    return "GenuineIntel" not in cpuinfo


_CPUINFO = Path("/proc/cpuinfo")
USES_ONEDNN = has_slow_mkl(_CPUINFO.read_text() if _CPUINFO.exists() else "")
"""Whether large layers are computed with oneDNN on this machine."""


class OneDnnLinear(nn.Linear):
    """A linear layer that computes with `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def accelerate(model: nn.Module) -> None:
    """Turn the `nn.Linear` modules of `model` into `OneDnnLinear`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of `functional.linear`, up to rounding, for rows [..., in], weight [out, in] and bias [out]."""
    if not suits(rows, weight, bias):
        return functional.linear(rows, weight, bias)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (rows, weight, bias)):
        return cast(Tensor, cast(Any, _Linear).apply(rows, weight, bias))
    return product(rows, weight, bias)


def write_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor) -> Tensor:
    """Write the result of `linear` for rows [N, in] to `out` [N, out], and return it, without a gradient."""
    if suits(rows, weight, bias):
        return out.copy_(product(rows, weight, bias))
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


def suits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether `linear` uses oneDNN. Where `USES_ONEDNN` is true, it does for large products of plain float32
    tensors on a CPU."""
    return (
        USES_ONEDNN
        and rows.numel() * len(weight) >= MIN_PRODUCTS
        and _is_plain(rows)
        and _is_plain(weight)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.backends.mkldnn.enabled)
        and rows.dim() > 1
        and rows.shape[-1] == weight.shape[-1]
        and weight.is_contiguous()
        and (bias is None or (_is_plain(bias) and bias.is_contiguous() and bias.shape == weight.shape[:1]))
    )


def _is_plain(tensor: Tensor) -> bool:
    # A DTensor, which has another type, is only one rank's part.
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


class _Linear(torch.autograd.Function):
    """A linear layer whose gradients are also computed with oneDNN."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None)
        return product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()  # the gradient of a sum has strides of 0, with which oneDNN is a thousand times slower
        grad_NO = grad.flatten(0, -2)
        return (
            product(grad, weight.t()) if weight is not None else None,
            _weight_gradient(grad_NO, rows.flatten(0, -2).contiguous()) if rows is not None else None,
            grad_NO.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _weight_gradient(grad_NO: Tensor, rows_NI: Tensor) -> Tensor:
    """Return [out, in], from contiguous factors. oneDNN copies the transposed first factor of a product, which should
    be the smaller one."""
    if grad_NO.shape[1] > rows_NI.shape[1]:
        return product(rows_NI.t(), grad_NO.t()).t()
    return product(grad_NO.t(), rows_NI.t())


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of `linear` from oneDNN, without gradients, for arguments that suit it."""
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], ""))
