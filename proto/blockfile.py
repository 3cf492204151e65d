"""The layout of a block file: a self-describing file with the shards of one put. Every size is checked before use.

All numbers are little-endian and unsigned. A file consists of these parts, without gaps except zero padding:

    header   64 bytes
    table    fences u64[tasks] | dims u64[dims] | rows 32 B[rows] | counts u32[tasks] | task names | key names
    data     the data of each row in order, each beginning at the next multiple of 64 from the start of the file

Header, by byte offset:

    0   4s   magic "RLBF"            24  u32  bytes of the task names
    4   u16  layout version, 1       28  u32  bytes of the key names
    6   u16  flags, 0                32  u64  bytes of the file
    8   u32  tasks                   40  u64  xxh3-64 of the table
    12  u32  keys                    48  u64  reserved, 0
    16  u32  rows                    56  u64  xxh3-64 of bytes 0..55
    20  u32  dims

Row: `key u32` (index into the key names), `dtype u8` (code of `proto.dtypes`), `ndim u8` (<= 8), `reserved u16` 0,
`offset u64` from the start of the file, `nbytes u64`, `checksum u64` (xxh3-64 of the data). The dimensions of a row are
the next `ndim` entries of `dims`; `prod(dimensions) * itemsize == nbytes`. `counts[i]` (>= 1) rows belong to task i:
the rows of a task are consecutive, tasks are in the order of their names, and the keys of a task are distinct and in
the order used by its content hash. Names are ASCII and distinct, separated by one "\n", without a trailing separator.
Offsets are canonical: row 0 begins at the first multiple of 64 at or after the end of the table, row i + 1 at the first
multiple of 64 at or after the end of row i (an empty shard takes up no room), and the file ends exactly where the last
row does. Padding bytes are not read. The content hash of a task is the xxh3-64 of the checksums of its rows, each as
u64, in row order.

A decoder raises WireError for a file that breaks one of these rules or exceeds one of the limits below."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash

from proto import dtypes
from proto.errors import WireError
from proto.ids import check_key, check_task_id, check_task_ids
from proto.limits import MAX_NDIM
from proto.tensors import Array, Buffer

MAGIC = b"RLBF"
LAYOUT = 1
HEADER_BYTES = 64
ALIGN = 64
MAX_TASKS = 1 << 20
MAX_ROWS = 1 << 22
MAX_FILE_BYTES = 1 << 46
MAX_NAMES_BYTES = 1 << 26

_HEADER = struct.Struct("<4sHHIIIIIIQQQ")
_CHECK = struct.Struct("<Q")
_U64 = np.dtype("<u8")
_U32 = np.dtype("<u4")
_ROW = np.dtype(
    [
        ("key", "<u4"),
        ("dtype", "u1"),
        ("ndim", "u1"),
        ("reserved", "<u2"),
        ("offset", "<u8"),
        ("nbytes", "<u8"),
        ("checksum", "<u8"),
    ]
)
_ITEMSIZES = np.zeros(256, np.int64)
for _row in dtypes.TABLE:
    _ITEMSIZES[_row.code] = _row.itemsize


class Shard(NamedTuple):
    """One row: the position, type and checksum of the bytes of `(task, key)`."""

    key: str
    dtype: dtypes.DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int


class Selection(NamedTuple):
    """Rows of a table, grouped by task. Entry i of each array except `counts` describes row i."""

    counts: Array
    """Number of rows of each requested task, in the order of the request."""
    keys: Array
    """Indices of the keys in the table."""
    codes: Array
    first: Array
    """Start of the data, counted in elements of its type. It is a whole number, because item sizes divide 64 and
    offsets are multiples of 64."""
    end: Array
    shapes: dict[int, tuple[int, ...]]
    """Shape by row, for rows whose shape is not (end - first,)."""
    numbers: Array
    """Row numbers in the table."""

    def columns(self) -> int:
        """Return the number of rows per task if all tasks have the same keys and types, which is the usual case;
        otherwise return 0."""
        count = int(self.counts[0]) if len(self.counts) else 0
        alike = count > 0 and bool(
            (self.counts == count).all()
            and (self.keys.reshape(-1, count) == self.keys[:count]).all()
            and (self.codes.reshape(-1, count) == self.codes[:count]).all()
        )
        return count if alike else 0


@dataclass(frozen=True, eq=False)
class Table:
    """A header and a table that passed every check. Task i is `task_ids[i]` with fence `fences[i]`."""

    task_ids: list[str]
    fences: list[int]
    keys: list[str]
    file_bytes: int
    _rows: Array
    _dims: Array
    _starts: Array

    @property
    def row_count(self) -> int:
        return len(self._rows)

    @cached_property
    def index(self) -> dict[tuple[str, int], int]:
        """Task index by `(task_id, fence)`."""
        return {pair: i for i, pair in enumerate(zip(self.task_ids, self.fences, strict=True))}

    @cached_property
    def _dims_starts(self) -> Array:
        starts: Array = np.cumsum(self._rows["ndim"], dtype=np.int64) - self._rows["ndim"]
        return starts

    def count(self, task: int) -> int:
        """Return the number of shards of a task."""
        return int(self._starts[task + 1] - self._starts[task])

    def shards(self, task: int) -> Iterator[Shard]:
        """Yield the rows of a task in the order of its content hash."""
        begin, end = int(self._starts[task]), int(self._starts[task + 1])
        at = int(self._dims_starts[begin])
        rows = self._rows[begin:end]
        dims = self._dims[at : at + int(rows["ndim"].sum())].tolist()
        at = 0
        for key, code, ndim, _, offset, nbytes, checksum in rows.tolist():
            yield Shard(self.keys[key], dtypes.by_code(code), tuple(dims[at : at + ndim]), offset, nbytes, checksum)
            at += ndim

    def content_hash(self, task: int) -> int:
        """Return the content hash of a task's shards in this file, as its producer computed it (`BlockLayout.sums`)."""
        rows = self._rows[int(self._starts[task]) : int(self._starts[task + 1])]
        return xxhash.xxh3_64_intdigest(rows["checksum"].tobytes())

    def checksums(self, task: int) -> dict[str, int]:
        """Return the checksums of all shards of a task, by key."""
        rows = self._rows[int(self._starts[task]) : int(self._starts[task + 1])]
        return {
            self.keys[key]: digest for key, digest in zip(rows["key"].tolist(), rows["checksum"].tolist(), strict=True)
        }

    def select(self, tasks: Sequence[int], keys: Sequence[str] | None) -> Selection:
        """Return the shards named in `keys` that the tasks (given by index) have, in the order of `keys`.

        If `keys` is None, return all shards in file order.
        """
        where = np.asarray(tasks, np.int64)
        begins = self._starts[where]
        counts = self._starts[where + 1] - begins
        picked = self._together(where, counts, keys)
        if picked is None:
            owner = np.repeat(np.arange(len(where)), counts)
            picked = np.arange(len(owner)) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
            if keys is not None:
                rank = self._ranks(keys)[self._rows["key"][picked]]
                wanted = np.flatnonzero(rank >= 0)
                wanted = wanted[np.lexsort((rank[wanted], owner[wanted]))]
                picked = picked[wanted]
                counts = np.bincount(owner[wanted], minlength=len(where))
        numbers = np.arange(picked.start, picked.stop) if isinstance(picked, slice) else picked
        rows = self._rows[picked]
        sizes = _ITEMSIZES[rows["dtype"]]
        first = rows["offset"].astype(np.int64) // sizes
        end = first + rows["nbytes"].astype(np.int64) // sizes
        return Selection(counts, rows["key"], rows["dtype"], first, end, self._shapes(picked, rows["ndim"]), numbers)

    def placed(self, numbers: Array | slice = slice(None)) -> tuple[list[int], list[int], list[int]]:
        """Return the start offsets, end offsets and checksums of the rows with these numbers, or of all rows."""
        rows = self._rows[numbers]
        return rows["offset"].tolist(), (rows["offset"] + rows["nbytes"]).tolist(), rows["checksum"].tolist()

    def named(self, numbers: Array) -> list[str]:
        """Return the names `task_id#key` of the rows with these numbers."""
        owners = np.searchsorted(self._starts, numbers, side="right") - 1
        keys = self._rows["key"][numbers]
        return [f"{self.task_ids[task]}#{self.keys[key]}" for task, key in zip(owners, keys, strict=True)]

    def _together(self, where: Array, counts: Array, keys: Sequence[str] | None) -> slice | None:
        """Return the rows as a slice if the tasks are consecutive and have exactly `keys` in order, as in a stream."""
        if not len(where) or (np.diff(where) != 1).any():
            return None
        picked = slice(int(self._starts[where[0]]), int(self._starts[where[-1] + 1]))
        if keys is None:
            return picked
        if not len(keys) or (counts != len(keys)).any():
            return None
        ranks = self._ranks(keys)[self._rows["key"][picked]].reshape(-1, len(keys))
        return picked if (ranks == np.arange(len(keys))).all() else None

    def _ranks(self, keys: Sequence[str]) -> Array:
        """Return, for each key of the table, its index in `keys`, or -1 if `keys` does not contain it."""
        place = {key: at for at, key in reversed(list(enumerate(keys)))}
        return np.array([place.get(key, -1) for key in self.keys], np.int64)

    def _shapes(self, picked: Array | slice, ndim: Array) -> dict[int, tuple[int, ...]]:
        odd = np.flatnonzero(ndim != 1)
        if not len(odd):
            return {}
        starts = self._dims_starts[picked][odd].tolist()
        dims = self._dims
        return {
            row: tuple(dims[start : start + n].tolist())
            for row, start, n in zip(odd.tolist(), starts, ndim[odd].tolist(), strict=True)
        }


