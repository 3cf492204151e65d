"""What hostile stores and readers may send over bulk connections, made of fuzzed bytes: files, messages, whole streams.

Each function raises WireError or gives what holds together; anything else is a defect.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from proto import blockfile, bulk, excerpt
from proto.messages import PutTask, StreamOpened
from proto.tensors import as_wire
from shared.dataplane.stream_arrival import Arrival
from shared.dataplane.stream_memory import Regions

TASKS = [PutTask("train/0/1", 3), PutTask("train/0/2", 1)]
MAX_STREAM_BYTES = 1 << 20
_FILE_BYTES_AT, _DIGEST_AT, _CHECK_AT = 32, 40, 56
_COUNTS = struct.Struct("<IIIIII")
_COUNTS_AT = 8
_OPENED = struct.Struct("<BQIQQ")
REGIONS = Regions()


def sealed_file(data: bytes) -> bytes:
    """With the checksums and the size that belong to these bytes, so that the rules behind them are reached."""
    if len(data) < blockfile.HEADER_BYTES:
        return data
    made = bytearray(data)
    tasks, _, rows, dims, task_names, key_names = _COUNTS.unpack_from(made, _COUNTS_AT)
    end = blockfile.HEADER_BYTES + 12 * tasks + 8 * dims + 32 * rows + task_names + key_names
    struct.pack_into("<Q", made, _FILE_BYTES_AT, len(made))
    struct.pack_into("<Q", made, _DIGEST_AT, xxhash.xxh3_64_intdigest(made[blockfile.HEADER_BYTES : end]))
    struct.pack_into("<Q", made, _CHECK_AT, xxhash.xxh3_64_intdigest(made[:_CHECK_AT]))
    return bytes(made)


def read_file(data: bytes) -> None:
    """A block file, header, table and where its rows lie."""
    table = blockfile.parse(data, len(data))
    for task in range(len(table.task_ids)):
        shards = list(table.shards(task))
        assert sum(shard.nbytes for shard in shards) == table.task_bytes(task)
        assert all(shard.offset + shard.nbytes <= len(data) for shard in shards)
        assert len(table.checksums(task)) == table.count(task) == len(shards)
        table.content_hash(task)
    begins, ends, _ = excerpt.rows_of(table)
    assert all(0 <= begin <= end <= len(data) for begin, end in zip(begins, ends, strict=True))


def read_bulk(data: bytes) -> None:
    """Messages of a bulk connection, for a stream of as many chunks as the first byte says."""
    chunks, at = data[0] if data else 0, 1
    while at < len(data):
        packed = data[at : at + bulk.HEAD_BYTES]
        head = bulk.unpack_head(packed)
        assert bulk.pack_head(head) == packed
        at += bulk.HEAD_BYTES
        payload = data[at : at + head.nbytes]
        at += head.nbytes
        if head.kind == bulk.CREDIT:
            ranges = bulk.unpack_ranges(payload, chunks)
            assert all(0 <= first < first + count <= chunks for first, count in ranges)
            assert bulk.pack_ranges(ranges) == payload


def sealed_bulk(data: bytes) -> bytes:
    """With magic and version where the next head is, as long as heads are in order."""
    made, at = bytearray(data), 1
    while at + bulk.HEAD_BYTES <= len(made):
        made[at : at + 5] = bulk.MAGIC + bytes([bulk.VERSION])
        made[at + 44 : at + 48] = bytes(4)
        at += bulk.HEAD_BYTES + int.from_bytes(made[at + 40 : at + 44], "little")
    return bytes(made)


def receive(data: bytes) -> None:
    """A stream: what the store announces, then the order in which its chunks come, then their bytes.

    By the first byte: the head's checksum is the truth (1), so is the file's (2), the chunks are of the least size (4);
    it covers both tasks (8) and two keys were asked for (16).
    """
    if len(data) < _OPENED.size + 1:
        return
    flags, total_bytes, chunk_bytes, head_bytes, checksum = _OPENED.unpack_from(data)
    order_bytes = data[_OPENED.size]
    order = data[_OPENED.size + 1 :][:order_bytes]
    content = data[_OPENED.size + 1 + order_bytes :]
    if flags & 2:
        content = sealed_file(content)
        total_bytes = len(content)
    if flags & 1:
        checksum = xxhash.xxh3_64_intdigest(content[:head_bytes])
    if flags & 4:
        chunk_bytes = bulk.MIN_CHUNK_BYTES
    covered = TASKS if flags & 8 else TASKS[:1]
    opened = StreamOpened(
        stream_id="0" * 32,
        endpoint="tcp://127.0.0.1:1",
        covered=len(covered),
        total_bytes=total_bytes,
        chunk_bytes=chunk_bytes,
        head_bytes=head_bytes,
        head_checksum=checksum,
        secret="",
    )
    arrival = Arrival(opened, covered, ["a", "b"] if flags & 16 else [], MAX_STREAM_BYTES, REGIONS)
    if arrival.chunks > 255:
        return
    for index in [*order, *range(arrival.chunks)]:
        if index >= arrival.chunks or arrival.has(index):
            continue
        room = arrival.room(index)
        assert len(room) == arrival.size(index)
        part = content[index * chunk_bytes : (index + 1) * chunk_bytes][: len(room)]
        room[:] = part.ljust(len(room), b"\0")
        arrival.check(arrival.arrived(index))
    assert arrival.complete
    assert not arrival.missing()
    arrived = arrival.take()
    found = arrived.first(range(len(covered)), None)
    assert len(found) == len(covered)
    for arrays in found:
        assert all(array.nbytes <= total_bytes for array in arrays.values())


def whole_file(tasks: int = 1) -> tuple[bytes, int]:
    """A block file of the first of `TASKS`, data included, and where its data begin."""
    shards = {"a": as_wire(np.arange(3.0)), "b": as_wire(np.zeros(0, np.int8))}
    layout = blockfile.Layout([(task.task_id, task.fence, shards) for task in TASKS[:tasks]])
    head = layout.head([xxhash.xxh3_64_intdigest(array.tobytes()) for array in layout.arrays])
    file = bytearray(layout.file_bytes)
    file[: len(head)] = head
    for offset, array in zip(layout.offsets, layout.arrays, strict=True):
        file[offset : offset + array.nbytes] = array.tobytes()
    return bytes(file), len(head)


def arrival_seed(flags: int, tasks: int) -> bytes:
    """A stream in order."""
    file, head_bytes = whole_file(tasks)
    checksum = xxhash.xxh3_64_intdigest(file[:head_bytes])
    opened = _OPENED.pack(flags, len(file), bulk.MIN_CHUNK_BYTES, head_bytes, checksum)
    return opened + b"\1\0" + file


def bulk_seed() -> bytes:
    """Two credits, a chunk and a stream that is gone."""
    ranges = bulk.pack_ranges([(0, 3), (5, 1)])
    stream = bytes(range(16))
    messages = [
        bulk.pack_head(bulk.Head(bulk.CREDIT, bulk.FLAG_RESET, 0, 0, 0, stream, len(ranges))) + ranges,
        bulk.pack_head(bulk.Head(bulk.CREDIT, bulk.FLAG_CLOSE, 1, 0, 7, stream, 0)),
        bulk.pack_head(bulk.Head(bulk.CHUNK, 0, 2, 3, 9, stream, 5)) + b"bytes",
        bulk.pack_head(bulk.Head(bulk.GONE, 0, 0, 0, 0, stream, 0)),
    ]
    return b"\x20" + b"".join(messages)
