"""The parts of a stream without sockets: frames, seals, excerpts, arrivals, clears, copies and memory."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterable

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from proto import blockfile, bulk, dtypes, excerpt
from proto.blockfile import Layout, Table, parse
from proto.errors import WireError
from proto.excerpt import Picks
from proto.messages import Cleared, PutTask, StreamOpened
from proto.tensors import Array, as_wire
from services.batch_store import stream_clears
from services.batch_store.stream_clears import ClearLog
from shared.dataplane.stream import Load
from shared.dataplane.stream_arrival import Arrival, Arrived
from shared.dataplane.stream_cache import StreamCache
from shared.dataplane.stream_memory import Lease, Regions
from shared.dataplane.stream_seal import TO_READER, TO_STORE, Opener, Sealer

SECRET, STREAM = bytes(range(32)), b"stream-id-of-16b"
MIB = 1 << 20

Tasks = list[tuple[str, int, dict[str, Array]]]


def block_file(tasks: Tasks) -> tuple[Table, bytes]:
    """A whole block file, as a put writes it."""
    layout = Layout([(task_id, fence, {k: as_wire(a) for k, a in shards.items()}) for task_id, fence, shards in tasks])
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
    """Of (task, fence, [(file, task in it), ...])."""
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
                break  # tasks with fewer keys too
        made.append((f"train/0/{i}", i, shards))
    return made


def test_excerpt_is_the_block_file_that_a_put_of_those_shards_would_write() -> None:
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


def test_excerpt_joins_the_shards_of_a_task_from_several_files_in_the_order_of_the_keys() -> None:
    a, b = np.arange(5, dtype=np.int32), np.arange(9, dtype=np.float64)
    one = block_file([("train/0/1", 1, {"a": a})])
    two = block_file([("train/0/2", 1, {"b": b}), ("train/0/1", 1, {"b": b, "a": a})])
    tables, files = [one[0], two[0]], [one[1], two[1]]
    picks = picked([("train/0/1", 1, [(0, 0), (1, 1)])])
    orders: list[dict[str, Array]] = [{"b": b, "a": a}, {"a": a, "b": b}]
    for shards in orders:
        _, whole = block_file([("train/0/1", 1, shards)])
        assert assembled(tables, files, picks, list(shards), 1 << 40) == whole


def test_excerpt_stops_before_the_task_that_is_too_much_but_takes_the_first() -> None:
    table, _ = block_file([(f"train/0/{i}", 1, {"a": np.zeros(100, np.uint8)}) for i in range(10)])
    picks = picked((f"train/0/{i}", 1, [(0, i)]) for i in range(10))
    covered = []
    for limit in (1, 100, 399, 400, 10_000):
        made = excerpt.make([table], picks, ["a"], limit)
        assert made is not None
        covered.append(made.covered)
    assert covered == [1, 1, 3, 4, 10]


def test_shards_that_are_not_there_make_no_excerpt_and_are_named() -> None:
    table, _ = block_file([("train/0/0", 1, {"a": np.zeros(1)}), ("train/0/1", 1, {"b": np.zeros(1)})])
    picks = picked([("train/0/0", 1, [(0, 0)]), ("train/0/1", 1, [(0, 1)])])
    assert excerpt.make([table], picks, ["a"], 1 << 40) is None
    assert excerpt.missing_keys([table], picks, ["a"]) == ["train/0/1#a"]


# ---- frames and seals


def test_bulk_heads_survive_the_wire_and_anything_else_is_refused() -> None:
    head = bulk.Head(bulk.CREDIT, bulk.FLAG_RESET, 7, 0, 1 << 60, STREAM, bulk.MAX_CREDIT_BYTES)
    packed = bulk.pack_head(head)
    assert bulk.unpack_head(packed) == head
    assert len(packed) == bulk.HEAD_BYTES == 48
    for bad in (
        b"",
        packed[:-1],
        packed + b"x",
        b"RLBS" + packed[4:],
        packed[:4] + b"\1" + packed[5:],
        packed[:-1] + b"\1",
    ):
        with pytest.raises(WireError):
            bulk.unpack_head(bad)
    for kind, flags in ((0, 0), (4, 0), (bulk.CHUNK, bulk.FLAG_CLOSE), (bulk.CREDIT, 8)):
        with pytest.raises(WireError):
            bulk.unpack_head(bulk.pack_head(head._replace(kind=kind, flags=flags, nbytes=0)))
    for kind, limit in (
        (bulk.CREDIT, bulk.MAX_CREDIT_BYTES),
        (bulk.CHUNK, bulk.MAX_CHUNK_BYTES + bulk.TAG_BYTES),
        (bulk.GONE, 0),
    ):
        longest = head._replace(kind=kind, flags=0, nbytes=limit)
        assert bulk.unpack_head(bulk.pack_head(longest)) == longest
        with pytest.raises(WireError, match="limit"):
            bulk.unpack_head(bulk.pack_head(longest._replace(nbytes=limit + 1)))


def test_credit_outside_the_stream_is_refused() -> None:
    assert bulk.unpack_ranges(bulk.pack_ranges([(0, 3), (9, 1)]), 10) == [(0, 3), (9, 1)]
    for ranges in ([(10, 1)], [(0, 11)], [(0, 0)], [((1 << 32) - 1, (1 << 32) - 1)]):
        with pytest.raises(WireError):
            bulk.unpack_ranges(bulk.pack_ranges(ranges), 10)
    with pytest.raises(WireError):
        bulk.unpack_ranges(b"123", 10)
    with pytest.raises(WireError):
        bulk.unpack_ranges(bytes(8) * (bulk.MAX_RANGES + 1), 10)


def sealed(sealer: Sealer, chunk: int, data: bytes) -> tuple[bytes, bytes]:
    room = memoryview(bytearray(len(data) + bulk.TAG_BYTES))
    head, nbytes = sealer.seal(bulk.CHUNK, 0, chunk, data, room)
    assert nbytes == len(room)
    return head, bytes(room)


def opened(opener: Opener, head: bytes, payload: bytes) -> bytes:
    room = bytearray(max(0, len(payload) - bulk.TAG_BYTES))
    opener.open(head, bulk.unpack_head(head), payload, memoryview(room))
    return bytes(room)


def test_sealed_frames_open_in_order_across_new_keys_and_never_share_a_nonce() -> None:
    sealer, opener = Sealer(SECRET, STREAM, TO_READER, 100), Opener(SECRET, STREAM, TO_READER)
    seen, ciphertexts = set(), set()
    for i in range(20):
        head, payload = sealed(sealer, i, b"same" * 10)
        ciphertexts.add(payload[:40])  # the same twice: the same nonce under the same key
        parsed = bulk.unpack_head(head)
        assert (parsed.epoch, parsed.counter) not in seen
        seen.add((parsed.epoch, parsed.counter))
        assert opened(opener, head, payload) == b"same" * 10
    assert len(ciphertexts) == 20
    assert sealer.epoch == 9  # 2 frames of 40 bytes each


def test_forged_replayed_reordered_and_misdirected_frames_do_not_open() -> None:
    sealer = Sealer(SECRET, STREAM, TO_READER)
    frames = [sealed(sealer, i, bytes([i]) * 50) for i in range(4)]
    head, payload = frames[1]
    parsed = bulk.unpack_head(head)
    forged = [
        (head, payload[:-1] + bytes([payload[-1] ^ 1])),
        (head, bytes([payload[0] ^ 1]) + payload[1:]),
        (bulk.pack_head(parsed._replace(chunk=2)), payload),
        (bulk.pack_head(parsed._replace(counter=9)), payload),
        (bulk.pack_head(parsed._replace(epoch=1)), payload),
        (bulk.pack_head(parsed._replace(kind=bulk.CREDIT)), payload),
        (bulk.pack_head(parsed._replace(nbytes=parsed.nbytes - 1)), payload),
        (head, payload[:10]),
    ]
    for bad in forged:
        with pytest.raises(WireError):
            opened(Opener(SECRET, STREAM, TO_READER), *bad)
    for other in (
        Opener(SECRET, STREAM, TO_STORE),
        Opener(SECRET, STREAM[::-1], TO_READER),
        Opener(SECRET[::-1], STREAM, TO_READER),
    ):
        with pytest.raises(WireError):
            opened(other, head, payload)
    opener = Opener(SECRET, STREAM, TO_READER)
    opened(opener, *frames[0])
    opened(opener, *frames[2])
    for old in (frames[0], frames[1], frames[2]):
        with pytest.raises(WireError, match="out of order"):
            opened(opener, *old)
    assert opened(opener, *frames[3]) == bytes([3]) * 50


# ---- arrivals


def announced(data: bytes, table: Table, *, chunk_bytes: int = 1 << 16) -> StreamOpened:
    head_bytes = _head_bytes(data)
    return StreamOpened(
        stream_id="00" * 16,
        endpoint="",
        covered=len(table.task_ids),
        total_bytes=len(data),
        chunk_bytes=chunk_bytes,
        head_bytes=head_bytes,
        head_checksum=xxhash.xxh3_64_intdigest(data[:head_bytes]),
    )


def _head_bytes(data: bytes) -> int:
    return 64 + blockfile.table_bytes(data[:64], len(data))


def named(table: Table) -> list[PutTask]:
    return [PutTask(task_id, fence) for task_id, fence in zip(table.task_ids, table.fences, strict=True)]


def test_chunks_may_arrive_in_any_order_and_nothing_is_given_out_before_the_last() -> None:
    arrays: dict[str, Array] = {
        "a": np.random.default_rng(0).random(1_000_000),
        "b": np.arange(200_000, dtype=np.int32),
    }
    table, data = block_file([("train/0/0", 1, arrays)])
    arrival = Arrival(announced(data, table), named(table), ["a", "b"], MIB, Regions())
    order = np.random.default_rng(1).permutation(arrival.chunks).tolist()
    for index in order:
        with pytest.raises(WireError, match="missing"):
            arrival.take()
        room = arrival.room(index)
        room[:] = data[index * (1 << 16) : index * (1 << 16) + len(room)]
        arrival.check(arrival.arrived(index))
    [got] = arrival.take().first([0], None)
    assert all(np.array_equal(got[key], arrays[key]) for key in arrays)


def fill(arrival: Arrival, data: bytes) -> None:
    for index in range(arrival.chunks):
        room = arrival.room(index)
        room[:] = data[index * (1 << 16) : index * (1 << 16) + len(room)]
        arrival.check(arrival.arrived(index))


def test_one_wrong_bit_anywhere_in_what_was_put_is_found() -> None:
    table, data = block_file([("train/0/0", 1, {"a": np.arange(900_000, dtype=np.int64), "b": np.arange(300)})])
    shards = list(table.shards(0))
    spots = [3, 70, shards[0].offset, shards[0].offset + 5_000_000, shards[0].offset + shards[0].nbytes - 1]
    for spot in [*spots, shards[1].offset + 9, len(data) - 1]:
        wrong = bytearray(data)
        wrong[spot] ^= 4
        arrival = Arrival(announced(data, table), named(table), ["a", "b"], MIB, Regions())
        with pytest.raises(WireError):
            fill(arrival, bytes(wrong))


def test_stream_of_something_else_than_was_asked_for_is_refused() -> None:
    table, data = block_file([("train/0/0", 1, {"a": np.zeros(10), "b": np.zeros(10)})])
    for tasks, keys in (
        ([PutTask("train/0/1", 1)], ["a", "b"]),
        ([PutTask("train/0/0", 2)], []),
        (named(table), ["a"]),
    ):
        arrival = Arrival(announced(data, table), tasks, keys, MIB, Regions())
        arrival.room(0)[:] = data
        here = arrival.arrived(0)
        for _ in range(2):  # however often it is asked
            with pytest.raises(WireError):
                arrival.check(here)
        with pytest.raises(WireError):
            arrival.take()


def test_announced_sizes_are_checked_before_anything_is_allocated() -> None:
    table, data = block_file([(f"train/0/{i}", 1, {"a": np.zeros(10)}) for i in range(2)])
    good = announced(data, table)
    for change in (
        {"chunk_bytes": 1},
        {"chunk_bytes": 1 << 30},
        {"total_bytes": 1 << 50},
        {"total_bytes": 1 << 40},
        {"head_bytes": 0},
        {"head_bytes": 1 << 40},
    ):
        fields = {name: getattr(good, name) for name in good.__struct_fields__} | change
        with pytest.raises(WireError):
            Arrival(StreamOpened(**fields), named(table), ["a"], MIB, Regions())


# ---- memory


def test_region_is_used_again_only_after_its_last_array_went() -> None:
    regions = Regions()
    lease = Lease(regions, 3 * MIB)
    first = lease.region
    whole = lease.array()
    array = whole[5:]
    del lease, whole
    assert Lease(regions, 3 * MIB).region is not first
    del array
    assert first in {regions.take(3 * MIB) for _ in range(2)}


def arrived(tasks: dict[str, dict[str, Array]], regions: Regions) -> Arrived:
    table, data = block_file([(task_id, 1, shards) for task_id, shards in tasks.items()])
    arrival = Arrival(announced(data, table), named(table), [], MIB, regions)
    fill(arrival, data)
    return arrival.take()


RNG = np.random.default_rng(5)
TASKS: dict[str, dict[str, Array]] = {
    f"train/0/{i}": {
        "a": RNG.integers(0, 99, size, np.int32),
        "b": RNG.random((2, size)),
        "c": RNG.integers(0, 9, size + 3, np.uint8),
    }
    for i, size in enumerate((5, 0, 17, 1000, 3))
}


@given(order=st.lists(st.integers(0, len(TASKS) - 1), min_size=1, max_size=8), keys=st.sampled_from([None, "ba", "c"]))
def test_copy_of_any_tasks_in_any_order_is_what_arrived(order: list[int], keys: str | None) -> None:
    came = arrived(TASKS, Regions())
    found = came.copies(order, keys)
    for arrays, at in zip(found, order, strict=True):
        expected = TASKS[f"train/0/{at}"]
        assert list(arrays) == list(keys or expected)
        for key, array in arrays.items():
            assert array.shape == expected[key].shape
            assert array.tobytes() == expected[key].tobytes()


def test_whoever_brought_it_may_write_to_it_once_others_have_their_copy() -> None:
    regions = Regions()
    came = arrived(TASKS, regions)
    [mine] = came.first([3], None)
    early = came.copies([3], None)[0]
    came.leave_copy()
    came.hand_out()
    mine["a"][:] = -1
    late = came.copies([3], None)[0]
    late["b"][:] = -1
    for found, changed in ((early, None), (late, "b"), (came.copies([3], None)[0], None)):
        for key, array in TASKS["train/0/3"].items():
            assert np.array_equal(found[key], array) == (key != changed)


def test_what_was_handed_out_without_a_copy_is_never_copied_from() -> None:
    came = arrived(TASKS, Regions())
    [mine] = came.first([0], None)
    came.hand_out()
    mine["a"][:] = -1
    with pytest.raises(RuntimeError, match="no copy was left"):
        came.copies([0], None)


def test_idle_memory_makes_room_for_new_memory_and_can_be_given_back() -> None:
    regions = Regions()
    for lease in [Lease(regions, 4 * MIB) for _ in range(5)]:
        lease.region.view[0] = 1
    del lease
    assert regions.idle_bytes == 20 * MIB
    large = Lease(regions, 10 * MIB)  # none of those will do: three of them go
    assert regions.idle_bytes == 8 * MIB
    regions.close()
    del large
    assert regions.idle_bytes == 0


def test_memory_idle_for_long_is_given_back_and_what_is_in_use_is_watched() -> None:
    regions = Regions()
    lease, used = Lease(regions, 4 * MIB), Lease(regions, 6 * MIB)
    del lease
    gc.collect()
    assert regions.trim(time.monotonic() - 60)
    assert regions.idle_bytes == 4 * MIB
    assert regions.trim(time.monotonic())  # the other one is in use
    assert regions.idle_bytes == 0
    del used
    gc.collect()
    assert regions.idle_bytes == 6 * MIB
    assert not regions.trim(time.monotonic())
    assert regions.idle_bytes == 0


# ---- clears


def test_clear_log_tells_what_came_after_and_admits_what_it_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_clears, "PAGE", 3)

    async def main() -> None:
        log = ClearLog(5)
        assert not log.since(0, 0).whole
        assert log.since(5, 0).tasks == []
        tasks = [PutTask(f"train/0/{i}", 1) for i in range(8)]
        log.add(tasks)
        first = log.since(5, 2)
        assert (first.tasks, first.more, first.serial) == (tasks[2:5], True, 5)
        assert log.since(5, 5).tasks == tasks[5:]
        assert not log.since(5, 5).more
        assert not log.since(5, 99).whole
        assert not log.since(4, 2).whole
        log.add(PutTask("train/1/0", 1) for _ in range(stream_clears.KEPT))
        assert not log.since(5, 2).whole

    asyncio.run(main())


def test_long_poll_ends_at_the_next_clear_or_at_its_time() -> None:
    async def main() -> None:
        log = ClearLog(5)
        loop = asyncio.get_running_loop()
        assert (await log.later(5, 0, loop.time() + 0.05)).tasks == []
        waiting = asyncio.create_task(log.later(5, 0, loop.time() + 30))
        await asyncio.sleep(0)
        log.add([PutTask("train/0/1", 1)])
        assert (await asyncio.wait_for(waiting, 5)).tasks == [PutTask("train/0/1", 1)]

    asyncio.run(main())


def test_older_answer_about_clears_that_comes_late_drops_nothing() -> None:
    cache = StreamCache(MIB)
    cache.apply("s", Cleared(log=5, serial=10, whole=False))
    cache.apply("s", Cleared(log=5, serial=12, whole=True, tasks=[PutTask("train/0/1", 1)]))
    cache.apply("s", Cleared(log=5, serial=9, whole=False))
    assert cache.store("s").serial == 12


# ---- what is here or comes


def loaded(cache: StreamCache, tasks: list[PutTask], *parts: list[PutTask]) -> tuple[Load, list[Arrived]]:
    """A load of `tasks` of which those parts have come."""
    load = Load("s", tasks, ("a",), lambda arrived, keys, kept: None)
    cache.expect("s", tasks, ("a",), load)
    came = []
    for part in parts:
        came.append(arrived({task.task_id: {"a": np.zeros(3)} for task in part}, Regions()))
        cache.keep("s", part, ("a",), load, came[-1])
    return load, came


def tasks_named(*indices: int, fence: int = 1) -> list[PutTask]:
    return [PutTask(f"train/0/{index}", fence) for index in indices]


def test_load_that_does_not_fit_the_cache_keeps_what_came_first_and_pushes_others_out() -> None:
    cache = StreamCache(2 * MIB)
    _, [old] = loaded(cache, tasks_named(9), tasks_named(9))
    tasks = tasks_named(0, 1, 2)
    load, came = loaded(cache, tasks, *([task] for task in tasks))
    cache.forget("s", tasks, load)
    assert cache.nbytes == 2 * MIB
    found = cache.absent("s", [*tasks, *tasks_named(9)], ("a",))
    assert found == [None, None, ("a",), ("a",)]
    assert [where for [(where, _)] in cache.sources("s", tasks[:2], ("a",))] == came[:2]
    assert old not in came


def test_clears_and_loads_of_one_fence_leave_another_alone() -> None:
    cache = StreamCache(8 * MIB)
    cache.apply("s", Cleared(log=5, serial=1, whole=False))
    first, second = tasks_named(0, 1), tasks_named(0, 1, fence=2)
    done, [kept] = loaded(cache, first, first)
    cache.forget("s", first, done)
    pending, _ = loaded(cache, second)
    assert [where for [(where, _)] in cache.sources("s", [*first, *second], ("a",))] == [kept, kept, pending, pending]
    cache.apply("s", Cleared(log=5, serial=2, whole=True, tasks=first[:1]))
    assert cache.absent("s", first, ("a",)) == [("a",), None]
    assert cache.absent("s", second, ("a",)) == [None, None]
    cache.forget("s", second, pending)
    assert cache.absent("s", [*second, first[1]], ("a",)) == [("a",), ("a",), None]
    cache.apply("s", Cleared(log=5, serial=3, whole=True, tasks=second[1:]))  # a lower fence goes with it
    assert cache.nbytes == 0
    assert cache.absent("s", first, ("a",)) is None
