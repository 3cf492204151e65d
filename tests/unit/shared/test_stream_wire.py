"""Tests streams without sockets: messages, seals, excerpts, arrivals and memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import numpy as np
import pytest
import xxhash

from proto import blockfile, bulk, dtypes, excerpt
from proto.blockfile import BlockLayout, Table, parse
from proto.bulk import Head, Kind
from proto.errors import WireError
from proto.excerpt import Picks
from proto.messages import PutTask, StreamOpened
from proto.tensors import Array, as_wire
from shared.dataplane.bulk_connection import TO_READER, TO_STORE, Seal
from shared.dataplane.reused_pages import Regions
from shared.dataplane.stream_arrival import Arrival

SECRET, LINE = bytes(range(32)), b"line-id-16-bytes"
MIB = 1 << 20

Tasks = list[tuple[str, int, dict[str, Array]]]


def block_file(tasks: Tasks) -> tuple[Table, bytes]:
    """Return a complete block file as a put writes it."""
    layout = BlockLayout(
        [(task_id, fence, {k: as_wire(a) for k, a in shards.items()}) for task_id, fence, shards in tasks]
    )
    head = layout.head([xxhash.xxh3_64_intdigest(array.tobytes()) for array in layout.arrays])
    data = bytearray(layout.file_bytes)
    data[: len(head)] = head
    for array, offset in zip(layout.arrays, layout.offsets, strict=True):
        data[offset : offset + array.nbytes] = array.tobytes()
    return parse(bytes(data), len(data)), bytes(data)


def assembled(tables: list[Table], files: list[bytes], picks: Picks, keys: list[str], max_bytes: int) -> bytes:
    made = excerpt.make(tables, picks, keys, max_bytes)
    assert made is not None
    data = bytearray(made.total_bytes)
    data[: len(made.head)] = made.head
    for number, source, target, length in zip(made.files, made.sources, made.targets, made.lengths, strict=True):
        data[target : target + length] = files[number][source : source + length]
    return bytes(data)


def picked(wanted: Iterable[tuple[str, int, list[tuple[int, int]]]]) -> Picks:
    """Return the picks for entries of the form (task, fence, [(file, the task's number in it), ...])."""
    tasks = list(wanted)
    places = [(file, number, at) for at, (_, _, each) in enumerate(tasks) for file, number in each]
    files, numbers, owners = ([place[column] for place in places] for column in range(3))
    return Picks([task_id for task_id, _, _ in tasks], [fence for _, fence, _ in tasks], files, numbers, owners)


def tasks_of(count: int, seed: int = 0) -> Tasks:
    rng = np.random.default_rng(seed)
    kinds = [row.numpy for row in dtypes.TABLE]
    made: Tasks = []
    for i in range(count):
        shards = {}
        for j, key in enumerate("abc"):
            shape = tuple(rng.integers(0, 5, rng.integers(0, 4)).tolist())
            kind = kinds[int(rng.integers(len(kinds)))]
            raw = rng.integers(0, 2, int(np.prod(shape)) * kind.itemsize, np.uint8)
            shards[key] = raw.view(kind).reshape(shape)
            if j == i % 3:
                break  # Some tasks have fewer keys.
        made.append((f"train/0/{i}", i, shards))
    return made


def test_excerpt_equals_the_block_file_that_a_put_of_its_shards_writes() -> None:
    first, second = tasks_of(7, 1), [(f"train/1/{i}", 3, shards) for i, (_, _, shards) in enumerate(tasks_of(6, 2))]
    (one, one_bytes), (two, two_bytes) = block_file(first), block_file(second)
    everything = [(0, i, task) for i, task in enumerate(first)] + [(1, i, task) for i, task in enumerate(second)]
    for order in ([0], [12, 3, 4, 5, 1], list(range(13)), [8, 0, 9, 1], [2, 5, 9, 12]):
        chosen = [everything[at] for at in order]
        picks = picked((task[0], task[1], [(number, i)]) for number, i, task in chosen)
        _, whole = block_file([task for _, _, task in chosen])
        assert assembled([one, two], [one_bytes, two_bytes], picks, [], 1 << 40) == whole
        _, some = block_file([(task_id, fence, {"a": shards["a"]}) for _, _, (task_id, fence, shards) in chosen])
        assert assembled([one, two], [one_bytes, two_bytes], picks, ["a"], 1 << 40) == some


def test_excerpt_joins_the_shards_of_a_task_from_several_files_in_key_order() -> None:
    a, b = np.arange(5, dtype=np.int32), np.arange(9, dtype=np.float64)
    one = block_file([("train/0/1", 1, {"a": a})])
    two = block_file([("train/0/2", 1, {"b": b}), ("train/0/1", 1, {"b": b, "a": a})])
    tables, files = [one[0], two[0]], [one[1], two[1]]
    picks = picked([("train/0/1", 1, [(0, 0), (1, 1)])])
    orders: list[dict[str, Array]] = [{"b": b, "a": a}, {"a": a, "b": b}]
    for shards in orders:
        _, whole = block_file([("train/0/1", 1, shards)])
        assert assembled(tables, files, picks, list(shards), 1 << 40) == whole


def test_excerpt_stops_before_its_limit_but_always_includes_the_first_task() -> None:
    table, _ = block_file([(f"train/0/{i}", 1, {"a": np.zeros(100, np.uint8)}) for i in range(10)])
    picks = picked((f"train/0/{i}", 1, [(0, i)]) for i in range(10))
    covered = []
    for limit in (1, 100, 399, 400, 10_000):
        made = excerpt.make([table], picks, ["a"], limit)
        assert made is not None
        covered.append(made.covered)
    assert covered == [1, 1, 3, 4, 10]


def test_request_for_missing_shards_gives_no_excerpt_and_names_them() -> None:
    table, _ = block_file([("train/0/0", 1, {"a": np.zeros(1)}), ("train/0/1", 1, {"b": np.zeros(1)})])
    picks = picked([("train/0/0", 1, [(0, 0)]), ("train/0/1", 1, [(0, 1)])])
    assert excerpt.make([table], picks, ["a"], 1 << 40) is None
    assert excerpt.missing_keys([table], picks, ["a"]) == ["train/0/1#a"]


# ---- messages and seals


def test_bulk_heads_round_trip_and_anything_else_is_refused() -> None:
    longest = Head(Kind.READ, (1 << 32) - 1, bulk.MAX_RANGE_BYTES, (1 << 64) - 1)
    for head in (longest, Head(Kind.DATA, 1, 1, 0), Head(Kind.HELLO), Head(Kind.CLOSE, 7)):
        assert bulk.unpack_head(bulk.pack_head(head)) == head
    packed = bulk.pack_head(longest)
    assert len(packed) == bulk.HEAD_BYTES == 24
    for bad in (
        b"",
        packed[:-1],
        packed + b"x",
        b"RLBS" + packed[4:],
        packed[:4] + b"\2" + packed[5:],
        packed[:5] + b"\0" + packed[6:],
        packed[:5] + b"\5" + packed[6:],
        packed[:6] + b"\1" + packed[7:],
    ):
        with pytest.raises(WireError):
            bulk.unpack_head(bad)
    for head in (
        longest._replace(nbytes=bulk.MAX_RANGE_BYTES + 1),
        longest._replace(kind=Kind.DATA, nbytes=0),
        longest._replace(stream=0),
        Head(Kind.HELLO, 1),
        Head(Kind.HELLO, 0, 1),
        Head(Kind.CLOSE, 0),
        Head(Kind.CLOSE, 1, 1),
        Head(Kind.CLOSE, 1, 0, 1),
    ):
        with pytest.raises(WireError):
            bulk.unpack_head(bulk.pack_head(head))


def sealed(sealer: Seal, offset: int, data: bytes) -> tuple[bytes, bytes]:
    room = memoryview(bytearray(len(data) + bulk.TAG_BYTES))
    head = bulk.pack_head(Head(Kind.DATA, 1, len(data), offset))
    assert sealer.seal(head, data, room) == len(room)
    return head, bytes(room)


def opened(opener: Seal, head: bytes, payload: bytes) -> bytes:
    room = bytearray(max(0, len(payload) - bulk.TAG_BYTES))
    opener.open(head, payload, memoryview(room))
    return bytes(room)


def test_sealed_messages_open_in_order_and_never_share_a_nonce() -> None:
    sealer, opener = Seal(SECRET, LINE, TO_READER), Seal(SECRET, LINE, TO_READER)
    seen = set()
    for _ in range(20):
        head, payload = sealed(sealer, 0, b"same" * 10)
        assert payload not in seen
        seen.add(payload)
        assert opened(opener, head, payload) == b"same" * 10
    assert sealer.nbytes == opener.nbytes == 20 * 40
    tag = sealer.tag(head)
    opener.open(head, tag, memoryview(bytearray()))
    assert sealer.tag(head) != tag


def test_forged_replayed_reordered_and_misdirected_messages_do_not_open() -> None:
    sealer = Seal(SECRET, LINE, TO_READER)
    messages = [sealed(sealer, i, bytes([i]) * 50) for i in range(3)]
    head, payload = messages[0]
    parsed = bulk.unpack_head(head)
    forged = [
        (head, payload[:-1] + bytes([payload[-1] ^ 1])),
        (head, bytes([payload[0] ^ 1]) + payload[1:]),
        (bulk.pack_head(parsed._replace(offset=2)), payload),
        (bulk.pack_head(parsed._replace(stream=9)), payload),
        (bulk.pack_head(parsed._replace(kind=Kind.READ)), payload),
        (bulk.pack_head(parsed._replace(nbytes=parsed.nbytes - 1)), payload),
        (head, payload[:10]),
        messages[1],
    ]
    for bad in forged:
        with pytest.raises(WireError):
            opened(Seal(SECRET, LINE, TO_READER), *bad)
    for other in (
        Seal(SECRET, LINE, TO_STORE),
        Seal(SECRET, LINE[::-1], TO_READER),
        Seal(SECRET[::-1], LINE, TO_READER),
    ):
        with pytest.raises(WireError):
            opened(other, head, payload)
    opener = Seal(SECRET, LINE, TO_READER)
    opened(opener, *messages[0])
    with pytest.raises(WireError, match="sealed sequence"):
        opened(opener, *messages[0])


# ---- arrivals


RANGE = 1 << 16


def announced(data: bytes, table: Table) -> StreamOpened:
    head_bytes = _head_bytes(data)
    return StreamOpened(
        stream=1,
        covered=len(table.task_ids),
        total_bytes=len(data),
        head_bytes=head_bytes,
        head_checksum=xxhash.xxh3_64_intdigest(data[:head_bytes]),
    )


def _head_bytes(data: bytes) -> int:
    return 64 + blockfile.table_bytes(data[:64], len(data))


def named(table: Table) -> list[PutTask]:
    return [PutTask(task_id, fence) for task_id, fence in zip(table.task_ids, table.fences, strict=True)]


def test_arrays_are_withheld_until_the_last_byte_has_arrived_and_is_checked() -> None:
    arrays: dict[str, Array] = {
        "a": np.random.default_rng(0).random(1_000_000),
        "b": np.arange(200_000, dtype=np.int32),
    }
    table, data = block_file([("train/0/0", 1, arrays)])
    arrival = Arrival(announced(data, table), named(table), ["a", "b"], MIB, Regions())
    for at in range(0, len(data), RANGE):
        with pytest.raises(WireError, match="not all were checked"):
            arrival.arrays()
        receive(arrival, data[at : at + RANGE])
        with pytest.raises(WireError, match="not all were checked"):
            arrival.arrays()
        arrival.check(arrival.received)
    [got] = arrival.arrays()
    assert all(np.array_equal(got[key], arrays[key]) for key in arrays)


def receive(arrival: Arrival, part: bytes) -> None:
    arrival.room(len(part))[:] = part
    arrival.received += len(part)


def fill(arrival: Arrival, data: bytes) -> None:
    for at in range(0, len(data), RANGE):
        receive(arrival, data[at : at + RANGE])
        arrival.check(arrival.received)


def test_one_wrong_bit_anywhere_is_detected() -> None:
    table, data = block_file([("train/0/0", 1, {"a": np.arange(900_000, dtype=np.int64), "b": np.arange(300)})])
    shards = list(table.shards(0))
    spots = [3, 70, shards[0].offset, shards[0].offset + 5_000_000, shards[0].offset + shards[0].nbytes - 1]
    for spot in [*spots, shards[1].offset + 9, len(data) - 1]:
        wrong = bytearray(data)
        wrong[spot] ^= 4
        arrival = Arrival(announced(data, table), named(table), ["a", "b"], MIB, Regions())
        with pytest.raises(WireError):
            fill(arrival, bytes(wrong))


def test_stream_of_shards_other_than_those_requested_is_refused() -> None:
    table, data = block_file([("train/0/0", 1, {"a": np.zeros(10), "b": np.zeros(10)})])
    for tasks, keys in (
        ([PutTask("train/0/1", 1)], ["a", "b"]),
        ([PutTask("train/0/0", 2)], []),
        (named(table), ["a"]),
    ):
        arrival = Arrival(announced(data, table), tasks, keys, MIB, Regions())
        receive(arrival, data)
        for _ in range(2):  # The second request is refused, too.
            with pytest.raises(WireError):
                arrival.check(arrival.received)
        with pytest.raises(WireError):
            arrival.arrays()


def test_announced_sizes_are_checked_before_anything_is_allocated() -> None:
    table, data = block_file([(f"train/0/{i}", 1, {"a": np.zeros(10)}) for i in range(2)])
    good = announced(data, table)
    for change in (
        {"total_bytes": 1 << 50},
        {"total_bytes": 1 << 40},
        {"head_bytes": 0},
        {"head_bytes": 1 << 40},
    ):
        fields = {name: getattr(good, name) for name in good.__struct_fields__} | change
        with pytest.raises(WireError):
            Arrival(StreamOpened(**fields), named(table), ["a"], MIB, Regions())


# ---- memory


def test_region_is_reused_only_after_its_last_array_is_freed() -> None:
    regions = Regions()
    whole = regions.take(3 * MIB)
    first = whole.ctypes.data
    array = whole[5:]
    del whole
    assert regions.take(3 * MIB).ctypes.data != first
    del array
    assert first in {each.ctypes.data for each in [regions.take(3 * MIB) for _ in range(2)]}


def test_idle_memory_makes_room_for_new_memory_and_can_be_returned() -> None:
    regions = Regions()
    for array in [regions.take(4 * MIB) for _ in range(5)]:
        array[0] = 1
    del array
    assert regions.idle_bytes == 20 * MIB
    large = regions.take(10 * MIB)  # None of the regions is large enough, so three of them are freed.
    assert regions.idle_bytes == 8 * MIB
    regions.close()
    del large
    assert regions.idle_bytes == 0


def test_memory_idle_for_a_long_time_is_returned_and_memory_in_use_is_tracked() -> None:
    regions = Regions()
    array, used = regions.take(4 * MIB), regions.take(6 * MIB)
    del array
    gc.collect()
    assert regions.trim(time.monotonic() - 60)
    assert regions.idle_bytes == 4 * MIB
    assert regions.trim(time.monotonic())  # The other region is in use.
    assert regions.idle_bytes == 0
    del used
    gc.collect()
    assert regions.idle_bytes == 6 * MIB
    assert not regions.trim(time.monotonic())
    assert regions.idle_bytes == 0
