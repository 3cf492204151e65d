"""The layers of plain decoders (`plain_decoder`) with their gradients written out, for training in float32 on a CPU.

With the model's own modules, autograd keeps the result of every operation, and each operation reads and writes the
memory of the whole micro-batch. Here, only what the gradients need is kept, a little more than half as much. With MKL,
the operations between two attention passes run on one block of rows at a time, which stays in the processor's cache. On
one core of a sixth-generation Intel Xeon, a pass over answers of up to 128 tokens takes 614 ms instead of 702, and one
over answers of up to 8 tokens 281 ms instead of 328.

Shapes: N nodes, H query heads, G key heads, X = H + G, D head_dim, I inner size of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from shared.model import linear
from shared.model.attention import Trees, attend_joint
from shared.model.linear import add_weight_gradient, input_gradient, write_linear
from shared.model.plain_decoder import PlainDecoder, is_plain

BLOCK_VALUES = 196_608
"""Number of values in the widest array of a block for each thread: 768 KiB, a part of a core's own cache."""
MIN_BLOCK_ROWS = 128
"""Minimum number of rows of a block for each thread, because products of fewer rows are slow."""


def trains_plainly(model: nn.Module) -> bool:
    """Return whether `hidden_states` supports `model`: it is plain, this process holds and trains all of its weights,
    its layers are not recomputed, and only queries, keys and values have biases."""
    if not is_plain(model):
        return False
    known: Any = model
    return all(
        "forward" not in vars(layer)
        and all(each.bias is None for each in (layer.self_attn.o_proj, *_projections(layer.mlp)))
        for layer in known.model.layers
    ) and all(each.requires_grad and not isinstance(each, DTensor) for each in known.parameters())


def hidden_states(model: nn.Module, ids_N: Tensor, depths_N: Tensor, trees: Trees, predictors_P: Tensor) -> Tensor:
    """Return hidden states [P, hidden] of the predictors, the input of the output layer."""
    known: Any = model
    decoder, base = PlainDecoder(model), known.model
    cos, sin = decoder.angles(int(depths_N.max()) + 1)
    turn = cos[depths_N], sin[depths_N]
    x = nn.functional.embedding(ids_N, base.embed_tokens.weight)
    for layer in base.layers:
        own, mlp = layer.self_attn, layer.mlp
        parts = (own.q_proj, own.k_proj, own.v_proj)
        bias = None if own.q_proj.bias is None else torch.cat([part.bias for part in parts])
        norm, middle = layer.input_layernorm, layer.post_attention_layernorm
        given = norm.weight, bias, decoder.heads_norm(own), *turn, norm.variance_epsilon
        qkv = _apply(_Projections, x, *given, *(part.weight for part in parts))
        attended = attend_joint(qkv, trees, decoder.sizes, decoder.scale)
        weights = own.o_proj.weight, middle.weight, *(part.weight for part in _projections(mlp))
        x = _apply(_Rest, x, attended, *weights, middle.variance_epsilon)
    return _apply(_Norm, x.index_select(0, predictors_P), base.norm.weight, base.norm.variance_epsilon)


def _projections(mlp: Any) -> tuple[Any, Any, Any]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    return cast(Tensor, cast(Any, function).apply(*arguments))


