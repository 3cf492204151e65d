"""Digests of weights add up across slices and change with every byte."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shared.weights import digests
from shared.weights.digests import as_int, digest, digest_whole, digests_of, matrix_shape

MASK = (1 << 64) - 1
PINNED = 9275929838581180435
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def whole(tensor: Tensor) -> int:
    return as_int(digest_whole(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 24), (5, 3), (77,), (6, 4, 5), (3, 70000), ()])
def test_the_digests_of_slices_add_up_to_the_digest_of_the_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = weight(*shape, dtype=dtype)
    rows, columns = matrix_shape(shape)
    matrix = tensor.reshape(rows, columns)
    row_cuts, column_cuts = [0, rows // 3, rows], [0, columns // 2, columns]
    parts = [
        digest(matrix[top:bottom, left:right].contiguous(), top, left)
        for top, bottom in pairwise(row_cuts)
        for left, right in pairwise(column_cuts)
        if bottom > top and right > left
    ]
    assert as_int(sum(parts, torch.zeros((), dtype=torch.int64))) == whole(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flipping_any_single_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = weight(18, 8, dtype=dtype)
    size = tensor.element_size()
    expected, seen = whole(tensor), set()
    data = tensor.view(torch.uint8)
    for row in range(18):
        for byte in range(8 * size):
            for bit in range(8):
                data[row, byte] ^= 1 << bit
                seen.add(whole(tensor))
                data[row, byte] ^= 1 << bit
    assert expected not in seen
    assert len(seen) == 18 * 8 * size * 8
    assert whole(tensor) == expected


def test_moved_or_swapped_values_have_a_different_digest() -> None:
    tensor = weight(32, 48)
    others = [tensor.roll(1, 0), tensor.roll(1, 1), tensor.flip(0), tensor.t().contiguous().reshape(32, 48), -tensor]
    assert len({whole(each) for each in [tensor, *others]}) == 1 + len(others)
    a, b = tensor.clone(), tensor.clone()
    a[3, 5], b[5, 3] = b[5, 3].clone(), a[3, 5].clone()
    assert whole(a) != whole(tensor)


def test_signed_zeros_and_nans_have_distinct_digests() -> None:
    zeros = torch.zeros(20, 16)
    assert whole(zeros) == 0
    assert whole(-zeros) != 0
    assert whole(zeros * float("nan")) == whole(zeros * float("nan"))


def by_definition(tensor: Tensor) -> int:
    """Compute the digest as proto/SPEC.md defines it, with Python integers."""

    def mixed(value: int) -> int:
        z = value * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        return z ^ z >> 31

    rows = tensor.reshape(matrix_shape(tensor.shape)).view(torch.int8).tolist()
    weights = [(mixed(k - 8) & ~1) + (k == 0) for k in range(8)]
    total = 0
    for r, row in enumerate(rows):
        for j, byte in enumerate(row):
            g = sum(weights[k] * (2 * (mixed(8 * j + k) & 63) - 63) for k in range(8))
            total += (mixed(r) | 1) * g * byte
    return total & MASK


def test_digests_agree_with_the_specification() -> None:
    values = weight(19, 7)
    weights = {"float32": values, "bfloat16": values.to(torch.bfloat16), "bias": values[0], "float16": values.half()}
    assert digests_of(weights) == {name: by_definition(each) for name, each in weights.items()}
    # The digest is pinned, since the trainer and the engine can run different releases.
    assert whole(torch.arange(6, dtype=torch.float32)) == PINNED


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 24), (5, 3), (77,), (6, 4, 5), (3, 70000), (), (1000, 1024)])
def test_a_gpu_finds_the_digests_of_the_cpu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = weight(*shape, dtype=dtype)
    assert whole(tensor.cuda()) == whole(tensor)


def test_the_product_accepts_the_layout_that_gpus_need(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = weight(40, 24)
    expected, on_cpu = whole(tensor), digests._v
    monkeypatch.setattr(digests, "_v", lambda *bytes_and_device: on_cpu(*bytes_and_device).t().contiguous().t())
    assert whole(tensor) == expected
    on_gpu = on_cpu(0, 96, torch.device("meta"))
    assert on_gpu.stride() == (1, 96)


def test_unaligned_memory_and_short_rows_have_the_same_digest() -> None:
    tensor = weight(64, 16)
    moved = torch.empty(64 * 16 + 1)[1:].view(64, 16).copy_(tensor)
    assert moved.data_ptr() % 16
    assert whole(moved) == whole(tensor)
    row_by_row = sum(as_int(digest(tensor[row : row + 1], row)) for row in range(64)) & MASK
    assert row_by_row == whole(tensor)
