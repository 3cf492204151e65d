"""Shards that were written to a block file are read back, and anything that is not exactly a block file is refused with
WireError."""

from __future__ import annotations

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from proto import blockfile, dtypes
from proto.blockfile import BlockLayout, Table
from proto.errors import WireError
from proto.tensors import Array, checksum
from shared.dataplane import client, write
from shared.dataplane.write import write_block

ROW_AT = 64 + 2 * 8 + 3 * 8
"""Position of the first row in `small()`: after two fences and three dims."""


def image(tasks: list[tuple[str, int, dict[str, Array]]], tmp_path: Path) -> bytes:
    path = tmp_path / "block"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
    layout = BlockLayout(tasks)
    # The store also sets the size, since an empty last shard may follow padding.
    os.ftruncate(descriptor, layout.file_bytes)
    write_block(descriptor, layout)
    os.close(descriptor)
    return path.read_bytes()


def small(tmp_path: Path) -> bytes:
    a = np.arange(5, dtype=np.int32)
    return image([("train/0/1", 3, {"a": a, "b": a.astype(np.float64)}), ("train/0/2", 4, {"a": a[:0]})], tmp_path)


def resealed(data: bytes, at: int, patch: bytes) -> bytes:
    """Return `data` with a patch in the header or the table and both checksums corrected."""
    body = bytearray(data)
    body[at : at + len(patch)] = patch
    size = table_size(data)
    struct.pack_into("<Q", body, 40, xxhash.xxh3_64_intdigest(bytes(body[64 : 64 + size])))
    struct.pack_into("<Q", body, 56, xxhash.xxh3_64_intdigest(bytes(body[:56])))
    return bytes(body)


def table_size(data: bytes) -> int:
    return blockfile.table_bytes(data[:64], len(data))


def read(table: Table, data: bytes) -> dict[tuple[str, int, str], Array]:
    return {
        (table.task_ids[task], table.fences[task], shard.key): np.frombuffer(
            data, shard.dtype.numpy, shard.nbytes // shard.dtype.itemsize, shard.offset
        ).reshape(shard.shape)
        for task in range(len(table.task_ids))
        for shard in table.shards(task)
    }