class FileHead:
    """The header and the table of a file. The constructor sets the canonical offsets in `rows`."""

    def __init__(
        self, task_ids: list[str], fences: list[int], counts: Array, keys: list[str], rows: Array, dims: Array
    ) -> None:
        self._shape = (len(task_ids), len(keys), len(rows), len(dims))
        self._rows, self._dims = rows, dims
        self._fences, self._counts = np.array(fences, _U64), counts.astype(_U32)
        self._task_names, self._key_names = "\n".join(task_ids).encode(), "\n".join(keys).encode()
        names = len(self._task_names) + len(self._key_names)
        table_bytes = 12 * len(task_ids) + 8 * len(dims) + rows.nbytes + names
        rows["offset"], self.file_bytes = _canonical(rows["nbytes"], HEADER_BYTES + table_bytes)

    def pack(self) -> bytes:
        """Return the header and the table as bytes. The rows must already have their checksums."""
        columns = (self._fences, self._dims, self._rows, self._counts)
        table = b"".join([*(column.tobytes() for column in columns), self._task_names, self._key_names])
        names = len(self._task_names), len(self._key_names)
        digest = xxhash.xxh3_64_intdigest(table)
        head = _HEADER.pack(MAGIC, LAYOUT, 0, *self._shape, *names, self.file_bytes, digest, 0)
        return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head)) + table


