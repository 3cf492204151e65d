"""numpy and torch share the same memory, with equal bits and without a copy, for every dtype on the wire."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proto import dtypes
from proto.errors import WireError
from shared.tensors_torch import packed, to_device, to_numpy, to_torch, unpacked


@pytest.mark.parametrize("row", dtypes.TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)])
def test_every_dtype_round_trips_without_a_copy(row: dtypes.DType, shape: tuple[int, ...]) -> None:
    raw = np.random.default_rng(row.code).integers(
        0, 2 if row.name == "bool" else 256, int(np.prod(shape)) * row.itemsize, np.uint8
    )
    array = raw.view(row.numpy).reshape(shape)
    tensor = to_torch(array)
    assert tensor.dtype is getattr(torch, row.name)
    assert tuple(tensor.shape) == shape
    back = to_numpy(tensor)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, shape, array.tobytes())
    if array.size:
        assert back.ctypes.data == array.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "uint64", "float32"])
def test_strided_tensors_keep_their_values(name: str) -> None:
    whole = torch.arange(24).reshape(4, 6).to(getattr(torch, name))
    part = whole.t()[1:5:2]
    array = to_numpy(part)
    assert array.shape == (2, 4)
    assert np.array_equal(array.astype(np.float64), whole.to(torch.float64).numpy().T[1:5:2])
    assert torch.equal(to_torch(array).to(torch.float64), part.to(torch.float64))


def test_tensors_of_any_dtype_and_shape_are_packed_and_unpacked() -> None:
    rng = np.random.default_rng(0)
    arrays = [np.zeros((0, 3), np.int64), np.array(7, np.int32)]
    for row in dtypes.TABLE:
        raw = rng.integers(0, 2 if row.name == "bool" else 256, 15 * row.itemsize, np.uint8)
        arrays.append(raw.view(row.numpy).reshape(3, 5))
    arrays.append(arrays[3][::2, 1:])
    tensors = [to_torch(each) for each in arrays]
    for array, tensor in zip(arrays, unpacked(packed(tensors), tensors), strict=True):
        assert (to_numpy(tensor).tobytes(), tuple(tensor.shape)) == (array.tobytes(), array.shape)
    elsewhere = to_device(arrays, torch.device("meta"))
    assert [(each.dtype, each.shape) for each in elsewhere] == [(each.dtype, each.shape) for each in tensors]


def test_arrays_share_memory_with_their_tensors_on_a_cpu() -> None:
    arrays = [np.arange(3), np.ones(2, np.float32)]
    found = to_device(arrays, torch.device("cpu"))
    assert [each.data_ptr() for each in found] == [each.ctypes.data for each in arrays]


def test_tensor_that_requires_a_gradient_is_converted() -> None:
    assert to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_read_only_and_reversed_arrays_are_copied() -> None:
    array = np.arange(4.0)
    array.flags.writeable = False
    to_torch(array)[0] = 9
    assert array[0] == 0
    assert to_torch(np.arange(3)[::-1]).tolist() == [2, 1, 0]


def test_dtypes_outside_the_table_are_refused() -> None:
    with pytest.raises(WireError, match="complex64"):
        to_numpy(torch.ones(1, dtype=torch.complex64))
    with pytest.raises(WireError, match="complex128"):
        to_torch(np.ones(1, complex))