@pytest.mark.parametrize("row", dtypes.TABLE, ids=lambda row: row.name)
def test_every_dtype_and_shape_reads_back_byte_for_byte(row: dtypes.DType, tmp_path: Path) -> None:
    rng = np.random.default_rng(row.code)
    shapes = [(), (0,), (3, 0, 2), (7,), (2, 3, 4), (1,) * 8]
    arrays = {}
    for number, shape in enumerate(shapes):
        raw = rng.integers(0, 2 if row.name == "bool" else 256, int(np.prod(shape)) * row.itemsize, np.uint8)
        arrays[f"k{number}"] = raw.view(row.numpy).reshape(shape)
    data = image([("t/0/0", 1, arrays)], tmp_path)
    table = blockfile.parse(data, len(data))
    found = read(table, data)
    for key, array in arrays.items():
        other = found["t/0/0", 1, key]
        assert (other.dtype, other.shape, other.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert table.checksums(0) == {key: checksum(array) for key, array in arrays.items()}


def test_large_file_is_the_same_whether_one_or_two_threads_write_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    big = rng.standard_normal(write.CHUNK_BYTES // 4 * 3 + 5).astype(np.float32)
    tasks = [(f"t/0/{i}", 0, {"big": big[i:], "small": big[: i * 7]}) for i in range(9)]
    layout = BlockLayout(tasks)
    assert layout.file_bytes > write.HALVE_BYTES
    images = []
    for helper in (None, ThreadPoolExecutor(1)):
        path = tmp_path / "block"
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
        sums = write_block(descriptor, BlockLayout(tasks), helper)
        os.close(descriptor)
        images.append(path.read_bytes())
        assert sums == [checksum(array) for array in layout.arrays]
    assert images[0] == images[1]
    found = read(blockfile.parse(images[0], len(images[0])), images[0])
    for task_id, fence, shards in tasks:
        for key, array in shards.items():
            assert np.array_equal(found[task_id, fence, key], array)


def test_content_hash_covers_the_checksums_in_put_order() -> None:
    a = np.arange(5, dtype=np.int32)
    packed = b"".join(checksum(x).to_bytes(8, "little") for x in (a, a.astype(np.float64)))
    layout = BlockLayout([("train/0/1", 3, {"a": a, "b": a.astype(np.float64)}), ("train/0/2", 4, {"a": a[:0]})])
    sums = [checksum(array) for array in layout.arrays]
    empty = checksum(a[:0]).to_bytes(8, "little")
    assert layout.sums(sums) == ([xxhash.xxh3_64_intdigest(each) for each in (packed, empty)], [60, 0])


def test_shards_that_no_reader_accepts_are_not_put() -> None:
    # The shard has no bytes, but more dimensions than a file may have.
    with pytest.raises(WireError, match="dimensions"):
        BlockLayout([("train/0/1", 1, {"a": np.empty((0, 1 << 60), np.int8)})])
    with pytest.raises(WireError, match="train/0/1#deep: tensor of 9 dimensions"):
        client._plan([client.TaskShards("train/0/1", 1, {"a": np.zeros(1), "deep": np.zeros((1,) * 9, np.int32)})])


@pytest.mark.parametrize(
    ("at", "patch"),
    [
        (ROW_AT, struct.pack("<I", 9)),  # key
        (ROW_AT + 4, b"\x63"),  # dtype
        (ROW_AT + 5, b"\x09"),  # ndim
        (ROW_AT + 6, b"\x01"),  # reserved
        (ROW_AT + 8, struct.pack("<Q", 1 << 63)),  # offset
        (ROW_AT + 16, struct.pack("<Q", (1 << 64) - 1)),  # nbytes
        (ROW_AT + 32, struct.pack("<I", 0)),  # key of the next row, which then occurs twice in the task
        (64 + 16, struct.pack("<Q", (1 << 62) + 5)),  # a dimension whose product wraps around to the right size
        (64, struct.pack("<Q", 1 << 63)),  # fence
        (64 + 16 + 24 + 96, struct.pack("<I", 0)),  # rows of a task
        (64 + 16 + 24 + 96, struct.pack("<I", 0xFFFFFFFF)),
        (64 + 16 + 24 + 96 + 8, b"\xff"),  # a task's name
        (64 + 16 + 24 + 96 + 8 + 8, b"2"),  # both names the same
        (8, struct.pack("<I", 0xFFFFFFFF)),  # tasks
        (16, struct.pack("<I", 0xFFFFFFFF)),  # rows
        (20, struct.pack("<I", 0)),  # dims
        (24, struct.pack("<I", 0xFFFFFFFF)),  # names
        (32, struct.pack("<Q", 1 << 50)),  # file size
        (4, b"\x02"),  # layout version
        (6, b"\x01"),  # flags
        (0, b"X"),  # magic
    ],
)
def test_field_out_of_bounds_is_refused_even_with_correct_checksums(at: int, patch: bytes, tmp_path: Path) -> None:
    data = resealed(small(tmp_path), at, patch)
    assert data != small(tmp_path)
    with pytest.raises(WireError):
        blockfile.parse(data, len(data))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = small(tmp_path)
    for end in range(len(data)):
        with pytest.raises(WireError):
            blockfile.parse(data[:end], end)


@given(st.data())
def test_flipped_bits_are_refused_and_never_crash(data: st.DataObject) -> None:
    layout = BlockLayout([("t/0/1", 3, {"a": np.arange(5)}), ("t/0/2", 4, {"a": np.arange(0)})])
    good = layout.head([1, 2])
    body = bytearray(good)
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WireError):
        blockfile.parse(bytes(body), layout.file_bytes)


@given(st.integers(64, 400), st.binary(min_size=1, max_size=24), st.data())
def test_hostile_tables_with_correct_checksums_raise_only_wire_errors(
    at: int, patch: bytes, data: st.DataObject
) -> None:
    layout = BlockLayout([("t/0/1", 3, {"a": np.arange(5), "b": np.ones((2, 2))}), ("t/0/2", 4, {"a": np.arange(0)})])
    good = layout.head([1, 2, 3]) + bytes(layout.file_bytes)
    at = data.draw(st.sampled_from([8, 12, 16, 20, 24, 28, 32])) if at > 300 else at
    try:
        size = table_size(good[: layout.file_bytes])
        hostile = resealed(good[: layout.file_bytes], min(at, 64 + size - len(patch)), patch)
        table = blockfile.parse(hostile, len(hostile))
    except WireError:
        return
    for task in range(len(table.task_ids)):
        for shard in table.shards(task):
            assert 0 <= shard.offset <= shard.offset + shard.nbytes <= len(hostile)


@pytest.mark.parametrize(
    "tasks",
    [
        [],
        [("t/0/0", 0, {})],
        [("bad", 0, {"a": np.zeros(1)})],
        [("t/0/0", -1, {"a": np.zeros(1)})],
        [("t/0/0", 0, {"a b": np.zeros(1)})],
        [("t/0/0", 0, {"a": np.zeros(1)}), ("t/0/0", 1, {"a": np.zeros(1)})],
        [("t/0/0", 0, {"a": np.zeros(1, object)})],
    ],
)
def test_shards_that_cannot_be_written_are_refused(tasks: list[tuple[str, int, dict[str, Array]]]) -> None:
    with pytest.raises(WireError):
        BlockLayout(tasks)