class BlockLayout:
    """The layout of a file to be written. The offsets are known at once, but the checksums only after the data has been
    written.

    `tasks` contains tuples (task_id, fence, {key: array}), with the arrays in wire form (`proto.tensors.as_wire`).
    Raises WireError, with the cause, if they cannot be written.
    """

    def __init__(self, tasks: Sequence[tuple[str, int, dict[str, Array]]]) -> None:
        if not 0 < len(tasks) <= MAX_TASKS:
            raise WireError(f"block file of {len(tasks)} tasks: must have 1..{MAX_TASKS}; put in parts")
        keys: dict[str, int] = {}
        seen: set[str] = set()
        by_keys: dict[tuple[str, ...], list[int]] = {}
        numbers: list[int] = []
        self.arrays: list[Array] = []
        """The data of the rows, in row order, to be written at `offsets`."""
        for task_id, fence, shards in tasks:
            if check_task_id(task_id) in seen or not shards or not 0 <= fence < 1 << 63:
                raise WireError(
                    f"task {task_id} with fence {fence} and {len(shards)} shards: "
                    "must occur once per file, with fence >= 0 and at least one shard"
                )
            seen.add(task_id)
            names = tuple(shards)
            if names not in by_keys:
                by_keys[names] = [keys.setdefault(check_key(key), len(keys)) for key in names]
            numbers.extend(by_keys[names])
            self.arrays.extend(shards.values())
        if len(numbers) > MAX_ROWS:
            raise WireError(f"block file of {len(numbers)} shards: limit is {MAX_ROWS}; put in parts")
        types = [array.dtype for array in self.arrays]
        codes = {dtype: dtypes.by_numpy(dtype).code for dtype in dict.fromkeys(types)}
        shapes = [array.shape for array in self.arrays]
        rows = self._rows = np.zeros(len(numbers), _ROW)
        rows["key"] = numbers
        rows["dtype"] = [codes[dtype] for dtype in types]
        rows["ndim"] = [len(shape) for shape in shapes]
        rows["nbytes"] = [array.nbytes for array in self.arrays]
        # Only an empty array can have dimensions whose product exceeds its size in bytes.
        sizes, dims = rows["nbytes"], np.array(list(chain.from_iterable(shapes)), _U64)
        if float(sizes.sum(dtype=np.float64)) > MAX_FILE_BYTES or (not sizes.all() and not _dims_ok(rows, dims)):
            raise WireError(f"block file, or the dimensions of a shard, over {MAX_FILE_BYTES} bytes: put in parts")
        self._counts = np.array([len(shards) for _, _, shards in tasks], _U32)
        self._head = FileHead(
            [task[0] for task in tasks], [task[1] for task in tasks], self._counts, list(keys), rows, dims
        )
        self.file_bytes = self._head.file_bytes
        self.offsets: list[int] = rows["offset"].tolist()

    def sums(self, checksums: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the content hashes of all tasks and their sizes in bytes, given the checksum of every row."""
        ends = np.cumsum(self._counts, dtype=np.int64)
        packed = np.array(checksums, _U64).tobytes()
        digests = [
            xxhash.xxh3_64_intdigest(packed[8 * (end - count) : 8 * end])
            for end, count in zip(ends.tolist(), self._counts.tolist(), strict=True)
        ]
        return digests, np.add.reduceat(self._rows["nbytes"], ends - self._counts).tolist()

    def head(self, checksums: Sequence[int]) -> bytes:
        """Return the header and the table as bytes, given the checksum of every row."""
        self._rows["checksum"] = checksums
        return self._head.pack()


def table_bytes(header: Buffer, file_bytes: int) -> int:
    """Check a 64-byte header and return the size of the table after it. Raises WireError."""
    return _unpack(header, file_bytes)[0]


def parse(data: Buffer, file_bytes: int) -> Table:
    """Check and parse the header and table at the start of `data`, which may be longer. Raises WireError only.

    `file_bytes` is the actual size of the file.
    """
    size, (tasks, keys, rows_n, dims_n, task_name_bytes, table_digest) = _unpack(data[:HEADER_BYTES], file_bytes)
    table = data[HEADER_BYTES : HEADER_BYTES + size]
    if len(table) != size:
        raise WireError(f"block file: table of {len(table)} bytes, but the header says {size}")
    if xxhash.xxh3_64_intdigest(table) != table_digest:
        raise WireError("block file: the table's checksum does not match its bytes")
    at = 0

    def take(dtype: np.dtype[Any], count: int) -> Array:
        nonlocal at
        part = np.frombuffer(table, dtype, count, at).copy() if count else np.empty(0, dtype)
        at += dtype.itemsize * count
        return part

    fences, dims, rows, counts = take(_U64, tasks), take(_U64, dims_n), take(_ROW, rows_n), take(_U32, tasks)
    task_ids = _names(table[at : at + task_name_bytes], tasks, "task")
    key_names = _names(table[at + task_name_bytes :], keys, "key")
    check_task_ids(task_ids)
    for key in key_names:
        check_key(key)
    if fences.max() >= 1 << 63:
        raise WireError("block file: a fence does not fit in 63 bits")
    if counts.min() == 0 or int(counts.sum(dtype=np.int64)) != rows_n:
        raise WireError(
            f"block file: row counts add up to {counts.sum(dtype=np.int64)}: must be {rows_n}, with 1 or more per task"
        )
    starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    _check_rows(rows, dims, starts, keys, size, file_bytes)
    return Table(task_ids, fences.tolist(), key_names, file_bytes, rows, dims, starts)


def _unpack(header: Buffer, file_bytes: int) -> tuple[int, tuple[int, int, int, int, int, int]]:
    if len(header) < HEADER_BYTES:
        raise WireError(f"block file of {file_bytes} bytes: no room for its header of {HEADER_BYTES}")
    magic, layout, flags, tasks, keys, rows, dims, task_names, key_names, size, digest, reserved = _HEADER.unpack_from(
        header
    )
    if magic != MAGIC:
        raise WireError(f"block file magic {bytes(magic)!r}: must be {MAGIC!r}")
    if layout != LAYOUT:
        raise WireError(f"block file layout {layout}: this side reads {LAYOUT}; use the release that wrote it")
    if _CHECK.unpack_from(header, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(header[: _HEADER.size]):
        raise WireError("block file: the header's checksum does not match its bytes")
    if flags or reserved:
        raise WireError(f"block file flags {flags:#x}: none are defined in layout {LAYOUT}")
    if size != file_bytes or size > MAX_FILE_BYTES:
        raise WireError(f"block file of {file_bytes} bytes: the header says {size}; the limit is {MAX_FILE_BYTES}")
    if not 0 < tasks <= min(rows, MAX_TASKS) or not rows <= MAX_ROWS or not 0 < keys <= rows or dims > rows * MAX_NDIM:
        raise WireError(
            f"block file of {tasks} tasks, {keys} keys, {rows} rows, {dims} dims: "
            f"limits are {MAX_TASKS} tasks and {MAX_ROWS} rows"
        )
    if max(task_names, key_names) > MAX_NAMES_BYTES:
        raise WireError(f"block file: names of {max(task_names, key_names)} bytes: limit is {MAX_NAMES_BYTES}")
    table = 12 * tasks + 8 * dims + _ROW.itemsize * rows + task_names + key_names
    if HEADER_BYTES + table > file_bytes:
        raise WireError(f"block file of {file_bytes} bytes: its table alone needs {table}")
    return table, (tasks, keys, rows, dims, task_names, digest)


def _names(data: Buffer, count: int, what: str) -> list[str]:
    try:
        names = str(data, "ascii").split("\n")
    except UnicodeDecodeError:
        raise WireError(f"block file: {what} names are not ASCII") from None
    if len(names) != count or len(set(names)) != count:
        raise WireError(f"block file: {len(names)} {what} names, {len(set(names))} distinct; the header says {count}")
    return names


def _check_rows(rows: Array, dims: Array, starts: Array, keys: int, size: int, file_bytes: int) -> None:
    if int(rows["key"].max()) >= keys or rows["reserved"].any():
        raise WireError(f"block file: a row names key {rows['key'].max()} of {keys}, or its reserved field is not 0")
    if not _ITEMSIZES[rows["dtype"]].all():
        raise WireError("block file: a row's dtype code is not in the table")
    if int(rows["ndim"].max()) > MAX_NDIM or int(rows["ndim"].sum(dtype=np.int64)) != len(dims):
        raise WireError(f"block file: ndim over {MAX_NDIM}, or {len(dims)} dims do not belong to the rows")
    if float(rows["nbytes"].sum(dtype=np.float64)) > file_bytes or not _dims_ok(rows, dims):
        raise WireError("block file: a shape does not match its bytes, or the shards exceed the file")
    offsets, end = _canonical(rows["nbytes"], HEADER_BYTES + size)
    if end != file_bytes or not np.array_equal(offsets, rows["offset"]):
        raise WireError(f"block file: offsets are not canonical, or data ends at {end} of {file_bytes}")
    task_of_row = np.repeat(np.arange(len(starts) - 1, dtype=np.int64), np.diff(starts))
    pairs = task_of_row * keys + rows["key"]
    if not (np.diff(pairs) > 0).all() and len(np.unique(pairs)) != len(rows):
        raise WireError("block file: a task has the same key twice")


def _dims_ok(rows: Array, dims: Array) -> bool:
    """Return whether `prod(shape) * itemsize == nbytes` for every row, without integer overflow."""
    if len(dims) == len(rows) and (rows["ndim"] == 1).all():  # the usual case
        if float(dims.max()) > MAX_FILE_BYTES:
            return False
        return bool(np.array_equal(dims.astype(np.int64) * _ITEMSIZES[rows["dtype"]], rows["nbytes"].astype(np.int64)))
    at = np.cumsum(rows["ndim"], dtype=np.int64) - rows["ndim"]
    elements = np.ones(len(rows), np.int64)
    magnitude = np.ones(len(rows), np.float64)
    empty = np.zeros(len(rows), bool)
    for axis in range(int(rows["ndim"].max(initial=0))):
        has = np.flatnonzero(rows["ndim"] > axis)
        dim = dims[at[has] + axis]
        empty[has] |= dim == 0
        dim = np.maximum(dim, 1)
        magnitude[has] *= dim.astype(np.float64)
        if magnitude.max() > MAX_FILE_BYTES:
            return False
        elements[has] *= dim.astype(np.int64)
    elements[empty] = 0
    return bool(np.array_equal(elements * _ITEMSIZES[rows["dtype"]], rows["nbytes"].astype(np.int64)))


def _canonical(sizes: Array, head_bytes: int) -> tuple[Array, int]:
    """Return the canonical offsets of shards with these sizes after `head_bytes`, and the end of the last shard."""
    first = _up(head_bytes)
    padded = (sizes.astype(np.int64) + (ALIGN - 1)) & ~(ALIGN - 1)
    ends = first + np.cumsum(padded)
    offsets = ends - padded
    return offsets.astype(_U64), int(offsets[-1]) + int(sizes[-1])


def _up(offset: int) -> int:
    return (offset + ALIGN - 1) & ~(ALIGN - 1)
