"""CUDA kernels that the CPU does not have: attention in the forms that CUDA has, and products with their own rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.emulated_gpu.kernels import host, in_order, on_device

NO_MASK, FIRST, LAST = 0, 1, 2
"""Causal masks, as CUDA's kernels number them: FIRST lets the first query see the first key only, LAST lets the last
query see all keys."""
LSE_ROWS = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this."""

# ---- attention on the CPU, in float32


def visible(queries: int, keys: int, mask: int, left: int | None = None, right: int | None = None) -> Tensor | None:
    """Return the keys that each query sees, bool [queries, keys], or None for all. `left` and `right` are the limits of
    a window; None and negative numbers are none."""
    windows = [None if limit is None or limit < 0 else limit for limit in (left, right)]
    if mask == NO_MASK and windows == [None, None]:
        return None
    distance = torch.arange(keys) - torch.arange(queries)[:, None] - (0 if mask == FIRST else keys - queries)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if mask or windows[1] is not None:
        seen &= distance <= (0 if mask else windows[1])
    if windows[0] is not None:
        seen &= distance >= -windows[0]
    return seen


class Attention:
    """Attention of queries [..., heads, queries, width] over keys and values [..., groups, keys, width]."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float | None, bias: Tensor | None = None
    ) -> None:
        self._q, self._k, self._v = (tensor.float() for tensor in (q, self._repeated(k, q), self._repeated(v, q)))
        self._dtypes = q.dtype, k.dtype, v.dtype
        self._groups = k.shape[-3]
        self._scale = q.shape[-1] ** -0.5 if scale is None else scale
        scores = self._q @ self._k.transpose(-1, -2) * self._scale
        if bias is not None:
            scores = scores + bias.float()
        self._scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output, float32, and the log-sum-exp of the scores, [..., heads, queries]."""
        lse = self._scores.logsumexp(-1)
        return self._weights(lse) @ self._v, lse

    def backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the gradients of queries, keys and values, and that of the scores."""
        weights, grad = self._weights(lse), grad.float()
        d_scores = weights * (grad @ self._v.transpose(-1, -2) - (grad * out.float()).sum(-1, keepdim=True))
        d_q = d_scores @ self._k * self._scale
        d_k = self._summed(d_scores.transpose(-1, -2) @ self._q * self._scale)
        d_v = self._summed(weights.transpose(-1, -2) @ grad)
        return [part.to(dtype) for part, dtype in zip((d_q, d_k, d_v), self._dtypes, strict=True)], d_scores

    def _weights(self, lse: Tensor) -> Tensor:
        return (self._scores - lse[..., None]).exp().nan_to_num(0.0)

    @staticmethod
    def _repeated(shared: Tensor, q: Tensor) -> Tensor:
        return shared.repeat_interleave(q.shape[-3] // shared.shape[-3], dim=-3)

    def _summed(self, repeated: Tensor) -> Tensor:
        return repeated.unflatten(-3, (self._groups, -1)).sum(-3)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: int, scale: float | None, bias: Tensor | None = None) -> Attention:
    """Return the attention of device tensors [batch, heads, length, width]."""
    in_order(q.device)
    seen = visible(q.shape[2], k.shape[2], mask)
    return Attention(host(q), host(k), host(v), seen, scale, None if bias is None else host(bias))


def filled(like: Tensor, value: Tensor) -> Tensor:
    """Return a tensor like `like` with the values `value`."""
    made = torch.empty_like(like)
    host(made).copy_(value)
    return made


def length_first(like: Tensor, value: Tensor) -> Tensor:
    """As `filled`, for [batch, heads, length, width] that is [batch, length, heads, width] in memory."""
    made = torch.empty_like(like.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    host(made).copy_(value)
    return made


def all_on_device(tensors: list[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(on_device(tensor, device) for tensor in tensors)


def zeros(device: torch.device, *size: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return the state of a generator that is not used, because dropout is refused."""
    return on_device(torch.zeros(size, dtype=dtype), device)


def no_dropout(probability: float) -> None:
    if probability:
        raise RuntimeError("emulated GPU: attention with dropout has no stand-in")


# ---- FlashAttention


def flash_rules(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    no_dropout(dropout)
    if q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        raise RuntimeError("FlashAttention forward only supports head dimension at most 256, a multiple of 8")
    if any(tensor.stride(-1) != 1 for tensor in (q, k, v)):
        raise RuntimeError("Input tensor must have contiguous last dimension")


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):  # type: ignore[no-untyped-def]
    flash_rules(q, k, v, dropout_p)
    out, lse = dense(q, k, v, LAST if is_causal else NO_MASK, scale).forward()
    seeds = zeros(q.device, 2, dtype=torch.uint64), zeros(q.device)
    debug = torch.empty(0, dtype=q.dtype, device=q.device)
    return length_first(q, out), on_device(lse, q.device), None, None, q.shape[2], k.shape[2], *seeds, debug


