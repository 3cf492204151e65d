"""Additive digests of weights: the digest of a tensor is the sum, modulo 2^64, of the digests of its slices. Slices on
several ranks, and fused parameters that hold several weights, can be compared with whole tensors without being
gathered.

A tensor is a matrix [rows, columns] (`matrix_shape`). With b_rj as the signed value of byte j in row r, its digest is

    sum over r, j of u_r * g_j * b_rj  modulo 2^64,    g_j = sum over k < 8 of w_k * v_jk.

u_r and w_0 are odd, the other w_k even and all v_jk odd, so every u_r * g_j is odd: a change within one byte always
changes the digest. Any other change goes unnoticed with a probability of about 2^-48. The digest is not cryptographic.
The inner sum is an int8 matrix product, which GPUs and CPUs compute as fast as they read memory. |v_jk| <= 63 keeps
oneDNN's 16-bit intermediate sums (AVX2, AVX-512 without VNNI) from saturating, so the digest is exact everywhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

_FORMS = 8  # columns of v, the minimum of CUDA's int8 product
_INNER = 65536  # bytes of a row per product: 65536 * 128 * 63 fits in an int32
_MIN_ROWS = 17  # minimum of CUDA's int8 product, whose rows must also be aligned and a multiple of _ALIGNMENT bytes
_ALIGNMENT = 16
_MASK = (1 << 64) - 1


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, columns) of the matrix for a tensor of `shape`: all dimensions but the last, flattened, and the
    last. The elements of a vector are rows of one column."""
    return (math.prod(shape[:-1]), int(shape[-1])) if len(shape) > 1 else (math.prod(shape), 1)


@torch.no_grad()
def digest(part: Tensor, row: int = 0, column: int = 0) -> Tensor:
    """Return the digest of `part` as an int64 scalar on its device, to be read with `as_int`.

    `part` is [rows, columns] with contiguous rows, and begins at `row` and `column` of the whole tensor.
    """
    rows, size = part.shape[0], part.element_size()
    data = part.view(torch.int8)
    offset, width = column * size, data.shape[1]
    total = torch.zeros(rows, dtype=torch.int64, device=part.device)
    for begin in range(0, width, _INNER):
        piece = _padded(data[:, begin : begin + _INNER])
        forms = _v(offset + begin, offset + begin + piece.shape[1], part.device)
        total += (torch._int_mm(piece, forms)[:rows].to(torch.int64) * _w(part.device)).sum(1)
    return (total * _u(row, row + rows, part.device)).sum()


def digest_whole(tensor: Tensor) -> Tensor:
    """Return the `digest` of a whole tensor of any shape."""
    return digest(tensor.contiguous().reshape(matrix_shape(tensor.shape)))


def digests_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digest of every tensor by name. The host waits for each device once."""
    digests = {name: digest_whole(tensor) for name, tensor in weights.items()}
    numbers: dict[str, int] = {}
    for device in {tensor.device for tensor in digests.values()}:
        here = {name: tensor for name, tensor in digests.items() if tensor.device == device}
        totals = torch.stack(list(here.values())).tolist()
        numbers |= {name: total & _MASK for name, total in zip(here, totals, strict=True)}
    return {name: numbers[name] for name in weights}


def as_int(digest: Tensor) -> int:
    """Return the digest as a Python integer, 0 <= digest < 2^64."""
    return int(digest) & _MASK


def _padded(piece: Tensor) -> Tensor:
    """Return `piece` as the int8 product requires it, padded with zeros, which do not change the digest."""
    rows, width = piece.shape
    if rows < _MIN_ROWS or width % _ALIGNMENT:
        return functional.pad(piece, (0, -width % _ALIGNMENT, 0, max(_MIN_ROWS - rows, 0)))
    piece = piece.contiguous()
    return piece if piece.data_ptr() % _ALIGNMENT == 0 else piece.clone()


@functools.lru_cache(maxsize=32)
def _v(begin: int, end: int, device: torch.device) -> Tensor:
    """Return v for bytes `begin` to `end` of a row, int8 [end - begin, 8].

    On a GPU its columns are contiguous, because cuBLAS has an int8 product of two row-major matrices only for some GPUs
    (pytorch#169961). On a CPU the product is faster with contiguous rows.
    """
    hashed = _hash(torch.arange(begin * _FORMS, end * _FORMS, dtype=torch.int64))
    v = (((hashed & 63) * 2) - 63).to(torch.int8).view(end - begin, _FORMS).to(device)
    return v if device.type == "cpu" else v.t().contiguous().t()


@functools.lru_cache(maxsize=4)
def _w(device: torch.device) -> Tensor:
    """Return w, int64 [8]."""
    weights = _hash(torch.arange(-_FORMS, 0, dtype=torch.int64)) & ~1
    weights[0] += 1
    return weights.to(device)


def _u(begin: int, end: int, device: torch.device) -> Tensor:
    """Return u for rows `begin` to `end`, int64 [end - begin]."""
    return _hash(torch.arange(begin, end, dtype=torch.int64, device=device)) | 1


def _hash(values: Tensor) -> Tensor:
    """Return splitmix64 (Steele, Lea and Flood 2014) of int64 `values`, elementwise."""
    z = values * -7046029254386353131  # 0x9E3779B97F4A7C15
    z = (z ^ _shifted(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shifted(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return z ^ _shifted(z, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift right logically. torch has no unsigned 64-bit arithmetic."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
