"""Checks files, messages and streams made of fuzzed bytes, such as hostile stores and readers might send over bulk
connections.

Each function raises WireError or returns a consistent result; anything else is a defect.
"""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from proto import blockfile, bulk
from proto.messages import PutTask, StreamOpened
from proto.tensors import as_wire
from shared.dataplane.reused_pages import Regions
from shared.dataplane.stream_arrival import Arrival

TASKS = [PutTask("train/0/1", 3), PutTask("train/0/2", 1)]
MAX_STREAM_BYTES = 1 << 20
_FILE_BYTES_AT, _DIGEST_AT, _CHECK_AT = 32, 40, 56
_COUNTS = struct.Struct("<IIIIII")
_COUNTS_AT = 8
_OPENED = struct.Struct("<BQQQ")
REGIONS = Regions()


def sealed_file(data: bytes) -> bytes:
    """Return the file with its checksums and size corrected, so that the later checks are reached."""
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
    """Check a block file: its header, its table and the positions of its rows."""
    table = blockfile.parse(data, len(data))
    for task in range(len(table.task_ids)):
        shards = list(table.shards(task))
        assert all(shard.offset + shard.nbytes <= len(data) for shard in shards)
        assert len(table.checksums(task)) == table.count(task) == len(shards)
    begins, ends, _ = table.placed()
    assert all(0 <= begin <= end <= len(data) for begin, end in zip(begins, ends, strict=True))


def read_bulk(data: bytes) -> None:
    """Check messages from a bulk connection. The first byte selects whether they are sealed."""
    tag_bytes, at = bulk.TAG_BYTES * (data[:1] == b"\1"), 1
    while at < len(data):
        packed = data[at : at + bulk.HEAD_BYTES]
        head = bulk.unpack_head(packed)
        assert bulk.pack_head(head) == packed
        assert head.nbytes <= bulk.MAX_RANGE_BYTES
        at += _size(head.kind, head.nbytes) + tag_bytes


def _size(kind: int, nbytes: int) -> int:
    behind = {bulk.Kind.HELLO: bulk.LINE_ID_BYTES, bulk.Kind.DATA: nbytes}
    return bulk.HEAD_BYTES + behind.get(kind, 0)  # type: ignore[call-overload,no-any-return]


def sealed_bulk(data: bytes) -> bytes:
    """Return the data with magic and version set in every head, up to the first invalid head."""
    made, at = bytearray(data), 1
    while at + bulk.HEAD_BYTES <= len(made):
        made[at : at + 5] = bulk.MAGIC + bytes([bulk.VERSION])
        made[at + 6 : at + 8] = bytes(2)
        at += _size(made[at + 5], int.from_bytes(made[at + 12 : at + 16], "little"))
    return bytes(made)


def receive(data: bytes) -> None:
    """Check a stream: the store's announcement, the lengths of the first ranges, and then the bytes.

    Bits of the first byte select whether the head has a valid checksum (1), the file has valid checksums (2), both
    tasks are covered (8), and two keys were requested (16).
    """
    if len(data) < _OPENED.size + 1:
        return
    flags, total_bytes, head_bytes, checksum = _OPENED.unpack_from(data)
    length_bytes = data[_OPENED.size]
    lengths = data[_OPENED.size + 1 :][:length_bytes]
    content = data[_OPENED.size + 1 + length_bytes :]
    if flags & 2:
        content = sealed_file(content)
        total_bytes = len(content)
    if flags & 1:
        checksum = xxhash.xxh3_64_intdigest(content[:head_bytes])
    covered = TASKS if flags & 8 else TASKS[:1]
    opened = StreamOpened(
        stream=1, covered=len(covered), total_bytes=total_bytes, head_bytes=head_bytes, head_checksum=checksum
    )
    arrival = Arrival(opened, covered, ["a", "b"] if flags & 16 else [], MAX_STREAM_BYTES, REGIONS)
    if total_bytes > MAX_STREAM_BYTES:
        return
    for length in [*lengths, total_bytes]:
        at = arrival.received
        room = arrival.room(min(length, total_bytes - at))
        room[:] = content[at : at + len(room)].ljust(len(room), b"\0")
        arrival.received += len(room)
        arrival.check(arrival.received)
    assert arrival.received == total_bytes
    found = arrival.arrays()
    assert len(found) == len(covered)
    for arrays in found:
        assert all(array.nbytes <= total_bytes for array in arrays.values())


def whole_file(tasks: int = 1) -> tuple[bytes, int]:
    """Return a block file that holds the first `tasks` of `TASKS`, and the offset of its data."""
    shards = {"a": as_wire(np.arange(3.0)), "b": as_wire(np.zeros(0, np.int8))}
    layout = blockfile.BlockLayout([(task.task_id, task.fence, shards) for task in TASKS[:tasks]])
    head = layout.head([xxhash.xxh3_64_intdigest(array.tobytes()) for array in layout.arrays])
    file = bytearray(layout.file_bytes)
    file[: len(head)] = head
    for offset, array in zip(layout.offsets, layout.arrays, strict=True):
        file[offset : offset + array.nbytes] = array.tobytes()
    return bytes(file), len(head)


def arrival_seed(flags: int, tasks: int) -> bytes:
    """Return a valid stream."""
    file, head_bytes = whole_file(tasks)
    checksum = xxhash.xxh3_64_intdigest(file[:head_bytes])
    opened = _OPENED.pack(flags, len(file), head_bytes, checksum)
    return opened + b"\1\0" + file


def bulk_seed() -> bytes:
    """Return the messages on an unencrypted line: hello, a requested range, its bytes, and the end of the stream."""
    messages = [
        bulk.pack_head(bulk.Head(bulk.Kind.HELLO)) + bytes(range(16)),
        bulk.pack_head(bulk.Head(bulk.Kind.READ, 3, 5, 7)),
        bulk.pack_head(bulk.Head(bulk.Kind.DATA, 3, 5, 7)) + b"bytes",
        bulk.pack_head(bulk.Head(bulk.Kind.CLOSE, 3)),
    ]
    return b"\0" + b"".join(messages)