class _Projections(torch.autograd.Function):
    """RMSNorm, the projections to queries, keys and values, the norms of queries and keys, and their rotation: maps
    [N, hidden] to [N, (X + G) * D]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm: Tensor,
        bias: Tensor | None,
        heads_norm_XD: Tensor | None,
        cos_N1D: Tensor,
        sin_N1D: Tensor,
        epsilon: float,
        *weights: Tensor,
    ) -> Tensor:
        dim = cos_N1D.shape[-1]
        columns = _columns(weights)
        width, turned = columns[-1].stop, columns[1].stop
        qkv, scale = x.new_empty(len(x), width), x.new_empty(len(x), 1)
        with_norm = len(x) if heads_norm_XD is not None else 0
        raw, heads_scale = x.new_empty(with_norm, turned), x.new_empty(with_norm, turned // dim, 1)
        for rows in _blocks(x, width):
            scale[rows] = _inverse_rms(x[rows], epsilon)
            normed = _normed(x[rows], scale[rows], norm)
            for weight, part in zip(weights, columns, strict=True):
                write_linear(normed, weight, out=qkv[rows, part])
            if bias is not None:
                qkv[rows] += bias
            qk_RXD = qkv[rows, :turned].view(len(normed), -1, dim)
            given = qk_RXD
            if heads_norm_XD is not None:
                raw[rows] = qkv[rows, :turned]
                heads_scale[rows] = _inverse_rms(qk_RXD, epsilon)
                given = _normed(qk_RXD, heads_scale[rows], heads_norm_XD)
            torch.addcmul(given * cos_N1D[rows], given.roll(dim // 2, -1), sin_N1D[rows], out=qk_RXD)
        ctx.save_for_backward(x, norm, heads_norm_XD, cos_N1D, sin_N1D, scale, raw, heads_scale, *weights)
        ctx.has_bias = bias is not None
        return qkv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, heads_norm_XD, cos_N1D, sin_N1D, scale, raw, heads_scale, *weights = ctx.saved_tensors
        dim, columns = cos_N1D.shape[-1], _columns(weights)
        turned = columns[1].stop
        grad_x, grad_norm = torch.empty_like(x), torch.zeros_like(norm)
        grad_weights = [torch.zeros_like(each) for each in weights]
        grad_bias = grad.new_zeros(grad.shape[1]) if ctx.has_bias else None
        grad_heads = None if heads_norm_XD is None else torch.zeros_like(heads_norm_XD)
        for rows in _blocks(x, grad.shape[1]):
            made = grad[rows].clone()
            qk_RXD = made[:, :turned].view(len(made), -1, dim)
            given = grad[rows, :turned].view(qk_RXD.shape)
            torch.addcmul(given * cos_N1D[rows], given.roll(dim // 2, -1), sin_N1D[rows], value=-1, out=qk_RXD)
            if grad_heads is not None:
                before_RXD = raw[rows].view(qk_RXD.shape)
                _norm_gradient(qk_RXD, before_RXD, heads_norm_XD, heads_scale[rows], grad_heads, out=qk_RXD)
            if grad_bias is not None:
                grad_bias += made.sum(0)
            normed, of_normed = _normed(x[rows], scale[rows], norm), torch.zeros_like(x[rows])
            for weight, total, part in zip(weights, grad_weights, columns, strict=True):
                add_weight_gradient(total, made[:, part], normed)
                of_normed += input_gradient(made[:, part], weight)
            _norm_gradient(of_normed, x[rows], norm, scale[rows], grad_norm, out=grad_x[rows])
        return grad_x, grad_norm, grad_bias, grad_heads, None, None, None, *grad_weights


class _Rest(torch.autograd.Function):
    """The rest of a layer after attention: output projection, RMSNorm, and the MLP silu(gate) * up, with both residual
    connections: maps x [N, hidden] and attention outputs [N, H * D] to [N, hidden]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        attended: Tensor,
        out: Tensor,
        norm: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
        epsilon: float,
    ) -> Tensor:
        middle, result, scale = torch.empty_like(x), torch.empty_like(x), x.new_empty(len(x), 1)
        gates, ups = x.new_empty(len(x), len(gate)), x.new_empty(len(x), len(gate))
        for rows in _blocks(x, len(gate)):
            at = write_linear(attended[rows], out, out=middle[rows]).add_(x[rows])
            scale[rows] = _inverse_rms(at, epsilon)
            normed = _normed(at, scale[rows], norm)
            opened = nn.functional.silu(write_linear(normed, gate, out=gates[rows]))
            opened.mul_(write_linear(normed, up, out=ups[rows]))
            write_linear(opened, down, out=result[rows]).add_(at)
        ctx.save_for_backward(attended, middle, scale, gates, ups, out, norm, gate, up, down)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attended, middle, scale, gates, ups, *weights = ctx.saved_tensors
        out, norm, gate, up, down = weights
        grad_x, grad_attended = torch.empty_like(middle), torch.empty_like(attended)
        grad_out, grad_norm, grad_gate, grad_up, grad_down = (torch.zeros_like(each) for each in weights)
        for rows in _blocks(middle, len(gate)):
            opened = nn.functional.silu(gates[rows])
            inner = input_gradient(grad[rows], down)
            add_weight_gradient(grad_down, grad[rows], opened * ups[rows])
            of_up = opened.mul_(inner)
            of_gate = torch.ops.aten.silu_backward(inner.mul_(ups[rows]), gates[rows])
            normed = _normed(middle[rows], scale[rows], norm)
            add_weight_gradient(grad_gate, of_gate, normed)
            add_weight_gradient(grad_up, of_up, normed)
            of_normed = input_gradient(of_gate, gate).add_(input_gradient(of_up, up))
            at = _norm_gradient(of_normed, middle[rows], norm, scale[rows], grad_norm, out=grad_x[rows])
            at.add_(grad[rows])
            add_weight_gradient(grad_out, at, attended[rows])
            grad_attended[rows] = input_gradient(at, out)
        return grad_x, grad_attended, grad_out, grad_norm, grad_gate, grad_up, grad_down, None


class _Norm(torch.autograd.Function):
    """RMSNorm of [N, hidden]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = _inverse_rms(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        return _normed(x, scale, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad_weight = torch.zeros_like(weight)
        return _norm_gradient(grad.clone(), x, weight, scale, grad_weight), grad_weight, None


def _columns(weights: Sequence[Tensor]) -> list[slice]:
    """Return the columns that the product with each weight takes up in the joint result."""
    ends = list(accumulate((len(each) for each in weights), initial=0))
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _blocks(x: Tensor, widest: int) -> list[slice]:
    """Return the blocks of rows of `x`, in which the widest array has rows of `widest` values.

    With oneDNN, which cannot write its results in place, all rows are one block: this was 5 % faster.
    """
    rows_per_thread = max(MIN_BLOCK_ROWS, BLOCK_VALUES // widest)
    size = len(x) if linear.USES_ONEDNN else rows_per_thread * torch.get_num_threads()
    return [slice(first, first + size) for first in range(0, len(x), size)]


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + epsilon) over the last dimension, which has size 1 in the result."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1.0 / x.shape[-1]).add_(epsilon).rsqrt_()


def _normed(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Return the result of RMSNorm, given the inverse RMS of its input."""
    return x.mul(scale).mul_(weight)


def _norm_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, grad_weight: Tensor, out: Tensor | None = None
) -> Tensor:
    """Return the gradient of RMSNorm's input x [R, D] or [R, X, D], and add that of its weight to `grad_weight`.

    With s the inverse RMS, y = x s w, so dy/dx = s w - x s^3 <w, x> / D. Overwrites `grad`, the gradient of y.
    """
    each = grad * x
    if weight.dim() == 1:
        grad_weight.addmv_(each.t(), scale[:, 0])
        inner = torch.mv(each, weight)[:, None]
    else:
        grad_weight.add_((each * scale).sum(0))
        inner = each.mul_(weight).sum(-1, keepdim=True)
    inner.mul_(scale).mul_(scale).mul_(scale).mul_(-1.0 / x.shape[-1])
    return torch.addcmul(grad.mul_(weight).mul_(scale), x, inner, out=out)