def flash_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):
    attention = dense(q, k, v, LAST if is_causal else NO_MASK, scale)
    return all_on_device(attention.backward(host(grad), host(out), host(lse))[0], q.device)


def packed_rules(cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *unsupported: Any) -> None:
    if cu_q.dtype != torch.int32 or cu_k.dtype != torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype int32")
    if any(option is not None for option in unsupported):
        raise RuntimeError("emulated GPU: packed attention with pages or biases has no stand-in")
    for ends, longest in ((cu_q, max_q), (cu_k, max_k)):
        if int(host(ends).diff().max()) > longest:
            raise RuntimeError(f"emulated GPU: a sequence is longer than {longest}; the kernel would leave its end out")


def chains(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each sequence."""
    q, k = host(cu_q).tolist(), host(cu_k).tolist()
    for sequence in range(len(q) - 1):
        yield slice(*q[sequence : sequence + 2]), slice(*k[sequence : sequence + 2])


def chain(
    q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: slice, mask: int, options: dict[str, Any]
) -> Attention:
    """Return the attention of one sequence of [tokens, heads, width]."""
    seen = visible(rows.stop - rows.start, columns.stop - columns.start, mask, options["left"], options["right"])
    parts = (host(tensor)[part].transpose(0, 1) for tensor, part in ((q, rows), (k, columns), (v, columns)))
    return Attention(*parts, seen, options["scale"])


def packed(  # type: ignore[no-untyped-def]
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None, window_size_left=None,
    window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    flash_rules(q, k, v, dropout_p)
    in_order(q.device)
    packed_rules(cu_q, cu_k, max_q, max_k, seqused_k, alibi_slopes, block_table)
    options = {"scale": scale, "left": window_size_left, "right": window_size_right}
    out, lse = torch.empty_like(q), torch.zeros(q.shape[1], q.shape[0])
    for rows, columns in chains(cu_q, cu_k):
        part, lse[:, rows] = chain(q, k, v, rows, columns, LAST if is_causal else NO_MASK, options).forward()
        host(out)[rows] = part.transpose(0, 1).to(q.dtype)
    seeds = zeros(q.device, 2, dtype=torch.uint64), zeros(q.device)
    return out, on_device(lse, q.device), *seeds, torch.empty(0, dtype=q.dtype, device=q.device)


def packed_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, seed, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    in_order(q.device)
    options = {"scale": scale, "left": window_size_left, "right": window_size_right}
    grads = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in (q, k, v)]
    for rows, columns in chains(cu_q, cu_k):
        attention = chain(q, k, v, rows, columns, LAST if is_causal else NO_MASK, options)
        own = (host(tensor)[rows].transpose(0, 1) for tensor in (grad, out))
        for whole, part, place in zip(
            grads, attention.backward(*own, host(lse)[:, rows])[0], (rows, columns, columns), strict=True
        ):
            whole[place] += part.transpose(0, 1)
    return all_on_device(grads, q.device)


# ---- the memory-efficient kernel


def padded(lse: Tensor, device: torch.device, wanted: bool) -> Tensor:
    """Return the log-sum-exp as the kernel returns it, which is empty unless a gradient is wanted."""
    rows = -(-lse.shape[-1] // LSE_ROWS) * LSE_ROWS if wanted else 0
    whole = torch.full((*lse.shape[:-1], rows), math.inf)
    if wanted:
        whole[..., : lse.shape[-1]] = lse
    return on_device(whole, device)


def efficient(  # type: ignore[no-untyped-def]
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    no_dropout(dropout_p)
    if q.shape[1] != k.shape[1]:
        raise RuntimeError("emulated GPU: the memory-efficient kernel does not share keys between heads")
    out, lse = dense(q, k, v, FIRST if is_causal else NO_MASK, scale, attn_bias).forward()
    return length_first(q, out), padded(lse, q.device, compute_log_sumexp), zeros(q.device), zeros(q.device)


def efficient_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, attn_bias, out, lse, seed, offset, dropout_p, wanted, is_causal=False, *, scale=None
):
    attention = dense(q, k, v, FIRST if is_causal else NO_MASK, scale, attn_bias)
    grads, scores = attention.backward(host(grad), host(out), host(lse)[..., : q.shape[2]])
    bias = None
    if attn_bias is not None and wanted[3]:
        shared = [i for i, size in enumerate(attn_bias.shape) if size == 1 and scores.shape[i] != 1]
        bias = on_device((scores.sum(shared, keepdim=True) if shared else scores).to(attn_bias.dtype), q.device)
    return *all_on_device(grads, q.device), bias


def efficient_plain(  # type: ignore[no-untyped-def]
    q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout_p, mask, compute_log_sumexp=False, *, scale=None, seqlen_k=None,
    window_size=None,
):  # fmt: skip
    """The form that takes [batch, length, heads, width] and the kind of its mask."""
    no_dropout(dropout_p)
    if any(option is not None for option in (cu_q, cu_k, seqlen_k, window_size)):
        raise RuntimeError("emulated GPU: _efficient_attention_forward with these options has no stand-in")
    out, lse = dense(*(tensor.transpose(1, 2) for tensor in (q, k, v)), mask, scale, bias).forward()
    made = torch.empty_like(q, memory_format=torch.contiguous_format)
    host(made).copy_(out.transpose(1, 2))
    lengths = q.shape[1], k.shape[1]
    return made, padded(lse, q.device, compute_log_sumexp), zeros(q.device), zeros(q.device), *lengths


def efficient_plain_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout_p, seed, offset, mask, bias_requires_grad, *,
    scale=None, num_splits_key=None, window_size=None, shared_storage_dqdkdv=False,
):  # fmt: skip
    attention = dense(*(tensor.transpose(1, 2) for tensor in (q, k, v)), mask, scale, bias)
    own = (host(tensor).transpose(1, 2) for tensor in (grad, out))
    grads, _ = attention.backward(*own, host(lse)[..., : q.shape[1]])
    return *all_on_device([part.transpose(1, 2).contiguous() for part in grads], q.device), None


# ---- cuDNN's kernel


def cudnn(  # type: ignore[no-untyped-def]
    q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    no_dropout(dropout_p)
    out, lse = dense(q, k, v, FIRST if is_causal else NO_MASK, scale, attn_bias).forward()
    seeds, debug = (zeros(q.device), zeros(q.device)), torch.empty(0, dtype=q.dtype, device=q.device)
    return filled(q, out), on_device(lse[..., None], q.device), None, None, q.shape[2], k.shape[2], *seeds, debug


def cudnn_backward(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, seed, offset, attn_bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale=None
):
    attention = dense(q, k, v, FIRST if is_causal else NO_MASK, scale, attn_bias)
    return all_on_device(attention.backward(host(grad), host(out), host(lse)[..., 0])[0], q.device)


# ---- products and norms


def int_product(a: Tensor, b: Tensor) -> Tensor:
    """cuBLAS has an int8 product of any size, for every GPU, only for rows of `a` and columns of `b` that are in order
    (pytorch#169961)."""
    if a.shape[0] <= 16 or a.shape[1] % 8 or b.shape[1] % 8 or not a.shape[1] or not b.shape[1]:
        raise RuntimeError(
            "_int_mm: self.size(0) needs to be greater than 16, and the other sizes multiples of 8, but got "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.stride(1) != 1 or b.stride(0) != 1:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul (layout)")
    in_order(a.device)
    return on_device(torch._int_mm(host(a), host(b)), a.device)


def rms_norm_backward(grad, x, shape, rstd, weight, wanted):  # type: ignore[no-untyped-def]
    in_order(x.device)
    dims = tuple(range(-len(shape), 0))
    normal = host(x).float() * host(rstd).float()
    d_out = host(grad).float()
    d_normal = d_out if weight is None else d_out * host(weight).float()
    d_x = (d_normal - normal * (d_normal * normal).mean(dims, keepdim=True)) * host(rstd).float()
    d_weight = None if weight is None else (d_out * normal).flatten(0, -len(shape) - 1).sum(0).to(weight.dtype)
    return on_device(d_x.to(x.dtype), x.device), None if d_weight is None else on_device(d_weight, x.device)


def counts_in_bins(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """Unlike the CPU's kernel, CUDA's takes integers, and only those in deterministic mode (atomic additions)."""
    if x.is_floating_point() and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("_histc_cuda with floating point input does not have a deterministic implementation")
    in_order(x.device)
    return on_device(torch.histc(host(x).double(), bins, min, max).to(x.dtype), x.device)


KERNELS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_flash_attention_forward": packed,
    "_flash_attention_backward": packed_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_efficient_attention_forward": efficient_plain,
    "_efficient_attention_backward": efficient_plain_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_int_mm": int_product,
    "_fused_rms_norm_backward": rms_norm_backward,
    "histc": counts_in_bins,
}
